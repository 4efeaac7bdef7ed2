"""How often the driver looks for new files."""

from __future__ import annotations

from datetime import timedelta

from cutwater.config import parse_duration_ms
from cutwater.errors import ConfigError

SHORTEST_MS = 20.0
LONGEST_MS = 1000.0
COSTLY_MS = 2000.0
"""Between two looks at a bucket."""
_SHARE = 50
"""Looking takes at most one part in so many of a processor, unless that made it rarer than ``LONGEST_MS``."""


class LookInterval:
    """The time between two looks: what was asked for, or else as short as looking is cheap.

    Args:
        given: milliseconds or a duration such as ``"1s"``; None: by what a look costs.
        costly: each look is paid for.

    Raises:
        ConfigError: it is zero, or no duration.

    >>> interval = LookInterval(None)
    >>> interval.interval_ms
    20.0
    >>> interval.took(0.003); interval.interval_ms
    150.0
    >>> interval.took(9.0); interval.interval_ms
    1000.0
    """

    def __init__(self, given: float | str | timedelta | None, *, costly: bool = False) -> None:
        self._shortest_ms = COSTLY_MS if costly else SHORTEST_MS
        self.interval_ms = self._shortest_ms
        self._given = given is not None
        if given is not None:
            self.interval_ms = parse_duration_ms(given, name="discover_interval_ms")
            if self.interval_ms == 0:
                raise ConfigError("files: discover_interval_ms must be above 0")

    def took(self, seconds: float) -> None:
        """A look took so long."""
        if not self._given:
            self.interval_ms = max(self._shortest_ms, min(LONGEST_MS, seconds * 1000 * _SHARE))

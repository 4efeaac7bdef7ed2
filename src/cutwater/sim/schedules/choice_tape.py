"""All chance of a schedule: one tape of bytes.

A seed makes a random tape.  A script brings its own: what it does not name is 0, and 0 is always the plainest choice
(the first candidate, the shortest latency).  So a failing tape is made simpler by writing zeros into it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

_CHUNK = 4096


class ChoiceTape:
    """A tape, read from the beginning.

    Args:
        seed: of the random tape; ``None``: the tape is ``values`` and otherwise zeros.
        values: number of the draw -> byte.

    >>> draws = ChoiceTape(None, {1: 7})
    >>> draws.below(4), draws.below(4), draws.below(4), draws.used
    (0, 3, 0, 3)
    """

    __slots__ = ("_rng", "_tape", "used")

    def __init__(self, seed: int | None, values: Mapping[int, int] | None = None) -> None:
        self._rng = None if seed is None else random.Random(seed)
        if self._rng is not None:
            self._tape = self._rng.randbytes(_CHUNK)
        else:
            tape = bytearray(max(values, default=-1) + 1 if values else 0)
            for place, value in (values or {}).items():
                tape[place] = value
            self._tape = bytes(tape)
        self.used = 0
        """ChoiceTape so far."""

    def below(self, count: int) -> int:
        """A number from 0 to ``count - 1``; ``count`` is at most 256."""
        place = self.used
        self.used = place + 1
        try:
            return self._tape[place] % count
        except IndexError:
            return self._beyond(place) % count

    def chance(self, of_256: int) -> bool:
        """True ``of_256`` times out of 256; never for a draw of 0."""
        return self.below(256) >= 256 - of_256

    def values(self) -> dict[int, int]:
        """The draws that were not 0, as a script names them."""
        return {place: value for place, value in enumerate(self._tape[: self.used]) if value}

    def _beyond(self, place: int) -> int:
        if self._rng is None:
            return 0
        self._tape += self._rng.randbytes(_CHUNK)
        return self._tape[place]

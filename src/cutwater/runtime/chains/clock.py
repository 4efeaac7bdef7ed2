"""Processing time as the operators of a worker see it."""

from __future__ import annotations

import time


class ProcessingClock:
    """The wall clock, except that it never goes back: not when somebody sets it, not over a restore (W2).

    Args:
        floor_ms: the highest processing time that the restored snapshot holds, milliseconds since the epoch.

    >>> clock = ProcessingClock(floor_ms=2**60)
    >>> clock.now_ms() == 2**60
    True
    """

    __slots__ = ("_last_ms",)

    def __init__(self, floor_ms: int = 0) -> None:
        self._last_ms = floor_ms

    def now_ms(self) -> int:
        """Milliseconds since the epoch."""
        self._last_ms = max(self._last_ms, time.time_ns() // 1_000_000)
        return self._last_ms

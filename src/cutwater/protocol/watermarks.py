"""The combined watermark of a subtask: the smallest over its inputs that have a say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cutwater.protocol.messages import InputId

__all__ = ["InputTime", "WatermarkMerger"]

_MIN = -(2**63)
_MAX = 2**63 - 1


class InputTime(NamedTuple):
    """Event time of one input, as it stands in a snapshot (W2)."""

    watermark: int = _MIN
    """Microseconds since the epoch.  The largest value means that the input has ended."""
    idle: bool = False


class WatermarkMerger:
    """Merges the watermarks of the inputs; the result never falls.

    An ended input never holds the others back, an idle one does not as long as it is idle.  When all that have not
    ended are idle, the largest of their watermarks holds: the order in which they fell idle then makes no difference.

    >>> merger = WatermarkMerger(["a", "b"])
    >>> merger.update("a", 10, False), merger.update("b", 5, False), merger.update("b", 4, True)
    (None, 5, 10)
    """

    def __init__(self, inputs: Sequence[InputId]) -> None:
        self._times: dict[InputId, InputTime] = {input: InputTime() for input in inputs}
        self.combined = _MIN
        """The combined watermark so far."""

    @property
    def idle(self) -> bool:
        """Every input that has not ended is idle (false once all have ended: there is nothing left to wait for)."""
        open = [time for time in self._times.values() if time.watermark != _MAX]
        return bool(open) and all(time.idle for time in open)

    def update(self, input: InputId, watermark: int, idle: bool) -> int | None:
        """Take what a frame says of its input; the new combined watermark if it rose.

        A watermark below the input's last one counts as the last one.

        Raises:
            KeyError: no such input.
        """
        before = self._times[input]
        if watermark <= before.watermark and idle == before.idle:
            return None
        self._times[input] = InputTime(max(watermark, before.watermark), idle)
        return self._rise()

    def end(self, input: InputId) -> int | None:
        """The input has ended; the new combined watermark if it rose (the largest value once all have ended)."""
        return self.update(input, _MAX, False)

    def snapshot(self) -> dict[InputId, InputTime]:
        """Event time of every input."""
        return dict(self._times)

    def restore(self, times: Mapping[InputId, InputTime], combined: int) -> None:
        """Go on from a snapshot.  Inputs that are not in it (after a rescale) start without a watermark.

        Raises:
            KeyError: the snapshot names an input that is not here.
        """
        unknown = times.keys() - self._times.keys()
        if unknown:
            raise KeyError(f"no input {sorted(map(repr, unknown))}")
        self._times.update(times)
        self.combined = combined

    def _rise(self) -> int | None:
        active_min, idle_max, any_active, any_idle = _MAX, _MIN, False, False
        for watermark, idle in self._times.values():
            if watermark == _MAX:
                continue
            if idle:
                any_idle = True
                idle_max = max(idle_max, watermark)
            else:
                any_active = True
                active_min = min(active_min, watermark)
        now = active_min if any_active or not any_idle else idle_max
        if now <= self.combined:
            return None
        self.combined = now
        return now

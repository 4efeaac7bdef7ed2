"""When windows come out early, where the clock says so: the next time is state, as timers are (W2)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from cutwater.operators.base import Context
from cutwater.state.segments import GROUP_COLUMN, Segment

_NEXT = "next_ms"


class EarlyClock:
    """The next multiple of an interval, once rows have come.

    It lies in the snapshot beside the watermarks, by key group, so that a restore at another parallelism finds it, too.
    Snapshots of older versions have none; then it is reckoned anew.

    Args:
        interval_us: microseconds between early results; ``None``: there are none by the clock.
        ctx: of the subtask.
    """

    def __init__(self, interval_us: int | None, ctx: Context) -> None:
        self._interval_us, self._ctx = interval_us, ctx
        self.next_ms: int | None = None
        """Milliseconds since the epoch; ``None``: no row has come since the last time."""
        self._known = False

    def rows_came(self) -> None:
        """Rows have come: what they change comes out at the next multiple of the interval."""
        if self.next_ms is None and self._interval_us is not None:
            now_us = 1000 * self._ctx.processing_time_ms()
            self.next_ms = -(-(now_us // self._interval_us + 1) * self._interval_us // 1000)

    def add_to(self, segment: Segment) -> Segment:
        """The segment of the watermarks, and this beside each."""
        if self._interval_us is None:
            return segment
        column = pa.array([self.next_ms] * segment.batch.num_rows, pa.int64())
        return replace(segment, batch=segment.batch.append_column(_NEXT, column))

    def restore(self, segment: Segment) -> None:
        """Take over what such a segment has for the key groups of this subtask: the earliest."""
        if self._interval_us is None or _NEXT not in segment.batch.schema.names:
            return
        owned = self._ctx.key_groups
        groups = segment.batch.column(GROUP_COLUMN).to_numpy()
        inside = pa.array((groups >= owned.start) & (groups < owned.stop))
        times = [
            self.next_ms if self._known else None,
            *np.unique(segment.batch.column(_NEXT).filter(inside).drop_null()).tolist(),
        ]
        self.next_ms = min((time for time in times if time is not None), default=None)
        self._known = True

    def rows_restored(self) -> None:
        """There are windows in the snapshot; it may be that the time is still to come."""
        if not self._known:
            self.rows_came()

"""The operator behind ``IntervalJoinSpec``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.row_sizes import rows_per_batch, widest_row_bytes
from cutwater.operators.base import Outputs
from cutwater.operators.join.two_sided import LEFT, TwoSidedJoin
from cutwater.state.index.key_index import GroupIds
from cutwater.state.keys import require_valid_keys
from cutwater.state.rows.chains import References, RowChains
from cutwater.state.rows.kernels import FROM_HEAD

if TYPE_CHECKING:
    from cutwater.operators.join.interval_spec import IntervalJoinSpec

_INT64 = (-(2**63), 2**63 - 1)
_MAX_STEPS = 1 << 21
"""Stored rows that one call looks at: some milliseconds."""


@dataclass(slots=True)
class _Arrivals:
    """Rows that came last and have not met all stored rows of the other side yet."""

    side: int
    batch: pa.RecordBatch
    gids: GroupIds
    times: References
    limit: int
    """Most pairs of one output batch."""
    row: int = 0
    cursor: int = FROM_HEAD


class IntervalJoin(TwoSidedJoin):
    """One index over the keys of both sides; a chain of rows per side and key."""

    def __init__(self, spec: IntervalJoinSpec) -> None:
        super().__init__(spec)
        self._spec = spec
        # What a row of each side reaches on the other: [time + low, time + high].
        self._reach = ((spec.lower_us, spec.upper_us), (-spec.upper_us, -spec.lower_us))
        self._waiting: _Arrivals | None = None
        self._pairs: tuple[References, References] = (np.empty(0, np.int64), np.empty(0, np.int64))

    # -- rows

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        if batch.num_rows == 0:
            return []
        require_valid_keys(batch, self._keys[input])
        times = self._event_times(input, batch)
        batch, times, outputs = self._divert_late(input, batch, times)
        batch, times = self._with_whole_keys(input, batch, times)
        if batch.num_rows == 0:
            return outputs
        self._rows.make_room(self._watermarks.current)
        gids = self._rows.add(input, batch, times)
        limit = rows_per_batch(self._sides[1 - input].widest + widest_row_bytes(batch))
        self._waiting = _Arrivals(input, batch, gids, times, limit)
        return outputs + self.resume()

    def _divert_late(
        self, side: int, batch: pa.RecordBatch, times: References
    ) -> tuple[pa.RecordBatch, References, Outputs]:
        """The rows in time, their times, and the others as side output."""
        late = times <= self._reached(side, batch)
        count = int(np.count_nonzero(late))
        if count == 0:
            return batch, times, []
        self.ctx.count("rows_late", count)
        in_time = np.flatnonzero(~late)
        times = times[in_time]
        times.flags.writeable = False  # one specialisation of the kernels
        return batch.take(pa.array(in_time)), times, [(1 + side, batch.filter(pa.array(late)))]

    # -- pairs

    @property
    def pending(self) -> bool:
        return self._waiting is not None

    def resume(self) -> Outputs:
        work = self._waiting
        if work is None:
            return []
        if len(self._pairs[0]) < work.limit:
            self._pairs = (np.empty(work.limit, np.int64), np.empty(work.limit, np.int64))
        other = 1 - work.side
        count, work.row, work.cursor = self._sides[other].probe(
            work.gids,
            work.times,
            (work.row, work.cursor),
            (*self._reach[work.side], self._dead_below(other)),
            _MAX_STEPS,
            (self._pairs[0][: work.limit], self._pairs[1][: work.limit]),
        )
        if work.row == len(work.gids):
            self._waiting = None
        return self._portioned([(0, self._joined(work, count))] if count else [])

    def _joined(self, work: _Arrivals, count: int) -> pa.RecordBatch:
        came = work.batch.take(pa.array(self._pairs[0][:count])).columns
        met = self._sides[1 - work.side].take(self._pairs[1][:count])
        left, right = (came, met) if work.side == LEFT else (met, came)
        return pa.RecordBatch.from_arrays([*left, *(right[i] for i in self._carried)], schema=self._spec.outputs[0])

    # -- time

    def on_watermark(self, watermark: int) -> Outputs:
        outputs: Outputs = []
        while self.pending:
            outputs += self.resume()
        if self._watermarks.advance(watermark):
            if all(side.latest < self._dead_below(number) for number, side in enumerate(self._sides)):
                self._rows.forget_all()
            self._rows.clean(self._watermarks.current)
        return outputs

    def _dead_below(self, side: int, watermark: int | None = None) -> int:
        """Rows of the side with an event time below this match no row that is yet to come."""
        low, high = _INT64
        reached = self._watermarks.current if watermark is None else watermark
        return min(max(reached + 1 - self._reach[side][1], low), high)

    def _live(self, sides: Sequence[RowChains], watermark: int) -> list[References]:
        return [np.flatnonzero(side.times >= self._dead_below(n, watermark)) for n, side in enumerate(sides)]

    def _counts(self, side: int, batch: pa.RecordBatch, times: References) -> npt.NDArray[np.bool_]:
        return times >= self._dead_below(side)

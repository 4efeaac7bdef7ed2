"""The operator behind ``IntervalJoinSpec``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from cutwater.errors import StorageError
from cutwater.operators.base import BaseOperator, Context, Outputs
from cutwater.operators.event_times import event_times
from cutwater.operators.join_columns import pairs_per_batch, widest_row_bytes
from cutwater.operators.join_kernels import FROM_HEAD
from cutwater.operators.join_side import JoinSide, References
from cutwater.operators.join_watermarks import WATERMARK, GroupWatermarks
from cutwater.operators.keyed_table import keyed_rows
from cutwater.state.index import KeyIndex, Slots, make_index
from cutwater.state.keys import hash_keys, key_groups, require_valid_keys
from cutwater.state.segments import Frozen, FrozenSegments, Segment

if TYPE_CHECKING:
    from cutwater.operators.interval_join import IntervalJoinSpec

__all__ = ["IntervalJoin"]

LEFT, RIGHT = 0, 1
SIDES = ("left", "right")
_INT64 = (-(2**63), 2**63 - 1)
_MAX_STEPS = 1 << 21
"""Stored rows that one call looks at: some milliseconds."""
_SLACK_ROWS = 1 << 16
"""Dead rows below this number are not worth a sweep."""


@dataclass(slots=True)
class _Arrivals:
    """Rows that came last and have not met all stored rows of the other side yet."""

    side: int
    batch: pa.RecordBatch
    slots: Slots
    times: References
    limit: int
    """Most pairs of one output batch."""
    row: int = 0
    cursor: int = FROM_HEAD


class IntervalJoin(BaseOperator):
    """One index over the keys of both sides; a chain of rows per side and key."""

    def __init__(self, spec: IntervalJoinSpec) -> None:
        self._spec = spec
        self._schemas = (spec.left_schema, spec.right_schema)
        self._keys = (spec.left_keys, spec.right_keys)
        self._time = (spec.left_time, spec.right_time)
        # What a row of each side reaches on the other: [time + low, time + high].
        self._reach = ((spec.lower_us, spec.upper_us), (-spec.upper_us, -spec.lower_us))
        self._carried = [i for i, name in enumerate(spec.right_schema.names) if name not in spec.dropped]
        self._waiting: _Arrivals | None = None
        self._pairs: tuple[References, References] = (np.empty(0, np.int64), np.empty(0, np.int64))

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self._clear()

    def _clear(self) -> None:
        self._watermarks = GroupWatermarks(self.ctx.key_groups, self.ctx.max_parallelism)
        self._forget_rows()

    def _forget_rows(self) -> None:
        self._index: KeyIndex = make_index(self._spec.key_types)
        self._sides = [JoinSide(schema) for schema in self._schemas]
        self._sweep_at = _SLACK_ROWS

    # -- rows

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        if batch.num_rows == 0:
            return []
        require_valid_keys(batch, self._keys[input])
        times = self._event_times(input, batch)
        batch, times, outputs = self._divert_late(input, batch, times)
        if batch.num_rows == 0:
            return outputs
        self._sweep()
        slots = self._store(input, batch, times)
        limit = pairs_per_batch(self._sides[1 - input].widest + widest_row_bytes(batch))
        self._waiting = _Arrivals(input, batch, slots, times, limit)
        return outputs + self.resume()

    def _event_times(self, side: int, batch: pa.RecordBatch) -> References:
        return event_times(batch, self._time[side], f" of the {SIDES[side]} side")

    def _divert_late(
        self, side: int, batch: pa.RecordBatch, times: References
    ) -> tuple[pa.RecordBatch, References, Outputs]:
        """The rows in time, their times, and the others as side output."""
        if self._watermarks.differ:
            groups = key_groups(hash_keys(self._key_columns(side, batch)), self.ctx.max_parallelism)
            late = times < self._watermarks.of(groups)
        else:
            late = times < self._watermarks.current
        count = int(np.count_nonzero(late))
        if count == 0:
            return batch, times, []
        self.ctx.count("rows_late", count)
        in_time = np.flatnonzero(~late)
        times = times[in_time]
        times.flags.writeable = False  # one specialisation of the kernels
        return batch.take(pa.array(in_time)), times, [(1 + side, batch.filter(pa.array(late)))]

    def _key_columns(self, side: int, batch: pa.RecordBatch) -> list[pa.Array]:
        kinds = self._spec.key_types
        return [batch.column(name).cast(kind) for name, kind in zip(self._keys[side], kinds, strict=True)]

    def _store(self, side: int, batch: pa.RecordBatch, times: References) -> Slots:
        slots = self._index.upsert(self._key_columns(side, batch))
        for each in self._sides:
            each.reserve(len(self._index))
        self._sides[side].append(batch, slots, times)
        return slots

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
            work.slots,
            work.times,
            (work.row, work.cursor),
            (*self._reach[work.side], self._dead_below(other)),
            _MAX_STEPS,
            (self._pairs[0][: work.limit], self._pairs[1][: work.limit]),
        )
        if work.row == len(work.slots):
            self._waiting = None
        return [] if count == 0 else [(0, self._joined(work, count))]

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
        if self._watermarks.advance(watermark) and all(
            side.latest < self._dead_below(number) for number, side in enumerate(self._sides)
        ):
            self._forget_rows()
        return outputs

    def _dead_below(self, side: int) -> int:
        """Rows of the side with an event time below this match no row that is yet to come."""
        low, high = _INT64
        return min(max(self._watermarks.current - self._reach[side][1], low), high)

    def _live(self, number: int, side: JoinSide) -> References:
        return np.flatnonzero(side.times >= self._dead_below(number))

    def _sweep(self) -> None:
        """Forget dead rows, and keys without rows, once they are more than half."""
        total = sum(side.rows for side in self._sides)
        if total < self._sweep_at:
            return
        live = [self._live(number, side) for number, side in enumerate(self._sides)]
        remaining = sum(len(rows) for rows in live)
        if 2 * remaining <= total:
            self._keep(live)
            self._sweep_at = 2 * remaining + _SLACK_ROWS
        else:
            self._sweep_at = total + total // 2

    def _keep(self, live: list[References]) -> None:
        slots = [side.slots[rows] for side, rows in zip(self._sides, live, strict=True)]
        used = np.unique(np.concatenate(slots))
        index = make_index(self._spec.key_types)
        if len(used):
            index.upsert(self._index.columns(used))  # used slots become 0, 1, 2 ... in this order
        self._index = index
        self._sides = [
            side.kept(rows, np.searchsorted(used, old).astype(np.int32), len(used))
            for side, rows, old in zip(self._sides, live, slots, strict=True)
        ]

    # -- snapshots

    def freeze(self, checkpoint_id: int) -> Frozen:
        index, watermark, groups = self._index.frozen(), self._watermarks.segment(), self.ctx.max_parallelism
        parts = [(side.frozen(), self._dead_below(number)) for number, side in enumerate(self._sides)]

        def segments() -> Iterator[Segment]:
            yield watermark
            for name, (side, dead_below) in zip(SIDES, parts, strict=True):
                yield from side.segments(name, np.flatnonzero(side.times >= dead_below), index.columns, groups)

        return FrozenSegments(segments)

    def restore(self, segments: Iterable[Segment]) -> None:
        self._clear()
        found: dict[str, list[Segment]] = {name: [] for name in (*SIDES, WATERMARK)}
        for segment in segments:
            if segment.name not in found:
                raise StorageError(
                    f"the snapshot has a state {segment.name!r}, which a join does not know",
                    hint="Give the changed step a new id, or restore with the program that wrote the snapshot.",
                )
            found[segment.name].append(segment)
        for segment in found[WATERMARK]:
            self._watermarks.restore(segment)
        self._watermarks.restored()
        for number, name in enumerate(SIDES):
            for batch in keyed_rows(found[name], self._schemas[number], self.ctx.key_groups):
                self._store(number, batch, self._event_times(number, batch))
        self._sweep_at = sum(side.rows for side in self._sides) + _SLACK_ROWS

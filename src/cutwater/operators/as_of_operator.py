"""The operator behind ``AsOfJoinSpec``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from cutwater.operators.base import MIN_WATERMARK, BaseOperator, Context, Outputs
from cutwater.operators.event_times import event_times
from cutwater.operators.join_columns import pairs_per_batch
from cutwater.operators.join_side import JoinSide, References
from cutwater.operators.join_watermarks import WATERMARK, GroupWatermarks
from cutwater.operators.keyed_table import keyed_rows
from cutwater.state.index import Slots, make_index
from cutwater.state.keys import hash_keys, key_groups, require_valid_keys
from cutwater.state.segments import Frozen, FrozenSegments, Segment

if TYPE_CHECKING:
    from cutwater.operators.as_of_join import AsOfJoinSpec

__all__ = ["AsOfJoin"]

LEFT, RIGHT = 0, 1
SIDES = ("left", "right")
_SLACK_ROWS = 1 << 16
"""Dead rows below this number are not worth a sweep."""

_NO_ROWS: References = np.empty(0, np.int64)


class AsOfJoin(BaseOperator):
    """One index over the keys of both sides; waiting rows on the left, versions in chains by key on the right."""

    def __init__(self, spec: AsOfJoinSpec) -> None:
        self._spec = spec
        self._schemas = (spec.left_schema, spec.right_schema)
        self._keys = (spec.left_keys, spec.right_keys)
        self._time = (spec.left_time, spec.right_time)
        self._carried = [i for i, name in enumerate(spec.right_schema.names) if name not in spec.dropped]

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self._clear()

    def _clear(self) -> None:
        self._watermarks = GroupWatermarks(self.ctx.key_groups, self.ctx.max_parallelism)
        self._index = make_index(self._spec.key_types)
        self._sides = [JoinSide(schema) for schema in self._schemas]
        self._due = _NO_ROWS
        self._settled = MIN_WATERMARK
        self._sweep_at = _SLACK_ROWS

    # -- rows

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        outputs: Outputs = []
        while self.pending:
            outputs += self.resume()
        if batch.num_rows == 0:
            return outputs
        require_valid_keys(batch, self._keys[input])
        times = event_times(batch, self._time[input], f" of the {SIDES[input]} side")
        late = times <= self._reached(input, batch)
        count = int(np.count_nonzero(late))
        if count:
            self.ctx.count("rows_late", count)
            outputs.append((1 + input, batch.filter(pa.array(late))))
            if input == LEFT:
                batch, times = batch.filter(pa.array(~late)), times[~late]
        if batch.num_rows:
            self._sweep()
            self._store(input, batch, times)
        return outputs

    def _reached(self, side: int, batch: pa.RecordBatch) -> int | References:
        """The watermark that counts for each row."""
        if not self._watermarks.differ:
            return self._watermarks.current
        return self._watermarks.of(key_groups(hash_keys(self._key_columns(side, batch)), self.ctx.max_parallelism))

    def _key_columns(self, side: int, batch: pa.RecordBatch) -> list[pa.Array]:
        kinds = self._spec.key_types
        return [batch.column(name).cast(kind) for name, kind in zip(self._keys[side], kinds, strict=True)]

    def _store(self, side: int, batch: pa.RecordBatch, times: References) -> None:
        slots = self._index.upsert(self._key_columns(side, batch))
        for each in self._sides:
            each.reserve(len(self._index))
        self._sides[side].append(batch, slots, times)

    # -- time

    def on_watermark(self, watermark: int) -> Outputs:
        outputs: Outputs = []
        while self.pending:
            outputs += self.resume()
        before = self._watermarks.current
        if self._watermarks.advance(watermark):
            times = self._sides[LEFT].times
            due = np.flatnonzero((times <= watermark) & (times > before))
            self._due = due[np.argsort(times[due], kind="stable")]
            self._settled = before
        return outputs + self.resume()

    @property
    def pending(self) -> bool:
        return len(self._due) > 0

    def resume(self) -> Outputs:
        if not self.pending:
            return []
        left, right = self._sides
        portion = pairs_per_batch(left.widest + right.widest)
        rows, self._due = self._due[:portion], self._due[portion:]
        versions = right.latest_at(left.slots[rows], left.times[rows], self._settled)
        if self._spec.how == "inner":
            rows, versions = rows[versions >= 0], versions[versions >= 0]
        if len(rows) == 0:
            return []
        columns = right.take(versions)
        joined = [*left.take(rows), *(columns[i] for i in self._carried)]
        return [(0, pa.RecordBatch.from_arrays(joined, schema=self._spec.outputs[0]))]

    # -- forgetting

    def _sweep(self) -> None:
        """Forget rows that came out, versions that no row to come can see, and their keys, once they are over half."""
        left, right = self._sides
        if left.rows + right.rows < self._sweep_at:
            return
        live = [_waiting(left, self._watermarks.current), _visible(right, self._watermarks.current)]
        remaining = len(live[LEFT]) + len(live[RIGHT])
        if 2 * remaining > left.rows + right.rows:
            self._sweep_at = left.rows + right.rows + (left.rows + right.rows) // 2
            return
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
        self._sweep_at = 2 * remaining + _SLACK_ROWS

    # -- snapshots

    def freeze(self, checkpoint_id: int) -> Frozen:
        index, watermark, groups = self._index.frozen(), self._watermarks.segment(), self.ctx.max_parallelism
        left, right = (side.frozen() for side in self._sides)
        current = self._watermarks.current

        def segments() -> Iterator[Segment]:
            yield watermark
            yield from left.segments("left", _waiting(left, current), index.columns, groups)
            yield from right.segments("right", _visible(right, current), index.columns, groups)

        return FrozenSegments(segments)

    def restore(self, segments: Iterable[Segment]) -> None:
        self._clear()
        found: dict[str, list[Segment]] = {name: [] for name in (*SIDES, WATERMARK)}
        for segment in segments:
            found[segment.name].append(segment)
        for segment in found[WATERMARK]:
            self._watermarks.restore(segment)
        self._watermarks.restored()
        for side, name in enumerate(SIDES):
            for batch in keyed_rows(found[name], self._schemas[side], self.ctx.key_groups):
                self._store(side, batch, event_times(batch, self._time[side]))
        self._sweep_at = sum(side.rows for side in self._sides) + _SLACK_ROWS


def _waiting(left: JoinSide, watermark: int) -> References:
    """Rows that have not come out."""
    return np.flatnonzero(left.times > watermark)


def _visible(right: JoinSide, watermark: int) -> References:
    """Versions that a row later than the watermark may see: those after it, and the last of each key before it."""
    times, slots = right.times, right.slots
    past = np.flatnonzero(times <= watermark)
    order = past[np.lexsort((times[past], slots[past]))]  # stable: of equal times the last that came is last
    ordered: Slots = slots[order]
    last = np.ones(len(order), np.bool_)
    last[:-1] = ordered[:-1] != ordered[1:]
    return np.sort(np.concatenate([order[last], np.flatnonzero(times > watermark)]))

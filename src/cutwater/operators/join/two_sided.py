"""Joins by event time of rows that wait on two sides."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.rows import event_times, rows_per_batch, widest_row_bytes
from cutwater.operators.base import Context, Operator, Outputs
from cutwater.operators.deterministic_batches import DeterministicBatches
from cutwater.operators.emission_order import EmissionOrder
from cutwater.operators.group_watermarks import GroupWatermarks
from cutwater.state.backend import StateBackend
from cutwater.state.key_index import GroupIds, KeyIndex
from cutwater.state.keys import hash_keys, key_groups, null_key_mask, require_valid_keys
from cutwater.state.rows.kernels import FROM_HEAD
from cutwater.state.rows.keyed_rows import NEVER, References, RowChains, RowSides
from cutwater.state.segments import Frozen, Segment

if TYPE_CHECKING:
    from cutwater.operators.join.spec import AsOfJoinSpec, IntervalJoinSpec, TimedJoinSpec


LEFT, RIGHT = 0, 1
SIDES = ("left", "right")


class TwoSidedJoin(Operator):
    """The rows of both sides by key."""

    def __init__(self, spec: TimedJoinSpec) -> None:
        schemas, keys = (spec.left_schema, spec.right_schema), (spec.left_keys, spec.right_keys)
        self._types = RowSides(SIDES, spec.key_types, schemas, keys, (spec.left_time, spec.right_time))
        self._schemas, self._keys, self._joined_schema = schemas, keys, spec.outputs[0]
        self._carried = [i for i, name in enumerate(spec.right_schema.names) if name not in spec.dropped]

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self._backend = StateBackend(ctx)
        self._batches = DeterministicBatches() if ctx.repeatable else None
        self._order = EmissionOrder.of(ctx, self._backend, self._joined_schema)
        self._clear()
        self._track()

    def close(self) -> None:
        self._backend.close()

    def _track(self, *, restored: bool = False) -> None:
        if self.ctx.incremental:
            self._rows.track(restored=restored)

    def _clear(self) -> None:
        self._watermarks = GroupWatermarks(self.ctx.key_groups, self.ctx.max_parallelism)
        self._rows = self._backend.rows(self._types, self._live, self._wakes)

    def _wakes(self, side: int, times: References) -> References:
        """The times at which rows of a side, by their event times, want to be looked at; ``NEVER``: they do not."""
        return np.full(len(times), NEVER, np.int64)

    @property
    def _sides(self) -> list[RowChains]:
        return self._rows.sides

    @property
    def _index(self) -> KeyIndex:
        return self._rows.index

    # -- rows

    def _event_times(self, side: int, batch: pa.RecordBatch) -> References:
        return event_times(batch, self._types.times[side], f" of the {SIDES[side]} side")

    def _reached(self, side: int, batch: pa.RecordBatch) -> int | References:
        """The watermark that counts for each row; where its own split had come further, that (W4)."""
        if not self._watermarks.differ:
            return max(self._watermarks.current, self.late_before)
        return np.maximum(self._watermarks.of(self._groups(side, batch)), self.late_before)

    def _groups(self, side: int, batch: pa.RecordBatch) -> npt.NDArray[np.uint16]:
        return key_groups(hash_keys(self._types.key_columns(side, batch)), self.ctx.max_parallelism)

    def _with_whole_keys(
        self, side: int, batch: pa.RecordBatch, times: References
    ) -> tuple[pa.RecordBatch, References]:
        """The rows without a null in their key, and their times: as in SQL, the others have no partner."""
        null = null_key_mask([batch.column(name) for name in self._keys[side]])
        return (batch, times) if null is None else _those(~null, batch, times)

    def _in_batches(self, outputs: Outputs) -> Outputs:
        """Joined rows in batches; where these end is not to change with a restore, if calls may have to be repeated."""
        return outputs if self._batches is None else self._batches.cut(outputs, last=not self.pending)

    # -- rows that wait for the watermark

    @property
    def _firing(self) -> bool:
        """True if more comes out of those that the watermark has passed, in whatever order."""
        return False

    @property
    def pending(self) -> bool:
        return self._firing or (self._order is not None and self._order.pending)

    def _fires(self) -> None:
        """The watermark has risen: not all that comes out may be in order."""
        if self._order is not None and self._rows.waits(self._watermarks.current):
            self._order.begin()

    def _found(self, batch: pa.RecordBatch, times: References, gids: GroupIds) -> Outputs:
        """Rows that come out, of these times and keys: at once, if they are in order."""
        if self._order is None or not self._order.collecting:
            return [(0, batch)]
        self._order.add(batch, times, hash_keys(self._index.columns(gids)))
        return []

    def _next_rows(self) -> Outputs:
        """The next slice of what comes out, of what is not in order yet."""
        return []

    def resume(self) -> Outputs:
        outputs = self._next_rows()
        return self._in_batches(outputs) if self._order is None else self._order.give(outputs, last=not self._firing)

    # -- forgetting

    @abstractmethod
    def _live(self, sides: Sequence[RowChains], watermark: int) -> Sequence[References]:
        """Rows of each side that still count at a watermark, ascending.  A row that does not, never will again."""

    @abstractmethod
    def _counts(self, side: int, batch: pa.RecordBatch, times: References) -> npt.NDArray[np.bool_]:
        """Mask of the rows of some snapshot that may still count: it may have been taken before they did not."""

    # -- snapshots

    def freeze(self, checkpoint_id: int) -> Frozen:
        return self._rows.freeze(checkpoint_id, self._watermarks.current, self._watermarks.segment())

    def restore(self, segments: Iterable[Segment]) -> None:
        self._clear()
        for side, batch in self._rows.restore(self._watermarks.restored_from(segments)):
            times = self._event_times(side, batch)
            counts = self._counts(side, batch, times)
            if not counts.all():
                batch = batch.filter(pa.array(counts))
            if batch.num_rows:
                self._rows.add(side, batch, self._event_times(side, batch))
        self._track(restored=True)


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
        late = times <= self._reached(input, batch)
        outputs = self._late(batch, late, 1 + input)
        if outputs:
            batch, times = _those(~late, batch, times)
        batch, times = self._with_whole_keys(input, batch, times)
        if batch.num_rows == 0:
            return outputs
        self._rows.make_room(self._watermarks.current)
        gids = self._rows.add(input, batch, times)
        limit = rows_per_batch(self._sides[1 - input].widest + widest_row_bytes(batch))
        self._waiting = _Arrivals(input, batch, gids, times, limit)
        return outputs + self.resume()

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
        return self._in_batches([(0, self._joined(work, count))] if count else [])

    def _joined(self, work: _Arrivals, count: int) -> pa.RecordBatch:
        came = work.batch.take(pa.array(self._pairs[0][:count])).columns
        met = self._sides[1 - work.side].take(self._pairs[1][:count])
        left, right = (came, met) if work.side == LEFT else (met, came)
        return pa.RecordBatch.from_arrays([*left, *(right[i] for i in self._carried)], schema=self._spec.outputs[0])

    # -- time

    def on_watermark(self, watermark: int) -> Outputs:
        outputs = self._drained()
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


_NO_ROWS: References = np.empty(0, np.int64)


class AsOfJoin(TwoSidedJoin):
    """One index over the keys of both sides; waiting rows on the left, versions in chains by key on the right."""

    def __init__(self, spec: AsOfJoinSpec) -> None:
        super().__init__(spec)
        self._spec = spec

    def _clear(self) -> None:
        super()._clear()
        self._due = _NO_ROWS
        self._brought: Iterator[int] | None = None
        """Keys with rows that come out now, as they are brought into memory: the first group id of each part."""
        self._before = self._watermarks.copy()

    # -- rows

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        outputs = self._drained()
        if batch.num_rows == 0:
            return outputs
        require_valid_keys(batch, self._keys[input])
        times = self._event_times(input, batch)
        late = times <= self._reached(input, batch)
        diverted = self._late(batch, late, 1 + input)
        outputs += diverted
        if diverted and input == LEFT:
            batch, times = _those(~late, batch, times)
        if input == RIGHT or self._spec.how == "inner":
            batch, times = self._with_whole_keys(input, batch, times)
        if batch.num_rows:
            self._rows.make_room(self._watermarks.current)
            self._rows.add(input, batch, times)
        return outputs

    # -- time

    def on_watermark(self, watermark: int) -> Outputs:
        outputs = self._drained()
        before = self._watermarks.copy()
        if self._watermarks.advance(watermark):
            self._before = before
            self._due = self._due_rows(0)
            self._brought = self._rows.due(watermark)
            self._fires()
            self._rows.clean(self._watermarks.current)
        return outputs + self.resume()

    def _due_rows(self, first: int) -> References:
        """Rows that come out now, in the order of time, of the keys from this group id on."""
        left = self._sides[LEFT]
        due = np.flatnonzero((left.times <= self._watermarks.current) & (left.times > self._before.current))
        due = due[left.gids[due] >= first] if first else due
        due = due[left.times[due] > self._rows.done[left.gids[due]]]
        if self._before.differ:
            groups = key_groups(hash_keys(self._index.columns(left.gids[due])), self.ctx.max_parallelism)
            due = due[left.times[due] > self._before.of(groups)]
        self._rows.came_out(left.gids[due], self._watermarks.current)
        if not self.ctx.repeatable:
            return due[np.argsort(left.times[due], kind="stable")]
        # In an order that a restore does not change: of one time by key, of one key as they came.
        return due[np.lexsort((hash_keys(self._index.columns(left.gids[due])), left.times[due]))]

    @property
    def _firing(self) -> bool:
        return len(self._due) > 0 or self._brought is not None

    def _next_rows(self) -> Outputs:
        if len(self._due) == 0 and self._brought is not None:
            first = next(self._brought, None)
            if first is None:
                self._brought = None
            else:
                self._due = self._due_rows(first)
        if len(self._due) == 0:
            return []
        left, right = self._sides
        part = rows_per_batch(left.widest + right.widest)
        rows, self._due = self._due[:part], self._due[part:]
        versions = right.latest_at(left.gids[rows], left.times[rows], self._before.current)
        if self._spec.how == "inner":
            rows, versions = rows[versions >= 0], versions[versions >= 0]
        if len(rows) == 0:
            return []
        columns = right.take(versions)
        joined = [*left.take(rows), *(columns[i] for i in self._carried)]
        batch = pa.RecordBatch.from_arrays(joined, schema=self._spec.outputs[0])
        return self._found(batch, left.times[rows], left.gids[rows])

    def _wakes(self, side: int, times: References) -> References:
        """A row of the left side waits for the watermark."""
        waits = (times > self._watermarks.current) if side == LEFT else np.zeros(len(times), np.bool_)
        return np.where(waits, times, NEVER)

    def _live(self, sides: Sequence[RowChains], watermark: int) -> list[References]:
        """Rows that have not come out, and versions that a row to come may see."""
        left, right = sides
        return [_waiting(left, watermark), _visible(right, watermark)]

    def _counts(self, side: int, batch: pa.RecordBatch, times: References) -> npt.NDArray[np.bool_]:
        return times > self._reached(side, batch) if side == LEFT else np.ones(len(times), np.bool_)


def _waiting(left: RowChains, watermark: int) -> References:
    """Rows that have not come out."""
    return np.flatnonzero(left.times > watermark)


def _visible(right: RowChains, watermark: int) -> References:
    """Versions that a row later than the watermark may see: those after it, and the last of each key before it."""
    times, gids = right.times, right.gids
    past = np.flatnonzero(times <= watermark)
    order = past[np.lexsort((times[past], gids[past]))]  # stable: of equal times the last that came is last
    ordered: GroupIds = gids[order]
    last = np.ones(len(order), np.bool_)
    last[:-1] = ordered[:-1] != ordered[1:]
    return np.sort(np.concatenate([order[last], np.flatnonzero(times > watermark)]))


def _those(mask: npt.NDArray[np.bool_], batch: pa.RecordBatch, times: References) -> tuple[pa.RecordBatch, References]:
    """Some of the rows, and their times."""
    times = times[mask]
    times.flags.writeable = False  # one specialisation of the kernels
    return batch.filter(pa.array(mask)), times

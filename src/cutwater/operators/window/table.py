"""Windows with fixed borders and their values: one table keyed by (window start, key)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.time import MAX_WATERMARK
from cutwater.data.words import fixed_view, from_words
from cutwater.operators.aggregate.accumulators import Accumulator, Aggregate
from cutwater.operators.aggregate.keyed_operator import AggregateTable, aggregate_layout
from cutwater.operators.base import Outputs
from cutwater.operators.window import kernels
from cutwater.state.key_index import GroupIds
from cutwater.state.segments import Segment
from cutwater.state.table.changes import Changed
from cutwater.state.table.keyed_segments import deleted_segments, group_segments
from cutwater.state.table.timed_table import Timing

if TYPE_CHECKING:
    from cutwater.operators.window.operator import MakeSegments, Times
    from cutwater.operators.window.spec import WindowAggregateSpec
    from cutwater.state.backend import StateBackend


Mask = npt.NDArray[np.bool_]


class Fold:
    """How the accumulators of a table take rows.

    Args:
        aggregates: what the accumulators compute.
        schema: of the rows.
        discarding: a group id begins anew after each of its results.
    """

    def __init__(self, aggregates: Sequence[Aggregate], schema: pa.Schema, *, discarding: bool) -> None:
        self._aggregates = aggregates
        self._schema = schema
        self._discarding = discarding

    def rows(self, table: AggregateTable, gids: GroupIds, batch: pa.RecordBatch, fire: Mask) -> list[pa.Array]:
        """Take rows of group ids that may change now.

        Returns a column per aggregate: the results after those rows that fire.
        """
        if self._discarding:
            return self._discard(table.accumulators, gids, batch, fire)
        mask = pa.array(fire)
        return [accumulator.running(gids, batch).filter(mask) for accumulator in table.accumulators]

    def _discard(
        self, into: Sequence[Accumulator], gids: GroupIds, batch: pa.RecordBatch, fire: Mask
    ) -> list[pa.Array]:
        """Between its results each group id has values of its own, numbered one after the other."""
        touched, numbers = np.unique(gids, return_inverse=True)
        current: GroupIds = np.arange(len(touched), dtype=np.int32)
        local: GroupIds = np.empty(len(gids), np.int32)
        begun = current.copy()
        count = kernels.epochs(numbers.astype(np.int32), fire, current, local)
        mask = pa.array(fire)
        results: list[pa.Array] = []
        for accumulator, aggregate in zip(into, self._aggregates, strict=True):
            scratch = aggregate.accumulator(self._schema)
            scratch.reserve(count)
            scratch.restore(begun, accumulator.state(touched))
            results.append(scratch.running(local, batch).filter(mask))
            accumulator.restore(touched, scratch.state(current))
        return results

    def begin_anew(self, table: AggregateTable, gids: GroupIds) -> None:
        """Group ids whose results have come out: with ``discarding`` they hold nothing now."""
        if self._discarding:
            self.clear(table, gids)

    def clear(self, table: AggregateTable, gids: GroupIds) -> None:
        """From now on these group ids have seen nothing."""
        table.touch(gids)
        for accumulator, aggregate in zip(table.accumulators, self._aggregates, strict=True):
            fresh = aggregate.accumulator(self._schema)
            fresh.reserve(1)
            accumulator.restore(gids, fresh.state(np.zeros(len(gids), np.int32)))


class WindowTable:
    """The group ids of a table are (window, key) pairs, those of a window being due at its end.

    The global window starts at 0 and ends with time itself.
    """

    def __init__(self, spec: WindowAggregateSpec, backend: StateBackend) -> None:
        self._spec = spec
        self._endless = spec.window.endless
        self._size_us = 0 if spec.window.period is None else spec.window.period.size_us
        self.reach_us = MAX_WATERMARK if self._endless else self._size_us - 1
        self._counted = spec.early is not None
        self._limit = (spec.early.rows or 0) if spec.early else 0
        timing = Timing(
            self.reach_us,
            spec.allowed_lateness_us,
            counts=self._counted,
            waits=self._counted and not self._limit,
            only_pending=self._counted and spec.discarding,
        )
        types = [spec.time_type, *(field.type for field in spec.key_fields)]
        self._fold = Fold(spec.kept, spec.input_schema, discarding=spec.discarding)
        layout = aggregate_layout(spec.kept, spec.input_schema)
        self.rows = rows = backend.timed_table(types, layout, timing, self._results)
        # Windows come out, are told apart and are forgotten as the rows of that table.
        self.due, self.changed, self.forget = rows.due, rows.changed, rows.forget
        self.times, self.keys = rows.times, rows.keys

    @property
    def table(self) -> AggregateTable:
        """The values."""
        return self.rows.table

    # -- rows

    def add(self, batch: pa.RecordBatch, starts: Times, reached: Times) -> Outputs:
        """Rows with the starts of their windows, which are open; returns what comes out with them.

        Args:
            batch: the rows.
            starts: of the window of each row.
            reached: the watermark of each row, or one for all.
        """
        if batch.num_rows == 0:
            return []
        gids = self.rows.upsert(starts, [batch.column(name) for name in self._spec.keys])
        if not self._limit and int(starts.min()) + self.reach_us > int(reached.max()):
            for accumulator in self.table.accumulators:
                accumulator.update(gids, batch)
            if self._counted:
                kernels.count_rows(gids, self.rows.pending)
            return []
        fire = np.empty(len(gids), np.bool_)
        count = kernels.touch(
            gids, starts, self.reach_us, reached, self._limit, self.rows.pending, self.rows.fired, fire
        )
        columns = self._fold.rows(self.table, gids, batch, fire)
        if not count:
            return []
        mask: Any = pa.array(fire)
        keys = [batch.column(name).filter(mask) for name in self._spec.keys]
        return self._output(keys, starts[fire], columns)

    # -- firing

    @property
    def next_instant(self) -> int | None:
        """The watermark at which windows fire next; ``None``: none is waiting."""
        return self.rows.next_instant

    def _results(self, table: AggregateTable, gids: GroupIds) -> Outputs:
        """The results of some group ids; what is discarded is gone then."""
        if len(gids) == 0:
            return []
        columns = [accumulator.result(gids) for accumulator in table.accumulators]
        start, *keys = table.index.columns(gids)
        outputs = self._output(keys, fixed_view(start, np.int64), columns)
        self._fold.begin_anew(table, gids)
        return outputs

    def times_in(self, batch: pa.RecordBatch) -> Times:
        """``times`` of results."""
        starts = None if self._endless else batch.column(len(self._spec.keys))
        return np.zeros(batch.num_rows, np.int64) if starts is None else fixed_view(starts, np.int64)

    def _output(self, keys: list[pa.Array], starts: Times, columns: list[pa.Array]) -> Outputs:
        kind = self._spec.time_type
        borders = [] if self._endless else [from_words(starts, kind), from_words(starts + self._size_us, kind)]
        return [(0, pa.RecordBatch.from_arrays([*keys, *borders, *columns], schema=self._spec.outputs[0]))]

    # -- snapshots

    def frozen(self, checkpoint_id: int) -> tuple[AggregateTable, MakeSegments]:
        """The table as it is now, and a function that makes its segments."""
        frozen = self.rows.frozen(checkpoint_id)
        width = len(self._spec.keys) + 1

        def rows(part: AggregateTable, gids: GroupIds) -> list[pa.Array]:
            start, *columns = part.rows(gids)
            window = [] if self._endless else [start]
            window += [pa.array(side) for side in part.sides(gids)]
            return [*columns[: width - 1], *window, *columns[width - 1 :]]

        def keys(part: AggregateTable, gids: GroupIds) -> list[pa.Array]:
            return part.index.columns(gids)[1:]

        def segments(name: str, groups: int, changed: Changed | None) -> Iterator[Segment]:
            schema = self._spec.state_schema
            if changed is not None and changed.deleted:
                start = [] if self._endless else self._spec.window_fields[:1]
                fields = pa.schema([*start, *list(schema)[: width - 1]])
                identity: Callable[[list[pa.Array]], list[pa.Array]] = _without_start if self._endless else list
                yield from deleted_segments(name, fields, changed.deleted, _without_start, groups, identity)
            for part, gids, kind in frozen.parts(changed):
                yield from group_segments(name, schema, gids, partial(keys, part), partial(rows, part), groups, kind)

        return frozen.table, segments

    @property
    def restored(self) -> AggregateTable:
        """The rows that a restore sets."""
        return self.table

    def index(self, identity: list[pa.Array]) -> list[pa.Array]:
        """The columns of the table's index, from those by which snapshots tell windows apart."""
        if not self._endless:
            return identity
        return [from_words(np.zeros(len(identity[0]), np.int64), self._spec.time_type), *identity]

    def restore(self, batch: pa.RecordBatch) -> None:
        """Set rows of ``state_schema``."""
        width = len(self._spec.keys)
        window = len(self._spec.window_fields)
        columns = batch.columns
        keys, borders, state = columns[:width], columns[width : width + window], columns[width + window :]
        starts = np.zeros(batch.num_rows, np.int64) if self._endless else fixed_view(borders.pop(0), np.int64)
        gids = self.rows.restore(starts, keys, state)
        self.rows.fired[gids] = borders[0].to_numpy(zero_copy_only=False)
        if self._counted:
            self.rows.pending[gids] = borders[1].to_numpy()


def _without_start(columns: list[pa.Array]) -> list[pa.Array]:
    """The keys among the columns of the table's index."""
    return columns[1:]

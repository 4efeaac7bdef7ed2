"""The operator behind ``RunningAggregateSpec``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import pyarrow as pa

from cutwater.operators.aggregate.keyed_table import FrozenTable, KeyedTable
from cutwater.operators.base import BaseOperator, Context, Outputs
from cutwater.state.disk.rocks import RocksStore
from cutwater.state.keys import require_valid_keys
from cutwater.state.segments import Frozen, Segment
from cutwater.state.table.changes import Changed
from cutwater.state.table.keyed_segments import group_segments, restore_rows
from cutwater.state.table.spill import open_spill

if TYPE_CHECKING:
    from cutwater.operators.aggregate.running_spec import RunningAggregateSpec

STATE = "agg"


class RunningAggregate(BaseOperator):
    """Key columns to slots, then one pass per aggregate."""

    def __init__(self, spec: RunningAggregateSpec) -> None:
        self._spec = spec
        self._output = spec.outputs[0]
        self._state = spec.state_schema
        self._store: RocksStore | None = None

    def _empty(self) -> KeyedTable:
        types = [self._spec.input_schema.field(name).type for name in self._spec.keys]
        table = KeyedTable(types, self._spec.aggregates, self._spec.input_schema)
        if self._store is not None:
            table.spill_to(self._store, self.ctx)
        return table

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        if batch.num_rows == 0:
            return []
        require_valid_keys(batch, self._spec.keys)
        self._table.make_room()
        slots = self._table.upsert([batch.column(name) for name in self._spec.keys])
        passed = [batch.column(name) for name in self._spec.passed_columns]
        results = [accumulator.running(slots, batch) for accumulator in self._table.accumulators]
        return [(0, pa.RecordBatch.from_arrays([*passed, *results], schema=self._output))]

    def freeze(self, checkpoint_id: int) -> Frozen:
        table, groups = self._table.frozen(checkpoint_id), self.ctx.max_parallelism
        keys, owned = len(self._spec.keys), self.ctx.key_groups

        def segments(changed: Changed | None = None, loose: bool = False) -> Iterator[Segment]:
            whole = owned if loose else None
            for part, slots, kind in table.parts(changed):
                of, rows = part.index.columns, part.rows
                yield from group_segments(STATE, self._state, slots, of, rows, groups, kind, keys, whole)

        return FrozenTable([table], segments)

    def restore(self, segments: Iterable[Segment]) -> None:
        self._table = self._empty()
        keys = len(self._spec.keys)
        for batch in restore_rows(self._table, segments, self._state, self.ctx.key_groups):
            self._table.restore(batch.columns[:keys], batch.columns[keys:])
        if self.ctx.incremental:
            self._table.track(restored=True, lasting=True)

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self._store = open_spill(ctx.state_memory_bytes)
        self._table = self._empty()
        if ctx.incremental:
            self._table.track(lasting=True)

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

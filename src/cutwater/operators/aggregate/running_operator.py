"""The operator behind ``RunningAggregateSpec``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import pyarrow as pa

from cutwater.operators.aggregate.layout import AggregateTable, aggregate_layout
from cutwater.operators.base import BaseOperator, Context, Outputs
from cutwater.state.backend import StateBackend
from cutwater.state.keys import require_valid_keys
from cutwater.state.segments import Frozen, Segment
from cutwater.state.table.frozen_table import freeze_table, restore_table

if TYPE_CHECKING:
    from cutwater.operators.aggregate.running_spec import RunningAggregateSpec

STATE = "agg"


class RunningAggregate(BaseOperator):
    """Key columns to group ids, then one pass per aggregate."""

    def __init__(self, spec: RunningAggregateSpec) -> None:
        self._spec = spec
        self._output = spec.outputs[0]
        self._state = spec.state_schema

    def _empty(self) -> AggregateTable:
        types = [self._spec.input_schema.field(name).type for name in self._spec.keys]
        return self._backend.table(types, aggregate_layout(self._spec.aggregates, self._spec.input_schema))

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        if batch.num_rows == 0:
            return []
        require_valid_keys(batch, self._spec.keys)
        self._table.make_room()
        gids = self._table.upsert([batch.column(name) for name in self._spec.keys])
        passed = [batch.column(name) for name in self._spec.passed_columns]
        results = [accumulator.running(gids, batch) for accumulator in self._table.accumulators]
        return [(0, pa.RecordBatch.from_arrays([*passed, *results], schema=self._output))]

    def freeze(self, checkpoint_id: int) -> Frozen:
        owned, groups = self.ctx.key_groups, self.ctx.max_parallelism
        return freeze_table(self._table, checkpoint_id, STATE, self._state, owned, groups)

    def restore(self, segments: Iterable[Segment]) -> None:
        self._table = self._empty()
        restore_table(self._table, segments, self._state, self.ctx.key_groups)
        if self.ctx.incremental:
            self._table.track(restored=True, lasting=True)

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self._backend = StateBackend(ctx)
        self._table = self._empty()
        if ctx.incremental:
            self._table.track(lasting=True)

    def close(self) -> None:
        self._backend.close()

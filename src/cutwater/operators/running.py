"""The operator behind ``RunningAggregateSpec``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from cutwater.operators.base import BaseOperator, Context, Outputs
from cutwater.operators.keyed_table import FrozenTable, KeyedTable, group_segments, keyed_rows
from cutwater.state.index import Slots
from cutwater.state.keys import require_valid_keys
from cutwater.state.segments import Frozen, Segment, SegmentKind

if TYPE_CHECKING:
    from cutwater.operators.aggregate import RunningAggregateSpec

__all__ = ["RunningAggregate"]

STATE = "agg"


class RunningAggregate(BaseOperator):
    """Key columns to slots, then one pass per aggregate."""

    def __init__(self, spec: RunningAggregateSpec) -> None:
        self._spec = spec
        self._output = spec.outputs[0]
        self._state = spec.state_schema
        self._table = self._empty()

    def _empty(self, expected: int = 0) -> KeyedTable:
        types = [self._spec.input_schema.field(name).type for name in self._spec.keys]
        return KeyedTable(types, self._spec.aggregates, self._spec.input_schema, expected)

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        if batch.num_rows == 0:
            return []
        require_valid_keys(batch, self._spec.keys)
        slots = self._table.upsert([batch.column(name) for name in self._spec.keys])
        passed = [batch.column(name) for name in self._spec.passed_columns]
        results = [accumulator.running(slots, batch) for accumulator in self._table.accumulators]
        return [(0, pa.RecordBatch.from_arrays([*passed, *results], schema=self._output))]

    def freeze(self, checkpoint_id: int) -> Frozen:
        table, groups = self._table.frozen(checkpoint_id), self.ctx.max_parallelism
        identity = len(self._spec.keys)

        def segments(slots: Slots, kind: SegmentKind) -> Iterator[Segment]:
            return group_segments(STATE, self._state, slots, table.index.columns, table.rows, groups, kind, identity)

        def everything() -> Iterator[Segment]:
            return segments(np.arange(len(table), dtype=np.int32), "base")

        return FrozenTable([table], everything, lambda changed: segments(changed[0], "delta"))

    def restore(self, segments: Iterable[Segment]) -> None:
        batches = keyed_rows(segments, self._state, self.ctx.key_groups)
        self._table = self._empty(sum(batch.num_rows for batch in batches))
        keys = len(self._spec.keys)
        for batch in batches:
            self._table.restore(batch.columns[:keys], batch.columns[keys:])
        if self.ctx.incremental:
            self._table.track(restored=True)

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        if ctx.incremental:
            self._table.track()

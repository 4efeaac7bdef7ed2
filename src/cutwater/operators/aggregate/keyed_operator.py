"""Operators whose state is one keyed table, and the watermark if they go by event time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.rows import event_times
from cutwater.operators.aggregate import kernels as aggregate_kernels
from cutwater.operators.aggregate.accumulators import Accumulator, Aggregate
from cutwater.operators.base import Context, Operator, Outputs
from cutwater.operators.group_watermarks import GroupWatermarks
from cutwater.state.backend import StateBackend
from cutwater.state.growing_array import GrowingArray
from cutwater.state.key_index import GroupIds
from cutwater.state.keys import hash_keys, key_groups, require_valid_keys
from cutwater.state.segments import Frozen, Segment
from cutwater.state.table.keyed_segments import freeze_table, restore_table
from cutwater.state.table.keyed_table import KeyedTable, Layout

if TYPE_CHECKING:
    from cutwater.operators.aggregate.running_spec import RunningAggregateSpec


AggregateTable: TypeAlias = KeyedTable[Accumulator]
"""The values of each aggregate, by key."""


def aggregate_layout(aggregates: Sequence[Aggregate], schema: pa.Schema) -> Layout[Accumulator]:
    """One accumulator per aggregate, over rows of ``schema``."""
    types = [[field.type for field in aggregate.state_fields(schema)] for aggregate in aggregates]
    return Layout(lambda: [aggregate.accumulator(schema) for aggregate in aggregates], types)


_SLACK_KEYS = 1 << 12
"""Keys below this number are not worth a sweep."""


def as_rows(batch: pa.RecordBatch) -> pa.Array:
    """The rows of a batch as values of the type ``changes.row_type``."""
    fields = [column.with_nullable(True) for column in batch.schema]
    return pa.StructArray.from_arrays(batch.columns, fields=fields)


class Touched:
    """The distinct keys of a batch: ``gids`` of them, and for each row the number of its key among those.

    Attributes:
        local: by row, the number of its key.
        gids: by number, the group id.
        known: by number, whether the key was there before the batch.
    """

    def __init__(self, table: AggregateTable, rows: GroupIds, before: int, scratch: GrowingArray) -> None:
        self.local, gids = np.empty(len(rows), np.int32), np.empty(len(rows), np.int32)
        self.gids: GroupIds = gids[: aggregate_kernels.localise(rows, scratch.values, self.local, gids)]
        self.known: npt.NDArray[np.bool_] = table.known(self.gids, before)

    def __len__(self) -> int:
        return len(self.gids)


class KeyedOperator(Operator):
    """Freezing, restoring, late rows, and forgetting keys.

    Args:
        key_types: types in which keys are compared.
        held: what the table keeps by key, over rows of ``held_schema``.
        state_schema: the key columns, then the state of ``held``.
        timed: whether a watermark belongs to the state.
    """

    _name = "table"
    """Of the state."""
    _lasting = False
    """No key is ever forgotten."""

    def __init__(
        self,
        key_types: Sequence[pa.DataType],
        held: Sequence[Aggregate],
        held_schema: pa.Schema,
        state_schema: pa.Schema,
        *,
        timed: bool,
    ) -> None:
        self._key_types, self._held, self._held_schema = list(key_types), list(held), held_schema
        self._state = state_schema
        self._timed = timed

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self._backend = StateBackend(ctx)
        self._clear()
        self._track()

    def _track(self, *, restored: bool = False) -> None:
        if self.ctx.incremental:
            self._table.track(restored=restored, lasting=self._lasting)

    def close(self) -> None:
        self._backend.close()

    def _clear(self) -> None:
        self._table = self._backend.table(self._key_types, aggregate_layout(self._held, self._held_schema))
        self._scratch = GrowingArray(np.int32)
        self._watermarks = GroupWatermarks(self.ctx.key_groups, self.ctx.max_parallelism)
        self._sweep_at = _SLACK_KEYS

    # -- rows

    def _touch(self, keys: Sequence[pa.Array]) -> Touched:
        """Find or make the group ids of a batch's rows; those of the batches before mean nothing any more."""
        self._make_room()
        before = len(self._table)
        rows = self._table.upsert(keys)
        self._scratch.reserve(len(self._table))
        return Touched(self._table, rows, before, self._scratch)

    def _make_room(self) -> None:
        """Between batches: forget what is not live before rows have to leave memory."""
        if self._table.crowded:
            live = self._live(self._table, self._all_gids)
            if not live.all():
                self._forget(live)
        self._table.make_room()

    def _divert_late(
        self, batch: pa.RecordBatch, keys: Sequence[pa.Array], time: str
    ) -> tuple[pa.RecordBatch, npt.NDArray[np.int64], Outputs]:
        """The rows that are not behind the watermark, their times, and the others as side output."""
        times = event_times(batch, time)
        reached: npt.NDArray[np.int64] | int = self._watermarks.current
        if self._watermarks.differ:
            reached = self._watermarks.of(key_groups(hash_keys(keys), self.ctx.max_parallelism))
        late = times <= np.maximum(reached, self.late_before)
        outputs = self._late(batch, late)
        if outputs:
            batch, times = batch.filter(pa.array(~late)), times[~late]
            times.flags.writeable = False  # one specialisation of the kernels
        return batch, times, outputs

    # -- forgetting

    def _live(self, table: AggregateTable, gids: GroupIds) -> npt.NDArray[np.bool_]:
        """Mask of the group ids of a table that hold anything that is still needed."""
        return np.ones(len(gids), np.bool_)

    def _worth_a_sweep(self) -> bool:
        return len(self._table) >= self._sweep_at

    def _keep(self, live: npt.NDArray[np.bool_]) -> None:
        """Forget the keys that are not ``live`` if they are at least half; else look again when there are more."""
        kept = int(np.count_nonzero(live))
        if 2 * kept <= len(live):
            self._forget(live)
            self._sweep_at = 2 * kept + _SLACK_KEYS
        else:
            self._sweep_at = len(live) + len(live) // 2

    def _forget(self, live: npt.NDArray[np.bool_]) -> None:
        self._table.delete(np.flatnonzero(~live).astype(np.int32))
        self._table.keep(np.flatnonzero(live).astype(np.int32))
        self._scratch = GrowingArray(np.int32)

    @property
    def _all_gids(self) -> GroupIds:
        return np.arange(len(self._table), dtype=np.int32)

    # -- snapshots

    def freeze(self, checkpoint_id: int) -> Frozen:
        watermarks = [self._watermarks.segment()] if self._timed else []
        owned, groups = self.ctx.key_groups, self.ctx.max_parallelism
        return freeze_table(self._table, checkpoint_id, self._name, self._state, owned, groups, watermarks)

    def restore(self, segments: Iterable[Segment]) -> None:
        self._clear()
        restore_table(self._table, self._watermarks.restored_from(segments), self._state, self.ctx.key_groups)
        self._track(restored=True)


class RunningAggregate(KeyedOperator):
    """Key columns to group ids, then one pass per aggregate."""

    _name = "agg"
    _lasting = True

    def __init__(self, spec: RunningAggregateSpec) -> None:
        types = [field.type for field in spec.key_fields]
        super().__init__(types, spec.aggregates, spec.input_schema, spec.state_schema, timed=False)
        self._spec = spec
        self._output = spec.outputs[0]
        self._passed = spec.passed_columns[len(spec.keys) :]
        """Beside the keys."""

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        if batch.num_rows == 0:
            return []
        keys = require_valid_keys(batch, self._spec.keys)
        self._table.make_room()
        gids = self._table.upsert(keys)
        passed = [batch.column(name) for name in self._passed]
        results = [accumulator.running(gids, batch) for accumulator in self._table.accumulators]
        return [(0, pa.RecordBatch.from_arrays([*keys, *passed, *results], schema=self._output))]

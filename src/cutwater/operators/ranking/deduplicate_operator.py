"""The operator behind ``DeduplicateSpec``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.changes import OP, added_rows, op_column
from cutwater.data.words import from_words, to_words, valid_rows
from cutwater.operators.aggregate import kernels
from cutwater.operators.aggregate.keyed_operator import AggregateTable, KeyedOperator, Touched, as_rows
from cutwater.operators.base import Outputs
from cutwater.operators.ranking.deduplicate_spec import EXPIRES, ROW
from cutwater.state.key_index import GroupIds
from cutwater.state.keys import require_valid_keys
from cutwater.state.table.row_store import take_or_null

if TYPE_CHECKING:
    from cutwater.operators.ranking.deduplicate_spec import DeduplicateSpec

_FOR_EVER = 2**63 - 1
_TIME = pa.timestamp("us")

Times = npt.NDArray[np.int64]


class Deduplicate(KeyedOperator):
    """A table of keys, with the time at which each expires and its latest row, as far as the spec asks for them."""

    def __init__(self, spec: DeduplicateSpec) -> None:
        types = [field.type for field in spec.key_fields]
        super().__init__(types, spec.held, spec.held_schema, spec.state_schema, timed=spec.within_us is not None)
        self._spec = spec

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        if batch.num_rows == 0:
            return []
        spec = self._spec
        require_valid_keys(batch, spec.keys)
        outputs: Outputs = []
        if spec.within_us is None:
            times: Times = np.zeros(batch.num_rows, np.int64)
            times.flags.writeable = False
        else:
            assert spec.event_time is not None
            keys = [batch.column(name) for name in spec.keys]
            batch, times, outputs = self._divert_late(batch, keys, spec.event_time)
        if batch.num_rows:
            touched = self._touch([batch.column(name) for name in spec.keys])
            until = self._until(touched)
            work = self._first if spec.keep == "first" else self._last
            outputs += work(batch, times, touched, until)
        return outputs

    def _until(self, touched: Touched) -> Times:
        """By key of the batch, when it expires; ``touched.known`` becomes false for keys without a time."""
        if self._spec.within_us is None:
            return np.full(len(touched), _FOR_EVER, np.int64)
        expires = self._table.accumulators[0].result(touched.gids)
        valid = valid_rows(expires)
        if valid is not None:
            touched.known &= valid
        return np.array(to_words(expires))

    def _first(self, batch: pa.RecordBatch, times: Times, touched: Touched, until: Times) -> Outputs:
        kept = np.empty(batch.num_rows, np.bool_)
        kernels.keep_first(touched.local, times, self._within, touched.known, until, kept)
        self._hold_until(touched, until)
        count = int(np.count_nonzero(kept))
        if count < batch.num_rows:
            self.ctx.count("rows_duplicate", batch.num_rows - count)
            batch = batch.filter(pa.array(kept))
        return [(0, batch)] if count else []

    def _last(self, batch: pa.RecordBatch, times: Times, touched: Touched, until: Times) -> Outputs:
        stored = self._table.accumulators[-1]
        came = as_rows(batch)
        pool = pa.concat_arrays([stored.result(touched.gids), came])
        current = np.arange(len(touched))
        rows, codes = np.empty(2 * len(came), np.int64), np.empty(2 * len(came), np.int8)
        count = kernels.keep_last(touched.local, times, self._within, touched.known, until, current, rows, codes)
        self._hold_until(touched, until)
        latest = came.take(pa.array(current - len(touched)))
        stored.update(touched.gids, pa.record_batch({ROW: latest}))
        columns: list[Any] = pool.take(pa.array(rows[:count])).flatten()
        changes = [op_column(codes[:count]), *columns]
        return [(0, pa.RecordBatch.from_arrays(changes, schema=self._spec.outputs[0]))]

    @property
    def _within(self) -> int:
        """Added to zero where there is no event time."""
        return _FOR_EVER if self._spec.within_us is None else self._spec.within_us

    def _hold_until(self, touched: Touched, until: Times) -> None:
        if self._spec.within_us is not None:
            self._table.accumulators[0].update(touched.gids, pa.record_batch({EXPIRES: from_words(until, _TIME)}))

    # -- time

    def on_watermark(self, watermark: int) -> Outputs:
        if self._timed and self._watermarks.advance(watermark):
            if self._worth_a_sweep():
                self._keep(self._live(self._table, self._all_gids))
            self._table.clean(self._live)
        return []

    def _live(self, table: AggregateTable, gids: GroupIds) -> npt.NDArray[np.bool_]:
        if not self._timed:
            return super()._live(table, gids)
        return to_words(table.accumulators[0].result(gids)) - 1 > self._watermarks.current


class LatestOfChanges(KeyedOperator):
    """A table of keys with the latest row of each, null where it was removed, of rows that say so."""

    def __init__(self, spec: DeduplicateSpec) -> None:
        types = [field.type for field in spec.key_fields]
        super().__init__(types, spec.held, spec.held_schema, spec.state_schema, timed=False)
        self._spec = spec
        self._removed = 0

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        if batch.num_rows == 0:
            return []
        self._sweep()
        require_valid_keys(batch, self._spec.keys)
        added = added_rows(batch)
        batch = batch.drop_columns([OP])
        touched = self._touch([batch.column(name) for name in self._spec.keys])
        held = self._table.accumulators[0]
        stored, came = held.result(touched.gids), as_rows(batch)
        current = np.where(_is_valid(stored), np.arange(len(touched)), -1)
        nothing = np.zeros(len(touched), np.bool_)
        rows, keys = np.empty(2 * len(came), np.int64), np.empty(2 * len(came), np.int64)
        codes = np.empty(2 * len(came), np.int8)
        count, missing = kernels.replace_rows(touched.local, added, current, nothing, True, False, rows, keys, codes)
        if missing:
            self.ctx.count("rows_unmatched", missing)
        self._hold(touched, current, came)
        if not count:
            return []
        out: Any = take_or_null(pa.concat_arrays([stored, came]), rows[:count])
        columns = [op_column(codes[:count]), *out.flatten()]
        return [(0, pa.RecordBatch.from_arrays(columns, schema=self._spec.outputs[0]))]

    def _hold(self, touched: Touched, current: npt.NDArray[np.int64], came: pa.Array) -> None:
        """Put what each key is left with into the state."""
        held = self._table.accumulators[0]
        fresh = current >= len(touched)
        if fresh.any():
            latest = came.take(pa.array(current[fresh] - len(touched)))
            held.update(touched.gids[fresh], pa.record_batch({ROW: latest}))
        gone = touched.gids[current < 0]
        if len(gone):
            held.restore(gone, [pa.nulls(len(gone), came.type)])
            self._removed += len(gone)

    def _sweep(self) -> None:
        """Forget keys without a row; renumbers the group ids."""
        if self._removed > len(self._table) // 2 and self._worth_a_sweep():
            self._removed = 0
            self._keep(self._live(self._table, self._all_gids))

    def _live(self, table: AggregateTable, gids: GroupIds) -> npt.NDArray[np.bool_]:
        return _is_valid(table.accumulators[0].result(gids))


def _is_valid(rows: pa.Array) -> npt.NDArray[np.bool_]:
    valid = valid_rows(rows)
    return np.ones(len(rows), np.bool_) if valid is None else valid

"""The operator behind ``TopSpec``."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.changes import OP, added_rows, op_column
from cutwater.operators.aggregate.keyed_operator import KeyedOperator, as_rows
from cutwater.operators.aggregate.layout import AggregateTable
from cutwater.operators.aggregate.ranked_rows import RankedRows, Work
from cutwater.operators.base import Outputs
from cutwater.state.index.key_index import GroupIds
from cutwater.state.keys import require_valid_keys

if TYPE_CHECKING:
    from cutwater.operators.ranking.top_spec import TopSpec


class Top(KeyedOperator):
    """One table of ranked rows by key; what a batch changes comes out in batches of a bounded size."""

    def __init__(self, spec: TopSpec) -> None:
        types = [spec.input_schema.field(name).type for name in spec.keys]
        super().__init__(types, (spec.rows,), spec.table, spec.state_schema, timed=False)
        self._spec = spec
        self._work: Work | None = None

    @property
    def _ranked(self) -> RankedRows:
        return cast("RankedRows", self._table.accumulators[0])

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        if batch.num_rows == 0:
            return []
        spec = self._spec
        if spec.updating and self._worth_a_sweep():
            self._keep(self._live(self._table, self._all_gids))
        require_valid_keys(batch, spec.keys)
        added = None
        if spec.updating:
            added = added_rows(batch)
            batch = batch.drop_columns([OP])
        self._make_room()
        gids = self._table.upsert([batch.column(name) for name in spec.keys])
        self._work = self._ranked.work(gids, as_rows(batch), added)
        outputs = self.resume()
        if self.ctx.repeatable:  # where a portion ends depends on the room that there is, which a restore changes
            while self.pending:
                outputs += self.resume()
            if len(outputs) > 1:
                outputs = [(0, pa.concat_batches([rows for _, rows in outputs]))]
        return outputs

    def _live(self, table: AggregateTable, gids: GroupIds) -> npt.NDArray[np.bool_]:
        return cast("RankedRows", table.accumulators[0]).used(gids)

    @property
    def pending(self) -> bool:
        return self._work is not None

    def resume(self) -> Outputs:
        work = self._work
        if work is None:
            return []
        changes = self._ranked.change(work)
        if work.done:
            self._work = None
        if changes.missing:
            self.ctx.count("rows_unmatched", changes.missing)
        if len(changes.codes) == 0:
            return []
        rank = [] if self._spec.rank is None else [pa.array(changes.ranks)]
        columns = [op_column(changes.codes), *changes.rows, *rank]
        return [(0, pa.RecordBatch.from_arrays(columns, schema=self._spec.outputs[0]))]

    def on_watermark(self, watermark: int) -> Outputs:
        outputs: Outputs = []
        while self.pending:
            outputs += self.resume()
        return outputs

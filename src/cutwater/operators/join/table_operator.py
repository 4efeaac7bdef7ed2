"""The operator behind ``TableJoinSpec``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.changes import OP, added_rows, op_column
from cutwater.data.words import valid_rows
from cutwater.operators.aggregate import kernels
from cutwater.operators.aggregate.accumulators import Accumulator
from cutwater.operators.aggregate.keyed_operator import AggregateTable, KeyedOperator, Touched, as_rows
from cutwater.operators.base import Outputs
from cutwater.operators.join.spec import TABLES
from cutwater.state.key_index import GroupIds
from cutwater.state.keys import null_key_mask, require_valid_keys
from cutwater.state.table.row_store import take_or_null

if TYPE_CHECKING:
    from cutwater.operators.join.spec import TableJoinSpec


class TableJoin(KeyedOperator):
    """One table by key with a row of each side, null where the side has none."""

    def __init__(self, spec: TableJoinSpec) -> None:
        super().__init__(spec.key_types, spec.held, spec.held_schema, spec.state_schema, timed=False)
        self._spec = spec
        self._sides = ((spec.left_schema, spec.left_keys), (spec.right_schema, spec.right_keys))
        self._removed = 0

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        if batch.num_rows == 0:
            return []
        self._sweep()
        spec = self._spec
        _, names = self._sides[input]
        require_valid_keys(batch, names)
        if spec.updating[input]:
            added = added_rows(batch)
            batch = batch.drop_columns([OP])
        else:
            added = np.ones(batch.num_rows, np.bool_)
        keys_of_rows = [batch.column(n).cast(t) for n, t in zip(names, spec.key_types, strict=True)]
        touched = self._touch(keys_of_rows)
        mine, other = self._table.accumulators[input], self._table.accumulators[1 - input]
        came, met = as_rows(batch), other.result(touched.gids)
        null = null_key_mask(keys_of_rows)
        if null is not None:  # as in SQL, equal to nothing on the other side
            partners = np.arange(len(touched))
            partners[touched.local[null]] = -1
            met = take_or_null(met, partners)
        stored = mine.result(touched.gids)
        current = np.where(_is_valid(stored), np.arange(len(touched)), -1)
        rows, keys = np.empty(2 * len(came), np.int64), np.empty(2 * len(came), np.int64)
        codes = np.empty(2 * len(came), np.int8)
        count, missing = kernels.replace_rows(
            touched.local,
            added,
            current,
            _is_valid(met),
            spec.outer[input],
            spec.outer[1 - input],
            rows,
            keys,
            codes,
        )
        if missing:
            self.ctx.count("rows_unmatched", missing)
        self._hold(mine, touched, current, came, input)
        if not count:
            return []
        out = take_or_null(pa.concat_arrays([stored, came]), rows[:count])
        partner = met.take(pa.array(keys[:count]))
        left, right = (out, partner) if input == 0 else (partner, out)
        return [(0, self._joined(op_column(codes[:count]), left, right, touched.gids[keys[:count]]))]

    def _hold(self, mine: Accumulator, touched: Touched, current: Any, came: pa.Array, side: int) -> None:
        """Put what each key is left with into the state."""
        set_now = current >= len(touched)
        if set_now.any():
            latest = came.take(pa.array(current[set_now] - len(touched)))
            mine.update(touched.gids[set_now], pa.record_batch({TABLES[side]: latest}))
        gone = touched.gids[current < 0]
        if len(gone):
            mine.restore(gone, [pa.nulls(len(gone), came.type)])
            self._removed += len(gone)

    def _sweep(self) -> None:
        """Forget keys without a row; renumbers the group ids."""
        if self._removed > len(self._table) // 2 and self._worth_a_sweep():
            self._removed = 0
            self._keep(self._live(self._table, self._all_gids))

    def _live(self, table: AggregateTable, gids: GroupIds) -> npt.NDArray[np.bool_]:
        left, right = (_is_valid(side.result(gids)) for side in table.accumulators)
        return left | right

    def _joined(self, op: pa.Array, left: pa.Array, right: pa.Array, gids: GroupIds) -> pa.RecordBatch:
        spec = self._spec
        columns: list[pa.Array] = [op, *_columns(left)]
        keys = self._table.index.columns(gids) if spec.dropped else []
        for name, key in zip(spec.left_keys, keys, strict=False):
            if name in spec.dropped:  # the side that has the row may be either
                columns[1 + spec.tables[0].get_field_index(name)] = key
        carried = [i for i, name in enumerate(spec.tables[1].names) if name not in spec.dropped]
        parts = _columns(right)
        return pa.RecordBatch.from_arrays([*columns, *(parts[i] for i in carried)], schema=spec.outputs[0])


def _columns(rows: pa.Array) -> list[pa.Array]:
    """The columns of a struct array, null where the struct is."""
    structs: Any = rows
    return structs.flatten()


def _is_valid(rows: pa.Array) -> Any:
    valid = valid_rows(rows)
    return np.ones(len(rows), np.bool_) if valid is None else valid

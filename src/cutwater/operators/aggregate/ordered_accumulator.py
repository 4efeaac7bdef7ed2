"""``first`` and ``last`` of parts that are put together later, in any order: each part knows when its value came."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.words import from_words, to_words, valid_rows
from cutwater.operators.aggregate import kernels
from cutwater.operators.aggregate.accumulators import Accumulator
from cutwater.state.growing_array import GrowingArray, Values
from cutwater.state.index.key_index import GroupIds

ARRIVAL = "__arrival"
"""Column (int64, from 0 on, rising) that numbers the rows of a step as they come."""

_ALL: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
_ALL.flags.writeable = False


class Ordered(Accumulator):
    """``first`` or ``last`` with the arrival number of the value by group id, in the state -1 before there is one.

    Args:
        inner: holds the values.
        column: the column it reads.
        first: whether the earliest is wanted, else the latest.
    """

    def __init__(self, inner: Accumulator, column: str, *, first: bool) -> None:
        self._inner = inner
        self._column = column
        self._first = first
        self._places = GrowingArray(np.int64)  # one more than the number, so that an empty group id is zero
        self._copy: Values | None = None
        self.columns = [self._places, *inner.columns]

    @property
    def varying_bytes(self) -> int:
        return self._inner.varying_bytes

    def reserve(self, gids: int) -> None:
        self._inner.reserve(gids)
        self._places.reserve(gids)

    def update(self, gids: GroupIds, batch: pa.RecordBatch) -> None:
        self._inner.update(gids, batch)
        self._note(gids, batch)

    def running(self, gids: GroupIds, batch: pa.RecordBatch) -> pa.Array:
        results = self._inner.running(gids, batch)
        self._note(gids, batch)
        return results

    def _note(self, gids: GroupIds, batch: pa.RecordBatch) -> None:
        valid = valid_rows(batch.column(self._column))
        orders = to_words(batch.column(ARRIVAL))
        kernels.note_orders(gids, orders, _ALL if valid is None else valid, self._first, self._places.values)

    def result(self, gids: GroupIds) -> pa.Array:
        return self._inner.result(gids)

    def state(self, gids: GroupIds) -> list[pa.Array]:
        places = self._places.values if self._copy is None else self._copy
        return [*self._inner.state(gids), from_words(places[gids] - 1, pa.int64())]

    def restore(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        self._inner.restore(gids, columns[:-1])
        self._places.values[gids] = to_words(columns[-1]) + 1

    def merge(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        orders = to_words(columns[-1])
        places = self._places.values
        kernels.take_orders(gids, orders, self._first, places)
        won = (orders >= 0) & (places[gids] == orders + 1)  # a number belongs to one row
        mask: Any = pa.array(won)
        self._inner.restore(gids[won], [column.filter(mask) for column in columns[:-1]])

    def keep(self, gids: GroupIds) -> None:
        self._inner.keep(gids)
        self._places.replace(self._places.values[gids])

    def frozen(self, columns: Sequence[Values]) -> Accumulator:
        copy = Ordered(self._inner.frozen(columns[1:]), self._column, first=self._first)
        copy._copy = columns[0]
        return copy

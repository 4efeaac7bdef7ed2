"""First, last, min and max over columns of any Arrow type: a store of values and a reference into it per group id."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from cutwater.data.words import valid_rows
from cutwater.operators.aggregate import kernels
from cutwater.operators.aggregate.accumulators import Accumulator
from cutwater.state.growing_array import GrowingArray, Values
from cutwater.state.index.key_index import GroupIds
from cutwater.state.table.row_store import ValueStore

_compute: Any = pyarrow.compute  # the stubs do not know ``rank``

_HOW = {"first": 0, "last": 1, "min": 2, "max": 3}
_GARBAGE_ROWS = 4096
"""Replaced values are swept out when they are more than this and more than the values in use."""


class PickValue(Accumulator):
    """One of the batch's values, or the one held before, per group id."""

    def __init__(self, kind: str, column: str, result: pa.DataType) -> None:
        self._how = _HOW[kind]
        self._column = column
        self._used = 0
        self._held = 0
        self._store = ValueStore(result)
        self._places = GrowingArray(np.int64)  # one more than the reference, so that an empty group id is zero
        self._copies: Sequence[Values] | None = None
        self._numbers = GrowingArray(np.int32)
        self.columns = [self._places]

    @property
    def varying_bytes(self) -> int:
        return self._store.nbytes

    def reserve(self, gids: int) -> None:
        self._used = gids
        self._places.reserve(gids)
        self._numbers.reserve(gids)

    def _references(self, gids: GroupIds) -> npt.NDArray[np.int64]:
        places = self._places.values if self._copies is None else self._copies[0]
        return places[gids] - 1

    def update(self, gids: GroupIds, batch: pa.RecordBatch) -> None:
        self._take(gids, batch.column(self._column), wanted=False)

    def running(self, gids: GroupIds, batch: pa.RecordBatch) -> pa.Array:
        out = self._take(gids, batch.column(self._column), wanted=True)
        assert out is not None
        return out

    def _take(self, gids: GroupIds, column: pa.Array, *, wanted: bool) -> pa.Array | None:
        rows = len(gids)
        local, touched = np.empty(rows, np.int32), np.empty(rows, np.int32)
        touched = touched[: kernels.localise(gids, self._numbers.values, local, touched)]
        before = self._references(touched)
        pool = column
        if wanted or self._how >= 2:
            pool = pa.concat_arrays([self._store.take(before), column])
        ranks = np.empty(0, np.uint64)
        if self._how >= 2:
            ranks = _compute.rank(pool, tiebreaker="dense").to_numpy(zero_copy_only=False)
        current = np.where(before < 0, -1, np.arange(len(touched)))
        out = np.empty(rows, np.int64)
        valid = valid_rows(column)
        kernels.pick(local, _ALL if valid is None else valid, _writable(ranks), self._how, current, out)
        self._hold(touched, current, column)
        return pool.take(_nullable(out)) if wanted else None

    def _hold(self, touched: GroupIds, current: npt.NDArray[np.int64], column: pa.Array) -> None:
        fresh = current >= len(touched)
        chosen = current[fresh] - len(touched)
        first = self._store.append(column.take(pa.array(chosen)))
        gids = touched[fresh]
        self._held += int((self._places.values[gids] == 0).sum())
        self._places.values[gids] = 1 + first + np.arange(len(chosen))
        self._sweep()

    def _sweep(self) -> None:
        garbage = len(self._store) - self._held
        if garbage <= max(_GARBAGE_ROWS, self._held):
            return
        places = self._places.values[: self._used].copy()  # not in place: a snapshot may refer to the old store
        used = np.flatnonzero(places)
        self._store = self._store.compacted(places[used] - 1)
        places[used] = 1 + np.arange(len(used))
        self._places.replace(places)

    def result(self, gids: GroupIds) -> pa.Array:
        return self._store.take(self._references(gids))

    def state(self, gids: GroupIds) -> list[pa.Array]:
        return [self.result(gids)]

    def restore(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        valid = valid_rows(columns[0])
        rows = np.arange(len(gids)) if valid is None else np.flatnonzero(valid)
        places = self._places.values
        self._held += len(rows) - int(np.count_nonzero(places[gids]))
        places[gids] = 0
        first = self._store.append(columns[0].take(pa.array(rows)))
        places[gids[rows]] = 1 + first + np.arange(len(rows))

    def merge(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        self.update(gids, pa.record_batch({self._column: columns[0]}))

    def keep(self, gids: GroupIds) -> None:
        self._places.replace(self._places.values[gids])
        self._used = len(gids)
        self._held = int(np.count_nonzero(self._places.values[: self._used]))
        self._sweep()

    def frozen(self, columns: Sequence[Values]) -> Accumulator:
        copy = object.__new__(PickValue)
        vars(copy).update(vars(self))
        copy._store = self._store.frozen()
        copy._copies = columns
        return copy


_ALL = np.zeros(0, np.bool_)
_ALL.flags.writeable = False


def _writable(ranks: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    return np.array(ranks, np.int64)


def _nullable(rows: npt.NDArray[np.int64]) -> pa.Array:
    missing = rows < 0
    return pa.array(rows, mask=missing) if missing.any() else pa.array(rows)

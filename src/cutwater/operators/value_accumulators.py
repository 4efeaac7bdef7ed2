"""First, last, min and max over columns of any Arrow type: a store of values and a reference into it per slot."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from cutwater.operators import aggregate_kernels as kernels
from cutwater.operators.accumulators import Accumulator
from cutwater.state.index import Slots
from cutwater.state.values import ValueStore
from cutwater.state.words import valid_rows

__all__ = ["PickValue"]

_compute: Any = pyarrow.compute  # the stubs do not know ``rank``

_HOW = {"first": 0, "last": 1, "min": 2, "max": 3}
_GARBAGE_ROWS = 4096
"""Replaced values are swept out when they are more than this and more than the values in use."""


class PickValue(Accumulator):
    """One of the batch's values, or the one held before, per slot."""

    def __init__(self, kind: str, column: str, result: pa.DataType) -> None:
        self._how = _HOW[kind]
        self._column = column
        self._used = 0
        self._held = 0
        self._store = ValueStore(result)
        self._references = np.full(0, -1, np.int64)
        self._numbers = np.full(0, -1, np.int32)

    def reserve(self, slots: int) -> None:
        self._used = slots
        if slots > len(self._references):
            size = max(1024, 2 * slots)
            grown = np.full(size, -1, np.int64)
            grown[: len(self._references)] = self._references
            self._references = grown
            self._numbers = np.full(size, -1, np.int32)

    def update(self, slots: Slots, batch: pa.RecordBatch) -> None:
        self._take(slots, batch.column(self._column), wanted=False)

    def running(self, slots: Slots, batch: pa.RecordBatch) -> pa.Array:
        out = self._take(slots, batch.column(self._column), wanted=True)
        assert out is not None
        return out

    def _take(self, slots: Slots, column: pa.Array, *, wanted: bool) -> pa.Array | None:
        rows = len(slots)
        local, touched = np.empty(rows, np.int32), np.empty(rows, np.int32)
        touched = touched[: kernels.localise(slots, self._numbers, local, touched)]
        before = self._references[touched]
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

    def _hold(self, touched: Slots, current: npt.NDArray[np.int64], column: pa.Array) -> None:
        fresh = current >= len(touched)
        chosen = current[fresh] - len(touched)
        first = self._store.append(column.take(pa.array(chosen)))
        slots = touched[fresh]
        self._held += int((self._references[slots] < 0).sum())
        self._references[slots] = first + np.arange(len(chosen))
        self._sweep()

    def _sweep(self) -> None:
        garbage = len(self._store) - self._held
        if garbage <= max(_GARBAGE_ROWS, self._held):
            return
        used = np.flatnonzero(self._references[: self._used] >= 0)
        self._store = self._store.compacted(self._references[used])
        self._references[used] = np.arange(len(used))

    def result(self, slots: Slots) -> pa.Array:
        return self._store.take(self._references[slots])

    def state(self, slots: Slots) -> list[pa.Array]:
        return [self.result(slots)]

    def restore(self, slots: Slots, columns: list[pa.Array]) -> None:
        valid = valid_rows(columns[0])
        rows = np.arange(len(slots)) if valid is None else np.flatnonzero(valid)
        self._references[slots] = -1
        first = self._store.append(columns[0].take(pa.array(rows)))
        self._references[slots[rows]] = first + np.arange(len(rows))
        self._held = int((self._references[: self._used] >= 0).sum())

    def merge(self, slots: Slots, columns: list[pa.Array]) -> None:
        self.update(slots, pa.record_batch({self._column: columns[0]}))

    def keep(self, slots: Slots) -> None:
        self._references = self._references[slots]
        self._numbers = np.full(len(slots), -1, np.int32)
        self._used = len(slots)
        self._held = int((self._references >= 0).sum())
        self._sweep()

    def frozen(self) -> Accumulator:
        copy = object.__new__(PickValue)
        vars(copy).update(vars(self))
        copy._store = self._store.frozen()
        copy._references = self._references[: self._used].copy()
        return copy

    def release(self) -> None:
        self._references = np.empty(0, np.int64)


_ALL = np.zeros(0, np.bool_)
_ALL.flags.writeable = False


def _writable(ranks: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    return np.array(ranks, np.int64)


def _nullable(rows: npt.NDArray[np.int64]) -> pa.Array:
    missing = rows < 0
    return pa.array(rows, mask=missing) if missing.any() else pa.array(rows)

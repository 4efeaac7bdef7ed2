"""Accumulators of counts, sums, moments and chosen values: words by key, or a reference into a store of values."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from cutwater.data.words import Words, fixed_view, from_words, new_buffer, to_words, valid_rows
from cutwater.errors import DataError
from cutwater.operators.aggregate import kernels
from cutwater.operators.aggregate.accumulators import Accumulator
from cutwater.state.growing_array import GrowingArray, Values, gather
from cutwater.state.key_index import GroupIds
from cutwater.state.table.row_store import ValueStore, take_or_null

Mask = npt.NDArray[np.bool_]

_NO_MASK: Mask = np.zeros(0, np.bool_)
_NO_MASK.flags.writeable = False


def mask_of(column: pa.Array) -> Mask:
    """The rows with a value, as kernels take them: empty if all have one."""
    valid = valid_rows(column)
    return _NO_MASK if valid is None else valid


class ArrayAccumulator(Accumulator):
    """Arrays by group id that grow together, empty group ids being zero; a frozen one has copies of them."""

    def __init__(self, *dtypes: Any) -> None:
        self.columns = [GrowingArray(dtype) for dtype in dtypes]
        self._copies: Sequence[Values] | None = None

    @property
    def _arrays(self) -> Sequence[Values]:
        return [column.values for column in self.columns] if self._copies is None else self._copies

    def _rows(self, gids: GroupIds) -> list[Values]:
        """These group ids of each array: a copy, or of frozen ones what may be a view."""
        still = self._copies is not None
        return [gather(values, gids, still=still) for values in self._arrays]

    def reserve(self, gids: int) -> None:
        for column in self.columns:
            column.reserve(gids)

    def update(self, gids: GroupIds, batch: pa.RecordBatch) -> None:
        self.running(gids, batch)

    def keep(self, gids: GroupIds) -> None:
        for column in self.columns:
            column.replace(column.values[gids])

    def frozen(self, columns: Sequence[Values]) -> Self:
        copy = object.__new__(type(self))
        vars(copy).update(vars(self))
        copy._copies = columns
        return copy

    def state(self, gids: GroupIds) -> list[pa.Array]:
        return [self.result(gids)]


def _outputs(rows: int, dtype: Any, mask: Mask) -> tuple[pa.Buffer, npt.NDArray[Any], Mask]:
    """Memory for results, and for which of them there are: none if all rows have a value, and so every result."""
    return *new_buffer(rows, dtype), np.empty(rows if len(mask) else 0, np.bool_)


class Count(ArrayAccumulator):
    """Rows, or the values of ``column`` that are not null."""

    def __init__(self, column: str | None) -> None:
        super().__init__(np.int64)
        self._column = column

    def running(self, gids: GroupIds, batch: pa.RecordBatch) -> pa.Array:
        mask = _NO_MASK if self._column is None else mask_of(batch.column(self._column))
        buffer, out = new_buffer(len(gids), np.int64)
        kernels.count(gids, mask, self._arrays[0], out)
        return pa.Array.from_buffers(pa.int64(), len(gids), [None, buffer])

    def result(self, gids: GroupIds) -> pa.Array:
        return from_words(self._rows(gids)[0], pa.int64())

    def restore(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        kernels.put(gids, to_words(columns[0]), self._arrays[0])

    def merge(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        kernels.add(gids, to_words(columns[0]), self._arrays[0])


class _OfColumn(ArrayAccumulator):
    """An accumulator of the values of one column."""

    def __init__(self, column: str, *dtypes: Any) -> None:
        super().__init__(*dtypes)
        self._column = column

    def merge(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        """Add a state that is a value, null before the first, as a row."""
        self.update(gids, pa.record_batch({self._column: columns[0]}))


class _Seen(_OfColumn):
    """A word (or float) and whether a value has been seen."""

    def __init__(self, column: str, dtype: Any, result: pa.DataType, *, ordered: bool = False) -> None:
        super().__init__(column, dtype, np.bool_)
        self._type, self._ordered = result, ordered

    def restore(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        values, held = self._arrays
        kernels.put_seen(gids, self._words(columns[0]), mask_of(columns[0]), values, held)

    def result(self, gids: GroupIds) -> pa.Array:
        values, seen = self._rows(gids)
        return from_words(values.view(np.int64), self._type, None if seen.all() else seen, ordered=self._ordered)

    @abstractmethod
    def _words(self, column: pa.Array) -> npt.NDArray[Any]:
        """The values as they lie in the state."""


class Sum(_Seen):
    """Sum of integers (and bool) in 64 bits, or of floats in double precision."""

    def __init__(self, column: str, result: pa.DataType) -> None:
        self._float = pa.types.is_floating(result)
        super().__init__(column, np.float64 if self._float else np.int64, result)

    def running(self, gids: GroupIds, batch: pa.RecordBatch) -> pa.Array:
        column = batch.column(self._column)
        mask = mask_of(column)
        values, held = self._arrays
        buffer, out, seen = _outputs(len(gids), values.dtype, mask)
        if self._float:
            kernels.sum_floats(gids, _doubles(column), mask, values, held, out, seen)
        else:
            self._check_unsigned(column)
            bad = kernels.sum_words(gids, to_words(column), mask, values, held, out, seen)
            if bad >= 0:
                raise self._overflow(bad)
        return _with_nulls(buffer, seen, self._type, len(gids))

    def _check_unsigned(self, column: pa.Array) -> None:
        if not pa.types.is_uint64(column.type):
            return
        too_large = fixed_view(column, np.uint64) > np.uint64(2**63 - 1)
        valid = valid_rows(column)
        bad = np.flatnonzero(too_large if valid is None else too_large & valid)
        if len(bad):
            raise self._overflow(int(bad[0]))

    def _overflow(self, row: int) -> DataError:
        return DataError(
            f"the sum of column {self._column!r} leaves the range of int64 in row {row} of the batch",
            hint="Cast the column to float64 before summing.",
        )

    def _words(self, column: pa.Array) -> npt.NDArray[Any]:
        return _doubles(column) if self._float else to_words(column)


class Mean(_OfColumn):
    """Sum and count in double precision."""

    def __init__(self, column: str) -> None:
        super().__init__(column, np.float64, np.int64)

    def running(self, gids: GroupIds, batch: pa.RecordBatch) -> pa.Array:
        column = batch.column(self._column)
        mask = mask_of(column)
        buffer, out, seen = _outputs(len(gids), np.float64, mask)
        sums, counts = self._arrays
        kernels.mean(gids, _doubles(column), mask, sums, counts, out, seen)
        return _with_nulls(buffer, seen, pa.float64(), len(gids))

    def result(self, gids: GroupIds) -> pa.Array:
        sums, counts = self._rows(gids)
        seen = counts > 0
        means = sums / np.maximum(counts, 1)
        return from_words(means.view(np.int64), pa.float64(), None if seen.all() else seen)

    def state(self, gids: GroupIds) -> list[pa.Array]:
        sums, counts = self._rows(gids)
        return [from_words(sums.view(np.int64), pa.float64()), from_words(counts, pa.int64())]

    def restore(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        kernels.put(gids, _doubles(columns[0]), self._arrays[0])
        kernels.put(gids, to_words(columns[1]), self._arrays[1])

    def merge(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        kernels.add(gids, _doubles(columns[0]), self._arrays[0])
        kernels.add(gids, to_words(columns[1]), self._arrays[1])


class Spread(_OfColumn):
    """Variance or standard deviation, of a sample or of a population: count, mean, sum of squared distances from it."""

    def __init__(self, kind: str, column: str) -> None:
        super().__init__(column, np.int64, np.float64, np.float64)
        self._root = kind.startswith("stddev")
        self._less = 0 if kind.endswith("_pop") else 1

    def running(self, gids: GroupIds, batch: pa.RecordBatch) -> pa.Array:
        column = batch.column(self._column)
        buffer, out = new_buffer(len(gids), np.float64)
        seen = np.empty(len(gids), np.bool_)
        counts, means, squares = self._arrays
        mask = mask_of(column)
        kernels.spread(gids, _doubles(column), mask, counts, means, squares, self._less, self._root, out, seen)
        return _with_nulls(buffer, seen, pa.float64(), len(gids))

    def result(self, gids: GroupIds) -> pa.Array:
        counts, _, squares = self._rows(gids)
        seen = counts > self._less
        values = squares / np.maximum(counts - self._less, 1)
        values = np.sqrt(values) if self._root else values
        return from_words(values.view(np.int64), pa.float64(), None if seen.all() else seen)

    def state(self, gids: GroupIds) -> list[pa.Array]:
        counts, means, squares = self._rows(gids)
        doubles = (from_words(values.view(np.int64), pa.float64()) for values in (means, squares))
        return [from_words(counts, pa.int64()), *doubles]

    def restore(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        counts, *doubles = columns
        kernels.put(gids, to_words(counts), self._arrays[0])
        for column, values in zip(doubles, self._arrays[1:], strict=True):
            kernels.put(gids, _doubles(column), values)

    def merge(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        counts, means, squares = columns
        kernels.merge_spread(gids, to_words(counts), _doubles(means), _doubles(squares), *self._arrays)


class Pick(_Seen):
    """First, last, min or max of a fixed-width column, as words."""

    def __init__(self, kind: str, column: str, result: pa.DataType) -> None:
        super().__init__(column, np.int64, result, ordered=kind in ("min", "max"))
        self._kernel = kernels.CHOOSE[kind]

    def running(self, gids: GroupIds, batch: pa.RecordBatch) -> pa.Array:
        column = batch.column(self._column)
        mask = mask_of(column)
        _, out, seen = _outputs(len(gids), np.int64, mask)
        self._kernel(gids, self._words(column), mask, *self._arrays, out, seen)
        return from_words(out, self._type, seen if len(seen) else None, ordered=self._ordered)

    def _words(self, column: pa.Array) -> Words:
        if pa.types.is_floating(column.type) and not self._ordered:
            return _doubles(column).view(np.int64)  # every bit as it is
        return to_words(column, ordered=self._ordered)


def _doubles(column: pa.Array) -> npt.NDArray[np.float64]:
    """The values as ``float64``; null rows hold anything."""
    kind = column.type
    if pa.types.is_float64(kind):
        return fixed_view(column, np.float64)
    if pa.types.is_boolean(kind):
        values = to_words(column).astype(np.float64)
    else:
        values = fixed_view(column, kind.to_pandas_dtype()).astype(np.float64)
    values.flags.writeable = False
    return values


def _with_nulls(buffer: pa.Buffer, seen: Mask, kind: pa.DataType, rows: int) -> pa.Array:
    bitmap = None if len(seen) == 0 else pa.py_buffer(np.packbits(seen, bitorder="little"))
    return pa.Array.from_buffers(kind, rows, [bitmap, buffer])


_compute: Any = pyarrow.compute  # the stubs do not know ``rank``

_HOW = {"first": kernels.FIRST, "last": kernels.LAST, "min": kernels.MIN, "max": kernels.MAX}
_GARBAGE_ROWS = 4096
"""Replaced values are swept out when they are more than this and more than the values in use."""


class PickValue(_OfColumn):
    """One of the values of a column of any Arrow type by group id: the first, last, lowest or highest."""

    def __init__(self, kind: str, column: str, result: pa.DataType) -> None:
        super().__init__(column, np.int64)  # one more than the reference, so that an empty group id is zero
        self._how = _HOW[kind]
        self._used = 0
        self._held = 0
        self._store = ValueStore(result)
        self._numbers = GrowingArray(np.int32)

    @property
    def varying_bytes(self) -> int:
        return self._store.nbytes

    def reserve(self, gids: int) -> None:
        super().reserve(gids)
        self._used = gids
        self._numbers.reserve(gids)

    def _references(self, gids: GroupIds) -> npt.NDArray[np.int64]:
        return self._arrays[0][gids] - 1

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
        if wanted or self._how >= kernels.MIN:
            pool = pa.concat_arrays([self._store.take(before), column])
        ranks = np.empty(0, np.int64)
        if self._how >= kernels.MIN:
            ranks = np.array(_compute.rank(pool, tiebreaker="dense"), np.int64)  # writable
        current = np.where(before < 0, -1, np.arange(len(touched)))
        out = np.empty(rows, np.int64)
        kernels.pick(local, mask_of(column), ranks, self._how, current, out)
        self._hold(touched, current, column)
        return take_or_null(pool, out) if wanted else None

    def _hold(self, touched: GroupIds, current: npt.NDArray[np.int64], column: pa.Array) -> None:
        fresh = current >= len(touched)
        chosen = current[fresh] - len(touched)
        first = self._store.append(column.take(pa.array(chosen)))
        gids = touched[fresh]
        places = self._arrays[0]
        self._held += int((places[gids] == 0).sum())
        places[gids] = 1 + first + np.arange(len(chosen))
        self._sweep()

    def _sweep(self) -> None:
        garbage = len(self._store) - self._held
        if garbage <= max(_GARBAGE_ROWS, self._held):
            return
        places = self._arrays[0][: self._used].copy()  # not in place: a snapshot may refer to the old store
        used = np.flatnonzero(places)
        self._store = self._store.compacted(places[used] - 1)
        places[used] = 1 + np.arange(len(used))
        self.columns[0].replace(places)

    def result(self, gids: GroupIds) -> pa.Array:
        return self._store.take(self._references(gids))

    def restore(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        valid = valid_rows(columns[0])
        rows = np.arange(len(gids)) if valid is None else np.flatnonzero(valid)
        places = self._arrays[0]
        self._held += len(rows) - int(np.count_nonzero(places[gids]))
        places[gids] = 0
        first = self._store.append(columns[0].take(pa.array(rows)))
        places[gids[rows]] = 1 + first + np.arange(len(rows))

    def keep(self, gids: GroupIds) -> None:
        super().keep(gids)
        self._used = len(gids)
        self._held = int(np.count_nonzero(self._arrays[0][: self._used]))
        self._sweep()

    def frozen(self, columns: Sequence[Values]) -> Self:
        copy = super().frozen(columns)
        copy._store = self._store.frozen()
        return copy


ARRIVAL = "__arrival"
"""Column (int64, from 0 on, rising) that numbers the rows of a step as they come."""


class Ordered(Accumulator):
    """``first`` or ``last`` of parts that are put together later, in any order: each knows when its value came.

    The state has the arrival number of the value by group id, -1 before there is one.

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
        mask, orders = mask_of(batch.column(self._column)), to_words(batch.column(ARRIVAL))
        kernels.note_orders(gids, orders, mask, self._first, self._places.values)

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

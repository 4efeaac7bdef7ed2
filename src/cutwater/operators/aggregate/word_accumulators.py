"""Accumulators whose state is a few words per key: counts, sums, moments, and the others over fixed-width columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.words import Words, fixed_view, from_words, new_buffer, to_words, valid_rows
from cutwater.errors import DataError
from cutwater.operators.aggregate import kernels
from cutwater.operators.aggregate.accumulators import Accumulator
from cutwater.state.growing_array import GrowingArray, Values, gather
from cutwater.state.index.key_index import GroupIds

Mask = npt.NDArray[np.bool_]

_NO_MASK: Mask = np.zeros(0, np.bool_)
_NO_MASK.flags.writeable = False
_PICKS: dict[str, Any] = {
    "first": kernels.first,
    "last": kernels.last,
    "min": kernels.minimum,
    "max": kernels.maximum,
}


class _Arrays(Accumulator):
    """Arrays by group id that grow together, empty group ids being zero."""

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

    def frozen(self, columns: Sequence[Values]) -> Accumulator:
        copy = object.__new__(type(self))
        vars(copy).update(vars(self))
        copy._copies = columns
        return copy

    def state(self, gids: GroupIds) -> list[pa.Array]:
        return [self.result(gids)]


class Count(_Arrays):
    """Rows, or the values of ``column`` that are not null."""

    def __init__(self, column: str | None) -> None:
        super().__init__(np.int64)
        self._column = column

    def running(self, gids: GroupIds, batch: pa.RecordBatch) -> pa.Array:
        valid = None if self._column is None else valid_rows(batch.column(self._column))
        buffer, out = new_buffer(len(gids), np.int64)
        kernels.count(gids, _NO_MASK if valid is None else valid, self._arrays[0], out)
        return pa.Array.from_buffers(pa.int64(), len(gids), [None, buffer])

    def result(self, gids: GroupIds) -> pa.Array:
        return from_words(self._rows(gids)[0], pa.int64())

    def restore(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        kernels.put(gids, to_words(columns[0]), self._arrays[0])

    def merge(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        kernels.add(gids, to_words(columns[0]), self._arrays[0])


class _Seen(_Arrays):
    """A word (or float) and whether a value has been seen."""

    def __init__(self, column: str, dtype: Any) -> None:
        super().__init__(dtype, np.bool_)
        self._column = column

    def merge(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        self.update(gids, pa.record_batch({self._column: columns[0]}))  # its state is a value, null before the first

    def _outputs(self, rows: int, valid: Mask | None) -> tuple[pa.Buffer, npt.NDArray[Any], Mask, Mask]:
        buffer, out = new_buffer(rows, self._arrays[0].dtype)
        if valid is None:
            return buffer, out, _NO_MASK, np.empty(0, np.bool_)
        return buffer, out, valid, np.empty(rows, np.bool_)


class Sum(_Seen):
    """Sum of integers (and bool) in 64 bits, or of floats in double precision."""

    def __init__(self, column: str, result: pa.DataType) -> None:
        self._float = pa.types.is_floating(result)
        super().__init__(column, np.float64 if self._float else np.int64)
        self._type = result

    def running(self, gids: GroupIds, batch: pa.RecordBatch) -> pa.Array:
        column = batch.column(self._column)
        valid = valid_rows(column)
        buffer, out, mask, seen = self._outputs(len(gids), valid)
        values, held = self._arrays
        if self._float:
            kernels.sum_floats(gids, _doubles(column), mask, values, held, out, seen)
        else:
            self._check_unsigned(column)
            bad = kernels.sum_words(gids, to_words(column), mask, values, held, out, seen)
            if bad >= 0:
                raise self._overflow(bad)
        return _with_nulls(buffer, seen if valid is not None else None, self._type, len(gids))

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

    def result(self, gids: GroupIds) -> pa.Array:
        values, seen = self._rows(gids)
        return from_words(values.view(np.int64), self._type, None if seen.all() else seen)

    def restore(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        _restore_seen(self._arrays, gids, columns[0], _doubles(columns[0]) if self._float else to_words(columns[0]))


class Mean(_Arrays):
    """Sum and count in double precision."""

    def __init__(self, column: str) -> None:
        super().__init__(np.float64, np.int64)
        self._column = column

    def running(self, gids: GroupIds, batch: pa.RecordBatch) -> pa.Array:
        column = batch.column(self._column)
        valid = valid_rows(column)
        buffer, out = new_buffer(len(gids), np.float64)
        seen = np.empty(0 if valid is None else len(gids), np.bool_)
        sums, counts = self._arrays
        kernels.mean(gids, _doubles(column), _NO_MASK if valid is None else valid, sums, counts, out, seen)
        return _with_nulls(buffer, seen if valid is not None else None, pa.float64(), len(gids))

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


class Spread(_Arrays):
    """Variance or standard deviation, of a sample or of a population: count, mean, sum of squared distances from it."""

    def __init__(self, kind: str, column: str) -> None:
        super().__init__(np.int64, np.float64, np.float64)
        self._column = column
        self._root = kind.startswith("stddev")
        self._less = 0 if kind.endswith("_pop") else 1

    def running(self, gids: GroupIds, batch: pa.RecordBatch) -> pa.Array:
        column = batch.column(self._column)
        valid = valid_rows(column)
        buffer, out = new_buffer(len(gids), np.float64)
        seen = np.empty(len(gids), np.bool_)
        mask = _NO_MASK if valid is None else valid
        counts, means, squares = self._arrays
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
        more, means, squares = columns
        counts, *sums = self._arrays
        kernels.merge_spread(gids, to_words(more), _doubles(means), _doubles(squares), counts, sums[0], sums[1])


class Pick(_Seen):
    """First, last, min or max of a fixed-width column, as words."""

    def __init__(self, kind: str, column: str, result: pa.DataType) -> None:
        super().__init__(column, np.int64)
        self._kernel = _PICKS[kind]
        self._ordered = kind in ("min", "max")
        self._type = result

    def running(self, gids: GroupIds, batch: pa.RecordBatch) -> pa.Array:
        column = batch.column(self._column)
        valid = valid_rows(column)
        _, out, mask, seen = self._outputs(len(gids), valid)
        values, held = self._arrays
        self._kernel(gids, self._words(column), mask, values, held, out, seen)
        return from_words(out, self._type, seen if valid is not None else None, ordered=self._ordered)

    def result(self, gids: GroupIds) -> pa.Array:
        values, seen = self._rows(gids)
        return from_words(values, self._type, None if seen.all() else seen, ordered=self._ordered)

    def restore(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        _restore_seen(self._arrays, gids, columns[0], self._words(columns[0]))

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


def _with_nulls(buffer: pa.Buffer, seen: Mask | None, kind: pa.DataType, rows: int) -> pa.Array:
    bitmap = None if seen is None else pa.py_buffer(np.packbits(seen, bitorder="little"))
    return pa.Array.from_buffers(kind, rows, [bitmap, buffer])


def _restore_seen(arrays: Sequence[Values], gids: GroupIds, column: pa.Array, values: npt.NDArray[Any]) -> None:
    valid = valid_rows(column)
    kernels.put_seen(gids, values, _NO_MASK if valid is None else valid, *arrays)

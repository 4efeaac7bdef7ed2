"""A store of rows: appended, referred to by row number, never changed in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.words import fixed_view, is_word_type, valid_rows

_MERGE_BYTES = 1 << 30


class ValueStore:
    """Values in chunks.  A reference is the number of a value since the store was made; -1 refers to null.

    Small chunks are merged into larger ones as they come, so that there are few and each value is copied
    O(log n) times.  Chunks are immutable: a frozen store shares them.

    >>> store = ValueStore(pa.string())
    >>> store.append(pa.array(["a", "b"])), store.append(pa.array(["c"]))
    (0, 2)
    >>> store.take(np.array([2, -1, 0])).to_pylist()
    ['c', None, 'a']
    """

    def __init__(self, kind: pa.DataType) -> None:
        self.type = kind
        self._chunks: list[pa.Array] = []
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes that the values take."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def append(self, values: pa.Array) -> int:
        """Add values; returns the reference of the first, the others follow it."""
        first = self._rows
        if len(values) == 0:
            return first
        self._rows += len(values)
        self._chunks.append(values)
        while len(self._chunks) > 1 and len(self._chunks[-2]) <= 2 * len(self._chunks[-1]):
            if self._chunks[-2].nbytes + self._chunks[-1].nbytes > _MERGE_BYTES:
                break
            self._chunks[-2:] = [pa.concat_arrays(self._chunks[-2:])]
        return first

    def take(self, references: npt.NDArray[np.int64]) -> pa.Array:
        """The values referred to, in that order."""
        if len(self._chunks) == 1 or len(references) == 0:
            chunk = self._chunks[0] if self._chunks else pa.nulls(0, self.type)
            return take_or_null(chunk, references)
        starts = np.cumsum([0, *(len(chunk) for chunk in self._chunks)])
        home = np.searchsorted(starts, references, side="right") - 1  # -1 for null
        order = np.argsort(home, kind="stable")
        pieces: list[pa.Array] = []
        for number in np.unique(home):
            wanted = references[home == number]
            if number < 0:
                pieces.append(pa.nulls(len(wanted), self.type))
            else:
                pieces.append(self._chunks[number].take(pa.array(wanted - starts[number])))
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return pa.concat_arrays(pieces).take(pa.array(back))

    def compacted(self, references: npt.NDArray[np.int64]) -> ValueStore:
        """A new store of the values referred to (none of them null), numbered 0, 1, 2 ... in that order."""
        store = ValueStore(self.type)
        step = len(references)
        begin = 0
        while begin < len(references):
            try:
                store.append(self.take(references[begin : begin + step]))
                begin += step
            except pa.ArrowInvalid:  # over 2 GB of text in one array
                if step == 1:
                    raise
                step = (step + 1) // 2
        return store

    def frozen(self) -> ValueStore:
        """The store as it is now, at no cost."""
        view = ValueStore(self.type)
        view._chunks, view._rows = list(self._chunks), self._rows
        return view


def take_or_null(values: pa.Array, rows: npt.NDArray[np.int64]) -> pa.Array:
    """Some of the values; null where a row is -1."""
    missing = rows < 0
    return values.take(pa.array(rows, mask=missing) if missing.any() else pa.array(rows))


_FIRST_ROWS = 1024
_DTYPES: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


class _Fixed:
    """A column of fixed width: an array with room at its end, and which values are null once one is."""

    def __init__(self, kind: pa.DataType, rows: int) -> None:
        self.type = kind
        self.values: npt.NDArray[Any] = np.empty(rows, _DTYPES[kind.bit_width])
        self.valid: npt.NDArray[np.bool_] | None = None

    def append(self, column: pa.Array, first: int) -> None:
        last = first + len(column)
        if last > len(self.values):
            self.values = grown(self.values, first, 2 * last)
        self.values[first:last] = fixed_view(column, self.values.dtype)
        valid = valid_rows(column)
        if self.valid is None and valid is not None:
            self.valid = np.ones(len(self.values), np.bool_)
        if self.valid is not None:
            if last > len(self.valid):
                self.valid = grown(self.valid, first, len(self.values))
            self.valid[first:last] = True if valid is None else valid

    def take(self, references: npt.NDArray[np.int64], missing: npt.NDArray[np.bool_] | None) -> pa.Array:
        valid = None if self.valid is None else self.valid[references]
        if missing is not None:
            valid = ~missing if valid is None else valid & ~missing
        bitmap = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
        values = pa.py_buffer(self.values[references])
        return pa.Array.from_buffers(self.type, len(references), [bitmap, values])

    def frozen(self) -> _Fixed:
        view = object.__new__(_Fixed)
        view.type, view.values, view.valid = self.type, self.values, self.valid
        return view


class RowStore:
    """Rows by column: those of fixed width in arrays that grow, all others as a ``ValueStore`` each.

    A reference is the number of a row since the store was made; -1 refers to nulls.  A frozen store shares the memory
    of those before: rows are only ever added behind them.

    >>> store = RowStore([pa.int64(), pa.string()])
    >>> store.append([pa.array([1, None]), pa.array(["a", "b"])])
    >>> store.append([pa.array([3]), pa.array(["c"])])
    >>> [column.to_pylist() for column in store.take(np.array([2, -1, 1]))]
    [[3, None, None], ['c', None, 'b']]
    """

    def __init__(self, types: Sequence[pa.DataType], rows: int = _FIRST_ROWS) -> None:
        rows = max(rows, _FIRST_ROWS)
        self._columns = [_Fixed(t, rows) if _is_fixed(t) else ValueStore(t) for t in types]
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take, roughly."""
        return sum(
            store.nbytes if isinstance(store, ValueStore) else self._rows * store.values.itemsize
            for store in self._columns
        )

    def append(self, columns: Sequence[pa.Array]) -> None:
        """Add rows; their references follow those of the last ones."""
        if not columns or len(columns[0]) == 0:
            return
        for store, column in zip(self._columns, columns, strict=True):
            if isinstance(store, _Fixed):
                store.append(column, self._rows)
            else:
                store.append(column)
        self._rows += len(columns[0])

    def take(self, references: npt.NDArray[np.int64]) -> list[pa.Array]:
        """The columns of the rows referred to, in that order."""
        absent = references < 0
        missing = absent if absent.any() else None
        return [
            store.take(references, missing) if isinstance(store, _Fixed) else store.take(references)
            for store in self._columns
        ]

    def frozen(self) -> RowStore:
        """The store as it is now, at no cost."""
        view = object.__new__(RowStore)
        view._columns, view._rows = [store.frozen() for store in self._columns], self._rows
        return view


def _is_fixed(kind: pa.DataType) -> bool:
    return is_word_type(kind) and kind.bit_width in _DTYPES


def grown(values: npt.NDArray[Any], used: int, size: int, fill: int | None = None) -> npt.NDArray[Any]:
    """A larger copy; the old array stays as it is, because a frozen view may look at it."""
    larger = np.empty(size, values.dtype)
    larger[:used] = values[:used]
    if fill is not None:
        larger[used:] = fill
    return larger

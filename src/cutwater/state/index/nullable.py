"""A key index in which null is a key like any other, equal to itself.

As long as no null comes it is the plain index, at no cost but a look at each column's null count.  With the first null
the keys move, once, to an index with one more column: a word whose bit c says that column c is null.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from cutwater.data.words import from_words, valid_rows
from cutwater.state.index.key_index import GroupIds, KeyIndex, make_index

_MARKS = pa.uint64()
_MOVED_AT_ONCE = 1 << 16


class NullableIndex(KeyIndex):
    """GroupIds as ``KeyIndex`` has them, over columns that may hold nulls.

    Args:
        types: Arrow types of the key columns, in order; 64 at most.
        expected: number of keys to make room for at once.

    >>> index = NullableIndex([pa.int64()])
    >>> index.upsert([pa.array([0, None, 0, None])]).tolist()
    [0, 1, 0, 1]
    >>> index.columns(np.array([1, 0]))[0].to_pylist()
    [None, 0]
    """

    def __init__(self, types: Sequence[pa.DataType], expected: int = 0) -> None:
        self.types = tuple(types)
        self._index: KeyIndex = make_index(types, expected)
        self._marked = False
        """True if the index has the column that tells nulls."""

    def __len__(self) -> int:
        return len(self._index)

    def upsert(self, columns: Sequence[pa.Array]) -> GroupIds:
        if not self._marked:
            if not any(column.null_count for column in columns):
                return self._index.upsert(columns)
            self._mark()
        return self._index.upsert(_marked(columns))

    def find(self, columns: Sequence[pa.Array]) -> GroupIds:
        if self._marked:
            return self._index.find(_marked(columns))
        if not any(column.null_count for column in columns):
            return self._index.find(columns)
        *filled, marks = _marked(columns)
        gids = self._index.find(filled)
        gids[marks.to_numpy() != 0] = -1
        return gids

    def columns(self, gids: npt.NDArray[Any]) -> list[pa.Array]:
        found = self._index.columns(gids)
        if not self._marked:
            return found
        *filled, last = found
        marks = last.to_numpy()
        return [_with_nulls(column, (marks >> np.uint64(c)) & np.uint64(1)) for c, column in enumerate(filled)]

    @property
    def key_bytes(self) -> int:
        return self._index.key_bytes

    def frozen(self) -> KeyIndex:
        view = object.__new__(NullableIndex)
        view.types, view._index, view._marked = self.types, self._index.frozen(), self._marked
        return view

    def _mark(self) -> None:
        """Move the keys to an index with marks, where they keep their group ids."""
        plain, self._marked = self._index, True
        self._index = make_index([*self.types, _MARKS], len(plain))
        for begin in range(0, len(plain), _MOVED_AT_ONCE):
            gids = np.arange(begin, min(begin + _MOVED_AT_ONCE, len(plain)))
            self._index.upsert(_marked(plain.columns(gids)))


def _marked(columns: Sequence[pa.Array]) -> list[pa.Array]:
    """The columns with zeros, and the like, in place of nulls, and the column of marks."""
    marks = np.zeros(len(columns[0]), np.uint64)
    filled: list[pa.Array] = []
    for c, column in enumerate(columns):
        valid = valid_rows(column)
        if valid is None:
            filled.append(column)
            continue
        marks[~valid] |= np.uint64(1 << c)
        filled.append(pc.fill_null(column, _zero(column.type)))
    return [*filled, from_words(marks.view(np.int64), _MARKS)]


def _zero(kind: pa.DataType) -> pa.Scalar[Any]:
    if pt.is_decimal(kind):
        return pa.scalar(Decimal(0), kind)
    if pt.is_boolean(kind):
        return pa.scalar(False)
    if pt.is_string(kind) or pt.is_large_string(kind):
        return pa.scalar("", kind)
    if pt.is_binary(kind) or pt.is_large_binary(kind):
        return pa.scalar(b"", kind)
    return pa.scalar(0, kind)


def _with_nulls(column: pa.Array, null: npt.NDArray[np.uint64]) -> pa.Array:
    if not null.any():
        return column
    return pc.call_function("if_else", [pa.array(null == 0), column, pa.scalar(None, column.type)])

"""Key indexes: from the key of a row to a dense group id.

Group ids are numbered 0, 1, 2 ... in the order in which keys first come, and values live in arrays by group id.  What
an index stores of its keys is append-only: a ``frozen`` view of the first n group ids stays as it is while the index
goes on, at no cost.  Rows must have been checked: no NaN in a key, and no null; ``nullable_index`` takes nulls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.words import Words, bytes_view, from_words, to_words
from cutwater.errors import DataError
from cutwater.state import row_kernels
from cutwater.state.growing_array import GrowingArray, gather, in_background
from cutwater.state.index import kernels
from cutwater.state.keys import decimal_bytes, is_word_key

AT_ONCE_GROUP_IDS = 1 << 16
"""So many are entered into a new table at once: about a millisecond."""


class NextTable:
    """A larger table that a thread in the background fills, while the present one goes on serving.

    What an index stores of its keys only grows, so the thread reads what nobody changes.  Group ids that came
    meanwhile are entered in further rounds, and the last few by the caller.

    Args:
        table: empty.
        enter: enters the group ids from one number to another into a table.
        count: group ids that there are.
    """

    def __init__(
        self, table: npt.NDArray[Any], enter: Callable[[int, int, npt.NDArray[Any]], None], count: int
    ) -> None:
        self.table = table
        self._enter = enter
        self._entered = 0
        self._next_round(count)

    def _next_round(self, count: int) -> None:
        first, self._entered = self._entered, count
        self._thread = in_background(lambda: self._enter(first, count, self.table))

    def ready(self, count: int, *, wait: bool) -> bool:
        """True if all group ids are in the table: then it can take over.

        Args:
            count: group ids that there are.
            wait: until it is so.
        """
        while True:
            if wait:
                self._thread.join()
            elif self._thread.is_alive():
                return False
            if wait or count - self._entered <= AT_ONCE_GROUP_IDS:
                self._enter(self._entered, count, self.table)
                return True
            self._next_round(count)


GroupIds: TypeAlias = npt.NDArray[np.int32]

_FIRST_GROUP_IDS = 1024
_FIRST_BYTES = 1 << 16
_BYTES_RESERVED = 1 << 34
_SPARSE_GROUP_IDS = 1 << 20
_MAX_GROUP_IDS = 2**31 - 2


class KeyIndex(ABC):
    """A set of keys, numbered.

    Attributes:
        types: Arrow types of the key columns, in order.
    """

    types: tuple[pa.DataType, ...]

    @abstractmethod
    def __len__(self) -> int:
        """Group ids in use."""

    @abstractmethod
    def upsert(self, columns: Sequence[pa.Array]) -> GroupIds:
        """Group id of every row, in row order; unknown keys get the next free group ids.

        Args:
            columns: the key columns, of ``types``, all of one length.

        Raises:
            DataError: more than 2**31 keys in one subtask.
        """

    @abstractmethod
    def find(self, columns: Sequence[pa.Array]) -> GroupIds:
        """Group id of every row, -1 where the key is unknown; changes nothing.

        Args:
            columns: the key columns, of ``types``, all of one length.
        """

    @abstractmethod
    def columns(self, gids: npt.NDArray[Any]) -> list[pa.Array]:
        """The keys of ``gids``, one array per key column (floats with one zero: -0.0 comes back as 0.0)."""

    @property
    @abstractmethod
    def key_bytes(self) -> int:
        """Bytes that the keys take."""

    @abstractmethod
    def frozen(self) -> KeyIndex:
        """The first ``len(self)`` group ids as they are now; serves ``columns`` and ``len``, not ``upsert``."""


class HashIndex(KeyIndex):
    """Open addressing, which the kinds of tables have in common.  Their rows hold no null.

    Args:
        types: Arrow types of the key columns, in order.
        expected: number of keys to make room for at once.
    """

    _entry: type[np.signedinteger[Any]]
    """Of the table."""

    def __init__(self, types: Sequence[pa.DataType], expected: int = 0) -> None:
        self.types = tuple(types)
        self._count = 0
        self._due = max(_FIRST_GROUP_IDS, 1 << max(0, expected - 1).bit_length())
        """Group ids from which on a larger table is wanted."""
        self._table: npt.NDArray[Any] = np.zeros(self._table_size(), self._entry)
        self._next: NextTable | None = None

    def __len__(self) -> int:
        return self._count

    def upsert(self, columns: Sequence[pa.Array]) -> GroupIds:
        gids: GroupIds = np.empty(len(columns[0]), np.int32)
        self._upsert(columns, gids)
        self._reserve(self._limit)
        if self._count >= self._due or self._next is not None:
            self._grow_table(wait=False)
        return gids

    def find(self, columns: Sequence[pa.Array]) -> GroupIds:
        gids: GroupIds = np.empty(len(columns[0]), np.int32)
        self._find(columns, gids)
        return gids

    @abstractmethod
    def _upsert(self, columns: Sequence[pa.Array], gids: GroupIds) -> None: ...

    @abstractmethod
    def _find(self, columns: Sequence[pa.Array], gids: GroupIds) -> None: ...

    @abstractmethod
    def _enter(self, first: int, count: int, table: npt.NDArray[Any]) -> None:
        """Enter group ids ``first`` .. ``count`` - 1 into a table; also called by another thread."""

    @abstractmethod
    def _reserve(self, gids: int) -> None:
        """Have room for this many group ids."""

    @property
    def _limit(self) -> int:
        """Group ids that the present table takes; a small one grows at once when it is due."""
        return min(self._due if self._due <= AT_ONCE_GROUP_IDS else self._due + self._due // 2, _MAX_GROUP_IDS + 1)

    def _table_size(self) -> int:
        # Probing ends sooner in a sparse table, and up to a million keys that costs 16 bytes per key at most.
        return self._due * (4 if self._due <= _SPARSE_GROUP_IDS else 2)

    def _grow_table(self, *, wait: bool) -> None:
        """Go over to a larger table, once it is there."""
        if self._next is None:
            due = self._due
            self._double()
            table = np.zeros(self._table_size(), self._entry)
            if due > AT_ONCE_GROUP_IDS:
                self._next, self._due = NextTable(table, self._enter, self._count), due
            else:
                self._enter(0, self._count, table)
                self._table = table
        if self._next is not None and self._next.ready(self._count, wait=wait):
            self._table, self._next = self._next.table, None
            self._double()
        self._reserve(self._limit)

    def _double(self) -> None:
        if self._due >= _MAX_GROUP_IDS:
            raise DataError(
                f"one subtask holds more than {_MAX_GROUP_IDS} keys",
                hint="Raise the parallelism, so that each holds less.",
            )
        self._due = min(self._due * 2, _MAX_GROUP_IDS + 1)


class Int64Index(HashIndex):
    """One key column that fits a 64-bit word.

    >>> index = Int64Index([pa.int64()])
    >>> index.upsert([pa.array([7, 8, 7])]).tolist()
    [0, 1, 0]
    """

    _entry = np.int32

    def __init__(self, types: Sequence[pa.DataType], expected: int = 0) -> None:
        super().__init__(types, expected)
        self._keys = GrowingArray(np.int64)
        self._reserve(self._limit)

    def _upsert(self, columns: Sequence[pa.Array], gids: GroupIds) -> None:
        words = to_words(columns[0])
        done = 0
        while True:
            keys = self._keys.values[: self._limit]
            done, self._count = kernels.upsert_word(words, done, self._table, keys, self._count, gids)
            if done == len(words):
                return
            self._grow_table(wait=True)

    def _find(self, columns: Sequence[pa.Array], gids: GroupIds) -> None:
        kernels.find_word(to_words(columns[0]), self._table, self._keys.values, gids)

    def _enter(self, first: int, count: int, table: npt.NDArray[Any]) -> None:
        kernels.rehash_word(self._keys.values, first, count, table)

    def _reserve(self, gids: int) -> None:
        self._keys.reserve(gids, self._count)

    def columns(self, gids: npt.NDArray[Any]) -> list[pa.Array]:
        return [from_words(gather(self._keys.values, gids, still=True), self.types[0])]  # keys stay where they are

    @property
    def key_bytes(self) -> int:
        return self._count * self._keys.values.strides[0]

    def frozen(self) -> Int64Index:
        view = object.__new__(Int64Index)
        view.types, view._count, view._keys = self.types, self._count, self._keys
        return view


class WordsIndex(HashIndex):
    """Several key columns that each fit a 64-bit word.

    >>> index = WordsIndex([pa.int32(), pa.bool_()])
    >>> index.upsert([pa.array([1, 1, 1], pa.int32()), pa.array([True, False, True])]).tolist()
    [0, 1, 0]
    """

    _entry = np.int32

    def __init__(self, types: Sequence[pa.DataType], expected: int = 0) -> None:
        super().__init__(types, expected)
        self._keys = GrowingArray(np.int64, (len(types),))
        self._reserve(self._limit)

    def _upsert(self, columns: Sequence[pa.Array], gids: GroupIds) -> None:
        words = _matrix([to_words(column) for column in columns], len(gids))
        done = 0
        while True:
            keys = self._keys.values[: self._limit]
            done, self._count = kernels.upsert_words(words, done, self._table, keys, self._count, gids)
            if done == len(words):
                return
            self._grow_table(wait=True)

    def _find(self, columns: Sequence[pa.Array], gids: GroupIds) -> None:
        words = _matrix([to_words(column) for column in columns], len(gids))
        kernels.find_words(words, self._table, self._keys.values, gids)

    def _enter(self, first: int, count: int, table: npt.NDArray[Any]) -> None:
        kernels.rehash_words(self._keys.values, first, count, table)

    def _reserve(self, gids: int) -> None:
        self._keys.reserve(gids, self._count)

    def columns(self, gids: npt.NDArray[Any]) -> list[pa.Array]:
        return [from_words(gather(self._keys.values[:, c], gids), kind) for c, kind in enumerate(self.types)]

    @property
    def key_bytes(self) -> int:
        return self._count * self._keys.values.strides[0]

    def frozen(self) -> WordsIndex:
        view = object.__new__(WordsIndex)
        view.types, view._count, view._keys = self.types, self._count, self._keys
        return view


class BytesIndex(HashIndex):
    """Key columns of any kind: words in a matrix, the bytes of strings, binaries and decimals in one arena.

    With several columns of bytes, their lengths are words too, so that ("ab", "c") and ("a", "bc") differ.

    >>> index = BytesIndex([pa.string()])
    >>> index.upsert([pa.array(["x", "", "x"])]).tolist()
    [0, 1, 0]
    """

    _entry = np.int64

    def __init__(self, types: Sequence[pa.DataType], expected: int = 0) -> None:
        super().__init__(types, expected)
        self._word_columns = [c for c, kind in enumerate(types) if is_word_key(kind)]
        self._byte_columns = [c for c, kind in enumerate(types) if not is_word_key(kind)]
        lengths = len(self._byte_columns) if len(self._byte_columns) > 1 else 0
        self._keys = GrowingArray(np.int64, (len(self._word_columns) + lengths,))
        self._arena = GrowingArray(np.uint8, reserved=_BYTES_RESERVED)
        self._arena.reserve(_FIRST_BYTES)
        self._spans = GrowingArray(np.int64)
        self._reserve(self._limit)

    def _upsert(self, columns: Sequence[pa.Array], gids: GroupIds) -> None:
        words, data, offsets = self._encode(columns, len(gids))
        done = 0
        while True:
            done, self._count = kernels.upsert_bytes(
                words,
                data,
                offsets,
                done,
                self._table,
                self._keys.values[: self._limit],
                self._arena.values,
                self._spans.values,
                self._count,
                gids,
            )
            if done == len(gids):
                return
            if self._count >= self._limit:
                self._grow_table(wait=True)
            self._arena.reserve(self._end + int(offsets[done + 1]) - int(offsets[done]))

    def _find(self, columns: Sequence[pa.Array], gids: GroupIds) -> None:
        words, data, offsets = self._encode(columns, len(gids))
        stored = (self._keys.values, self._arena.values, self._spans.values)
        kernels.find_bytes(words, data, offsets, self._table, *stored, gids)

    @property
    def _end(self) -> int:
        """Bytes of the arena in use."""
        return int(self._spans.values[self._count])

    def _enter(self, first: int, count: int, table: npt.NDArray[Any]) -> None:
        kernels.rehash_bytes(self._keys.values, self._arena.values, self._spans.values, first, count, table)

    def _reserve(self, gids: int) -> None:
        self._keys.reserve(gids, self._count)
        self._spans.reserve(gids + 1, self._count)
        self._arena.reserve(self._end)

    def _encode(self, columns: Sequence[pa.Array], rows: int) -> tuple[Words, npt.NDArray[np.uint8], npt.NDArray[Any]]:
        parts = [to_words(columns[c]) for c in self._word_columns]
        spans = [bytes_view(_as_bytes(columns[c])) for c in self._byte_columns]
        if len(spans) == 1:
            return _matrix(parts, rows), *spans[0]
        lengths = [np.diff(offsets.astype(np.int64)) for _, offsets in spans]
        joined = np.zeros(rows + 1, np.int64)
        np.cumsum(np.sum(lengths, axis=0), out=joined[1:])
        data = np.empty(int(joined[-1]), np.uint8)
        cursors = joined[:-1].copy()
        for content, offsets in spans:
            row_kernels.join_spans(content, offsets, cursors, data)
        data.flags.writeable = joined.flags.writeable = False
        return _matrix(parts + lengths, rows), data, joined

    def columns(self, gids: npt.NDArray[Any]) -> list[pa.Array]:
        found: dict[int, pa.Array] = {}
        for position, c in enumerate(self._word_columns):
            found[c] = from_words(gather(self._keys.values[:, position], gids), self.types[c])
        starts = gather(self._spans.values, gids)
        for position, c in enumerate(self._byte_columns):
            if len(self._byte_columns) > 1:
                lengths = self._keys.values[gids, len(self._word_columns) + position]
            else:
                lengths = self._spans.values[gids.astype(np.int64) + 1] - starts
            found[c] = self._gather(starts, lengths, self.types[c])
            starts = starts + lengths
        return [found[c] for c in range(len(self.types))]

    def _gather(self, starts: Words, lengths: Words, kind: pa.DataType) -> pa.Array:
        offsets = np.zeros(len(starts) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        data = np.empty(int(offsets[-1]), np.uint8)
        kernels.gather_spans(self._arena.values, starts, offsets, data)
        if pa.types.is_decimal(kind):
            return pa.Array.from_buffers(kind, len(starts), [None, pa.py_buffer(data)])
        text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
        return pa.Array.from_buffers(pa.large_string() if text else pa.large_binary(), len(starts), buffers).cast(kind)

    @property
    def key_bytes(self) -> int:
        return self._count * self._keys.values.strides[0] + self._end

    def frozen(self) -> BytesIndex:
        view = object.__new__(BytesIndex)
        view.types, view._count, view._keys = self.types, self._count, self._keys
        view._word_columns, view._byte_columns = self._word_columns, self._byte_columns
        view._arena, view._spans = self._arena, self._spans
        return view


def make_index(types: Sequence[pa.DataType], expected: int = 0) -> HashIndex:
    """The fastest kind of index for these key columns, with room for ``expected`` keys.

    >>> type(make_index([pa.timestamp("us"), pa.string()])).__name__
    'BytesIndex'
    """
    if not all(is_word_key(kind) for kind in types):
        return BytesIndex(types, expected)
    return Int64Index(types, expected) if len(types) == 1 else WordsIndex(types, expected)


def _matrix(parts: Sequence[Words], rows: int) -> Words:
    matrix: Words = np.empty((rows, len(parts)), np.int64)
    for c, words in enumerate(parts):
        matrix[:, c] = words
    return matrix


def _as_bytes(column: pa.Array) -> pa.Array:
    return decimal_bytes(column) if pa.types.is_decimal(column.type) else column

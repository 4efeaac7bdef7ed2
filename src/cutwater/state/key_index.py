"""Key indexes: from the key of a row to a dense group id.

Group ids are numbered 0, 1, 2 ... in the order in which keys first come, and values live in arrays by group id.  What
an index stores of its keys is append-only: a ``frozen`` view of the first n group ids stays as it is while the index
goes on, at no cost.  Rows must have been checked: no NaN in a key, and no null; ``NullableIndex`` takes nulls.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Self, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from cutwater.data.words import Words, bytes_view, from_words, to_words, valid_rows
from cutwater.errors import DataError
from cutwater.state import column_kernels, text_kernels
from cutwater.state import index_kernels as kernels
from cutwater.state.growing_array import GrowingArray, gather, in_background
from cutwater.state.keys import as_bytes, is_text_or_bytes, is_word_key

AT_ONCE_GROUP_IDS = 1 << 16
"""So many are entered into a new table at once: about a millisecond."""


class NextTable:
    """A larger table that a thread in the background fills, while the present one goes on serving.

    What an index stores of its keys only grows, so the thread reads what nobody changes.  Group ids that came
    meanwhile are entered in further rounds, and the last few by the caller.

    Args:
        enter: enters the group ids from one number to another into a table.
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
        """True if all group ids are in the table: then it can take over."""
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
_MOST_SMALL_BYTES = 2**31 - 1
"""Of a column of texts whose places are 32-bit numbers."""
_SPARSE_GROUP_IDS = 1 << 20
_MAX_GROUP_IDS = 2**31 - 2


class KeyIndex(ABC):
    """A set of keys, numbered."""

    types: tuple[pa.DataType, ...]

    @abstractmethod
    def __len__(self) -> int:
        """Group ids in use."""

    @abstractmethod
    def upsert(self, columns: Sequence[pa.Array]) -> GroupIds:
        """Group id of every row, in row order; unknown keys get the next free group ids.

        Raises:
            DataError: more than 2**31 keys in one subtask.
        """

    @abstractmethod
    def find(self, columns: Sequence[pa.Array]) -> GroupIds:
        """Group id of every row, -1 where the key is unknown; changes nothing."""

    @abstractmethod
    def columns(self, gids: npt.NDArray[Any]) -> list[pa.Array]:
        """The keys of ``gids``, one array per key column (floats with one zero: -0.0 comes back as 0.0)."""

    @property
    @abstractmethod
    def key_bytes(self) -> int:
        """Bytes that the keys take."""

    @abstractmethod
    def frozen(self) -> KeyIndex:
        """The first ``len(self)`` group ids as they are now; serves ``columns`` and ``len``,
        neither ``find`` nor ``upsert``."""


class HashIndex(KeyIndex):
    """Open addressing, which the kinds of tables have in common.  Their rows hold no null."""

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
        self._settle()
        return gids

    def _settle(self) -> None:
        """Have room for the next rows."""
        self._reserve(self._limit)
        if self._count >= self._due or self._next is not None:
            self._grow_table(wait=False)

    def find(self, columns: Sequence[pa.Array]) -> GroupIds:
        gids: GroupIds = np.empty(len(columns[0]), np.int32)
        self._find(columns, gids)
        return gids

    def frozen(self) -> Self:
        view = copy.copy(self)
        del view._table, view._next  # a kernel that got an empty table would read outside of it
        return view

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


class WordsIndex(HashIndex):
    """Key columns that each fit a 64-bit word: one, or several in a matrix.

    >>> index = WordsIndex([pa.int32(), pa.bool_()])
    >>> index.upsert([pa.array([1, 1, 1], pa.int32()), pa.array([True, False, True])]).tolist()
    [0, 1, 0]
    """

    _entry = np.int32

    def __init__(self, types: Sequence[pa.DataType], expected: int = 0) -> None:
        super().__init__(types, expected)
        self._single = len(types) == 1
        self._keys = GrowingArray(np.int64, () if self._single else (len(types),))
        self._reserve(self._limit)

    def upsert_words(self, words: Words) -> GroupIds:
        """``upsert`` of keys whose words lie in a matrix."""
        gids: GroupIds = np.empty(len(words), np.int32)
        self._upsert_words(words, gids)
        self._settle()
        return gids

    def find_words(self, words: Words) -> GroupIds:
        """``find`` of keys whose words lie in a matrix."""
        gids: GroupIds = np.empty(len(words), np.int32)
        kernels.find_words(words, self._table, self._keys.values, gids)
        return gids

    def _upsert(self, columns: Sequence[pa.Array], gids: GroupIds) -> None:
        self._upsert_words(
            to_words(columns[0]) if self._single else _matrix(list(map(to_words, columns)), len(gids)), gids
        )

    def _upsert_words(self, words: Words, gids: GroupIds) -> None:
        upsert, done = (kernels.upsert_word, kernels.upsert_pairs, kernels.upsert_words)[min(len(self.types), 3) - 1], 0
        while True:
            keys = self._keys.values[: self._limit]
            done, self._count = upsert(words, done, self._table, keys, self._count, gids)
            if done == len(words):
                return
            self._grow_table(wait=True)

    def _find(self, columns: Sequence[pa.Array], gids: GroupIds) -> None:
        words = to_words(columns[0]) if self._single else _matrix(list(map(to_words, columns)), len(gids))
        find = kernels.find_word if self._single else kernels.find_words
        find(words, self._table, self._keys.values, gids)

    def _enter(self, first: int, count: int, table: npt.NDArray[Any]) -> None:
        (kernels.rehash_word if self._single else kernels.rehash_words)(self._keys.values, first, count, table)

    def _reserve(self, gids: int) -> None:
        self._keys.reserve(gids, self._count)

    def columns(self, gids: npt.NDArray[Any]) -> list[pa.Array]:
        if self._single:
            return [from_words(gather(self._keys.values, gids, still=True), self.types[0])]  # keys stay where they are
        return [from_words(gather(self._keys.values[:, c], gids), kind) for c, kind in enumerate(self.types)]

    def words(self) -> Words:
        """The words of the keys: a row of a matrix for each group id, and what lies behind them."""
        return self._keys.values

    @property
    def key_bytes(self) -> int:
        return self._count * self._keys.values.strides[0]


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
        spans = [bytes_view(as_bytes(columns[c])) for c in self._byte_columns]
        if len(spans) == 1:
            return _matrix(parts, rows), *spans[0]
        lengths = [np.diff(offsets.astype(np.int64)) for _, offsets in spans]
        joined = np.zeros(rows + 1, np.int64)
        np.cumsum(np.sum(lengths, axis=0), out=joined[1:])
        data = np.empty(int(joined[-1]), np.uint8)
        cursors = joined[:-1].copy()
        for content, offsets in spans:
            column_kernels.join_spans(content, offsets, cursors, data)
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
        return _spans(offsets, data, kind)

    @property
    def key_bytes(self) -> int:
        return self._count * self._keys.values.strides[0] + self._end


def _spans(offsets: Words, data: npt.NDArray[np.uint8], kind: pa.DataType) -> pa.Array:
    """Texts or binaries that lie one behind the other."""
    large = pa.types.is_large_string(kind) or pa.types.is_large_binary(kind)
    if not large and len(data) > _MOST_SMALL_BYTES:
        raise DataError(
            f"{len(data)} bytes of keys do not fit one column of {kind}",
            hint="Cast the key column to large_string or large_binary.",
        )
    places = pa.py_buffer(offsets if large else offsets.astype(np.int32))
    return pa.Array.from_buffers(kind, len(offsets) - 1, [None, places, pa.py_buffer(data)])


class TextIndex(KeyIndex):
    """Key columns of texts or binaries, and words: short ones as words, too, two for each.

    So a key lies in one place of memory, and is compared without a loop.  With the first text of more than 15 bytes
    the keys move, once, to a ``BytesIndex``.

    >>> index = TextIndex([pa.string()])
    >>> index.upsert([pa.array(["x", "", "x"])]).tolist(), index.upsert([pa.array(["", "x" * 16])]).tolist()
    ([0, 1, 0], [1, 2])
    >>> index.columns(np.array([1, 0]))[0].to_pylist()
    ['', 'x']
    """

    def __init__(self, types: Sequence[pa.DataType], expected: int = 0) -> None:
        self.types = tuple(types)
        widths = [1 if is_word_key(kind) else 2 for kind in types]
        self._places = [sum(widths[:c]) for c in range(len(widths))]
        """The first word of each column."""
        self._width = sum(widths)
        self._expected = expected
        self._index: WordsIndex | BytesIndex = WordsIndex([pa.int64()] * self._width, expected)

    def __len__(self) -> int:
        return len(self._index)

    def upsert(self, columns: Sequence[pa.Array]) -> GroupIds:
        index = self._index
        if isinstance(index, WordsIndex):
            words = self._packed(columns)
            if words is not None:
                return index.upsert_words(words)
            index = self._lengthen()
        return index.upsert(columns)

    def find(self, columns: Sequence[pa.Array]) -> GroupIds:
        index = self._index
        if isinstance(index, WordsIndex):
            words = self._packed(columns)
            if words is not None:
                return index.find_words(words)
            index = self._lengthen()
        return index.find(columns)

    def _packed(self, columns: Sequence[pa.Array]) -> Words | None:
        """The words of each row; ``None``: a text is too long."""
        words: Words = np.empty((len(columns[0]), self._width), np.int64)
        for column, kind, place in zip(columns, self.types, self._places, strict=True):
            if is_word_key(kind):
                words[:, place] = to_words(column)
            elif not text_kernels.pack_texts(*bytes_view(column), words, place):
                return None
        words.flags.writeable = False
        return words

    def _lengthen(self) -> BytesIndex:
        """Move the keys to where texts of any length lie; they keep their group ids."""
        longer = BytesIndex(self.types, max(self._expected, len(self)))
        for begin in range(0, len(self), _MOVED_AT_ONCE):
            longer.upsert(self.columns(np.arange(begin, min(begin + _MOVED_AT_ONCE, len(self)))))
        self._index = longer
        return longer

    def columns(self, gids: npt.NDArray[Any]) -> list[pa.Array]:
        index = self._index
        if isinstance(index, BytesIndex):
            return index.columns(gids)
        words, found = index.words(), list[pa.Array]()
        for kind, place in zip(self.types, self._places, strict=True):
            if is_word_key(kind):
                found.append(from_words(gather(words[:, place], gids), kind))
                continue
            first, second = gather(words[:, place], gids), gather(words[:, place + 1], gids)
            offsets = np.zeros(len(gids) + 1, np.int64)
            np.cumsum(second.view(np.uint64) >> text_kernels.LENGTH, out=offsets[1:])
            data = np.empty(int(offsets[-1]), np.uint8)
            text_kernels.unpack_texts(first, second, offsets, data)
            found.append(_spans(offsets, data, kind))
        return found

    @property
    def key_bytes(self) -> int:
        return self._index.key_bytes

    def frozen(self) -> KeyIndex:
        view = copy.copy(self)
        view._index = self._index.frozen()
        return view


def make_index(types: Sequence[pa.DataType], expected: int = 0) -> KeyIndex:
    """The fastest kind of index for these key columns, with room for ``expected`` keys.

    >>> type(make_index([pa.timestamp("us"), pa.string()])).__name__
    'TextIndex'
    """
    if all(is_word_key(kind) for kind in types):
        return WordsIndex(types, expected)
    if all(is_word_key(kind) or is_text_or_bytes(kind) for kind in types):
        return TextIndex(types, expected)
    return BytesIndex(types, expected)


def _matrix(parts: Sequence[Words], rows: int) -> Words:
    matrix: Words = np.empty((rows, len(parts)), np.int64)
    for c, words in enumerate(parts):
        matrix[:, c] = words
    return matrix


_MARKS = pa.uint64()
_MOVED_AT_ONCE = 1 << 16


class NullableIndex(KeyIndex):
    """Group ids of keys in which null is a value like any other, equal to itself.

    As long as no null comes it is the plain index, at no cost but a look at each column's null count.  With the first
    null the keys move, once, to an index with one more column: a word whose bit c says that column c is null.

    Args:
        types: Arrow types of the key columns, in order; 64 at most.

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
        view = copy.copy(self)
        view._index = self._index.frozen()
        return view

    def _mark(self) -> None:
        """Move the keys to an index with marks, where they keep their group ids."""
        plain, self._marked = self._index, True
        self._index = make_index([*self.types, _MARKS], len(plain))
        for begin in range(0, len(plain), _MOVED_AT_ONCE):
            gids = np.arange(begin, min(begin + _MOVED_AT_ONCE, len(plain)))
            self._index.upsert(_marked(plain.columns(gids)))


def keys_of(index: KeyIndex, gids: npt.NDArray[Any]) -> NullableIndex:
    """The keys of some group ids of another index, numbered 0, 1, 2 ..."""
    kept = NullableIndex(index.types, len(gids))
    if len(gids):
        kept.upsert(index.columns(gids))
    return kept


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

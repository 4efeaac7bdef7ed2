"""Lines of text to columns by compiled kernels, where all of them are plain; else the caller has other means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from cutwater.connectors.text import line_kernels as kernels
from cutwater.connectors.text.text_dictionary import FEW_ROWS, TextDictionary
from cutwater.data.words import batch_of

_parse_json: Any = kernels.parse_json
_parse_csv: Any = kernels.parse_csv

_SPARE = 16
"""Bytes behind a text, so that kernels may write whole words."""
_PLACES = 256
"""Fields of a JSON object whose names are expected to be those of the row before."""
_MOST_BYTES = 1 << 28
"""Memory for one block at most; what needs more is parsed by other means."""


class TextColumns:
    """Parses blocks of plain rows.

    Args:
        schema: of the rows; see ``kind_of`` for the types.
        names: the fields of a CSV row in their order; JSON objects have names of their own.
        dictionaries: columns of few texts come as dictionaries, where blocks are large.

    >>> columns = TextColumns(pa.schema([("n", pa.int64()), ("t", pa.string())]))
    >>> columns.json(b'{"n":1,"t":"a"}\\n{"t":null}\\n', 2, ignore=False).to_pylist()
    [{'n': 1, 't': 'a'}, {'n': None, 't': None}]
    >>> columns.json(b'{"n":1.5}\\n', 1, ignore=False) is None
    True
    """

    def __init__(self, schema: pa.Schema, names: Sequence[str] = (), *, dictionaries: bool = False) -> None:
        self._schema = schema
        kinds = [kind_of(field.type) for field in schema]
        self.kinds = np.array(kinds, np.int64)
        texts = iter(range(len(kinds)))
        self.text_of = np.array([next(texts) if kind == kernels.TEXT else 0 for kind in kinds], np.int64)
        self.texts, self.reals = kinds.count(kernels.TEXT), kinds.count(kernels.REAL)
        encoded = [name.encode() for name in schema.names]
        self._names = np.frombuffer(b"".join(encoded) + bytes(_SPARE), np.uint8)
        self._name_ends = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        self._order = np.full(3 * _PLACES, -1)
        """Columns in the order of the last row's fields, and names that are of none (``parse_json``)."""
        self._order[: min(len(kinds), _PLACES)] = np.arange(min(len(kinds), _PLACES))
        place = {name: i for i, name in enumerate(schema.names)}
        self._columns = np.array([place.get(name, 0) for name in names], np.int64)
        fields = [kinds[place[name]] if name in place else kernels.NOTHING for name in names]
        self._fields = np.array(fields, np.int64)
        self._runs = _runs(self._fields == kernels.NOTHING)
        self._scratch = np.empty(0, np.uint8)
        self._few = set(range(self.texts)) if dictionaries else set[int]()
        self._dictionaries: dict[int, TextDictionary] = {}

    def dictionary(self, text: int, rows: int) -> TextDictionary | None:
        """What a column of texts (by its place among them) has as values; ``None`` if it comes as it is."""
        if text not in self._few or rows < FEW_ROWS:
            return None
        if text not in self._dictionaries:
            self._dictionaries[text] = TextDictionary()
        return self._dictionaries[text]

    def has_many(self, text: int) -> None:
        """From now on the column comes as it is."""
        self._few.discard(text)
        del self._dictionaries[text]

    def _fits(self, data: bytes, rows: int) -> bool:
        """False for rows of very many columns, or very long ones."""
        return self.texts * (len(data) + _SPARE) + 8 * len(self.kinds) * rows <= _MOST_BYTES

    def scratch(self, size: int) -> npt.NDArray[np.uint8]:
        """Memory for the texts of one block, of which batches get copies: the same for the next block."""
        if self._scratch.size < size:
            self._scratch = np.empty(size, np.uint8)
        return self._scratch

    def json(self, data: bytes, rows: int, *, ignore: bool) -> pa.RecordBatch | None:
        """``rows`` lines of one object each; ``None`` if a line is not plain.

        Args:
            ignore: fields that the schema does not name are passed over.
        """
        if not self._fits(data, rows):
            return None
        block = _Block(self, data, rows)
        scratch = np.zeros((2, len(self.kinds)), np.int64)
        scratch[0] = -1
        names = self._names.ctypes.data, self._name_ends.ctypes.data, self.kinds, self.text_of
        self._order[_PLACES:] = 0  # names of another block
        order = self._order.ctypes.data, _PLACES
        return block.batch(self._schema, _parse_json(*block.span, *names, ignore, block.out, *order, scratch))

    def csv(self, data: bytes, rows: int, *, delimiter: str, quote: str | None) -> pa.RecordBatch | None:
        """``rows`` rows of CSV; ``None`` if one is not plain."""
        if not self._fits(data, rows):
            return None
        block = _Block(self, data, rows)
        marks = ord(delimiter), ord(quote) if quote else -1
        fields = self._fields, self._runs, self._columns, self.text_of
        found = _parse_csv(*block.span, *marks, *fields, block.out, np.zeros(len(self.kinds), np.int64))
        return block.batch(self._schema, found)


class _Block:
    """Memory that a kernel writes, and the columns that it makes of it.

    Columns lie in memory of Arrow's, which gives what was freed again: fresh pages cost more than parsing.
    """

    def __init__(self, columns: TextColumns, data: bytes, rows: int) -> None:
        self._columns = columns
        self._rows, self._kinds, self._text_of = rows, columns.kinds, columns.text_of
        self._data: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8)
        self._part = len(data) + _SPARE
        self._scratch = columns.scratch(columns.texts * self._part)
        self._numbers = pa.allocate_buffer(8 * len(columns.kinds) * rows)
        self._ends = pa.allocate_buffer(4 * columns.texts * (rows + 1))
        self._valid = np.empty((len(columns.kinds), rows), np.uint8)
        self._hard = np.empty((rows * columns.reals, 4), np.int64)
        self._memory = np.zeros(4, np.uint64)
        np.frombuffer(self._ends, np.int32)[:: rows + 1] = 0

    @property
    def span(self) -> tuple[int, int]:
        """Addresses of the first byte and behind the last one."""
        first = self._data.ctypes.data
        return first, first + len(self._data)

    @property
    def out(self) -> tuple[int, ...]:
        """Where a kernel is to write (``line_kernels``)."""
        valid, texts, hard, memory = (a.ctypes.data for a in (self._valid, self._scratch, self._hard, self._memory))
        return self._numbers.address, valid, texts, self._part, self._ends.address, hard, memory, self._rows

    def batch(self, schema: pa.Schema, found: int) -> pa.RecordBatch | None:
        """The columns; ``None`` if a row is not plain, a value does not fit, or is null where none may be."""
        hard = int(self._memory[3])
        if found != self._rows or (hard and not self._settle(self._hard[:hard])):
            return None
        arrays: list[pa.Array] = []
        for column, field in enumerate(schema):
            array = self._array(column, field.type, int(self._kinds[column]))
            if array is None or (array.null_count and not field.nullable):
                return None
            arrays.append(array)
        return batch_of(arrays, schema)

    def _array(self, column: int, kind: pa.DataType, of: int) -> pa.Array | None:
        valid, rows = self._valid[column], self._rows
        nulls = rows - int(np.count_nonzero(valid))
        mask = pa.py_buffer(np.packbits(valid, bitorder="little")) if nulls else None
        if of == kernels.TEXT:
            text = int(self._text_of[column])
            few = self._of_few(text, valid, mask, nulls)
            return self._text_array(text, kind, mask, nulls) if few is None else few
        values = self._numbers.slice(8 * rows * column, 8 * rows)
        if of == kernels.FLAG:
            flags = np.frombuffer(values, np.int64).astype(np.bool_)
            values = pa.py_buffer(np.packbits(flags, bitorder="little"))
        elif kind.byte_width != 8 or pt.is_unsigned_integer(kind):
            numbers = np.frombuffer(values, np.int64)
            narrow = numbers.astype(f"{'u' if of == kernels.NATURAL else 'i'}{kind.byte_width}")
            if not np.array_equal(narrow, numbers):
                return None
            values = pa.py_buffer(narrow)
        return pa.Array.from_buffers(kind, rows, [mask, values], nulls)

    def _of_few(
        self, text: int, valid: npt.NDArray[np.uint8], mask: pa.Buffer | None, nulls: int
    ) -> pa.DictionaryArray | None:
        """The column as a dictionary; ``None`` if it is none, or has a text that is not UTF-8."""
        dictionary = self._columns.dictionary(text, self._rows)
        if dictionary is None:
            return None
        ends = np.frombuffer(self._ends, np.int32)[text * (self._rows + 1) :][: self._rows + 1]
        texts = self._scratch[text * self._part : (text + 1) * self._part]
        try:
            found = dictionary.column(texts, ends, valid, mask, nulls)
        except pa.ArrowInvalid:
            found = None
        if found is None:
            self._columns.has_many(text)
        return found

    def _text_array(self, text: int, kind: pa.DataType, mask: pa.Buffer | None, nulls: int) -> pa.Array | None:
        ends = self._ends.slice(4 * text * (self._rows + 1), 4 * (self._rows + 1))
        used, first = int(np.frombuffer(ends, np.int32)[-1]), text * self._part
        texts = pa.allocate_buffer(used)
        np.frombuffer(texts, np.uint8)[:] = self._scratch[first : first + used]
        array = pa.Array.from_buffers(kind, self._rows, [mask, ends, texts], nulls)
        if used and self._scratch[first : first + used].max() > 127 and not _is_utf8(array):
            return None
        return array

    def _settle(self, hard: npt.NDArray[np.int64]) -> bool:
        """Doubles of many digits are rounded by Arrow."""
        lengths = hard[:, 3]
        ends = np.zeros(len(hard) + 1, np.int32)
        np.cumsum(lengths, out=ends[1:])
        first = hard[:, 2] - self.span[0]
        bytes_of = self._data[np.repeat(first - ends[:-1], lengths) + np.arange(ends[-1])]
        texts = pa.Array.from_buffers(pa.string(), len(hard), [None, pa.py_buffer(ends), pa.py_buffer(bytes_of)], 0)
        try:
            values = texts.cast(pa.float64()).to_numpy()
        except pa.ArrowInvalid:
            return False
        np.frombuffer(self._numbers, np.float64)[hard[:, 0] * self._rows + hard[:, 1]] = values
        return bool(np.isfinite(values).all())


def kind_of(kind: pa.DataType) -> int:
    """What the kernels make of a type; ``NOTHING`` if they do not know it.

    >>> kind_of(pa.int16()) == kernels.INTEGER, kind_of(pa.list_(pa.int16())) == kernels.NOTHING
    (True, True)
    """
    if pt.is_integer(kind):
        return kernels.INTEGER if pt.is_signed_integer(kind) else kernels.NATURAL
    if pt.is_float64(kind):
        return kernels.REAL
    if pt.is_boolean(kind):
        return kernels.FLAG
    if pt.is_string(kind):
        return kernels.TEXT
    if pt.is_date32(kind):
        return kernels.DATE
    if kind == pa.timestamp("us", "UTC"):
        return kernels.INSTANT
    return kernels.WALL_TIME if kind == pa.timestamp("us") else kernels.NOTHING


def _runs(marks: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    """Of each place, how many marks there are in a row from it on.

    >>> _runs(np.array([True, True, False, True])).tolist()
    [2, 1, 0, 1]
    """
    runs = np.zeros(len(marks) + 1, np.int64)
    for place in reversed(range(len(marks))):
        runs[place] = runs[place + 1] + 1 if marks[place] else 0
    return runs[:-1]


def knows(schema: pa.Schema) -> bool:
    """True if the kernels parse every column, and find it by its name."""
    names = "".join(schema.names)
    plain = names.isprintable() and not set('"\\') & set(names)
    return plain and bool(len(schema)) and all(kind_of(field.type) != kernels.NOTHING for field in schema)


def _is_utf8(array: pa.Array) -> bool:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True

"""Lines of text to columns by compiled kernels, where all of them are plain; else the caller has other means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from cutwater.connectors.files import text_kernels as kernels

_parse_json: Any = kernels.parse_json
_parse_csv: Any = kernels.parse_csv
_SPARE = 16
"""Bytes behind a text, so that kernels may write whole words."""


class TextColumns:
    """Parses blocks of plain rows.

    Args:
        schema: of the rows; see ``kind_of`` for the types.
        names: the fields of a CSV row in their order; JSON objects have names of their own.

    >>> columns = TextColumns(pa.schema([("n", pa.int64()), ("t", pa.string())]))
    >>> columns.json(b'{"n":1,"t":"a"}\\n{"t":null}\\n', 2, ignore=False).to_pylist()
    [{'n': 1, 't': 'a'}, {'n': None, 't': None}]
    >>> columns.json(b'{"n":1.5}\\n', 1, ignore=False) is None
    True
    """

    def __init__(self, schema: pa.Schema, names: Sequence[str] = ()) -> None:
        self._schema = schema
        kinds = [kind_of(field.type) for field in schema]
        self._kinds = np.array(kinds, np.int64)
        texts = iter(range(len(kinds)))
        self._text_of = np.array([next(texts) if kind == kernels.TEXT else -1 for kind in kinds], np.int64)
        self._texts = kinds.count(kernels.TEXT)
        self._reals = kinds.count(kernels.REAL)
        encoded = [name.encode() for name in schema.names]
        self._names = np.frombuffer(b"".join(encoded) + bytes(_SPARE), np.uint8)
        self._name_ends = np.cumsum([0, *map(len, encoded)])
        place = {name: i for i, name in enumerate(schema.names)}
        self._columns = np.array([place.get(name, 0) for name in names], np.int64)
        fields = [kinds[place[name]] if name in place else kernels.NOTHING for name in names]
        self._fields = np.array(fields, np.int64)
        self._memory = np.zeros(4, np.uint64)

    def json(self, data: bytes, rows: int, *, ignore: bool) -> pa.RecordBatch | None:
        """``rows`` lines of one object each; ``None`` if a line is not plain.

        Args:
            ignore: fields that the schema does not name are passed over.
        """
        out = _Out(self._schema, data, rows, self._texts, self._reals)
        scratch = np.full((2, len(self._kinds)), -1, np.int64)
        scratch[1] = np.arange(len(self._kinds))
        self._memory[3] = 0
        found = _parse_json(
            out.data,
            self._names,
            self._name_ends,
            self._kinds,
            self._text_of,
            ignore,
            *out.arrays,
            self._memory,
            scratch,
        )
        return out.batch(self._kinds, self._text_of, int(self._memory[3])) if found == rows else None

    def csv(self, data: bytes, rows: int, *, delimiter: str, quote: str | None) -> pa.RecordBatch | None:
        """``rows`` rows of CSV; ``None`` if one is not plain."""
        out = _Out(self._schema, data, rows, self._texts, self._reals)
        self._memory[3] = 0
        found = _parse_csv(
            out.data,
            ord(delimiter),
            ord(quote) if quote else 0,
            self._fields,
            self._columns,
            self._text_of,
            *out.arrays,
            self._memory,
        )
        return out.batch(self._kinds, self._text_of, int(self._memory[3])) if found == rows else None


class _Out:
    """Memory that a kernel writes, and the columns that it makes of it."""

    def __init__(self, schema: pa.Schema, data: bytes, rows: int, texts: int, reals: int) -> None:
        self._schema, self._rows = schema, rows
        self.data: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8)
        self._numbers = np.empty((len(schema), rows), np.int64)
        self._valid = np.empty((len(schema), rows), np.uint8)
        self._texts = np.empty((texts, len(data) + _SPARE), np.uint8)
        self._ends = np.zeros((texts, rows + 1), np.int32)
        self._hard = np.empty((rows * reals, 4), np.int64)

    @property
    def arrays(self) -> tuple[Any, ...]:
        """What a kernel writes, in the order in which it takes them."""
        reals = self._numbers.view(np.float64)
        return self._numbers, reals, self._valid, self._texts.reshape(-1), self._ends, self._hard

    def batch(self, kinds: npt.NDArray[np.int64], text_of: npt.NDArray[np.int64], hard: int) -> pa.RecordBatch | None:
        """The columns; ``None`` if a value does not fit its column, or is null where none may be."""
        if hard and not self._settle(self._hard[:hard]):
            return None
        arrays: list[pa.Array] = []
        for column, field in enumerate(self._schema):
            array = self._array(column, field.type, int(kinds[column]), int(text_of[column]))
            if array is None or (array.null_count and not field.nullable):
                return None
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _array(self, column: int, kind: pa.DataType, of: int, text: int) -> pa.Array | None:
        valid, numbers, rows = self._valid[column], self._numbers[column], self._rows
        nulls = rows - int(np.count_nonzero(valid))
        mask = pa.py_buffer(np.packbits(valid, bitorder="little")) if nulls else None
        if of == kernels.TEXT:
            ends = self._ends[text]
            used = int(ends[-1])
            texts = self._texts[text, :used].copy() if used * 4 < len(self.data) else self._texts[text]
            array = pa.Array.from_buffers(kind, rows, [mask, pa.py_buffer(ends), pa.py_buffer(texts)], nulls)
            if not self.data_is_ascii and not _is_text(array):
                return None
            return array
        if of == kernels.FLAG:
            bits = np.packbits(numbers.astype(np.bool_), bitorder="little")
            return pa.Array.from_buffers(kind, rows, [mask, pa.py_buffer(bits)], nulls)
        width = np.dtype(f"{'f' if of == kernels.REAL else 'i'}{kind.byte_width}")
        if pt.is_unsigned_integer(kind):
            width = np.dtype(f"u{kind.byte_width}")
        if of == kernels.REAL:
            numbers = numbers.view(np.float64)
        narrow = numbers.astype(width, copy=False)
        if of <= kernels.NATURAL and width != np.int64 and not np.array_equal(narrow, numbers):
            return None
        return pa.Array.from_buffers(kind, rows, [mask, pa.py_buffer(narrow)], nulls)

    @property
    def data_is_ascii(self) -> bool:
        """No byte belongs to a longer character."""
        return bool(self.data.size == 0 or self.data.max() < 128)

    def _settle(self, hard: npt.NDArray[np.int64]) -> bool:
        """Doubles of many digits are rounded by Arrow."""
        lengths = hard[:, 3]
        ends = np.zeros(len(hard) + 1, np.int32)
        np.cumsum(lengths, out=ends[1:])
        places = np.repeat(hard[:, 2] - ends[:-1], lengths) + np.arange(ends[-1])
        texts = pa.Array.from_buffers(
            pa.string(), len(hard), [None, pa.py_buffer(ends), pa.py_buffer(self.data[places])], 0
        )
        try:
            values = texts.cast(pa.float64())
        except pa.ArrowInvalid:
            return False
        numbers = values.to_numpy()
        self._numbers.view(np.float64)[hard[:, 0], hard[:, 1]] = numbers
        return bool(np.isfinite(numbers).all())


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


def knows(schema: pa.Schema) -> bool:
    """True if the kernels parse every column, and find it by its name."""
    names = "".join(schema.names)
    plain = names.isprintable() and not set('"\\') & set(names)
    return plain and bool(len(schema)) and all(kind_of(field.type) != kernels.NOTHING for field in schema)


def _is_text(array: pa.Array) -> bool:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True

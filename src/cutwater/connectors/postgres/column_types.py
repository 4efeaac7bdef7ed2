"""Types of Postgres, as columns of a stream: which there are, and how their values become Arrow arrays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.connectors.postgres import decode_kernels as kernels
from cutwater.data.words import new_buffer

_US_TO_2000, _DAYS_TO_2000 = 946_684_800_000_000, 10_957
_WORDS = np.frombuffer(b"NaN-Infinity", np.uint8)
_MOST_DIGITS = 38


class BadValueError(Exception):
    """A value cannot be a value of its column: the row, and what is wrong."""

    def __init__(self, row: int, why: str) -> None:
        super().__init__(why)
        self.row, self.why = row, why


class Fields(NamedTuple):
    """The values of a column, in what a server has sent."""

    data: npt.NDArray[np.uint8]
    at: npt.NDArray[np.int64]
    length: npt.NDArray[np.int64]

    @property
    def nulls(self) -> int:
        """How many have no value."""
        return int(np.count_nonzero(self.length < 0))

    @property
    def validity(self) -> pa.Buffer | None:
        """Arrow's bitmap; ``None`` if all have a value."""
        return pa.py_buffer(np.packbits(self.length >= 0, bitorder="little")) if self.nulls else None


Decoder = Callable[[Fields, "ColumnType"], pa.Array]


@dataclass(frozen=True)
class ColumnType:
    """A type of columns, as a server knows it and as ours; a picklable value."""

    oid: int
    kind: str
    arrow: pa.DataType
    element: ColumnType | None = None
    """Of an array."""

    def decode(self, fields: Fields) -> pa.Array:
        """The column.

        Raises:
            BadValueError: a value that it cannot hold.
        """
        return _DECODERS[self.kind](fields, self)


def column_type(oid: int, typmod: int) -> ColumnType | None:
    """The type of a column; ``None`` for one that has no counterpart.

    >>> str(column_type(1700, ((10 << 16) | 2) + 4).arrow), column_type(1700, -1).kind, column_type(600, -1)
    ('decimal128(10, 2)', 'numeric text', None)
    """
    if oid == _NUMERIC:
        return _numeric(typmod)
    if oid not in _SIMPLE:
        return None
    kind, arrow = _SIMPLE[oid]
    return ColumnType(oid, kind, arrow)


def array_type(oid: int, element: ColumnType) -> ColumnType:
    """The type of arrays, of one dimension, of a type."""
    return ColumnType(oid, "array", pa.list_(element.arrow), element)


def label_type(oid: int) -> ColumnType:
    """The type of an enumeration: its values are their labels."""
    return ColumnType(oid, "text", pa.string())


def _numeric(typmod: int) -> ColumnType:
    precision, scale = (typmod - 4) >> 16 & 0xFFFF, (typmod - 4) & 0x7FF
    if typmod < 4 or precision > _MOST_DIGITS or scale > precision:  # or negative, 11 bits with a sign
        return ColumnType(_NUMERIC, "numeric text", pa.string())
    return ColumnType(_NUMERIC, "decimal", pa.decimal128(precision, scale))


def _checked(row: int, why: str) -> None:
    if row >= 0:
        raise BadValueError(int(row), why)


def _primitive(values: npt.NDArray[Any], fields: Fields, kind: pa.DataType) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [fields.validity, pa.py_buffer(values)], fields.nulls)


def _integers(fields: Fields, width: int) -> npt.NDArray[np.int64]:
    out = np.empty(len(fields.at), np.int64)
    _checked(kernels.integers(*fields, width, out), f"is not {width} bytes long")
    return out


def _integer(fields: Fields, column: ColumnType) -> pa.Array:
    width = column.arrow.bit_width // 8
    return _primitive(_integers(fields, width).astype(f"i{width}"), fields, column.arrow)


def _oid(fields: Fields, column: ColumnType) -> pa.Array:
    return _primitive(_integers(fields, 4) & 0xFFFFFFFF, fields, column.arrow)


def _boolean(fields: Fields, column: ColumnType) -> pa.Array:
    bits = np.packbits(_integers(fields, 1) != 0, bitorder="little")
    return pa.Array.from_buffers(column.arrow, len(fields.at), [fields.validity, pa.py_buffer(bits)], fields.nulls)


def _timestamp(fields: Fields, column: ColumnType) -> pa.Array:
    values = _integers(fields, 8)
    kernels.moved(values, _US_TO_2000, np.iinfo(np.int64).min, np.iinfo(np.int64).max)
    return _primitive(values, fields, column.arrow)


def _date(fields: Fields, column: ColumnType) -> pa.Array:
    values = _integers(fields, 4)
    kernels.moved(values, _DAYS_TO_2000, np.iinfo(np.int32).min, np.iinfo(np.int32).max)
    return _primitive(np.clip(values, -(2**31), 2**31 - 1).astype(np.int32), fields, column.arrow)


def _bytes(fields: Fields, column: ColumnType, skip: int = 0) -> pa.Array:
    ends = np.zeros(len(fields.at) + 1, np.int64)
    buffer, out = new_buffer(int(kernels.offsets_of(fields.length, skip, ends[1:])), np.uint8)
    kernels.copy_values(*fields, skip, out)
    return _variable(ends, buffer, fields, column)


def _jsonb(fields: Fields, column: ColumnType) -> pa.Array:
    there = fields.length >= 0
    if not (fields.data[fields.at[there]] == 1).all():
        raise BadValueError(int(np.flatnonzero(there)[0]), "is no jsonb of version 1")
    return _bytes(fields, column, skip=1)


def _variable(ends: npt.NDArray[np.int64], data: pa.Buffer, fields: Fields, column: ColumnType) -> pa.Array:
    if ends[-1] > np.iinfo(np.int32).max:
        raise BadValueError(0, "begins values of more than 2 GB")
    buffers = [fields.validity, pa.py_buffer(ends.astype(np.int32)), data]
    return pa.Array.from_buffers(column.arrow, len(fields.at), buffers, fields.nulls)


def _uuid(fields: Fields, column: ColumnType) -> pa.Array:
    ends = np.zeros(len(fields.at) + 1, np.int64)
    np.cumsum(np.where(fields.length >= 0, 36, 0), out=ends[1:])
    buffer, out = new_buffer(int(ends[-1]), np.uint8)
    _checked(kernels.uuid_texts(*fields, out), "is not 16 bytes long")
    return _variable(ends, buffer, fields, column)


def _decimal(fields: Fields, column: ColumnType) -> pa.Array:
    out = np.empty(2 * len(fields.at), np.uint64)
    _checked(kernels.decimals(*fields, column.arrow.scale, out), f"is no {column.arrow}")
    return pa.Array.from_buffers(column.arrow, len(fields.at), [fields.validity, pa.py_buffer(out)], fields.nulls)


def _numeric_text(fields: Fields, column: ColumnType) -> pa.Array:
    ends = np.zeros(len(fields.at) + 1, np.int64)
    kernels.numeric_sizes(*fields, ends[1:])
    buffer, out = new_buffer(int(ends[-1]), np.uint8)
    kernels.numeric_texts(*fields, _WORDS, out)
    return _variable(ends, buffer, fields, column)


def _array(fields: Fields, column: ColumnType) -> pa.Array:
    assert column.element is not None
    ends = np.zeros(len(fields.at) + 1, np.int64)
    _checked(kernels.array_sizes(*fields, ends[1:]), "is an array of more than one dimension")
    at, length = np.empty(int(ends[-1]), np.int64), np.empty(int(ends[-1]), np.int64)
    kernels.array_elements(*fields, at, length)
    elements = column.element.decode(Fields(fields.data, at, length))
    offsets = pa.py_buffer(ends.astype(np.int32))
    buffers = [fields.validity, offsets]
    return pa.Array.from_buffers(column.arrow, len(fields.at), buffers, fields.nulls, children=[elements])


_NUMERIC = 1700
_SIMPLE: dict[int, tuple[str, pa.DataType]] = {
    16: ("boolean", pa.bool_()),
    17: ("bytes", pa.binary()),
    18: ("text", pa.string()),  # "char"
    19: ("text", pa.string()),  # name
    20: ("integer", pa.int64()),
    21: ("integer", pa.int16()),
    23: ("integer", pa.int32()),
    25: ("text", pa.string()),
    26: ("oid", pa.int64()),
    114: ("text", pa.string()),  # json
    142: ("text", pa.string()),  # xml
    700: ("integer", pa.float32()),
    701: ("integer", pa.float64()),
    1042: ("text", pa.string()),  # char(n)
    1043: ("text", pa.string()),  # varchar
    1082: ("date", pa.date32()),
    1083: ("integer", pa.time64("us")),
    1114: ("timestamp", pa.timestamp("us")),
    1184: ("timestamp", pa.timestamp("us", "UTC")),
    2950: ("uuid", pa.string()),
    3802: ("jsonb", pa.string()),
}
_DECODERS: dict[str, Decoder] = {
    "array": _array,
    "boolean": _boolean,
    "bytes": _bytes,
    "date": _date,
    "decimal": _decimal,
    "integer": _integer,
    "jsonb": _jsonb,
    "numeric text": _numeric_text,
    "oid": _oid,
    "text": _bytes,
    "timestamp": _timestamp,
    "uuid": _uuid,
}

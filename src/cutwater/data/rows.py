"""Rows as Python values: for messages, and on their way back to Arrow."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

Row: TypeAlias = dict[str, Any]

_VALUE_CHARS = 60
_ROW_CHARS = 400
_EXACT = {type(None), bool, int, str, bytes}
"""Python types that Arrow refuses rather than shortens, whatever the column."""
_MICROS = {"s": 10**6, "ms": 10**3, "us": 1, "ns": 1}


def describe_row(row: Mapping[str, Any]) -> str:
    """The contents of a row for a message, shortened.

    >>> describe_row({"id": 7, "text": "x" * 1000})
    "{id: 7, text: 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx...}"
    """
    parts = (f"{name}: {_cut(_repr(value), _VALUE_CHARS)}" for name, value in row.items())
    return f"{{{_cut(', '.join(parts), _ROW_CHARS)}}}"


def row_contents(batch: pa.RecordBatch, row: int) -> Row:
    """One row for a message; a value that Python cannot hold (the year 200,000) is replaced by its number.

    >>> row_contents(pa.record_batch({"t": pa.array([2**62], pa.timestamp("us"))}), 0)
    {'t': '4611686018427387904 as timestamp[us]'}
    """
    contents: Row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        value = column[row]
        try:
            contents[name] = value.as_py()
        except (OverflowError, ValueError):
            contents[name] = f"{getattr(value, 'value', '?')} as {value.type}"
    return contents


def _repr(value: object) -> str:
    if isinstance(value, str | bytes):
        return repr(value[:_VALUE_CHARS]) if len(value) <= _VALUE_CHARS else repr(value[: _VALUE_CHARS + 1])[:-1]
    return repr(value)


def _cut(text: str, chars: int) -> str:
    return text if len(text) <= chars else f"{text[:chars]}..."


def shorten_value(value: object) -> str:
    """A value for a message.

    >>> shorten_value(1.5)
    '1.5'
    """
    return _cut(_repr(value), _VALUE_CHARS)


def loses_value(values: Sequence[Any], type: pa.DataType) -> int | None:
    """Index of the first value that Arrow would silently shorten to fit ``type``; ``None`` if there is none.

    >>> loses_value([1, 2.0, 2.5], pa.int64())
    2
    """
    if pt.is_string(type) or pt.is_binary(type) or pt.is_floating(type) or pt.is_boolean(type) or pt.is_decimal(type):
        return None
    if not pt.is_nested(type) and {*map(_type, values)} <= _EXACT:
        return None
    return next((index for index, value in enumerate(values) if _loses(value, type)), None)


_type = type


def _loses(value: Any, type: pa.DataType) -> bool:
    if value is None:
        return False
    if pt.is_struct(type):
        fields = {type.field(i).name: type.field(i).type for i in range(type.num_fields)}
        if not isinstance(value, Mapping):
            return any(_loses(part, kind) for part, kind in zip(value, fields.values(), strict=False))
        return not value.keys() <= fields.keys() or any(_loses(part, fields[name]) for name, part in value.items())
    if pt.is_map(type):
        pairs = value.items() if isinstance(value, Mapping) else value
        return any(_loses(key, type.key_type) or _loses(item, type.item_type) for key, item in pairs)
    if pt.is_nested(type):
        return any(_loses(part, type.value_type) for part in value)
    if pt.is_integer(type) or pt.is_temporal(type):
        return _loses_part(value, type)
    return False


def _loses_part(value: Any, type: pa.DataType) -> bool:
    """A fraction of a number, or of a time."""
    if isinstance(value, float | Decimal | np.floating):
        return bool(value % 1 != 0)
    if isinstance(value, dt.datetime):
        if pt.is_date(type):
            return value.time() != dt.time()
        return pt.is_timestamp(type) and value.microsecond % _MICROS[type.unit] != 0
    if isinstance(value, dt.time):
        return value.microsecond % _MICROS[type.unit] != 0
    return isinstance(value, dt.timedelta) and value.microseconds % _MICROS[type.unit] != 0

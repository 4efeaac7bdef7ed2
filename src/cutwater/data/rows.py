"""Rows as Python values, for messages and on their way back to Arrow; their sizes; their event times, checked."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from cutwater.data.words import fixed_view, valid_rows
from cutwater.errors import DataError

Row: TypeAlias = dict[str, Any]

_VALUE_CHARS = 60
_ROW_CHARS = 400
_EXACT = {type(None), bool, int, str, bytes, dt.date}
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
    if not pt.is_nested(type):
        others = {*map(_type, values)} - _EXACT
        if not others or (others == {dt.datetime} and pt.is_timestamp(type) and _MICROS[type.unit] == 1):
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


MAX_BATCH_ROWS = 65_536
"""Most rows of a batch that is put together of rows of others."""
_MAX_BATCH_BYTES = 1 << 28


def widest_row_bytes(batch: pa.RecordBatch) -> int:
    """An upper bound of the size of one row: texts are measured, nested columns counted as if one row held all.

    >>> widest_row_bytes(pa.record_batch({"n": [1, 2], "s": ["a", "long"]}))
    16
    """
    return sum(_widest(column) for column in batch.columns) if batch.num_rows else 0


def _widest(column: pa.Array) -> int:
    kind = column.type
    if pt.is_string(kind) or pt.is_large_string(kind) or pt.is_binary(kind) or pt.is_large_binary(kind):
        longest = pc.call_function("max", [pc.call_function("binary_length", [column])])
        return (longest.as_py() or 0) + 4
    return column.nbytes if pt.is_nested(kind) else 8


def rows_per_batch(widest_bytes: int) -> int:
    """The rows that one batch may have if each has up to so many bytes.

    >>> rows_per_batch(100), rows_per_batch(10_000_000)
    (65536, 26)
    """
    return max(1, min(MAX_BATCH_ROWS, _MAX_BATCH_BYTES // max(widest_bytes, 1)))


def row_bytes(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    """The size of each row, roughly; the same wherever the row lies.

    >>> row_bytes(pa.record_batch({"n": [1, 2], "s": ["a", "long"], "l": [[1, 2], None]})).tolist()
    [37, 24]
    """
    return _sum_of(batch.columns, batch.num_rows)


def _value_bytes(values: Any) -> npt.NDArray[np.int64]:
    kind = values.type
    if pt.is_string(kind) or pt.is_large_string(kind) or pt.is_binary(kind) or pt.is_large_binary(kind):
        lengths = pc.call_function("coalesce", [pc.call_function("binary_length", [values]), pa.scalar(0, pa.int64())])
        return lengths.to_numpy(zero_copy_only=False).astype(np.int64) + 4
    if pt.is_struct(kind):
        return _sum_of(values.flatten(), len(values))
    if pt.is_map(kind):
        offsets = values.offsets.to_numpy()
        begin, end = int(offsets[0]), int(offsets[-1])
        inner = _sum_of([values.keys[begin:end], values.items[begin:end]], end - begin)
        ends = np.concatenate([[0], np.cumsum(inner)])[offsets - begin]
        return np.where(values.is_valid().to_numpy(zero_copy_only=False), np.diff(ends), 0) + 8
    if pt.is_list(kind) or pt.is_large_list(kind) or pt.is_fixed_size_list(kind):
        parents = pc.call_function("list_parent_indices", [values]).to_numpy()
        inner = _value_bytes(pc.call_function("list_flatten", [values]))
        return np.bincount(parents, inner, len(values)).astype(np.int64) + 8
    return np.full(len(values), 8, np.int64)


def _sum_of(columns: Iterable[pa.Array], rows: int) -> npt.NDArray[np.int64]:
    total = np.zeros(rows, np.int64)
    for column in columns:
        total += _value_bytes(column)
    return total


_LIMIT_US = 2**62


def event_times(batch: pa.RecordBatch, name: str, of: str = "") -> npt.NDArray[np.int64]:
    """Microseconds since 1970 of a ``timestamp[us]`` column, read-only.

    Args:
        batch: at least one row.
        name: the column.
        of: whose time it is, for the message.

    Raises:
        DataError: a null, or a time so far away that sums with it could overflow.

    >>> event_times(pa.record_batch({"t": pa.array([7], pa.timestamp("us"))}), "t").tolist()
    [7]
    """
    column = batch.column(name)
    valid = valid_rows(column)
    times = fixed_view(column, np.int64)
    if valid is not None:
        bad, what = int(np.flatnonzero(~valid)[0]), "null"
    elif int(times.max()) > _LIMIT_US or int(times.min()) < -_LIMIT_US:
        bad, what = int(np.flatnonzero((times > _LIMIT_US) | (times < -_LIMIT_US))[0]), "over 146,000 years"
    else:
        return times
    error = DataError(
        f"event time {name!r}{of} is {what} in row {bad} of the batch: {describe_row(row_contents(batch, bad))}",
        hint="Filter such rows out, or correct the column, before this step.",
    )
    error.row = bad
    raise error

"""The values of a column in Python: what ``to_pylist`` gives, made at once where NumPy gives the same."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

_EPOCH = dt.datetime(1970, 1, 1)
_PER_SECOND = {"s": 1, "ms": 1000, "us": 1_000_000}
_FIRST_S = int((dt.datetime.min - _EPOCH).total_seconds())
_LAST_S = int((dt.datetime(9999, 12, 31) - _EPOCH).total_seconds())  # the last day is left to Arrow
_DAY_S = 86_400


def column_values(column: pa.Array) -> list[Any]:
    """The values as a list, ``None`` for nulls.

    Raises:
        OverflowError, ValueError: one has no counterpart in Python.

    >>> column_values(pa.array([7, None])), column_values(pa.array(["a", None]))
    ([7, None], ['a', None])
    """
    kind = column.type
    if pt.is_integer(kind) or pt.is_float64(kind) or pt.is_float32(kind) or pt.is_boolean(kind):
        return _numbers(column)
    if pt.is_string(kind) or pt.is_large_string(kind) or pt.is_binary(kind) or pt.is_large_binary(kind):
        return _texts(column)
    if pt.is_dictionary(kind):
        return column_values(column.dictionary_decode())
    if pt.is_date32(kind) and _in_range(column.view(pa.int32()), _FIRST_S // _DAY_S, _LAST_S // _DAY_S):
        return column.to_numpy(zero_copy_only=False).tolist()
    if pt.is_timestamp(kind) and kind.unit in _PER_SECOND and kind.tz in (None, "UTC"):
        second = _PER_SECOND[kind.unit]
        if _in_range(column.view(pa.int64()), _FIRST_S * second, _LAST_S * second):
            return _times(column)
    return column.to_pylist()


class BatchValues:
    """The values of a batch, made column by column at once, and its rows as dicts, a part at a time.

    Raises:
        OverflowError, ValueError: a value has no counterpart in Python.

    >>> values = BatchValues(pa.record_batch({"n": [1, None], "s": ["a", "b"]}))
    >>> values.column("s"), values.rows(1, 2)
    (['a', 'b'], [{'n': None, 's': 'b'}])
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        self._names: tuple[str, ...] = tuple(batch.schema.names)
        self._columns = [column_values(column) for column in batch.columns]
        self._count: int = batch.num_rows

    def column(self, name: str) -> list[Any]:
        """The values of a column."""
        return self._columns[self._names.index(name)]

    def rows(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Rows as dicts, as ``batch.to_pylist()`` gives them."""
        if not self._columns:
            return [{} for _ in range(self._count)[start:stop]]
        return _dicts_of(self._names)([column[start:stop] for column in self._columns])


@lru_cache(maxsize=256)
def _dicts_of(names: tuple[str, ...]) -> Callable[[list[list[Any]]], list[dict[str, Any]]]:
    """Makes dicts with these keys of columns, by a display of them: ``dict(zip())`` takes three times as long."""
    values = [f"v{number}" for number in range(len(names))]
    display = ", ".join(f"{name!r}: {value}" for name, value in zip(names, values, strict=True))
    made: Callable[[list[list[Any]]], list[dict[str, Any]]]
    made = eval(f"lambda columns: [{{{display}}} for {', '.join(values)}, in zip(*columns, strict=True)]")
    return made


def _numbers(column: pa.Array) -> list[Any]:
    if not column.null_count:
        return column.to_numpy(zero_copy_only=False).tolist()
    values = column.fill_null(False if pt.is_boolean(column.type) else 0).to_numpy(zero_copy_only=False).tolist()
    for row in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
        values[row] = None
    return values


def _texts(column: pa.Array) -> list[Any]:
    try:
        return column.to_numpy(zero_copy_only=False).tolist()
    except pa.ArrowException:
        return column.to_pylist()  # says which byte is wrong


def _times(column: pa.Array) -> list[Any]:
    times = column.to_numpy(zero_copy_only=False)
    if column.type.tz is None:
        return times.tolist()
    epoch: dt.datetime = pa.scalar(0, column.type).as_py()  # in the zone as Arrow gives it
    since = times.view(f"timedelta64[{column.type.unit}]").tolist()
    if not column.null_count:
        return list(map(epoch.__add__, since))
    return [None if delta is None else epoch + delta for delta in since]


def _in_range(numbers: pa.Array, first: int, last: int) -> bool:
    found = pc.call_function("min_max", [numbers]).as_py()
    return found["min"] is None or (first <= found["min"] and found["max"] <= last)

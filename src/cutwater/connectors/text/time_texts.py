"""Columns of times and dates, at any depth, as columns of texts."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from cutwater.connectors.text import time_kernels as kernels
from cutwater.data.words import fixed_view, new_buffer, valid_rows
from cutwater.errors import DataError

_write_times: Any = kernels.write_times
_write_dates: Any = kernels.write_dates

_TICKS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_DIGITS = {"s": 3, "ms": 3, "us": 6, "ns": 9}
_DATE, _TIME, _SPARE = 10, 37, 16
"""Bytes of a text at most, and behind the last one, so that kernels may write whole words."""
_NONE_NULL: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
_NONE_NULL.setflags(write=False)
_UTC = ("UTC", "Etc/UTC")
_DAY_S = 86_400
_FIRST_S, _LAST_S = -8_334_601_228_800, 8_210_266_876_800
"""The years that Polars' calendar has, in seconds since 1970; it ends with a panic at any other."""


class TimeTexts(NamedTuple):
    """How a text format writes times: as the texts that Polars makes of them, but sooner."""

    mark: str
    """Between date and time; times with a zone have a ``T``."""
    shorter: bool
    """Fractions of a second have as many digits as they need; those of times with a zone always."""

    def of_rows(self, rows: pa.Table) -> pa.Table:
        """The rows with dates, and times without a zone or in UTC, as texts, in lists, structs and maps as well.

        Other zones, times of day and years that do not have four digits stay as they are, for Polars.

        Raises:
            DataError: a time that no text holds.

        >>> rows = pa.table({"at": pa.array([[0, None]], pa.list_(pa.timestamp("s")))})
        >>> TimeTexts(" ", shorter=True).of_rows(rows)["at"].to_pylist()
        [['1970-01-01 00:00:00', None]]
        """
        for place, field in enumerate(rows.schema):
            if _has_times(field.type):
                column = rows.column(place)
                joined = column.chunk(0) if column.num_chunks == 1 else pa.concat_arrays(column.chunks)
                try:
                    made = self._of(joined)
                except DataError as error:
                    raise DataError(f"column {field.name!r}: {error.message}", hint=error.hint) from None
                rows = rows.set_column(place, field.name, made)
        return rows

    def _of(self, column: pa.Array) -> pa.Array:
        kind = column.type
        if not _has_times(kind):
            return column
        if pt.is_struct(kind):
            parts = [self._of(part) for part in column.flatten()]
            fields = [pa.field(kind.field(i).name, part.type) for i, part in enumerate(parts)]
            return pa.StructArray.from_arrays(parts, fields=fields, mask=column.is_null())
        if pt.is_list(kind) or pt.is_map(kind):
            own = column.take(np.arange(len(column)))  # without what lies under nulls and beside a slice
            made = self._of(own.values if pt.is_list(kind) else own.items)
            if pt.is_list(kind):
                return pa.Array.from_buffers(pa.list_(made.type), len(own), own.buffers()[:2], children=[made])
            entries = pa.StructArray.from_arrays([own.keys, made], ["key", "value"])
            whole = pa.map_(kind.key_type, made.type)
            return pa.Array.from_buffers(whole, len(own), own.buffers()[:2], children=[entries])
        made = None
        if pt.is_date32(kind):
            made = date_texts(column)
        elif pt.is_timestamp(kind) and kind.tz is None:
            made = time_texts(column, self.mark, shorter=self.shorter)
        elif pt.is_timestamp(kind) and kind.tz in _UTC:
            made = time_texts(column, "T", "+00:00", shorter=True)
        if made is None:
            _check_bounds(column)
            return column
        return made


def _has_times(kind: pa.DataType) -> bool:
    return pt.is_temporal(kind) or any(_has_times(kind.field(i).type) for i in range(kind.num_fields))


def _check_bounds(times: pa.Array) -> None:
    """Look for times that Polars would write as null, or end at.

    Raises:
        DataError: there is one.
    """
    kind = times.type
    is_clock = pt.is_time(kind)
    first_s, last_s = (0, _DAY_S) if is_clock else (_FIRST_S, _LAST_S)
    if pt.is_date32(kind):
        first, last = first_s // _DAY_S, last_s // _DAY_S
    else:
        ticks = _TICKS["ms" if pt.is_date64(kind) else kind.unit]
        first, last = first_s * ticks, last_s * ticks
    numbers = times.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    ends = pc.call_function("min_max", [numbers]).as_py()
    if ends["min"] is not None and (ends["min"] < first or ends["max"] >= last):
        what = "a time of day below 0 or beyond 24 hours" if is_clock else "a time beyond the years -262143 to 262142"
        raise DataError(
            f"{what} cannot be written as text",
            hint="Replace such values before the sink, or write the column as a number.",
        )


def date_texts(days: pa.Array) -> pa.Array | None:
    """``date32`` as ``2026-01-31``; ``None`` if a year does not have four digits.

    >>> date_texts(pa.array([0, None, -1], pa.date32())).to_pylist()
    ['1970-01-01', None, '1969-12-31']
    """
    rows = len(days)
    buffer, ends = pa.allocate_buffer(_DATE * rows + _SPARE), new_buffer(rows + 1, np.int32)
    valid = valid_rows(days)
    values = fixed_view(days, np.int32)
    if not _write_dates(values, _NONE_NULL if valid is None else valid, buffer.address, ends[1]):
        return None
    return _texts(rows, valid, ends[0], buffer)


def time_texts(times: pa.Array, mark: str, suffix: str = "", *, shorter: bool = False) -> pa.Array | None:
    """Timestamps, as their clock in UTC shows, as texts; ``None`` if a year does not have four digits.

    Args:
        mark: between date and time, one character.
        suffix: behind each time, up to eight characters.
        shorter: a fraction of a second has as many digits as it needs, 0, 3, 6 or 9; else those of its unit.

    >>> time_texts(pa.array([1_500], pa.timestamp("ms", "UTC")), "T", "Z").to_pylist()
    ['1970-01-01T00:00:01.500Z']
    >>> time_texts(pa.array([0, None], pa.timestamp("ns")), " ", shorter=True).to_pylist()
    ['1970-01-01 00:00:00', None]
    """
    rows, unit = len(times), times.type.unit
    buffer, ends = pa.allocate_buffer(_TIME * rows + _SPARE), new_buffer(rows + 1, np.int32)
    valid = valid_rows(times)
    values = fixed_view(times, np.int64)
    word = np.frombuffer(suffix.encode().ljust(8, b"\0"), np.uint64)[0]
    form = _TICKS[unit], _DIGITS[unit], shorter, ord(mark), word
    if not _write_times(values, _NONE_NULL if valid is None else valid, *form, buffer.address, ends[1]):
        return None
    return _texts(rows, valid, ends[0], buffer)


def _texts(rows: int, valid: npt.NDArray[np.bool_] | None, ends: pa.Buffer, data: pa.Buffer) -> pa.Array:
    bits = None if valid is None else pa.py_buffer(np.packbits(valid, bitorder="little"))
    return pa.StringArray.from_buffers(rows, ends, data, bits)

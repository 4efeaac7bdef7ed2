"""Columns of times and dates as columns of texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.connectors.text import time_kernels as kernels
from cutwater.data.words import fixed_view, new_buffer, valid_rows

_write_times: Any = kernels.write_times
_write_dates: Any = kernels.write_dates

_TICKS = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}
_DIGITS = {"s": 3, "ms": 3, "us": 6, "ns": 9}
_DATE, _TIME, _SPARE = 10, 37, 16
"""Bytes of a text at most, and behind the last one, so that kernels may write whole words."""
_NONE_NULL: npt.NDArray[np.bool_] = np.zeros(0, np.bool_)
_NONE_NULL.setflags(write=False)


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

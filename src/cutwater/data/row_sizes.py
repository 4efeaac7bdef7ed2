"""Sizes of rows, and how many of them one batch may have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

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

"""Rows in the order of their key groups."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cutwater.state import column_kernels as kernels
from cutwater.state.keys import hash_keys, key_groups
from cutwater.state.segments import GROUP_COLUMN

_HASHED_ROWS = 1 << 16


def groups_of(
    rows: int, keys: Callable[[slice], list[pa.Array]], max_parallelism: int
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int32]]:
    """The key group of each row, and the order that sorts them, rows of one group as they were.

    Args:
        rows: how many.
        keys: key columns of some rows.
        max_parallelism: number of key groups.

    >>> keys = pa.array([5, 5, 7])
    >>> groups, order = groups_of(3, lambda rows: [keys[rows]], 128)
    >>> groups.tolist(), order.tolist()
    ([76, 76, 49], [2, 0, 1])
    """
    groups: npt.NDArray[np.uint16] = np.empty(rows, np.uint16)
    for begin in range(0, rows, _HASHED_ROWS):  # in pieces: the stream wants the interpreter in between
        part = slice(begin, begin + _HASHED_ROWS)
        groups[part] = key_groups(hash_keys(keys(part)), max_parallelism)
    order: npt.NDArray[np.int32] = np.empty(rows, np.int32)
    kernels.order_by_group(groups, np.zeros(max_parallelism + 1, np.int64), order)
    return groups, order


def in_groups(batch: pa.RecordBatch, columns: int, max_parallelism: int) -> pa.RecordBatch:
    """The rows sorted by key group, which becomes their first column: the hash of the first ``columns`` decides.

    >>> batch = in_groups(pa.record_batch({"key": [5, 7]}), 1, 128)
    >>> batch.to_pydict()
    {'__key_group': [49, 76], 'key': [7, 5]}
    """
    groups, order = groups_of(batch.num_rows, lambda rows: _part(batch, columns, rows), max_parallelism)
    fields = pa.schema([pa.field(GROUP_COLUMN, pa.uint16(), nullable=False), *batch.schema])
    grouped = pa.RecordBatch.from_arrays([pa.array(groups), *batch.columns], schema=fields)
    return pc.take(grouped, pa.array(order), boundscheck=False)


def _part(batch: pa.RecordBatch, columns: int, rows: slice) -> list[pa.Array]:
    return [column.slice(rows.start, rows.stop - rows.start) for column in batch.columns[:columns]]

"""Hash edges: which subtask owns each row of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.errors import BuildError
from cutwater.operators import partition_kernels as kernels
from cutwater.state.keys import (
    MAX_KEY_GROUPS,
    check_key_types,
    hash_keys,
    is_word_key,
    key_group_owner,
    require_valid_keys,
)
from cutwater.state.words import fixed_view, new_buffer, to_words

__all__ = ["HashPartitioner"]

_ALIGN_ROWS = 64
"""Each target's rows begin at a multiple of this in the shared buffer: Arrow's recommended alignment at any width."""

_DTYPES: dict[int, Any] = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


class HashPartitioner:
    """Splits batches by the owner of each row's key group.

    Args:
        schema: schema of the batches.
        keys: key columns.
        parallelism: number of subtasks that share the key groups.
        max_parallelism: number of key groups.

    Raises:
        BuildError: the columns cannot be keys, or the numbers do not fit.

    >>> rows = pa.record_batch({"k": [1, 2, 3, 1]})
    >>> parts = HashPartitioner(rows.schema, ["k"], 2, 128).split(rows)
    >>> [(target, part["k"].to_pylist()) for target, part in parts]
    [(0, [3]), (1, [1, 2, 1])]
    """

    def __init__(self, schema: pa.Schema, keys: Sequence[str], parallelism: int, max_parallelism: int) -> None:
        check_key_types(schema, keys)
        if not 1 <= parallelism <= max_parallelism <= MAX_KEY_GROUPS:
            raise BuildError(
                f"parallelism {parallelism} and max_parallelism {max_parallelism} do not fit",
                hint=f"1 <= parallelism <= max_parallelism <= {MAX_KEY_GROUPS}.",
            )
        self._schema = schema
        self._keys = tuple(keys)
        self._parallelism = parallelism
        owners = [key_group_owner(group, parallelism, max_parallelism) for group in range(max_parallelism)]
        self._owners = np.array(owners, np.int32)
        self._one_word = len(keys) == 1 and is_word_key(schema.field(keys[0]).type)
        self._targets = np.empty(0, np.int32)
        self._places = np.empty(0, np.int64)

    def split(self, batch: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
        """Non-empty parts with their target subtask, targets ascending; the order of rows within a target is kept.

        The parts share no memory that is used again: they stay valid for ever.

        Raises:
            DataError: a row without a usable key (null or NaN).
        """
        require_valid_keys(batch, self._keys)
        rows = batch.num_rows
        if rows == 0:
            return []
        if self._parallelism == 1:
            return [(0, batch)]
        counts = self._find_targets(batch)
        used = np.flatnonzero(counts)
        if len(used) == 1:
            return [(int(used[0]), batch)]
        return self._split(batch, counts, used)

    def _find_targets(self, batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
        rows = batch.num_rows
        if len(self._targets) < rows:
            self._targets, self._places = np.empty(rows, np.int32), np.empty(rows, np.int64)
        counts = np.zeros(self._parallelism, np.int64)
        columns = [batch.column(name) for name in self._keys]
        if self._one_word:
            words = to_words(columns[0])
            kernels.targets_of_words(words, self._owners, self._targets[:rows], counts)
        else:
            kernels.targets_of_hashes(hash_keys(columns), self._owners, self._targets[:rows], counts)
        return counts

    def _split(
        self, batch: pa.RecordBatch, counts: npt.NDArray[np.int64], used: npt.NDArray[np.int64]
    ) -> list[tuple[int, pa.RecordBatch]]:
        rows = batch.num_rows
        targets = self._targets[:rows]
        padded = -(-counts // _ALIGN_ROWS) * _ALIGN_ROWS
        starts = np.cumsum(padded) - padded
        where = self._places[:rows]
        kernels.places(targets, starts.copy(), where)
        taken: pa.Array | None = None
        parts: list[list[pa.Array]] = [[] for _ in used]
        ranges = [(int(starts[t]), int(counts[t])) for t in used]
        for column in batch.columns:
            dtype = _scatter_dtype(column)
            if dtype is not None:
                buffer, out = new_buffer(int(padded.sum()), dtype)
                kernels.scatter(fixed_view(column, dtype), where, out)
                width = out.itemsize
                for part, (start, size) in zip(parts, ranges, strict=True):
                    values = buffer.slice(start * width, size * width)
                    part.append(pa.Array.from_buffers(column.type, size, [None, values]))
                continue
            if taken is None:
                taken = self._order(targets, counts)
            moved = column.take(taken)
            begin = 0
            for part, (_, size) in zip(parts, ranges, strict=True):
                part.append(moved.slice(begin, size))
                begin += size
        schema = batch.schema
        return [(int(t), pa.RecordBatch.from_arrays(p, schema=schema)) for t, p in zip(used, parts, strict=True)]

    def _order(self, targets: npt.NDArray[np.int32], counts: npt.NDArray[np.int64]) -> pa.Array:
        buffer, out = new_buffer(len(targets), np.int64)
        kernels.order(targets, np.cumsum(counts) - counts, out)
        return pa.Array.from_buffers(pa.int64(), len(targets), [None, buffer])


def _scatter_dtype(column: pa.Array) -> Any:
    """How to move the values as unsigned integers; ``None`` where only Arrow's ``take`` will do."""
    kind = column.type
    if column.null_count or not (pa.types.is_primitive(kind)):
        return None
    return _DTYPES.get(kind.bit_width)

"""Hash edges: which subtask owns each row of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, TypeAlias, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cutwater.data.words import bits_dtype, fixed_view, new_buffer, to_words
from cutwater.errors import BuildError
from cutwater.runtime.channels import kernels
from cutwater.runtime.channels.texts import few_values, take_texts
from cutwater.state.keys import (
    MAX_KEY_GROUPS,
    check_key_types,
    hash_keys,
    is_text_or_bytes,
    is_word_key,
    key_group_owner,
    require_valid_keys,
)

_ALIGN_ROWS = 64
"""Each target's rows begin at a multiple of this in the shared buffer: Arrow's recommended alignment at any width."""

_FEW_ROWS = 64
"""So few are moved by one call of Arrow for all columns: what a row costs does not matter, what a call costs does."""
_UNCHECKED = pc.TakeOptions(boundscheck=False)

Counts: TypeAlias = npt.NDArray[np.int64]


class HashPartitioner:
    """Splits batches by the owner of each row's key group.

    Args:
        schema: schema of the batches.
        keys: key columns; ``NullableKeys`` if null is a key.
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
        self._keys = keys
        self._parallelism = parallelism
        owners = [key_group_owner(group, parallelism, max_parallelism) for group in range(max_parallelism)]
        self._owners = np.array(owners, np.int32)
        self._one_word = len(keys) == 1 and is_word_key(schema.field(keys[0]).type)
        self._last: tuple[pa.Array, npt.NDArray[np.int32]] | None = None
        """The dictionary of keys that came last, and the target of each of its values."""
        self._targets = np.empty(0, np.int32)
        self._places = np.empty(0, np.int64)

    def split(self, batch: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
        """Non-empty parts with their target subtask, targets ascending; the order of rows within a target is kept.

        Texts that come as dictionaries leave as such where that is a gain: each value is hashed once.
        The parts share no memory that is used again: they stay valid for ever.

        Raises:
            DataError: a row without a usable key (null or NaN).
        """
        batch = few_values(batch, self._schema)
        keys = require_valid_keys(batch, self._keys)
        rows = batch.num_rows
        if rows == 0:
            return []
        if self._parallelism == 1:
            return [(0, batch)]
        if rows <= _FEW_ROWS:
            return self._split_few(batch, keys)
        counts = self._count_targets(keys, rows)
        totals = counts.sum(axis=0)
        used = np.flatnonzero(totals)
        if len(used) == 1:
            return [(int(used[0]), batch)]
        return self._split(batch, counts, totals, used)

    def _split_few(self, batch: pa.RecordBatch, keys: Sequence[pa.Array]) -> list[tuple[int, pa.RecordBatch]]:
        """The parts as slices of the rows ordered by target."""
        rows = batch.num_rows
        ends, order = np.zeros(self._parallelism + 1, np.int64), np.empty(rows, np.int64)
        kernels.order_of_few(self._find_targets(keys, rows), ends, order)
        places = ends.tolist()
        ranges = [(t, start, end - start) for t, (start, end) in enumerate(pairwise(places)) if end > start]
        if len(ranges) == 1:
            return [(ranges[0][0], batch)]
        ordered = pa.Array.from_buffers(pa.int64(), rows, [None, pa.py_buffer(order)])
        moved = cast(pa.RecordBatch, pc.call_function("take", [batch, ordered], _UNCHECKED))
        return [(target, moved.slice(start, size)) for target, start, size in ranges]

    def _find_targets(self, columns: Sequence[pa.Array], rows: int) -> npt.NDArray[np.int32]:
        """Target of each row, by its keys; a view of ``_targets``."""
        if len(self._targets) < rows:
            self._targets, self._places = np.empty(rows, np.int32), np.empty(rows, np.int64)
        targets = self._targets[:rows]
        if self._one_word and columns[0].null_count == 0:
            kernels.targets_of_words(to_words(columns[0]), self._owners, targets)
        elif len(columns) == 1 and isinstance(columns[0], pa.DictionaryArray) and columns[0].null_count == 0:
            indices = columns[0].indices
            places = fixed_view(indices, indices.type.to_pandas_dtype())
            kernels.targets_of_places(places, self._targets_of_values(columns[0].dictionary), targets)
        else:
            kernels.targets_of_hashes(hash_keys(columns), self._owners, targets)
        return targets

    def _targets_of_values(self, values: pa.Array) -> npt.NDArray[np.int32]:
        """Target of each value of a dictionary; files bring the same one with one batch after another."""
        if self._last is None or not self._last[0].equals(values):
            found = np.empty(len(values), np.int32)
            kernels.targets_of_hashes(hash_keys([values]), self._owners, found)
            self._last = values, found
        return self._last[1]

    def _count_targets(self, keys: Sequence[pa.Array], rows: int) -> Counts:
        """Fills ``_targets``; rows by lane and target."""
        targets = self._find_targets(keys, rows)
        counts = np.zeros((kernels.LANES, self._parallelism), np.int64)
        kernels.count(targets, counts)
        return counts

    def _split(
        self, batch: pa.RecordBatch, counts: Counts, totals: Counts, used: npt.NDArray[np.int64]
    ) -> list[tuple[int, pa.RecordBatch]]:
        rows = batch.num_rows
        padded = -(-totals // _ALIGN_ROWS) * _ALIGN_ROWS
        starts = np.cumsum(padded) - padded
        where = self._places[:rows]
        kernels.places(self._targets[:rows], starts + np.cumsum(counts, axis=0) - counts, where)
        moved_otherwise: list[tuple[int, pa.Array]] = []
        parts: list[list[Any]] = [[None] * batch.num_columns for _ in used]
        ranges = [(int(starts[t]), int(totals[t])) for t in used]
        for c, column in enumerate(batch.columns):
            dictionary = column.dictionary if isinstance(column, pa.DictionaryArray) else None
            values = column if dictionary is None else column.indices
            dtype = bits_dtype(values.type) if column.null_count == 0 else None
            if dtype is None:
                moved_otherwise.append((c, column))
                continue
            buffer, out = new_buffer(int(padded.sum()), dtype)
            kernels.scatter(fixed_view(values, dtype), where, out)
            width = out.itemsize
            for part, (start, size) in zip(parts, ranges, strict=True):
                moved = pa.Array.from_buffers(values.type, size, [None, buffer.slice(start * width, size * width)])
                whole = dictionary is None
                part[c] = moved if whole else pa.DictionaryArray.from_arrays(moved, dictionary, safe=False)
        if moved_otherwise:
            order = np.empty(int(padded.sum()), np.int64)
            kernels.order(where, order)
            for part, (start, size) in zip(parts, ranges, strict=True):
                _take(moved_otherwise, order[start : start + size], part)
        schema = batch.schema
        return [(int(t), pa.RecordBatch.from_arrays(p, schema=schema)) for t, p in zip(used, parts, strict=True)]


def _take(columns: list[tuple[int, pa.Array]], rows: npt.NDArray[np.int64], part: list[Any]) -> None:
    """These rows of the columns of other kinds, into their place in ``part``."""
    taken = pa.Array.from_buffers(pa.int64(), len(rows), [None, pa.py_buffer(rows)])
    for c, column in columns:
        text = is_text_or_bytes(column.type) and column.null_count == 0
        part[c] = take_texts(column, rows) if text else column.take(taken)

"""Accumulators that count distinct values: exactly, with a set per key, and approximately, with a sketch per key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.words import bytes_view, from_words, new_buffer, valid_rows
from cutwater.operators.aggregate import distinct_kernels as kernels
from cutwater.operators.aggregate.value_accumulators import ArrayAccumulator, mask_of
from cutwater.state.growing_array import Values
from cutwater.state.key_index import GroupIds, make_index
from cutwater.state.keys import hash_keys

_FIRST_WORDS = 1 << 12
_OFFSETS, _SIZES, _ESTIMATES = 1, 2, 5
_MAX_BINARY_BYTES = 2**31 - 1


class ApproxCountDistinct(ArrayAccumulator):
    """A HyperLogLog sketch per group id; see ``distinct_kernels`` for how it lies in memory: by group id there are
    epochs, offsets, sizes, filled, sums and estimates.

    A sketch depends on the set of values only: not on their order, their number, or how it was merged.  On disk it is
    binary: words of four bytes, little-endian, ``register << 6 | rank`` in the order of the registers; or, from
    2**precision / 4 of them on, one byte per register.

    Args:
        column: what to count.
        precision: log2 of the number of registers; the standard error is 1.04 / sqrt(2**precision).
    """

    def __init__(self, column: str, precision: int) -> None:
        super().__init__(np.int32, np.int64, np.int32, np.int32, np.int64, np.int64)
        self._column = column
        self._precision = precision
        self._registers = 1 << precision
        self._used = 0
        self._words = 0
        self._arena = np.zeros(_FIRST_WORDS, np.uint32)
        self._epoch = 1

    @property
    def varying_bytes(self) -> int:
        return self._arena.nbytes

    def reserve(self, gids: int) -> None:
        super().reserve(gids)
        self._used = gids

    def running(self, gids: GroupIds, batch: pa.RecordBatch) -> pa.Array:
        column = batch.column(self._column)
        mask, hashes = mask_of(column), hash_keys([column])
        buffer, out = new_buffer(len(gids), np.int64)
        row = 0
        while True:
            row, self._words = kernels.add_hashes(
                gids, hashes, mask, self._precision, row, self._arena, self._words, self._epoch, out, *self._arrays
            )
            if row == len(gids):
                return pa.Array.from_buffers(pa.int64(), len(gids), [None, buffer])
            self._grow()

    def _grow(self) -> None:
        """Twice the arena; or without the blocks that were left behind, if those are more than half of it."""
        live = int(self._arrays[_SIZES][: self._used].sum(dtype=np.int64))
        if self._words > 2 * live + _FIRST_WORDS:
            self._compact()
        else:
            self._arena = _longer(self._arena, self._words, 2 * len(self._arena) + self._registers // 4)

    def _compact(self) -> None:
        _, offsets, sizes, *_ = self._arrays
        sizes = sizes[: self._used]
        self._words = int(sizes.sum(dtype=np.int64))
        arena = np.zeros(2 * self._words + _FIRST_WORDS + self._registers // 4, np.uint32)
        moved = offsets[: self._used].copy()  # not in place: a snapshot may refer to the old arena
        kernels.copy_blocks(self._arena, moved, sizes, arena)
        self.columns[_OFFSETS].replace(moved)
        self._arena = arena

    def result(self, gids: GroupIds) -> pa.Array:
        return from_words(self._arrays[_ESTIMATES][gids], pa.int64())

    def state(self, gids: GroupIds) -> list[pa.Array]:
        starts = np.zeros(len(gids) + 1, np.int64)
        _, offsets, sizes, filled, _, _ = self._arrays
        np.cumsum(np.minimum(filled[gids], self._registers // 4), out=starts[1:])
        if 4 * int(starts[-1]) > _MAX_BINARY_BYTES:
            raise pa.ArrowInvalid("sketches of more than 2 GB do not fit one array")  # the caller takes fewer group ids
        words = np.empty(int(starts[-1]), np.uint32)
        kernels.write_sketches(gids, self._precision, self._arena, offsets, sizes, filled, starts, words)
        places = pa.py_buffer((4 * starts).astype(np.int32))
        return [pa.Array.from_buffers(pa.binary(), len(gids), [None, places, pa.py_buffer(words)])]

    def restore(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        for values in self._arrays:
            values[gids] = 0
        self.merge(gids, columns)

    def merge(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        data, offsets = bytes_view(columns[0])
        first = int(offsets[0])
        words = data[first : int(offsets[-1])].copy().view(np.uint32)
        starts = (offsets.astype(np.int64) - first) // 4
        row = 0
        while True:
            row, self._words = kernels.absorb(
                gids, words, starts, self._precision, row, self._arena, self._words, self._epoch, *self._arrays
            )
            if row == len(gids):
                return
            self._grow()

    def keep(self, gids: GroupIds) -> None:
        super().keep(gids)
        self._used = len(gids)
        self._compact()

    def frozen(self, columns: Sequence[Values]) -> Self:
        copy = super().frozen(columns)
        self._epoch += 1
        return copy


class CountDistinct(ArrayAccumulator):
    """The distinct values of all group ids in one index of (group id, value), and how many each group id has."""

    def __init__(self, column: str, value: pa.DataType) -> None:
        super().__init__(np.int64)
        self._column = column
        self._value = value
        self._used = 0
        self._index = make_index([pa.int32(), value])
        self._owners: GroupIds = np.empty(0, np.int32)
        self._by_owner: npt.NDArray[np.int64] | None = None

    @property
    def _counts(self) -> Values:
        return self._arrays[0]

    @property
    def varying_bytes(self) -> int:
        return self._index.key_bytes + self._owners.nbytes

    def reserve(self, gids: int) -> None:
        super().reserve(gids)
        self._used = gids

    def running(self, gids: GroupIds, batch: pa.RecordBatch) -> pa.Array:
        column = batch.column(self._column)
        valid = valid_rows(column)
        rows = np.arange(len(gids)) if valid is None else np.flatnonzero(valid)
        buffer, out = new_buffer(len(gids), np.int64)
        known, entries = self._admit(gids[rows], column if valid is None else column.drop_null())
        kernels.first_seen(gids, rows, entries, known, self._counts, out)
        return pa.Array.from_buffers(pa.int64(), len(gids), [None, buffer])

    def _admit(self, gids: GroupIds, values: pa.Array) -> tuple[int, GroupIds]:
        """Put values into the sets of their group ids; returns the number of entries before, and the entry of each."""
        known = len(self._index)
        entries = self._index.upsert([pa.array(gids), values])
        if len(self._index) > len(self._owners):
            self._owners = _longer(self._owners, known, 2 * len(self._index))
        self._owners[entries] = gids
        self._by_owner = None
        return known, entries

    def result(self, gids: GroupIds) -> pa.Array:
        return from_words(self._counts[gids], pa.int64())

    def state(self, gids: GroupIds) -> list[pa.Array]:
        if self._by_owner is None:
            self._by_owner = np.argsort(self._owners[: len(self._index)], kind="stable")
        ordered = self._owners[self._by_owner]
        first = np.searchsorted(ordered, gids)
        lengths = self._counts[gids]
        places = np.zeros(len(gids) + 1, np.int64)
        np.cumsum(lengths, out=places[1:])
        if int(places[-1]) > _MAX_BINARY_BYTES:
            raise pa.ArrowInvalid("sets of more than 2**31 values do not fit one array")
        entries = self._by_owner[np.repeat(first - places[:-1], lengths) + np.arange(int(places[-1]))]
        values = self._index.columns(entries.astype(np.int32))[1]
        return [pa.ListArray.from_arrays(pa.array(places.astype(np.int32)), values)]

    def restore(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        if self._counts[gids].any():
            gone = np.zeros(self._used, np.bool_)
            gone[gids] = True
            self._rebuild(np.flatnonzero(~gone[self._owners[: len(self._index)]]), np.arange(self._used))
            self._counts[gids] = 0
        self.merge(gids, columns)

    def merge(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        lists: Any = columns[0]
        owners = np.repeat(gids, np.diff(lists.offsets.to_numpy()))
        known, entries = self._admit(owners, lists.flatten())
        kernels.first_seen(
            owners, np.arange(len(owners)), entries, known, self._counts, np.empty(len(owners), np.int64)
        )

    def keep(self, gids: GroupIds) -> None:
        numbers = np.full(self._used, -1, np.int64)
        numbers[gids] = np.arange(len(gids))
        self._rebuild(np.flatnonzero(numbers[self._owners[: len(self._index)]] >= 0), numbers)
        super().keep(gids)
        self._used = len(gids)

    def _rebuild(self, entries: npt.NDArray[np.int64], numbers: npt.NDArray[np.int64]) -> None:
        """Forget all entries but these; the group id of an entry becomes its number."""
        owners = numbers[self._owners[entries]].astype(np.int32)
        values = self._index.columns(entries.astype(np.int32))[1]
        self._index = make_index([pa.int32(), self._value], len(entries))
        self._owners = np.empty(0, np.int32)
        self._by_owner = None
        if len(entries):
            self._admit(owners, values)

    def frozen(self, columns: Sequence[Values]) -> Self:
        copy = super().frozen(columns)
        # Owners of entries never change and a longer array is a new one; what is shared is only appended to.
        copy._index, copy._by_owner = self._index.frozen(), None
        return copy


def _longer(values: npt.NDArray[Any], used: int, size: int) -> npt.NDArray[Any]:
    longer = np.zeros(size, values.dtype)
    longer[:used] = values[:used]
    return longer

"""What comes out of one firing, in one order wherever it lay (R0).

Some of what waits for the watermark lies in memory and some on disk.  Which is where changes with a restore, and so
would the order in which it is found.  Where calls may have to be repeated, everything that comes out together is
therefore gathered first and sorted: by time, of one time by key, of one key as it came.  More than memory should hold
is sorted on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.operators.base import Context, Outputs
from cutwater.operators.deterministic_batches import DeterministicBatches
from cutwater.state.disk.rocks import RocksStore
from cutwater.state.disk.row_codec import Matrix, RowCodec
from cutwater.state.keys import Hashes

_HELD_BYTES = 1 << 24
"""What is sorted in memory at most."""
_SLICE_ROWS: Final = 1 << 14
"""Rows that are read at once from disk."""
_PLACE_BYTES: Final = 2 + 8 + 3 * 8
"""Number of the table, of the firing, time, hash of the key, and number of the row."""


class EmissionOrder:
    """Batches of one firing come in any order, and leave sorted; where a batch ends, its rows say
    (``DeterministicBatches``).

    Rows of one time and key must come in their order.  Keys of equal hash are left to chance.

    Args:
        store: where more than memory should hold is sorted; tables may lie in it.
        schema: of the rows.

    Raises:
        StorageError: of all methods: the disk is full, or fails.
    """

    def __init__(self, store: RocksStore, schema: pa.Schema) -> None:
        self._store, self._schema, self._most_bytes = store, schema, _HELD_BYTES
        self._codec = RowCodec(schema.types)
        self._number = store.tables.to_bytes(2, "big")
        store.tables += 1
        self._portions = DeterministicBatches()
        self._firing = 0
        self._collecting = False
        self._sorted: Iterator[pa.RecordBatch] | None = None
        self._begin_anew()

    @classmethod
    def of(cls, ctx: Context, store: RocksStore | None, schema: pa.Schema) -> EmissionOrder | None:
        """For a step; ``None``: whatever order comes is right, or nothing lies on disk."""
        return cls(store, schema) if ctx.repeatable and store is not None else None

    def _begin_anew(self) -> None:
        self._held: list[pa.RecordBatch] = []
        self._times: list[npt.NDArray[np.int64]] = []
        self._hashes: list[Hashes] = []
        self._held_bytes = self._count = 0

    @property
    def collecting(self) -> bool:
        """Whether what comes out is to be added; else it is in order."""
        return self._collecting

    @property
    def pending(self) -> bool:
        """Whether there is more to ``give``."""
        return self._sorted is not None

    def begin(self) -> None:
        """Something on disk takes part in a firing: gather all of it."""
        self._collecting = True

    def add(self, batch: pa.RecordBatch, times: npt.NDArray[np.int64], hashes: Hashes) -> None:
        """Rows that come out in this firing, with what they are sorted by."""
        if batch.num_rows == 0:
            return
        self._held.append(batch)
        self._times.append(times)
        self._hashes.append(hashes)
        self._held_bytes += batch.nbytes
        if self._held_bytes > self._most_bytes:
            self._to_disk()

    def give(self, outputs: Outputs, *, last: bool) -> Outputs:
        """Batches to go on, of those that are in order already and of those that were added.

        Args:
            outputs: are in order.
            last: the firing is over: everything has been added.
        """
        if self._collecting and last:
            self._collecting = False
            self._sorted = self._from_disk() if self._count else self._from_memory()
        if self._sorted is not None:
            batch = next(self._sorted, None)
            if batch is None:
                self._sorted = None
            else:
                outputs = [*outputs, (0, batch)]
        return self._portions.cut(outputs, last=last and not self.pending)

    def _from_memory(self) -> Iterator[pa.RecordBatch]:
        held, times, hashes = self._held, self._times, self._hashes
        self._begin_anew()
        if held:
            order = np.lexsort((np.concatenate(hashes), np.concatenate(times)))
            yield pa.Table.from_batches(held).combine_chunks().to_batches()[0].take(pa.array(order))

    # -- on disk

    def _prefix(self, firing: int) -> bytes:
        return self._number + firing.to_bytes(8, "big")

    def _to_disk(self) -> None:
        prefix = np.frombuffer(self._prefix(self._firing), np.uint8)
        for batch, times, hashes in zip(self._held, self._times, self._hashes, strict=True):
            rows = np.arange(self._count, self._count + batch.num_rows, dtype=np.uint64)
            unsigned = np.ascontiguousarray(times).view(np.uint64) ^ np.uint64(1 << 63)
            words = np.stack([unsigned, hashes, rows], axis=1).astype(">u8")
            places: Matrix = np.empty((batch.num_rows, _PLACE_BYTES), np.uint8)
            places[:, : len(prefix)] = prefix
            places[:, len(prefix) :] = words.view(np.uint8).reshape(batch.num_rows, -1)
            keys: list[bytes] = places.view(f"V{_PLACE_BYTES}").reshape(-1).tolist()
            self._store.write(list(zip(keys, self._codec.encode(batch.columns), strict=True)))
            self._count += batch.num_rows
        self._held, self._times, self._hashes, self._held_bytes = [], [], [], 0

    def _from_disk(self) -> Iterator[pa.RecordBatch]:
        self._to_disk()
        begin, end = self._prefix(self._firing), self._prefix(self._firing + 1)
        self._firing += 1
        self._begin_anew()
        snapshot = self._store.snapshot()
        rows: list[bytes] = []
        size = 0
        for _, row in snapshot.items(begin, end):
            rows.append(row)
            size += len(row)
            if len(rows) == _SLICE_ROWS or size >= self._most_bytes:
                yield self._decoded(rows)
                rows, size = [], 0
        snapshot.release()
        self._store.delete_range(begin, end)
        if rows:
            yield self._decoded(rows)

    def _decoded(self, rows: list[bytes]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(self._codec.decode(rows), schema=self._schema)

"""Rows that came, on disk by the epoch in which they came: for a snapshot of what was added since an older one."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.state.disk.rocks import RocksSnapshot, RocksStore
from cutwater.state.disk.row_codec import RowCodec

_CHUNK_BYTES: Final = 1 << 24


class RowJournal:
    """Rows in the order of their epochs, those of an epoch and a key group in the order in which they came.

    Args:
        store: where; other tables may lie in it.
        types: of the columns.

    Raises:
        StorageError: of all methods: the disk is full, or fails.
    """

    def __init__(self, store: RocksStore, types: Sequence[pa.DataType]) -> None:
        self._store, self._codec = store, RowCodec(types)
        self._number = store.tables
        store.tables += 1
        self._begin = self._count = 0

    def append(self, columns: Sequence[pa.Array], groups: npt.NDArray[np.uint16], epoch: int) -> None:
        """Add rows of some key groups."""
        order = np.argsort(groups, kind="stable")
        ordered = groups[order]
        bounds = np.concatenate([[0], np.flatnonzero(np.diff(ordered)) + 1, [len(order)]])
        values = self._codec.pack([column.take(pa.array(order)) for column in columns], bounds).to_pylist()
        begin = _place(self._number, epoch)
        places = (
            begin + group.to_bytes(2, "big") + number.to_bytes(8, "big")
            for group, number in zip(ordered[bounds[:-1]].tolist(), itertools.count(self._count))
        )
        self._count += len(values)
        self._store.write(list(zip(places, values, strict=True)))

    def forget(self, epoch: int) -> None:
        """Nobody asks for epochs before this one any more."""
        if epoch > self._begin:
            self._store.delete_range(_place(self._number, self._begin), _place(self._number, epoch))
            self._begin = epoch

    def freeze(self) -> FrozenRowJournal:
        """What there is now, at no cost."""
        return FrozenRowJournal(self._store.snapshot(), self._codec, self._number)


class FrozenRowJournal:
    """A ``RowJournal`` as it was at one instant, for another thread."""

    def __init__(self, snapshot: RocksSnapshot, codec: RowCodec, number: int) -> None:
        self._snapshot, self._codec, self._number = snapshot, codec, number

    def chunks(self, epoch: int) -> Iterator[list[pa.Array]]:
        """The columns of the rows since an epoch began, in pieces that fit in memory."""
        values: list[bytes] = []
        size = 0
        for _, value in self._snapshot.items(_place(self._number, epoch), _place(self._number + 1, 0)):
            values.append(value)
            size += len(value)
            if size >= _CHUNK_BYTES:
                yield self._codec.unpack(pa.array(values, pa.large_binary()))[0]
                values, size = [], 0
        if values:
            yield self._codec.unpack(pa.array(values, pa.large_binary()))[0]

    def release(self) -> None:
        """The database may forget what only this instant had."""
        self._snapshot.release()


def _place(number: int, epoch: int) -> bytes:
    return number.to_bytes(2, "big") + epoch.to_bytes(4, "big")

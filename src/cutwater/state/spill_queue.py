"""Keys on disk by the instant at which somebody wants to look at them again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.state.rocks import RocksStore
from cutwater.state.row_codec import Matrix, RowCodec

__all__ = ["NEVER", "SpillQueue"]

NEVER = 2**63 - 1
"""An instant that does not come."""
_PLACE_BYTES = 10


class SpillQueue:
    """Keys in the order of their instants; a key may lie in it several times, and may be looked at in vain.

    Args:
        store: where; other tables may lie in it.
        types: of the key columns.

    Raises:
        StorageError: of all methods: the disk is full, or fails.
    """

    def __init__(self, store: RocksStore, types: Sequence[pa.DataType]) -> None:
        self._store, self._codec = store, RowCodec(types)
        self._number = store.tables.to_bytes(2, "big")
        store.tables += 1
        self._first = NEVER  # no instant is before this

    def put(self, keys: Sequence[pa.Array], instants: npt.NDArray[np.int64]) -> None:
        """Add keys, but those whose instant never comes."""
        comes = instants < NEVER
        if not comes.any():
            return
        instants = instants[comes]
        self._first = min(self._first, int(instants.min()))
        places: Matrix = np.empty((len(instants), _PLACE_BYTES), np.uint8)
        places[:, :2] = np.frombuffer(self._number, np.uint8)
        places[:, 2:] = (instants.view(np.uint64) ^ np.uint64(1 << 63)).astype(">u8").view(np.uint8).reshape(-1, 8)
        mask = pa.array(comes)
        rows = self._codec.encode([column.filter(mask) for column in keys], places)
        self._store.write([(row, b"") for row in rows])

    def due(self, now: int) -> bool:
        """Whether ``take`` may give anything."""
        return self._first <= now

    def take(self, now: int, most: int) -> list[pa.Array]:
        """Take out keys whose instant has come, the earliest first, so many at most; nothing if there are none."""
        end = self._number + (min(now, NEVER - 1) + 1 + (1 << 63)).to_bytes(8, "big")
        snapshot = self._store.snapshot()
        rows = [row for row, _ in itertools.islice(snapshot.items(self._number, end), most)]
        snapshot.release()
        if not rows:
            self._first = max(self._first, now + 1)  # until an earlier one comes
            return []
        self._store.write([(row, None) for row in rows])
        return self._codec.decode(rows, _PLACE_BYTES)

"""Keys on disk by the instant at which somebody wants to look at them again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.state.disk.rocks import RocksStore
from cutwater.state.disk.row_codec import Matrix, RowCodec

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
        self._first = NEVER

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

    @property
    def next_instant(self) -> int | None:
        """The earliest instant; ``None``: no key is waiting."""
        return None if self._first == NEVER else self._first

    def due(self, now: int) -> bool:
        """Whether ``take`` gives anything."""
        return self._first <= min(now, NEVER - 1)

    def take(self, now: int, most: int) -> list[pa.Array]:
        """Take out keys whose instant has come, the earliest first, so many at most; nothing if there are none."""
        begin, end = (int.from_bytes(self._number, "big") + i for i in (0, 1))
        rows: list[bytes] = []
        self._first = NEVER
        snapshot = self._store.snapshot()
        for row, _ in snapshot.items(begin.to_bytes(2, "big"), end.to_bytes(2, "big")):
            instant = int.from_bytes(row[2:_PLACE_BYTES], "big") - (1 << 63)
            if instant > now or len(rows) == most:
                self._first = instant
                break
            rows.append(row)
        snapshot.release()
        if not rows:
            return []
        self._store.write([(row, None) for row in rows])
        return self._codec.decode(rows, _PLACE_BYTES)

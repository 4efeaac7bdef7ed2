"""Rows of a columnar table that lie in RocksDB because memory does not hold them.

A row's place is the number of the table, its key group (two bytes each, big-endian), then its key; so a pass over all
of them comes in the order that a snapshot is written in.  A second range, the *journal*, holds what was moved out
after it had changed, by epoch (the time between two freezes): a snapshot of what changed reads that, and neither keeps
keys in memory nor reads the whole table.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.state.disk.rocks import RocksSnapshot, RocksStore, Write
from cutwater.state.disk.row_codec import Matrix, RowCodec
from cutwater.state.keys import hash_keys, key_groups

_CHUNK_ROWS: Final = 1 << 16
_CHUNK_BYTES: Final = 1 << 24
_SPLIT_BYTES: Final = 1 << 26
"""Chunks end with a key group, unless they become larger than this."""
_PLACE_BYTES: Final = 4
_EPOCH_BYTES: Final = 4


class RowTypes(NamedTuple):
    """What rows are made of.

    Attributes:
        keys: types of the columns that tell a row from others.
        values: types of the other columns.
        hashed: how many columns lie before those key columns whose hash decides the key group.
        max_parallelism: number of all key groups.
    """

    keys: Sequence[pa.DataType]
    values: Sequence[pa.DataType]
    hashed: int
    max_parallelism: int


class SpilledChunk(NamedTuple):
    """Some rows, in the order of their key groups.

    Attributes:
        keys: the key columns.
        values: the other columns.
        goes_on: the chunk begins in the key group in which the one before it ended.
        until: all rows of key groups below this one have come with this chunk.
    """

    keys: list[pa.Array]
    values: list[pa.Array]
    goes_on: bool
    until: int


class SpilledRows:
    """Rows by key, on disk.

    Args:
        store: where; several tables may lie in one.
        types: of the rows.

    Raises:
        StorageError: of all methods: the disk is full, or fails.
    """

    def __init__(self, store: RocksStore, types: RowTypes) -> None:
        self._store, self._types = store, types
        self._codecs = RowCodec(types.keys), RowCodec(types.values)
        self._number, self._journal = _number(store.tables), _number(store.tables + 1)
        store.tables += 2
        self._journal_begin = 0
        self.used = False
        """Whether anything was ever put."""

    def get(self, keys: Sequence[pa.Array]) -> tuple[npt.NDArray[np.bool_], list[pa.Array]]:
        """For each key whether it is there, and the other columns of those that are."""
        if not self.used:
            return np.zeros(len(keys[0]), np.bool_), []
        found = self._store.get_many(self._places(keys, self._number))
        there = np.array([row is not None for row in found], np.bool_)
        rows = [row for row in found if row is not None]
        return there, self._codecs[1].decode(rows) if rows and self._types.values else []

    def put(
        self,
        keys: Sequence[pa.Array],
        values: Sequence[pa.Array],
        changed: npt.NDArray[np.bool_] | None = None,
        epoch: int = 0,
    ) -> None:
        """Set rows.

        Args:
            keys: their keys.
            values: their other columns.
            changed: which of them go into the journal, too.
            epoch: of the journal.
        """
        rows = self._codecs[1].encode(values) if values else [b""] * len(keys[0])
        writes: list[Write] = list(zip(self._places(keys, self._number), rows, strict=True))
        if changed is not None and changed.any():
            places = self._places(keys, self._journal + epoch.to_bytes(_EPOCH_BYTES, "big"))
            writes += itertools.compress(zip(places, rows, strict=True), changed)
        self._store.write(writes)
        self.used = True

    def remove(self, keys: Sequence[pa.Array], epochs: range) -> None:
        """Remove rows, from the journal of these epochs as well."""
        prefixes = [self._number, *(self._journal + epoch.to_bytes(_EPOCH_BYTES, "big") for epoch in epochs)]
        self._store.write([(place, None) for prefix in prefixes for place in self._places(keys, prefix)])

    def remove_groups(self, groups: range) -> None:
        """Remove all rows of some key groups; the journal keeps what it has."""
        if self.used:
            self._store.delete_range(*(self._number + _number(group) for group in (groups.start, groups.stop)))

    def forget(self, epoch: int) -> None:
        """Nobody asks for the journal of epochs before this one any more."""
        if self.used and epoch > self._journal_begin:
            begin, end = (number.to_bytes(_EPOCH_BYTES, "big") for number in (self._journal_begin, epoch))
            self._store.delete_range(self._journal + begin, self._journal + end)
            self._journal_begin = epoch

    def freeze(self) -> FrozenSpilledRows:
        """The rows as they are now, at no cost."""
        snapshot = self._store.snapshot() if self.used else None
        return FrozenSpilledRows(snapshot, self._codecs, self._number, self._journal)

    def _places(self, keys: Sequence[pa.Array], prefix: bytes) -> list[bytes]:
        groups = key_groups(hash_keys(keys[self._types.hashed :]), self._types.max_parallelism)
        begins: Matrix = np.empty((len(groups), len(prefix) + 2), np.uint8)
        begins[:, : len(prefix)] = np.frombuffer(prefix, np.uint8)
        begins[:, len(prefix) :] = groups.astype(">u2").view(np.uint8).reshape(-1, 2)
        return self._codecs[0].encode(keys, begins)


class FrozenSpilledRows:
    """``SpilledRows`` as they were at one instant, for another thread; one pass over them at a time."""

    def __init__(
        self, snapshot: RocksSnapshot | None, codecs: tuple[RowCodec, RowCodec], number: bytes, journal: bytes
    ) -> None:
        self._snapshot, self._codecs = snapshot, codecs
        self._number, self._journal = number, journal

    def chunks(self, most: int = _CHUNK_ROWS) -> Iterator[SpilledChunk]:
        """All rows, in the order of the key groups, in pieces of about so many rows, that fit in memory."""
        return self._chunks(self._number, self._journal, _PLACE_BYTES, most)

    def beginning(self, key: bytes, groups: range, most: int) -> Iterator[SpilledChunk]:
        """Rows whose keys begin with these bytes, group by group."""
        for group in groups:
            begin = self._number + _number(group) + key
            end = (int.from_bytes(begin, "big") + 1).to_bytes(len(begin), "big")
            yield from self._chunks(begin, end, _PLACE_BYTES, most)

    def journal(self, epoch: int) -> Iterator[SpilledChunk]:
        """Rows as they were when they were moved out, since this epoch; a later one replaces an earlier one."""
        end = _number(int.from_bytes(self._journal, "big") + 1)
        return self._chunks(self._journal + epoch.to_bytes(_EPOCH_BYTES, "big"), end, _PLACE_BYTES + _EPOCH_BYTES)

    def release(self) -> None:
        """The database may forget what only this instant had."""
        if self._snapshot is not None:
            self._snapshot.release()
        self._snapshot = None

    def _chunks(self, begin: bytes, end: bytes, skip: int, most: int = _CHUNK_ROWS) -> Iterator[SpilledChunk]:
        if self._snapshot is None:
            return
        places: list[bytes] = []
        rows: list[bytes] = []
        size, last = 0, b""
        for place, row in self._snapshot.items(begin, end):
            enough = len(rows) >= most or size >= _CHUNK_BYTES
            if enough and (place[:skip] != places[-1][:skip] or size >= _SPLIT_BYTES):
                yield self._chunk(places, rows, skip, last, splits=place[:skip] == places[-1][:skip])
                size, last = 0, places[-1][:skip]
                places, rows = [], []
            places.append(place)
            rows.append(row)
            size += len(place) + len(row)
        if rows:
            yield self._chunk(places, rows, skip, last, splits=False)

    def _chunk(self, places: list[bytes], rows: list[bytes], skip: int, last: bytes, *, splits: bool) -> SpilledChunk:
        keys, values = self._codecs
        columns = values.decode(rows) if values.types else []
        until = int.from_bytes(places[-1][skip - 2 : skip], "big") + (not splits)
        return SpilledChunk(keys.decode(places, skip), columns, places[0][:skip] == last, until)


def _number(number: int) -> bytes:
    return number.to_bytes(2, "big")

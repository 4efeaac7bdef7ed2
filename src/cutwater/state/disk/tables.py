"""Tables in an ordered store: rows by key, rows by the epoch in which they came, keys by instant, and sorted rows.

A row's place is the number of the table, its key group (two bytes each, big-endian), then its key; so a pass over all
of them comes in the order that a snapshot is written in.  A second range, the *journal*, holds what was moved out
after it had changed, by epoch (the time between two freezes): a snapshot of what changed reads that, and neither keeps
keys in memory nor reads the whole table.

All methods raise ``StorageError`` if the disk is full, or fails.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.state.disk.rocks import OrderedStore, StoreSnapshot, Write, two_bytes
from cutwater.state.disk.row_codec import Matrix, RowCodec
from cutwater.state.keys import Hashes, hash_keys, key_groups
from cutwater.state.segments import pieces

_CHUNK_ROWS: Final = 1 << 16
_CHUNK_BYTES: Final = 1 << 24
_SPLIT_BYTES: Final = 1 << 26
"""Chunks end with a key group, unless they become larger than this."""
_PLACE_BYTES: Final = 4
_EPOCH_BYTES: Final = 4
NEVER = 2**63 - 1
"""An instant that does not come."""
_QUEUE_PLACE_BYTES = 10
_HELD_BYTES = 1 << 24
"""Most bytes that are sorted in memory."""
_SLICE_ROWS: Final = 1 << 14
"""Rows that are read at once from disk."""
_SORTED_PLACE_BYTES: Final = 2 + 8 + 3 * 8
"""Number of the table, of the round, time, hash of the key, and number of the row."""


class RowTypes(NamedTuple):
    """The columns of rows.

    Attributes:
        keys: types of the columns that tell a row from others.
        values: types of the other columns.
        hashed: how many columns lie before those key columns whose hash decides the key group.
    """

    keys: Sequence[pa.DataType]
    values: Sequence[pa.DataType]
    hashed: int
    max_parallelism: int


class SpilledChunk(NamedTuple):
    """Some rows, in the order of their key groups.

    Attributes:
        goes_on: the chunk begins in the key group in which the one before it ended.
        until: all rows of key groups below this one have come with this chunk.
    """

    keys: list[pa.Array]
    values: list[pa.Array]
    goes_on: bool
    until: int


class SpilledRows:
    """Rows by key, on disk."""

    def __init__(self, store: OrderedStore, types: RowTypes) -> None:
        self._store, self._types = store, types
        self._codecs = RowCodec(types.keys), RowCodec(types.values)
        self._number, self._journal = two_bytes(store.tables), two_bytes(store.tables + 1)
        store.tables += 2
        self._journal_begin = 0
        self.used = False
        """True if anything was ever put."""

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
        """Set rows; those that ``changed`` go into the journal of an epoch, too."""
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
            self._store.delete_range(*(self._number + two_bytes(group) for group in (groups.start, groups.stop)))

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
        self, snapshot: StoreSnapshot | None, codecs: tuple[RowCodec, RowCodec], number: bytes, journal: bytes
    ) -> None:
        self._snapshot, self._codecs = snapshot, codecs
        self._number, self._journal = number, journal

    def chunks(self, most: int = _CHUNK_ROWS) -> Iterator[SpilledChunk]:
        """All rows, in the order of the key groups, in pieces of about so many rows, that fit in memory."""
        return self._chunks(self._number, self._journal, _PLACE_BYTES, most)

    def beginning(self, key: bytes, groups: range, most: int) -> Iterator[SpilledChunk]:
        """Rows whose keys begin with these bytes, group by group."""
        for group in groups:
            begin = self._number + two_bytes(group) + key
            end = (int.from_bytes(begin, "big") + 1).to_bytes(len(begin), "big")
            yield from self._chunks(begin, end, _PLACE_BYTES, most)

    def journal(self, epoch: int) -> Iterator[SpilledChunk]:
        """Rows as they were when they were moved out, since this epoch; a later one replaces an earlier one."""
        end = two_bytes(int.from_bytes(self._journal, "big") + 1)
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


class RowJournal:
    """Rows in the order of their epochs, those of an epoch and a key group in the order in which they came."""

    def __init__(self, store: OrderedStore, types: Sequence[pa.DataType]) -> None:
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
        """The content as it is now, at no cost."""
        return FrozenRowJournal(self._store.snapshot(), self._codec, self._number)


class FrozenRowJournal:
    """A ``RowJournal`` as it was at one instant, for another thread."""

    def __init__(self, snapshot: StoreSnapshot, codec: RowCodec, number: int) -> None:
        self._snapshot, self._codec, self._number = snapshot, codec, number

    def chunks(self, epoch: int) -> Iterator[list[pa.Array]]:
        """The columns of the rows since an epoch began, in pieces that fit in memory."""
        found = self._snapshot.items(_place(self._number, epoch), _place(self._number + 1, 0))
        for values in pieces((value for _, value in found), len, _CHUNK_BYTES):
            yield self._codec.unpack(pa.array(values, pa.large_binary()))[0]

    def release(self) -> None:
        """The database may forget what only this instant had."""
        self._snapshot.release()


def _place(number: int, epoch: int) -> bytes:
    return number.to_bytes(2, "big") + epoch.to_bytes(4, "big")


class SpillQueue:
    """Keys in the order of their instants; a key may lie in it several times, and may be looked at in vain."""

    def __init__(self, store: OrderedStore, types: Sequence[pa.DataType]) -> None:
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
        places: Matrix = np.empty((len(instants), _QUEUE_PLACE_BYTES), np.uint8)
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
        """True if ``take`` gives anything."""
        return self._first <= min(now, NEVER - 1)

    def take(self, now: int, most: int) -> list[pa.Array]:
        """Take out keys whose instant has come, the earliest first, so many at most; nothing if there are none."""
        begin, end = (int.from_bytes(self._number, "big") + i for i in (0, 1))
        rows: list[bytes] = []
        self._first = NEVER
        snapshot = self._store.snapshot()
        for row, _ in snapshot.items(begin.to_bytes(2, "big"), end.to_bytes(2, "big")):
            instant = int.from_bytes(row[2:_QUEUE_PLACE_BYTES], "big") - (1 << 63)
            if instant > now or len(rows) == most:
                self._first = instant
                break
            rows.append(row)
        snapshot.release()
        if not rows:
            return []
        self._store.write([(row, None) for row in rows])
        return self._codec.decode(rows, _QUEUE_PLACE_BYTES)


class SortedRows:
    """Rows, added in rounds, taken at the end of each: by time, of one time by hash, of equal ones as they came."""

    def __init__(self, store: OrderedStore, schema: pa.Schema) -> None:
        self._store, self._schema, self._most_bytes = store, schema, _HELD_BYTES
        self._codec = RowCodec(schema.types)
        self._number = store.tables.to_bytes(2, "big")
        store.tables += 1
        self._round = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._held: list[pa.RecordBatch] = []
        self._times: list[npt.NDArray[np.int64]] = []
        self._hashes: list[Hashes] = []
        self._held_bytes = self._count = 0

    def add(self, batch: pa.RecordBatch, times: npt.NDArray[np.int64], hashes: Hashes) -> None:
        """Add rows with what they are sorted by."""
        if batch.num_rows == 0:
            return
        self._held.append(batch)
        self._times.append(times)
        self._hashes.append(hashes)
        self._held_bytes += batch.nbytes
        if self._held_bytes > self._most_bytes:
            self._to_disk()

    def take(self) -> Iterator[pa.RecordBatch]:
        """All rows of the round, in batches; the next round begins."""
        return self._from_disk() if self._count else self._from_memory()

    def _from_memory(self) -> Iterator[pa.RecordBatch]:
        held, times, hashes = self._held, self._times, self._hashes
        self._begin_anew()
        if held:
            order = np.lexsort((np.concatenate(hashes), np.concatenate(times)))
            yield pa.Table.from_batches(held).combine_chunks().to_batches()[0].take(pa.array(order))

    def _prefix(self, number: int) -> bytes:
        return self._number + number.to_bytes(8, "big")

    def _to_disk(self) -> None:
        prefix = np.frombuffer(self._prefix(self._round), np.uint8)
        for batch, times, hashes in zip(self._held, self._times, self._hashes, strict=True):
            rows = np.arange(self._count, self._count + batch.num_rows, dtype=np.uint64)
            unsigned = np.ascontiguousarray(times).view(np.uint64) ^ np.uint64(1 << 63)
            words = np.stack([unsigned, hashes, rows], axis=1).astype(">u8")
            places: Matrix = np.empty((batch.num_rows, _SORTED_PLACE_BYTES), np.uint8)
            places[:, : len(prefix)] = prefix
            places[:, len(prefix) :] = words.view(np.uint8).reshape(batch.num_rows, -1)
            keys: list[bytes] = places.view(f"V{_SORTED_PLACE_BYTES}").reshape(-1).tolist()
            self._store.write(list(zip(keys, self._codec.encode(batch.columns), strict=True)))
            self._count += batch.num_rows
        self._held, self._times, self._hashes, self._held_bytes = [], [], [], 0

    def _from_disk(self) -> Iterator[pa.RecordBatch]:
        self._to_disk()
        begin, end = self._prefix(self._round), self._prefix(self._round + 1)
        self._round += 1
        self._begin_anew()
        snapshot = self._store.snapshot()
        try:
            for rows in pieces((row for _, row in snapshot.items(begin, end)), len, self._most_bytes, _SLICE_ROWS):
                yield pa.RecordBatch.from_arrays(self._codec.decode(rows), schema=self._schema)
        finally:
            snapshot.release()
        self._store.delete_range(begin, end)

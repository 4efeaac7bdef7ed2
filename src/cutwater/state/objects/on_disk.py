"""Object state that need not fit in memory: keyed objects that lie in RocksDB.

Theory of operation.  What was written since the last write to the database lies in one dict; what was read or written
before, in two generations of a cache: what is used moves to the young one, and when that has half of the budget it
becomes the old one, whose content until then is forgotten.  So what is used stays, at the price of one dict lookup.  A
freeze writes what is not written yet (never much) and takes a snapshot of the database, which costs microseconds; the
snapshot thread reads that from disk, in the order of the key groups and never more than a chunk at once.

The database's keys are the number of the table, the key group (two bytes each, big-endian), then the key.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

import numpy as np
import pyarrow as pa

from cutwater.state.disk.store import OrderedStore, StoreSnapshot, Write
from cutwater.state.keys import hash_keys, key_groups
from cutwater.state.objects.table import Key
from cutwater.state.packing import KeyPacker, Packer
from cutwater.state.table.intervals import RESTORED, History, Intervals

V = TypeVar("V")

_WRITE_ROWS: Final = 1024
"""Changed keys that wait to be written; a freeze has to write them while the stream waits."""
_ENTRY_BYTES: Final = 250
_OBJECT_FACTOR: Final = 6
"""A key and its value in memory, from their packed size: roughly so many times as large, and a constant."""
_CHUNK_ROWS: Final = 1 << 16
_CHUNK_BYTES: Final = 1 << 24
_PREFIX_BYTES: Final = 4


class _Gone:
    """Stands for the value of a key that has none."""


_GONE: Final = _Gone()
_NOTHING: History[Set[Hashable]] = History(None, ())


class _Size:
    """Number of keys of a table: counting them takes reading all."""

    __slots__ = ("keys",)

    def __init__(self) -> None:
        self.keys = 0


class RocksTable(NamedTuple):
    """Layout of a table in a store.

    Attributes:
        key_types: types of the key columns.
        kind: the type of the values as they are stored.
        stored: to what Arrow takes.
        revive: from what Arrow gives.
        max_parallelism: number of all key groups.
        memory_bytes: what the values in memory may take, roughly.
    """

    key_types: Sequence[pa.DataType]
    kind: pa.DataType
    stored: Callable[[Any], Any]
    revive: Callable[[Any], Any]
    max_parallelism: int
    memory_bytes: int


class Chunk(NamedTuple):
    """Some keys of a table in the order of their groups, and their values as Arrow takes them."""

    groups: list[int]
    keys: list[Key]
    values: list[Any]


class RocksObjects(Generic[V]):
    """Values by key, on disk: see ``KeyedObjects``.

    Args:
        store: where; several tables may lie in one.
        table: how.
    """

    __slots__ = (
        "_changed",
        "_half_bytes",
        "_keys",
        "_log",
        "_number",
        "_old",
        "_old_bytes",
        "_puts",
        "_size",
        "_store",
        "_table",
        "_used",
        "_values",
        "_write_rows",
        "_written",
        "_young",
        "_young_bytes",
    )

    def __init__(self, store: OrderedStore, table: RocksTable) -> None:
        self._store, self._table = store, table
        self._keys, self._values = KeyPacker(table.key_types), Packer(table.kind)
        self._written: dict[Hashable, V | _Gone] = {}
        self._young: dict[Hashable, tuple[V | _Gone, int]] = {}
        self._old: dict[Hashable, tuple[V | _Gone, int]] = {}
        self._young_bytes = self._old_bytes = 0
        self._half_bytes = table.memory_bytes // 2
        self._write_rows = _WRITE_ROWS
        self._used = False  # anything was ever written
        self._number = _number(store.tables)
        store.tables += 1
        self._log: Intervals[Set[Hashable]] | None = None
        self._changed: set[Hashable] = set()
        self._size, self._puts = _Size(), 0

    @property
    def cached_bytes(self) -> int:
        """Bytes that the cached values take of memory, roughly; besides them only what waits to be written is there."""
        return self._young_bytes + self._old_bytes

    @property
    def cached_keys(self) -> int:
        """Keys in memory, those that wait to be written among them (some count twice)."""
        return len(self._young) + len(self._old) + len(self._written)

    def get(self, key: Hashable) -> V | None:
        """The value, not to be changed in place; ``None`` if there is none."""
        found = self._written.get(key)
        if found is None:
            entry = self._young.get(key)
            found = self._fetched([key])[0] if entry is None else entry[0]
        return None if found is _GONE else cast(V, found)

    def own(self, key: Hashable) -> V | None:
        """The value for changes in place, which no freeze sees; ``None`` if there is none.

        To be changed before anything else is asked of the table.
        """
        found = self._written.get(key)
        if found is not None:
            return None if found is _GONE else cast(V, found)
        value = self.get(key)
        if value is not None:
            self._make_room()  # before: what is written from now on must have the change in it
            self._written[key] = value
        return value

    def get_many(self, keys: Sequence[Hashable]) -> list[V | None]:
        """``get`` of many keys, with one look at the database."""
        found: list[V | _Gone | None] = []
        for key in keys:
            value = self._written.get(key)
            if value is None and (entry := self._young.get(key)) is not None:
                value = entry[0]
            found.append(value)
        missing = [place for place, value in enumerate(found) if value is None]
        if missing:
            for place, value in zip(missing, self._fetched([keys[place] for place in missing]), strict=True):
                found[place] = value
        return [None if value is _GONE else cast("V | None", value) for value in found]

    def put(self, key: Hashable, value: V) -> None:
        self._make_room()
        self._written[key] = value

    def put_many(self, keys: Iterable[Hashable], values: Iterable[V]) -> None:
        """``put`` of many keys."""
        self._written.update(zip(keys, values, strict=True))
        self._make_room()

    def remove(self, key: Hashable) -> None:
        self._make_room()
        self._written[key] = _GONE

    def remove_groups(self, groups: range) -> None:
        """Remove all keys of some key groups."""
        self._flush()
        if self._used:
            self._store.delete_range(self._prefix(groups.start), self._prefix(groups.stop))
            self._young, self._old = {}, {}
            self._young_bytes = self._old_bytes = 0

    def track(self, *, restored: bool = False) -> None:
        """See ``KeyedObjects``."""
        self._flush()
        self._size.keys = self._puts
        self._log = Intervals(_joined, RESTORED if restored else None)
        self._changed = set()

    def freeze(self, checkpoint_id: int | None = None) -> FrozenRocksObjects[V]:
        """See ``KeyedObjects``."""
        self._flush()
        history = _NOTHING
        if self._log is not None and checkpoint_id is not None:
            history, self._changed = self._log.cut(checkpoint_id, self._changed), set()
        return FrozenRocksObjects(self._store.snapshot(), self._table, self._number, self._size, self._log, history)

    def __len__(self) -> int:
        frozen = self.freeze()
        try:
            return sum(len(chunk.keys) for chunk in frozen.chunks())
        finally:
            frozen.release()

    def _prefix(self, group: int) -> bytes:
        return self._number + group.to_bytes(2, "big")

    def _placed(self, keys: Sequence[Hashable]) -> list[bytes]:
        return _places(cast("Sequence[Key]", keys), self._number, self._table, self._keys)

    def _fetched(self, keys: Sequence[Hashable]) -> list[V | _Gone]:
        """Values of keys that are neither written lately nor young: of the old ones, else from the database."""
        entries = [self._old.pop(key, None) for key in keys]
        self._old_bytes -= sum(entry[1] for entry in entries if entry is not None)
        missing = [place for place, entry in enumerate(entries) if entry is None]
        if missing:
            found = self._store.get_many(self._placed([keys[place] for place in missing]))
            for place, packed in zip(missing, found, strict=True):
                entries[place] = self._entry(packed)
        for key, entry in zip(keys, entries, strict=True):
            assert entry is not None
            self._keep(key, entry)
        return [entry[0] for entry in entries if entry is not None]

    def _entry(self, packed: bytes | None) -> tuple[V | _Gone, int]:
        if packed is None:
            return _GONE, _ENTRY_BYTES
        return self._table.revive(self._values.unpack(packed)), _ENTRY_BYTES + _OBJECT_FACTOR * len(packed)

    def _keep(self, key: Hashable, entry: tuple[V | _Gone, int]) -> None:
        """As the youngest entry of the cache."""
        before = self._young.pop(key, None)
        if before is not None:
            self._young_bytes -= before[1]
        if self._young_bytes + entry[1] > self._half_bytes:
            self._old, self._old_bytes = self._young, self._young_bytes
            self._young, self._young_bytes = {}, 0
        self._young[key] = entry
        self._young_bytes += entry[1]

    def _make_room(self) -> None:
        if len(self._written) >= self._write_rows:
            self._flush()

    def _flush(self) -> None:
        """Write what was changed."""
        if not self._written:
            return
        written, self._written = self._written, {}
        stored, pack, keep = self._table.stored, self._values.pack, self._keep
        writes: list[Write] = []
        size = 0
        for (key, value), place in zip(written.items(), self._placed(list(written)), strict=True):
            packed = None if value is _GONE else pack(stored(value))
            writes.append((place, packed))
            taken = _ENTRY_BYTES + _OBJECT_FACTOR * (0 if packed is None else len(packed))
            size += taken
            old = self._old.pop(key, None)
            if old is not None:
                self._old_bytes -= old[1]
            keep(key, (value, taken))
        self._store.write(writes)
        self._puts += len(writes)
        self._used = True
        if self._log is not None:
            self._changed.update(written)
            if _ENTRY_BYTES * len(self._changed) > self._half_bytes:  # told as a whole, the next time
                self._log.begin(None)
                self._changed = set()
        self._write_rows = min(max(self._half_bytes * len(writes) // (2 * size), 1), _WRITE_ROWS)


class FrozenRocksObjects(Generic[V]):
    """A ``RocksObjects`` as it was at one instant, for another thread."""

    __slots__ = ("_history", "_log", "_number", "_size", "_snapshot", "_table")

    def __init__(
        self,
        snapshot: StoreSnapshot,
        table: RocksTable,
        number: bytes,
        size: _Size,
        log: Intervals[Set[Hashable]] | None,
        history: History[Set[Hashable]],
    ) -> None:
        self._snapshot, self._table, self._number = snapshot, table, number
        self._size = size
        self._log, self._history = log, history

    @property
    def size(self) -> int:
        """See ``FrozenObjects``; as of the last time that all of it was read or restored."""
        return self._size.keys

    @property
    def tracked(self) -> bool:
        """See ``FrozenObjects``."""
        return self._history is not _NOTHING

    def changed(self, since: int) -> Mapping[Key, V | None] | None:
        """See ``FrozenObjects``."""
        if self._log is None or (intervals := self._history.since(since)) is None:
            return None
        self._log.completed(since)
        keys = list({cast(Key, key) for interval in intervals for key in interval})
        packer, unpack = KeyPacker(self._table.key_types), Packer(self._table.kind).unpack
        found = self._snapshot.get_many(_places(keys, self._number, self._table, packer))
        revive = self._table.revive
        return {k: None if v is None else revive(unpack(v)) for k, v in zip(keys, found, strict=True)}

    def items(self) -> Iterator[tuple[tuple[Any, ...], V]]:
        """Key and value of everything, in no particular order."""
        for chunk in self.chunks():
            yield from zip(chunk.keys, map(self._table.revive, chunk.values), strict=True)

    def chunks(self) -> Iterator[Chunk]:
        """Everything in the order of the key groups, in pieces that fit in memory."""
        unpack_key, unpack = KeyPacker(self._table.key_types).unpack, Packer(self._table.kind).unpack
        following = _number(int.from_bytes(self._number, "big") + 1)
        chunk, size, count = Chunk([], [], []), 0, 0
        for place, packed in self._snapshot.items(self._number, following):
            chunk.groups.append(int.from_bytes(place[2:_PREFIX_BYTES], "big"))
            chunk.keys.append(unpack_key(place[_PREFIX_BYTES:]))
            chunk.values.append(unpack(packed))
            size += len(place) + len(packed)
            if len(chunk.keys) == _CHUNK_ROWS or size >= _CHUNK_BYTES:
                yield chunk
                chunk, size, count = Chunk([], [], []), 0, count + len(chunk.keys)
        self._size.keys = count + len(chunk.keys)
        if chunk.keys:
            yield chunk

    def release(self) -> None:
        """The database may forget what only this instant had."""
        self._snapshot.release()
        self._history = _NOTHING


def _number(table: int) -> bytes:
    return table.to_bytes(2, "big")


def _joined(first: Set[Hashable], second: Set[Hashable]) -> Set[Hashable]:
    return {*first, *second}


def _places(keys: Sequence[Key], number: bytes, table: RocksTable, packer: KeyPacker) -> list[bytes]:
    """Places of keys of a table in the database."""
    if not keys:
        return []
    columns = [pa.array(column, kind) for column, kind in zip(zip(*keys, strict=True), table.key_types, strict=True)]
    groups = key_groups(hash_keys(columns), table.max_parallelism)
    prefixes = {group: number + group.to_bytes(2, "big") for group in np.unique(groups).tolist()}
    return [prefixes[group] + packer.pack(key) for group, key in zip(groups.tolist(), keys, strict=True)]

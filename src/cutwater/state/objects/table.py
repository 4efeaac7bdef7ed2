"""Tables of Python values by key, in memory and on disk, each frozen at next to no cost.

In memory the values lie in layers, a base below overlays.  A freeze puts an empty overlay on top and hands out the
layers below it, which nobody changes from then on: later writes go to the top, and a list or map that is to be changed
in place is copied there first.  So a freeze costs nothing per key, and a key that is changed afterwards costs one copy.
Layers that no unreleased freeze reads any more are merged at the next freeze.  An overlay holds just what changed
between two freezes.

On disk, what was written since the last write to the database lies in one dict; what was read or written before, in two
generations of a cache: what is used moves to the young one, and when that has half of the budget it becomes the old
one, whose content until then is forgotten.  So what is used stays, at the price of one dict lookup.  A freeze writes
what is not written yet (never much) and takes a snapshot of the database, which costs microseconds; the snapshot thread
reads that, in the order of the key groups and never more than a chunk at once.  The database's keys are the number of
the table, the key group (two bytes each, big-endian), then the key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeAlias, TypeVar, cast

import numpy as np
import pyarrow as pa

from cutwater.state.disk.rocks import OrderedStore, StoreSnapshot, Write, two_bytes
from cutwater.state.keys import hash_keys, key_groups
from cutwater.state.packing import KeyPacker, Packer
from cutwater.state.table.intervals import RESTORED, History, Intervals

V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)

Key: TypeAlias = tuple[Any, ...]
"""The values of the key columns."""
KeyLog: TypeAlias = Intervals[Collection[Hashable]]
"""The keys that changed between freezes."""


class FrozenObjects(Protocol[V_co]):
    """Values by key as they were at one instant.  Used by the snapshot thread, while the table goes on."""

    @property
    def size(self) -> int:
        """Number of keys, roughly."""
        ...

    def items(self) -> Iterator[tuple[Key, V_co]]:
        """Key and value of everything, in no particular order."""
        ...

    @property
    def tracked(self) -> bool:
        """True if it may know what changed."""
        ...

    def changed(self, since: int) -> Mapping[Key, V_co | None] | None:
        """Keys that may have changed since the freeze for a completed checkpoint, with what they had at this one.

        ``None`` in the place of a value: the key has gone.  ``None`` for the whole: not known.  Changes before that
        checkpoint are forgotten: nobody asks for them any more.
        """
        ...

    def release(self) -> None:
        """Nobody reads it any more."""
        ...


class KeyedObjects(Protocol[V]):
    """The contract of a table of values by key: what states of user logic and timers are kept in.

    All but what ``freeze`` returns belongs to one thread.  A freeze copies nothing that grows with the number of keys.
    """

    def get(self, key: Hashable) -> V | None:
        """The value, not to be changed in place; ``None`` if there is none."""
        ...

    def own(self, key: Hashable) -> V | None:
        """The value for changes in place, which no freeze sees; ``None`` if there is none.

        To be changed before anything else is asked of the table.
        """
        ...

    def get_many(self, keys: Sequence[Hashable]) -> list[V | None]:
        """``get`` of many keys."""
        ...

    def put(self, key: Hashable, value: V) -> None: ...

    def put_many(self, keys: Iterable[Hashable], values: Iterable[V]) -> None:
        """``put`` of many keys."""
        ...

    def remove(self, key: Hashable) -> None:
        """Forget a key, if it is there."""
        ...

    def track(self, *, restored: bool = False) -> None:
        """Keep track of changes from now (after a restore) or from the next freeze on: a frozen table tells them."""
        ...

    def freeze(self, checkpoint_id: int | None = None) -> FrozenObjects[V]:
        """The content now, for a checkpoint if changes are kept track of.  ``release`` it when nobody reads it."""
        ...

    def __len__(self) -> int: ...


class _Gone:
    """Stands in an overlay for a key that was removed."""


_GONE: Final = _Gone()
NOTHING_KNOWN: History[Collection[Hashable]] = History(None, ())


class ObjectTable(Generic[V]):
    """Values by key, in memory: see ``KeyedObjects``.

    Args:
        copy: makes a copy of a value that may then be changed in place; not needed for values that cannot change.

    >>> table = ObjectTable(list)
    >>> table.put(("a",), [1])
    >>> frozen = table.freeze()
    >>> table.own(("a",)).append(2)
    >>> table.get(("a",)), dict(frozen.items())
    ([1, 2], {('a',): [1]})
    """

    def __init__(self, copy: Callable[[V], V] | None = None) -> None:
        self._copy = copy
        self._below: list[dict[Hashable, V | _Gone]] = []
        """Layers that a freeze may be reading, the oldest first."""
        self._top: dict[Hashable, V | _Gone] = {}
        self._frozen: list[_FrozenTable[V]] = []
        self._log: KeyLog | None = None

    def get(self, key: Hashable) -> V | None:
        found: Any = self._top.get(key)
        if found is None and self._below:
            for layer in reversed(self._below):
                found = layer.get(key)
                if found is not None:
                    break
        return None if found is _GONE else found

    def own(self, key: Hashable) -> V | None:
        found = self._top.get(key)
        if found is None and (below := self.get(key)) is not None:
            found = self._top[key] = self._copy(below) if self._copy is not None else below
        return None if found is _GONE else cast("V | None", found)

    def get_many(self, keys: Sequence[Hashable]) -> list[V | None]:
        found: list[V | _Gone | None] = list(map(self._top.get, keys))
        for layer in reversed(self._below):
            missing = [place for place, value in enumerate(found) if value is None]
            for place, value in zip(missing, map(layer.get, [keys[place] for place in missing]), strict=True):
                found[place] = value
        if self._below:  # only above other layers does anything stand for what was removed
            return [None if value is _GONE else cast("V | None", value) for value in found]
        return cast("list[V | None]", found)

    def put(self, key: Hashable, value: V) -> None:
        self._top[key] = value

    def put_many(self, keys: Iterable[Hashable], values: Iterable[V]) -> None:
        self._top.update(zip(keys, values, strict=True))

    def remove(self, key: Hashable) -> None:
        if any(key in layer for layer in self._below):
            self._top[key] = _GONE
        else:
            self._top.pop(key, None)

    def track(self, *, restored: bool = False) -> None:
        self._log = Intervals(joined_keys, RESTORED if restored else None)
        if restored:
            self._below.append(self._top)  # what changes from now on is above it
            self._top = {}

    def freeze(self, checkpoint_id: int | None = None) -> FrozenObjects[V]:
        self._frozen = [frozen for frozen in self._frozen if not frozen.released]
        changed = self._top or ()  # an empty top goes on
        if not self._frozen:
            self._merge()
        if self._top or not self._below:
            self._below.append(self._top)
            self._top = {}
        history = NOTHING_KNOWN if self._log is None or checkpoint_id is None else self._log.cut(checkpoint_id, changed)
        frozen = _FrozenTable(tuple(self._below), self._log, history)
        self._frozen.append(frozen)
        return frozen

    def __len__(self) -> int:
        if not self._below:
            return len(self._top)
        return sum(1 for _ in _items((*self._below, self._top)))

    def _merge(self) -> None:
        """Bring all layers into one.  The older ones are no longer read by anybody."""
        if not self._below:
            return
        base, *overlays = [*self._below, self._top]
        for overlay in overlays:
            for key, value in overlay.items():
                if value is _GONE:
                    base.pop(key, None)
                else:
                    base[key] = value
        self._below, self._top = [], base


class _FrozenTable(Generic[V]):
    """An ``ObjectTable`` as it was at one instant."""

    def __init__(
        self,
        layers: tuple[dict[Hashable, V | _Gone], ...],
        log: KeyLog | None,
        history: History[Collection[Hashable]],
    ) -> None:
        self._layers = layers
        self._log = log
        self._history = history
        self.released = False

    @property
    def size(self) -> int:
        return max(map(len, self._layers), default=0)

    def items(self) -> Iterator[tuple[Key, V]]:
        return _items(self._layers)

    @property
    def tracked(self) -> bool:
        return self._history is not NOTHING_KNOWN

    def changed(self, since: int) -> Mapping[Key, V | None] | None:
        keys = changed_keys(self._log, self._history, since)
        return None if keys is None else {key: self._get(key) for key in keys}

    def _get(self, key: Key) -> V | None:
        for layer in reversed(self._layers):
            found = layer.get(key)
            if found is not None:
                return None if found is _GONE else cast(V, found)
        return None

    def release(self) -> None:
        """The table may change these layers again."""
        self._layers = ()
        self._history = NOTHING_KNOWN
        self.released = True


def joined_keys(first: Collection[Hashable], second: Collection[Hashable]) -> Collection[Hashable]:
    return {*first, *second}


def changed_keys(log: KeyLog | None, history: History[Collection[Hashable]], since: int) -> list[Any] | None:
    """The keys that changed since a completed checkpoint; what changed before it is forgotten."""
    if log is None or (intervals := history.since(since)) is None:
        return None
    log.completed(since)
    return list({key: None for interval in intervals for key in interval})


def _items(layers: tuple[dict[Hashable, V | _Gone], ...]) -> Iterator[tuple[Key, V]]:
    merged = layers[0] if len(layers) == 1 else {}
    if len(layers) > 1:
        for layer in layers:
            merged.update(layer)
    for key, value in merged.items():
        if value is not _GONE:
            yield cast(Key, key), cast(V, value)


_WRITE_ROWS: Final = 1024
"""Changed keys that wait to be written; a freeze has to write them while the stream waits."""
_ENTRY_BYTES: Final = 250
_OBJECT_FACTOR: Final = 6
"""A key and its value in memory, from their packed size: roughly so many times as large, and a constant."""
_CHUNK_ROWS: Final = 1 << 16
_CHUNK_BYTES: Final = 1 << 24
_PREFIX_BYTES: Final = 4


class _Size:
    """Number of keys of a table: counting them takes reading all."""

    def __init__(self) -> None:
        self.keys = 0


class ObjectLayout(NamedTuple):
    """What the values of a state are.

    Args:
        kind: Arrow type of the values as they are stored.
        stored: makes of a value what Arrow takes.
        revive: makes a value of what Arrow gives.
        copy: makes a copy of a value that may then be changed in place; not needed for values that cannot change.
    """

    kind: pa.DataType
    stored: Callable[[Any], Any]
    revive: Callable[[Any], Any]
    copy: Callable[[Any], Any] | None = None


class RocksTable(NamedTuple):
    """Layout of a table in a store; its values may take ``memory_bytes`` of memory."""

    key_types: Sequence[pa.DataType]
    values: ObjectLayout
    max_parallelism: int
    memory_bytes: int


class Chunk(NamedTuple):
    """Some keys of a table in the order of their groups, and their values as Arrow takes them."""

    groups: list[int]
    keys: list[Key]
    values: list[Any]


class RocksObjects(Generic[V]):
    """Values by key, on disk: see ``KeyedObjects``."""

    def __init__(self, store: OrderedStore, table: RocksTable) -> None:
        self._store, self._table = store, table
        self._keys, self._values = KeyPacker(table.key_types), Packer(table.values.kind)
        self._written: dict[Hashable, V | _Gone] = {}
        self._young: dict[Hashable, tuple[V | _Gone, int]] = {}
        self._old: dict[Hashable, tuple[V | _Gone, int]] = {}
        self._young_bytes = self._old_bytes = 0
        self._half_bytes = table.memory_bytes // 2
        self._write_rows = _WRITE_ROWS
        self._used = False  # anything was ever written
        self._number = two_bytes(store.tables)
        store.tables += 1
        self._log: KeyLog | None = None
        self._changed: set[Hashable] = set()
        self._size, self._puts = _Size(), 0

    def get(self, key: Hashable) -> V | None:
        found = self._written.get(key)
        if found is None:
            entry = self._young.get(key)
            found = self._fetched([key])[0] if entry is None else entry[0]
        return None if found is _GONE else cast(V, found)

    def own(self, key: Hashable) -> V | None:
        found = self._written.get(key)
        if found is not None:
            return None if found is _GONE else cast(V, found)
        value = self.get(key)
        if value is not None:
            self._make_room()  # before: what is written from now on must have the change in it
            self._written[key] = value
        return value

    def get_many(self, keys: Sequence[Hashable]) -> list[V | None]:
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
        self._flush()
        self._size.keys = self._puts
        self._log = Intervals(joined_keys, RESTORED if restored else None)
        self._changed = set()

    def freeze(self, checkpoint_id: int | None = None) -> FrozenRocksObjects[V]:
        self._flush()
        history = NOTHING_KNOWN
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
        return self._table.values.revive(self._values.unpack(packed)), _ENTRY_BYTES + _OBJECT_FACTOR * len(packed)

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
        stored, pack, keep = self._table.values.stored, self._values.pack, self._keep
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

    def __init__(
        self,
        snapshot: StoreSnapshot,
        table: RocksTable,
        number: bytes,
        size: _Size,
        log: KeyLog | None,
        history: History[Collection[Hashable]],
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
        return self._history is not NOTHING_KNOWN

    def changed(self, since: int) -> Mapping[Key, V | None] | None:
        if (keys := changed_keys(self._log, self._history, since)) is None:
            return None
        packer, unpack = KeyPacker(self._table.key_types), Packer(self._table.values.kind).unpack
        found = self._snapshot.get_many(_places(keys, self._number, self._table, packer))
        revive = self._table.values.revive
        return {k: None if v is None else revive(unpack(v)) for k, v in zip(keys, found, strict=True)}

    def items(self) -> Iterator[tuple[tuple[Any, ...], V]]:
        """Key and value of everything, in no particular order."""
        for chunk in self.chunks():
            yield from zip(chunk.keys, map(self._table.values.revive, chunk.values), strict=True)

    def chunks(self) -> Iterator[Chunk]:
        """Everything in the order of the key groups, in pieces that fit in memory."""
        unpack_key, unpack = KeyPacker(self._table.key_types).unpack, Packer(self._table.values.kind).unpack
        following = two_bytes(int.from_bytes(self._number, "big") + 1)
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
        self._history = NOTHING_KNOWN


def _places(keys: Sequence[Key], number: bytes, table: RocksTable, packer: KeyPacker) -> list[bytes]:
    """Places of keys of a table in the database."""
    if not keys:
        return []
    columns = [pa.array(column, kind) for column, kind in zip(zip(*keys, strict=True), table.key_types, strict=True)]
    groups = key_groups(hash_keys(columns), table.max_parallelism)
    prefixes = {group: number + group.to_bytes(2, "big") for group in np.unique(groups).tolist()}
    return [prefixes[group] + packer.pack(key) for group, key in zip(groups.tolist(), keys, strict=True)]

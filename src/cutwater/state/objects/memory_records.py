"""Records of keys in memory, frozen at next to no cost.

A freeze copies nothing and moves nothing.  Each column counts its freezes, in *epochs*, and a record says in which
epoch it was written.  The first write behind a freeze sets aside what the record held, if somebody may still read that
freeze; a map that is to be changed in place is copied then, and of a list, which only grows in place, it is set aside
how long it was.  Whoever reads a frozen column takes what was set aside wherever the record is newer.

A dict may get no keys and lose none while another thread goes through it.  So new keys go to a dict on top as long as
somebody reads, and keys without anything stay until nobody does.  Where checkpoints overlap somebody always does: then
dicts are replaced by others now and then, and what was set aside goes as soon as its last reader has gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any, Final, Generic, NamedTuple, TypeVar, cast

import msgspec

from cutwater.state.objects.records import NOTHING, KeyRecord, Records, StateColumn
from cutwater.state.objects.table import (
    NOTHING_KNOWN,
    FrozenObjects,
    Key,
    KeyedObjects,
    KeyLog,
    changed_keys,
    joined_keys,
)
from cutwater.state.table.intervals import RESTORED, History, Intervals

V = TypeVar("V")
V_co = TypeVar("V_co", covariant=True)

_VACATED_KEYS: Final = 1024
"""Keys without anything that wait to be removed."""
_MOST_LAYERS: Final = 8
"""Dicts below the top: each is one more to look into for a new key."""
_SAVED_RECORDS: Final = 2048
"""Records of a column that forget in one slice what nobody reads any more."""


class _Earlier(NamedTuple):
    """What a record held, where that is too new for some who may read: its fields of then."""

    held: Any
    written: float
    before: Any


class _Part(msgspec.Struct, gc=False):
    """The first values of a list, to which others were appended since."""

    values: list[Any]
    count: int


class MemoryRecords(Records):
    """Records of which all lie in memory.

    Args:
        copies: per state, what makes a copy of a value that may then be changed in place; ``None``: it cannot change.
            With ``list`` no copy is made: such values only grow in place, at their ends.

    >>> records = MemoryRecords([list], single=True)
    >>> (column,) = records.columns
    >>> column.put(("a",), [1])
    >>> frozen = column.freeze()
    >>> column.own(("a",)).append(2)
    >>> column.get(("a",)), dict(frozen.items())
    ([1, 2], {('a',): [1]})
    """

    def __init__(self, copies: Sequence[Callable[[Any], Any] | None], *, single: bool) -> None:
        super().__init__(single=single)
        self._below: list[dict[Hashable, KeyRecord]] = []
        """Whose keys stay as they are: somebody may be reading them."""
        self._top: dict[Hashable, KeyRecord] = {}
        self._vacated: list[Hashable] = []
        self._columns = [MemoryColumn[Any](self, place, copy) for place, copy in enumerate(copies)]
        self.columns, self._others = self._columns, self._columns[1:]

    def find(self, key: Hashable) -> KeyRecord:
        found = self._top.get(key)
        if found is None:
            for layer in self._below:
                found = layer.get(key)
                if found is not None:
                    return found
            return NOTHING
        return found

    def begin(self) -> None:
        self.settle()

    def of(self, keys: Sequence[Hashable]) -> Iterator[KeyRecord | None]:
        self.settle()
        return self.looked_up(keys) if self._columns else repeat(NOTHING, len(keys))

    def looked_up(self, keys: Iterable[Hashable]) -> Iterator[KeyRecord | None]:
        """As ``of``, in the middle of a slice."""
        return map((self._below[0] if self._below else self._top).get, keys)

    def made(self, key: Hashable) -> KeyRecord:
        """The first record of a bare key that has none so far."""
        record = KeyRecord()
        for _ in self._others:
            record = KeyRecord(None, 0, None, record)
        self._top[key] = record
        return record

    @property
    def layered(self) -> bool:
        """Whether there are keys that ``looked_up`` does not find."""
        return bool(self._below)

    def vacated(self, key: Hashable) -> None:
        """One of the states of a bare key has no value any more."""
        self._vacated.append(key)

    def layers(self) -> tuple[dict[Hashable, KeyRecord], ...]:
        """All there is, for a freeze that is to be read."""
        self.settle(most_vacated=0)
        if self._top:
            self._below.append(self._top)
            self._top = {}
        if len(self._vacated) > max(_VACATED_KEYS, sum(map(len, self._below)) // 2):
            self._replace_all()
        elif len(self._below) > _MOST_LAYERS:
            base, *others = sorted(self._below, key=len, reverse=True)
            self._below = [base, _joined(others)]
        return tuple(self._below)

    def settle(self, most_vacated: int = _VACATED_KEYS) -> None:
        """Tidy up what nobody reads any more.  To be called between slices only."""
        reading = [column.settle() for column in self._columns]
        if any(reading):
            return
        if self._below:
            base, *others = sorted((*self._below, self._top), key=len, reverse=True)
            for layer in others:
                base.update(layer)
            self._below, self._top = [], base
        if len(self._vacated) > most_vacated:
            self._sweep()

    def _replace_all(self) -> None:
        """Go on with another dict, of the keys that have anything; who reads now has the dicts of before."""
        top = self._top
        self._below, self._top = [], _joined(self._below)
        self._top.update(top)
        self._sweep()
        self._below, self._top = [self._top], {}

    def _sweep(self) -> None:
        """Remove keys without anything."""
        vacated, self._vacated, top = self._vacated, [], self._top
        for key in vacated:
            record = first = top.get(key)
            while record is not None and record.held is None:
                record = record.next
            if first is not None and record is None:
                del top[key]
                if first is self._columns[0].record:
                    self.show(NOTHING)


def _joined(layers: Sequence[dict[Hashable, KeyRecord]]) -> dict[Hashable, KeyRecord]:
    """A dict of its own, of all keys."""
    joined: dict[Hashable, KeyRecord] = {}
    for layer in layers:
        joined.update(layer)
    return joined


class MemoryColumn(StateColumn[V]):
    """One state of ``MemoryRecords``, and its values by key: see ``KeyedObjects``.

    Args:
        records: whose column it is.
        place: of the state among those of the step.
        copy: see ``MemoryRecords``.
    """

    def __init__(self, records: MemoryRecords, place: int, copy: Callable[[V], V] | None) -> None:
        self.record = NOTHING
        self._begin(1)
        self._records, self._copy = records, copy
        self._grows = copy is list
        self._hops = (None,) * place
        self._count = 0
        self._frozen: list[_FrozenColumn[V]] = []
        self._oldest = self._newest = 0  # epochs whose end somebody may read; 0: there is none
        self._saved: list[KeyRecord] = []  # records that got something ``before`` in this epoch
        self._saved_earlier: deque[tuple[int, list[KeyRecord]]] = deque()  # by epoch
        self._touched: list[Hashable] | None = None
        self._log: KeyLog | None = None

    def _begin(self, epoch: int) -> None:
        self.epoch = epoch
        self._vacant = float(epoch)
        """The same number, and another object: who puts a value where there is none has to claim it."""

    @property
    def objects(self) -> KeyedObjects[V]:
        return self

    # -------------------------------------------------------------------------------------------- the current key

    def claim(self, record: Any, key: Hashable, value: V) -> KeyRecord:
        """Set aside what may be read, then mark the record, in this order."""
        if record is NOTHING:
            self._records.show(self._records.made(key))
            record = self.record
        held, written = record.held, record.written
        if held is None:
            self._count += 1
        if written <= self._newest:
            if self._grows and held is not None:
                held = _Part(held, len(held))
            if written <= self._oldest:
                record.before = held
            else:
                before, oldest = record.before, self._oldest
                if type(before) is _Earlier and before.written <= oldest:
                    before = before.held  # nobody reads what was before that
                record.before = _Earlier(held, written, before)
            self._saved.append(record)
        record.written = self.epoch
        if self._touched is not None:
            self._touched.append(key)
        return record

    def owned(self, record: KeyRecord, key: Hashable) -> V | None:
        if record.written is not self.epoch and record.held is not None:
            may_be_read = record.written <= self._newest
            self.claim(record, key, record.held)
            if may_be_read and self._copy is not None and not self._grows:
                record.held = self._copy(record.held)
        return record.held

    def vacate(self, record: KeyRecord, key: Hashable) -> None:
        if record.held is None:
            return
        if record.written is not self.epoch:
            self.claim(record, key, record.held)
        record.written = self._vacant
        record.held = None
        self._count -= 1
        self._records.vacated(key)

    # ----------------------------------------------------------------------------------------------------- by key

    def get(self, key: Any) -> V | None:
        return self._found(key)[0].held

    def own(self, key: Any) -> V | None:
        return self.owned(*self._found(key))

    def remove(self, key: Any) -> None:
        self.vacate(*self._found(key))

    def put(self, key: Any, value: V) -> None:
        self.put_many([key], [value])

    def get_many(self, keys: Sequence[Any]) -> list[V | None]:
        records, find = self._records, self._records.find
        bare = records.bare(keys)
        found = [
            find(key) if record is None else record for record, key in zip(records.looked_up(bare), bare, strict=True)
        ]
        for _ in self._hops:
            found = [record.next for record in found]
        return [record.held for record in found]

    def put_many(self, keys: Iterable[Any], values: Iterable[V]) -> None:
        self.fill(self._records.bare(list(keys)), values)

    def fill(self, keys: Sequence[Hashable], values: Iterable[V]) -> None:
        records, find, made, claim = self._records, self._records.find, self._records.made, self.claim
        epoch, newest, touched, hops = self.epoch, self._newest, self._touched, self._hops
        layered = records.layered
        for record, key, value in zip(records.looked_up(keys), keys, values, strict=True):
            if record is None:
                record = find(key) if layered else NOTHING
                if record is NOTHING:
                    record = made(key)
            for _ in hops:
                record = record.next
            if record.written is not epoch:
                if newest or touched is not None:
                    claim(record, key, value)
                else:  # as in a restore, where nothing is to be set aside
                    if record.held is None:
                        self._count += 1
                    record.written = epoch
            record.held = value

    def __len__(self) -> int:
        return self._count

    def _found(self, key: Any) -> tuple[KeyRecord, Hashable]:
        (bare,) = self._records.bare([key])
        record = self._records.find(bare)
        for _ in self._hops:
            record = record.next
        return record, bare

    # --------------------------------------------------------------------------------------------------- freezing

    def track(self, *, restored: bool = False) -> None:
        self._log = Intervals(joined_keys, RESTORED if restored else None)
        self._touched = []
        self._begin(self.epoch + 1)

    def freeze(self, checkpoint_id: int | None = None) -> FrozenObjects[V]:
        layers = self._records.layers()
        history = NOTHING_KNOWN
        if self._log is not None and self._touched is not None and checkpoint_id is not None:
            history, self._touched = self._log.cut(checkpoint_id, self._touched), []
        shape = (self.epoch, len(self._hops), self._records.single, self._grows)
        frozen = _FrozenColumn[V](layers, *shape, self._count, self._log, history)
        self._frozen.append(frozen)
        self._oldest, self._newest = self._frozen[0].epoch, self.epoch
        self._save_apart()
        self._begin(self.epoch + 1)
        return frozen

    def settle(self) -> bool:
        """Forget what nobody reads any more, a part at once; whether anybody reads."""
        if self._frozen:
            self._frozen = [frozen for frozen in self._frozen if not frozen.released]
            self._oldest = self._frozen[0].epoch if self._frozen else 0
            self._newest = self._frozen[-1].epoch if self._frozen else 0
        if not self._frozen:
            self._save_apart()
        unread, most = self._oldest or self.epoch, _SAVED_RECORDS
        while most > 0 and self._saved_earlier and self._saved_earlier[0][0] <= unread:
            records = self._saved_earlier[0][1]
            for record in records[-most:]:
                if record.written <= unread:  # else it was set aside once more
                    record.before = None
            left = max(0, len(records) - most)
            most -= len(records) - left
            del records[left:]
            if not records:
                self._saved_earlier.popleft()
        return bool(self._frozen)

    def _save_apart(self) -> None:
        """What was set aside in this epoch can go when nobody reads an earlier one."""
        if self._saved:
            self._saved_earlier.append((self.epoch, self._saved))
            self._saved = []


class _FrozenColumn(Generic[V_co]):
    """A ``MemoryColumn`` at the end of an epoch, for another thread.

    What a record holds, and how long it is, is read before the epoch in which it was written: if that is early enough,
    so is what was read.
    """

    def __init__(
        self,
        layers: Sequence[dict[Hashable, KeyRecord]],
        epoch: int,
        place: int,
        single: bool,
        grows: bool,
        size: int,
        log: KeyLog | None,
        history: History[Collection[Hashable]],
    ) -> None:
        self._layers, self._hops, self._single = layers, (None,) * place, single
        self.epoch, self.size, self._grows = epoch, size, grows
        self._log, self._history = log, history
        self.released = False

    def items(self) -> Iterator[tuple[Key, V_co]]:
        single, hops, epoch, grows = self._single, self._hops, self.epoch, self._grows
        for layer in self._layers:
            for key, record in layer.items():
                for _ in hops:
                    record = record.next
                held = record.held
                count = len(held or ()) if grows else 0
                if record.written > epoch:
                    held = _before(record.before, epoch)
                elif grows:
                    held = None if held is None else held[:count]
                if held is not None:
                    yield (key,) if single else cast(Key, key), held

    @property
    def tracked(self) -> bool:
        return self._history is not NOTHING_KNOWN

    def changed(self, since: int) -> Mapping[Key, V_co | None] | None:
        keys = changed_keys(self._log, self._history, since)
        if keys is None:
            return None
        return {(key,) if self._single else cast(Key, key): self._get(key) for key in keys}

    def _get(self, key: Hashable) -> V_co | None:
        for layer in self._layers:
            record = layer.get(key)
            if record is not None:
                for _ in self._hops:
                    record = record.next
                held = record.held
                count = len(held or ()) if self._grows else 0
                if record.written > self.epoch:
                    return _before(record.before, self.epoch)
                return held[:count] if self._grows and held is not None else held
        return None

    def release(self) -> None:
        """The column may forget what only this instant had."""
        self._layers = ()
        self._history = NOTHING_KNOWN
        self.released = True


def _before(before: Any, epoch: int) -> Any:
    """What was held at the end of an epoch, of a record that was written since."""
    while type(before) is _Earlier:
        earlier, before = before, before.before
        if earlier.written <= epoch:
            before = earlier.held
    return before.values[: before.count] if type(before) is _Part else before

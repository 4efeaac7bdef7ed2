"""Rows of a columnar table between memory and disk.

The table in memory is a cache, of single rows, that is written when they leave it.  A key that is not in memory is
looked up on disk, all such keys of a batch at once.  When the table has outgrown its budget, half of its rows leave:
first those that were not used since the last time (the second chance of a clock), the oldest among them first.  They
are written in parts, between batches; a row that is used meanwhile stays.  Then the table is made anew of what is
left, as a sweep makes it anew.

Large rows that the last batch used stay in any case.  Such a row is a key of a join with all that waits for it, and
keys that every batch asks for would be written and read again as a whole for every batch: the work would grow with the
square of what waits.  No more is in memory for it at once, since the next batch would bring them back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final, Generic, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.state.disk.rocks import OrderedStore
from cutwater.state.disk.tables import FrozenSpilledRows, RowTypes, SpilledChunk, SpilledRows, SpillQueue
from cutwater.state.growing_array import GrowingArray
from cutwater.state.key_index import GroupIds, KeyIndex
from cutwater.state.keys import hash_keys, key_groups
from cutwater.state.table.changes import ChangeLog

PART_KEYS: Final = 1 << 14
"""Keys with several rows each that are brought into memory at once."""
_PART_ROWS: Final = 4096
_LARGE_BYTES: Final = 1 << 10
"""Smaller rows cost no more to move than the row that asks for them."""
_SLACK_KEYS: Final = 1 << 14
"""Keys below this number are not worth cleaning."""
DELETED_KEYS: Final = 1 << 17
"""More keys that went from disk between two freezes are not told one by one."""
_INDEX_BYTES: Final = 24
"""Bytes that a group id takes in the table of an index, roughly."""


class Room(NamedTuple):
    """The place of rows that do not fit in memory.

    Attributes:
        store: where they lie; several tables may lie in it.
        memory_bytes: what the table in memory may take, roughly.
        hashed: how many key columns lie before those whose hash decides the key group.
    """

    store: OrderedStore
    max_parallelism: int
    memory_bytes: int
    hashed: int = 0


class Spillable(Protocol):
    """A table in memory whose rows a ``Spill`` moves."""

    @property
    def index(self) -> KeyIndex: ...

    @property
    def value_types(self) -> Sequence[pa.DataType]:
        """Of what a row holds besides its key."""
        ...

    @property
    def memory_bytes(self) -> int: ...

    def __len__(self) -> int: ...

    def whole_rows(self, gids: GroupIds) -> list[pa.Array]:
        """Index columns and values of some group ids."""
        ...

    def set_rows(self, gids: GroupIds, columns: Sequence[pa.Array]) -> None:
        """Set group ids, which are new, to values."""
        ...

    def keep(self, gids: GroupIds) -> None:
        """Forget all group ids but these, which become 0, 1, 2 ..."""
        ...

    def page(self, keys: Sequence[pa.Array], columns: Sequence[pa.Array]) -> Spillable:
        """A small table of the same make that holds these rows."""
        ...


T = TypeVar("T", bound=Spillable)


class Spill(Generic[T]):
    """Moves the rows of one table out and in.

    Args:
        logged: as which group ids the log of changes knows some group ids, if not by the same numbers.
    """

    def __init__(self, table: T, room: Room, logged: Callable[[GroupIds], GroupIds] | None = None) -> None:
        store, groups, self._memory_bytes, hashed = room
        self._table, self._hashed, self._groups = table, hashed, groups
        self._store, self._logged = store, logged
        self.rows = SpilledRows(store, RowTypes(table.index.types, table.value_types, hashed, groups))
        self._queues: list[tuple[SpillQueue, Callable[[T, GroupIds], npt.NDArray[np.int64]]]] = []
        self._used = GrowingArray(np.bool_)
        self._recent = GrowingArray(np.bool_)
        """Used since ``make_room`` was called."""
        self._stored = GrowingArray(np.bool_)
        self._leaving: GroupIds | None = None
        self._written = self._seen = 0
        self.count, self._clean_at = 0, _SLACK_KEYS
        """Number of rows on disk, roughly; and how many are worth a pass over all of them."""
        self._cleaning: Iterator[SpilledChunk] | None = None
        self.journaled: dict[int, int] = {}
        """Rows written to the journal, by epoch."""

    # -- in

    def fetch(self, known: int) -> None:
        """Group ids from ``known`` on are new: set those whose rows lie on disk to what they hold."""
        table, used = self._table, len(self._table.index)
        for flags in (self._used, self._recent, self._stored):
            flags.reserve(used)
        gids = np.arange(known, used, dtype=np.int32)
        there, values = self.rows.get(table.index.columns(gids))
        if there.any():
            table.set_rows(gids[there], values)
            self._stored.values[gids[there]] = True

    def fetched(self, gids: GroupIds) -> npt.NDArray[np.bool_]:
        """Of group ids that came with the last batch, which were there before."""
        return self._stored.values[gids]

    def use(self, gids: GroupIds) -> None:
        """Rows of these group ids are used."""
        self._used.values[gids] = True
        self._recent.values[gids] = True

    # -- out

    @property
    def full(self) -> bool:
        """True if rows should leave."""
        return self._table.memory_bytes + len(self._table) * _INDEX_BYTES > self._memory_bytes

    def make_room(self, log: ChangeLog | None, *, begin: bool = False) -> GroupIds | None:
        """A part of the work, if there is any; at its end the group ids that stay, for ``KeyedTable.keep``.

        Args:
            log: is told what leaves after it changed.
            begin: rows leave in any case.
        """
        count = len(self._table)
        came, self._seen = count - self._seen, count
        if self._leaving is None and (begin or self.full):
            self._leaving, self._written = self._to_leave(count), 0
        self._recent.values[:count] = False
        if self._leaving is None:
            return None
        size = max(_PART_ROWS, 2 * came)
        part = self._leaving[self._written : self._written + size]
        self._written += len(part)
        self._write(part[~self._used.values[part]], log)
        if self._written < len(self._leaving):
            return None
        stays = self._used.values[:count].copy()
        stays[np.setdiff1d(np.arange(count), self._leaving, assume_unique=True)] = True
        return np.flatnonzero(stays).astype(np.int32)

    def _to_leave(self, count: int) -> GroupIds | None:
        """Half of the rows, without large ones that the last batch used; ``None`` if no others are there."""
        used, free = self._used.values[:count], np.ones(count, np.bool_)
        if self._table.memory_bytes > count * _LARGE_BYTES:
            free = ~self._recent.values[:count]
        leaving = np.concatenate([np.flatnonzero(~used & free), np.flatnonzero(used & free)])[: count // 2]
        used[:] = False
        return leaving.astype(np.int32) if len(leaving) else None

    def _write(self, gids: GroupIds, log: ChangeLog | None) -> None:
        if len(gids) == 0:
            return
        logged = gids if self._logged is None else self._logged(gids)
        self._put(self._table, gids, log, None if log is None else log.changed(logged))
        self.count += len(gids) - int(np.count_nonzero(self._stored.values[gids]))
        self._stored.values[gids] = True

    def put_page(self, page: T, gids: GroupIds, log: ChangeLog | None, came: bool) -> None:
        """Group ids of a table made of rows on disk have changed, or are new there."""
        self.count += came * len(gids)
        self._put(page, gids, log, None if log is None or not log.tracking else np.ones(len(gids), np.bool_))

    def _put(self, table: T, gids: GroupIds, log: ChangeLog | None, changed: npt.NDArray[np.bool_] | None) -> None:
        columns, keys = table.whole_rows(gids), len(table.index.types)
        epoch = 0 if log is None else log.epoch
        self.rows.put(columns[:keys], columns[keys:], changed, epoch)
        for queue, instants in self._queues:
            queue.put(columns[:keys], instants(table, gids))
        if changed is not None:
            self.journaled[epoch] = self.journaled.get(epoch, 0) + int(np.count_nonzero(changed))

    # -- when to look at what has left

    def look_again(self, instants: Callable[[T, GroupIds], npt.NDArray[np.int64]]) -> SpillQueue:
        """The keys of rows on disk by the ``instants`` at which they want to be looked at; ``NEVER``: they do not.

        Some are named in vain: they are to be looked up in the table.
        """
        queue = SpillQueue(self._store, self._table.index.types)
        self._queues.append((queue, instants))
        return queue

    @property
    def busy(self) -> bool:
        """True if ``make_room`` has begun and not ended."""
        return self._leaving is not None

    # -- gone

    def delete(self, gids: GroupIds, log: ChangeLog | None) -> None:
        """The keys of these group ids are gone."""
        gids = gids[self._stored.values[gids]]
        if len(gids):
            self.rows.remove(self._table.index.columns(gids), _epochs(log))
            self.count = max(0, self.count - len(gids))

    def keep(self, gids: GroupIds) -> None:
        """The table has been made anew of these group ids."""
        for flags in (self._used, self._recent, self._stored):
            flags.replace(flags.values[gids])
        self._leaving, self._seen = None, len(gids)

    def remove(self, keys: Sequence[pa.Array]) -> None:
        """Keys are gone, wherever they lie; for a restore, before anything is frozen."""
        found = self._table.index.find(keys)
        self._drop(found[found >= 0])
        self.rows.remove(keys, range(0))

    def remove_groups(self, groups: range) -> None:
        """All keys of some key groups are gone; for a restore, before anything is frozen."""
        gids = np.arange(len(self._table), dtype=np.int32)
        if len(gids):
            found = self.group_of(self._table.index.columns(gids))
            self._drop(gids[(found >= groups.start) & (found < groups.stop)])
        self.rows.remove_groups(groups)

    def group_of(self, keys: Sequence[pa.Array]) -> npt.NDArray[np.uint16]:
        """The key group of each key."""
        return key_groups(hash_keys(keys[self._hashed :]), self._groups)

    def _drop(self, gids: GroupIds) -> None:
        if len(gids):
            self._table.keep(np.setdiff1d(np.arange(len(self._table), dtype=np.int32), gids))

    def clean(self, live: Callable[[T, GroupIds], npt.NDArray[np.bool_]], log: ChangeLog | None) -> None:
        """Look at some of the rows on disk, and remove those that are not ``live``; begins anew when there are more."""
        if self._cleaning is None and self.count >= self._clean_at:
            self._cleaning = self.rows.freeze().chunks(_PART_ROWS)
        chunk = None if self._cleaning is None else next(self._cleaning, None)
        if chunk is None:
            if self._cleaning is not None:
                self._cleaning, self._clean_at = None, 2 * self.count + _SLACK_KEYS
            return
        page = self._page(chunk.keys, chunk.values)
        dead = np.flatnonzero(~live(page, np.arange(len(page), dtype=np.int32)))
        keys = page.index.columns(dead)
        in_memory = self._table.index.find(keys) >= 0 if len(dead) else np.empty(0, np.bool_)
        there, values = self.rows.get([key.filter(pa.array(~in_memory)) for key in keys]) if len(dead) else ([], [])
        if not any(there):
            return
        keys = [key.filter(pa.array(~in_memory)).filter(pa.array(there)) for key in keys]
        page = self._page(keys, values)  # as they are now: the pass shows what there was when it began
        gone = np.flatnonzero(~live(page, np.arange(len(page), dtype=np.int32))).astype(np.int32)
        if len(gone):
            self.delete_page(page, gone, log)

    def _page(self, keys: Sequence[pa.Array], columns: Sequence[pa.Array]) -> T:
        return cast("T", self._table.page(keys, columns))

    def delete_page(self, page: T, gids: GroupIds, log: ChangeLog | None) -> None:
        """The keys of group ids of a table made of rows on disk are gone."""
        self.rows.remove(page.index.columns(gids), _epochs(log))
        self.count = max(0, self.count - len(gids))
        if log is not None:
            log.delete(page.index, gids)
            log.restart(DELETED_KEYS)

    # -- snapshots

    def freeze(self, log: ChangeLog | None) -> FrozenSpill:
        """The rows on disk as they are now."""
        frozen = FrozenSpill(self.rows.freeze(), self.group_of, self.count, dict(self.journaled))
        begin = _epochs(log).start  # of what later freezes may be asked for
        self.rows.forget(begin)
        self.journaled = {epoch: rows for epoch, rows in self.journaled.items() if epoch >= begin}
        return frozen


class FrozenSpill:
    """The rows on disk at one instant, for another thread."""

    def __init__(
        self,
        rows: FrozenSpilledRows,
        group_of: Callable[[Sequence[pa.Array]], npt.NDArray[np.uint16]],
        count: int,
        journaled: dict[int, int],
    ) -> None:
        self.rows, self.group_of, self.count = rows, group_of, count
        self._journaled = journaled

    def changed(self, epoch: int) -> int:
        """At most so many rows have changed since an epoch began."""
        return sum(rows for number, rows in self._journaled.items() if number >= epoch)


def _epochs(log: ChangeLog | None) -> range:
    return range(0) if log is None else log.epochs

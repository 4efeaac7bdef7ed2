"""Tables by time and key, whose rows come out together when a watermark reaches their time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.time import MAX_WATERMARK
from cutwater.data.words import from_words, read_only
from cutwater.state import column_kernels as kernels
from cutwater.state.disk.tables import NEVER, FrozenSpilledRows
from cutwater.state.growing_array import GrowingArray
from cutwater.state.key_index import GroupIds
from cutwater.state.segments import SegmentKind
from cutwater.state.table.changes import Changed
from cutwater.state.table.keyed_table import Columns, KeyedTable, Layout
from cutwater.state.table.spill import Room, Spill

_DEAD_ROWS = 4096
"""Group ids of forgotten buckets are swept out when they are more than this and more than the live ones."""

NO_GROUP_IDS: GroupIds = np.empty(0, np.int32)


class TimeBuckets:
    """Group ids in buckets of one time each, and two queues in time order: buckets to come out, and such to forget.

    The bucket of a window is its start.

    Args:
        reach_us: from a bucket's time to the instant at which it is due.
        lateness_us: from there to the instant at which it is forgotten.
    """

    def __init__(self, reach_us: int, lateness_us: int) -> None:
        self._reach_us = reach_us
        self._lateness_us = lateness_us
        self._gids: dict[int, list[GroupIds]] = {}
        self._to_fire: list[int] = []
        self._to_forget: list[int] = []
        self._live = 0
        self._dead = 0
        self._ended = False

    def add(self, first_gid: int, starts: npt.NDArray[np.int64]) -> list[int]:
        """New group ids ``first_gid``, ``first_gid + 1`` ... belong to the windows with these starts.

        Returns the starts of the windows that are new.
        """
        opened: list[int] = []
        if len(starts) == 0:
            return opened
        gids = np.arange(first_gid, first_gid + len(starts), dtype=np.int32)
        self._live += len(gids)
        order = np.argsort(starts, kind="stable")
        ordered = starts[order]
        cuts = np.flatnonzero(np.diff(ordered)) + 1
        bounds = [0, *cuts.tolist(), len(order)]
        gids = gids[order]
        for begin, end in itertools.pairwise(bounds):
            start = int(ordered[begin])
            if start not in self._gids:
                self._gids[start] = []
                heapq.heappush(self._to_fire, start)
                opened.append(start)
            self._gids[start].append(gids[begin:end])
        return opened

    def fired(self, start: int) -> None:
        """A window has come out without group ids: remember when it can be forgotten."""
        if start not in self._gids:
            self._gids[start] = []
            heapq.heappush(self._to_forget, start)

    @property
    def next_instant(self) -> int | None:
        """At which watermark the next window fires; ``None``: none is waiting."""
        return self._to_fire[0] + self._reach_us if self._to_fire else None

    def of(self, start: int) -> list[GroupIds]:
        """The group ids of a window, in pieces."""
        return self._gids.get(start, [])

    def due(self, watermark: int) -> GroupIds:
        """Group ids of the windows that the watermark completes, in time order; each window once."""
        found: list[GroupIds] = []
        while self._to_fire and self._to_fire[0] + self._reach_us <= watermark:
            start = heapq.heappop(self._to_fire)
            heapq.heappush(self._to_forget, start)
            found += self._gids[start]
        return np.concatenate(found) if found else NO_GROUP_IDS

    def firing(self, watermark: int) -> list[int]:
        """Starts of the windows that are ``due``, in time order."""
        return sorted(start for start in self._to_fire if start + self._reach_us <= watermark)

    def ending(self, watermark: int) -> list[int]:
        """Starts of the windows that can be forgotten once those that are due have come out, in time order."""
        reach = self._reach_us + self._lateness_us
        return sorted(start for start in (*self._to_fire, *self._to_forget) if start + reach <= watermark)

    def keep(self, gids: GroupIds) -> None:
        """Only these group ids are left, which become 0, 1, 2 ...; windows stay that have none now."""
        last = max((int(part[-1]) for parts in self._gids.values() for part in parts if len(part)), default=-1)
        renumbered = np.full(max(last, int(gids.max(initial=-1))) + 1, -1, np.int32)
        renumbered[gids] = np.arange(len(gids), dtype=np.int32)
        for start, parts in self._gids.items():
            moved = renumbered[np.concatenate(parts) if parts else NO_GROUP_IDS]  # ascending, as group ids come
            self._gids[start] = [moved[moved >= 0]]
        self._live, self._dead = len(gids), 0

    def forget(self, watermark: int) -> GroupIds:
        """Forget fired windows that take no more rows; their group ids are dead: no row may find them again.

        At the end of time that is only true of group ids that are swept out: by the clock, windows may come again.
        """
        self._ended = watermark == MAX_WATERMARK
        reach = self._reach_us + self._lateness_us
        parts: list[GroupIds] = []
        while self._to_forget and self._to_forget[0] + reach <= watermark:
            parts += self._gids.pop(heapq.heappop(self._to_forget))
        gone = np.concatenate(parts) if parts else NO_GROUP_IDS
        self._live -= len(gone)
        self._dead += len(gone)
        return gone

    @property
    def wasteful(self) -> bool:
        """True if the dead group ids should be swept out."""
        return self._dead > (0 if self._ended else max(_DEAD_ROWS, self._live))

    def live_parts(self) -> list[GroupIds]:
        """The live group ids, in pieces that never change."""
        return [part for parts in self._gids.values() for part in parts]


def join_gids(parts: Iterable[GroupIds]) -> GroupIds:
    """All group ids of the pieces, ascending."""
    pieces = list(parts)
    return np.sort(np.concatenate(pieces)) if pieces else NO_GROUP_IDS


V = TypeVar("V", bound=Columns)
T = TypeVar("T")
Times: TypeAlias = npt.NDArray[np.int64]
Passed: TypeAlias = Callable[[Callable[[], list[pa.Array]]], "bool | npt.NDArray[np.bool_]"]
"""Tells whether it is time for some rows to come out early, from a function that gives their keys: one answer for all,
or a mask."""
Parts: TypeAlias = Iterator[tuple[KeyedTable[V], GroupIds]]
"""Tables, and some of the rows of each."""

PART_ROWS = 1 << 14
"""Rows that are brought into memory at once."""
_FIRED, _PENDING = 0, 1
"""Side columns of the table."""
_NO_TIMES: Times = np.empty(0, np.int64)


class Pieces(Generic[T]):
    """The output of a table, in pieces of a bounded size: of the rows in memory first, then of all others.

    Args:
        read: makes a piece of some rows in memory.
        later: the pieces of others.

    >>> pieces = Pieces(lambda rows: rows.tolist(), np.arange(3), iter([[7, 8]]))
    >>> [pieces.take(2) for _ in range(4)], pieces.pending
    ([[0, 1], [2], [7, 8], None], False)
    """

    def __init__(
        self, read: Callable[[GroupIds], T], rows: GroupIds = NO_GROUP_IDS, later: Iterator[T] | None = None
    ) -> None:
        self.rows = rows
        """In memory, in the order in which they come out."""
        self._read, self._later = read, later

    @property
    def pending(self) -> bool:
        """True if there may be more to ``take``."""
        return len(self.rows) > 0 or self._later is not None

    @property
    def scattered(self) -> bool:
        """True if more may come than the rows in memory, in whatever order."""
        return self._later is not None

    def take(self, most: int) -> T | None:
        """The next piece, of so many rows in memory at most; ``None``: there is none."""
        if len(self.rows):
            rows, self.rows = self.rows[:most], self.rows[most:]
            return self._read(rows)
        piece = None if self._later is None else next(self._later, None)
        if piece is None:
            self._later = None
        return piece

    def extend(self, other: Pieces[T]) -> None:
        """Others come out, too, in memory and elsewhere behind these."""
        self.rows = np.concatenate([self.rows, other.rows])
        if other._later is not None:
            self._later = itertools.chain(self._later or (), other._later)


@dataclass(frozen=True)
class Timing:
    """The times at which rows come out and go.

    Attributes:
        reach_us: from a time to the watermark at which its rows are due.
        lateness_us: from there to the watermark at which they are forgotten.
        fires: rows come out, and are marked then.
        counts: rows that came are counted until they come out, and may come out early (``TimedTable.changed``).
        waits: such rows that leave memory are brought back for that.
        only_pending: rows that nothing came to since they came out early do not come out again.
    """

    reach_us: int
    lateness_us: int
    fires: bool = True
    counts: bool = False
    waits: bool = False
    only_pending: bool = False


class TimedTable(Generic[V, T]):
    """Rows by (time, key).  All rows of a time are due at once, come out once, and are forgotten later.

    Args:
        key_types: types of the index columns, the time before the keys.
        timing: when they come out.
        read: what comes out of some rows of a table; it may change them.
        room: where rows lie that do not fit in memory; ``None``: all of them do.
        opened: called with each time that is new.
    """

    def __init__(
        self,
        key_types: Sequence[pa.DataType],
        layout: Layout[V],
        timing: Timing,
        read: Callable[[KeyedTable[V], GroupIds], T],
        owned: range,
        room: Room | None = None,
        opened: Callable[[int], object] | None = None,
    ) -> None:
        side_columns = [kind for kind, wanted in ((np.bool_, timing.fires), (np.int64, timing.counts)) if wanted]
        self.table = KeyedTable(key_types, layout, side_columns, room, self._renumbered)
        self._timing, self._read, self._owned, self._opened = timing, read, owned, opened
        self._buckets = TimeBuckets(timing.reach_us, timing.lateness_us)
        self._times = GrowingArray(np.int64)
        self._spill = self.table.spill
        self._waiting = self._spill.look_again(self._next_round) if self._spill and timing.waits else None
        """Rows outside of memory that changed since they came out, by round."""
        self._round = 0
        """Number of times that rows outside of memory have been asked for early results."""

    @property
    def fired(self) -> npt.NDArray[np.bool_]:
        """Marks of the rows that have come out, by group id."""
        return self.table.side(_FIRED)

    @property
    def pending(self) -> Times:
        """Number of rows that came and have not come out, by group id; empty where they are not counted."""
        return self.table.side(_PENDING) if self._timing.counts else _NO_TIMES

    @property
    def next_instant(self) -> int | None:
        """The watermark at which the next rows are due; ``None``: none are waiting."""
        return self._buckets.next_instant

    def times(self, gids: GroupIds) -> Times:
        """The times of some group ids."""
        return self._times.values[gids]

    # -- rows

    def upsert(self, times: Times, keys: Sequence[pa.Array]) -> GroupIds:
        """Group ids of (time, key) pairs."""
        known = len(self.table)
        gids = self.table.upsert([from_words(times, self.table.index.types[0]), *keys])
        self._admit(known, gids, times)
        return gids

    def restore(self, times: Times, keys: Sequence[pa.Array], state: Sequence[pa.Array]) -> GroupIds:
        """Set rows to state columns; returns their group ids."""
        known = len(self.table)
        gids = self.table.restore([from_words(times, self.table.index.types[0]), *keys], state)
        self._admit(known, gids, times)
        return gids

    def _admit(self, known: int, gids: GroupIds, times: Times) -> None:
        used = len(self.table)
        if used == known:
            return
        self._times.reserve(used)
        kernels.set_new(gids, known, read_only(times), self._times.values)
        for time in self._buckets.add(known, self._times.values[known:used]):
            if self._opened is not None:
                self._opened(time)

    def _renumbered(self, kept: GroupIds) -> None:
        self._buckets.keep(kept)
        self._times.replace(self._times.values[kept])

    # -- what comes out

    def due(self, watermark: int) -> Pieces[T]:
        """The output at a watermark: each row once, and those in memory in the order of time."""
        later = self._due_elsewhere(watermark)
        gids = self._buckets.due(watermark)
        gids = gids[~self.fired[gids]]
        self.table.touch(gids)
        self.fired[gids] = True
        if self._timing.only_pending:
            gids = gids[self.pending[gids] > 0]
        return self._come_out(gids, later)

    def changed(self, passed: Passed, most: int) -> Pieces[T]:
        """The early output: rows that have changed since they came out, and are not due.

        Those outside of memory come in pieces that may be left for another call.

        Args:
            passed: whether it is time for them.
            most: how many in memory at most, the earliest.
        """
        used = len(self.table)
        gids = np.flatnonzero((self.pending[:used] > 0) & ~self.fired[:used]).astype(np.int32)
        gids = gids[np.broadcast_to(passed(lambda: self.keys(gids)), len(gids))]
        gids = gids[np.argsort(self.times(gids), kind="stable")][:most]
        return self._come_out(gids, None if self._spill is None else self._changed_elsewhere(self._spill, passed))

    def _come_out(self, gids: GroupIds, later: Iterator[T] | None) -> Pieces[T]:
        if self._timing.counts:
            self.table.touch(gids)
            self.pending[gids] = 0
        return Pieces(lambda rows: self._read(self.table, rows), gids, later)

    def keys(self, gids: GroupIds) -> list[pa.Array]:
        """The key columns of some group ids."""
        return self.table.index.columns(gids)[1:]

    def gids_of(self, times: Sequence[int]) -> tuple[GroupIds, Times]:
        """The group ids in memory of some times, one time after the other, and the time of each."""
        parts = [join_gids(self._buckets.of(time)) for time in times]
        return np.concatenate(parts), np.repeat(np.array(times, np.int64), [len(part) for part in parts])

    def forget(self, watermark: int) -> None:
        """Forget rows in memory that no row can come to any more; everything that was due has come out."""
        gone = self._buckets.forget(watermark)
        self.table.delete(gone)
        # Where rows leave memory at once: what is dead must not be written then.
        if self._buckets.wasteful or (self._spill is not None and len(gone)):
            self.table.keep(join_gids(self._buckets.live_parts()))

    # -- rows outside of memory

    def _due_elsewhere(self, watermark: int) -> Iterator[T] | None:
        firing, ending = self._buckets.firing(watermark), self._buckets.ending(watermark)
        if self._spill is None or not self.table.scattered or not (firing or ending):
            return None
        return self._read_elsewhere(self._spill.rows.freeze(), set(firing), set(ending))

    def _read_elsewhere(self, frozen: FrozenSpilledRows, firing: set[int], ending: set[int]) -> Iterator[T]:
        for time in sorted(firing | ending):
            for page, only in self._stored(frozen, time, self._owned):
                only = only[~page.side(_FIRED)[only]]
                piece = self._fire_page(page, only if time in firing else NO_GROUP_IDS)
                if time in ending:
                    self.table.delete_page(page, np.arange(len(page), dtype=np.int32))
                elif len(only):
                    self.table.put_page(page, only)
                yield piece
        frozen.release()

    def _stored(self, frozen: FrozenSpilledRows, time: int, groups: range) -> Parts[V]:
        """The stored rows of a time in some key groups, and which of them are not in memory."""
        for chunk in frozen.beginning(np.int64(time).tobytes(), groups, PART_ROWS):
            page = self.table.page(chunk.keys, chunk.values)
            yield page, np.flatnonzero(self.table.index.find(chunk.keys) < 0).astype(np.int32)

    def _fire_page(self, page: KeyedTable[V], gids: GroupIds) -> T:
        """The output of some group ids of a page, which have not fired."""
        page.side(_FIRED)[gids] = True
        if self._timing.only_pending:
            gids = gids[page.side(_PENDING)[gids] > 0]
        return self._read_page(page, gids)

    def _read_page(self, page: KeyedTable[V], gids: GroupIds) -> T:
        if self._timing.counts:
            page.side(_PENDING)[gids] = 0
        return self._read(page, gids)

    def _next_round(self, table: KeyedTable[V], gids: GroupIds) -> Times:
        """Rows that leave memory changed want to be looked at in the next round."""
        waits = (table.side(_PENDING)[gids] > 0) & ~table.side(_FIRED)[gids]
        return np.where(waits, self._round, NEVER)

    def _changed_elsewhere(self, spill: Spill[KeyedTable[V]], passed: Passed) -> Iterator[T]:
        before, self._round = self._round, self._round + 1  # what is put back now is for the next round
        while self._waiting is not None and self._waiting.due(before):
            yield self._page_changed(spill, self._waiting.take(before, PART_ROWS), passed)

    def _page_changed(self, spill: Spill[KeyedTable[V]], keys: list[pa.Array], passed: Passed) -> T:
        """The early output of the rows with these keys, those in memory left out."""
        only = pa.array(self.table.index.find(keys) < 0)
        keys = [key.filter(only) for key in keys]
        there, values = spill.rows.get(keys)
        if not there.any():
            return self._read(self.table, NO_GROUP_IDS)
        page = self.table.page([key.filter(pa.array(there)) for key in keys], values)
        gids = np.arange(len(page), dtype=np.int32)
        waiting = gids[(page.side(_PENDING)[gids] > 0) & ~page.side(_FIRED)[gids]]
        ready = waiting[np.broadcast_to(passed(lambda: page.index.columns(waiting)[1:]), len(waiting))]
        piece = self._read_page(page, ready)
        if len(waiting):
            self.table.put_page(page, waiting)
        return piece

    def by_group(self, times: Sequence[int]) -> Iterator[tuple[int, Parts[V]]]:
        """The rows of some times by key group, those of a group one time after the other, wherever they lie."""
        spill = self._spill
        assert spill is not None, "all rows are in memory"
        gids, of_gids = self.gids_of(times)
        groups = spill.group_of(self.table.index.columns(gids))
        order = np.argsort(groups, kind="stable")
        gids, of_gids, groups = gids[order], of_gids[order], groups[order]
        frozen = spill.rows.freeze()
        for group in self._owned:
            part = slice(*(int(n) for n in np.searchsorted(groups, [group, group + 1])))
            yield group, self._of_group(frozen, times, group, gids[part], of_gids[part])
        frozen.release()

    def _of_group(
        self, frozen: FrozenSpilledRows, times: Sequence[int], group: int, gids: GroupIds, of_gids: Times
    ) -> Parts[V]:
        for time in times:
            yield self.table, gids[of_gids == time]
            yield from self._stored(frozen, time, range(group, group + 1))

    def take_over(self, page: KeyedTable[V], time: int, watermark: int) -> T:
        """The output of rows of one time that were put together in another table.

        They are kept, and not in memory, if rows may still come to them.
        """
        gids = np.arange(len(page), dtype=np.int32)
        piece = self._fire_page(page, gids)
        if time + self._timing.reach_us + self._timing.lateness_us > watermark:
            self.table.put_page(page, gids, came=True)
            self._buckets.fired(time)
        return piece

    def expired(self, watermark: int) -> Iterator[None]:
        """Remove the rows outside of memory that are to be forgotten, a piece at a time."""
        ending = self._buckets.ending(watermark)
        if self._spill is None or not self.table.scattered or not ending:
            return
        frozen = self._spill.rows.freeze()
        for time in ending:
            for page, _ in self._stored(frozen, time, self._owned):
                self.table.delete_page(page, np.arange(len(page), dtype=np.int32))
                yield
        frozen.release()

    def pass_by(self, watermark: int) -> None:
        """Forget rows that do not come out themselves, once a watermark has passed them."""
        self._buckets.due(watermark)
        self.forget(watermark)

    # -- snapshots

    def frozen(self, checkpoint_id: int) -> FrozenTimedTable[V]:
        """The rows as they are now, for another thread."""
        return FrozenTimedTable(self.table.frozen(checkpoint_id), self._buckets.live_parts())


class FrozenTimedTable(Generic[V]):
    """The rows of a ``TimedTable`` at one instant."""

    def __init__(self, table: KeyedTable[V], live: list[GroupIds]) -> None:
        self.table, self._live = table, live

    def parts(self, changed: Changed | None = None) -> Iterator[tuple[KeyedTable[V], GroupIds, SegmentKind]]:
        """See ``KeyedTable.parts``."""
        live = join_gids(self._live)
        for part, gids, kind in self.table.parts(changed):
            yield part, np.intersect1d(gids, live, assume_unique=True) if part is self.table else gids, kind

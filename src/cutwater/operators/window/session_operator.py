"""Session windows: rows of a key that follow each other within a gap."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.words import fixed_view, from_words
from cutwater.operators.aggregate.accumulators import Accumulator
from cutwater.operators.aggregate.keyed_operator import AggregateTable, aggregate_layout
from cutwater.operators.base import Outputs
from cutwater.operators.window import kernels
from cutwater.operators.window.kinds import SessionWindow
from cutwater.operators.window.operator import Times, WindowOperator
from cutwater.operators.window.table import Fold
from cutwater.state.key_index import GroupIds, KeyIndex
from cutwater.state.segments import Segment, SegmentKind
from cutwater.state.table.changes import Changed, Deleted
from cutwater.state.table.keyed_segments import RestoredRows, group_segments
from cutwater.state.table.keyed_table import KeyedTable
from cutwater.state.table.multi_row_keys import FrozenMultiRowKeys, MultiRowKeys, all_gids
from cutwater.state.table.row_store import grown
from cutwater.state.table.timed_table import Passed, Pieces

if TYPE_CHECKING:
    from cutwater.operators.window.operator import MakeSegments
    from cutwater.operators.window.spec import WindowAggregateSpec
    from cutwater.state.backend import StateBackend

_SWEEP_GROUP_IDS = 8192
_BUCKETS_PER_GAP = 16
_MS_US = 1000


class GroupIdCalendar:
    """A rough queue: group ids lie in buckets of time, and come back when the bucket begins.

    What an instant means may change meanwhile: whoever takes gids out looks whether it is time, and puts the others
    in again.

    Args:
        width_us: length of a bucket.

    >>> calendar = GroupIdCalendar(10)
    >>> calendar.add(np.array([4, 5, 6], np.int32), np.array([12, 27, 19]))
    >>> calendar.take(15).tolist(), calendar.take(15).tolist()
    ([4, 6], [])
    """

    def __init__(self, width_us: int) -> None:
        self._width_us = width_us
        self._buckets: dict[int, list[GroupIds]] = {}
        self._order: list[int] = []

    def add(self, gids: GroupIds, instants: npt.NDArray[np.int64]) -> None:
        """Put group ids in."""
        if len(gids) == 0:
            return
        numbers = instants // self._width_us
        order = np.argsort(numbers, kind="stable")
        gids, numbers = gids[order], numbers[order]
        cuts = (np.flatnonzero(np.diff(numbers)) + 1).tolist()
        for begin, end in itertools.pairwise([0, *cuts, len(gids)]):
            number = int(numbers[begin])
            if number not in self._buckets:
                self._buckets[number] = []
                heapq.heappush(self._order, number)
            self._buckets[number].append(gids[begin:end])

    @property
    def next_instant(self) -> int | None:
        """The last instant of the earliest bucket; ``None``: there is none.

        >>> calendar = GroupIdCalendar(10)
        >>> calendar.add(np.array([4], np.int32), np.array([12]))
        >>> calendar.next_instant
        19
        """
        return self._order[0] * self._width_us + self._width_us - 1 if self._order else None

    def take(self, now: int) -> GroupIds:
        """Take out all group ids of the buckets that have begun, each once."""
        found: list[GroupIds] = []
        while self._order and self._order[0] * self._width_us <= now:
            found += self._buckets.pop(heapq.heappop(self._order))
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int32)


class Side(IntEnum):
    """Side columns of the table: what there is of a session besides its key and values."""

    STARTS = 0
    ENDS = 1
    PENDING = 2
    """Rows that have not come out."""
    ALIVE = 3
    FIRED = 4
    ANCHORS = 5
    """The anchor of the key plus one; 0: it is the anchor."""


SIDES = (np.int64, np.int64, np.int64, np.bool_, np.bool_, np.int32)
"""Their types."""


def anchors_of(table: AggregateTable, gids: GroupIds) -> GroupIds:
    """The anchor of each group id's key, which may be the group id itself."""
    anchors = table.side(Side.ANCHORS)[gids]
    return np.where(anchors > 0, anchors - 1, gids).astype(np.int32)


def state_rows(spec: WindowAggregateSpec, table: AggregateTable, gids: GroupIds) -> list[pa.Array]:
    """The columns of ``spec.state_schema`` for some group ids, which are live sessions."""
    _, *columns = table.rows(gids)
    width = len(spec.keys)
    borders = [from_words(table.side(side)[gids], spec.time_type) for side in (Side.STARTS, Side.ENDS)]
    window = [*borders, pa.array(table.side(Side.FIRED)[gids])]
    if spec.early is not None:
        window.append(pa.array(table.side(Side.PENDING)[gids]))
    return [*columns[:width], *window, *columns[width:]]


@dataclass(frozen=True)
class Taken:
    """The fate of some rows."""

    stop: int
    """The first row that was not taken."""
    late: npt.NDArray[np.bool_]
    """Of the rows taken."""
    outputs: Outputs


class SessionTable:
    """Group ids are sessions.  Those of a key are chained from its *anchor*, the group id of its session number 0.

    A group id whose session is over or was swallowed by another is dead, and swept out in time; a dead anchor stays
    while its key has other sessions.
    """

    def __init__(self, spec: WindowAggregateSpec, backend: StateBackend | None = None) -> None:
        assert isinstance(spec.window, SessionWindow)
        self._spec = spec
        self._gap_us = spec.window.gap_us
        types = [pa.int64(), *(field.type for field in spec.key_fields)]
        self.table: AggregateTable = KeyedTable(types, aggregate_layout(spec.kept, spec.input_schema), SIDES)
        self._fold = Fold(spec.kept, spec.input_schema, discarding=spec.discarding)
        self._calendar = self._new_calendar()
        self._limit = (spec.early.rows or 0) if spec.early else 0
        self._kept_gids = 0
        self._taken, self._came_out = np.zeros(0, np.int64), np.zeros(0, np.bool_)
        self._nexts, self._parents = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self._keys = None if backend is None or backend.in_memory else self._multi_row_keys(backend)
        """Keys with their sessions, where they may lie outside of memory."""

    def empty_page(self) -> MultiRowKeys[Accumulator]:
        """A small table of the same make without rows."""
        page = SessionTable(self._spec)
        page._keys = page._multi_row_keys(None)
        return page._keys

    def _multi_row_keys(self, backend: StateBackend | None) -> MultiRowKeys[Accumulator]:
        types, keys, early = self._spec.state_schema.types, len(self._spec.keys), self._spec.early
        room = None if backend is None else backend.room()
        return MultiRowKeys(types[:keys], types[keys:], self, room, early=early is not None and early.rows is None)

    def make_room(self) -> None:
        """Between batches, when nobody holds group ids: move keys out if there are too many, a part at a time."""
        if self._keys is not None:
            self._keys.make_room()

    @property
    def _starts(self) -> Times:
        return self.table.side(Side.STARTS)

    @property
    def _ends(self) -> Times:
        return self.table.side(Side.ENDS)

    @property
    def _pending(self) -> Times:
        """Rows that have not come out, by group id."""
        return self.table.side(Side.PENDING)

    @property
    def _alive(self) -> npt.NDArray[np.bool_]:
        return self.table.side(Side.ALIVE)

    @property
    def _fired(self) -> npt.NDArray[np.bool_]:
        return self.table.side(Side.FIRED)

    def _new_calendar(self) -> GroupIdCalendar:
        """By the clock a bucket is a millisecond: the clock wakes whoever lies in it, and all of them should be due."""
        by_clock = self._spec.window.processing_time
        return GroupIdCalendar(_MS_US if by_clock else max(1, self._gap_us // _BUCKETS_PER_GAP))

    def _reserve(self, gids: int) -> None:
        self.table.reserve(gids)
        used = len(self._taken)
        if gids <= used:
            return
        for name, fill in (("_taken", 0), ("_came_out", 0), ("_nexts", -1), ("_parents", -1)):
            setattr(self, name, grown(getattr(self, name), used, 2 * gids, fill))

    def _touch(self, gids: GroupIds) -> None:
        """These sessions are about to change.  A change is one of the whole key: its anchor stands for it."""
        anchors = anchors_of(self.table, gids)
        self.table.touch(gids)
        self.table.touch(anchors)
        if self._keys is not None:
            self._keys.use(anchors)

    # -- rows

    def anchors(self, keys: Sequence[pa.Array]) -> GroupIds:
        """The anchor of each of some keys."""
        if self._keys is not None:
            return self._keys.anchors(keys)
        return self.insert(keys)

    def upsert(self, ids: npt.NDArray[np.int64], keys: Sequence[pa.Array]) -> GroupIds:
        """Group ids of the sessions with these numbers."""
        gids = self.table.upsert([from_words(ids, pa.int64()), *keys])
        self._reserve(len(self.table))
        return gids

    def insert(self, keys: Sequence[pa.Array]) -> GroupIds:
        """Make the anchors of new keys."""
        return self.upsert(np.zeros(len(keys[0]), np.int64), keys)

    def members(self, anchors: GroupIds) -> tuple[GroupIds, npt.NDArray[np.int64]]:
        """The live sessions of some keys, one key after the other, and which of the keys each belongs to."""
        out: GroupIds = np.empty(len(self.table), np.int32)
        gids = out[: kernels.members(anchors, self._nexts, out)]
        owners = np.cumsum(anchors_of(self.table, gids) == gids) - 1  # each chain begins with its anchor
        alive = self._alive[gids]
        return gids[alive], owners[alive]

    def take(self, begin: int, batch: pa.RecordBatch, times: Times, anchors: GroupIds, reached: Times) -> Taken:
        """Take rows from ``begin`` on, as many as go at once.

        Args:
            begin: first row to take.
            batch: all rows.
            times: event times of all rows.
            anchors: of all rows.
            reached: the watermark of each row, or one for all.
        """
        rows = batch.num_rows
        used = len(self.table)
        self._reserve(used + rows - begin)
        gids: GroupIds = np.empty(rows, np.int32)
        new_rows, begun, gone = (np.empty(most, np.int32) for most in (rows, 2 * rows, used + rows))
        new_ids, borders, fire = np.empty(rows, np.int64), np.empty((rows, 2), np.int64), np.empty(rows, np.bool_)
        if self.table.capturing:  # the anchors are marked; whatever hangs on them may change, too
            members: GroupIds = np.empty(used, np.int32)
            self.table.touch(members[: kernels.members(np.unique(anchors), self._nexts, members)])
        settings = (self._gap_us, self._spec.allowed_lateness_us, self._limit)
        state = (self._starts, self._ends, self._alive, self._nexts, self._taken, self._pending, self._fired)
        by_gid = (*state, self._came_out, self._parents)
        out = (gids, borders, fire, new_rows, new_ids, begun, gone)
        taken = kernels.take_rows(begin, times, anchors, settings, reached, used, by_gid, out)
        stop, created, started, swallowed, firing, late = taken
        self._create(batch, anchors, new_rows[:created], new_ids[:created])
        self._swallow(gone[:swallowed])
        part = slice(begin, stop)
        batch, gids, borders, fire = batch.slice(begin, stop - begin), gids[part], borders[part], fire[part]
        lost = gids < 0
        if late:
            batch, gids, borders, fire = batch.filter(pa.array(~lost)), gids[~lost], borders[~lost], fire[~lost]
        self._came_out[gids] = False
        kernels.resolve(gids, self._parents)
        outputs = self._fold_rows(batch, gids, borders, fire, firing)
        self._expect(np.unique(begun[:started]))
        return Taken(int(stop), lost, outputs)

    def _create(self, batch: pa.RecordBatch, anchors: GroupIds, rows: GroupIds, ids: npt.NDArray[np.int64]) -> None:
        if len(rows):
            taken: Any = pa.array(rows)
            gids = self.upsert(ids, [batch.column(name).take(taken) for name in self._spec.keys])
            self.table.side(Side.ANCHORS)[gids] = anchors[rows] + 1

    def _swallow(self, gone: GroupIds) -> None:
        """Move the values of sessions that are no more to those that hold their rows."""
        if len(gone) == 0:
            return
        into = gone.copy()
        kernels.resolve(into, self._parents)
        self.table.touch(into)
        for accumulator in self.table.accumulators:
            accumulator.merge(into, accumulator.state(gone))

    def _fold_rows(
        self, batch: pa.RecordBatch, gids: GroupIds, borders: Times, fire: npt.NDArray[np.bool_], firing: int
    ) -> Outputs:
        self.table.touch(gids)
        if not firing:
            for accumulator in self.table.accumulators:
                accumulator.update(gids, batch)
            return []
        columns = self._fold.rows(self.table, gids, batch, fire)
        mask: Any = pa.array(fire)
        keys = [batch.column(name).filter(mask) for name in self._spec.keys]
        return self._output(keys, borders[fire, 0], borders[fire, 1], columns)

    # -- firing

    def instants(self, gids: GroupIds) -> Times:
        """The times to look at sessions: their last instants, and once they have fired, the end of their lateness."""
        return self._ends[gids] - 1 + np.where(self._fired[gids], self._spec.allowed_lateness_us, 0)

    def waiting(self, gids: GroupIds) -> npt.NDArray[np.bool_]:
        """Mask of the sessions that have not fired and have rows that have not come out."""
        return (self._pending[gids] > 0) & ~self._fired[gids]

    def _expect(self, gids: GroupIds) -> None:
        gids = gids[self._alive[gids]]
        self._calendar.add(gids, self.instants(gids))

    def due(self, watermark: int) -> Pieces[Outputs]:
        """The output of now, in the order of time as far as it lies in memory; each session fires once."""
        keys, later = self._keys, None
        if keys is not None and keys.due(watermark):
            later = (self._results(self._due(watermark)) for _ in keys.bring_due(watermark))
        return Pieces(self._results, self._due(watermark), later)

    def _due(self, watermark: int) -> GroupIds:
        """Sessions that fire now, in the order of their ends; those that are over are dead from now on."""
        gids = self._calendar.take(watermark)
        gids = gids[self._alive[gids]]
        self._touch(gids)
        last = self._ends[gids] - 1
        firing = gids[~self._fired[gids] & (last <= watermark)]
        self._fired[firing] = True
        over = self._fired[gids] & (last + self._spec.allowed_lateness_us <= watermark)
        self._alive[gids[over]] = False
        self._expect(gids[~over])
        if self._spec.discarding and self._spec.early is not None:
            firing = firing[self._pending[firing] > 0]
        self._pending[firing] = 0
        return firing[np.argsort(self._ends[firing], kind="stable")]

    @property
    def next_instant(self) -> int | None:
        """At which watermark sessions want to be looked at next, also those that go on meanwhile; ``None``: never."""
        waiting = (self._calendar.next_instant, None if self._keys is None else self._keys.next_instant)
        return min((instant for instant in waiting if instant is not None), default=None)

    def changed(self, passed: Passed, most: int) -> Pieces[Outputs]:
        """The early output, in the order of time: sessions that have not fired, with rows that have not come out.

        Args:
            passed: whether it is time for them.
            most: how many group ids in memory at most.
        """
        keys, later = self._keys, None
        if keys is not None:
            later = (self._results(self._changed(gids, passed, len(gids))) for gids in keys.bring_waiting())
        gids = np.flatnonzero(self._alive[: len(self.table)]).astype(np.int32)
        return Pieces(self._results, self._changed(gids, passed, most), later)

    def _changed(self, gids: GroupIds, passed: Passed, most: int) -> GroupIds:
        """``changed`` among some live sessions."""
        gids = gids[self.waiting(gids)]
        gids = gids[np.broadcast_to(passed(lambda: self.keys(gids)), len(gids))]
        gids = gids[np.argsort(self._ends[gids], kind="stable")][:most]
        self._touch(gids)
        self._pending[gids] = 0
        return gids

    def _results(self, gids: GroupIds) -> Outputs:
        """The results of some group ids; what is discarded is gone then."""
        columns = [accumulator.result(gids) for accumulator in self.table.accumulators]
        output = self._output(self.keys(gids), self._starts[gids], self._ends[gids], columns)
        self._fold.begin_anew(self.table, gids)
        return output

    def times(self, gids: GroupIds) -> Times:
        """The ends of the sessions of some group ids."""
        return self._ends[gids]

    def times_in(self, batch: pa.RecordBatch) -> Times:
        """``times`` of results."""
        return fixed_view(batch.column(len(self._spec.keys) + 1), np.int64)

    def keys(self, gids: GroupIds) -> list[pa.Array]:
        """The key columns of some group ids."""
        return self.table.index.columns(gids)[1:]

    def _output(self, keys: list[pa.Array], starts: Times, ends: Times, columns: list[pa.Array]) -> Outputs:
        borders = [from_words(np.ascontiguousarray(side), self._spec.time_type) for side in (starts, ends)]
        return [(0, pa.RecordBatch.from_arrays([*keys, *borders, *columns], schema=self._spec.outputs[0]))]

    def forget(self, watermark: int) -> None:
        """Sweep the dead group ids out if they are many."""
        used = len(self.table)
        if used > max(_SWEEP_GROUP_IDS, 2 * self._kept_gids) and used >= 2 * np.count_nonzero(self._alive[:used]):
            self.sweep()

    def sweep(self) -> None:
        """Sweep the dead group ids out; nobody holds group ids."""
        every = np.arange(len(self.table), dtype=np.int32)
        anchors = anchors_of(self.table, every)
        live = np.unique(anchors[self._alive[every]])
        gone = np.setdiff1d(every[anchors == every], live, assume_unique=True)
        if self._keys is not None:
            self._keys.forget(gone)
        else:
            self.table.delete(gone)
        self.retain(live)

    def retain(self, anchors: GroupIds) -> None:
        """Only the keys of these anchors stay, and of them the live sessions, which are numbered anew."""
        every = np.arange(len(self.table), dtype=np.int32)
        stays, of_gids = np.zeros(len(every), np.bool_), anchors_of(self.table, every)
        stays[anchors] = True
        kept = every[(self._alive[every] & stays[of_gids]) | stays]
        renumbered = np.full(len(every), -1, np.int32)
        renumbered[kept] = np.arange(len(kept), dtype=np.int32)
        is_anchor = stays[kept]
        self.table.keep(kept)
        for name in ("_taken", "_came_out"):
            setattr(self, name, getattr(self, name)[kept])
        of_kept = np.where(is_anchor, -1, renumbered[of_gids[kept]]).astype(np.int32)
        self.table.side(Side.ANCHORS)[: len(kept)] = of_kept + 1
        numbers = np.arange(len(kept), dtype=np.int32)
        alive = self._alive[: len(kept)]
        self._parents = np.where(alive, numbers, -1).astype(np.int32)
        self._nexts = np.full(len(kept), -1, np.int32)
        kernels.link(numbers[~is_anchor], of_kept[~is_anchor], self._nexts)
        if not alive.all():
            self._fold.clear(self.table, numbers[~alive])
        self._kept_gids = len(kept)
        self._calendar = self._new_calendar()
        self._expect(numbers)
        if self._keys is not None:
            self._keys.renumbered(renumbered)

    # -- snapshots

    def frozen(self, checkpoint_id: int) -> tuple[AggregateTable, MakeSegments]:
        """The table as it is now, and a function that makes its segments."""
        keys = None if self._keys is None else self._keys.frozen(checkpoint_id)
        table = self.table.frozen(checkpoint_id) if keys is None else keys.table
        return table, FrozenSessions(self._spec, table, keys).segments

    @property
    def restored(self) -> RestoredRows:
        """The rows that a restore sets."""
        return self._keys or self.table

    def index(self, identity: list[pa.Array]) -> list[pa.Array]:
        """The columns of the table's index, from those by which snapshots tell sessions apart."""
        return identity

    def restore(self, batch: pa.RecordBatch) -> None:
        """Set rows of ``state_schema``."""
        self.add(batch.columns)

    def state_rows(self, gids: GroupIds) -> list[pa.Array]:
        """The columns of ``state_schema`` for some live sessions."""
        return state_rows(self._spec, self.table, gids)

    def add(self, columns: Sequence[pa.Array]) -> None:
        """Set sessions to columns of ``state_schema``."""
        width, window = len(self._spec.keys), len(self._spec.window_fields)
        keys, facts, state = columns[:width], columns[width : width + window], columns[width + window :]
        anchors = self.anchors(keys)
        ids = np.empty(len(columns[0]), np.int64)
        kernels.place(anchors, self._parents, self._taken, ids)
        gids = self.table.restore([from_words(ids, pa.int64()), *keys], state)
        self._reserve(len(self.table))
        self._starts[gids], self._ends[gids] = (fixed_view(side, np.int64) for side in facts[:2])
        self._fired[gids] = facts[2].to_numpy(zero_copy_only=False)
        if self._spec.early is not None:
            self._pending[gids] = facts[3].to_numpy()
        self._alive[gids] = True
        self._parents[gids] = gids
        chained = gids != anchors
        self.table.side(Side.ANCHORS)[gids[chained]] = anchors[chained] + 1
        kernels.link(gids, anchors, self._nexts)
        self._expect(gids)


class FrozenSessions:
    """Sessions at one instant, for another thread.

    A change is one of a whole key: an increment takes all rows of the key away, and has those that there are now.

    Args:
        spec: of the windows.
        table: the frozen table.
        keys: the same by key, where they may lie outside of memory.
    """

    def __init__(
        self, spec: WindowAggregateSpec, table: AggregateTable, keys: FrozenMultiRowKeys[Accumulator] | None
    ) -> None:
        self._spec, self._table, self._keys = spec, table, keys
        self._width = len(spec.keys)

    def segments(self, name: str, groups: int, changed: Changed | None) -> Iterator[Segment]:
        """All segments, or those of what changed; see ``MakeSegments``."""
        table, every, keys = self._table, all_gids(self._table), self._keys
        if changed is None:
            live = every[table.side(Side.ALIVE)[every]]
            here: list[tuple[AggregateTable, GroupIds, SegmentKind]] = [(table, live, "base")]
            for part, gids, kind in here if keys is None else keys.parts(live, self._rows_in(table)):
                yield from self._write(name, groups, part, gids, kind)
            return
        for deleted in changed.deleted:
            yield from self._without(name, groups, deleted)
        for page in () if keys is None else keys.journal(changed.epoch):
            yield from self._without(name, groups, Deleted(page.index, all_gids(page)))
            yield from self._write(name, groups, page.table, all_gids(page.table), "delta")
        anchors = anchors_of(table, every)
        of_changed = np.zeros(len(table), np.bool_)
        of_changed[anchors[changed.gids]] = True
        yield from self._without(name, groups, Deleted(table.index, np.flatnonzero(of_changed).astype(np.int32)))
        yield from self._write(name, groups, table, every[table.side(Side.ALIVE)[every] & of_changed[anchors]], "delta")

    def _write(
        self, name: str, groups: int, table: AggregateTable, gids: GroupIds, kind: SegmentKind
    ) -> Iterator[Segment]:
        keys, rows = self._keys_in(table.index), self._rows_in(table)
        return group_segments(name, self._spec.state_schema, gids, keys, rows, groups, kind)

    def _without(self, name: str, groups: int, deleted: Deleted) -> Iterator[Segment]:
        schema, keys = pa.schema(list(self._spec.state_schema)[: self._width]), self._keys_in(deleted.index)
        return group_segments(name, schema, deleted.gids, keys, keys, groups, "delete")

    def _keys_in(self, index: KeyIndex) -> Callable[[GroupIds], list[pa.Array]]:
        """The key columns of some group ids: sessions have a number before them."""
        return lambda gids: index.columns(gids)[-self._width :]

    def _rows_in(self, table: AggregateTable) -> Callable[[GroupIds], list[pa.Array]]:
        return partial(state_rows, self._spec, table)


class SessionAggregate(WindowOperator[SessionTable]):
    """Rows extend sessions and merge them, one by one in the order in which they come.

    A session that has fired and goes on fires again at its new end, under its new borders.
    """

    def _clear(self) -> None:
        super()._clear()
        self._windows = SessionTable(self._spec, self._backend)

    def _take(self, batch: pa.RecordBatch, reached: Times) -> Outputs:
        self._windows.make_room()
        times = self._times(batch)
        anchors = self._windows.anchors([batch.column(name) for name in self._spec.keys])
        numbered = self._number(batch)
        outputs: Outputs = []
        late = np.zeros(batch.num_rows, np.bool_)
        begin = 0
        while begin < batch.num_rows:
            taken = self._windows.take(begin, numbered, times, anchors, reached)
            late[begin : taken.stop] = taken.late
            outputs += taken.outputs
            begin = taken.stop
        return self._late(batch, late) + outputs

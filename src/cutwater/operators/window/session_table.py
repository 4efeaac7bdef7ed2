"""Sessions and their values: one table keyed by (number within the key, key)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.words import fixed_view, from_words
from cutwater.operators.aggregate.keyed_table import KeyedTable
from cutwater.operators.base import Outputs
from cutwater.operators.window import session_kernels as kernels
from cutwater.operators.window.fold import Fold
from cutwater.operators.window.kinds import SessionWindow
from cutwater.operators.window.session_keys import SessionKeys
from cutwater.operators.window.session_rows import BOOKS, Book, FrozenSessions, anchors_of
from cutwater.operators.window.slot_calendar import SlotCalendar
from cutwater.state.index.key_index import Slots

if TYPE_CHECKING:
    from cutwater.operators.base import Context
    from cutwater.operators.window.spec import WindowAggregateSpec
    from cutwater.operators.window.stored_windows import MakeSegments, Times
    from cutwater.state.disk.rocks import RocksStore
    from cutwater.state.table.spill import Spill

_SWEEP_SLOTS = 8192
_BUCKETS_PER_GAP = 16
_MS_US = 1000


@dataclass(frozen=True)
class Taken:
    """What became of some rows."""

    stop: int
    """The first row that was not taken."""
    late: npt.NDArray[np.bool_]
    """Of the rows taken."""
    outputs: Outputs


class SessionTable:
    """Slots are sessions.  Those of a key are chained from its *anchor*, the slot numbered 0 of the key.

    A slot whose session is over or was swallowed by another is dead, and swept out in time; a dead anchor stays while
    its key has other sessions.
    """

    def __init__(self, spec: WindowAggregateSpec) -> None:
        assert isinstance(spec.window, SessionWindow)
        self._spec = spec
        self._gap_us = spec.window.gap_us
        types = [pa.int64(), *(spec.input_schema.field(name).type for name in spec.keys)]
        self.table = KeyedTable(types, spec.kept, spec.input_schema, books=BOOKS)
        self._fold = Fold(spec.kept, spec.input_schema, discarding=spec.discarding)
        self._calendar = self._new_calendar()
        self._limit = (spec.early.rows or 0) if spec.early else 0
        self._kept_slots = 0
        self._taken, self._came_out = np.zeros(0, np.int64), np.zeros(0, np.bool_)
        self._nexts, self._parents = np.zeros(0, np.int32), np.zeros(0, np.int32)
        self._keys: SessionKeys | None = None
        """Where keys may lie on disk."""

    def spill_to(self, store: RocksStore, ctx: Context) -> None:
        """Keep keys with their sessions on disk that do not fit in memory; the table is empty."""
        self._keys = SessionKeys(self._spec, self)
        self._keys.spill_to(store, ctx)

    def empty_page(self) -> SessionKeys:
        """A small table of the same make without rows."""
        page = SessionTable(self._spec)
        page._keys = SessionKeys(self._spec, page)
        return page._keys

    @property
    def spill(self) -> Spill[SessionKeys] | None:
        """What moves keys to disk, if anything does."""
        return None if self._keys is None else self._keys.spill

    def make_room(self) -> None:
        """Between batches, when nobody holds slots: move keys out if there are too many, a portion at a time."""
        if self._keys is not None:
            self._keys.make_room()

    def __len__(self) -> int:
        return len(self.table)

    def expect(self, keys: int) -> None:
        """Have room for so many sessions at once, if there are none yet."""
        self.table.expect(keys)

    @property
    def _starts(self) -> Times:
        return self.table.book(Book.STARTS)

    @property
    def _ends(self) -> Times:
        return self.table.book(Book.ENDS)

    @property
    def _pending(self) -> Times:
        """Rows that have not come out, by slot."""
        return self.table.book(Book.PENDING)

    @property
    def _alive(self) -> npt.NDArray[np.bool_]:
        return self.table.book(Book.ALIVE)

    @property
    def _fired(self) -> npt.NDArray[np.bool_]:
        return self.table.book(Book.FIRED)

    def _new_calendar(self) -> SlotCalendar:
        """By the clock a bucket is a millisecond: the clock wakes whoever lies in it, and all of them should be due."""
        by_clock = self._spec.window.processing_time
        return SlotCalendar(_MS_US if by_clock else max(1, self._gap_us // _BUCKETS_PER_GAP))

    def _reserve(self, slots: int) -> None:
        self.table.reserve(slots)
        used = len(self._taken)
        if slots <= used:
            return
        for name, fill in (("_taken", 0), ("_came_out", 0), ("_nexts", -1), ("_parents", -1)):
            setattr(self, name, _grown(getattr(self, name), used, 2 * slots, fill))

    def _touch(self, slots: Slots) -> None:
        """These sessions are about to change.  A change is one of the whole key: its anchor stands for it."""
        anchors = anchors_of(self.table, slots)
        self.table.touch(slots)
        self.table.touch(anchors)
        if self._keys is not None:
            self._keys.use(anchors)

    # -- rows

    def anchors(self, keys: Sequence[pa.Array]) -> Slots:
        """The anchor of each of some keys."""
        if self._keys is not None:
            return self._keys.anchors(keys)
        return self.upsert(np.zeros(len(keys[0]), np.int64), keys)

    def upsert(self, ids: npt.NDArray[np.int64], keys: Sequence[pa.Array]) -> Slots:
        """Slots of the sessions with these numbers."""
        slots = self.table.upsert([from_words(ids, pa.int64()), *keys])
        self._reserve(len(self.table))
        return slots

    def members(self, anchors: Slots) -> tuple[Slots, npt.NDArray[np.int64]]:
        """The live sessions of some keys, one key after the other, and which of the keys each belongs to."""
        out: Slots = np.empty(len(self.table), np.int32)
        slots = out[: kernels.members(anchors, self._nexts, out)]
        owners = np.cumsum(anchors_of(self.table, slots) == slots) - 1  # each chain begins with its anchor
        alive = self._alive[slots]
        return slots[alive], owners[alive]

    def add(self, begin: int, batch: pa.RecordBatch, times: Times, anchors: Slots, reached: Times) -> Taken:
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
        slots: Slots = np.empty(rows, np.int32)
        new_rows, begun, gone = (np.empty(most, np.int32) for most in (rows, 2 * rows, used + rows))
        new_ids, borders, fire = np.empty(rows, np.int64), np.empty((rows, 2), np.int64), np.empty(rows, np.bool_)
        if self.table.capturing:  # the anchors are marked; whatever hangs on them may change, too
            members: Slots = np.empty(used, np.int32)
            self.table.touch(members[: kernels.members(np.unique(anchors), self._nexts, members)])
        settings = (self._gap_us, self._spec.allowed_lateness_us, self._limit)
        state = (self._starts, self._ends, self._alive, self._nexts, self._taken, self._pending, self._fired)
        by_slot = (*state, self._came_out, self._parents)
        out = (slots, borders, fire, new_rows, new_ids, begun, gone)
        taken = kernels.take_rows(begin, times, anchors, settings, reached, used, by_slot, out)
        stop, created, started, swallowed, firing, late = taken
        self._create(batch, anchors, new_rows[:created], new_ids[:created])
        self._swallow(gone[:swallowed])
        part = slice(begin, stop)
        batch, slots, borders, fire = batch.slice(begin, stop - begin), slots[part], borders[part], fire[part]
        lost = slots < 0
        if late:
            batch, slots, borders, fire = batch.filter(pa.array(~lost)), slots[~lost], borders[~lost], fire[~lost]
        self._came_out[slots] = False
        kernels.resolve(slots, self._parents)
        outputs = self._fold_rows(batch, slots, borders, fire, firing)
        self._expect(np.unique(begun[:started]))
        return Taken(int(stop), lost, outputs)

    def _create(self, batch: pa.RecordBatch, anchors: Slots, rows: Slots, ids: npt.NDArray[np.int64]) -> None:
        if len(rows):
            taken: Any = pa.array(rows)
            slots = self.upsert(ids, [batch.column(name).take(taken) for name in self._spec.keys])
            self.table.book(Book.ANCHORS)[slots] = anchors[rows] + 1

    def _swallow(self, gone: Slots) -> None:
        """Move the values of sessions that are no more to those that hold their rows."""
        if len(gone) == 0:
            return
        into = gone.copy()
        kernels.resolve(into, self._parents)
        self.table.touch(into)
        for accumulator in self.table.accumulators:
            accumulator.merge(into, accumulator.state(gone))

    def _fold_rows(
        self, batch: pa.RecordBatch, slots: Slots, borders: Times, fire: npt.NDArray[np.bool_], firing: int
    ) -> Outputs:
        self.table.touch(slots)
        if not firing:
            for accumulator in self.table.accumulators:
                accumulator.update(slots, batch)
            return []
        columns = self._fold.rows(self.table, slots, batch, fire)
        mask: Any = pa.array(fire)
        keys = [batch.column(name).filter(mask) for name in self._spec.keys]
        return self._output(keys, borders[fire, 0], borders[fire, 1], columns)

    # -- firing

    def instants(self, slots: Slots) -> Times:
        """When to look at sessions: at their last instant, and once they have fired, at the end of their lateness."""
        return self._ends[slots] - 1 + np.where(self._fired[slots], self._spec.allowed_lateness_us, 0)

    def _expect(self, slots: Slots) -> None:
        slots = slots[self._alive[slots]]
        self._calendar.add(slots, self.instants(slots))

    def due(self, watermark: int) -> Slots:
        """Sessions that fire now, in the order of their ends; those that are over are dead from now on."""
        slots = self._calendar.take(watermark)
        slots = slots[self._alive[slots]]
        self._touch(slots)
        last = self._ends[slots] - 1
        firing = slots[~self._fired[slots] & (last <= watermark)]
        self._fired[firing] = True
        over = self._fired[slots] & (last + self._spec.allowed_lateness_us <= watermark)
        self._alive[slots[over]] = False
        self._expect(slots[~over])
        if self._spec.discarding and self._spec.early is not None:
            firing = firing[self._pending[firing] > 0]
        self._pending[firing] = 0
        return firing[np.argsort(self._ends[firing], kind="stable")]

    def fire_on_disk(self, watermark: int, groups: range) -> Iterator[Outputs] | None:
        """See ``Windows.fire_on_disk``: keys are brought in when the first of their sessions is due."""
        if self._keys is None or not self._keys.due(watermark):
            return None
        return (self.results(self.due(watermark)) for _ in self._keys.bring_due(watermark))

    @property
    def next_instant(self) -> int | None:
        """See ``Windows.next_instant``: sessions that go on meanwhile are looked at, too."""
        waiting = (self._calendar.next_instant, None if self._keys is None else self._keys.next_instant)
        return min((instant for instant in waiting if instant is not None), default=None)

    def changed(self, passed: Callable[[Slots], Any], most: int) -> Slots:
        """See ``Windows.changed``."""
        return self._changed(np.flatnonzero(self._alive[: len(self.table)]).astype(np.int32), passed, most)

    def _changed(self, slots: Slots, passed: Callable[[Slots], Any], most: int) -> Slots:
        """``changed`` among some live sessions."""
        slots = slots[~self._fired[slots] & (self._pending[slots] > 0)]
        slots = slots[np.broadcast_to(passed(slots), len(slots))]
        slots = slots[np.argsort(self._ends[slots], kind="stable")][:most]
        self._touch(slots)
        self._pending[slots] = 0
        return slots

    def changed_on_disk(self, passed: Callable[..., Any]) -> Iterator[Outputs]:
        """See ``Windows.changed_on_disk``: keys with such sessions are brought in."""
        if self._keys is not None:
            for slots in self._keys.bring_waiting():
                yield self.results(self._changed(slots, passed, len(slots)))

    def results(self, slots: Slots) -> Outputs:
        """The results of some slots; what is discarded is gone then."""
        columns = [accumulator.result(slots) for accumulator in self.table.accumulators]
        output = self._output(self.keys(slots), self._starts[slots], self._ends[slots], columns)
        self._fold.begin_anew(self.table, slots)
        return output

    def times(self, slots: Slots) -> Times:
        """When the sessions of some slots end."""
        return self._ends[slots]

    def times_in(self, batch: pa.RecordBatch) -> Times:
        """See ``Windows.times_in``."""
        return fixed_view(batch.column(len(self._spec.keys) + 1), np.int64)

    def keys(self, slots: Slots) -> list[pa.Array]:
        """The key columns of some slots."""
        return self.table.index.columns(slots)[1:]

    def _output(self, keys: list[pa.Array], starts: Times, ends: Times, columns: list[pa.Array]) -> Outputs:
        borders = [from_words(np.ascontiguousarray(side), self._spec.time_type) for side in (starts, ends)]
        return [(0, pa.RecordBatch.from_arrays([*keys, *borders, *columns], schema=self._spec.outputs[0]))]

    def forget(self, watermark: int) -> None:
        """Sweep the dead slots out if they are many."""
        used = len(self.table)
        if used > max(_SWEEP_SLOTS, 2 * self._kept_slots) and used >= 2 * np.count_nonzero(self._alive[:used]):
            self.sweep()

    def sweep(self) -> None:
        """Sweep the dead slots out; nobody holds slots."""
        every = np.arange(len(self.table), dtype=np.int32)
        anchors = anchors_of(self.table, every)
        live = np.unique(anchors[self._alive[every]])
        gone = np.setdiff1d(every[anchors == every], live, assume_unique=True)
        if self._keys is not None:
            self._keys.forget(gone)
        else:
            self.table.delete(gone)
        self.retain(live)

    def retain(self, anchors: Slots) -> None:
        """Only the keys of these anchors stay, and of them the live sessions, which are numbered anew."""
        every = np.arange(len(self.table), dtype=np.int32)
        stays, of_slots = np.zeros(len(every), np.bool_), anchors_of(self.table, every)
        stays[anchors] = True
        kept = every[(self._alive[every] & stays[of_slots]) | stays]
        renumbered = np.full(len(every), -1, np.int32)
        renumbered[kept] = np.arange(len(kept), dtype=np.int32)
        is_anchor = stays[kept]
        self.table.keep(kept)
        for name in ("_taken", "_came_out"):
            setattr(self, name, getattr(self, name)[kept])
        of_kept = np.where(is_anchor, -1, renumbered[of_slots[kept]]).astype(np.int32)
        self.table.book(Book.ANCHORS)[: len(kept)] = of_kept + 1
        numbers = np.arange(len(kept), dtype=np.int32)
        alive = self._alive[: len(kept)]
        self._parents = np.where(alive, numbers, -1).astype(np.int32)
        self._nexts = np.full(len(kept), -1, np.int32)
        kernels.link(numbers[~is_anchor], of_kept[~is_anchor], self._nexts)
        if not alive.all():
            self._fold.clear(self.table, numbers[~alive])
        self._kept_slots = len(kept)
        self._calendar = self._new_calendar()
        self._expect(numbers)
        if self._keys is not None:
            self._keys.renumbered(renumbered)

    # -- snapshots

    def frozen(self, checkpoint_id: int) -> tuple[KeyedTable, MakeSegments]:
        """The table as it is now, and a function that makes its segments."""
        table = self.table.frozen(checkpoint_id, self.spill)
        keys = None if self._keys is None else (self._keys.index.frozen(), self._keys.page)
        return table, FrozenSessions(self._spec, table, keys).segments

    @property
    def restored(self) -> SessionTable:
        """See ``Windows.restored``."""
        return self

    def index(self, identity: list[pa.Array]) -> list[pa.Array]:
        """See ``Windows.index``."""
        return identity

    def restore(self, batch: pa.RecordBatch) -> None:
        """Set rows of ``state_schema``."""
        width, window = len(self._spec.keys), len(self._spec.window_fields)
        columns = batch.columns
        keys, facts, state = columns[:width], columns[width : width + window], columns[width + window :]
        anchors = self.anchors(keys)
        ids = np.empty(batch.num_rows, np.int64)
        kernels.place(anchors, self._parents, self._taken, ids)
        slots = self.table.restore([from_words(ids, pa.int64()), *keys], state)
        self._reserve(len(self.table))
        self._starts[slots], self._ends[slots] = (fixed_view(side, np.int64) for side in facts[:2])
        self._fired[slots] = facts[2].to_numpy(zero_copy_only=False)
        if self._spec.early is not None:
            self._pending[slots] = facts[3].to_numpy()
        self._alive[slots] = True
        self._parents[slots] = slots
        chained = slots != anchors
        self.table.book(Book.ANCHORS)[slots[chained]] = anchors[chained] + 1
        kernels.link(slots, anchors, self._nexts)
        self._expect(slots)


def _grown(values: npt.NDArray[Any], used: int, size: int, fill: int) -> npt.NDArray[Any]:
    """A larger copy."""
    grown = np.full(size, fill, values.dtype)
    grown[:used] = values
    return grown

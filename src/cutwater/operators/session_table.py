"""Sessions and their values: one table keyed by (number within the key, key)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.operators import session_kernels as kernels
from cutwater.operators.base import Outputs
from cutwater.operators.keyed_table import KeyedTable, group_segments
from cutwater.operators.slot_calendar import SlotCalendar
from cutwater.operators.window_fold import Fold
from cutwater.operators.window_kinds import SessionWindow
from cutwater.state.index import Slots
from cutwater.state.segments import Segment
from cutwater.state.words import fixed_view, from_words

if TYPE_CHECKING:
    from cutwater.operators.window import WindowAggregateSpec
    from cutwater.operators.window_operator import Times

__all__ = ["SessionTable", "Taken"]

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
        self.table = KeyedTable(types, spec.kept, spec.input_schema)
        self._fold = Fold(spec.kept, spec.input_schema, discarding=spec.discarding)
        self._calendar = self._new_calendar()
        self._limit = (spec.early.rows or 0) if spec.early else 0
        self._kept_slots = 0
        self._starts, self._ends, self._pending, self._taken = (np.zeros(0, np.int64) for _ in range(4))
        self._alive, self._fired, self._came_out = (np.zeros(0, np.bool_) for _ in range(3))
        self._nexts, self._parents, self._anchors = (np.zeros(0, np.int32) for _ in range(3))

    def _new_calendar(self) -> SlotCalendar:
        """By the clock a bucket is a millisecond: the clock wakes whoever lies in it, and all of them should be due."""
        by_clock = self._spec.window.processing_time
        return SlotCalendar(_MS_US if by_clock else max(1, self._gap_us // _BUCKETS_PER_GAP))

    def _reserve(self, slots: int) -> None:
        used = len(self._starts)
        if slots <= used:
            return
        size = 2 * slots
        for name in ("_starts", "_ends", "_pending", "_taken", "_alive", "_fired", "_came_out"):
            setattr(self, name, _grown(getattr(self, name), used, size, 0))
        for name in ("_nexts", "_parents", "_anchors"):
            setattr(self, name, _grown(getattr(self, name), used, size, -1))

    # -- rows

    def anchors(self, batch: pa.RecordBatch) -> Slots:
        """The anchor of each row's key."""
        return self._upsert(np.zeros(batch.num_rows, np.int64), [batch.column(name) for name in self._spec.keys])

    def _upsert(self, ids: npt.NDArray[np.int64], keys: list[pa.Array]) -> Slots:
        slots = self.table.upsert([from_words(ids, pa.int64()), *keys])
        self._reserve(len(self.table))
        return slots

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
            slots = self._upsert(ids, [batch.column(name).take(taken) for name in self._spec.keys])
            self._anchors[slots] = anchors[rows]

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

    def _instants(self, slots: Slots) -> Times:
        """When to look at sessions: at their last instant, and once they have fired, at the end of their lateness."""
        return self._ends[slots] - 1 + np.where(self._fired[slots], self._spec.allowed_lateness_us, 0)

    def _expect(self, slots: Slots) -> None:
        slots = slots[self._alive[slots]]
        self._calendar.add(slots, self._instants(slots))

    def due(self, watermark: int) -> Slots:
        """Sessions that fire now, in the order of their ends; those that are over are dead from now on."""
        slots = self._calendar.take(watermark)
        slots = slots[self._alive[slots]]
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

    @property
    def next_instant(self) -> int | None:
        """See ``Windows.next_instant``: sessions that go on meanwhile are looked at, too."""
        return self._calendar.next_instant

    def changed(self, passed: Callable[[Slots], Any], most: int) -> Slots:
        """See ``Windows.changed``."""
        used = len(self.table)
        found = self._alive[:used] & ~self._fired[:used] & (self._pending[:used] > 0)
        slots = np.flatnonzero(found).astype(np.int32)
        slots = slots[np.broadcast_to(passed(slots), len(slots))]
        slots = slots[np.argsort(self._ends[slots], kind="stable")][:most]
        self._pending[slots] = 0
        return slots

    def results(self, slots: Slots) -> Outputs:
        """The results of some slots; what is discarded is gone then."""
        columns = [accumulator.result(slots) for accumulator in self.table.accumulators]
        output = self._output(self.keys(slots), self._starts[slots], self._ends[slots], columns)
        self._fold.begin_anew(self.table, slots)
        return output

    def keys(self, slots: Slots) -> list[pa.Array]:
        """The key columns of some slots."""
        return self.table.index.columns(slots)[1:]

    def _output(self, keys: list[pa.Array], starts: Times, ends: Times, columns: list[pa.Array]) -> Outputs:
        borders = [from_words(np.ascontiguousarray(side), self._spec.time_type) for side in (starts, ends)]
        return [(0, pa.RecordBatch.from_arrays([*keys, *borders, *columns], schema=self._spec.outputs[0]))]

    def forget(self, watermark: int) -> None:
        """Sweep the dead slots out if they are many."""
        used = len(self.table)
        if used <= max(_SWEEP_SLOTS, 2 * self._kept_slots):
            return
        alive = np.flatnonzero(self._alive[:used])
        if 2 * len(alive) > used:
            return
        kept_mask = self._alive[:used].copy()
        kept_mask[self._anchors[alive][self._anchors[alive] >= 0]] = True
        kept = np.flatnonzero(kept_mask).astype(np.int32)
        renumbered = np.full(used + 1, -1, np.int32)  # the last entry serves the -1 of an anchor
        renumbered[kept] = np.arange(len(kept), dtype=np.int32)
        self.table.keep(kept)
        for name in ("_starts", "_ends", "_pending", "_taken", "_alive", "_fired", "_came_out"):
            setattr(self, name, getattr(self, name)[kept])
        self._anchors = renumbered[self._anchors[kept]]
        numbers = np.arange(len(kept), dtype=np.int32)
        self._parents = np.where(self._alive, numbers, -1).astype(np.int32)
        self._nexts = np.full(len(kept), -1, np.int32)
        chained = self._anchors >= 0
        kernels.link(numbers[chained], self._anchors[chained], self._nexts)
        self._fold.clear(self.table, numbers[~self._alive])
        self._kept_slots = len(kept)
        self._calendar = self._new_calendar()
        self._expect(numbers)

    # -- snapshots

    def frozen(self) -> tuple[KeyedTable, Callable[[str, int], Iterator[Segment]]]:
        """A copy of the table, and a function that makes its segments from a name and the number of key groups."""
        table = self.table.frozen()
        used = len(table)
        live = np.flatnonzero(self._alive[:used]).astype(np.int32)
        starts, ends, pending = (values[:used].copy() for values in (self._starts, self._ends, self._pending))
        fired = self._fired[:used].copy()
        width = len(self._spec.keys) + 1

        def rows(slots: Slots) -> list[pa.Array]:
            _, *columns = table.rows(slots)
            borders = [from_words(side[slots], self._spec.time_type) for side in (starts, ends)]
            window = [*borders, pa.array(fired[slots])]
            if self._spec.early is not None:
                window.append(pa.array(pending[slots]))
            return [*columns[: width - 1], *window, *columns[width - 1 :]]

        def segments(name: str, groups: int) -> Iterator[Segment]:
            keys = lambda slots: table.index.columns(slots)[1:]  # noqa: E731
            yield from group_segments(name, self._spec.state_schema, live, keys, rows, groups)

        return table, segments

    def restore(self, batch: pa.RecordBatch) -> None:
        """Set rows of ``state_schema``."""
        width, window = len(self._spec.keys), len(self._spec.window_fields)
        columns = batch.columns
        keys, facts, state = columns[:width], columns[width : width + window], columns[width + window :]
        anchors = self._upsert(np.zeros(batch.num_rows, np.int64), keys)
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
        self._anchors[slots[chained]] = anchors[chained]
        kernels.link(slots, anchors, self._nexts)
        self._expect(slots)


def _grown(values: npt.NDArray[Any], used: int, size: int, fill: int) -> npt.NDArray[Any]:
    """A larger copy."""
    grown = np.full(size, fill, values.dtype)
    grown[:used] = values
    return grown

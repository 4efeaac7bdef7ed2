"""Windows with fixed borders and their values: one table keyed by (window start, key)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.time import MAX_WATERMARK
from cutwater.data.words import fixed_view, from_words
from cutwater.operators.aggregate.keyed_table import KeyedTable
from cutwater.operators.base import Outputs
from cutwater.operators.window import kernels
from cutwater.operators.window.fold import Fold
from cutwater.operators.window.open_windows import OpenWindows, join_slots
from cutwater.state.disk.spill_queue import NEVER, SpillQueue
from cutwater.state.growing_array import GrowingArray
from cutwater.state.index.key_index import Slots
from cutwater.state.segments import Segment
from cutwater.state.table.changes import Changed
from cutwater.state.table.keyed_segments import deleted_segments, group_segments

if TYPE_CHECKING:
    from cutwater.operators.base import Context
    from cutwater.operators.window.spec import WindowAggregateSpec
    from cutwater.operators.window.stored_windows import MakeSegments, Times
    from cutwater.state.disk.rocks import RocksStore
    from cutwater.state.table.spill import Spill

PORTION_ROWS = 1 << 14
"""Rows on disk that one call fires."""
_FIRED, _PENDING = 0, 1
"""Books of the table."""
_NONE: npt.NDArray[np.int64] = np.empty(0, np.int64)


class WindowTable:
    """The slots of a table are (window, key) pairs; windows are lists of slots.

    The global window starts at 0 and ends with time itself.
    """

    def __init__(self, spec: WindowAggregateSpec) -> None:
        self._spec = spec
        self._endless = spec.window.endless
        self._size_us = 0 if spec.window.period is None else spec.window.period.size_us
        self.reach_us = MAX_WATERMARK if self._endless else self._size_us - 1
        types = [spec.time_type, *(spec.input_schema.field(name).type for name in spec.keys)]
        self._counted = spec.early is not None
        books = (np.bool_, np.int64) if self._counted else (np.bool_,)
        self.table = KeyedTable(types, spec.kept, spec.input_schema, books=books)
        self._fold = Fold(spec.kept, spec.input_schema, discarding=spec.discarding)
        self._windows = OpenWindows(self.reach_us, spec.allowed_lateness_us)
        self._limit = (spec.early.rows or 0) if spec.early else 0
        self._starts = GrowingArray(np.int64)
        self._waiting: SpillQueue | None = None
        """Windows on disk with rows that have not come out, by round."""
        self._round = 0
        """How often windows on disk have been asked for early results."""

    def spill_to(self, store: RocksStore, ctx: Context, tables: int = 1) -> None:
        """See ``KeyedTable.spill_to``."""
        self.table.spill_to(store, ctx, hashed=1, renumbered=self._renumber, tables=tables)
        if self.table.spill is not None and self._counted and not self._limit:
            self._waiting = self.table.spill.look_again(self._next_round)

    def _next_round(self, table: KeyedTable, slots: Slots) -> Times:
        """Windows that leave with rows which have not come out want to be looked at in the next round."""
        waits = (table.book(_PENDING)[slots] > 0) & ~table.book(_FIRED)[slots]
        return np.where(waits, self._round, NEVER)

    def _renumber(self, kept: Slots) -> None:
        self._windows.keep(kept)
        self._starts.replace(self._starts.values[kept])

    @property
    def _fired(self) -> npt.NDArray[np.bool_]:
        return self.table.book(_FIRED)

    @property
    def _pending(self) -> Times:
        """Rows that have not come out, by slot, where early results are asked for."""
        return self.table.book(_PENDING) if self._counted else _NONE

    # -- rows

    def add(self, batch: pa.RecordBatch, starts: Times, reached: Times) -> Outputs:
        """Rows with the starts of their windows, which are open; returns what comes out with them.

        Args:
            batch: the rows.
            starts: of the window of each row.
            reached: the watermark of each row, or one for all.
        """
        if batch.num_rows == 0:
            return []
        slots = self.upsert(starts, [batch.column(name) for name in self._spec.keys])
        if not self._limit and int(starts.min()) + self.reach_us > int(reached.max()):
            for accumulator in self.table.accumulators:
                accumulator.update(slots, batch)
            if self._counted:
                kernels.count_rows(slots, self._pending)
            return []
        fire = np.empty(len(slots), np.bool_)
        count = kernels.touch(slots, starts, self.reach_us, reached, self._limit, self._pending, self._fired, fire)
        columns = self._fold.rows(self.table, slots, batch, fire)
        if not count:
            return []
        mask: Any = pa.array(fire)
        keys = [batch.column(name).filter(mask) for name in self._spec.keys]
        return self._output(keys, starts[fire], columns)

    def upsert(self, starts: Times, keys: list[pa.Array]) -> Slots:
        """Slots of (window start, key) pairs."""
        known = len(self.table)
        slots = self.table.upsert([from_words(starts, self._spec.time_type), *keys])
        self._admit(known, slots, starts)
        return slots

    def _admit(self, known: int, slots: Slots, starts: Times) -> None:
        used = len(self.table)
        self._starts.reserve(used)
        self._starts.values[slots] = starts
        self._windows.add(known, self._starts.values[known:used])

    # -- firing

    def due(self, watermark: int) -> Slots:
        """What fires now, in time order; each window fires once."""
        slots = self._windows.due(watermark)
        slots = slots[~self._fired[slots]]
        self.table.touch(slots)
        self._fired[slots] = True
        if self._counted and self._spec.discarding:
            slots = slots[self._pending[slots] > 0]
        self._came_out(slots)
        return slots

    @property
    def next_instant(self) -> int | None:
        """See ``Windows.next_instant``."""
        return self._windows.next_instant

    def changed(self, passed: Callable[[Slots], Any], most: int) -> Slots:
        """See ``Windows.changed``."""
        used = len(self.table)
        slots = np.flatnonzero((self._pending[:used] > 0) & ~self._fired[:used]).astype(np.int32)
        slots = slots[np.broadcast_to(passed(slots), len(slots))]
        slots = slots[np.argsort(self._starts.values[slots], kind="stable")][:most]
        self._came_out(slots)
        return slots

    def _came_out(self, slots: Slots) -> None:
        if self._counted:
            self.table.touch(slots)
            self._pending[slots] = 0

    def results(self, slots: Slots) -> Outputs:
        """The results of some slots; what is discarded is gone then."""
        columns = [accumulator.result(slots) for accumulator in self.table.accumulators]
        outputs = self._output(self.keys(slots), self._starts.values[slots], columns)
        self._fold.begin_anew(self.table, slots)
        return outputs

    def times(self, slots: Slots) -> Times:
        """When the windows of some slots start."""
        return self._starts.values[slots]

    def times_in(self, batch: pa.RecordBatch) -> Times:
        """See ``Windows.times_in``."""
        starts = None if self._endless else batch.column(len(self._spec.keys))
        return np.zeros(batch.num_rows, np.int64) if starts is None else fixed_view(starts, np.int64)

    def keys(self, slots: Slots) -> list[pa.Array]:
        """The key columns of some slots."""
        return self.table.index.columns(slots)[1:]

    def _output(self, keys: list[pa.Array], starts: Times, columns: list[pa.Array]) -> Outputs:
        kind = self._spec.time_type
        borders = [] if self._endless else [from_words(starts, kind), from_words(starts + self._size_us, kind)]
        return [(0, pa.RecordBatch.from_arrays([*keys, *borders, *columns], schema=self._spec.outputs[0]))]

    def forget(self, watermark: int) -> None:
        """Forget windows that take no more rows."""
        gone = self._windows.forget(watermark)
        self.table.delete(gone)
        if self.table.spill is not None:
            if len(gone):  # at once: what is dead must not be written when rows leave
                self.table.keep(join_slots(self._windows.live_parts()))
        elif self._windows.wasteful:
            kept = self._windows.sweep()
            self.table.keep(kept)
            self._starts.replace(self._starts.values[kept])

    # -- windows on disk

    def fire_on_disk(self, watermark: int, groups: range) -> Iterator[Outputs] | None:
        """See ``Windows.fire_on_disk``; forgets windows that take no more rows."""
        firing, ending = self._windows.firing(watermark), self._windows.ending(watermark)
        spill = self.table.spill
        if spill is None or not spill.rows.used or not (firing or ending):
            return None
        return self._fire_on_disk(spill, sorted({*firing, *ending}), set(firing), set(ending), groups)

    def _fire_on_disk(
        self, spill: Spill[KeyedTable], starts: list[int], firing: set[int], ending: set[int], groups: range
    ) -> Iterator[Outputs]:
        frozen = spill.rows.freeze()
        for start in starts:
            for chunk in frozen.beginning(np.int64(start).tobytes(), groups, PORTION_ROWS):
                page = self.table.page(chunk.keys, chunk.values)
                slots = np.arange(len(page), dtype=np.int32)
                only = slots[(self.table.index.find(chunk.keys) < 0) & ~page.book(_FIRED)[slots]]
                outputs = self._page_fires(page, only, start) if start in firing and len(only) else []
                if start in ending:
                    self.table.delete_page(page, slots)
                elif len(only):
                    self.table.put_page(page, only)
                yield outputs
        frozen.release()

    def fire_page(self, page: KeyedTable, start: int, watermark: int) -> Outputs:
        """A window of some keys comes out whose values were put together outside of the table.

        Where late rows are welcome, it is on disk from now on.
        """
        slots = np.arange(len(page), dtype=np.int32)
        outputs = self._page_fires(page, slots, start)
        if start + self.reach_us + self._spec.allowed_lateness_us > watermark:
            self.table.put_page(page, slots, came=True)
            self._windows.fired(start)
        return outputs

    def _page_fires(self, page: KeyedTable, slots: Slots, start: int) -> Outputs:
        """The windows of these slots fire: they are on disk only, and have not fired."""
        page.book(_FIRED)[slots] = True
        if self._counted and self._spec.discarding:
            slots = slots[page.book(_PENDING)[slots] > 0]
        return self._page_results(page, slots, np.full(len(slots), start, np.int64))

    def _page_results(self, page: KeyedTable, slots: Slots, starts: Times) -> Outputs:
        """The windows of these slots come out."""
        if len(slots) == 0:
            return []
        columns = [accumulator.result(slots) for accumulator in page.accumulators]
        outputs = self._output(page.index.columns(slots)[1:], starts, columns)
        if self._counted:
            page.book(_PENDING)[slots] = 0
        self._fold.begin_anew(page, slots)
        return outputs

    def changed_on_disk(self, passed: Callable[..., Any]) -> Iterator[Outputs]:
        """See ``Windows.changed_on_disk``."""
        spill = self.table.spill
        before, self._round = self._round, self._round + 1  # what is put back now is for the next round
        while spill is not None and self._waiting is not None and self._waiting.due(before):
            yield self._page_changed(spill, self._waiting.take(before, PORTION_ROWS), passed)

    def _page_changed(self, spill: Spill[KeyedTable], keys: list[pa.Array], passed: Callable[..., Any]) -> Outputs:
        """What comes out early of these windows, if they are on disk only."""
        only = pa.array(self.table.index.find(keys) < 0)
        keys = [key.filter(only) for key in keys]
        there, values = spill.rows.get(keys)
        if not there.any():
            return []
        page = self.table.page([key.filter(pa.array(there)) for key in keys], values)
        slots = np.arange(len(page), dtype=np.int32)
        waiting = slots[(page.book(_PENDING)[slots] > 0) & ~page.book(_FIRED)[slots]]
        ready = waiting[np.broadcast_to(passed(waiting, lambda slots: page.index.columns(slots)[1:]), len(waiting))]
        starts = fixed_view(page.index.columns(ready)[0], np.int64)
        outputs = self._page_results(page, ready, starts)
        if len(waiting):
            self.table.put_page(page, waiting)
        return outputs

    # -- snapshots

    def frozen(self, checkpoint_id: int) -> tuple[KeyedTable, MakeSegments]:
        """A copy of the table, and a function that makes its segments."""
        table, parts = self.table.frozen(checkpoint_id), self._windows.live_parts()
        width = len(self._spec.keys) + 1

        def rows(part: KeyedTable, slots: Slots) -> list[pa.Array]:
            start, *columns = part.rows(slots)
            window = [] if self._endless else [start]
            window.append(pa.array(part.book(_FIRED)[slots]))
            if self._counted:
                window.append(pa.array(part.book(_PENDING)[slots]))
            return [*columns[: width - 1], *window, *columns[width - 1 :]]

        def keys(part: KeyedTable, slots: Slots) -> list[pa.Array]:
            return part.index.columns(slots)[1:]

        def segments(name: str, groups: int, changed: Changed | None = None) -> Iterator[Segment]:
            schema = self._spec.state_schema
            live = join_slots(parts)
            if changed is not None and changed.deleted:
                start = [] if self._endless else self._spec.window_fields[:1]
                fields = pa.schema([*start, *list(schema)[: width - 1]])
                identity = _without_start if self._endless else list
                yield from deleted_segments(name, fields, changed.deleted, _without_start, groups, identity)
            for part, slots, kind in table.parts(changed):
                if part is table:
                    slots = np.intersect1d(slots, live, assume_unique=True)
                yield from group_segments(name, schema, slots, partial(keys, part), partial(rows, part), groups, kind)

        return table, segments

    @property
    def restored(self) -> KeyedTable:
        """See ``Windows.restored``."""
        return self.table

    def index(self, identity: list[pa.Array]) -> list[pa.Array]:
        """See ``Windows.index``."""
        if not self._endless:
            return identity
        return [from_words(np.zeros(len(identity[0]), np.int64), self._spec.time_type), *identity]

    def restore(self, batch: pa.RecordBatch) -> None:
        """Set rows of ``state_schema``."""
        width = len(self._spec.keys)
        window = len(self._spec.window_fields)
        columns = batch.columns
        keys, borders, state = columns[:width], columns[width : width + window], columns[width + window :]
        starts = np.zeros(batch.num_rows, np.int64) if self._endless else fixed_view(borders.pop(0), np.int64)
        known = len(self.table)
        slots = self.table.restore([from_words(starts, self._spec.time_type), *keys], state)
        self._admit(known, slots, starts)
        self._fired[slots] = borders[0].to_numpy(zero_copy_only=False)
        if self._counted:
            self._pending[slots] = borders[1].to_numpy()


def _without_start(columns: list[pa.Array]) -> list[pa.Array]:
    """The keys among the columns of the table's index."""
    return columns[1:]

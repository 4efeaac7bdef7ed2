"""What the operators of all windows have in common: time, firing in slices, late rows."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.event_times import event_times
from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.data.words import to_words
from cutwater.operators.aggregate.keyed_table import FrozenTable, KeyedTable
from cutwater.operators.aggregate.ordered_accumulator import ARRIVAL
from cutwater.operators.base import BaseOperator, Context, Outputs
from cutwater.operators.emission_order import EmissionOrder
from cutwater.operators.group_watermarks import WATERMARK, GroupWatermarks
from cutwater.operators.window.early_clock import EarlyClock
from cutwater.operators.window.stored_windows import Times, Windows
from cutwater.state.index.key_index import Slots
from cutwater.state.keys import hash_keys, key_groups, require_valid_keys
from cutwater.state.segments import Frozen, Segment
from cutwater.state.table.changes import Changed
from cutwater.state.table.keyed_segments import RestoredRows, restore_rows
from cutwater.state.table.spill import open_spill

if TYPE_CHECKING:
    from cutwater.operators.window.spec import WindowAggregateSpec

STATE = "window"
SLICE_ROWS = 1 << 16
"""Rows that one call fires or puts together at most."""
_ALL_SLOTS = 2**31
NO_SLOTS: Slots = np.empty(0, np.int32)

W = TypeVar("W", bound=Windows)


class WindowOperator(BaseOperator, Generic[W]):
    """Rows go into windows, windows come out in slices.

    After a restore from several subtasks their watermarks may differ.  Then each key group keeps its own as a *floor*
    until the watermark has passed them all: so no window of a group fires twice, and late rows stay late.

    By processing time the clock takes the place of both: rows have the time at which they come, and since it never
    falls, a clock that shows t is the watermark just before t.  No row is late.  At the end of the input all windows
    come out; from then on the clock alone counts again, for a loop that starts anew.
    """

    _windows: W

    def __init__(self, spec: WindowAggregateSpec) -> None:
        self._spec = spec
        self._numbered = any(a.ordered for a in spec.kept)
        self._by_clock = spec.window.processing_time

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self._store = open_spill(ctx.state_memory_bytes)
        self._order = EmissionOrder.of(ctx, self._store, self._spec.outputs[0])
        self._clear()
        self._track()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _track(self, *, restored: bool = False) -> None:
        """Keep track of changes, if they are asked for."""
        if self.ctx.incremental:
            for table in self._tables:
                table.track(restored=restored)

    @property
    def _tables(self) -> Sequence[KeyedTable]:
        return [self._windows.table]

    def _clear(self) -> None:
        self._watermarks = GroupWatermarks(self.ctx.key_groups, self.ctx.max_parallelism)
        self._before = self._watermarks.copy()
        self._due: Slots = NO_SLOTS
        self._on_disk: Iterator[Outputs] | None = None  # what has still to come out from there, in portions
        self._arrived = 0
        early = self._spec.early
        self._early = EarlyClock(early.processing_time_us if early is not None else None, self.ctx)

    @abstractmethod
    def _take(self, batch: pa.RecordBatch, reached: Times) -> Outputs:
        """Rows with valid keys; ``reached``: the watermark of each row, or one for all."""

    # -- rows

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        outputs = self._drain()
        if batch.num_rows == 0:
            return outputs
        require_valid_keys(batch, self._spec.keys)
        self._early.rows_came()
        if self.late_before > MIN_WATERMARK and not self._by_clock:
            batch, late = self._without_late_rows(batch)
            outputs += late
        return outputs + self._take(batch, self._reached(batch)) if batch.num_rows else outputs

    def _without_late_rows(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Outputs]:
        """Rows that break the promise of their split count in all their windows or in none (W4).

        In none if the first of these was over for their split: whether it has come out here hangs on other splits, too.
        """
        closes = self._spec.window.first_close(self._times(batch))
        late = closes <= max(MIN_WATERMARK, self.late_before - self._spec.allowed_lateness_us)
        return (batch.filter(pa.array(~late)), self._late(batch, late)) if late.any() else (batch, [])

    def _drain(self) -> Outputs:
        outputs: Outputs = []
        while self.pending:
            outputs += self.resume()
        return outputs

    def _reached(self, batch: pa.RecordBatch) -> Times:
        if not self._watermarks.differ:
            return np.full(1, self._watermarks.current, np.int64)
        return self._watermarks.of(self._groups([batch.column(name) for name in self._spec.keys]))

    def _groups(self, keys: list[pa.Array]) -> npt.NDArray[np.uint16]:
        return key_groups(hash_keys(keys), self.ctx.max_parallelism)

    def _times(self, batch: pa.RecordBatch) -> Times:
        if self._by_clock:
            times: Times = np.full(batch.num_rows, 1000 * self.ctx.processing_time_ms(), np.int64)
            times.flags.writeable = False  # as event times are: one specialisation of the kernels
            return times
        assert self._spec.event_time is not None
        return event_times(batch, self._spec.event_time)

    def _number(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows with their arrival numbers, if the state keeps them."""
        if not self._numbered:
            return batch
        first, self._arrived = self._arrived, self._arrived + batch.num_rows
        return batch.append_column(ARRIVAL, pa.array(np.arange(first, self._arrived)))

    def _late(self, batch: pa.RecordBatch, late: npt.NDArray[np.bool_]) -> Outputs:
        """The late rows of a batch, for the side output."""
        self.ctx.count("rows_late", int(late.sum()))
        return [(1, batch.filter(pa.array(late)))]

    # -- firing

    def on_watermark(self, watermark: int) -> Outputs:
        outputs = self._drain()
        if self._by_clock and watermark < MAX_WATERMARK:
            return outputs
        return outputs + self._fire(watermark)

    def _fire(self, watermark: int) -> Outputs:
        """The watermark of the windows is this now: the first slice of what comes out."""
        before = self._watermarks.copy()
        if not self._watermarks.advance(watermark):
            return []
        self._before = before
        self._due = self._in_order(self._advance())
        if self._order is not None and self._on_disk is not None:
            self._order.begin()
        return self.resume()

    def _in_order(self, slots: Slots) -> Slots:
        """In an order that a restore does not change: of one time by key.  Equal hashes are left to chance."""
        if not self.ctx.repeatable or len(slots) < 2:
            return slots
        return slots[np.lexsort((hash_keys(self._windows.keys(slots)), self._windows.times(slots)))]

    def _advance(self) -> Slots:
        """The watermark has risen: what comes out now."""
        self._on_disk = self._windows.fire_on_disk(self._watermarks.current, self.ctx.key_groups)
        due = self._windows.due(self._watermarks.current)
        if not self._may_pass:
            return due
        self._on_disk = itertools.chain(self._on_disk or (), self._windows.changed_on_disk(self._passed))
        return np.concatenate([due, self._windows.changed(self._passed, _ALL_SLOTS)])

    @property
    def _may_pass(self) -> bool:
        """Whether this rise of the watermark may have passed a multiple of the interval of early results."""
        early = self._spec.early
        if early is None or early.event_time_us is None:
            return False
        return self._before.differ or bool(self._passed(NO_SLOTS))

    def _passed(
        self, slots: Slots, keys: Callable[[Slots], list[pa.Array]] | None = None
    ) -> bool | npt.NDArray[np.bool_]:
        """Whether this rise of the watermark passed a multiple of the interval of early results."""
        assert self._spec.early is not None
        interval_us = self._spec.early.event_time_us or 1
        if not self._before.differ:
            return self._before.current // interval_us < self._watermarks.current // interval_us
        groups = self._groups((keys or self._windows.keys)(slots))
        return self._before.of(groups) // interval_us < self._watermarks.of(groups) // interval_us

    @property
    def pending(self) -> bool:
        return self._firing or (self._order is not None and self._order.pending)

    @property
    def _firing(self) -> bool:
        """Whether there is more to come out that is not in order yet."""
        return len(self._due) > 0 or self._on_disk is not None

    def resume(self) -> Outputs:
        if self._order is None:
            return self._slice()
        outputs = [] if self._order.pending and not self._firing else self._slice()
        if self._order.collecting:
            for _, batch in outputs:
                keys = batch.columns[: len(self._spec.keys)]
                self._order.add(batch, self._windows.times_in(batch), hash_keys(keys))
            outputs = []
        return self._order.give(outputs, last=not self._firing)

    def _slice(self) -> Outputs:
        """A bounded piece of what comes out."""
        if len(self._due) == 0 and self._on_disk is not None:
            portion = next(self._on_disk, None)
            if portion is not None:
                return portion
            self._on_disk = None
        if len(self._due) == 0:
            self._due = self._in_order(self._more())
        slots, self._due = self._due[:SLICE_ROWS], self._due[SLICE_ROWS:]
        outputs = self._windows.results(slots) if len(slots) else []
        if not self._firing:
            self._forget()
            if self._by_clock and self._watermarks.current == MAX_WATERMARK:
                self._watermarks = GroupWatermarks(self.ctx.key_groups, self.ctx.max_parallelism)
        return outputs

    # -- the clock

    @property
    def next_processing_time_ms(self) -> int | None:
        instant = self._next_instant if self._by_clock else None
        early_ms = self._early.next_ms
        if instant is None:
            return early_ms
        fires_ms = -(-(instant + 1) // 1000)
        return fires_ms if early_ms is None else min(fires_ms, early_ms)

    @property
    def _next_instant(self) -> int | None:
        return self._windows.next_instant

    @property
    def timers_pending(self) -> bool:
        return self.next_processing_time_ms is not None

    def on_processing_time(self, now_ms: int) -> Outputs:
        outputs = self._drain()
        if self._by_clock:
            outputs += self._fire(1000 * now_ms - 1)
        if self._early.next_ms is None or now_ms < self._early.next_ms:
            return outputs
        return outputs + self._drain() + self._come_out_early()

    def _come_out_early(self) -> Outputs:
        """A slice of what has changed; of all of it if calls are made once more, or where it lies would choose."""
        if self.ctx.repeatable:
            self._early.next_ms = None  # until rows come
            self._due = self._in_order(self._windows.changed(lambda _: True, _ALL_SLOTS))
            self._on_disk = self._windows.changed_on_disk(lambda *_: True)
            if self._order is not None:
                self._order.begin()
            return self.resume()
        slots = self._windows.changed(lambda _: True, SLICE_ROWS)
        outputs = self._windows.results(slots) if len(slots) else []
        portion = next(self._windows.changed_on_disk(lambda *_: True), None) if len(slots) < SLICE_ROWS else []
        if portion is None:
            self._early.next_ms = None
        return outputs + (portion or [])

    def _more(self) -> Slots:
        """What comes out after all that was due; a bounded piece of work."""
        return NO_SLOTS

    def _forget(self) -> None:
        self._windows.forget(self._watermarks.current)

    # -- snapshots

    def freeze(self, checkpoint_id: int) -> Frozen:
        watermarks, groups = self._early.add_to(self._watermarks.segment()), self.ctx.max_parallelism
        table, make = self._windows.frozen(checkpoint_id)

        def segments(changed: Changed | None = None, loose: bool = False) -> Iterator[Segment]:
            yield watermarks
            yield from make(STATE, groups, changed)

        return FrozenTable([table], segments)

    def restore(self, segments: Iterable[Segment]) -> None:
        self._clear()
        for _, batch in self._named_rows({STATE: self._windows.table}, segments):
            self._windows.restore(batch)
        self._watermarks_restored()
        self._track(restored=True)

    def _named_rows(
        self, tables: Mapping[str, RestoredRows], segments: Iterable[Segment]
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The rows to restore, with the name of their state; those of tables on disk as they come."""
        states: dict[str, list[Segment]] = {name: [] for name in tables}
        for segment in self._with_watermarks(segments):
            if segment.name in tables and tables[segment.name].spill is not None:
                for batch in self._rows(tables[segment.name], [segment]):
                    yield segment.name, batch
            elif segment.name in tables:
                states[segment.name].append(segment)
        for name, table in tables.items():
            for batch in self._rows(table, states[name]):
                yield name, batch

    def _with_watermarks(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        """The other segments; the watermarks are restored as they come."""
        for segment in segments:
            if segment.name == WATERMARK:
                self._watermarks.restore(segment)
                self._early.restore(segment)
            else:
                yield segment

    def _watermarks_restored(self) -> None:
        """All segments have been taken."""
        self._watermarks.restored()
        self._before = self._watermarks.copy()

    def _rows(self, table: RestoredRows, segments: Iterable[Segment]) -> Iterator[pa.RecordBatch]:
        """The rows to restore; the numbers of rows to come go on after those that these have seen."""
        index = self._windows.index
        for batch in restore_rows(table, segments, self._spec.state_schema, self.ctx.key_groups, index):
            for aggregate in self._spec.kept:
                if aggregate.ordered:
                    orders = to_words(batch.column(f"{aggregate.name}.order"))
                    self._arrived = max(self._arrived, int(orders.max()) + 1)
            self._early.rows_restored()
            yield batch

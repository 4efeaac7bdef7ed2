"""The operator of windows of all kinds: time, firing in slices, late rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.rows import event_times
from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.data.words import to_words
from cutwater.operators.aggregate.keyed_operator import AggregateTable
from cutwater.operators.aggregate.value_accumulators import ARRIVAL
from cutwater.operators.base import Context, Operator, Outputs
from cutwater.operators.emission_order import EmissionOrder
from cutwater.operators.group_watermarks import GroupWatermarks
from cutwater.operators.window import kernels
from cutwater.operators.window.kinds import Period
from cutwater.operators.window.table import WindowTable
from cutwater.state.backend import StateBackend
from cutwater.state.key_index import GroupIds
from cutwater.state.keys import hash_keys, key_groups, require_valid_keys
from cutwater.state.segments import GROUP_COLUMN, Frozen, Segment
from cutwater.state.table.changes import Changed
from cutwater.state.table.keyed_segments import FrozenTable, RestoredRows, restore_tables
from cutwater.state.table.timed_table import Pieces

if TYPE_CHECKING:
    from cutwater.operators.window.session_operator import SessionTable
    from cutwater.operators.window.spec import WindowAggregateSpec


_NEXT = "next_ms"


class EarlyClock:
    """The next multiple of an interval, once rows have come.

    It lies in the snapshot beside the watermarks, by key group, so that a restore at another parallelism finds it, too.
    Snapshots of older versions have none; then it is reckoned anew.

    Args:
        interval_us: microseconds between early results; ``None``: there are none by the clock.
        ctx: of the subtask.
    """

    def __init__(self, interval_us: int | None, ctx: Context) -> None:
        self._interval_us, self._ctx = interval_us, ctx
        self.next_ms: int | None = None
        """Milliseconds since the epoch; ``None``: no row has come since the last time."""
        self._known = False

    def rows_came(self) -> None:
        """Rows have come: what they change comes out at the next multiple of the interval."""
        if self.next_ms is None and self._interval_us is not None:
            now_us = 1000 * self._ctx.processing_time_ms()
            self.next_ms = -(-(now_us // self._interval_us + 1) * self._interval_us // 1000)

    def add_to(self, segment: Segment) -> Segment:
        """The segment of the watermarks, and this beside each."""
        if self._interval_us is None:
            return segment
        column = pa.array([self.next_ms] * segment.batch.num_rows, pa.int64())
        return replace(segment, batch=segment.batch.append_column(_NEXT, column))

    def restore(self, segment: Segment) -> None:
        """Take over what such a segment has for the key groups of this subtask: the earliest."""
        if self._interval_us is None or _NEXT not in segment.batch.schema.names:
            return
        owned = self._ctx.key_groups
        groups = segment.batch.column(GROUP_COLUMN).to_numpy()
        inside = pa.array((groups >= owned.start) & (groups < owned.stop))
        times = [
            self.next_ms if self._known else None,
            *np.unique(segment.batch.column(_NEXT).filter(inside).drop_null()).tolist(),
        ]
        self.next_ms = min((time for time in times if time is not None), default=None)
        self._known = True

    def rows_restored(self) -> None:
        """There are windows in the snapshot; it may be that the time is still to come."""
        if not self._known:
            self.rows_came()


Times: TypeAlias = npt.NDArray[np.int64]


MakeSegments: TypeAlias = Callable[[str, int, Changed | None], Iterator[Segment]]
"""Makes the segments of a frozen table, given its name and the number of key groups: all, or those of what changed."""

STATE = "window"
SLICE_ROWS = 1 << 16
"""Rows that one call fires or puts together at most."""
_ALL_GROUP_IDS = 2**31

W = TypeVar("W", bound="WindowTable | SessionTable")


class WindowOperator(Operator, Generic[W]):
    """Rows go into windows, windows come out in slices.

    After a restore from several subtasks their watermarks may differ.  Then each key group keeps its own as a *floor*
    until the watermark has passed them all: so no window of a group fires twice, and late rows stay late.

    By processing time the clock takes the place of both: rows have the time at which they come, and since it never
    falls, a clock that shows t is the watermark just before t.  No row is late.  At the end of the input all windows
    come out; from then on the clock alone counts again, for a loop that starts anew.
    """

    _windows: W
    _state_names: Sequence[str] = (STATE,)

    def __init__(self, spec: WindowAggregateSpec) -> None:
        self._spec = spec
        self._numbered = any(a.ordered for a in spec.kept)
        self._by_clock = spec.window.processing_time

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self._backend = StateBackend(ctx, len(self._state_names))
        self._order = EmissionOrder.of(ctx, self._backend, self._spec.outputs[0])
        self._clear()
        self._track()

    def close(self) -> None:
        self._backend.close()

    def _track(self, *, restored: bool = False) -> None:
        """Keep track of changes, if they are asked for."""
        if self.ctx.incremental:
            for table in self._tables:
                table.track(restored=restored)

    @property
    def _tables(self) -> Sequence[AggregateTable]:
        return [self._windows.table]

    def _clear(self) -> None:
        self._watermarks = GroupWatermarks(self.ctx.key_groups, self.ctx.max_parallelism)
        self._before = self._watermarks.copy()
        self._due: Pieces[Outputs] = Pieces(lambda _: [])
        self._arrived = 0
        early = self._spec.early
        self._early = EarlyClock(early.processing_time_us if early is not None else None, self.ctx)

    @abstractmethod
    def _take(self, batch: pa.RecordBatch, reached: Times) -> Outputs:
        """Rows with valid keys; ``reached``: the watermark of each row, or one for all."""

    # -- rows

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        outputs = self._drained()
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

    # -- firing

    def on_watermark(self, watermark: int) -> Outputs:
        outputs = self._drained()
        if self._by_clock and watermark < MAX_WATERMARK:
            return outputs
        return outputs + self._fire(watermark)

    def _fire(self, watermark: int) -> Outputs:
        """The watermark of the windows is this now: the first slice of what comes out."""
        before = self._watermarks.copy()
        if not self._watermarks.advance(watermark):
            return []
        self._before = before
        self._begin(self._advance())
        return self.resume()

    def _begin(self, pieces: Pieces[Outputs]) -> None:
        """This comes out."""
        pieces.rows = self._in_order(pieces.rows)
        self._due = pieces
        if self._order is not None and pieces.scattered:
            self._order.begin()

    def _in_order(self, gids: GroupIds) -> GroupIds:
        """In an order that a restore does not change: of one time by key.  Equal hashes are left to chance."""
        if not self.ctx.repeatable or len(gids) < 2:
            return gids
        return gids[np.lexsort((hash_keys(self._windows.keys(gids)), self._windows.times(gids)))]

    def _advance(self) -> Pieces[Outputs]:
        """The watermark has risen: what comes out now."""
        due = self._windows.due(self._watermarks.current)
        if self._may_pass:
            due.extend(self._windows.changed(self._passed, _ALL_GROUP_IDS))
        return due

    @property
    def _may_pass(self) -> bool:
        """True if this rise of the watermark may have passed a multiple of the interval of early results."""
        early = self._spec.early
        if early is None or early.event_time_us is None:
            return False
        return self._before.differ or bool(self._passed(list))

    def _passed(self, keys: Callable[[], list[pa.Array]]) -> bool | npt.NDArray[np.bool_]:
        """True if this rise of the watermark passed a multiple of the interval of early results, for some keys."""
        assert self._spec.early is not None
        interval_us = self._spec.early.event_time_us or 1
        if not self._before.differ:
            return self._before.current // interval_us < self._watermarks.current // interval_us
        groups = self._groups(keys())
        return self._before.of(groups) // interval_us < self._watermarks.of(groups) // interval_us

    @property
    def pending(self) -> bool:
        return self._firing or (self._order is not None and self._order.pending)

    @property
    def _firing(self) -> bool:
        """True if there is more to come out that is not in order yet."""
        return self._due.pending

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
        outputs = self._due.take(SLICE_ROWS)
        if outputs is None:
            self._due = self._more()
            self._due.rows = self._in_order(self._due.rows)
            outputs = self._due.take(SLICE_ROWS) or []
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
        outputs = self._drained()
        if self._by_clock:
            outputs += self._fire(1000 * now_ms - 1)
        if self._early.next_ms is None or now_ms < self._early.next_ms:
            return outputs
        return outputs + self._drained() + self._come_out_early()

    def _come_out_early(self) -> Outputs:
        """A slice of what has changed; of all of it if calls are made once more, or where it lies would choose."""
        if self.ctx.repeatable:
            self._early.next_ms = None  # until rows come
            self._begin(self._windows.changed(lambda _: True, _ALL_GROUP_IDS))
            return self.resume()
        pieces = self._windows.changed(lambda _: True, SLICE_ROWS)
        count = len(pieces.rows)
        outputs = (pieces.take(SLICE_ROWS) or []) if count else []
        if count < SLICE_ROWS:
            more = pieces.take(SLICE_ROWS)
            if more is None:
                self._early.next_ms = None
            outputs += more or []
        return outputs

    def _more(self) -> Pieces[Outputs]:
        """The output after all that was due; a bounded piece of work."""
        return self._due

    def _forget(self) -> None:
        self._windows.forget(self._watermarks.current)

    # -- snapshots

    def freeze(self, checkpoint_id: int) -> Frozen:
        watermarks, groups = self._early.add_to(self._watermarks.segment()), self.ctx.max_parallelism
        table, make = self._windows.frozen(checkpoint_id)

        def segments(changed: Changed | None = None, unsorted: bool = False) -> Iterator[Segment]:
            yield watermarks
            yield from make(STATE, groups, changed)

        return FrozenTable([table], segments)

    def restore(self, segments: Iterable[Segment]) -> None:
        self._clear()
        for _, batch in self._named_rows({STATE: self._windows.restored}, segments):
            self._windows.restore(batch)
        self._before = self._watermarks.copy()
        self._track(restored=True)

    def _named_rows(
        self, tables: Mapping[str, RestoredRows], segments: Iterable[Segment]
    ) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The rows to restore, with the name of their state; numbers of rows to come go on after those of these."""
        segments = self._watermarks.restored_from(segments, self._early.restore)
        for name, batch in restore_tables(
            tables, segments, self._spec.state_schema, self.ctx.key_groups, self._windows.index
        ):
            for aggregate in self._spec.kept:
                if aggregate.ordered:
                    orders = to_words(batch.column(f"{aggregate.name}.order"))
                    self._arrived = max(self._arrived, int(orders.max()) + 1)
            self._early.rows_restored()
            yield name, batch


class WindowAggregate(WindowOperator[WindowTable]):
    """Every row goes into each of its windows."""

    def _clear(self) -> None:
        super()._clear()
        self._windows = WindowTable(self._spec, self._backend)

    def _take(self, batch: pa.RecordBatch, reached: Times) -> Outputs:
        self._windows.table.make_room()
        period = self._spec.window.period
        if period is not None and period.size_us != period.every_us:
            return self._slide(period, batch, reached)
        starts: Times = np.zeros(batch.num_rows, np.int64)
        first = 0
        if period is not None:
            first, _ = kernels.assign(self._times(batch), period.size_us, 0, period.offset_us, starts)
        outputs: Outputs = []
        late = self._late_rows(starts, int(first), reached)
        if late is not None:
            outputs = self._late(batch, late)
            batch, starts = batch.filter(pa.array(~late)), starts[~late]
            reached = reached if len(reached) == 1 else reached[~late]
        return outputs + self._windows.add(batch, starts, reached)

    def _late_rows(self, starts: Times, first: int, reached: Times) -> npt.NDArray[np.bool_] | None:
        """Mask of the rows whose window takes none any more at the watermark of the row; ``None``: no row is late.

        Args:
            starts: of the window of each row.
            first: the least of them, with which a batch is told that has no late row.
            reached: the watermark of each row, or one for all.
        """
        takes_us = self._windows.reach_us + self._spec.allowed_lateness_us
        if first + takes_us > int(reached.max()):
            return None
        late = starts + takes_us <= reached
        return late if late.any() else None

    def _slide(self, period: Period, batch: pa.RecordBatch, reached: Times) -> Outputs:
        times, lateness = self._times(batch), self._spec.allowed_lateness_us
        rows, starts = expand(period, times, lateness, reached, complete=False)
        if len(rows) and len(np.unique(rows)) == batch.num_rows:
            outputs: Outputs = []
        else:
            outputs = self._outside(period, batch, times, rows)
        reached = reached if len(reached) == 1 else reached[rows]
        return outputs + self._windows.add(batch.take(pa.array(rows)), starts, reached)

    def _outside(self, period: Period, batch: pa.RecordBatch, times: Times, rows: Times) -> Outputs:
        """Rows that go nowhere: late, or between two windows."""
        lost = np.ones(batch.num_rows, np.bool_)
        lost[rows] = False
        between = lost & ((times - period.offset_us) % period.every_us >= period.size_us)
        if between.any():
            self.ctx.count("rows_outside_windows", int(between.sum()))
        late = lost & ~between
        return self._late(batch, late)


def expand(period: Period, times: Times, lateness_us: int, reached: Times, *, complete: bool) -> tuple[Times, Times]:
    """Every (row, window start) such that the row lies in the window and the window still takes it.

    Args:
        complete: only windows that have fired.
    """
    nowhere: Times = np.empty(0, np.int64)
    arguments = (times, period.size_us, period.every_us, period.offset_us, lateness_us, complete, reached)
    count = kernels.expand(*arguments, nowhere, nowhere)
    rows: Times = np.empty(count, np.int64)
    starts: Times = np.empty(count, np.int64)
    if count:
        kernels.expand(*arguments, rows, starts)
    return rows, starts

"""Sliding windows over slices: a row is touched once, however many windows it lies in.

Time is cut where a window begins or ends, so at most twice for each ``every`` (paired windows: Krishnamurthy, Wu and
Franklin, "On-the-fly sharing for streamed aggregation", 2006).  A row goes into its slice.  When a window fires, its
slices are put together; what comes of it is an ordinary window then, which takes late rows one by one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from cutwater.data.words import fixed_view, from_words
from cutwater.operators.aggregate.keyed_operator import AggregateTable, aggregate_layout
from cutwater.operators.base import Outputs
from cutwater.operators.window import kernels
from cutwater.operators.window.operator import SLICE_ROWS, STATE, Times, WindowOperator, expand
from cutwater.operators.window.table import WindowTable
from cutwater.state.key_index import GroupIds
from cutwater.state.segments import Frozen, Segment
from cutwater.state.table.changes import Changed
from cutwater.state.table.keyed_segments import FrozenTable, deleted_segments, group_segments
from cutwater.state.table.timed_table import Pieces, Timing

if TYPE_CHECKING:
    from cutwater.operators.window.spec import WindowAggregateSpec

SLICES = "slice"


class SlicedWindowAggregate(WindowOperator[WindowTable]):
    """Slices by (start, key), and the windows that have fired.

    A slice lives until the last window over it has fired; a window lives from its firing to the end of its lateness.
    """

    _state_names = (STATE, SLICES)

    def __init__(self, spec: WindowAggregateSpec) -> None:
        super().__init__(spec)
        assert spec.window.period is not None
        self._window = spec.window.period
        self._reach_us = self._window.size_us - 1

    def _clear(self) -> None:
        super()._clear()
        spec = self._spec
        types = [spec.time_type, *(field.type for field in spec.key_fields)]
        layout, timing = aggregate_layout(spec.kept, spec.input_schema), Timing(self._reach_us, 0, fires=False)
        self._slices = self._backend.timed_table(types, layout, timing, lambda *_: None, self._expect)
        self._windows = WindowTable(spec, self._backend)
        self._ahead: list[int] = []  # starts of the windows to fire, a heap
        self._known: set[int] = set()
        self._parts: Iterator[tuple[int, GroupIds]] = iter(())  # what has still to be put together
        self._busy = False

    # -- rows

    def _take(self, batch: pa.RecordBatch, reached: Times) -> Outputs:
        for table in self._tables:
            table.make_room()
        window, lateness = self._window, self._spec.allowed_lateness_us
        times = self._times(batch)
        starts: Times = np.empty(batch.num_rows, np.int64)
        first, _ = kernels.assign(times, window.every_us, window.cut_us, window.offset_us, starts)
        batch = self._number(batch)
        if self._end(int(first)) - 1 > int(reached.max()):  # no window of any row has fired
            self._into_slices(batch, starts)
            return []
        last = starts - (starts - window.offset_us) % window.every_us  # the last window over the slice
        late = last + (self._reach_us + lateness) <= reached
        names = self._spec.input_schema.names
        outputs = [(number, rows.select(names)) for number, rows in self._late(batch, late)]
        waiting = last + self._reach_us > reached
        self._into_slices(batch.filter(pa.array(waiting)), starts[waiting])
        if lateness == 0:
            return outputs
        rows, windows = expand(window, times, lateness, reached, complete=True)
        reached = reached if len(reached) == 1 else reached[rows]
        return outputs + self._windows.add(batch.take(pa.array(rows)), windows, reached)

    def _end(self, start: int) -> int:
        """The end of the slice: the earliest end of a window over it is not before that."""
        begin = start - (start - self._window.offset_us) % self._window.every_us
        cut = begin + self._window.cut_us
        return cut if start < cut else begin + self._window.every_us

    def _into_slices(self, batch: pa.RecordBatch, starts: Times) -> None:
        if batch.num_rows == 0:
            return
        keys = [batch.column(name) for name in self._spec.keys]
        gids = self._slices.upsert(starts, keys)
        for accumulator in self._slices.table.accumulators:
            accumulator.update(gids, batch)

    def _expect(self, start: int) -> None:
        """Windows over a new slice will fire."""
        window = self._window
        begin = start - (start - window.offset_us) % window.every_us
        while begin + window.size_us > start and begin + self._reach_us > self._watermarks.current:
            if begin not in self._known:
                self._known.add(begin)
                heapq.heappush(self._ahead, begin)
            begin -= window.every_us

    # -- firing

    @property
    def _next_instant(self) -> int | None:
        return self._ahead[0] + self._reach_us if self._ahead else None

    def _advance(self) -> Pieces[Outputs]:
        due: list[int] = []
        while self._ahead and self._ahead[0] + self._reach_us <= self._watermarks.current:
            due.append(heapq.heappop(self._ahead))
            self._known.remove(due[-1])
        if any(table.scattered for table in self._tables):
            return Pieces(lambda _: [], later=self._fire_by_group(due))
        self._parts = self._to_put_together(due)
        self._busy = bool(due)
        return Pieces(lambda _: [])

    def _to_put_together(self, due: list[int]) -> Iterator[tuple[int, GroupIds]]:
        """The group ids of the slices of each window, in parts.

        They come one slice after the other: what is put together in another order may differ in its last bits.
        """
        for begin in due:
            gids, _ = self._slices.gids_of(self._slices_of(begin))
            for first in range(0, len(gids), SLICE_ROWS):
                yield begin, gids[first : first + SLICE_ROWS]

    def _slices_of(self, begin: int) -> list[int]:
        """The starts of the slices of a window."""
        window = self._window
        slices = range(begin, begin + window.size_us, window.every_us)
        starts = itertools.chain.from_iterable((s, s + window.cut_us) if window.cut_us else (s,) for s in slices)
        return [start for start in starts if start < begin + window.size_us]

    @property
    def _firing(self) -> bool:
        return self._busy or super()._firing

    def _more(self) -> Pieces[Outputs]:
        """Put one part together; when a window is whole, its group ids are due."""
        part = next(self._parts, None)
        if part is None:
            self._busy = False
            return self._windows.due(self._watermarks.current)
        begin, gids = part
        fresh = self._windows.due(begin - 1 + self._reach_us)  # of the windows before this one
        keys = self._slices.keys(gids)
        if self._before.differ:
            waiting = begin + self._reach_us > self._before.of(self._groups(keys))
            gids, keys = gids[waiting], [key.filter(pa.array(waiting)) for key in keys]
        into = self._windows.rows.upsert(np.full(len(gids), begin, np.int64), keys)
        _merge(self._windows.table, into, self._slices.table, gids)
        return fresh

    def _forget(self) -> None:
        super()._forget()
        self._slices.pass_by(self._watermarks.current)

    def _fire_by_group(self, due: list[int]) -> Iterator[Outputs]:
        """The windows that are due, a key group at a time; then slices and windows are forgotten.

        So what is put together at once fits in memory, and nothing of it is kept unless late rows are welcome.
        """
        watermark = self._watermarks.current
        for begin in due:
            for group, parts in self._slices.by_group(self._slices_of(begin)):
                floor = self._before.of(np.array([group], np.uint16))
                if begin + self._reach_us > int(floor[0]):
                    whole = self._windows.table.empty_page()
                    for slices, gids in parts:
                        self._add_slices(whole, begin, slices, gids)
                    yield self._windows.rows.take_over(whole, begin, watermark) if len(whole) else []
        for _ in self._slices.expired(watermark):
            yield []
        windows = self._windows.due(watermark)
        while windows.pending:
            yield windows.take(SLICE_ROWS) or []

    def _add_slices(self, whole: AggregateTable, begin: int, slices: AggregateTable, gids: GroupIds) -> None:
        if len(gids) == 0:
            return
        starts = from_words(np.full(len(gids), begin, np.int64), self._spec.time_type)
        into = whole.upsert([starts, *slices.index.columns(gids)[1:]])
        _merge(whole, into, slices, gids)

    # -- snapshots

    @property
    def _tables(self) -> Sequence[AggregateTable]:
        return [self._slices.table, self._windows.table]

    def freeze(self, checkpoint_id: int) -> Frozen:
        watermarks, groups = self._watermarks.segment(), self.ctx.max_parallelism
        slices = self._slices.frozen(checkpoint_id)
        windows, make = self._windows.frozen(checkpoint_id)
        width, schema = len(self._spec.keys), self._spec.state_schema
        identity = pa.schema([*self._spec.window_fields[:1], *list(schema)[:width]])

        def keys(part: AggregateTable, gids: GroupIds) -> list[pa.Array]:
            return part.index.columns(gids)[1:]

        def rows(part: AggregateTable, gids: GroupIds) -> list[pa.Array]:
            start, *columns = part.rows(gids)
            return [*columns[:width], start, pa.array(np.zeros(len(gids), np.bool_)), *columns[width:]]

        def segments(
            of_slices: Changed | None = None, of_windows: Changed | None = None, unsorted: bool = False
        ) -> Iterator[Segment]:
            yield watermarks
            if of_slices is not None:
                yield from deleted_segments(SLICES, identity, of_slices.deleted, lambda c: c[1:], groups)
            for part, gids, kind in slices.parts(of_slices):
                of, make_rows = partial(keys, part), partial(rows, part)
                yield from group_segments(SLICES, schema, gids, of, make_rows, groups, kind)
            yield from make(STATE, groups, of_windows)

        return FrozenTable([slices.table, windows], segments)

    def restore(self, segments: Iterable[Segment]) -> None:
        self._clear()
        tables = {STATE: self._windows.table, SLICES: self._slices.table}
        for name, batch in self._named_rows(tables, segments):
            if name == STATE:
                self._windows.restore(batch)
            else:
                self._restore_slices(batch)
        self._before = self._watermarks.copy()
        self._ahead = [begin for begin in self._ahead if begin + self._reach_us > self._watermarks.current]
        self._known = set(self._ahead)
        heapq.heapify(self._ahead)
        self._track(restored=True)

    def _restore_slices(self, batch: pa.RecordBatch) -> None:
        width = len(self._spec.keys)
        start, columns = batch.column(width), batch.columns
        self._slices.restore(fixed_view(start, np.int64), columns[:width], columns[width + 2 :])


def _merge(into: AggregateTable, gids: GroupIds, of: AggregateTable, parts: GroupIds) -> None:
    """Add the values of some group ids of a table to those of group ids of another one."""
    for accumulator, source in zip(into.accumulators, of.accumulators, strict=True):
        accumulator.merge(gids, source.state(parts))

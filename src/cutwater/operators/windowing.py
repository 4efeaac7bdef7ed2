"""The operator behind ``WindowAggregateSpec``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.errors import DataError
from cutwater.operators import window_kernels as kernels
from cutwater.operators.base import MIN_WATERMARK, BaseOperator, Outputs
from cutwater.operators.keyed_table import FrozenTable, KeyedTable, group_segments, keyed_rows
from cutwater.operators.open_windows import OpenWindows, join_slots
from cutwater.state.index import Slots
from cutwater.state.keys import hash_keys, key_groups, require_valid_keys, show_row
from cutwater.state.segments import GROUP_COLUMN, Frozen, Segment
from cutwater.state.words import fixed_view, from_words, valid_rows

if TYPE_CHECKING:
    from cutwater.operators.window import WindowAggregateSpec

__all__ = ["WindowAggregate"]

STATE = "window"
WATERMARK = "watermark"
_SLICE_ROWS = 1 << 16
_TIME_LIMIT = 2**62

Starts = npt.NDArray[np.int64]


class WindowAggregate(BaseOperator):
    """One table keyed by (window start, key); windows are lists of its slots.

    After a restore from several subtasks their watermarks may differ.  Then each key group keeps its own as a *floor*
    until the watermark has passed them all: so no window of a group fires twice, and late rows stay late.
    """

    def __init__(self, spec: WindowAggregateSpec) -> None:
        self._spec = spec
        self._output = spec.outputs[0]
        self._state = spec.state_schema
        self._reach_us = spec.window.size_us - 1
        self._clear()

    def _clear(self) -> None:
        spec = self._spec
        types = [spec.time_type, *(spec.input_schema.field(name).type for name in spec.keys)]
        self._table = KeyedTable(types, spec.aggregates, spec.input_schema)
        self._windows = OpenWindows(self._reach_us, spec.allowed_lateness_us)
        self._starts: Starts = np.empty(0, np.int64)
        self._fired: npt.NDArray[np.bool_] = np.empty(0, np.bool_)
        self._watermark = MIN_WATERMARK
        self._floors: Starts | None = None
        self._due: Slots = np.empty(0, np.int32)

    # -- rows

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        outputs: Outputs = []
        while self.pending:
            outputs += self.resume()
        if batch.num_rows == 0:
            return outputs
        require_valid_keys(batch, self._spec.keys)
        starts, first = self._assign(batch)
        reached = self._reached(batch)
        lateness = self._spec.allowed_lateness_us
        if self._may_pass(first + self._reach_us + lateness):
            late = starts + (self._reach_us + lateness) <= reached
            if late.any():
                outputs.append((1, batch.filter(pa.array(late))))
                self.ctx.count("rows_late", int(late.sum()))
                batch, starts = batch.filter(pa.array(~late)), starts[~late]
                reached = reached if isinstance(reached, int) else reached[~late]
        if batch.num_rows:
            slots = self._update(batch, starts)
            if self._may_pass(first + self._reach_us):
                outputs += self._fire_again(slots[starts + self._reach_us <= reached])
        return outputs

    def _assign(self, batch: pa.RecordBatch) -> tuple[Starts, int]:
        name = self._spec.event_time
        column = batch.column(name)
        valid = valid_rows(column)
        if valid is not None:
            row = int(np.flatnonzero(~valid)[0])
            raise DataError(
                f"event time {name!r} is null in row {row} of the batch: {show_row(batch, row)}",
                hint="Filter such rows out, or fill the column, before the window.",
            )
        starts: Starts = np.empty(batch.num_rows, np.int64)
        window = self._spec.window
        times = fixed_view(column, np.int64)
        first, _, bad = kernels.assign(times, window.size_us, window.offset_us, _TIME_LIMIT, starts)
        if bad >= 0:
            raise DataError(
                f"event time {name!r} in row {bad} of the batch is {int(times[bad])} us since 1970, over 146,000 years",
                hint="Check the unit of the source's time column.",
            )
        return starts, int(first)

    def _reached(self, batch: pa.RecordBatch) -> int | Starts:
        """The watermark that counts for each row: one for all, or by key group while floors are in force."""
        if self._floors is None:
            return self._watermark
        hashes = hash_keys([batch.column(name) for name in self._spec.keys])
        floors = self._floors[key_groups(hashes, self.ctx.max_parallelism)]
        return np.maximum(floors, self._watermark)

    def _may_pass(self, instant: int) -> bool:
        """Whether any row's watermark has reached ``instant``."""
        highest = self._watermark if self._floors is None else max(self._watermark, int(self._floors.max()))
        return instant <= highest

    def _update(self, batch: pa.RecordBatch, starts: Starts) -> Slots:
        keys = [batch.column(name) for name in self._spec.keys]
        slots = self._upsert([from_words(starts, self._spec.time_type), *keys], starts)
        for accumulator in self._table.accumulators:
            accumulator.update(slots, batch)
        return slots

    def _upsert(self, keys: list[pa.Array], starts: Starts) -> Slots:
        known = len(self._table)
        slots = self._table.upsert(keys)
        self._admit(known, slots, starts)
        return slots

    def _admit(self, known: int, slots: Slots, starts: Starts) -> None:
        used = len(self._table)
        if used > len(self._starts):
            size = 2 * used
            grown, fired = np.empty(size, np.int64), np.zeros(size, np.bool_)
            grown[:known], fired[:known] = self._starts[:known], self._fired[:known]
            self._starts, self._fired = grown, fired
        self._starts[slots] = starts
        self._fired[known:used] = False
        self._windows.add(known, self._starts[known:used])

    # -- firing

    def on_watermark(self, watermark: int) -> Outputs:
        outputs: Outputs = []
        while self.pending:
            outputs += self.resume()
        if watermark <= self._watermark:
            return outputs
        self._watermark = watermark
        if self._floors is not None and watermark >= int(self._floors.max()):
            self._floors = None
        due = self._windows.due(watermark)
        self._due = due[~self._fired[due]]
        self._fired[self._due] = True
        return outputs + self.resume()

    @property
    def pending(self) -> bool:
        return len(self._due) > 0

    def resume(self) -> Outputs:
        slots, self._due = self._due[:_SLICE_ROWS], self._due[_SLICE_ROWS:]
        outputs = self._results(slots)
        if not self.pending:
            self._windows.forget(self._watermark)
            if self._windows.wasteful:
                self._sweep()
        return outputs

    def _fire_again(self, slots: Slots) -> Outputs:
        touched = np.unique(slots)
        touched = touched[np.argsort(self._starts[touched], kind="stable")]
        self._fired[touched] = True
        return self._results(touched)

    def _results(self, slots: Slots) -> Outputs:
        if len(slots) == 0:
            return []
        start, *keys = self._table.index.columns(slots)
        end = from_words(self._starts[slots] + self._spec.window.size_us, self._spec.time_type)
        results = [accumulator.result(slots) for accumulator in self._table.accumulators]
        return [(0, pa.RecordBatch.from_arrays([*keys, start, end, *results], schema=self._output))]

    def _sweep(self) -> None:
        kept = self._windows.sweep()
        self._table.keep(kept)
        self._starts, self._fired = self._starts[kept], self._fired[kept]

    # -- snapshots

    def freeze(self, checkpoint_id: int) -> Frozen:
        table, fired, parts = self._table.frozen(), self._fired[: len(self._table)].copy(), self._windows.live_parts()
        watermarks = self._watermarks()
        groups, owned = self.ctx.max_parallelism, self.ctx.key_groups
        width = len(self._spec.keys) + 1

        def rows(slots: Slots) -> list[pa.Array]:
            columns = table.rows(slots)
            return [*columns[1:width], columns[0], pa.array(fired[slots]), *columns[width:]]

        def segments() -> Iterator[Segment]:
            yield Segment(WATERMARK, "base", watermarks, (owned.start, owned.stop))
            slots = join_slots(parts)
            yield from group_segments(STATE, self._state, slots, lambda s: table.index.columns(s)[1:], rows, groups)

        return FrozenTable(table, segments)

    def _watermarks(self) -> pa.RecordBatch:
        owned = np.arange(self.ctx.key_groups.start, self.ctx.key_groups.stop)
        values = np.full(len(owned), self._watermark, np.int64)
        if self._floors is not None:
            values = np.maximum(values, self._floors[owned])
        return pa.record_batch({GROUP_COLUMN: pa.array(owned, pa.uint16()), WATERMARK: values})

    def restore(self, segments: Iterable[Segment]) -> None:
        self._clear()
        states: list[Segment] = []
        floors = np.full(self.ctx.max_parallelism, MIN_WATERMARK, np.int64)
        for segment in segments:
            if segment.name == STATE:
                states.append(segment)
            elif segment.name == WATERMARK:
                groups: Any = segment.batch.column(GROUP_COLUMN).to_numpy()
                floors[groups] = segment.batch.column(WATERMARK).to_numpy()
        self._restore_rows(states)
        owned = self.ctx.key_groups
        mine = floors[owned.start : owned.stop]
        self._watermark = int(mine.min())
        if int(mine.max()) > self._watermark:
            floors[: owned.start] = floors[owned.stop :] = MIN_WATERMARK
            self._floors = floors

    def _restore_rows(self, segments: list[Segment]) -> None:
        width = len(self._spec.keys)
        for batch in keyed_rows(segments, self._state, self.ctx.key_groups):
            keys, (start, fired), state = (
                batch.columns[:width],
                batch.columns[width : width + 2],
                batch.columns[width + 2 :],
            )
            known = len(self._table)
            slots = self._table.restore([start, *keys], state)
            self._admit(known, slots, fixed_view(start, np.int64))
            self._fired[slots] = fired.to_numpy(zero_copy_only=False)

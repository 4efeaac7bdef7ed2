"""The operators behind ``ProcessorSpec``: what both forms share, and the form of rows."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from cutwater.data.event_times import event_times
from cutwater.data.rows import Row
from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.errors import CutwaterError, UserCodeError
from cutwater.operators.base import Outputs
from cutwater.operators.process.object_operator import TIMERS_PER_SLICE, ObjectOperator
from cutwater.operators.row_output import to_dicts, user_error
from cutwater.operators.stateful_processor.handle import Handle
from cutwater.operators.stateful_processor.output import TupleBuilder
from cutwater.operators.stateful_processor.records import Record
from cutwater.operators.stateful_processor.spark_types import expired_timer_info, row_maker, timer_values
from cutwater.operators.stateful_processor.spec import ProcessorSpec
from cutwater.operators.stateful_processor.time_mode import TimeMode
from cutwater.state.keys import hash_keys, key_groups, require_valid_keys
from cutwater.state.objects.timers import PREFIX, TimerDomain
from cutwater.state.segments import GROUP_COLUMN, Segment

Key = tuple[Hashable, ...]

_INITIAL = PREFIX + "initial"
"""Segment that names the key groups whose initial state was taken."""


class ProcessorOperator(ObjectOperator):
    """Groups a slice by key, binds states and timers to each key in turn, and calls the user's processor."""

    def __init__(self, spec: ProcessorSpec, processor: Any) -> None:
        states = {name: declaration.make() for name, declaration in spec.states.items()}
        fires = spec.time_mode is not TimeMode.NONE
        super().__init__(spec.key_fields, states, fires=fires, name=spec.user, handler="time mode")
        self._spec, self._processor, self._mode = spec, processor, spec.time_mode
        self._key_record = Record(pa.schema(spec.key_fields))
        self._handle = Handle(spec.user, self._mode, self._states, self._cursor, self._timers[self._mode.domain])
        self._last_watermark = MIN_WATERMARK  # before the end of the input
        self._initialised: set[int] = set()  # key groups whose initial state was taken
        self._opened = False

    @abstractmethod
    def _handle_rows(self, batch: pa.RecordBatch) -> Outputs:
        """Call the processor with the rows of each key."""

    @abstractmethod
    def _handle_initial(self, batch: pa.RecordBatch) -> None:
        """Call the processor with the initial state of each key."""

    @abstractmethod
    def _add(self, result: Any, row: Row, index: int) -> None:
        """Keep what the processor made of unit ``index``."""

    @abstractmethod
    def _take(self, origin: Callable[[int], Row], unit: str = "key") -> Outputs:
        """What was kept, as batches."""

    # ------------------------------------------------------------------------------------------------------- rows

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        if batch.num_rows == 0:
            return []
        require_valid_keys(batch, self._spec.keys)
        self._open()
        late: Outputs = []
        if self._mode is TimeMode.EVENT:
            batch, late = self._without_late_rows(batch)
        return [*(self._handle_rows(batch) if batch.num_rows else []), *late]

    def _without_late_rows(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, Outputs]:
        """As in Spark: rows at or behind the watermark are late."""
        assert self._spec.event_time is not None
        times = event_times(batch, self._spec.event_time)
        reached: Any = self._watermarks.current
        if self._watermarks.differ:
            reached = np.array(self._watermarks_of(batch, self._spec.keys))
        late = times <= np.maximum(reached, self.late_before)
        if not late.any():
            return batch, []
        self.ctx.count("rows_late", int(late.sum()))
        return batch.filter(pa.array(~late)), [(1, batch.filter(pa.array(late)))]

    def _bind(self, key: Key) -> Key:
        """States and timers are about this key from now on; returns it as the processor sees it."""
        self._cursor.key = key
        return key if self._plain_keys else tuple(r(v) if r else v for r, v in zip(self._key_revives, key, strict=True))

    def _times(self, key: Key | None = None, timer: int | None = None) -> Any:
        """What the processor is told of the time.

        Args:
            key: whose watermark is told, where they differ.
            timer: the event-time timer that is being handled, microseconds.
        """
        if self._mode is TimeMode.NONE:
            return timer_values(-1, -1)
        now_ms = self.ctx.processing_time_ms()
        if self._mode is TimeMode.PROCESSING:
            return timer_values(now_ms, -1)
        reached = self._watermarks.current if key is None else self._watermark_of_key(key)
        if reached == MAX_WATERMARK:  # the end of time is no time to reckon with
            reached = self._last_watermark if timer is None else max(self._last_watermark, timer)
        self._handle.watermark_ms = max(reached // 1000, 0)
        return timer_values(now_ms, self._handle.watermark_ms)

    def _call(self, method: Callable[..., Any], arguments: tuple[Any, ...], row: Row, index: int, unit: str) -> Any:
        """What the processor makes, complete: its states may be bound to another key then."""
        try:
            return [*method(*arguments)]
        except Exception as exc:
            raise self._error(method, exc, row, index, unit) from exc

    def _error(self, method: Callable[..., Any], exc: Exception, row: Row, index: int, unit: str) -> UserCodeError:
        error = user_error(method, exc, row=row, index=index, unit=unit)
        if isinstance(exc, CutwaterError):
            error.hint = exc.hint
        elif isinstance(exc, TypeError) and "after * must be an iterable" in str(exc):
            error.hint = "Yield what it makes, or return an iterator; if there is nothing: return iter([])."
        return error

    def _key_row(self, key: Key) -> Row:
        return dict(zip(self._spec.keys, key, strict=True))

    # ----------------------------------------------------------------------------------------------------- timers

    def _watermark_rose(self) -> None:
        if self._watermarks.current < MAX_WATERMARK:
            self._last_watermark = self._watermarks.current

    def _fire(self, domain: TimerDomain, until: int) -> Outputs:
        fired: list[Row] = []
        call, unit = self._processor.handleExpiredTimer, self._mode.unit
        for time, key in self._timers[domain].due(until, TIMERS_PER_SLICE):
            self._open()
            # As in Spark, where a query that has ended leaves timers behind: what timers set now would have no end.
            self._handle.at_end = domain == self._mode.domain and until == MAX_WATERMARK
            seen, times = self._bind(key), self._times(key, time)
            self._handle.firing_ms = time // unit
            row = {**self._key_row(key), "time": time // unit}
            made = self._call(call, (seen, times, expired_timer_info(time // unit)), row, len(fired), "timer")
            self._handle.firing_ms = None
            for result in made:
                self._add(result, row, len(fired))
            fired.append(row)
        if self._handle.ignored_timers:
            self.ctx.count("timers_after_end", self._handle.ignored_timers)
            self._handle.ignored_timers = 0
        return self._take(fired.__getitem__, "timer") if fired else []

    # --------------------------------------------------------------------------------------------------- lifecycle

    def _open(self) -> None:
        """With the first row or timer, or the initial state: a user's ``init`` may be slow."""
        if self._opened:
            return
        self._opened = True
        self._key_revives = [column.revive for column in self._key_record.columns]
        self._plain_keys = not any(self._key_revives)
        try:
            self._processor.init(self._handle)
        except CutwaterError:
            raise
        except Exception as exc:
            raise user_error(self._processor.init, exc) from exc
        self._handle.running = True
        self._take_initial_state()

    def _take_initial_state(self) -> None:
        if self._spec.initial is None:
            return
        wanted = np.array([g for g in self.ctx.key_groups if g not in self._initialised], np.uint16)
        self._initialised = set(self.ctx.key_groups)
        for batch in self._spec.initial.load().combine_chunks().to_batches():
            require_valid_keys(batch, self._spec.keys)
            groups = key_groups(hash_keys([batch.column(k) for k in self._spec.keys]), self.ctx.max_parallelism)
            mine = batch.filter(pa.array(np.isin(groups, wanted)))
            if mine.num_rows:
                self._handle_initial(mine)

    def _more_parts(self) -> list[Callable[[], Iterable[Segment]]]:
        if self._spec.initial is None:
            return []
        groups = self.ctx.key_groups
        batch = pa.record_batch({GROUP_COLUMN: np.array(sorted(self._initialised), np.uint16)})
        return [lambda: [Segment(_INITIAL, "base", batch, (groups.start, groups.stop))]]

    def _more_names(self) -> Collection[str]:
        return () if self._spec.initial is None else (_INITIAL,)

    def _restore_more(self, segments: Mapping[str, list[Segment]]) -> None:
        for segment in segments.get(_INITIAL, ()):
            self._initialised.update(segment.batch.column(GROUP_COLUMN).to_pylist())
        if self._spec.initial is not None and not self.ctx.repeatable:  # or with the next call, at the time of then
            self._open()

    def close(self) -> None:
        try:
            if self._opened:
                self._processor.close()
        finally:
            super().close()


class RowProcessorOperator(ProcessorOperator):
    """Gives and takes ``Row`` objects."""

    def __init__(self, spec: ProcessorSpec, processor: Any) -> None:
        super().__init__(spec, processor)
        self._record = Record(spec.input_schema)
        self._made = TupleBuilder(processor.handleInputRows, spec.output_schema)

    def _handle_rows(self, batch: pa.RecordBatch) -> Outputs:
        groups = self._grouped(batch)
        make, call, keep = row_maker(self._record.names), self._processor.handleInputRows, self._made.extend
        cursor, plain, differ = self._cursor, self._plain_keys, self._watermarks.differ
        times = self._times()
        for index, (key, rows) in enumerate(zip(self._ahead(groups), groups.values(), strict=True)):
            cursor.key = key
            seen = key if plain else self._bind(key)
            if differ:
                times = self._times(key)
            try:
                keep([*call(seen, map(make, rows), times)], index)
            except Exception as exc:
                raise self._error(call, exc, self._key_row(key), index, "key") from exc
        keys = list(groups)
        return self._take(lambda index: self._key_row(keys[index]))

    def _grouped(self, batch: pa.RecordBatch) -> dict[Key, list[tuple[Any, ...]]]:
        """The rows of each key, in the order in which the keys came."""
        try:
            keys = zip(*(batch.column(name).to_pylist() for name in self._spec.keys), strict=True)
            rows = zip(*self._record.seen(batch.columns), strict=True)
        except (OverflowError, ValueError):
            to_dicts(batch)  # says which row has no Python value
            raise
        groups: dict[Key, list[tuple[Any, ...]]] = {}
        for key, row in zip(keys, rows, strict=True):
            found = groups.get(key)
            if found is None:
                groups[key] = [row]
            else:
                found.append(row)
        return groups

    def _handle_initial(self, batch: pa.RecordBatch) -> None:
        record = Record(batch.schema)
        make, times = row_maker(record.names), self._times()
        keys = zip(*(batch.column(k).to_pylist() for k in self._spec.keys), strict=True)
        for index, (key, row) in enumerate(zip(keys, zip(*record.seen(batch.columns), strict=True), strict=True)):
            arguments = (self._bind(key), make(row), times)
            try:
                self._processor.handleInitialState(*arguments)
            except Exception as exc:
                raise user_error(self._processor.handleInitialState, exc, row=self._key_row(key), index=index) from exc

    def _add(self, result: Any, row: Row, index: int) -> None:
        self._made.add(result, row, index)

    def _take(self, origin: Callable[[int], Row], unit: str = "key") -> Outputs:
        self._made.unit = unit
        return self._made.take(0, origin)

"""The operator behind ``ProcessSpec``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from typing import Any, cast

import pyarrow as pa

from cutwater.errors import CutwaterError, StorageError, UserCodeError
from cutwater.operators.base import MAX_WATERMARK, MIN_WATERMARK, BaseOperator, Context, Outputs
from cutwater.operators.join_watermarks import WATERMARK, GroupWatermarks
from cutwater.operators.object_segments import object_rows, object_segments
from cutwater.operators.operator_state import BroadcastState
from cutwater.operators.process import (
    BatchContext,
    BatchProcessFunction,
    ProcessContext,
    StatefulFunction,
    declared_operator_states,
    declared_states,
)
from cutwater.operators.process_spec import ProcessSpec
from cutwater.operators.process_state import Cursor, KeyedState
from cutwater.operators.row_output import RowBuilder, conform_batch, rows_of, to_dicts, user_error
from cutwater.operators.rows import Row, row_contents
from cutwater.operators.timers import EVENT, PROCESSING, TimerDomain, Timers, TimerService, timer_rows
from cutwater.state.keys import hash_keys, key_groups, require_valid_keys
from cutwater.state.objects import FrozenObjects
from cutwater.state.segments import Frozen, FrozenSegments, Segment

__all__ = ["ProcessOperator"]

VALUE = "__value"
"""Column of a state's segments that holds the content of a key."""

TIME = pa.field("__time", pa.int64())
"""Column of the timers' segments."""

TIMERS_PER_SLICE = 128
KEYS_PER_CLEANUP = 512

_PREFIX = "__"
"""Begins the names of the segments that are no state of the user's."""


class _NoKey(tuple[Hashable, ...]):
    """Stands for the key of a row that has none: whatever is looked up by it is an error."""

    def __hash__(self) -> int:
        raise UserCodeError(
            "a row without key has no keyed state and no timers",
            hint="Keep what belongs to no key in a cw.BroadcastState or cw.OperatorListState.",
        )


_NO_KEY = _NoKey()


class ProcessOperator(BaseOperator):
    """Binds states and timers to the key of each row, and calls the user's function with rows and timers."""

    def __init__(self, spec: ProcessSpec, function: StatefulFunction) -> None:
        self._spec, self._function = spec, function
        self._keys = spec.key_fields
        self._cursor = Cursor()
        self._states = {name: state.fresh() for name, state in declared_states(function).items()}
        self._others = {name: state.fresh() for name, state in declared_operator_states(function).items()}
        for state in self._states.values():
            state.attach(self._cursor)
        for name, state in (*self._states.items(), *self._others.items()):
            setattr(function, name, state)
        self._broadcast = [state for state in self._others.values() if isinstance(state, BroadcastState)]
        self._expiring = [state for state in self._states.values() if state.expires]
        self._timers = {EVENT: Timers(), PROCESSING: Timers()}
        self._fires = spec.fires
        self._firing = False  # event-time timers of the current watermark are left
        self._patience = 0
        self._outputs = [RowBuilder(type(function), schema) for schema in spec.outputs]
        self._sides = {name: number for number, (name, _) in enumerate(spec.side, start=1)}
        self._row: tuple[Row, int] = ({}, 0)
        self._side_batches: Outputs = []
        self._opened = False

    def open(self, ctx: Context) -> None:
        super().open(ctx)

        def count(metric: str, amount: int) -> None:
            ctx.count(metric, amount)

        timers = TimerService(self._timers[EVENT], self._timers[PROCESSING], self._function, self._fires)
        self._cursor.now_ms = ctx.processing_time_ms
        made = (ctx.step, ctx.subtask, self._emit, count, ctx.processing_time_ms, timers)
        if isinstance(self._function, BatchProcessFunction):
            self._context = BatchContext(*made).connect(self._spec.keys, self._bind)
        else:
            self._context = ProcessContext(*made)
        self._watermarks = GroupWatermarks(ctx.key_groups, ctx.max_parallelism)

    # ------------------------------------------------------------------------------------------------------- rows

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        if batch.num_rows == 0:
            return []
        side = self._spec.inputs[input]
        require_valid_keys(batch, side.keys)
        self._open()
        if isinstance(self._function, BatchProcessFunction):
            return self._process_batch(self._function, batch)
        for state in self._broadcast:
            state.is_writable = side.broadcast
        main, bind = self._outputs[0], self._bind
        call = getattr(self._function, self._function.takes[input])
        keys: Iterable[tuple[Hashable, ...]] = repeat(_NO_KEY, batch.num_rows)
        if side.keys:
            keys = zip(*(batch.column(name).to_pylist() for name in side.keys), strict=True)
        watermarks = self._watermarks_of(batch, side.keys) if side.keys and self._watermarks.differ else None
        for index, (key, row) in enumerate(zip(keys, to_dicts(batch), strict=True)):
            bind(key)
            if watermarks is not None:
                self._context.watermark = watermarks[index]
            self._row = row, index
            for made in self._made_by(call, (row, self._context), row, index):
                main.add(made, row, index)
        self._context.watermark = self._watermarks.current
        return self._take(partial(row_contents, batch))

    def _process_batch(self, function: BatchProcessFunction, batch: pa.RecordBatch) -> Outputs:
        self._bind(_NO_KEY)
        for state in self._broadcast:
            state.is_writable = self._spec.broadcast
        try:
            made = list(function.process_batch(batch, cast(BatchContext, self._context)) or ())
        except UserCodeError:
            raise
        except Exception as exc:
            raise user_error(function.process_batch, exc) from exc
        batches = [(0, conform_batch(function.process_batch, result, self._spec.output_schema)) for result in made]
        return [b for b in batches if b[1].num_rows] + self._take(partial(row_contents, batch))

    def _bind(self, key: tuple[Hashable, ...]) -> None:
        self._cursor.key = key
        self._context.timers.bind(key)
        self._context.key = key[0] if len(key) == 1 else key or None

    def _watermarks_of(self, batch: pa.RecordBatch, keys: Sequence[str]) -> list[int]:
        groups = key_groups(hash_keys([batch.column(k) for k in keys]), self.ctx.max_parallelism)
        return self._watermarks.of(groups).tolist()

    def _take(self, origin: Callable[[int], Row]) -> Outputs:
        batches, self._side_batches = self._side_batches, []
        return [o for number, builder in enumerate(self._outputs) for o in builder.take(number, origin)] + batches

    # ----------------------------------------------------------------------------------------------------- timers

    def on_watermark(self, watermark: int) -> Outputs:
        if not self._watermarks.advance(watermark):
            return []
        self._context.watermark = watermark
        self._patience = 100_000 + 1000 * len(self._timers[EVENT])
        return self.resume()

    @property
    def pending(self) -> bool:
        return self._firing

    def resume(self) -> Outputs:
        outputs = self._fire(EVENT, self._watermarks.current)
        first = self._timers[EVENT].next_time
        self._firing = first is not None and first <= self._watermarks.current
        return outputs

    @property
    def next_processing_time_ms(self) -> int | None:
        first = self._timers[PROCESSING].next_time
        for state in self._expiring:
            cleanup = state.next_cleanup_ms
            if cleanup is not None and (first is None or cleanup < first):
                first = cleanup
        return first

    @property
    def timers_pending(self) -> bool:
        return len(self._timers[PROCESSING]) > 0

    def on_processing_time(self, now_ms: int) -> Outputs:
        for state in self._expiring:
            state.clean_up(now_ms, KEYS_PER_CLEANUP)
        return self._fire(PROCESSING, now_ms)

    def _fire(self, domain: TimerDomain, until: int) -> Outputs:
        """A slice of the timers that are due."""
        fired: list[Row] = []
        main, call, context = self._outputs[0], self._function.on_timer, self._context
        last = MIN_WATERMARK
        for time, key in self._timers[domain].due(until, TIMERS_PER_SLICE):
            if not fired:
                self._open()
                self._name_units("timer")
                for state in self._broadcast:
                    state.is_writable = False
            if domain == EVENT and (time <= last or until == MAX_WATERMARK):
                self._check_progress(time)
            last = time
            self._bind(key)
            if self._watermarks.differ:
                context.watermark = self._watermarks_of(self._key_batch(key), self._spec.keys)[0]
            row = {**dict(zip(self._spec.keys, key, strict=True)), "time": time, "domain": domain}
            self._row = row, len(fired)
            for made in self._made_by(call, (time, domain, context), row, len(fired)):
                main.add(made, row, len(fired))
            fired.append(row)
        if not fired:
            return []
        context.watermark = self._watermarks.current
        outputs = self._take(fired.__getitem__)
        self._name_units("row")
        return outputs

    def _check_progress(self, time: int) -> None:
        """A function that sets timers for ever would hold the watermark, and every barrier, for ever."""
        self._patience -= 1
        if self._patience < 0:
            at_end = self._watermarks.current == MAX_WATERMARK
            raise UserCodeError(
                f"{type(self._function).__name__}.on_timer sets event-time timers without end (the last at {time}): "
                + ("the input has ended, so each fires at once" if at_end else "they lie behind the watermark"),
                hint="Set the next timer only while not ctx.at_end."
                if at_end
                else "Set timers for times after ctx.watermark.",
            )

    def _name_units(self, unit: str) -> None:
        for builder in self._outputs:
            builder.unit = unit

    def _key_batch(self, key: tuple[Hashable, ...]) -> pa.RecordBatch:
        return pa.RecordBatch.from_arrays(
            [pa.array([value], field.type) for value, field in zip(key, self._keys, strict=True)],
            schema=pa.schema(self._keys),
        )

    # -------------------------------------------------------------------------------------------------- snapshots

    def freeze(self, checkpoint_id: int) -> Frozen:
        groups = self.ctx.max_parallelism
        frozen: list[FrozenObjects[Any]] = []
        parts: list[Callable[[], Iterable[Segment]]] = []
        for name, state in self._states.items():
            frozen.append(objects := state.freeze())
            rows = partial(_stored_rows, state, objects)
            parts.append(lambda n=name, s=state, r=rows: object_segments(n, self._keys, _value_field(s), r(), groups))
        for state in self._others.values():
            segments = state.freeze(self.ctx)
            parts.append(lambda s=segments: s)
        if self._fires:
            for domain, timers in self._timers.items():
                frozen.append(times := timers.freeze())
                name = f"{_PREFIX}{domain}_timers"
                parts.append(lambda n=name, t=times: object_segments(n, self._keys, TIME, timer_rows(t), groups))
        if parts and self._watermarks.current > MIN_WATERMARK:
            marks = replace(self._watermarks.segment(), name=_PREFIX + WATERMARK)
            parts.append(lambda: [marks])
        return _FrozenProcess(parts, frozen)

    def restore(self, segments: Iterable[Segment]) -> None:
        found: dict[str, list[Segment]] = {}
        for segment in segments:
            found.setdefault(segment.name, []).append(segment)
        owned = self.ctx.key_groups
        for name, state in self._states.items():
            for key, value in object_rows(found.get(name, ()), self._keys, _value_field(state), owned):
                state.restore(key, value)
        for name, state in self._others.items():
            state.restore(found.get(name, ()), self.ctx)
        for domain, timers in self._timers.items():
            timers.restore(object_rows(found.get(f"{_PREFIX}{domain}_timers", ()), self._keys, TIME, owned))
            if len(timers) and not self._fires:
                raise StorageError(
                    f"the snapshot holds {len(timers)} {domain}-time timers, and {type(self._function).__name__} "
                    "has no on_timer any more",
                    hint="Give it its on_timer back, or give the step a new id to begin empty.",
                )
        for segment in found.get(_PREFIX + WATERMARK, ()):
            self._watermarks.restore(segment)
        self._watermarks.restored()
        self._context.watermark = self._watermarks.current

    def close(self) -> None:
        if self._opened:
            self._function.close()

    # ------------------------------------------------------------------------------------------------ user's code

    def _open(self) -> None:
        """With the first row or timer: a user's ``open`` may be slow, and a subtask without rows needs none."""
        if self._opened:
            return
        self._opened = True
        try:
            self._function.open(self._context)
        except Exception as exc:
            raise user_error(type(self._function).open, exc) from exc

    def _made_by(self, call: Callable[..., Any], arguments: tuple[Any, ...], row: Row, index: int) -> list[Any]:
        """What the user's function makes of a row, or of a timer."""
        try:
            result = call(*arguments)
            made = [] if result is None else rows_of(result)
        except Exception as exc:
            if isinstance(exc, UserCodeError) and exc.row is not None:
                raise  # a row for a side output, which names its row already
            error = user_error(call, exc, row=row, index=index, unit=self._outputs[0].unit)
            error.hint = exc.hint if isinstance(exc, CutwaterError) else error.hint
            raise error from exc
        if made is None:
            raise self._outputs[0].misfit(
                f"returned {type(result).__name__} instead of an iterable of dicts", row, index
            )
        return made

    def _emit(self, side: str, made: Mapping[str, Any] | pa.RecordBatch) -> None:
        row, index = self._row
        number = self._sides.get(side)
        if number is None:
            known = ", ".join(map(repr, self._sides)) or "none"
            raise self._outputs[0].misfit(f"wrote to side output {side!r} (declared: {known})", row, index)
        if isinstance(made, pa.RecordBatch):
            self._side_batches.append((number, conform_batch(type(self._function), made, self._spec.outputs[number])))
        else:
            self._outputs[number].add(made, row, index)


def _value_field(state: KeyedState) -> pa.Field:
    return pa.field(VALUE, state.stored_type)


def _stored_rows(state: KeyedState, frozen: FrozenObjects[Any]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    return ((key, state.stored(value)) for key, value in frozen.items())


class _FrozenProcess(FrozenSegments):
    """States and timers of an operator at one instant."""

    def __init__(self, parts: list[Callable[[], Iterable[Segment]]], frozen: list[FrozenObjects[Any]]) -> None:
        super().__init__(lambda: chain.from_iterable(part() for part in parts))
        self._frozen = frozen

    def release(self) -> None:
        super().release()
        for objects in self._frozen:
            objects.release()

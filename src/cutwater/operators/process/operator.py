"""The operator behind ``ProcessSpec``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from functools import partial
from itertools import repeat
from typing import Any, cast

import pyarrow as pa

from cutwater.data.rows import Row, row_contents
from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.errors import CutwaterError, UserCodeError
from cutwater.operators.base import Context, Outputs
from cutwater.operators.process.functions import (
    BatchContext,
    BatchProcessFunction,
    ProcessContext,
    StatefulFunction,
    declared_operator_states,
    declared_states,
)
from cutwater.operators.process.object_operator import TIMERS_PER_SLICE, ObjectOperator
from cutwater.operators.process.operator_state import BroadcastState
from cutwater.operators.process.spec import ProcessSpec
from cutwater.operators.row_output import RowBuilder, conform_batch, rows_of, to_dicts, user_error
from cutwater.state.keys import require_valid_keys
from cutwater.state.objects.timers import EVENT, PROCESSING, TimerDomain, TimerService
from cutwater.state.segments import Segment


class _NoKey(tuple[Hashable, ...]):
    """Stands for the key of a row that has none: whatever is looked up by it is an error."""

    def __hash__(self) -> int:
        raise UserCodeError(
            "a row without key has no keyed state and no timers",
            hint="Keep what belongs to no key in a cw.BroadcastState or cw.OperatorListState.",
        )


_NO_KEY = _NoKey()


class ProcessOperator(ObjectOperator):
    """Binds states and timers to the key of each row, and calls the user's function with rows and timers."""

    def __init__(self, spec: ProcessSpec, function: StatefulFunction) -> None:
        name = type(function).__name__
        super().__init__(spec.key_fields, declared_states(function), fires=spec.fires, name=name, handler="on_timer")
        self._spec, self._function = spec, function
        self._others = {name: state.fresh() for name, state in declared_operator_states(function).items()}
        for name, state in (*self._states.items(), *self._others.items()):
            setattr(function, name, state)
        self._broadcast = [state for state in self._others.values() if isinstance(state, BroadcastState)]
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
        made = (ctx.step, ctx.subtask, self._emit, count, ctx.processing_time_ms, timers)
        if isinstance(self._function, BatchProcessFunction):
            self._context = BatchContext(*made).connect(self._spec.keys, self._bind)
        else:
            self._context = ProcessContext(*made)

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
            keys = self._ahead(zip(*(batch.column(name).to_pylist() for name in side.keys), strict=True))
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

    def _take(self, origin: Callable[[int], Row]) -> Outputs:
        batches, self._side_batches = self._side_batches, []
        return [o for number, builder in enumerate(self._outputs) for o in builder.take(number, origin)] + batches

    # ----------------------------------------------------------------------------------------------------- timers

    def _watermark_rose(self) -> None:
        self._context.watermark = self._watermarks.current

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
            context.watermark = self._watermark_of_key(key)
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

    # -------------------------------------------------------------------------------------------------- snapshots

    def _more_parts(self) -> list[Callable[[], Iterable[Segment]]]:
        frozen = [state.freeze(self.ctx) for state in self._others.values()]
        return [lambda s=segments: s for segments in frozen]

    def _more_names(self) -> Collection[str]:
        return self._others.keys()

    def _restore_more(self, segments: Mapping[str, list[Segment]]) -> None:
        for name, state in self._others.items():
            state.restore(segments.get(name, ()), self.ctx)

    def close(self) -> None:
        try:
            if self._opened:
                self._function.close()
        finally:
            super().close()

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

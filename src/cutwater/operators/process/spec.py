"""Process functions as a step: what a dataflow carries of one, every check before rows flow, and the operator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import repeat
from types import GeneratorType, SimpleNamespace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import pyarrow as pa

from cutwater.data.python_values import BatchValues
from cutwater.data.rows import Row, row_contents
from cutwater.data.schema_text import as_schema
from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.errors import BuildError, CutwaterError, UserCodeError
from cutwater.operators.base import Context, KeyedSpec, Operator, Outputs
from cutwater.operators.join.columns import common_key_type
from cutwater.operators.process.evolution import StateForm, evolve_states
from cutwater.operators.process.functions import (
    BatchContext,
    BatchProcessFunction,
    BroadcastProcessFunction,
    CoProcessFunction,
    ProcessContext,
    ProcessFunction,
    StatefulFunction,
    declared_operator_states,
    declared_states,
)
from cutwater.operators.process.object_operator import TIMERS_PER_SLICE, ObjectOperator
from cutwater.operators.process.operator_state import BroadcastState, OperatorState
from cutwater.operators.process.states import KeyedState
from cutwater.operators.row_output import (
    ROWS_AT_ONCE,
    RowBuilder,
    conform_batch,
    function_name,
    rows_of,
    to_values,
    user_error,
)
from cutwater.state.keys import check_key_types, require_valid_keys
from cutwater.state.objects.records import unbound
from cutwater.state.objects.timers import EVENT, PROCESSING, TimerDomain, TimerService, timers_segment
from cutwater.state.segments import Segment
from cutwater.storage.snapshot.manifest import Shape, TableRecord

if TYPE_CHECKING:
    from cutwater.operators.evolution import Evolution, Former


@dataclass(frozen=True)
class ProcessInput:
    """Rows of one stream: their schema, their key columns (none: rows without key), whether everybody gets them."""

    schema: pa.Schema
    keys: tuple[str, ...] = ()
    broadcast: bool = False


@dataclass(frozen=True)
class ProcessSpec(KeyedSpec):
    """A process function over the rows of one stream or two.

    Args:
        input_schema: schema of the rows (of the left stream).
        keys: their key columns; none: the function has no keyed state and no timers.
        function: the user's object; each subtask works with a copy.
        output_schema: of what the function yields, or a text such as ``"node long, label long"``.
        side: schemas of the side outputs by name.
        right: the other stream, of a ``CoProcessFunction`` or ``BroadcastProcessFunction``.
        broadcast: every subtask gets every row of the (only) stream.

    Raises:
        BuildError: not the process function that fits, states that need a key where there is none, no schema, a key
            column that cannot be a key, or keys of the two streams that do not fit each other.
    """

    repeatable = True

    function: StatefulFunction
    output_schema: pa.Schema
    side: tuple[tuple[str, pa.Schema], ...] = ()
    right: ProcessInput | None = None
    broadcast: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_schema", as_schema(self.output_schema))
        object.__setattr__(self, "side", tuple((name, as_schema(schema)) for name, schema in self.side))
        self._check_function()
        for side in self.inputs:
            if side.keys:
                check_key_types(side.schema, side.keys)
        if self.right is not None and not self.right.broadcast and len(self.right.keys) != len(self.keys):
            raise BuildError(
                f"the left stream has {len(self.keys)} key columns, the right one {len(self.right.keys)}",
                hint="Call key_by on both, with as many columns, or on neither.",
            )
        _ = self.key_fields
        self._check_states()
        for name, schema in (("the output", self.output_schema), *self.side):
            if len(schema) == 0:
                raise BuildError(f"the schema of {name} has no columns")

    @property
    def inputs(self) -> tuple[ProcessInput, ...]:
        left = ProcessInput(self.input_schema, self.keys, self.broadcast)
        return (left,) if self.right is None else (left, self.right)

    @property
    def key_fields(self) -> list[pa.Field]:
        """Names of the left stream's keys, in the type in which keys are compared."""
        left = super().key_fields
        if self.right is None or not self.right.keys:
            return left
        right = [self.right.schema.field(name) for name in self.right.keys]
        return [pa.field(a.name, common_key_type(a, b)) for a, b in zip(left, right, strict=True)]

    @property
    def fires(self) -> bool:
        """Whether the function takes timers."""
        return type(self.function).on_timer is not StatefulFunction.on_timer

    @property
    def input_schemas(self) -> tuple[pa.Schema, ...]:
        return tuple(side.schema for side in self.inputs)

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        return (self.output_schema, *(schema for _, schema in self.side))

    @property
    def state_schema(self) -> pa.Schema | None:
        fields = [pa.field(name, state.stored_type) for name, state in self._states.items()]
        return pa.schema([*self.key_fields, *fields]) if fields else None

    @property
    def state_parts(self) -> dict[str, str]:
        return {name: state.kind for name, state in self._states.items()}

    @property
    def state_tables(self) -> tuple[TableRecord, ...]:
        shapes = dict.fromkeys(declared_operator_states(self.function), Shape.ELEMENTS)
        return tuple(TableRecord(name, shape=shapes.get(name, Shape.OBJECT)) for name in self._states)

    @property
    def settings(self) -> dict[str, str]:
        if self.right is None:
            return {}
        return {"right keys": ", ".join(self.right.keys) or ("broadcast" if self.right.broadcast else "none")}

    def explanation(self) -> Iterator[str]:
        return iter(())  # keys stand at the inputs

    @property
    def _states(self) -> dict[str, KeyedState | OperatorState]:
        return {**declared_states(self.function), **declared_operator_states(self.function)}

    def evolve(self, former: Former, renames: Mapping[tuple[str, ...], str], *, drop: bool) -> Evolution:
        found = evolve_states(
            former,
            self.key_fields,
            {name: StateForm(state.kind, state.stored_type) for name, state in self._states.items()},
            renames,
            gives_up=lambda name: drop,
            hint="allow_dropped_state=True gives it up, state_names says what it is called now",
        )
        timers = sum(rows for name, rows in former.rows.items() if name in map(timers_segment, (EVENT, PROCESSING)))
        if not timers or self.fires:
            return found
        reason = f"{timers:,} timers are set, and {type(self.function).__name__} has no on_timer any more"
        return replace(found, refusals=(*found.refusals, reason))

    def build(self) -> Operator:
        return ProcessOperator(self, copy.copy(self.function))

    def _check_function(self) -> None:
        wanted: type[StatefulFunction] = ProcessFunction
        what, call = "", ".process"
        if self.right is not None and self.right.broadcast:
            wanted, what, call = BroadcastProcessFunction, " with broadcast rows", ".connect(rules.broadcast()).process"
        elif self.right is not None:
            wanted, what, call = CoProcessFunction, " of two streams", ".connect(other).process"
        if isinstance(self.function, wanted) or (
            self.right is None and isinstance(self.function, BatchProcessFunction)
        ):
            return
        found = self.function.__name__ if isinstance(self.function, type) else type(self.function).__name__
        raise BuildError(
            f"a process function{what} is needed, not {found}",
            hint=f"Subclass cw.{wanted.__name__} and pass an object of it: {call}('id', MyLogic(), schema).",
        )

    def _check_states(self) -> None:
        keyed, others = declared_states(self.function), declared_operator_states(self.function)
        name = type(self.function).__name__
        if not self.keys and keyed:
            raise BuildError(
                f"{name} has the keyed state {next(iter(keyed))!r}, but the stream has no key",
                hint="Call key_by(...) before process(...), or declare a cw.OperatorListState.",
            )
        if not self.keys and self.fires:
            raise BuildError(
                f"{name} has on_timer, but timers belong to keys and the stream has none",
                hint="Call key_by(...) before process(...).",
            )
        broadcast = [n for n, state in others.items() if isinstance(state, BroadcastState)]
        if broadcast and not any(side.broadcast for side in self.inputs):
            raise BuildError(
                f"{name} has the broadcast state {broadcast[0]!r}, but no stream is broadcast to it",
                hint="Write stream.connect(rules.broadcast()).process(...).",
            )


class _NoKey(tuple[Hashable, ...]):
    """Stands for the key of a row that has none: whatever is looked up by it is an error."""

    def __hash__(self) -> int:
        raise UserCodeError(
            "a row without key has no keyed state and no timers",
            hint="Keep what belongs to no key in a cw.BroadcastState or cw.OperatorListState.",
        )


def _bare_keys(values: BatchValues, names: Sequence[str]) -> list[Any]:
    """The bare key of each row."""
    columns = [values.column(name) for name in names]
    return columns[0] if len(columns) == 1 else list(zip(*columns, strict=True))


_NO_KEY = _NoKey()
_NO_COLUMN: Any = SimpleNamespace()
"""Takes the records of a function without keyed states."""


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

        records = self._records
        timers = TimerService(
            self._timers[EVENT],
            self._timers[PROCESSING],
            self._function,
            self._fires,
            lambda: records.whole(records.key),
        )
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
        watermarks = self._watermarks_of(batch, side.keys) if side.keys and self._watermarks.differ else None
        values, origin = to_values(batch), partial(row_contents, batch)
        keys = _bare_keys(values, side.keys) if side.keys else None
        call, main = getattr(self._function, self._function.takes[input]), self._outputs[0]
        found: Iterator[Any] = repeat(unbound(_NO_KEY)) if keys is None else self._records.of(keys)
        try:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                part = range(start, min(start + ROWS_AT_ONCE, batch.num_rows))
                self._call_each(call, part, values, keys, found, watermarks)
                main.gather(origin)
        except UserCodeError:
            main.check(origin)  # a row before that one may be wrong
            raise
        self._context.watermark = self._watermarks.current
        return self._take(origin)

    def _call_each(
        self,
        call: Callable[[Row, Any], Any],
        part: range,
        values: BatchValues,
        keys: list[Any] | None,
        found: Iterator[Any],
        watermarks: list[int] | None,
    ) -> None:
        """Call the user's function with rows of a batch.  Each statement in the loop counts.

        Args:
            call: the method.
            part: the rows.
            values: of the batch.
            keys: of all its rows, bare; ``None``: they have none.
            found: the records of the rows from the first one of the part on.
            watermarks: of all its rows, where they differ.
        """
        context, records, find = self._context, self._records, self._records.find
        made, origins = self._outputs[0].unchecked
        first, *others = records.columns or (_NO_COLUMN,)
        second, others = others[0] if others else None, others[1:]
        keyed, has_sides = keys is not None, bool(self._sides)
        rows = values.rows(part.start, part.stop)
        records.key, context.key = _NO_KEY, None
        of_part = repeat(_NO_KEY, len(part)) if keys is None else keys[part.start : part.stop]
        for index, row, key, record in zip(part, rows, of_part, found, strict=False):
            if keyed:
                records.key = context.key = key
                if record is None:
                    record = find(key)
            first.record = record
            if second is not None:
                second.record = record = record.next
                for column in others:
                    column.record = record = record.next
            if watermarks is not None:
                context.watermark = watermarks[index]
            if has_sides:
                self._row = row, index
            try:
                result = call(row, context)
                if result is None:
                    continue
                if type(result) is GeneratorType:
                    for out in result:
                        made.append(out)
                        origins.append(index)
                    continue
                of_row = result if type(result) is list else self._rows_of(result, row, index)
            except Exception as exc:
                self._fail(call, exc, row, index)
            for out in of_row:
                made.append(out)
                origins.append(index)

    def _process_batch(self, function: BatchProcessFunction, batch: pa.RecordBatch) -> Outputs:
        self._records.begin()
        self._records.unbind(_NO_KEY)
        self._context.key = None
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
        bare = self._context.key = key[0] if self._records.single else key
        self._records.bind(bare)

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
            return [] if result is None else self._rows_of(result, row, index)
        except Exception as exc:
            self._fail(call, exc, row, index)

    def _fail(self, call: Callable[..., Any], exc: Exception, row: Row, index: int) -> NoReturn:
        if isinstance(exc, UserCodeError) and exc.row is not None:
            raise exc  # a row for a side output, which names its row already
        error = user_error(call, exc, row=row, index=index, unit=self._outputs[0].unit)
        error.hint = exc.hint if isinstance(exc, CutwaterError) else error.hint
        raise error from exc

    def _rows_of(self, result: object, row: Row, index: int) -> list[Any]:
        rows = rows_of(result)
        if rows is None:
            what = f"returned {type(result).__name__} instead of an iterable of dicts"
            raise self._outputs[0].misfit(what, row, index)
        return rows

    def _emit(self, side: str, made: Mapping[str, Any] | pa.RecordBatch) -> None:
        row, index = self._row
        number = self._sides.get(side)
        if number is None:
            known = ", ".join(map(repr, self._sides)) or "none"
            raise UserCodeError(
                f"{function_name(type(self._function))} wrote to side output {side!r} (declared: {known})",
                hint="Declare it where the function is given to the stream: side={'name': 'n long'}.",
            )
        if isinstance(made, pa.RecordBatch):
            self._side_batches.append((number, conform_batch(type(self._function), made, self._spec.outputs[number])))
        else:
            self._outputs[number].add(made, row, index)

"""The operator behind ``ProcessSpec``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any

import numpy as np
import pyarrow as pa

from cutwater.errors import CutwaterError, UserCodeError
from cutwater.operators.base import BaseOperator, Context, Outputs
from cutwater.operators.keyed_table import group_segments, keyed_rows
from cutwater.operators.process import ProcessContext, ProcessFunction, ProcessSpec, declared_states, key_rows
from cutwater.operators.process_state import KeyedState
from cutwater.operators.row_output import RowBuilder, rows_of, to_dicts, user_error
from cutwater.operators.rows import Row
from cutwater.state.index import Slots
from cutwater.state.keys import require_valid_keys
from cutwater.state.objects import FrozenObjects
from cutwater.state.segments import Frozen, FrozenSegments, Segment

__all__ = ["ProcessOperator"]

VALUE = "__value"
"""Column of a state's segments that holds the content of a key."""


class ProcessOperator(BaseOperator):
    """Binds the states to the key of each row and calls the user's ``process``."""

    def __init__(self, spec: ProcessSpec, function: ProcessFunction) -> None:
        self._spec, self._function = spec, function
        self._states = {name: state.fresh() for name, state in declared_states(function).items()}
        for name, state in self._states.items():
            setattr(function, name, state)
        self._bound = list(self._states.values())
        self._outputs = [RowBuilder(type(function), schema) for schema in spec.outputs]
        self._sides = {name: number for number, (name, _) in enumerate(spec.side, start=1)}
        self._row: tuple[Row, int] = ({}, 0)
        self._opened = False

    def open(self, ctx: Context) -> None:
        super().open(ctx)

        def count(metric: str, amount: int) -> None:
            ctx.count(metric, amount)

        self._context = ProcessContext(ctx.step, ctx.subtask, self._emit, count, ctx.processing_time_ms)

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        if batch.num_rows == 0:
            return []
        require_valid_keys(batch, self._spec.keys)
        if not self._opened:
            self._open()
        context, main = self._context, self._outputs[0]
        single = len(self._spec.keys) == 1
        for index, (key, row) in enumerate(zip(key_rows(batch, self._spec.keys), to_dicts(batch), strict=True)):
            for state in self._bound:
                state.bind(key)
            context.key = key[0] if single else key
            self._row = row, index
            for made in self._call(row, index):
                main.add(made, row, index)
        return [output for number, builder in enumerate(self._outputs) for output in builder.take(number, batch)]

    def on_watermark(self, watermark: int) -> Outputs:
        self._context.watermark = watermark
        return []

    def freeze(self, checkpoint_id: int) -> Frozen:
        return _FrozenStates(self, {name: (state, state.freeze()) for name, state in self._states.items()})

    def restore(self, segments: Iterable[Segment]) -> None:
        found: dict[str, list[Segment]] = {name: [] for name in self._states}
        for segment in segments:
            if segment.name in found:
                found[segment.name].append(segment)
        for name, state in self._states.items():
            for batch in keyed_rows(found[name], self._schema(state), self.ctx.key_groups):
                state.restore(zip(*(c.to_pylist() for c in batch.columns[:-1]), strict=True), batch[VALUE].to_pylist())

    def close(self) -> None:
        if self._opened:
            self._function.close()

    def segments(self, state: KeyedState, frozen: FrozenObjects[Any]) -> Iterator[Segment]:
        """The segments of one state (snapshot thread)."""
        keys: list[tuple[Any, ...]] = []
        values: list[Any] = []
        for key, value in frozen.items():
            keys.append(key)
            values.append(state.stored(value))
        schema = self._schema(state)

        def key_arrays(slots: Slots) -> list[pa.Array]:
            columns = zip(*(keys[i] for i in slots), strict=True)
            return [pa.array(column, field.type) for column, field in zip(columns, schema, strict=False)]

        def arrays(slots: Slots) -> list[pa.Array]:
            return [*key_arrays(slots), pa.array([values[i] for i in slots], state.stored_type)]

        order = np.arange(len(keys), dtype=np.int32)
        return group_segments(state.name, schema, order, key_arrays, arrays, self.ctx.max_parallelism)

    def _schema(self, state: KeyedState) -> pa.Schema:
        keys = [self._spec.input_schema.field(name) for name in self._spec.keys]
        return pa.schema([*keys, pa.field(VALUE, state.stored_type)])

    def _open(self) -> None:
        """With the first row: a user's ``open`` may be slow, and a subtask without rows needs none."""
        self._opened = True
        try:
            self._function.open(self._context)
        except Exception as exc:
            raise user_error(type(self._function).open, exc) from exc

    def _call(self, row: Row, index: int) -> list[Any]:
        try:
            result = self._function.process(row, self._context)
            made = [] if result is None else rows_of(result)
        except Exception as exc:
            if isinstance(exc, UserCodeError) and exc.row is not None:
                raise  # a row for a side output, which names its row already
            error = user_error(type(self._function).process, exc, row=row, index=index)
            error.hint = exc.hint if isinstance(exc, CutwaterError) else error.hint
            raise error from exc
        if made is None:
            raise self._outputs[0].misfit(
                f"returned {type(result).__name__} instead of an iterable of dicts", row, index
            )
        return made

    def _emit(self, side: str, made: Mapping[str, Any]) -> None:
        row, index = self._row
        number = self._sides.get(side)
        if number is None:
            known = ", ".join(map(repr, self._sides)) or "none"
            raise self._outputs[0].misfit(f"wrote to side output {side!r} (declared: {known})", row, index)
        self._outputs[number].add(made, row, index)


class _FrozenStates(FrozenSegments):
    """All states of an operator at one instant."""

    def __init__(self, operator: ProcessOperator, frozen: dict[str, tuple[KeyedState, FrozenObjects[Any]]]) -> None:
        parts = list(frozen.values())
        super().__init__(lambda: chain.from_iterable(operator.segments(state, objects) for state, objects in parts))
        self._parts = parts

    def release(self) -> None:
        super().release()
        for _, objects in self._parts:
            objects.release()

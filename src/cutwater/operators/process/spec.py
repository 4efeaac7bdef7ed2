"""What a dataflow carries of a process function, and every check that can be made before rows flow."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa

from cutwater.data.schema_text import as_schema
from cutwater.errors import BuildError
from cutwater.operators.base import Operator, OperatorSpec
from cutwater.operators.join.columns import common_key_type
from cutwater.operators.process.evolution import StateForm, evolve_states
from cutwater.operators.process.functions import (
    BatchProcessFunction,
    BroadcastProcessFunction,
    CoProcessFunction,
    ProcessFunction,
    StatefulFunction,
    declared_operator_states,
    declared_states,
)
from cutwater.operators.process.keyed_state import KeyedState
from cutwater.operators.process.operator_state import BroadcastState, OperatorState
from cutwater.state.keys import check_key_types
from cutwater.state.objects.timers import EVENT, PROCESSING, timers_segment
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
class ProcessSpec(OperatorSpec):
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

    input_schema: pa.Schema
    keys: tuple[str, ...]
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

    @cached_property
    def key_fields(self) -> list[pa.Field]:
        """Names of the left stream's keys, in the type in which keys are compared."""
        left = [self.input_schema.field(name) for name in self.keys]
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
        keyed, others = declared_states(self.function), declared_operator_states(self.function)
        if not keyed and not others:
            return None
        states = [pa.field(name, state.stored_type) for name, state in (*keyed.items(), *others.items())]
        return pa.schema([*self.key_fields, *states])

    @property
    def state_parts(self) -> dict[str, str]:
        return {name: state.kind for name, state in self._states.items()}

    @property
    def state_tables(self) -> tuple[TableRecord, ...]:
        keyed = [TableRecord(name, shape=Shape.OBJECT) for name in declared_states(self.function)]
        return (
            *keyed,
            *(TableRecord(name, shape=Shape.ELEMENTS) for name in declared_operator_states(self.function)),
        )

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
        from cutwater.operators.process.operator import ProcessOperator

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

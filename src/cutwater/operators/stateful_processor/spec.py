"""What a dataflow carries of a ``StatefulProcessor``, and every check that can be made before rows flow."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from cutwater.errors import BuildError, CutwaterError
from cutwater.operators.base import KeyedSpec, Operator
from cutwater.operators.enrich.table import EnrichmentTable
from cutwater.operators.process.evolution import StateForm, evolve_states
from cutwater.operators.row_output import user_error
from cutwater.operators.stateful_processor.handle import Handle
from cutwater.operators.stateful_processor.spark_types import TimeMode, arrow_schema, handles, is_processor
from cutwater.operators.stateful_processor.states import StateDeclaration
from cutwater.state.keys import check_key_types
from cutwater.storage.snapshot.manifest import Shape, TableRecord

if TYPE_CHECKING:
    from cutwater.operators.evolution import Evolution, Former

Form = Literal["rows", "pandas"]
"""What the processor takes and makes: ``Row`` objects, or pandas DataFrames."""


@dataclass(frozen=True)
class ProcessorSpec(KeyedSpec):
    """A ``StatefulProcessor`` over the rows of one keyed stream.

    Output 0 are its rows; with event time, output 1 are the rows that came too late for it.

    Args:
        processor: the user's object; each subtask works with a copy.
        output_schema: of what it yields: a ``StructType``, a text, or an Arrow schema.
        time_mode: what its timers go by.
        form: of its rows.
        event_time: the event-time column of the rows, if ``time_mode`` is event time.
        initial: rows for ``handleInitialState``, with the key columns.
        renames: what states and columns of an earlier version are called now.

    Raises:
        BuildError: not a processor, its ``init`` fails or declares what cannot be, no schema, a key column that cannot
            be a key, or an initial state without the key columns.
    """

    repeatable = True

    processor: Any
    output_schema: pa.Schema
    time_mode: TimeMode = TimeMode.NONE
    form: Form = "rows"
    event_time: str | None = None
    initial: EnrichmentTable | None = None
    renames: Mapping[str | tuple[str, str], str] = field(default_factory=dict[str | tuple[str, str], str])
    """New names of states by their old ones, and of columns by (old state, old column)."""
    states: dict[str, StateDeclaration] = field(init=False)
    """What ``init`` asks for, by name."""
    deleted: frozenset[str] = field(init=False)
    """States of earlier versions that ``init`` deletes."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_schema", arrow_schema(self.output_schema))
        if not is_processor(self.processor):
            given: Any = self.processor
            found = given.__name__ if isinstance(given, type) else type(given).__name__
            raise BuildError(
                f"a StatefulProcessor is needed, not {found}",
                hint="Subclass pyspark.sql.streaming.StatefulProcessor and pass an object of it: MyProcessor().",
            )
        if len(self.output_schema) == 0:
            raise BuildError("the output schema has no columns")
        check_key_types(self.input_schema, self.keys)
        self._check_initial()
        handle = self._declare()
        object.__setattr__(self, "states", handle.declared)
        object.__setattr__(self, "deleted", frozenset(handle.deleted))
        self._check_renames()

    @property
    def user(self) -> str:
        """Name of the user's class."""
        return type(self.processor).__name__

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        if self.time_mode is TimeMode.EVENT:
            return (self.output_schema, self.input_schema)
        return (self.output_schema,)

    @property
    def state_schema(self) -> pa.Schema:
        fields = [pa.field(name, state.make().stored_type) for name, state in self.states.items()]
        return pa.schema([*self.key_fields, *fields])

    @property
    def state_parts(self) -> dict[str, str]:
        return {name: state.kind for name, state in self.states.items()}

    @property
    def state_tables(self) -> tuple[TableRecord, ...]:
        return tuple(TableRecord(name, shape=Shape.OBJECT) for name in self.states)

    @property
    def settings(self) -> dict[str, str]:
        return {"time mode": self.time_mode.value}

    def explanation(self) -> Iterator[str]:
        return iter(())

    def pinned(self) -> ProcessorSpec:
        return self if self.initial is None else replace(self, initial=self.initial.pinned())

    def evolve(self, former: Former, renames: Mapping[tuple[str, ...], str], *, drop: bool) -> Evolution:
        own = {(old,) if isinstance(old, str) else old: new for old, new in self.renames.items()}
        return evolve_states(
            former,
            self.key_fields,
            {
                name: StateForm(state.kind, state.make().stored_type, records=True)
                for name, state in self.states.items()
            },
            {**own, **renames},
            gives_up=lambda name: drop or name in self.deleted,
            hint="handle.deleteIfExists({name!r}) gives it up, renames={{{name!r}: ...}} says what it is called now",
        )

    def build(self) -> Operator:
        if self.form == "pandas":
            from cutwater.operators.stateful_processor.operator import PandasProcessorOperator

            return PandasProcessorOperator(self, copy.copy(self.processor))
        from cutwater.operators.stateful_processor.operator import RowProcessorOperator

        return RowProcessorOperator(self, copy.copy(self.processor))

    def _declare(self) -> Handle:
        """Run ``init`` as Spark's driver does, to learn the states."""
        handle = Handle(self.user, self.time_mode)
        processor = copy.copy(self.processor)
        try:
            processor.init(handle)
            processor.close()
        except CutwaterError as exc:
            raise BuildError(exc.message, hint=exc.hint) from exc
        except Exception as exc:
            error = user_error(processor.init, exc)
            raise BuildError(
                error.message,
                hint="init also runs once when the flow is built: it may only ask for states and set attributes.",
            ) from exc
        return handle

    def _check_renames(self) -> None:
        for old, new in self.renames.items():
            state = old if isinstance(old, str) else old[0]
            now = self.renames.get(state, state)
            if now not in self.states:
                raise BuildError(
                    f"renames says that a state is called {now!r} now, but {self.user}.init asks for no such state",
                    hint=f"It asks for: {', '.join(map(repr, self.states)) or 'none'}.",
                )
            if isinstance(old, str) and old in self.states:
                raise BuildError(f"state {old!r} is renamed to {new!r}, but {self.user}.init still asks for it")
            if not isinstance(old, str) and new not in self.states[now].schema.names:
                raise BuildError(
                    f"renames says that column {old[1]!r} of state {state!r} is called {new!r} now, which it has not",
                    hint=f"State {now!r} has {', '.join(self.states[now].schema.names)}.",
                )
            if not isinstance(old, str) and old[1] in self.states[now].schema.names:
                raise BuildError(f"column {old[1]!r} of state {state!r} is renamed to {new!r}, but it is still there")

    def _check_initial(self) -> None:
        if self.initial is None:
            return
        if not handles(self.processor, "handleInitialState"):
            raise BuildError(
                f"{self.user} has no handleInitialState, which takes the initial state",
                hint="Define it, or leave initial_state out.",
            )
        schema = self.initial.schema
        for name in self.keys:
            if schema.get_field_index(name) < 0:
                raise BuildError(
                    f"the initial state has no key column {name!r}", hint=f"It has {', '.join(schema.names)}."
                )
            wanted, found = self.input_schema.field(name).type, schema.field(name).type
            if wanted != found:
                raise BuildError(
                    f"key column {name!r} is {wanted} in the stream and {found} in the initial state",
                    hint="Cast it there.",
                )

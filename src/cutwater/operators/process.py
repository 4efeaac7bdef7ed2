"""Process functions: a user's logic, row by row, with keyed state.

One Python call for each row, so some 10 to 100 times slower than the built-in steps; use it for what those cannot say.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cutwater.errors import BuildError
from cutwater.operators.base import MAX_WATERMARK, MIN_WATERMARK
from cutwater.operators.process_state import KeyedState
from cutwater.operators.rows import Row
from cutwater.operators.schema_text import as_schema
from cutwater.operators.timers import TimerDomain, TimerService
from cutwater.state.keys import check_key_types

if TYPE_CHECKING:
    from cutwater.operators.base import Operator

__all__ = ["ProcessContext", "ProcessFunction", "ProcessSpec", "declared_states"]


class ProcessContext:
    """What a process function may ask of the world.

    Attributes:
        key: the current key; a tuple if there are several key columns.
        watermark: event time up to which all rows have come, microseconds since the epoch; the lowest number if none.
        timers: sets and deletes timers of the current key.
        step, subtask: where the function runs.
    """

    __slots__ = ("_count", "_emit", "_now_ms", "key", "step", "subtask", "timers", "watermark")

    def __init__(self, step: str, subtask: int, emit: Any, count: Any, now_ms: Any, timers: TimerService) -> None:
        self.key: Any = None
        self.step, self.subtask = step, subtask
        self.watermark = MIN_WATERMARK
        self.timers = timers
        self._emit, self._count, self._now_ms = emit, count, now_ms

    def emit(self, side: str, row: Mapping[str, Any]) -> None:
        """A row for a side output.

        Raises:
            UserCodeError: the step has no such side output, or the row is not of its schema.
        """
        self._emit(side, row)

    def count(self, metric: str, amount: int = 1) -> None:
        """Add to a counter of the step that the driver shows."""
        self._count(metric, amount)

    @property
    def at_end(self) -> bool:
        """The bounded input has ended: every event-time timer fires now."""
        return self.watermark == MAX_WATERMARK

    def processing_time_ms(self) -> int:
        """Processing time, milliseconds since the epoch.  It never falls, not even over a restore."""
        return self._now_ms()


class ProcessFunction(ABC):
    """Logic with keyed state: subclass it, declare states as class attributes, write ``process``.

    The states are about the key of the row.  They are in every snapshot; whatever else the object holds is not, so it
    must not change while rows flow.

    >>> import cutwater as cw
    >>> class Gaps(cw.ProcessFunction):
    ...     last = cw.ValueState("long")
    ...
    ...     def process(self, row, ctx):
    ...         if self.last.value is not None and row["n"] > self.last.value + 1:
    ...             yield {"sensor": ctx.key, "missing": row["n"] - self.last.value - 1}
    ...         self.last.value = row["n"]
    """

    def open(self, ctx: ProcessContext) -> None:
        """Called once in each subtask, before the first row."""
        return

    @abstractmethod
    def process(self, row: Row, ctx: ProcessContext) -> Iterable[Mapping[str, Any]] | None:
        """Take one row; return or yield rows for the main output."""

    def on_timer(self, time: int, domain: TimerDomain, ctx: ProcessContext) -> Iterable[Mapping[str, Any]] | None:
        """A timer that ``ctx.timers`` was told to set is due; return or yield rows, as ``process`` does.

        Args:
            time: of the timer: microseconds since the epoch for "event", milliseconds for "processing".
            domain: "event" or "processing".
            ctx: its key is that of the timer.
        """
        raise TypeError(f"{type(self).__name__} has no on_timer")

    def close(self) -> None:
        """Called once in each subtask, also after a failure."""
        return


def declared_states(function: ProcessFunction) -> dict[str, KeyedState]:
    """The states that the class of a function declares, by name."""
    found: dict[str, KeyedState] = {}
    for cls in reversed(type(function).__mro__):
        found.update({name: value for name, value in vars(cls).items() if isinstance(value, KeyedState)})
    return found


@dataclass(frozen=True)
class ProcessSpec:
    """A process function over keyed rows.

    Args:
        input_schema: schema of the rows.
        keys: key columns.
        function: the user's object; each subtask works with a copy.
        output_schema: of what ``process`` yields, or a text such as ``"node long, label long"``.
        side: schemas of the side outputs by name.

    Raises:
        BuildError: not a process function, no schema, a key column that cannot be a key.
    """

    input_schema: pa.Schema
    keys: tuple[str, ...]
    function: ProcessFunction
    output_schema: pa.Schema
    side: tuple[tuple[str, pa.Schema], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_schema", as_schema(self.output_schema))
        object.__setattr__(self, "side", tuple((name, as_schema(schema)) for name, schema in self.side))
        check_key_types(self.input_schema, self.keys)
        if not isinstance(self.function, ProcessFunction):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise BuildError(
                f"a process function is needed, not {type(self.function).__name__}",
                hint="Subclass cw.ProcessFunction and pass an object of it: .process('id', MyLogic(), schema).",
            )
        for name, schema in (("the output", self.output_schema), *self.side):
            if len(schema) == 0:
                raise BuildError(f"the schema of {name} has no columns")

    @property
    def fires(self) -> bool:
        """Whether the function takes timers."""
        return type(self.function).on_timer is not ProcessFunction.on_timer

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        return (self.output_schema, *(schema for _, schema in self.side))

    @property
    def state_schema(self) -> pa.Schema | None:
        states = declared_states(self.function)
        if not states:
            return None
        keys = [self.input_schema.field(name) for name in self.keys]
        return pa.schema([*keys, *(pa.field(name, state.stored_type) for name, state in states.items())])

    def build(self) -> Operator:
        from cutwater.operators.process_operator import ProcessOperator

        return ProcessOperator(self, copy.copy(self.function))


def key_rows(batch: pa.RecordBatch, keys: tuple[str, ...]) -> Iterator[tuple[Hashable, ...]]:
    """The key of each row as Python values."""
    return zip(*(batch.column(name).to_pylist() for name in keys), strict=True)

"""Event-time windows: rows of one key and one stretch of time are aggregated together.

When things happen, in one place (as in Flink):

- A watermark w says: no more rows with an event time <= w are expected.
- A row belongs to the window [start, end) with start <= event time < end; its last instant is end - 1 microsecond.
- A window *fires*, one row per key, once w >= end - 1.
- A row is *late* once w >= end - 1 + allowed lateness: it goes to output 1 as it is, and counts in ``rows_late``.
- A row that comes between the two updates its window, and the results of the touched keys are sent again after each
  batch.  Then the window is forgotten.

Event times before 1970 are ordinary.
"""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from cutwater.errors import BuildError
from cutwater.operators.accumulators import Aggregate
from cutwater.operators.aggregate import check_names
from cutwater.operators.base import Operator
from cutwater.state.keys import check_key_types

__all__ = ["MAX_SPAN_US", "WINDOW_END", "WINDOW_FIRED", "WINDOW_START", "TumblingWindow", "WindowAggregateSpec"]

WINDOW_START = "window_start"
WINDOW_END = "window_end"
WINDOW_FIRED = "window_fired"
"""State column: whether the key's result has been sent."""

MAX_SPAN_US = 2**60
"""Longest window and lateness: 36,000 years; sums of them with event times cannot overflow."""


@dataclass(frozen=True)
class TumblingWindow:
    """Windows of one size, side by side: [offset + k * size, offset + (k + 1) * size).

    >>> TumblingWindow(3_600_000_000).size_us
    3600000000
    """

    size_us: int
    offset_us: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.size_us <= MAX_SPAN_US:
            raise BuildError(f"window size {self.size_us} us is not between 1 and {MAX_SPAN_US}")
        if abs(self.offset_us) >= self.size_us:
            raise BuildError(f"window offset {self.offset_us} us is not below the size, {self.size_us} us")


@dataclass(frozen=True)
class WindowAggregateSpec:
    """Aggregates by key and window.

    Outputs: 0 = key columns, ``window_start``, ``window_end`` (type of the event time), aggregates; 1 = late rows.

    Args:
        input_schema: schema of the rows.
        keys: key columns.
        event_time: column of type ``timestamp[us]``, with or without time zone.
        window: how time is cut.
        aggregates: what to compute.
        allowed_lateness_us: how long after its end a window still takes rows.

    Raises:
        BuildError: a column is missing, a type does not fit, or two columns would have the same name.
    """

    input_schema: pa.Schema
    keys: tuple[str, ...]
    event_time: str
    window: TumblingWindow
    aggregates: tuple[Aggregate, ...]
    allowed_lateness_us: int = 0

    def __post_init__(self) -> None:
        check_key_types(self.input_schema, self.keys)
        if self.input_schema.get_field_index(self.event_time) < 0:
            raise BuildError(f"no such event-time column {self.event_time!r}")
        kind = self.input_schema.field(self.event_time).type
        if not pa.types.is_timestamp(kind) or kind.unit != "us":
            raise BuildError(
                f"event-time column {self.event_time!r} is {kind}, not timestamp[us]", hint="Cast it before the window."
            )
        if not 0 <= self.allowed_lateness_us <= MAX_SPAN_US:
            raise BuildError(f"allowed lateness {self.allowed_lateness_us} us is not between 0 and {MAX_SPAN_US}")
        if not self.aggregates:
            raise BuildError("no aggregate given", hint="Name at least one, for example n=cw.count().")
        check_names(self.outputs[0].names)
        check_names(self.state_schema.names)

    @property
    def time_type(self) -> pa.DataType:
        """Type of the event time and of both window columns."""
        return self.input_schema.field(self.event_time).type

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        keys = [self.input_schema.field(name) for name in self.keys]
        window = [pa.field(name, self.time_type) for name in (WINDOW_START, WINDOW_END)]
        results = [pa.field(a.name, a.result_type(self.input_schema)) for a in self.aggregates]
        return pa.schema([*keys, *window, *results]), self.input_schema

    @property
    def state_schema(self) -> pa.Schema:
        keys = [self.input_schema.field(name) for name in self.keys]
        window = [pa.field(WINDOW_START, self.time_type), pa.field(WINDOW_FIRED, pa.bool_())]
        state = [field for a in self.aggregates for field in a.state_fields(self.input_schema)]
        return pa.schema([*keys, *window, *state])

    def build(self) -> Operator:
        from cutwater.operators.windowing import WindowAggregate  # Numba: only where rows flow

        return WindowAggregate(self)

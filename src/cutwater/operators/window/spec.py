"""Windows: rows of one key and one stretch of time are aggregated together.

When things happen, in one place (as in Flink):

- A watermark w says: no more rows with an event time <= w are expected.
- A row belongs to every window [start, end) with start <= event time < end; a window's last instant is end - 1
  microsecond.  A session is [first row, last row + gap) of rows that follow each other within the gap.
- A window *fires*, one row per key, once w >= end - 1.  The global window ends with the input.
- With early results a window comes out before that too, with what it holds so far.
- A window takes rows until w >= end - 1 + allowed lateness.  A row that comes after the window has fired makes it come
  out again at once, with that row.  Then the window is forgotten.
- A row is *late* when all its windows are forgotten: it goes to output 1 as it is, and counts in ``rows_late``.  A row
  between two windows that do not touch belongs to none and counts in ``rows_outside_windows``.
- *Discarding*: what has come out is not in what comes out later; a result is what was new.  Else results accumulate.

- By *processing time* a row has the time at which it is processed, and the clock is the watermark: no row is late.
  What is open at the end of the input comes out then.

What comes out by event time does not depend on where batches end.  Event times before 1970 are ordinary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa

from cutwater.config import format_us
from cutwater.data.time import MAX_SPAN_US
from cutwater.errors import BuildError
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.aggregate.evolution import aggregate_parts, evolve_aggregates
from cutwater.operators.aggregate.running_spec import read_by
from cutwater.operators.base import KeyedSpec, Operator, check_names
from cutwater.operators.evolution import Evolution, Former
from cutwater.operators.window.kinds import Early, Window
from cutwater.state.keys import check_key_types
from cutwater.storage.snapshot.manifest import Shape, TableRecord

WINDOW_START = "window_start"
WINDOW_END = "window_end"
WINDOW_FIRED = "window_fired"
"""State column: whether the key's result has been sent."""
WINDOW_PENDING = "window_pending"
"""State column: how many rows have come since the window last came out."""


@dataclass(frozen=True)
class WindowAggregateSpec(KeyedSpec):
    """Aggregates by key and window.

    Outputs: 0 = key columns, ``window_start``, ``window_end`` (of the type of the event time; by processing time UTC;
    not with the global window), aggregates; 1 = late rows.

    Args:
        event_time: column of type ``timestamp[us]``, with or without time zone; ``None`` for windows by processing
            time, and possible for the global window.
        window: how time is cut.
        aggregates: what to compute.
        allowed_lateness_us: how long after its end a window still takes rows.
        early: when a window comes out before its end.
        discarding: whether a result holds only what has not come out before.
        label: name of the windows, for people.

    Raises:
        BuildError: a column is missing, a type does not fit, or two columns would have the same name.
    """

    repeatable = True

    event_time: str | None
    window: Window
    aggregates: tuple[Aggregate, ...]
    allowed_lateness_us: int = 0
    early: Early | None = None
    discarding: bool = False
    label: str = ""

    def __post_init__(self) -> None:
        check_key_types(self.input_schema, self.keys)
        self._check_time()
        if not 0 <= self.allowed_lateness_us <= MAX_SPAN_US:
            raise BuildError(f"allowed lateness {self.allowed_lateness_us} us is not between 0 and {MAX_SPAN_US}")
        if self.window.endless and self.allowed_lateness_us:
            raise BuildError("the global window has no late rows: it ends with the input", hint="Leave lateness out.")
        if self.window.processing_time:
            self._check_clock()
        if not self.aggregates:
            raise BuildError("no aggregate given", hint="Name at least one, for example n=cw.count().")
        for names in (self.outputs[0].names, self.state_schema.names):
            check_names(names, "Give the aggregate another name.")

    def _check_clock(self) -> None:
        if self.allowed_lateness_us:
            raise BuildError("by processing time no row is late", hint="Leave the allowed lateness out.")
        if self.early is not None and self.early.event_time_us is not None:
            raise BuildError(
                "early results by event time of windows by processing time",
                hint="Write cw.every(processing_time=...) or cw.every(rows=...).",
            )

    def _check_time(self) -> None:
        if self.event_time is None:
            if self.window.endless or self.window.processing_time:
                return
            raise BuildError("a window needs event time")
        if self.input_schema.get_field_index(self.event_time) < 0:
            raise BuildError(f"no such event-time column {self.event_time!r}")
        kind = self.input_schema.field(self.event_time).type
        if not pa.types.is_timestamp(kind) or kind.unit != "us":
            raise BuildError(
                f"event-time column {self.event_time!r} is {kind}, not timestamp[us]", hint="Cast it before the window."
            )

    @property
    def time_type(self) -> pa.DataType:
        """Type of the time that counts and of both window columns."""
        if self.event_time is None:
            return pa.timestamp("us", "UTC" if self.window.processing_time else None)
        return self.input_schema.field(self.event_time).type

    @property
    def repeats(self) -> bool:
        """Whether a window may come out more than once."""
        return self.early is not None or self.allowed_lateness_us > 0

    @property
    def sliced(self) -> bool:
        """True if rows go into slices that windows share.

        Not with early results: what has come out is a matter of each window, so each keeps its own values.
        """
        period = self.window.period
        return period is not None and period.overlaps and self.early is None

    @property
    def kept(self) -> tuple[Aggregate, ...]:
        """The aggregates as the state keeps them: parts that are put together must know their order."""
        if not (self.sliced or self.window.merges):
            return self.aggregates
        return tuple(a.mergeable() for a in self.aggregates)

    @property
    def columns_read(self) -> frozenset[str] | None:
        return read_by(self.aggregates, self.keys if self.event_time is None else (*self.keys, self.event_time))

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        borders = () if self.window.endless else (WINDOW_START, WINDOW_END)
        window = [pa.field(name, self.time_type) for name in borders]
        results = [pa.field(a.name, a.result_type(self.input_schema)) for a in self.aggregates]
        return pa.schema([*self.key_fields, *window, *results]), self.input_schema

    @property
    def window_fields(self) -> list[pa.Field]:
        """What the state says of a window besides keys and values."""
        fields = [] if self.window.endless else [pa.field(WINDOW_START, self.time_type)]
        if self.window.merges:
            fields.append(pa.field(WINDOW_END, self.time_type))
        fields.append(pa.field(WINDOW_FIRED, pa.bool_()))
        return [*fields, pa.field(WINDOW_PENDING, pa.int64())] if self.early is not None else fields

    @property
    def state_schema(self) -> pa.Schema:
        state = [field for a in self.kept for field in a.state_fields(self.input_schema)]
        return pa.schema([*self.key_fields, *self.window_fields, *state])

    @property
    def state_parts(self) -> dict[str, str]:
        return aggregate_parts(self.aggregates, self.input_schema)

    @property
    def state_tables(self) -> tuple[TableRecord, ...]:
        windows = TableRecord("window", "windows", Shape.AGGREGATES, period=self.window.period)
        slices = TableRecord("slice", "slices", Shape.AGGREGATES, main=False)
        return (windows, slices) if self.sliced else (windows,)

    @property
    def settings(self) -> dict[str, str]:
        found = {
            "aggregates": ", ".join(f"{a.name}={a}" for a in self.aggregates),
            "windows": str(self.window),
            "event time": self.event_time or "none",
        }
        if self.early is not None:
            found["early results"] = str(self.early)
        if self.discarding:
            found["results"] = "discarding"
        return found

    def evolve(self, former: Former, renames: Mapping[tuple[str, ...], str], *, drop: bool) -> Evolution:
        return evolve_aggregates(former, self.state_schema, self.kept, self.input_schema, renames)

    def explanation(self) -> Iterator[str]:
        late = f", lateness {format_us(self.allowed_lateness_us)}" if self.allowed_lateness_us else ""
        early = f", early {self.early}" if self.early is not None else ""
        discarding = ", discarding" if self.discarding else ""
        yield f"window {self.label}: {self.window}{late}{early}{discarding}"
        yield ", ".join(f"{a.name} = {a}" for a in self.aggregates)

    def build(self) -> Operator:
        return self.window.operator(self)

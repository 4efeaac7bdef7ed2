"""Loops: a stream that may be read before all that flows into it is written.

A loop is an ordinary step that passes on rows, like a union; ``feed_back`` gives it one more input.  Which edges of the
cycle close it is found by analysis (``cycles``), not by which of them the user fed back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pyarrow as pa

from cutwater.api.steps.build import (
    GraphBuilder,
    Upstream,
    distinct_columns,
    located,
    plain_schema,
    require_column,
)
from cutwater.api.streams.stream import Stream
from cutwater.config import format_us
from cutwater.errors import BuildError
from cutwater.plan.graph import StreamType

if TYPE_CHECKING:
    from cutwater.operators.stateless.rows import UnionSpec

_BEGIN = "Write flow.loop('id', stream), or flow.loop('id', schema='k long, v double')."


class LoopStream(Stream):
    """The rows that go round a loop: those that enter it, and those that are fed back."""

    @classmethod
    def begin(
        cls,
        builder: GraphBuilder,
        id: str,
        stream: Stream | None,
        schema: str | pa.Schema | None,
        event_time: str | None,
        parallelism: int | None,
    ) -> LoopStream:
        """The step of ``Dataflow.loop``, with one input or none."""
        from cutwater.operators.stateless.rows import UnionSpec

        with located(builder.check_id(id)):
            if (stream is None) == (schema is None):
                raise BuildError("a loop begins with a stream or with a schema", hint=_BEGIN)
            entering = () if stream is None else (cls._of_flow(builder, stream)._upstream,)
        with builder.new_step(id, entering, parallelism) as step:
            if not entering:
                carried = _declared(schema, event_time)
            elif event_time is None:
                carried = step.upstream.type
            else:
                raise BuildError("event_time is that of the stream", hint="Write flow.loop('id', stream).")
            # What is fed back may hold nulls where the first rows cannot: every column is nullable from here on.
            nullable = pa.schema([f.with_nullable(True) for f in carried.schema])
            out = StreamType(nullable, carried.event_time, (), carried.span)
            (upstream,) = step.add("loop", UnionSpec(nullable, 1), [out], declared=not entering)
        return cls(builder, upstream)

    def feed_back(self, stream: Stream) -> None:
        """Let the rows of a stream enter the loop again.  May be called several times, with different streams.

        They come by an edge of any kind: ``feed_back(s.key_by("k"))`` sends them by key, ``s.rebalance()`` in turns.
        They carry no watermark: the loop goes by the rows that come from outside (W3).

        Args:
            stream: made from this loop, of its schema (a column may be nullable or not) and event-time column.

        Raises:
            BuildError: not a stream of this dataflow, another schema, or another event time; names the loop.
        """
        id = self._upstream.step
        with located(id):
            other = self._same_flow(stream)._upstream
            _check_schema(self.schema, other)
            self._check_event_time(other)
            spec = cast("UnionSpec", self._builder.steps[id].spec)
            inputs = len(self._builder.steps[id].inputs) + 1
            self._builder.add_input(id, type(spec)(spec.schema, inputs), other)

    def _check_event_time(self, other: Upstream) -> None:
        wanted, found = self._upstream.type, other.type
        if (wanted.event_time, wanted.span) == (found.event_time, found.span):
            return
        if wanted.event_time is None:
            raise BuildError(
                f"the stream of step {other.step!r} has the event time {found.event_time!r}, the loop has none",
                hint="Name the column where the loop begins: flow.loop('id', schema=..., event_time='...').",
            )
        if found.event_time is None:
            reason, _ = self._builder.event_time_story(other)
        elif found.event_time == wanted.event_time:
            spans = [f"windows of {format_us(t.span[0])}" if t.span else "rows" for t in (wanted, found)]
            reason = f"its times are those of {spans[1]}, not of {spans[0]}"
        else:
            reason = f"that of the stream of step {other.step!r} is {found.event_time!r}"
        raise BuildError(
            f"the loop's event time is {wanted.event_time!r}, but {reason}",
            hint=f"Say what to go by: feed_back(stream.with_event_time({wanted.event_time!r})).",
        )


def _check_schema(wanted: pa.Schema, other: Upstream) -> None:
    from cutwater.data.schema_text import schema_differences

    differences = schema_differences(wanted, other.type.schema)
    if differences:
        raise BuildError(
            f"the stream of step {other.step!r} is no stream of the loop: {'; '.join(differences)}",
            hint="Bring it to the loop's schema with select, rename or a cast before feed_back.",
        )


def _declared(schema: object, event_time: str | None) -> StreamType:
    from cutwater.data.schema_text import as_schema

    made = distinct_columns(plain_schema(as_schema(cast("str | pa.Schema", schema))))
    if event_time is not None:
        kind = made.field(require_column(made, event_time, "event-time column")).type
        if not (pa.types.is_timestamp(kind) and kind.unit == "us"):
            raise BuildError(f"event-time column {event_time!r} is {kind}, not a timestamp in microseconds")
    return StreamType(made, event_time)

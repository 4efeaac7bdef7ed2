"""PySpark's ``StatefulProcessor`` classes as a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from cutwater.api.steps.build import (
    GraphBuilder,
    Upstream,
    carry_by_name,
    distinct_columns,
    located,
    plain_schema,
    require_column,
)
from cutwater.api.steps.steps import enrichment_table
from cutwater.api.streams.stream import Stream
from cutwater.errors import BuildError
from cutwater.plan.graph import StreamType

if TYPE_CHECKING:
    from cutwater.operators.stateful_processor.spec import Form


def transform_with_state(
    builder: GraphBuilder,
    id: str,
    upstream: Upstream,
    processor: object,
    output: tuple[Any, str, str],
    form: Form,
    *,
    initial_state: object,
    renames: Mapping[str | tuple[str, str], str] | None,
    event_time: str | None,
    parallelism: int | None,
) -> TransformedStream:
    """Add the step of a processor.

    Args:
        output: the output schema, and the names of output mode and time mode.
        event_time: the output's event-time column.
    """
    from cutwater.operators.stateful_processor.spark_types import TimeMode, arrow_schema, check_output_mode
    from cutwater.operators.stateful_processor.spec import ProcessorSpec

    with located(builder.check_id(id)):
        output_schema, output_mode, time_mode = output
        check_output_mode(output_mode)
        mode = TimeMode.named(time_mode)
        time = upstream.type.event_time if mode is TimeMode.EVENT else None
        if mode is TimeMode.EVENT and time is None:
            story, hint = builder.event_time_story(upstream)
            raise BuildError(f"time_mode='EventTime' needs event time, but {story}", hint=hint)
        schema = distinct_columns(plain_schema(arrow_schema(output_schema)))
        initial = None if initial_state is None else enrichment_table(initial_state)
        spec = ProcessorSpec(
            upstream.type.schema, upstream.keys, processor, schema, mode, form, time, initial, dict(renames or {})
        )
        out, lost = carry_by_name(upstream, schema)
        if event_time is not None:
            out, lost = _with_event_time(builder, upstream, out, event_time), None
        late = [StreamType(s, None, upstream.keys) for s in spec.outputs[1:]]
        made = builder.add(id, "processor", spec, [upstream], [out, *late], parallelism=parallelism, lost=lost)
        return TransformedStream(builder, made)


def _with_event_time(builder: GraphBuilder, upstream: Upstream, out: StreamType, column: str) -> StreamType:
    require_column(out.schema, column)
    kind = out.schema.field(column).type
    if not (pa.types.is_timestamp(kind) and kind.unit == "us"):
        raise BuildError(f"column {column!r} is of type {kind}, an event time is a timestamp")
    if not builder.has_watermark(upstream):
        story, hint = builder.event_time_story(upstream)
        raise BuildError(f"no watermark comes from above: {story}", hint=hint)
    return replace(out, event_time=column, span=None)


class TransformedStream(Stream):
    """Stream of a processor, with the rows that came too late for it."""

    def __init__(self, builder: GraphBuilder, outputs: tuple[Upstream, ...]) -> None:
        super().__init__(builder, outputs[0])
        self._late = outputs[1:]

    @property
    def late(self) -> Stream:
        """Rows at or behind the watermark, which Spark drops.

        Raises:
            BuildError: the time mode is not event time, so that no row is late.
        """
        if not self._late:
            raise BuildError(
                "no row is late here",
                step=self._upstream.step,
                hint="Rows are late with time_mode='EventTime' only.",
            )
        return Stream(self._builder, self._late[0])

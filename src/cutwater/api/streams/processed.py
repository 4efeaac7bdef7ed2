"""Process functions over one stream or two, and what comes out of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from cutwater.api.steps.build import GraphBuilder, Upstream, carry_by_name, located, plain_schema
from cutwater.api.streams.stream import Stream
from cutwater.errors import BuildError
from cutwater.plan.graph import EdgeType

if TYPE_CHECKING:
    from cutwater.operators.process.functions import BroadcastProcessFunction, CoProcessFunction, StatefulFunction

Sides = Mapping[str, "str | pa.Schema"]


def process(
    builder: GraphBuilder,
    id: str,
    upstreams: tuple[Upstream, ...],
    function: StatefulFunction,
    schema: str | pa.Schema,
    side: Sides | None,
    parallelism: int | None,
) -> ProcessedStream:
    """Add the step of a process function over one or two streams."""
    from cutwater.data.schema_text import as_schema
    from cutwater.operators.process.spec import ProcessInput, ProcessSpec

    with located(builder.check_id(id)):
        sides = tuple((name, plain_schema(as_schema(fields))) for name, fields in (side or {}).items())
        output = plain_schema(as_schema(schema))
        left, *others = (ProcessInput(u.type.schema, u.keys, u.edge is EdgeType.BROADCAST) for u in upstreams)
        right = others[0] if others else None
        spec = ProcessSpec(left.schema, left.keys, function, output, sides, right, left.broadcast)
        types = [carry_by_name(upstreams[0], schema) for schema in spec.outputs]
        out, lost = types[0]
        if out.event_time is not None and not all(builder.has_watermark(u) for u in upstreams):
            out = replace(out, event_time=None, span=None)
            lost = "its right stream has no event time, so that no watermark passes"
        outputs = [out, *(found for found, _ in types[1:])]
        made = builder.add(id, "process", spec, upstreams, outputs, parallelism=parallelism, lost=lost)
        return ProcessedStream(builder, made, tuple(name for name, _ in sides))


class ConnectedStreams:
    """Two streams that share the state of a process function: call ``process``."""

    def __init__(self, builder: GraphBuilder, left: Upstream, right: Upstream) -> None:
        self._builder, self._left, self._right = builder, left, right
        if left.edge is EdgeType.BROADCAST:
            raise BuildError(
                "the broadcast stream is the left one",
                step=left.step,
                hint="Write stream.connect(rules.broadcast()).",
            )
        if right.edge is not EdgeType.BROADCAST and bool(left.keys) != bool(right.keys):
            raise BuildError(
                f"the {'right' if left.keys else 'left'} stream has no key, the other one has",
                step=(right if left.keys else left).step,
                hint="Call key_by on both or on neither, or connect to a broadcast() stream.",
            )

    def process(
        self,
        id: str,
        function: CoProcessFunction | BroadcastProcessFunction,
        schema: str | pa.Schema,
        *,
        side: Sides | None = None,
        parallelism: int | None = None,
    ) -> ProcessedStream:
        """Your own logic over the rows of both streams; the arguments are those of ``Stream.process``.

        Args:
            function: a ``cw.CoProcessFunction``, or a ``cw.BroadcastProcessFunction`` if the right stream is broadcast.

        Raises:
            BuildError: another function, keys that do not fit each other, or a schema that is none.
        """
        return process(self._builder, id, (self._left, self._right), function, schema, side, parallelism)


class ProcessedStream(Stream):
    """Stream of a process function, with its side outputs."""

    def __init__(self, builder: GraphBuilder, outputs: tuple[Upstream, ...], names: tuple[str, ...]) -> None:
        super().__init__(builder, outputs[0])
        self._outputs = dict(zip(names, outputs[1:], strict=True))
        self._id = outputs[0].step

    def side(self, name: str) -> Stream:
        """Rows that the function emitted for a side output.

        Raises:
            BuildError: the step declares no such side output.
        """
        if name not in self._outputs:
            known = ", ".join(map(repr, self._outputs)) or "none"
            raise BuildError(
                f"no side output {name!r}",
                step=self._id,
                hint=f"Declared are: {known}. Declare it with side={{{name!r}: schema}}.",
            )
        return Stream(self._builder, self._outputs[name])

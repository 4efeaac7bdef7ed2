"""The other stateless steps, key_by and sinks: what each adds to the graph, the type of what flows out, its checks.

Every function checks everything first and adds to the graph last, so that a refused step leaves no trace.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, cast

import pyarrow as pa

from cutwater.api.steps.build import (
    Duration,
    GraphBuilder,
    Upstream,
    carry,
    carry_by_name,
    check_parallelism,
    distinct_columns,
    duration_us,
    listed,
    located,
    plain_schema,
    require_column,
)
from cutwater.connectors.base import SinkHooks
from cutwater.errors import BuildError
from cutwater.plan.graph import EdgeType, StreamType

# --------------------------------------------------------------------------------------------------------- functions


def function_step(
    builder: GraphBuilder,
    id: str,
    upstream: Upstream,
    kind: Literal["map_batches", "map", "flat_map"],
    fn: Callable[..., Any],
    schema: str | pa.Schema,
    parallelism: int | None,
) -> Upstream:
    from cutwater.data.schema_text import as_schema
    from cutwater.operators.stateless.functions import FlatMapSpec, MapBatchesSpec, MapRowSpec

    spec_type = {"map_batches": MapBatchesSpec, "map": MapRowSpec, "flat_map": FlatMapSpec}[kind]
    with located(builder.check_id(id)):
        spec = spec_type(upstream.type.schema, fn, plain_schema(as_schema(schema)))
        out, lost = carry_by_name(upstream, spec.outputs[0])
        return builder.add(id, kind, spec, [upstream], [out], parallelism=parallelism, lost=lost)[0]


def map_async(
    builder: GraphBuilder,
    id: str,
    upstream: Upstream,
    fn: Callable[..., Any],
    schema: str | pa.Schema,
    timeout: Duration,
    settings: dict[str, Any],
    parallelism: int | None,
) -> tuple[Upstream, ...]:
    """The main output, and the rows that got no result in time if they are diverted."""
    from cutwater.data.schema_text import as_schema
    from cutwater.operators.enrich.async_map import AsyncMapSpec

    with located(builder.check_id(id)):
        if upstream.edge is EdgeType.BROADCAST:
            raise BuildError("every subtask would ask for every row", hint="Leave broadcast() away before map_async.")
        if upstream.type.changes is not None and (not settings["ordered"] or settings["on_timeout"] != "error"):
            raise BuildError(
                f"the changes of updating stream {upstream.step!r} must stay in order and complete",
                hint=f"Leave ordered=True and on_timeout='error', or ask before step {upstream.step!r}.",
            )
        source = plain_schema(upstream.type.schema)
        timeout_ms = duration_us(timeout, "timeout") / 1000
        retry_ms = duration_us(settings.pop("retry_delay"), "retry_delay") / 1000
        spec = AsyncMapSpec(
            source, fn, plain_schema(as_schema(schema)), timeout_ms=timeout_ms, retry_delay_ms=retry_ms, **settings
        )
        out, lost = carry_by_name(upstream, spec.outputs[0])
        outputs = [out, *(StreamType(side) for side in spec.outputs[1:])]
        options: dict[str, object] = {"on_timeout": spec.on_timeout}
        return builder.add(
            id, "map_async", spec, [upstream], outputs, parallelism=parallelism, lost=lost, options=options
        )


# --------------------------------------------------------------------------------------------------- joining streams


def union(builder: GraphBuilder, id: str, upstreams: Sequence[Upstream], parallelism: int | None) -> Upstream:
    from cutwater.operators.stateless.rows import UnionSpec, check_same_schema

    with located(builder.check_id(id)):
        if len(upstreams) < 2:
            raise BuildError("union needs at least one other stream")
        schema = check_same_schema([u.type.schema for u in upstreams])
        event_times = {u.type.event_time for u in upstreams}
        spans = {u.type.span for u in upstreams}
        lost = None
        changes = None if all(u.type.changes is None for u in upstreams) else ()
        out = StreamType(schema, changes=changes)
        if len(event_times) == 1 and len(spans) == 1:
            out = replace(out, event_time=upstreams[0].type.event_time, span=upstreams[0].type.span)
        elif upstreams[0].type.event_time is not None:
            lost = "its streams have different event-time columns"
        spec = UnionSpec(schema, len(upstreams))
        return builder.add(id, "union", spec, upstreams, [out], parallelism=parallelism, lost=lost)[0]


def enrich(
    builder: GraphBuilder,
    id: str,
    upstream: Upstream,
    table: object,
    on: str | Sequence[str] | Mapping[str, str],
    how: str,
    suffix: str,
    parallelism: int | None,
) -> Upstream:
    from cutwater.operators.enrich.lookup import EnrichSpec

    with located(builder.check_id(id)):
        if isinstance(on, str):
            on = (on,)
        pairs = tuple(on.items()) if isinstance(on, Mapping) else tuple((name, name) for name in on)
        if not pairs:
            raise BuildError("enrich needs a key column", hint="Write on='carrier' or on={'left': 'right'}.")
        for left, _ in pairs:
            require_column(upstream.type.schema, left)
        if how not in ("left", "inner"):
            raise BuildError(f"how={how!r} is unknown", hint="Choose 'left' or 'inner'.")
        spec = EnrichSpec(upstream.type.schema, enrichment_table(table), pairs, cast(Any, how), suffix)
        out, lost = carry(upstream, distinct_columns(spec.outputs[0]), {n: n for n in upstream.type.schema.names})
        return builder.add(id, "enrich", spec, [upstream], [out], parallelism=parallelism, lost=lost)[0]


def enrichment_table(table: object) -> Any:
    """The table of anything that may be one.

    Raises:
        BuildError: it is none.
    """
    from cutwater.connectors.files.files import Files
    from cutwater.operators.enrich.table import EnrichmentTable

    if isinstance(table, EnrichmentTable):
        return table
    if isinstance(table, pa.RecordBatch):
        return EnrichmentTable(pa.Table.from_batches([table]))
    if isinstance(table, pa.Table | str | os.PathLike | list | tuple):
        return EnrichmentTable(cast(Any, table))
    if isinstance(table, Files):
        other = sorted(table.options.keys() - {"format"})
        if other:
            raise BuildError(f"a table to enrich with takes no option {other[0]!r}")
        return EnrichmentTable(table.path, table.options.get("format"))
    module = type(table).__module__.partition(".")[0]
    if module == "polars" and hasattr(table, "to_arrow"):
        return EnrichmentTable(cast(Any, table).to_arrow())
    if module == "pandas" and hasattr(table, "columns"):
        return EnrichmentTable(pa.Table.from_pandas(cast(Any, table), preserve_index=False))
    raise BuildError(
        f"a table to enrich with cannot be a {type(table).__name__}",
        hint="Give a pyarrow.Table, a Polars or pandas frame, a path of files, or an EnrichmentTable.",
    )


# ------------------------------------------------------------------------------------------------------ partitioning


def key_by(
    builder: GraphBuilder,
    upstream: Upstream,
    columns: Sequence[str | Sequence[str]],
    nulls: str,
    dead_letters: str | None,
) -> tuple[Upstream, Upstream | None]:
    """The upstream read by a hash edge, and the rows without a usable key if they are diverted."""
    from cutwater.state.keys import MAX_NULLABLE_KEYS, NullableKeys, check_key_types

    schema = upstream.type.schema
    names: list[str] = listed(columns)
    keys = NullableKeys(names) if nulls == "key" else tuple(names)
    with located(dead_letters if isinstance(dead_letters, str) else upstream.step):
        for name in keys:
            require_column(schema, name, "key column")
        check_key_types(schema, keys)
        if nulls not in ("error", "key"):
            raise BuildError(f"nulls is 'error' or 'key', not {nulls!r}")
        if nulls == "key" and len(keys) > MAX_NULLABLE_KEYS:
            raise BuildError(f"nulls='key' takes {MAX_NULLABLE_KEYS} key columns at most, not {len(keys)}")
    bad = None
    if dead_letters is not None:
        from cutwater.operators.stateless.rows import KeyCheckSpec

        with located(builder.check_id(dead_letters)):
            spec = KeyCheckSpec(schema, keys)
            outputs = [replace(upstream.type, keys=upstream.partitioning), StreamType(spec.outputs[1])]
            beside = builder.steps[upstream.step].parallelism if upstream.edge is EdgeType.FORWARD else None
            upstream, bad = builder.add(dead_letters, "key_check", spec, [upstream], outputs, parallelism=beside)
    return replace(upstream, edge=EdgeType.HASH, keys=keys), bad


def with_event_time(builder: GraphBuilder, upstream: Upstream, column: str) -> Upstream:
    """The upstream with another event-time column."""
    with located(upstream.step):
        kind = upstream.type.schema.field(require_column(upstream.type.schema, column, "event-time column")).type
        if not (pa.types.is_timestamp(kind) and kind.unit == "us"):
            raise BuildError(
                f"event-time column {column!r} is {kind}, not timestamp[us]",
                hint="Cast it: with_columns('id', pl.col(...).cast(pl.Datetime('us'))).",
            )
        if not builder.has_watermark(upstream):
            story, hint = builder.event_time_story(upstream)
            raise BuildError(f"with_event_time needs a watermark, but {story}", hint=hint)
    return replace(upstream, type=replace(upstream.type, event_time=column, span=None))


# ------------------------------------------------------------------------------------------------------------- sinks


def write(builder: GraphBuilder, id: str, upstream: Upstream, sink: object, parallelism: int | None) -> None:
    with located(builder.check_id(id)):
        if hasattr(sink, "as_sink"):
            sink = cast(Any, sink).as_sink()
        if not all(hasattr(sink, name) for name in ("guarantee", "check", "writer", "committer")):
            raise BuildError(
                f"a {type(sink).__name__} is not a sink",
                hint="Write for example to cw.files('out/') or cw.discard().",
            )
        _sink_step(builder, id, "write", upstream, sink, parallelism)


def foreach_batch(
    builder: GraphBuilder,
    id: str,
    upstream: Upstream,
    fn: Callable[[pa.Table, int], None],
    idempotent: bool,
    parallelism: int | None,
) -> None:
    from cutwater.connectors.foreach_batch import ForeachBatchSink

    with located(builder.check_id(id)):
        if not callable(fn):
            raise BuildError(f"foreach_batch needs a function of (rows, checkpoint_id), not {type(fn).__name__}")
        check_parallelism(id, parallelism)
        sink = ForeachBatchSink(fn, idempotent=idempotent)
        if parallelism is not None:
            sink = dataclasses.replace(sink, parallelism=parallelism)
        _sink_step(builder, id, "foreach_batch", upstream, sink, parallelism)


def collect(builder: GraphBuilder, id: str, upstream: Upstream, parallelism: int | None) -> None:
    from cutwater.connectors.collect import CollectSink

    with located(builder.check_id(id)):
        _sink_step(builder, id, "collect", upstream, CollectSink(), parallelism)


def _sink_step(
    builder: GraphBuilder, id: str, kind: str, upstream: Upstream, sink: Any, parallelism: int | None
) -> None:
    if upstream.edge is EdgeType.BROADCAST:
        raise BuildError("a broadcast stream would be written once per subtask", hint="Write it before broadcast().")
    fixed = cast("int | None", sink.parallelism)
    if fixed is not None and parallelism not in (None, fixed):
        raise BuildError(f"the sink runs at parallelism {fixed}, not {parallelism}")
    if upstream.type.changes is not None:
        sink = SinkHooks(sink).applying(upstream.type.changes)
    sink.check(upstream.type.schema)
    builder.add(id, kind, sink, [upstream], [], parallelism=fixed if fixed is not None else parallelism)

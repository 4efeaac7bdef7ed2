"""The stateless steps, key_by and sinks: what each adds to the graph, the type of what flows out, its checks.

Every function checks everything first and adds to the graph last, so that a refused step leaves no trace.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import TYPE_CHECKING, Any, Literal, cast

import pyarrow as pa

from cutwater.api.steps.build import (
    Duration,
    GraphBuilder,
    NewStep,
    Upstream,
    carry,
    carry_by_name,
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

if TYPE_CHECKING:
    import polars as pl

    from cutwater.operators.stateless.expressions import Stage

# --------------------------------------------------------------------------------------------------------- functions


def function_step(
    step: NewStep, kind: Literal["map_batches", "map", "flat_map"], fn: Callable[..., Any], schema: str | pa.Schema
) -> Upstream:
    from cutwater.data.schema_text import as_schema
    from cutwater.operators.stateless.functions import FlatMapSpec, MapBatchesSpec, MapRowSpec

    upstream = step.upstream
    spec_type = {"map_batches": MapBatchesSpec, "map": MapRowSpec, "flat_map": FlatMapSpec}[kind]
    spec = spec_type(upstream.type.schema, fn, plain_schema(as_schema(schema)))
    out, lost = carry_by_name(upstream, spec.outputs[0])
    return step.add(kind, spec, [out], lost=lost)[0]


def map_async(
    step: NewStep, fn: Callable[..., Any], schema: str | pa.Schema, timeout: Duration, settings: dict[str, Any]
) -> tuple[Upstream, ...]:
    """The main output, and the rows that got no result in time if they are diverted."""
    from cutwater.data.schema_text import as_schema
    from cutwater.operators.enrich.async_map import AsyncMapSpec

    upstream = step.upstream
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
    return step.add("map_async", spec, outputs, lost=lost, on_timeout=spec.on_timeout)


# --------------------------------------------------------------------------------------------------- joining streams


def union(step: NewStep) -> Upstream:
    from cutwater.operators.stateless.rows import UnionSpec, check_same_schema

    upstreams = step.inputs
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
    return step.add("union", spec, [out], lost=lost)[0]


def enrich(
    step: NewStep, table: object, on: str | Sequence[str] | Mapping[str, str], how: str, suffix: str
) -> Upstream:
    from cutwater.operators.enrich.lookup import EnrichSpec

    upstream = step.upstream
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
    return step.add("enrich", spec, [out], lost=lost)[0]


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

        beside = builder.steps[upstream.step].parallelism if upstream.edge is EdgeType.FORWARD else None
        with builder.new_step(dead_letters, [upstream], beside) as step:
            spec = KeyCheckSpec(schema, keys)
            outputs = [replace(upstream.type, keys=upstream.partitioning), StreamType(spec.outputs[1])]
            upstream, bad = step.add("key_check", spec, outputs)
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
            raise builder.no_event_time(upstream, "with_event_time needs a watermark")
    return replace(upstream, type=replace(upstream.type, event_time=column, span=None))


# ------------------------------------------------------------------------------------------------------------- sinks


def write(step: NewStep, sink: object) -> None:
    if hasattr(sink, "as_sink"):
        sink = cast(Any, sink).as_sink()
    if not all(hasattr(sink, name) for name in ("guarantee", "check", "writer", "committer")):
        raise BuildError(
            f"a {type(sink).__name__} is not a sink",
            hint="Write for example to cw.files('out/') or cw.discard().",
        )
    _sink_step(step, "write", sink)


def foreach_batch(step: NewStep, fn: Callable[[pa.Table, int], None], idempotent: bool) -> None:
    from cutwater.connectors.foreach_batch import ForeachBatchSink

    if not callable(fn):
        raise BuildError(f"foreach_batch needs a function of (rows, checkpoint_id), not {type(fn).__name__}")
    sink = ForeachBatchSink(fn, idempotent=idempotent)
    if step.parallelism is not None:
        sink = replace(sink, parallelism=step.parallelism)
    _sink_step(step, "foreach_batch", sink)


def collect(step: NewStep) -> None:
    from cutwater.connectors.files.sink import CollectSink

    _sink_step(step, "collect", CollectSink())


def _sink_step(step: NewStep, kind: str, sink: Any) -> None:
    upstream = step.upstream
    if upstream.edge is EdgeType.BROADCAST:
        raise BuildError("a broadcast stream would be written once per subtask", hint="Write it before broadcast().")
    fixed = cast("int | None", sink.parallelism)
    if fixed is not None and step.parallelism not in (None, fixed):
        raise BuildError(f"the sink runs at parallelism {fixed}, not {step.parallelism}")
    if upstream.type.changes is not None:
        sink = SinkHooks(sink).applying(upstream.type.changes)
    sink.check(upstream.type.schema)
    replace(step, parallelism=step.parallelism if fixed is None else fixed).add(kind, sink, [])


def filter_rows(step: NewStep, predicates: Sequence[pl.Expr]) -> Upstream:
    from cutwater.operators.stateless.expressions import Filter

    schema = step.upstream.type.schema
    expressions = _expressions(schema, predicates, {}, names=False)
    predicate = expressions[0]
    for more in expressions[1:]:
        predicate = predicate & more
    kept = {name: name for name in schema.names}
    return _expression_step(step, "filter", Filter(predicate), kept)


def select(step: NewStep, exprs: Sequence[str | pl.Expr], named: Mapping[str, pl.Expr]) -> Upstream:
    from cutwater.operators.stateless.expressions import Select

    schema = step.upstream.type.schema
    expressions = _expressions(schema, exprs, named, names=True)
    kept = _untouched(schema, expressions)
    return _expression_step(step, "select", Select(tuple(expressions)), kept)


def with_columns(step: NewStep, exprs: Sequence[pl.Expr], named: Mapping[str, pl.Expr]) -> Upstream:
    from cutwater.operators.stateless.expressions import WithColumns

    schema = step.upstream.type.schema
    expressions = _expressions(schema, exprs, named, names=False)
    written = set(_output_names(schema, expressions))
    kept = {name: name for name in schema.names if name not in written}
    return _expression_step(step, "with_columns", WithColumns(tuple(expressions)), kept)


def drop(step: NewStep, columns: Sequence[str | Sequence[str]]) -> Upstream:
    from cutwater.operators.stateless.expressions import Drop

    schema = step.upstream.type.schema
    gone = tuple(require_column(schema, c) for c in listed(columns))
    if not gone:
        raise BuildError("drop needs the name of a column")
    if set(gone) == set(schema.names):
        raise BuildError("drop leaves no column", hint="Keep at least one column.")
    kept = {name: name for name in schema.names if name not in gone}
    return _expression_step(step, "drop", Drop(gone), kept)


def rename(step: NewStep, mapping: Mapping[str, str]) -> Upstream:
    from cutwater.operators.stateless.expressions import Rename

    schema = step.upstream.type.schema
    if not mapping:
        raise BuildError("rename needs at least one column", hint="Write rename('id', old='new').")
    for name in mapping:
        require_column(schema, name)
    kept = {name: mapping.get(name, name) for name in schema.names}
    twice = sorted(n for n in kept.values() if list(kept.values()).count(n) > 1)
    if twice:
        raise BuildError(f"rename gives two columns the name {twice[0]!r}")
    return _expression_step(step, "rename", Rename(dict(mapping)), kept)


def _expression_step(step: NewStep, kind: str, stage: Stage, kept: dict[str, str]) -> Upstream:
    from cutwater.operators.stateless.expressions import ExpressionSpec

    spec = ExpressionSpec(step.upstream.type.schema, (stage,))
    out, lost = carry(step.upstream, spec.outputs[0], kept)
    return step.add(kind, spec, [out], lost=lost)[0]


def _expressions(
    schema: pa.Schema, exprs: Sequence[object], named: Mapping[str, object], *, names: bool
) -> list[pl.Expr]:
    """Polars expressions of the arguments; plain names are columns where ``names`` allows them."""
    import polars as pl

    found: list[pl.Expr] = []
    for label, value in [*((None, e) for e in listed(exprs)), *named.items()]:
        if isinstance(value, str) and names:
            value = pl.col(require_column(schema, value))
        if not isinstance(value, pl.Expr):
            hint = "Write for example pl.col('delay') > 15; for a Python function use map or map_batches."
            if isinstance(value, str) and not value.isidentifier():
                hint = f"SQL text becomes an expression by pl.sql_expr({value!r}), a constant by pl.lit({value!r})."
            elif value is None or isinstance(value, bool | int | float | str | date):
                hint = f"Write pl.lit({value!r}) for a constant, pl.col('name') for a column."
            raise BuildError(f"a Polars expression is needed, not {type(value).__name__}", hint=hint)
        found.append(value if label is None else value.alias(label))
    if not found:
        raise BuildError("at least one expression is needed")
    return found


def _untouched(schema: pa.Schema, expressions: Sequence[pl.Expr]) -> dict[str, str]:
    """Columns that expressions only select, perhaps under another name: old name to new."""
    kept: dict[str, str] = {}
    for expression in expressions:
        plain = expression.meta.undo_aliases()
        if plain.meta.is_column_selection():
            pairs = zip(_output_names(schema, [plain]), _output_names(schema, [expression]), strict=False)
            for old, new in pairs:
                if old not in kept or new == old:
                    kept[old] = new
    return kept


def _output_names(schema: pa.Schema, expressions: Sequence[pl.Expr]) -> list[str]:
    """Names of the columns that expressions make; none if Polars refuses them (their own check says why)."""
    import polars as pl

    empty = cast(pl.DataFrame, pl.from_arrow(schema.empty_table())).lazy()
    names: list[str] = []
    for expression in expressions:
        try:
            names += empty.select(expression).collect_schema().names()
        except pl.exceptions.PolarsError:
            continue
    return names

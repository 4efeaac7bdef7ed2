"""The stateless steps over Polars expressions.

Every function checks everything first and adds to the graph last, so that a refused step leaves no trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date
from typing import TYPE_CHECKING, cast

import pyarrow as pa

from cutwater.api.steps.build import GraphBuilder, Upstream, carry, check_parallelism, listed, located, require_column
from cutwater.errors import BuildError

if TYPE_CHECKING:
    import polars as pl

    from cutwater.operators.stateless.expressions import Stage


def filter_rows(
    builder: GraphBuilder, id: str, upstream: Upstream, predicates: Sequence[pl.Expr], parallelism: int | None
) -> Upstream:
    from cutwater.operators.stateless.expressions import Filter

    with located(builder.check_id(id)):
        expressions = _expressions(upstream.type.schema, predicates, {}, names=False)
        predicate = expressions[0]
        for more in expressions[1:]:
            predicate = predicate & more
        kept = {name: name for name in upstream.type.schema.names}
        return _expression_step(builder, id, "filter", upstream, Filter(predicate), kept, parallelism)


def select(
    builder: GraphBuilder,
    id: str,
    upstream: Upstream,
    exprs: Sequence[str | pl.Expr],
    named: Mapping[str, pl.Expr],
    parallelism: int | None,
) -> Upstream:
    from cutwater.operators.stateless.expressions import Select

    with located(builder.check_id(id)):
        check_parallelism(id, parallelism)
        expressions = _expressions(upstream.type.schema, exprs, named, names=True)
        kept = _untouched(upstream.type.schema, expressions)
        return _expression_step(builder, id, "select", upstream, Select(tuple(expressions)), kept, parallelism)


def with_columns(
    builder: GraphBuilder,
    id: str,
    upstream: Upstream,
    exprs: Sequence[pl.Expr],
    named: Mapping[str, pl.Expr],
    parallelism: int | None,
) -> Upstream:
    from cutwater.operators.stateless.expressions import WithColumns

    with located(builder.check_id(id)):
        check_parallelism(id, parallelism)
        schema = upstream.type.schema
        expressions = _expressions(schema, exprs, named, names=False)
        written = set(_output_names(schema, expressions))
        kept = {name: name for name in schema.names if name not in written}
        return _expression_step(
            builder, id, "with_columns", upstream, WithColumns(tuple(expressions)), kept, parallelism
        )


def drop(
    builder: GraphBuilder, id: str, upstream: Upstream, columns: Sequence[str | Sequence[str]], parallelism: int | None
) -> Upstream:
    from cutwater.operators.stateless.expressions import Drop

    with located(builder.check_id(id)):
        schema = upstream.type.schema
        gone = tuple(require_column(schema, c) for c in listed(columns))
        if not gone:
            raise BuildError("drop needs the name of a column")
        if set(gone) == set(schema.names):
            raise BuildError("drop leaves no column", hint="Keep at least one column.")
        kept = {name: name for name in schema.names if name not in gone}
        return _expression_step(builder, id, "drop", upstream, Drop(gone), kept, parallelism)


def rename(
    builder: GraphBuilder, id: str, upstream: Upstream, mapping: Mapping[str, str], parallelism: int | None
) -> Upstream:
    from cutwater.operators.stateless.expressions import Rename

    with located(builder.check_id(id)):
        check_parallelism(id, parallelism)
        schema = upstream.type.schema
        if not mapping:
            raise BuildError("rename needs at least one column", hint="Write rename('id', old='new').")
        for name in mapping:
            require_column(schema, name)
        kept = {name: mapping.get(name, name) for name in schema.names}
        twice = sorted(n for n in kept.values() if list(kept.values()).count(n) > 1)
        if twice:
            raise BuildError(f"rename gives two columns the name {twice[0]!r}")
        return _expression_step(builder, id, "rename", upstream, Rename(dict(mapping)), kept, parallelism)


def _expression_step(
    builder: GraphBuilder,
    id: str,
    kind: str,
    upstream: Upstream,
    stage: Stage,
    kept: dict[str, str],
    parallelism: int | None,
) -> Upstream:
    from cutwater.operators.stateless.expressions import ExpressionSpec

    spec = ExpressionSpec(upstream.type.schema, (stage,))
    out, lost = carry(upstream, spec.outputs[0], kept)
    return builder.add(id, kind, spec, [upstream], [out], parallelism=parallelism, lost=lost)[0]


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

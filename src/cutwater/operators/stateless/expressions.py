"""Stateless steps written as Polars expressions: filter, select, with_columns, drop, rename.

Everything that can be wrong about them is found when the dataflow is built: unknown columns, a predicate that is not
boolean, results without a column type, and expressions that look across rows (``expression_checks``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from cutwater.data.rows import describe_row, row_contents
from cutwater.errors import BuildError, CutwaterError, DataError, UserCodeError
from cutwater.operators.base import OneInputSpec, Operator, OperatorSpec, Outputs, check_names
from cutwater.operators.row_filters import RowFilter
from cutwater.operators.stateless.expression_checks import (
    advice,
    check_row_local,
    columns_read,
    probe_rows,
    reason,
    unknown_column,
)
from cutwater.operators.stateless.expression_plan import (
    MAX_SINGLE,
    Compute,
    Mask,
    Operation,
    Project,
    arrow_type,
    columns_needed,
    first_failing,
    prune,
    readable,
    run,
)

if TYPE_CHECKING:
    import polars as pl

_ALIAS = "Give one another name with .alias(...)."


@dataclass(frozen=True, eq=False)
class Filter:
    """Keep the rows for which ``expr`` is true (not false, not null)."""

    expr: pl.Expr | str


@dataclass(frozen=True, eq=False)
class Select:
    """Exactly these columns: names or expressions."""

    exprs: Sequence[pl.Expr | str]


@dataclass(frozen=True, eq=False)
class WithColumns:
    """Add columns, or replace those of the same name."""

    exprs: Sequence[pl.Expr | str]


@dataclass(frozen=True)
class Drop:
    """All columns but these."""

    names: Sequence[str]


@dataclass(frozen=True)
class Rename:
    """New names (values) for columns (keys); the others keep theirs."""

    mapping: Mapping[str, str]


Stage: TypeAlias = Filter | Select | WithColumns | Drop | Rename


@dataclass(frozen=True, eq=False)
class ExpressionSpec(OneInputSpec):
    """A chain of stages over rows of ``input_schema``.

    Args:
        stages: what to do to them, in order.
        checked: the stages were found local to a row before (set by ``fused``).
        dictionaries: texts that stay as they came leave as dictionaries where they came so.

    Raises:
        BuildError: a stage cannot work on such rows, or looks across rows; the message says why.

    >>> import polars as pl
    >>> spec = ExpressionSpec(pa.schema({"n": pa.int64()}), (Filter(pl.col("n") > 1), Select([pl.col("n") * 2])))
    >>> spec.build().process(0, pa.record_batch({"n": [1, 2, 3]}))[0][1].to_pydict()
    {'n': [4, 6]}
    """

    repeatable = True
    takes_dictionaries = True

    stages: tuple[Stage, ...]
    checked: bool = field(default=False, repr=False)
    dictionaries: bool = field(default=False, repr=False)
    _output: pa.Schema = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", tuple(self.stages))
        compiler = self._compiled(trial=not self.checked)
        object.__setattr__(self, "_output", compiler.schema)

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        return (self._output,)

    @property
    def keeps_every_row(self) -> bool:
        return not any(isinstance(stage, Filter) for stage in self.stages)

    @property
    def row_filters(self) -> tuple[RowFilter, ...]:
        """Filters on columns that are still what they were in the input."""
        filters: list[RowFilter] = []
        carried = {name: name for name in self.input_schema.names}
        for operation in self._compiled(trial=False).operations:
            if isinstance(operation, Project):
                kept = operation.kept.items()
                carried = {name: carried[source] for name, source in kept if source in carried}
            elif all(name in carried for name in operation.roots):
                filters.append(RowFilter(operation.expr, {name: carried[name] for name in operation.roots}))
        return tuple(filters)

    def columns_for(self, wanted: frozenset[str] | None) -> frozenset[str]:
        return columns_needed(self._compiled(trial=False).operations, self._output.names if wanted is None else wanted)

    def narrowed(self, wanted: frozenset[str]) -> ExpressionSpec:
        names = [name for name in self._output.names if name in wanted]
        return ExpressionSpec(self.input_schema, (*self.stages, Select(names)), checked=True)

    def passing_dictionaries(self) -> ExpressionSpec:
        return replace(self, checked=True, dictionaries=True)

    def fused(self, after: OperatorSpec) -> ExpressionSpec | None:
        """Both as one, if ``after`` has expressions too: rows pass through a single operator.

        Raises:
            BuildError: ``after`` expects other columns than this one makes.
        """
        if not isinstance(after, ExpressionSpec):
            return None
        if after.input_schema != self.outputs[0]:
            raise BuildError("expression steps of different schemas cannot be fused")
        return ExpressionSpec(self.input_schema, self.stages + after.stages, checked=True)

    def _compiled(self, *, trial: bool) -> _Compiler:
        compiler = _Compiler(self.input_schema, trial=trial)
        for stage in self.stages:
            compiler.add(stage)
        return compiler

    def build(self) -> ExpressionOperator:
        compiler = self._compiled(trial=False)
        operations = prune(compiler.operations, compiler.schema.names)
        return ExpressionOperator(operations, compiler.schema, dictionaries=self.dictionaries)


class ExpressionOperator(Operator):
    """Runs compiled stages on each slice."""

    def __init__(self, operations: Sequence[Operation], schema: pa.Schema, *, dictionaries: bool = False) -> None:
        self._operations = operations
        self._schema = schema
        self._dictionaries = dictionaries

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        if batch.num_rows == 0:
            return []
        try:
            result = run(self._operations, batch, self._schema, dictionaries=self._dictionaries)
        except BaseException as exc:
            if not _of_expression(exc):
                raise
            raise self._explain(batch, exc) from exc
        return [] if result is None else [(0, result)]

    def _fails(self, batch: pa.RecordBatch) -> bool:
        try:
            run(self._operations, batch, self._schema)
        except BaseException as exc:
            if not _of_expression(exc):
                raise
            return True
        return False

    def _explain(self, batch: pa.RecordBatch, exc: BaseException) -> CutwaterError:
        """The error with the first row that causes it."""
        import polars as pl

        row = first_failing(self._fails, batch)
        contents = describe_row(row_contents(batch, row))
        own = isinstance(exc, DataError | pa.ArrowException | pl.exceptions.PolarsError | pl.exceptions.PanicException)
        cls = DataError if own and "Traceback" not in str(exc) else UserCodeError
        name, why = type(exc).__name__, reason(exc) if cls is DataError else str(exc)
        error = cls(
            f"an expression failed on row {row} of the batch, {contents}: {name}: {why}",
            hint="Filter such rows out before, or use a lenient form such as strict=False.",
        )
        error.row = row
        return error


def _of_expression(exc: BaseException) -> bool:
    """Polars reports its own panics outside ``Exception``."""
    import polars as pl

    return isinstance(exc, Exception | pl.exceptions.PanicException)


class _Compiler:
    """Turns stages into operations, following the schema from stage to stage."""

    def __init__(self, schema: pa.Schema, *, trial: bool) -> None:
        repeated = sorted({name for name in schema.names if schema.names.count(name) > 1})
        if repeated:
            raise BuildError(f"column {repeated[0]!r} appears twice", hint="Rename one of them at the source.")
        for column in schema:
            if not readable(column.type):
                raise BuildError(
                    f"column {column.name!r} of type {column.type} cannot pass through expressions",
                    hint="Cast or drop it at the source, or with map_batches.",
                )
        self.schema = schema
        self.operations: list[Operation] = []
        self._trial = trial
        self._empty: pl.DataFrame | None = None
        self._probes: pl.DataFrame | None = None

    def add(self, stage: Stage) -> None:
        if isinstance(stage, Filter):
            return self._filter(_as_expr(stage.expr))
        if isinstance(stage, Drop):
            for name in stage.names:
                self._require(name)
            return self._project({n: n for n in self.schema.names if n not in stage.names}, [], self.schema.names)
        if isinstance(stage, Rename):
            for name in stage.mapping:
                self._require(name)
            names = [stage.mapping.get(name, name) for name in self.schema.names]
            check_names(names, _ALIAS)
            return self._project(dict(zip(names, self.schema.names, strict=True)), [], names)
        return self._columns([_as_expr(e) for e in stage.exprs], keep=isinstance(stage, WithColumns))

    def _filter(self, expr: pl.Expr) -> None:
        import polars as pl

        fields, roots = self._infer(expr, types=False)
        if len(fields) != 1 or fields[0][1] != pl.Boolean:
            found = ", ".join(f"{name}: {dtype}" for name, dtype in fields)
            raise BuildError(
                f"filter needs one boolean expression, {expr} gives {found}",
                hint="Compare it with something, or join several with & and |.",
            )
        self._try(expr)
        self.operations.append(Mask(expr, roots))

    def _columns(self, exprs: list[pl.Expr], *, keep: bool) -> None:
        """``select`` or, with ``keep``, ``with_columns``."""
        carried = {name: name for name in self.schema.names} if keep else {}
        order = list(carried)
        named: list[str] = []
        computes: list[Compute] = []
        for expr in exprs:
            source = self._plain_column(expr)
            if source is not None:
                name = expr.meta.output_name()
                carried[name] = source
                named.append(name)
                continue
            dtypes, roots = self._infer(expr)
            fields = tuple(pa.field(name, arrow_type(name, dtype)) for name, dtype in dtypes)
            self._try(expr)
            computes.append(Compute((expr,), roots, fields))
            named += [f.name for f in fields]
            for f in fields:
                carried.pop(f.name, None)
        check_names(named, _ALIAS)
        order += [name for name in named if name not in order]
        if not order:
            raise BuildError("select needs at least one column")
        self._project(carried, computes, order)

    def _project(self, kept: dict[str, str], computes: list[Compute], order: Sequence[str]) -> None:
        made = {f.name: f for compute in computes for f in compute.fields}
        fields = {name: self.schema.field(source).with_name(name) for name, source in kept.items()} | made
        names = [name for name in order if name in fields]
        if not names:
            raise BuildError("no column is left", hint="Keep at least one.")
        self.operations.append(Project(kept, _grouped(computes, self.schema.names)))
        self.schema = pa.schema([fields[name] for name in names])
        self._empty = self._probes = None

    def _plain_column(self, expr: pl.Expr) -> str | None:
        """The column that an expression merely names (or renames)."""
        bare = expr.meta.undo_aliases()
        if not bare.meta.is_column() or bare.meta.is_regex_projection():
            return None
        name = bare.meta.output_name()
        self._require(name)
        return name

    def _require(self, name: str) -> None:
        if name not in self.schema.names:
            raise unknown_column(name, self.schema.names)

    def _infer(self, expr: pl.Expr, *, types: bool = True) -> tuple[list[tuple[str, pl.DataType]], tuple[str, ...]]:
        """Names and types of what an expression gives, and the columns it reads."""
        import polars as pl

        if self._empty is None:
            self._empty = probe_rows(self.schema).clear()
        roots = tuple(dict.fromkeys(expr.meta.root_names()))
        for name in roots:
            if not name.startswith("^"):
                self._require(name)
        try:
            found = list(self._empty.lazy().select(expr).collect_schema().items())
        except (Exception, pl.exceptions.PanicException) as exc:
            raise self._unsuitable(expr, exc) from exc
        if types and not found:
            raise BuildError(f"expression {expr} selects no column", hint=f"There are: {', '.join(self.schema.names)}.")
        return found, roots if self._reads_only(expr, roots, found) else tuple(self.schema.names)

    def _unsuitable(self, expr: pl.Expr, exc: BaseException) -> BuildError:
        why, roots = reason(exc), tuple(dict.fromkeys(expr.meta.root_names()))
        columns = columns_read(self.schema, roots)
        return BuildError(f"expression {expr} does not work on {columns}: {why}", hint=advice(why, self.schema, roots))

    def _reads_only(self, expr: pl.Expr, roots: tuple[str, ...], found: list[tuple[str, pl.DataType]]) -> bool:
        """False for wildcards and selectors, whose columns Polars does not list."""
        import polars as pl

        if self._empty is None or not set(roots) <= set(self.schema.names):
            return False
        try:
            return list(self._empty.lazy().select(roots).select(expr).collect_schema().items()) == found
        except (Exception, pl.exceptions.PanicException):
            return False

    def _try(self, expr: pl.Expr) -> None:
        """Evaluate the expression on probe rows, and on none (some mistakes show only then)."""
        import polars as pl

        if not self._trial:
            return
        if self._probes is None:
            self._probes = probe_rows(self.schema)
        check_row_local(expr, self._probes)
        try:
            self._probes.clear().select(expr)
        except (Exception, pl.exceptions.PanicException) as exc:
            raise self._unsuitable(expr, exc) from exc


def _grouped(computes: list[Compute], order: list[str]) -> tuple[Compute, ...]:
    """Few expressions run each by itself, many together (``MAX_SINGLE``), over columns in schema ``order``."""
    if len(computes) <= MAX_SINGLE:
        return tuple(computes)
    exprs = tuple(expr for compute in computes for expr in compute.exprs)
    read = {root for compute in computes for root in compute.roots}
    fields = tuple(f for compute in computes for f in compute.fields)
    return (Compute(exprs, tuple(name for name in order if name in read), fields),)


def _as_expr(value: pl.Expr | str) -> pl.Expr:
    import polars as pl

    if isinstance(value, str):
        return pl.col(value)
    if isinstance(value, pl.Expr):  # pyright: ignore[reportUnnecessaryIsInstance] - users pass anything
        return value
    raise BuildError(
        f"a Polars expression or a column name is needed, got {type(value).__name__}",
        hint="Write for example pl.col('delay') > 15.",
    )

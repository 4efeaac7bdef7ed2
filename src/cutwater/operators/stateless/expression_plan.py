"""How the stages of an expression step run: columns that no expression touches never leave Arrow.

Measured (Polars 2.1, one core): a batch through ``LazyFrame.collect`` costs 150-250 us even on 10 rows, an eager
``select`` of ONE expression 19 us, of several 120 us; importing or exporting a string column costs 7 ns a row.  So
each expression runs by itself on just the columns it reads, filters become masks over Arrow columns, and columns that
are only carried, renamed or dropped stay what they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from cutwater.data.words import batch_of, bits_dtype, fixed_view, new_buffer
from cutwater.errors import BuildError, DataError

if TYPE_CHECKING:
    import polars as pl

_FEW = 4
"""Where less than this part of the rows are kept, they are taken by their numbers."""
MAX_SINGLE = 6
"""Up to so many expressions of a stage run one by one, more of them in one parallel ``select``."""


def plain_type(type: pa.DataType) -> pa.DataType:
    """The plain form of a type: no dictionaries, views or large offsets, at any depth.

    >>> plain_type(pa.large_list(pa.dictionary(pa.int32(), pa.large_string())))
    ListType(list<item: string>)
    """
    if pt.is_dictionary(type):
        return plain_type(type.value_type)
    if pt.is_large_string(type) or pt.is_string_view(type):
        return pa.string()
    if pt.is_large_binary(type) or pt.is_binary_view(type):
        return pa.binary()
    if pt.is_map(type):
        return pa.map_(plain_type(type.key_type), type.item_field.with_type(plain_type(type.item_type)))
    if pt.is_fixed_size_list(type):
        return pa.list_(type.value_field.with_type(plain_type(type.value_type)), type.list_size)
    if pt.is_list(type) or pt.is_large_list(type) or pt.is_list_view(type) or pt.is_large_list_view(type):
        return pa.list_(type.value_field.with_type(plain_type(type.value_type)))
    if pt.is_struct(type):
        fields = (type.field(i) for i in range(type.num_fields))
        return pa.struct([field.with_type(plain_type(field.type)) for field in fields])
    return type


def readable(type: pa.DataType) -> bool:
    """Whether Polars reads columns of this type and Arrow filters them.

    >>> readable(pa.string()), readable(pa.string_view()), readable(pa.month_day_nano_interval())
    (True, False, False)
    """
    odd = pt.is_union(type) or pt.is_interval(type) or pt.is_run_end_encoded(type) or pt.is_decimal256(type)
    view = pt.is_string_view(type) or pt.is_binary_view(type) or pt.is_list_view(type) or pt.is_large_list_view(type)
    return not odd and not view


def arrow_type(name: str, dtype: pl.DataType) -> pa.DataType:
    """The Arrow type in which a Polars result travels.

    Raises:
        BuildError: no column type of its own (null, Object, unknown).
    """
    import polars as pl

    try:
        type = plain_type(pl.Series(name, [], dtype=dtype).to_arrow().type)
    except (Exception, pl.exceptions.PanicException):
        type = None
    if type is None or "Object" in str(dtype):  # Polars exports pointers to Python objects as bytes
        hint = "Give it a type of its own, for example with .cast(...) or return_dtype=."
        raise BuildError(f"column {name!r} of Polars type {dtype} cannot travel in a stream", hint=hint)
    if pt.is_null(type):
        hint = "Say which: pl.lit(None, dtype=pl.String), or .cast(pl.String)."
        raise BuildError(f"column {name!r} is null in every row and has no type", hint=hint)
    return type


class Column:
    """A column of the batch at work, in Arrow and, once an expression reads it, in Polars.

    A text may come as a dictionary (see ``OperatorSpec.takes_dictionaries``), and leaves as it is declared: ``plain``.
    """

    __slots__ = ("_series", "arrow")

    def __init__(self, arrow: pa.Array) -> None:
        self.arrow = arrow
        self._series: pl.Series | None = None

    @property
    def plain(self) -> pa.Array:
        return self.arrow.dictionary_decode() if isinstance(self.arrow, pa.DictionaryArray) else self.arrow

    def series(self, name: str) -> pl.Series:
        import polars as pl

        if self._series is None:
            self._series = pl.Series(name, self.plain)
        return self._series if self._series.name == name else self._series.alias(name)


Columns = dict[str, Column]


def evaluate(exprs: Sequence[pl.Expr], roots: Sequence[str], columns: Columns) -> list[pl.Series]:
    import polars as pl

    return pl.DataFrame([columns[name].series(name) for name in roots]).select(*exprs).get_columns()


class ByValue:
    """What expressions over one column give for each value of its dictionary.

    Files bring the same few values with one block after another: the results for the last dictionary are kept.
    Expressions are local to a row and repeatable, so that each value needs them once.
    """

    def __init__(self, exprs: Sequence[pl.Expr], name: str) -> None:
        self._exprs, self._name = exprs, name
        self._values: pa.Array | None = None
        self._results: list[pl.Series] | None = None

    def __call__(self, column: pa.Array) -> tuple[list[pl.Series], npt.NDArray[np.int32]] | None:
        """Results for each value, null included, and which of them each row has; ``None``: look at each row.

        An expression that fails does so perhaps for a value that no row has.
        """
        if not isinstance(column, pa.DictionaryArray) or len(column.dictionary) >= len(column) // 2:
            return None
        values = column.dictionary
        if column.null_count:
            values = pa.concat_arrays([values, pa.nulls(1, values.type)])
        if self._values is None or not self._values.equals(values):
            self._values, self._results = values, self._evaluate(values)
        if self._results is None:
            return None
        places = column.indices if column.null_count == 0 else column.indices.fill_null(len(values) - 1)
        return self._results, fixed_view(places, places.type.to_pandas_dtype())

    def _evaluate(self, values: pa.Array) -> list[pl.Series] | None:
        import polars as pl

        try:
            results = pl.DataFrame([pl.Series(self._name, values)]).select(*self._exprs).get_columns()
        except (Exception, pl.exceptions.PanicException):
            return None
        return results if all(len(series) == len(values) for series in results) else None


def _by_value(exprs: Sequence[pl.Expr], roots: Sequence[str]) -> ByValue | None:
    return ByValue(exprs, roots[0]) if len(roots) == 1 else None


class Mask:
    """Keep the rows for which ``expr`` is true; ``live`` names the columns that are read later on."""

    def __init__(self, expr: pl.Expr, roots: tuple[str, ...], live: tuple[str, ...] = ()) -> None:
        self.expr, self.roots, self._live = expr, roots, live
        self._by_value = _by_value((expr,), roots)

    def run(self, columns: Columns, rows: int) -> tuple[Columns, int]:
        kept = self._kept(columns, rows)
        if len(kept) == rows:
            return columns, rows
        if len(kept) == 0:
            return {}, 0
        moved: Columns = {}
        others: list[str] = []
        for name in self._live:
            column = _gathered(columns[name].arrow, kept)
            if column is None:
                others.append(name)
            else:
                moved[name] = Column(column)
        if others:
            select = _selection(kept, rows)
            moved |= {name: Column(select(columns[name].arrow)) for name in others}
        return moved, len(kept)

    def _kept(self, columns: Columns, rows: int) -> npt.NDArray[np.int32]:
        """Numbers of the rows that are kept, ascending."""
        from cutwater.operators.stateless import kernels

        numbers = np.empty(rows, np.int32)
        found = None if self._by_value is None else self._by_value(columns[self.roots[0]].arrow)
        if found is not None:
            (results,), places = found
            count = kernels.rows_of_values(places, _truth(results), numbers)
            if count >= 0:
                return numbers[:count]
        (series,) = evaluate((self.expr,), self.roots, columns)
        if len(series) != rows:
            series = series.new_from_index(0, rows)  # a constant predicate
        return numbers[: kernels.rows_of_mask(_truth(series), numbers)]

    def prune(self, needed: set[str]) -> tuple[Operation, set[str]]:
        return Mask(self.expr, self.roots, tuple(sorted(needed))), needed | set(self.roots)


def _truth(series: pl.Series) -> npt.NDArray[np.uint8]:
    """True as 1, false and null as 0."""
    filled = series.fill_null(False) if series.null_count() else series
    return filled.to_numpy().view(np.uint8)


def _selection(kept: npt.NDArray[np.int32], rows: int) -> Callable[[pa.Array], pa.Array]:
    """How Arrow moves the kept rows of a column: by their numbers where they are few, else by a mask."""
    if len(kept) * _FEW < rows:
        numbers = pa.array(kept)
        return lambda column: column.take(numbers)
    mask = np.zeros(rows, np.bool_)
    mask[kept] = True
    bits = pa.array(mask)
    return lambda column: column.filter(bits)


def _gathered(column: pa.Array, rows: npt.NDArray[np.int32]) -> pa.Array | None:
    """Some rows of a column without nulls whose values have a fixed width; ``None`` for others."""
    from cutwater.operators.stateless import kernels

    if column.null_count:
        return None
    if isinstance(column, pa.DictionaryArray):
        indices = _gathered(column.indices, rows)
        return pa.DictionaryArray.from_arrays(indices, column.dictionary, safe=False)
    dtype = bits_dtype(column.type)
    if dtype is None:
        return None
    buffer, out = new_buffer(len(rows), dtype)
    kernels.gather(fixed_view(column, dtype), rows, out)
    return pa.Array.from_buffers(column.type, len(rows), [None, buffer])


class Compute:
    """Columns that come out of expressions evaluated together: ``fields`` of the results, in order."""

    def __init__(self, exprs: tuple[pl.Expr, ...], roots: tuple[str, ...], fields: tuple[pa.Field, ...]) -> None:
        self.exprs, self.roots, self.fields = exprs, roots, fields
        self._by_value = _by_value(exprs, roots)

    def run(self, columns: Columns, rows: int) -> list[tuple[str, Column]]:
        found = None if self._by_value is None else self._by_value(columns[self.roots[0]].arrow)
        if found is None:
            results = evaluate(self.exprs, self.roots, columns)
        else:
            results = [series.gather(found[1]) for series in found[0]]
        return [(f.name, Column(_export(s, f, rows))) for s, f in zip(results, self.fields, strict=True)]


def _export(series: pl.Series, field: pa.Field, rows: int) -> pa.Array:
    """A result as Arrow, of the promised length and type."""
    if len(series) != rows:
        if len(series) != 1:
            raise DataError(f"the expression for column {field.name!r} made {len(series)} values of {rows} rows")
        series = series.new_from_index(0, rows)
    array = series.to_arrow()
    return array if array.type == field.type else _cast(array, field.type)


def _cast(array: pa.Array, type: pa.DataType) -> pa.Array:
    if pt.is_dictionary(array.type):
        array = array.dictionary_decode()
    return pc.cast(array, type)


@dataclass(frozen=True)
class Project:
    """The columns from here on: ``kept`` maps each name to the column it is carried from, the others are computed."""

    kept: dict[str, str]
    computed: tuple[Compute, ...] = ()

    def run(self, columns: Columns, rows: int) -> tuple[Columns, int]:
        after = {name: columns[source] for name, source in self.kept.items()}
        for compute in self.computed:
            after.update(compute.run(columns, rows))
        return after, rows

    def prune(self, needed: set[str]) -> tuple[Operation, set[str]]:
        kept = {name: source for name, source in self.kept.items() if name in needed}
        computed = tuple(c for c in self.computed if any(f.name in needed for f in c.fields))
        return Project(kept, computed), set(kept.values()).union(*(c.roots for c in computed))


Operation = Mask | Project


def prune(operations: Sequence[Operation], outputs: Sequence[str]) -> list[Operation]:
    """The operations without what nothing after them reads."""
    needed = set(outputs)
    pruned: list[Operation] = []
    for operation in reversed(operations):
        operation, needed = operation.prune(needed)
        pruned.append(operation)
    return pruned[::-1]


def columns_needed(operations: Sequence[Operation], outputs: Iterable[str]) -> frozenset[str]:
    """The columns of a batch that the operations read, or carry, for some of their results."""
    needed = set(outputs)
    for operation in reversed(operations):
        _, needed = operation.prune(needed)
    return frozenset(needed)


def run(
    operations: Sequence[Operation], batch: pa.RecordBatch, schema: pa.Schema, *, dictionaries: bool = False
) -> pa.RecordBatch | None:
    """What the operations make of a batch; ``None`` when no row is left.

    With ``dictionaries`` texts that came as such leave as such, whatever the schema says.
    """
    columns = {name: Column(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
    rows = batch.num_rows
    for operation in operations:
        columns, rows = operation.run(columns, rows)
        if rows == 0:
            return None
    kept = [columns[name] for name in schema.names]
    return batch_of([column.arrow if dictionaries else column.plain for column in kept], schema)


def first_failing(fails: Callable[[Any], bool], batch: pa.RecordBatch) -> int:
    """Index of the first row on which ``fails`` is true, by halving; expressions are local to a row."""
    low, high = 0, batch.num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if fails(batch.slice(low, middle - low)):
            high = middle
        else:
            low = middle
    return low

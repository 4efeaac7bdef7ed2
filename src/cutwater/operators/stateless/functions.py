"""Steps that call a user's function: with batches, or with one row at a time as a dict.

Whatever the function raises becomes a ``UserCodeError`` that ends with the function's own traceback and, for row
functions, says which row it was.  What it returns is checked against the declared schema.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import pyarrow as pa

from cutwater.data.rows import Row, row_contents
from cutwater.data.schema_text import as_schema
from cutwater.errors import BuildError, UserCodeError
from cutwater.operators.base import OneInputSpec, Operator, Outputs
from cutwater.operators.row_output import (
    ROWS_AT_ONCE,
    RowBuilder,
    conform_batch,
    function_name,
    rows_of,
    to_values,
    user_error,
)

BatchFunction: TypeAlias = Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]]

_CONVENTION = "It gets an iterator of batches and gives batches: for batch in batches: yield ..."
_NO_BATCHES = (pa.RecordBatch, pa.Table)
"""Iterable, but of columns."""


def _check(function: object, schema: pa.Schema) -> None:
    if not callable(function):
        raise BuildError(f"a function is needed, got {type(function).__name__}")
    if len(schema) == 0:
        raise BuildError(f"the output schema of {function_name(function)} has no columns")
    repeated = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if repeated:
        raise BuildError(f"the output schema of {function_name(function)} names column {repeated[0]!r} twice")


@dataclass(frozen=True)
class _FunctionSpec(OneInputSpec):
    """What the three specs share: a function and the schema of what it makes (an Arrow schema, or a text)."""

    repeatable = True

    fn: Callable[..., Any]
    output_schema: pa.Schema

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_schema", as_schema(self.output_schema))
        _check(self.fn, self.output_schema)

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        return (self.output_schema,)


class MapBatchesSpec(_FunctionSpec):
    """``fn(Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]``, the convention of PySpark's ``mapInArrow``.

    The function is called anew for every slice of the stream, so it must not keep rows back: how the stream is cut
    into slices is not the user's to decide.  Its batches are matched to ``output_schema`` by column name; types that
    differ are cast where no value is lost.

    Args:
        fn: the function.
        output_schema: schema of the rows that it makes, or a text such as ``"word string, n long"``.

    Raises:
        BuildError: ``fn`` is not callable, or the schema is none.
    """

    def build(self) -> MapBatchesOperator:
        return MapBatchesOperator(self.fn, self.output_schema)


class FlatMapSpec(_FunctionSpec):
    """``fn(row: dict) -> Iterable[dict]``: any number of rows for each row.

    A key that is missing in a returned dict is null; one that ``output_schema`` does not have is an error.

    Raises:
        BuildError: ``fn`` is not callable, or the schema is none.
    """

    def build(self) -> RowOperator:
        return RowOperator(self.fn, self.output_schema, many=True)


class MapRowSpec(_FunctionSpec):
    """``fn(row: dict) -> dict | None``: one row for each row; ``None`` drops it.

    A key that is missing in the returned dict is null; one that ``output_schema`` does not have is an error.

    Raises:
        BuildError: ``fn`` is not callable, or the schema is none.
    """

    def build(self) -> RowOperator:
        return RowOperator(self.fn, self.output_schema, many=False)


class MapBatchesOperator(Operator):
    """Calls a function of batches once per slice."""

    def __init__(self, fn: BatchFunction, schema: pa.Schema) -> None:
        self._fn = fn
        self._schema = schema

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        if batch.num_rows == 0:
            return []
        batches = iter((batch,))
        try:
            returned: Any = self._fn(batches)
            made = None if isinstance(returned, _NO_BATCHES) or not isinstance(returned, Iterable) else [*returned]
        except Exception as exc:
            error = user_error(self._fn, exc)
            if isinstance(exc, AttributeError) and exc.obj is batches:
                error.hint = _CONVENTION
            raise error from exc
        if made is None:
            what = f"{function_name(self._fn)} returned {type(returned).__name__} instead of an iterable of batches"
            raise UserCodeError(what, hint=_CONVENTION)
        conformed = (conform_batch(self._fn, result, self._schema) for result in made)
        return [(0, result) for result in conformed if result.num_rows]


class RowOperator(Operator):
    """Calls a function once per row.  Slow by nature (one Python call a row); expressions are the quick way."""

    def __init__(self, fn: Callable[[Row], Any], schema: pa.Schema, *, many: bool) -> None:
        self._fn = fn
        self._made = RowBuilder(fn, schema)
        self._many = many

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        values, origin = to_values(batch), partial(row_contents, batch)
        call = self._call_for_many if self._many else self._call_for_one
        try:
            for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                call(values.rows(start, start + ROWS_AT_ONCE), start)
                self._made.gather(origin)
        except UserCodeError:
            self._made.check(origin)  # a row before that one may be wrong
            raise
        return self._made.take(0, origin)

    def _call_for_one(self, rows: list[Row], first: int) -> None:
        fn, (made, origins) = self._fn, self._made.unchecked
        for index, row in enumerate(rows, first):
            try:
                out = fn(row)
            except Exception as exc:
                raise user_error(fn, exc, row=row, index=index) from exc
            if out is not None:
                made.append(out)
                origins.append(index)

    def _call_for_many(self, rows: list[Row], first: int) -> None:
        fn, (made, origins) = self._fn, self._made.unchecked
        for index, row in enumerate(rows, first):
            try:
                result = fn(row)
                of_row = result if type(result) is list else rows_of(result)
            except Exception as exc:
                raise user_error(fn, exc, row=row, index=index) from exc
            if of_row is None:
                raise self._made.misfit(f"returned {type(result).__name__} instead of an iterable of dicts", row, index)
            for out in of_row:
                made.append(out)
                origins.append(index)

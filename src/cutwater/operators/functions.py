"""Steps that call a user's function: with batches, or with one row at a time as a dict.

Whatever the function raises becomes a ``UserCodeError`` that ends with the function's own traceback and, for row
functions, says which row it was.  What it returns is checked against the declared schema.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, TypeAlias

import pyarrow as pa

from cutwater.errors import BuildError, DataError, UserCodeError
from cutwater.operators.base import BaseOperator, Outputs
from cutwater.operators.rows import Row, describe_row, loses_value, row_contents, shorten_value
from cutwater.operators.schema_text import as_schema
from cutwater.operators.union import schema_differences

__all__ = [
    "MAX_OUTPUT_ROWS",
    "BatchFunction",
    "FlatMapFunction",
    "FlatMapSpec",
    "MapBatchesSpec",
    "MapRowSpec",
    "RowFunction",
]

BatchFunction: TypeAlias = Callable[[Iterator[pa.RecordBatch]], Iterable[pa.RecordBatch]]
FlatMapFunction: TypeAlias = Callable[[Row], Iterable[Mapping[str, Any]]]
RowFunction: TypeAlias = Callable[[Row], Mapping[str, Any] | None]

MAX_OUTPUT_ROWS = 65_536
"""Rows of one batch that a row function fills; what is above goes into further batches."""


def _user_error(function: object, exc: Exception, *, row: Row | None = None, index: int | None = None) -> UserCodeError:
    """The error of a failed call: what, on which row, and the user's frames of the traceback."""
    frames: TracebackType | None = exc.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename == __file__:
        frames = frames.tb_next
    story = "".join(traceback.TracebackException(type(exc), exc, frames).format()).rstrip()
    where = "" if row is None else f" on row {index} of the batch, {describe_row(row)}"
    error = UserCodeError(f"{_name(function)} raised {type(exc).__name__}{where}\n{story}")
    error.row = index
    return error


def _name(function: object) -> str:
    return f"function {getattr(function, '__qualname__', type(function).__name__)!r}"


def _check(function: object, schema: pa.Schema) -> None:
    if not callable(function):
        raise BuildError(f"a function is needed, got {type(function).__name__}")
    if len(schema) == 0:
        raise BuildError(f"the output schema of {_name(function)} has no columns")
    repeated = sorted({name for name in schema.names if schema.names.count(name) > 1})
    if repeated:
        raise BuildError(f"the output schema of {_name(function)} names column {repeated[0]!r} twice")


@dataclass(frozen=True)
class _FunctionSpec:
    """What the three specs share: a function and the schema of what it makes (an Arrow schema, or a text)."""

    input_schema: pa.Schema
    fn: Callable[..., Any]
    output_schema: pa.Schema

    def __post_init__(self) -> None:
        object.__setattr__(self, "output_schema", as_schema(self.output_schema))
        _check(self.fn, self.output_schema)

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        return (self.output_schema,)

    @property
    def state_schema(self) -> pa.Schema | None:
        return None


class MapBatchesSpec(_FunctionSpec):
    """``fn(Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]``, the convention of PySpark's ``mapInArrow``.

    The function is called anew for every slice of the stream, so it must not keep rows back: how the stream is cut
    into slices is not the user's to decide.  Its batches are matched to ``output_schema`` by column name; types that
    differ are cast where no value is lost.

    Args:
        input_schema: schema of the rows that come in.
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


class MapBatchesOperator(BaseOperator):
    """Calls a function of batches once per slice."""

    def __init__(self, fn: BatchFunction, schema: pa.Schema) -> None:
        self._fn = fn
        self._schema = schema

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        if batch.num_rows == 0:
            return []
        made: list[Any] = []
        try:
            made.extend(self._fn(iter((batch,))))
        except Exception as exc:
            raise _user_error(self._fn, exc) from exc
        conformed = (self._conform(result) for result in made)
        return [(0, result) for result in conformed if result.num_rows]

    def _conform(self, result: Any) -> pa.RecordBatch:
        """``result`` with exactly the output schema."""
        if not isinstance(result, pa.RecordBatch):
            raise UserCodeError(
                f"{_name(self._fn)} yielded {type(result).__name__}, not a pyarrow.RecordBatch",
                hint="It takes an iterator of batches and must return or yield batches, as with mapInArrow.",
            )
        if result.schema.equals(self._schema, check_metadata=False):
            return pa.RecordBatch.from_arrays(result.columns, schema=self._schema)
        if sorted(result.schema.names) != sorted(self._schema.names):
            raise UserCodeError(
                f"{_name(self._fn)} yielded a batch that is not of its declared schema: "
                f"{'; '.join(schema_differences(self._schema, result.schema))}",
                hint="Return the declared columns, or declare those that are returned.",
            )
        return pa.RecordBatch.from_arrays([self._cast(result, f) for f in self._schema], schema=self._schema)

    def _cast(self, result: pa.RecordBatch, field: pa.Field) -> pa.Array:
        column = result.column(field.name)
        if column.null_count and not field.nullable:
            raise UserCodeError(
                f"{_name(self._fn)} put null into column {field.name!r}, which is declared not null",
                hint="Fill the nulls, or declare the column without 'not null'.",
            )
        try:
            return column.cast(field.type)
        except pa.ArrowException as exc:
            raise UserCodeError(
                f"{_name(self._fn)} made column {field.name!r} as {column.type}, which does not fit the declared "
                f"{field.type}: {exc}",
                hint="Cast the column in the function, or declare its type.",
            ) from exc


class RowOperator(BaseOperator):
    """Calls a function once per row.  Slow by nature (one Python call a row); expressions are the quick way."""

    def __init__(self, fn: Callable[[Row], Any], schema: pa.Schema, *, many: bool) -> None:
        self._fn = fn
        self._schema = schema
        self._names = frozenset(schema.names)
        self._many = many

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        made: list[Mapping[str, Any]] = []
        origins: list[int] = []
        for index, row in enumerate(_to_dicts(batch)):
            for out in self._call(row, index):
                self._check_keys(out, row, index)
                made.append(out)
                origins.append(index)
        return [
            (0, self._to_batch(made[at : at + MAX_OUTPUT_ROWS], origins[at : at + MAX_OUTPUT_ROWS], batch))
            for at in range(0, len(made), MAX_OUTPUT_ROWS)
        ]

    def _call(self, row: Row, index: int) -> list[Any]:
        """What the function makes of one row."""
        try:
            result = self._fn(row)
            if not self._many:
                return [] if result is None else [result]
            if result is not None and not isinstance(result, Mapping | str | bytes):
                return list(result)
        except Exception as exc:
            raise _user_error(self._fn, exc, row=row, index=index) from exc
        raise self._misfit(f"returned {type(result).__name__} instead of an iterable of dicts", row, index)

    def _check_keys(self, out: object, row: Row, index: int) -> None:
        if not isinstance(out, Mapping):
            raise self._misfit(f"made {type(out).__name__} instead of a dict", row, index)
        if not out.keys() <= self._names:
            unknown = ", ".join(sorted(repr(key) for key in out.keys() - self._names))
            raise self._misfit(f"made a row with the undeclared columns {unknown}", row, index)

    def _to_batch(self, made: list[Mapping[str, Any]], origins: list[int], batch: pa.RecordBatch) -> pa.RecordBatch:
        columns = [
            self._to_array(field, [out.get(field.name) for out in made], origins, batch) for field in self._schema
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _to_array(self, field: pa.Field, values: list[Any], origins: list[int], batch: pa.RecordBatch) -> pa.Array:
        try:
            array = pa.array(values, field.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
            at = next((i for i, value in enumerate(values) if not _fits(value, field.type)), 0)
            what = f"made {shorten_value(values[at])} for column {field.name!r} of type {field.type}"
            raise self._misfit(f"{what} ({exc})", row_contents(batch, origins[at]), origins[at]) from exc
        at = loses_value(values, field.type)
        if at is not None:
            what = (
                f"made {shorten_value(values[at])} for column {field.name!r}, which {field.type} cannot hold in full,"
            )
            raise self._misfit(what, row_contents(batch, origins[at]), origins[at])
        if array.null_count and not field.nullable:
            at = values.index(None)
            what = f"made null for column {field.name!r}, which is declared not null,"
            raise self._misfit(what, row_contents(batch, origins[at]), origins[at])
        return array

    def _misfit(self, what: str, row: Row, index: int) -> UserCodeError:
        error = UserCodeError(
            f"{_name(self._fn)} {what} from row {index} of the batch, {describe_row(row)}",
            hint=f"Declared is {', '.join(f'{f.name} {f.type}' for f in self._schema)}.",
        )
        error.row = index
        return error


def _to_dicts(batch: pa.RecordBatch) -> list[Row]:
    try:
        return batch.to_pylist()
    except (OverflowError, ValueError) as exc:
        row = next(i for i in range(batch.num_rows) if not _convertible(batch.slice(i, 1)))
        error = DataError(
            f"row {row} of the batch, {describe_row(row_contents(batch, row))}, has no Python value: {exc}",
            hint="Filter such rows out, or use map_batches, which works on Arrow columns.",
        )
        error.row = row
        raise error from exc


def _convertible(batch: pa.RecordBatch) -> bool:
    try:
        batch.to_pylist()
    except (OverflowError, ValueError):
        return False
    return True


def _fits(value: object, type: pa.DataType) -> bool:
    try:
        pa.array([value], type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        return False
    return True

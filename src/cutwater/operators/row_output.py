"""What functions of rows share: rows as dicts, the rows they make as batches, and errors that name the row."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from types import GeneratorType, TracebackType
from typing import Any, cast

import numpy as np
import pyarrow as pa

from cutwater.data.python_values import BatchValues
from cutwater.data.rows import Row, describe_row, loses_value, row_contents, shorten_value
from cutwater.data.schema_text import schema_differences
from cutwater.errors import DataError, UserCodeError
from cutwater.operators.base import Outputs

MAX_OUTPUT_ROWS = 65_536
"""Rows of one batch that a row function fills; what is above goes into further batches."""
ROWS_AT_ONCE = 256
"""Rows that are dicts at the same time: few, so that the processor's cache still has those that they become."""
_PLAIN: dict[pa.DataType, type[int] | type[float]] = {pa.int64(): int, pa.float64(): float}
"""Types of columns whose values NumPy takes as they are, if all are of this type."""


def user_error(
    function: object, exc: Exception, *, row: Row | None = None, index: int | None = None, unit: str = "row"
) -> UserCodeError:
    """The error of a failed call: what, on which row (or another unit), and the user's frames of the traceback."""
    frames: TracebackType | None = exc.__traceback__
    while frames is not None and str(frames.tb_frame.f_globals.get("__package__")).startswith("cutwater."):
        frames = frames.tb_next
    story = "".join(traceback.TracebackException(type(exc), exc, frames).format()).rstrip()
    where = "" if row is None else f" on {unit} {index} of the batch, {describe_row(row)}"
    error = UserCodeError(f"{function_name(function)} raised {type(exc).__name__}{where}\n{story}")
    error.row = index
    return error


def function_name(function: object) -> str:
    return f"function {getattr(function, '__qualname__', type(function).__name__)!r}"


def rows_of(result: Any) -> list[Any] | None:
    """What a function returned as a list of rows; ``None`` if it is nothing that rows come from.

    >>> rows_of(iter([{"n": 1}])), rows_of({"n": 1})
    ([{'n': 1}], None)
    """
    kind: Any = type(result)
    if kind is list or kind is GeneratorType:  # the usual ones, without the cost of asking an abstract class
        return list(result)
    if isinstance(result, Iterable) and not isinstance(result, Mapping | str | bytes):
        return list(cast("Iterable[Any]", result))
    return None


def conform_batch(fn: object, result: Any, schema: pa.Schema) -> pa.RecordBatch:
    """A batch that a function made, with exactly its declared schema.

    Raises:
        UserCodeError: it is no batch, has other columns, or values that the declared types cannot hold.
    """
    if not isinstance(result, pa.RecordBatch):
        raise UserCodeError(
            f"{function_name(fn)} yielded {type(result).__name__}, not a pyarrow.RecordBatch",
            hint="It takes an iterator of batches and must return or yield batches, as with mapInArrow.",
        )
    if result.schema.equals(schema, check_metadata=False):
        return pa.RecordBatch.from_arrays(result.columns, schema=schema)
    if sorted(result.schema.names) != sorted(schema.names):
        raise UserCodeError(
            f"{function_name(fn)} yielded a batch that is not of its declared schema: "
            f"{'; '.join(schema_differences(schema, result.schema))}",
            hint="Return the declared columns, or declare those that are returned.",
        )
    return pa.RecordBatch.from_arrays([_cast(fn, result, field) for field in schema], schema=schema)


def _cast(fn: object, result: pa.RecordBatch, field: pa.Field) -> pa.Array:
    column = result.column(field.name)
    if column.null_count and not field.nullable:
        raise UserCodeError(
            f"{function_name(fn)} put null into column {field.name!r}, which is declared not null",
            hint="Fill the nulls, or declare the column without 'not null'.",
        )
    try:
        return column.cast(field.type)
    except pa.ArrowException as exc:
        raise UserCodeError(
            f"{function_name(fn)} made column {field.name!r} as {column.type}, which does not fit the "
            f"declared {field.type}: {exc}",
            hint="Cast the column in the function, or declare its type.",
        ) from exc


class RowBuilder:
    """Collects the rows that a function makes and turns them into batches of its declared schema.

    Args:
        fn: the function, for messages.
        schema: of the rows.
    """

    def __init__(self, fn: object, schema: pa.Schema) -> None:
        self._fn, self._schema = fn, schema
        self._names = frozenset(schema.names)
        self.unit = "row"
        """What the rows are made from, for messages."""
        self._made: list[Any] = []
        self._origins: list[int] = []
        self._values: list[list[Any]] = [[] for _ in schema]
        """Of the columns, of rows that ``gather`` took before those in ``_made``."""

    def add(self, out: object, row: Row, index: int) -> None:
        """One row made from input row ``index`` of the batch.

        Raises:
            UserCodeError: it is no dict, or has a column that is not declared.
        """
        wrong = self._wrong(out)
        if wrong is not None:
            raise self.misfit(wrong, row, index)
        self._made.append(out)
        self._origins.append(index)

    @property
    def unchecked(self) -> tuple[list[Any], list[int]]:
        """Where to append a row, and its index, until they are checked: for loops in which each call counts."""
        return self._made, self._origins

    def check(self, origin: Callable[[int], Row]) -> None:
        """Check the rows so far, as ``add`` does.

        Args:
            origin: the input row of an index, for messages.

        Raises:
            UserCodeError: one is no dict, or has a column that is not declared.
        """
        made, origins = self._made, self._origins[-len(self._made) :]
        if {*map(type, made)} <= {dict} and self._names.issuperset(chain.from_iterable(made)):
            return
        for out, index in zip(made, origins, strict=True):
            wrong = self._wrong(out)
            if wrong is not None:
                self._made, self._origins, self._values = [], [], [[] for _ in self._schema]
                raise self.misfit(wrong, origin(index), index)

    def _wrong(self, out: Any) -> str | None:
        if type(out) is not dict and not isinstance(out, Mapping):
            return f"made {type(out).__name__} instead of a dict"
        if out.keys() <= self._names:
            return None
        unknown = ", ".join(sorted(repr(key) for key in out.keys() - self._names))
        return f"made a row with the undeclared columns {unknown}"

    def gather(self, origin: Callable[[int], Row]) -> None:
        """Check the rows so far, and keep no more than their values: soon, while the processor's cache has them.

        Args:
            origin: the input row of an index, for messages.

        Raises:
            UserCodeError: a row is not of the declared columns.
        """
        if self._made:
            for values, more in zip(self._values, self._columns(origin), strict=True):
                values += more
            self._made.clear()

    def take(self, output: int, origin: Callable[[int], Row]) -> Outputs:
        """The rows so far as batches for an output.

        Args:
            origin: the input row of an index, for messages.

        Raises:
            UserCodeError: a row is not of the declared columns, or a value does not fit its column.
        """
        if not self._origins:
            return []
        self.gather(origin)
        columns, origins = self._values, self._origins
        self._made, self._origins, self._values = [], [], [[] for _ in self._schema]
        batches: Outputs = []
        for start in range(0, len(origins), MAX_OUTPUT_ROWS):
            part = slice(start, start + MAX_OUTPUT_ROWS)
            values = zip(self._schema, columns, strict=True)
            arrays = [self._to_array(field, column[part], origins[part], origin) for field, column in values]
            batches.append((output, pa.RecordBatch.from_arrays(arrays, schema=self._schema)))
        return batches

    def _columns(self, origin: Callable[[int], Row]) -> list[list[Any]]:
        """The values of each column, of rows that were checked."""
        made, names = self._made, self._schema.names
        if {*map(type, made)} == {dict} and {*map(len, made)} == {len(names)}:
            try:
                return [[out[name] for out in made] for name in names]
            except KeyError:  # so some row has another
                pass
        self.check(origin)
        return [[out.get(name) for out in made] for name in names]

    def _to_array(
        self, field: pa.Field, values: list[Any], origins: list[int], origin: Callable[[int], Row]
    ) -> pa.Array:
        plain = _PLAIN.get(field.type)
        try:
            if plain is not None and {*map(type, values)} == {plain}:  # NumPy takes half the time, and loses nothing
                return pa.array(np.fromiter(values, plain, len(values)))
            array = pa.array(values, field.type)
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as exc:
            at = next((i for i, value in enumerate(values) if not _fits(value, field.type)), 0)
            what = f"made {shorten_value(values[at])} for column {field.name!r} of type {field.type}"
            raise self.misfit(f"{what} ({exc})", origin(origins[at]), origins[at]) from exc
        at = loses_value(values, field.type)
        if at is not None:
            what = (
                f"made {shorten_value(values[at])} for column {field.name!r}, which {field.type} cannot hold in full,"
            )
            raise self.misfit(what, origin(origins[at]), origins[at])
        if array.null_count and not field.nullable:
            at = values.index(None)
            what = f"made null for column {field.name!r}, which is declared not null,"
            raise self.misfit(what, origin(origins[at]), origins[at])
        return array

    def misfit(self, what: str, row: Row, index: int) -> UserCodeError:
        error = UserCodeError(
            f"{function_name(self._fn)} {what} from {self.unit} {index} of the batch, {describe_row(row)}",
            hint=f"Declared is {', '.join(f'{f.name} {f.type}' for f in self._schema)}.",
        )
        error.row = index
        return error


def to_dicts(batch: pa.RecordBatch) -> list[Row]:
    """The rows of a batch as dicts.

    Raises:
        DataError: a value has no counterpart in Python.
    """
    return to_values(batch).rows(0, batch.num_rows)


def to_values(batch: pa.RecordBatch) -> BatchValues:
    """The values of a batch in Python.

    Raises:
        DataError: a value has no counterpart in Python.
    """
    try:
        return BatchValues(batch)
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

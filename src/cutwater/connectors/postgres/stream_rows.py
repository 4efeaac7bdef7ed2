"""Rows of the stream: the columns of the tables that are read, from what a server has sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.connectors.postgres.catalog import Table
from cutwater.connectors.postgres.column_types import BadValueError, Fields
from cutwater.data.changes import marked_schema, op_column
from cutwater.data.words import batch_of
from cutwater.errors import BuildError, DataError

TABLE = "table"
"""Column with the name of the table, of a stream of several."""


class StreamSchema:
    """The columns of a stream of tables: ``op``, for several tables ``table``, then theirs, by name.

    A column that some tables do not have is null in their rows.

    Raises:
        BuildError: columns of one name have different types, or a name that the stream needs.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.tables = tuple(tables)
        fields: dict[str, pa.Field] = {}
        for table in tables:
            for column in table.columns:
                known = fields.setdefault(column.name, pa.field(column.name, column.type.arrow))
                if known.type != column.type.arrow:
                    raise BuildError(
                        f"postgres: column {column.name!r} is {known.type} in one table and {column.type.arrow} in "
                        f"table {table.shown!r}",
                        hint="Read them as two sources, or leave the column of one out: tables={...: [columns]}.",
                    )
        several = len(self.tables) > 1
        if several and TABLE in fields:
            raise BuildError(
                f"postgres: a column is named {TABLE!r}, which is the name of the table in a stream of several",
                hint="Read the tables as sources of their own.",
            )
        named = [pa.field(TABLE, pa.string(), nullable=False)] if several else []
        self.arrow = marked_schema(pa.schema([*named, *fields.values()]))
        keys = [name for table in tables for name in table.key]
        self.changes = ((TABLE,) if several else ()) + tuple(dict.fromkeys(keys))
        if not all(table.key for table in tables):
            self.changes = ()
        self._names = list(fields)

    def rows(self, table: int, columns: Mapping[str, pa.Array], ops: npt.NDArray[np.int8]) -> pa.RecordBatch:
        """A batch of rows of one table."""
        count = len(ops)
        made = [op_column(ops)]
        if len(self.tables) > 1:
            made.append(pa.repeat(pa.scalar(self.tables[table].shown), count))
        for name in self._names:
            column = columns.get(name)
            made.append(pa.nulls(count, self.arrow.field(name).type) if column is None else column)
        return batch_of(made, self.arrow)

    def decode(self, table: int, fields: Mapping[str, Fields]) -> dict[str, pa.Array]:
        """The columns of some rows of a table.

        Raises:
            DataError: a value that its column cannot hold.
        """
        columns: dict[str, pa.Array] = {}
        for column in self.tables[table].columns:
            try:
                columns[column.name] = column.type.decode(fields[column.name])
            except BadValueError as error:
                raise self._bad_value(table, column.name, fields, error) from None
        return columns

    def _bad_value(self, number: int, column: str, fields: Mapping[str, Fields], error: BadValueError) -> DataError:
        table = self.tables[number]
        key: list[str] = []
        for name in table.key:
            try:
                data, at, length = fields[name]
                one = Fields(data, at[error.row : error.row + 1], length[error.row : error.row + 1])
                key.append(f"{name} = {table.column(name).type.decode(one)[0]}")
            except BadValueError:
                continue
        others = ", ".join(repr(other.name) for other in table.columns if other.name != column)
        return DataError(
            f"postgres: a value of column {column!r} of table {table.shown!r} {error.why} ({', '.join(key)})",
            hint=f"Correct the row; or leave the column out: tables={{{table.shown!r}: [{others}]}}.",
        )


def key_texts(columns: Sequence[pa.Array]) -> list[list[str]]:
    """Keys as the server reads them, for each row."""
    return [list(row) for row in zip(*(_texts(column) for column in columns), strict=True)]


def _texts(column: pa.Array) -> list[str]:
    if pa.types.is_binary(column.type):
        return [f"\\x{value.hex()}" for value in column.to_pylist()]
    texts: Any = column.cast(pa.string())
    return texts.to_pylist()


def in_order(
    parts: Sequence[pa.RecordBatch], rows: Sequence[npt.NDArray[np.int64]], schema: pa.Schema
) -> pa.RecordBatch:
    """Batches of several tables as one; ``rows`` says where each row of theirs belongs."""
    if not parts:
        return batch_of([pa.nulls(0, field.type) for field in schema], schema)
    if len(parts) == 1:
        return parts[0]
    order = np.argsort(np.concatenate(rows), kind="stable")
    whole: Any = pa.concat_batches(parts)
    return whole.take(pa.array(order))

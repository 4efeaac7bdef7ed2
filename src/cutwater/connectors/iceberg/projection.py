"""Columns of a data file as those of the table: Iceberg knows them by ids, whatever they are called now."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.types as pt

from cutwater.errors import DataError

_ID = b"PARQUET:field_id"
Names = Sequence[Any]
"""A level of a table's name mapping, by which columns of files without ids are known."""


def id_of(field: pa.Field, names: Names = ()) -> int | None:
    """The id of a column."""
    told = (field.metadata or {}).get(_ID)
    if told is not None:
        return int(told)
    return next((named.field_id for named in names if field.name in named.names), None)


class Missing(NamedTuple):
    """What rows have in a column that a file has not."""

    values: Mapping[int, object]
    """By id: what the partition says, or the column's first default; others are null."""

    def column(self, field: pa.Field, rows: int, where: str) -> pa.Array:
        """That column.

        Raises:
            DataError: it must not be null.
        """
        value = self.values.get(id_of(field) or 0)
        if value is not None:
            return pa.repeat(pa.scalar(value, type=field.type), rows)
        if not field.nullable:
            raise DataError(f"{where} has no column {field.name!r}, which the table requires")
        return pa.nulls(rows, field.type)


class Projection:
    """Gives the rows of a file the columns of the table.

    Args:
        file: the file's columns.
        wanted: the table's that are read, with their ids.
        names: of the table's name mapping.
        missing: what is in columns that the file has not.
        where: the file, for messages.

    >>> def column(name, kind, id): return pa.field(name, kind, metadata={"PARQUET:field_id": str(id)})
    >>> wanted = pa.schema([column("who", pa.int64(), 1), column("at", pa.date32(), 2)])
    >>> found = pa.schema([column("old", pa.string(), 3), column("user", pa.int32(), 1)])
    >>> projection = Projection(found, wanted, (), Missing({}), "a.parquet")
    >>> projection.names
    ['user']
    >>> projection.rows(pa.record_batch({"user": pa.array([7], pa.int32())})).to_pylist()
    [{'who': 7, 'at': None}]
    """

    def __init__(self, file: pa.Schema, wanted: pa.Schema, names: Names, missing: Missing, where: str) -> None:
        self._wanted, self._missing, self._where = wanted, missing, where
        found = {id: field for field in file if (id := id_of(field, names)) is not None}
        if not found:
            raise DataError(
                f"{where} says no ids of its columns, and the table has no name mapping",
                hint="Set the table's property schema.name-mapping.default, as its other readers need it, too.",
            )
        self._changes: list[tuple[str, Callable[[pa.Array], pa.Array]] | None] = []
        for field in wanted:
            there = found.get(id_of(field) or 0)
            if there is None:
                self._changes.append(None)
            else:
                self._changes.append((there.name, _change(there, field, _below(names, there), self._where)))

    @property
    def names(self) -> list[str]:
        """The file's columns that are read."""
        return [change[0] for change in self._changes if change is not None]

    def rows(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Rows of the file as rows of the table.

        Raises:
            DataError: a value does not fit, or a required column is missing.
        """
        columns: list[pa.Array] = []
        for field, change in zip(self._wanted, self._changes, strict=True):
            if change is None:
                columns.append(self._missing.column(field, batch.num_rows, self._where))
                continue
            name, convert = change
            try:
                columns.append(convert(batch.column(name)))
            except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
                raise DataError(f"{self._where}: column {name!r} does not fit {field.type}: {error}") from error
        return pa.RecordBatch.from_arrays(columns, schema=self._wanted)


def _below(names: Names, field: pa.Field) -> Names:
    return next((named.fields for named in names if field.name in named.names), ())


def _change(file: pa.Field, wanted: pa.Field, names: Names, where: str) -> Callable[[Any], pa.Array]:
    """What makes a column of a file one of the table."""
    if not pt.is_nested(wanted.type) or _same(file, wanted, names):
        return lambda column: column if column.type.equals(wanted.type) else column.cast(wanted.type)
    if pt.is_struct(wanted.type):
        return _of_struct(file, wanted, names, where)
    if pt.is_map(wanted.type):
        keys = _change(file.type.key_field, wanted.type.key_field, _below(names, file.type.key_field), where)
        items = _change(file.type.item_field, wanted.type.item_field, _below(names, file.type.item_field), where)

        def of_map(column: Any) -> pa.Array:
            column = _from_begin(column)
            parts = (column.offsets, keys(column.keys), items(column.items))
            return pa.MapArray.from_arrays(*parts, wanted.type, mask=column.is_null())

        return of_map
    values = _change(file.type.value_field, wanted.type.value_field, _below(names, file.type.value_field), where)

    def of_list(column: Any) -> pa.Array:
        column = _from_begin(column)
        offsets = column.offsets.cast(pa.int32())
        return pa.ListArray.from_arrays(offsets, values(column.values), wanted.type, mask=column.is_null())

    return of_list


def _of_struct(file: pa.Field, wanted: pa.Field, names: Names, where: str) -> Callable[[Any], pa.Array]:
    found = {id_of(f, names): f for f in (file.type.field(i) for i in range(file.type.num_fields))}
    fields: list[pa.Field] = [wanted.type.field(i) for i in range(wanted.type.num_fields)]
    changes: list[tuple[pa.Field, Callable[[Any], pa.Array] | None, str]] = []
    for field in fields:
        there = found.get(id_of(field))
        change = None if there is None else _change(there, field, _below(names, there), where)
        changes.append((field, change, "" if there is None else there.name))

    def of_struct(column: Any) -> pa.Array:
        parts = [
            pa.nulls(len(column), field.type) if change is None else change(column.field(name))
            for field, change, name in changes
        ]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=column.is_null())

    return of_struct


def _same(file: pa.Field, wanted: pa.Field, names: Names) -> bool:
    """True if both have the same parts, in the same order and by the same names."""
    parts, own = _parts(file.type), _parts(wanted.type)
    if len(parts) != len(own):
        return False
    for part, mine in zip(parts, own, strict=True):
        named = part.name == mine.name or not pt.is_struct(wanted.type)
        if not named or id_of(part, names) != id_of(mine) or not _same(part, mine, _below(names, part)):
            return False
    return True


def _parts(kind: pa.DataType) -> list[pa.Field]:
    if pt.is_map(kind):
        return [kind.key_field, kind.item_field]
    return [kind.field(i) for i in range(kind.num_fields)]


def _from_begin(column: Any) -> Any:
    """The same values in memory of their own: parts of a slice are those of the whole."""
    return pa.concat_arrays([column, column.slice(0, 0)]) if column.offset else column

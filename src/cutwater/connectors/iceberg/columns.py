"""Columns of a stream beside those of a table: which types become which, and what does not fit."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from cutwater.connectors.files.schemas import parquet_schema, widens
from cutwater.errors import BuildError, DataError, did_you_mean


def stream_schema(schema: pa.Schema) -> pa.Schema:
    """The types that Iceberg has for a stream's columns.

    Beyond those of files that Spark reads: integers have 32 or 64 bits and a sign, times with a zone are in UTC.

    Raises:
        BuildError: a type that Iceberg does not have.

    >>> stream_schema(pa.schema({"n": pa.uint16(), "at": pa.timestamp("ms", tz="Europe/Paris")})).types
    [DataType(int32), TimestampType(timestamp[us, tz=UTC])]
    """
    return pa.schema([field.with_type(_kept(field.name, field.type)) for field in parquet_schema(schema)])


def _kept(name: str, kind: pa.DataType) -> pa.DataType:
    if pt.is_uint64(kind):
        raise BuildError(f"column {name!r}: Iceberg has no {kind}", hint="Cast it to int64 or a decimal.")
    if pt.is_integer(kind):
        return pa.int64() if kind.bit_width == 64 or pt.is_uint32(kind) else pa.int32()
    if pt.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    return _nested(kind, lambda field: field.with_type(_kept(name, field.type))) or kind


def _nested(kind: pa.DataType, changed: Any) -> pa.DataType | None:
    """A nested type with changed fields, which keep what else is said of them; ``None`` for a type without parts."""
    if pt.is_struct(kind):
        return pa.struct([changed(kind.field(i)) for i in range(kind.num_fields)])
    if pt.is_map(kind):
        return pa.map_(changed(kind.key_field), changed(kind.item_field))
    if pt.is_list(kind) or pt.is_large_list(kind):
        return pa.list_(changed(kind.value_field))
    return None


def table_schema(schema: Any) -> pa.Schema:
    """The columns of a table as its files hold them, each with the id by which Iceberg knows it.

    Args:
        schema: the table's.
    """
    return pa.schema([_small(field) for field in schema.as_arrow()])


def _small(field: pa.Field) -> pa.Field:
    kind = field.type
    if pt.is_large_string(kind):
        return field.with_type(pa.string())
    if pt.is_large_binary(kind):
        return field.with_type(pa.binary())
    return field.with_type(_nested(kind, _small) or kind)


def check_fits(stream: pa.Schema, table: pa.Schema, name: str) -> None:
    """Refuse rows that a table cannot take as they are.

    Args:
        stream: of the rows, as ``stream_schema`` gives it.
        table: its columns.
        name: of the table.

    Raises:
        BuildError: a column that it does not have, that it wants and the stream has not, or of another type.
    """
    for field in stream:
        index = table.get_field_index(field.name)
        if index < 0:
            raise BuildError(
                f"iceberg table {name!r} has no column {field.name!r}",
                hint=f"Select or rename columns before the sink, or let it add them: evolve=True. "
                f"{did_you_mean(field.name, table.names)}",
            )
        if not widens(field.type, table.field(index).type, given=False):
            raise BuildError(
                f"column {field.name!r} is {field.type}, but {table.field(index).type} in iceberg table {name!r}",
                hint="Cast it in the dataflow, before the sink.",
            )
    for field in table:
        if not field.nullable and field.name not in stream.names:
            raise BuildError(f"iceberg table {name!r} requires column {field.name!r}, which the stream does not have")


class Fitting:
    """Gives a stream's rows the columns of a table.

    Args:
        schema: of the rows in the files.
        name: of the table.

    >>> rows = pa.record_batch({"b": pa.array([1], pa.int32())})
    >>> Fitting(pa.schema({"a": pa.string(), "b": pa.int64()}), "shop.orders").fitted(rows).to_pylist()
    [{'a': None, 'b': 1}]
    """

    def __init__(self, schema: pa.Schema, name: str) -> None:
        self.schema, self._name = schema, name
        self._required = [i for i, field in enumerate(schema) if not field.nullable]

    def fitted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows with all columns of the table; those that they do not have are null.

        Raises:
            DataError: a value does not fit, or a required one is missing.
        """
        places = {name: i for i, name in enumerate(batch.schema.names)}
        columns: list[pa.Array] = []
        for field in self.schema:
            place = places.get(field.name)
            found = pa.nulls(batch.num_rows, field.type) if place is None else batch.column(place)
            columns.append(_cast(found, field))
        for i in self._required:
            if columns[i].null_count:
                raise DataError(
                    f"column {self.schema.names[i]!r} is null, but iceberg table {self._name!r} requires it",
                    hint="Fill the nulls or filter the rows, before the sink.",
                )
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def _cast(column: pa.Array, field: pa.Field) -> pa.Array:
    if column.type.equals(field.type):
        return column
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pt.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    try:
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"column {field.name!r}: a value of {column.type} does not fit {field.type}: {error}",
            hint="Cast or round the column in the dataflow, before the sink.",
        ) from error

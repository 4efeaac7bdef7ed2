"""Arrow types of Parquet files for Spark, and the casts to them."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pyarrow.compute as pc

from cutwater.errors import BuildError, DataError


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The schema with dictionary, run-end, string view, large and extension types replaced by what they stand for.

    >>> plain_schema(pa.schema({"c": pa.dictionary(pa.int8(), pa.large_string())})).field("c").type
    DataType(string)
    """
    return pa.schema([_field(field, _plain) for field in schema])


def parquet_schema(schema: pa.Schema) -> pa.Schema:
    """The schema that Parquet files get, so that Spark reads every column.

    Beyond ``plain_schema``: timestamps count microseconds, ``float16`` becomes ``float32``, ``date64``
    becomes ``date32``.  Unsigned integers stay (Spark reads them as the next wider type).

    Raises:
        BuildError: no columns, two columns whose names differ at most in case, or a type that Spark cannot read.

    >>> parquet_schema(pa.schema({"t": pa.timestamp("ms", tz="UTC")})).field("t").type
    TimestampType(timestamp[us, tz=UTC])
    """
    if not schema.names:
        raise BuildError("rows without columns cannot be written to Parquet")
    seen: dict[str, str] = {}
    for name in schema.names:
        if name.casefold() in seen:
            raise BuildError(
                f"columns {seen[name.casefold()]!r} and {name!r} are one name to Spark", hint="Rename one of them."
            )
        seen[name.casefold()] = name
    fields: list[pa.Field] = []
    for field in schema:
        try:
            fields.append(_field(field, _spark))
        except BuildError as error:
            message = f"column {field.name!r} of type {field.type} cannot be written for Spark: {error.message}"
            raise BuildError(message, hint=error.hint) from None
    return pa.schema(fields)


def cast_batch(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Rows with the types of ``schema`` (same columns); columns that have theirs already are not copied.

    Raises:
        DataError: a value has no exact counterpart, for example a timestamp with nanoseconds.
    """
    if batch.schema.equals(schema):
        return batch
    if batch.schema.names != schema.names:
        raise DataError(f"a batch has columns {batch.schema.names}, the stream's are {schema.names}")
    columns = [_cast(batch.column(i), schema.field(i)) for i in range(len(schema))]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _cast(column: pa.Array, field: pa.Field) -> pa.Array:
    if column.type.equals(field.type):
        return column
    if isinstance(column, pa.ExtensionArray):
        column = column.storage
    if pa.types.is_run_end_encoded(column.type):
        column = pc.call_function("run_end_decode", [column])
    try:
        return column.cast(field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise DataError(
            f"column {field.name!r}: a value of {column.type} does not fit {field.type}: {error}",
            hint="Cast or round the column in the dataflow, before the sink.",
        ) from error


def _field(field: pa.Field, convert: Callable[[pa.DataType], pa.DataType]) -> pa.Field:
    return pa.field(field.name, convert(field.type), field.nullable)


def _nested(kind: pa.DataType, convert: Callable[[pa.DataType], pa.DataType]) -> pa.DataType | None:
    """A nested type with converted parts, or ``None`` for a type without parts."""
    types = pa.types
    if types.is_struct(kind):
        return pa.struct([_field(kind.field(i), convert) for i in range(kind.num_fields)])
    if types.is_map(kind):
        return pa.map_(convert(kind.key_type), _field(kind.item_field, convert))
    if types.is_fixed_size_list(kind) or types.is_list(kind) or types.is_large_list(kind):
        return pa.list_(_field(kind.value_field, convert))
    return None


def _plain(kind: pa.DataType) -> pa.DataType:
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(kind.storage_type)
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _plain(kind.value_type)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    nested = _nested(kind, _plain)
    return kind if nested is None else nested


def _spark(kind: pa.DataType) -> pa.DataType:
    types, kind = pa.types, _plain(kind)
    if types.is_timestamp(kind):
        return pa.timestamp("us", tz=kind.tz)
    if types.is_date(kind):
        return pa.date32()
    if types.is_float16(kind):
        return pa.float32()
    if types.is_fixed_size_binary(kind):
        return pa.binary()
    if types.is_decimal(kind) and kind.precision > 38:
        raise BuildError("Spark's decimals have at most 38 digits", hint="Cast it to a narrower decimal or to string.")
    if types.is_duration(kind) or types.is_interval(kind):
        raise BuildError("Parquet has no such type", hint="Write it as int64, for example the number of microseconds.")
    if types.is_time(kind):
        raise BuildError("Spark reads no times of day by default", hint="Write it as string, or as microseconds.")
    if types.is_union(kind) or types.is_null(kind):
        raise BuildError("Spark has no such type", hint="Cast the column to the type it should have.")
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        raise BuildError("list views have no Parquet form", hint="Cast the column to a list.")
    if types.is_struct(kind) and kind.num_fields == 0:
        raise BuildError("Parquet has no empty structs", hint="Drop the column.")
    nested = _nested(kind, _spark)
    return kind if nested is None else nested

"""Types that travel: dictionaries, views and run-ends are decoded before an edge."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as pt

from cutwater.errors import BuildError


def plain_type(type: pa.DataType) -> pa.DataType:
    """The type in which values travel: equal values, no dictionary, view or run-end encoding at any depth.

    >>> plain_type(pa.dictionary(pa.int32(), pa.string())), plain_type(pa.list_(pa.string_view()))
    (DataType(string), ListType(list<item: string>))
    """
    if pt.is_dictionary(type) or pt.is_run_end_encoded(type):
        return plain_type(type.value_type)
    if pt.is_string_view(type):
        return pa.string()
    if pt.is_binary_view(type):
        return pa.binary()
    if pt.is_map(type):
        return pa.map_(_plain_field(type.key_field), _plain_field(type.item_field), keys_sorted=type.keys_sorted)
    if pt.is_fixed_size_list(type):
        return pa.list_(_plain_field(type.value_field), type.list_size)
    if pt.is_list(type) or pt.is_list_view(type):
        return pa.list_(_plain_field(type.value_field))
    if pt.is_large_list(type) or pt.is_large_list_view(type):
        return pa.large_list(_plain_field(type.value_field))
    if pt.is_struct(type):
        return pa.struct([_plain_field(field) for field in type])
    return type


def plain_schema(schema: pa.Schema) -> pa.Schema:
    """The schema of an edge for rows of this schema; without metadata."""
    return pa.schema([_plain_field(field).remove_metadata() for field in schema])


def check_plain(schema: pa.Schema) -> None:
    """Refuse a schema that cannot travel.

    Raises:
        BuildError: names the column.
    """
    for field in schema:
        wanted = plain_type(field.type)
        if not wanted.equals(field.type):
            raise BuildError(f"column {field.name!r} of an edge is {field.type}, rows travel as {wanted}")


def plain(batch: pa.RecordBatch, schema: pa.Schema | None = None) -> pa.RecordBatch:
    """The same rows with travelling types; the batch itself where nothing is to do.

    >>> colours = pa.record_batch({"c": pa.array(["red", "red"]).dictionary_encode()})
    >>> plain(colours).schema.field("c").type
    DataType(string)
    """
    target: pa.Schema = plain_schema(batch.schema) if schema is None else schema
    if batch.schema.equals(target):
        return batch
    columns = [_decode(batch.column(i), target.field(i).type) for i in range(batch.num_columns)]
    return pa.RecordBatch.from_arrays(columns, schema=target)


def _decode(array: pa.Array, type: pa.DataType) -> pa.Array:
    if array.type.equals(type):
        return array
    if pt.is_dictionary(array.type):
        return _decode(array.dictionary_decode(), type)
    return array.cast(type)


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(plain_type(field.type))

"""Columns of files: types that Spark reads, whether a file fits the source's schema, and which rows of a block do."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from cutwater.data.words import batch_of
from cutwater.errors import BuildError, DataError


@functools.lru_cache(maxsize=16)  # many files have the same
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


def only(schema: pa.Schema, columns: frozenset[str] | None) -> pa.Schema:
    """The columns that somebody reads (``None``: all), in their order; one of them at least, which tells how many rows.

    >>> only(pa.schema([("a", pa.int64()), ("b", pa.int64())]), frozenset({"b"})).names
    ['b']
    """
    if columns is None:
        return schema
    kept = [field for field in schema if field.name in columns] or list(schema)[:1]
    return schema if len(kept) == len(schema) else pa.schema(kept)


class Widened:
    """Gives rows the columns that nobody reads: they are null, and share their memory from batch to batch.

    >>> Widened(pa.schema([("a", pa.int64()), ("b", pa.string())])).widen(pa.record_batch({"a": [7]})).to_pylist()
    [{'a': 7, 'b': None}]
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._nulls: dict[str, pa.Array] = {}
        self._widened: tuple[pa.Schema, pa.Schema] | None = None
        """Of the last batch, before and after."""

    def widen(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows with all columns of the schema."""
        if batch.num_columns == len(self._schema):
            return batch
        found = dict(zip(batch.schema.names, batch.columns, strict=True))
        columns = [found[f.name] if f.name in found else self._null(f, batch.num_rows) for f in self._schema]
        if self._widened is None or not self._widened[0].equals(batch.schema):
            self._widened = batch.schema, batch_of(columns, self._schema).schema
        return pa.RecordBatch.from_arrays(columns, schema=self._widened[1])

    def _null(self, field: pa.Field, rows: int) -> pa.Array:
        known = self._nulls.get(field.name)
        if known is None or len(known) < rows:
            known = self._nulls[field.name] = pa.nulls(rows, field.type)
        return known.slice(0, rows)


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


class SchemaOrigin(NamedTuple):
    """Origin of the source's schema."""

    name: str
    """The first file, or the words "the given schema"."""
    given: bool
    """Given by the user: columns of a file that it does not name are not read."""


def column_differences(found: pa.Schema, wanted: pa.Schema, origin: SchemaOrigin) -> list[str]:
    """The reason why a file cannot be read with the source's schema; empty if it can.

    Columns may stand in any order.  A type may be narrower than the source's (``int32`` for ``int64``, ``float32``
    for ``float64``), never wider.
    """
    differences = name_differences(found.names, wanted.names, origin)
    for field in wanted:
        index = found.get_field_index(field.name)
        if index >= 0 and not widens(found.field(index).type, field.type, given=origin.given):
            differences.append(f"column {field.name!r} is {found.field(index).type} instead of {field.type}")
    return differences


def name_differences(found: Sequence[str], wanted: Sequence[str], origin: SchemaOrigin) -> list[str]:
    """As ``column_differences``, by the names of the columns alone."""
    differences = [f"column {name!r} is missing" for name in wanted if name not in found]
    repeated = sorted({name for name in found if found.count(name) > 1})
    differences += [f"column {name!r} is there more than once" for name in repeated]
    if not origin.given:
        differences += [f"column {name!r} is new" for name in found if name not in wanted]
    return differences


def check_columns(path: str, differences: Sequence[str], origin: SchemaOrigin) -> None:
    """Refuse a file with differences.

    Raises:
        DataError: there are some.
    """
    if differences:
        raise DataError(
            f"{path} does not have the columns of {origin.name}: {'; '.join(differences)}",
            hint="Give schema= with the columns to read, or read files of one schema per step.",
        )


def widens(found: pa.DataType, wanted: pa.DataType, *, given: bool) -> bool:
    """True if every value of ``found`` has its place in ``wanted`` (timestamps: if it is as fine as the wanted unit).

    With a schema given by the user, times without zone count as UTC where it says so: Spark's old INT96 timestamps
    are such.

    >>> widens(pa.int32(), pa.int64(), given=False), widens(pa.int64(), pa.int32(), given=False)
    (True, False)
    """
    if found.equals(wanted) or pt.is_null(found):
        return True
    if pt.is_integer(found) and pt.is_integer(wanted):
        signed, to_signed = pt.is_signed_integer(found), pt.is_signed_integer(wanted)
        return (signed == to_signed or to_signed) and found.bit_width < wanted.bit_width
    if pt.is_floating(found) and pt.is_floating(wanted):
        return found.bit_width < wanted.bit_width
    if pt.is_decimal(found) and pt.is_decimal(wanted):
        whole = wanted.precision - wanted.scale >= found.precision - found.scale
        return whole and wanted.scale >= found.scale
    if pt.is_timestamp(found) and pt.is_timestamp(wanted):
        return (found.tz is None) == (wanted.tz is None) or (given and found.tz is None and wanted.tz == "UTC")
    return _nested_widens(found, wanted, given)


def _nested_widens(found: pa.DataType, wanted: pa.DataType, given: bool) -> bool:
    if pt.is_list(found) and pt.is_list(wanted):
        return widens(found.value_type, wanted.value_type, given=given)
    if pt.is_map(found) and pt.is_map(wanted):
        keys = widens(found.key_type, wanted.key_type, given=given)
        return keys and widens(found.item_type, wanted.item_type, given=given)
    if pt.is_struct(found) and pt.is_struct(wanted):
        fields = [(found.field(i), wanted.field(i)) for i in range(min(found.num_fields, wanted.num_fields))]
        same = found.num_fields == wanted.num_fields
        return same and all(a.name == b.name and widens(a.type, b.type, given=given) for a, b in fields)
    return False


class GoodAndBad(NamedTuple):
    """Good rows of a block as batches, with their row numbers, and the bad rows with the reason."""

    batches: list[pa.RecordBatch]
    good: list[range]
    """Row numbers in the block of each batch's rows."""
    bad: list[tuple[int, str]]


def good_and_bad(rows: int, convert: Callable[[int, int], pa.RecordBatch], *, first_only: bool) -> GoodAndBad:
    """Convert ``rows`` rows; where that fails, halve until single rows are left.

    Needs about ``2 * log2(rows)`` attempts per bad row.

    Args:
        convert: rows ``[start, stop)`` as a batch of that many rows; raises ``pa.ArrowException`` or ``ValueError`` if
            one of them is bad.
        first_only: stop at the first bad row.

    >>> numbers = ["1", "2", "x", "4"]
    >>> result = good_and_bad(4, lambda a, b: pa.record_batch({"n": [int(n) for n in numbers[a:b]]}), first_only=False)
    >>> result.bad[0][0], result.good
    (2, [range(0, 2), range(3, 4)])
    """
    result = GoodAndBad([], [], [])
    todo = [(0, rows)] if rows else []
    while todo:
        start, stop = todo.pop()
        try:
            batch = convert(start, stop)
        except (pa.ArrowException, ValueError) as e:
            if stop - start == 1:
                result.bad.append((start, str(e)))
                if first_only:
                    break
            else:
                middle = (start + stop) // 2
                todo += [(middle, stop), (start, middle)]
            continue
        result.batches.append(batch)
        result.good.append(range(start, stop))
    return result

"""Columns of Delta tables: the types that there are, and texts of partition values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute
import pyarrow.types as pt

from cutwater.connectors.files.schemas import parquet_schema
from cutwater.errors import BuildError, did_you_mean

_compute: Any = pyarrow.compute
_HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"
_LONG_NAME = 200
_PARTITION_TYPES = (pt.is_string, pt.is_integer, pt.is_date, pt.is_boolean, pt.is_decimal)


def delta_schema(schema: pa.Schema) -> pa.Schema:
    """The schema that a table has for rows of a stream.

    Beyond ``parquet_schema``: unsigned integers become the next wider signed ones, times with a zone are kept in UTC
    (Delta's ``timestamp``), times without one stay so (``timestamp_ntz``), and every column may be null.

    Raises:
        BuildError: as ``parquet_schema``; or an ``uint64``, for which Delta has no integer.

    >>> delta_schema(pa.schema({"n": pa.uint16(), "t": pa.timestamp("ms", "Europe/Berlin")})).types
    [DataType(int32), TimestampType(timestamp[us, tz=UTC])]
    """
    fields: list[pa.Field] = []
    for field in parquet_schema(schema):
        try:
            fields.append(pa.field(field.name, _delta(field.type)))
        except BuildError as error:
            message = f"column {field.name!r} of type {field.type} cannot be written to Delta: {error.message}"
            raise BuildError(message, hint=error.hint) from None
    return pa.schema(fields)


def _delta(kind: pa.DataType) -> pa.DataType:
    if pt.is_uint64(kind):
        raise BuildError("its largest integer is int64", hint="Cast it to int64, or to a decimal.")
    if pt.is_unsigned_integer(kind):
        return {8: pa.int16(), 16: pa.int32(), 32: pa.int64()}[kind.bit_width]
    if pt.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    if pt.is_struct(kind):
        return pa.struct([pa.field(kind.field(i).name, _delta(kind.field(i).type)) for i in range(kind.num_fields)])
    if pt.is_map(kind):
        return pa.map_(_delta(kind.key_type), _delta(kind.item_type))
    if pt.is_list(kind):
        return pa.list_(_delta(kind.value_type))
    return kind


def check_partition_columns(schema: pa.Schema, columns: Sequence[str]) -> None:
    """Refuse partition columns that are not there, or of which not each value has a text.

    Raises:
        BuildError: with what to do.
    """
    for name in columns:
        if name not in schema.names:
            raise BuildError(f"no such column {name!r} to partition by", hint=did_you_mean(name, schema.names))
        kind = schema.field(name).type
        if not any(fits(kind) for fits in _PARTITION_TYPES):
            raise BuildError(
                f"a table cannot be partitioned by {name!r} of type {kind}",
                hint="Partition by texts, integers, dates, booleans or decimals: of a time, by its date.",
            )
    if columns and len(set(columns)) == len(schema.names):
        raise BuildError("a table needs a column besides those that it is partitioned by")


Partition = dict[str, str | None]
"""Values of the partition columns, as the log has them."""


def partitioned(rows: pa.Table, columns: Sequence[str]) -> Iterator[tuple[Partition, pa.Table]]:
    """The rows of each partition, in their order and without its columns.

    >>> rows = pa.table({"d": ["a", None, "a"], "n": [1, 2, 3]})
    >>> [(values, part["n"].to_pylist()) for values, part in partitioned(rows, ["d"])]
    [({'d': None}, [2]), ({'d': 'a'}, [1, 3])]
    """
    texts = [_texts(rows.column(name).combine_chunks()) for name in columns]
    group = np.zeros(rows.num_rows, np.int64)
    for text in texts:
        encoded = text.dictionary_encode()
        codes: npt.NDArray[np.int64] = encoded.indices.cast(pa.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
        group = np.unique(group * (len(encoded.dictionary) + 1) + codes + 1, return_inverse=True)[1]
    order = np.argsort(group, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(group[order])) + 1, rows.num_rows)
    rest = rows.drop_columns(list(columns))
    begin = 0
    for end in ends.tolist() if rows.num_rows else ():
        chosen = order[begin:end]
        values = {name: text[int(chosen[0])].as_py() for name, text in zip(columns, texts, strict=True)}
        yield values, rest.take(pa.array(chosen))
        begin = end


def _texts(column: pa.Array) -> pa.Array:
    """Values as the log has them: an empty text stands for null there."""
    texts = column if pt.is_string(column.type) else column.cast(pa.string())
    return _compute.if_else(_compute.equal(texts, ""), pa.scalar(None, pa.string()), texts)


def partition_folder(values: Partition) -> list[str]:
    """The folders of a partition's files, as other writers name them; the log alone tells the values.

    >>> partition_folder({"day": "2026-01-01", "who": "a/b"})
    ['day=2026-01-01', 'who=a%2Fb']
    """
    names = [f"{quote(name, safe='')}={_folder_text(value)}" for name, value in values.items()]
    return [name if len(name) <= _LONG_NAME else name[:_LONG_NAME] for name in names]


def _folder_text(value: str | None) -> str:
    return _HIVE_NULL if value is None else quote(value, safe="")


def partition_column(value: str | None, field: pa.Field, rows: int) -> pa.Array:
    """The column that all rows of a partition have."""
    scalar = pa.scalar(None if value in (None, "") else value, pa.string())
    if value and pt.is_timestamp(field.type):
        times = pa.array([value.replace("T", " ").removesuffix("Z")]).cast(pa.timestamp("us"))
        return pa.repeat(times.cast(pa.int64()).cast(field.type)[0], rows)
    return pa.repeat(scalar.cast(field.type), rows)

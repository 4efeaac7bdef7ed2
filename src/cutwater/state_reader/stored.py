"""From tables as a user has them to segments as operators store them: the way back from ``values``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import numpy as np
import pyarrow as pa

from cutwater.errors import BuildError, DataError
from cutwater.state.index.nullable import NullableIndex
from cutwater.state.keys import NullableKeys, hash_keys, key_groups, require_valid_keys, show_row
from cutwater.state.segments import GROUP_COLUMN, Segment
from cutwater.state_reader.layout import VALUE, WINDOW_START, TableLayout
from cutwater.state_reader.values import StoredAggregate, stored_aggregates
from cutwater.storage.snapshot.manifest import Shape

_SEGMENT_ROWS = 1 << 17
_WRITABLE = (Shape.AGGREGATES, Shape.TABLE, Shape.TOP, Shape.OBJECT, Shape.ROWS)
_DEFAULTS: dict[str, Any] = {"window_fired": False, "window_pending": 0}


def as_table(frame: Any, name: str) -> pa.Table:
    """The rows of a DataFrame of Arrow, Polars, pandas or Spark.

    Raises:
        BuildError: it is none of them.

    >>> as_table(pa.table({"k": [1]}), "counts").num_rows
    1
    """
    if isinstance(frame, pa.Table):
        return frame
    if isinstance(frame, pa.RecordBatch):
        return pa.Table.from_batches([frame])
    for method in ("to_arrow", "toArrow"):  # Polars, Spark
        if hasattr(frame, method):
            return getattr(frame, method)()
    if hasattr(frame, "__arrow_c_stream__"):
        return pa.table(frame)
    if type(frame).__module__.startswith("pandas."):
        return pa.Table.from_pandas(frame, preserve_index=False)
    raise BuildError(
        f"state {name!r} is given as {type(frame).__name__}",
        hint="Give an Arrow table, or a DataFrame of Polars, pandas or Spark.",
    )


def segments_of(layout: TableLayout, table: pa.Table, max_parallelism: int) -> list[Segment]:
    """The rows as whole state, cut between key groups; nothing for an empty table.

    Args:
        layout: what is to be written.
        table: rows with the columns that reading gives, or the stored ones.
        max_parallelism: number of key groups.

    Raises:
        BuildError: a column is missing or does not convert, or such a state cannot be written.
        DataError: a key column without value, or a key twice.
    """
    address = f"{layout.step}.{layout.name}"
    if layout.shape not in _WRITABLE:
        raise BuildError(f"state {address} cannot be written", hint="Write the states of keys; the rest is kept.")
    if layout.beside:
        hint = f"Write {layout.step}.slices, which windows are put together from."
        raise BuildError(f"state {address} is no state of its own", hint=hint)
    fields = [field for field in layout.stored if field.name != GROUP_COLUMN]
    arrays = [_column(layout, field, table, address) for field in fields]
    batch = pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))
    if batch.num_rows == 0:
        return []
    keys = layout.partitioning
    require_valid_keys(batch, NullableKeys(keys))
    if layout.identity:
        _check_distinct(batch, layout.identity, address)
    groups = key_groups(hash_keys([batch.column(name) for name in keys]), max_parallelism)
    order = np.argsort(groups, kind="stable")
    groups, batch = groups[order], batch.take(pa.array(order))
    batch = batch.add_column(0, pa.field(GROUP_COLUMN, pa.uint16(), nullable=False), pa.array(groups))
    identity = len(layout.identity)
    segments: list[Segment] = []
    for group in np.unique(groups).tolist():
        start, stop = (int(i) for i in np.searchsorted(groups, [group, group + 1]))
        for first in range(start, stop, _SEGMENT_ROWS):
            kind = "base" if first == start else "delta"
            rows = batch.slice(first, min(_SEGMENT_ROWS, stop - first))
            segments.append(Segment(layout.segments[0], kind, rows, (group, group + 1), identity))
    return segments


def _check_distinct(batch: pa.RecordBatch, identity: Sequence[str], address: str) -> None:
    columns = [batch.column(name) for name in identity]
    gids = NullableIndex([column.type for column in columns], batch.num_rows).upsert(columns)
    twice = np.flatnonzero(gids != np.arange(len(gids)))
    if len(twice):
        row = show_row(batch.select(list(identity)), int(twice[0]))
        raise DataError(f"state {address}: the key {row} is there twice", hint="Aggregate the rows by key before.")


def _column(layout: TableLayout, field: pa.Field, table: pa.Table, address: str) -> pa.Array:
    """One stored column."""
    name = field.name
    source = name if name in table.column_names else name.lstrip(".")
    if layout.segments == ("slice",) and name == WINDOW_START and name not in table.column_names:
        source = "slice_start"
    if layout.shape is Shape.OBJECT and name == VALUE:
        source = VALUE if VALUE in table.column_names else "value"
        if "expires" in table.column_names and source == "value" and "expires" not in layout.stored.names:
            return _with_expiry(field, table, address)
    if source not in table.column_names:
        return _left_out(layout, field, table, address)
    return _converted(table.column(source), field, address)


def _left_out(layout: TableLayout, field: pa.Field, table: pa.Table, address: str) -> pa.Array:
    """A stored column that can be told without being given, if it can."""
    of = _aggregate_of(layout, field.name)
    if of is not None and field.name.endswith(".order"):
        return pa.array(np.zeros(table.num_rows, np.int64)).cast(field.type)
    if of is None and field.name in _DEFAULTS:
        return pa.array([_DEFAULTS[field.name]] * table.num_rows, field.type)
    if of is not None and not of.plain:
        raise BuildError(
            f"state {address}: {of.aggregate.kind} {of.name!r} is stored as {', '.join(of.stored)}, which are not "
            "given",
            hint="What Snapshot.table(..., raw=True) reads can be written; a result does not say what it was made of.",
        )
    has = ", ".join(table.column_names)
    name = "value" if field.name == VALUE else field.name.lstrip(".")
    raise BuildError(
        f"state {address}: no column {name!r} is given", hint=f"It needs one of {field.type}. Given: {has}."
    )


def _aggregate_of(layout: TableLayout, column: str) -> StoredAggregate | None:
    if layout.shape is not Shape.AGGREGATES:
        return None
    return next((a for a in stored_aggregates(layout) if column in a.stored), None)


def _with_expiry(field: pa.Field, table: pa.Table, address: str) -> pa.Array:
    """A value with a time to live, from two columns."""
    kind: Any = field.type
    if not (pa.types.is_struct(kind) and "expires_ms" in {kind.field(i).name for i in range(kind.num_fields)}):
        raise BuildError(f"state {address}: its values have no time to live", hint="Leave the column 'expires' out.")
    expires = _one(table.column("expires"))
    if pa.types.is_timestamp(expires.type):
        expires = expires.cast(pa.timestamp("ms", "UTC"))
    parts = [
        _converted(table.column("value"), kind.field(0), address),
        expires.cast(pa.int64()),
    ]
    return pa.StructArray.from_arrays(parts, fields=[kind.field(0), kind.field(1)])


def _converted(column: pa.ChunkedArray, field: pa.Field, address: str) -> pa.Array:
    array = _one(column)
    if array.type == field.type:
        return array
    try:
        if pa.types.is_nested(field.type):
            return pa.array(_pairs(array.to_pylist(), field.type), field.type)
        return array.cast(field.type)
    except (pa.ArrowException, TypeError, ValueError, AttributeError) as error:
        name = "value" if field.name == VALUE else field.name.lstrip(".")
        raise BuildError(
            f"state {address}: column {name!r} of type {array.type} does not become {field.type} ({error})",
            hint="Cast it, or leave values out that do not fit.",
        ) from error


def _pairs(values: Iterable[Any], kind: pa.DataType) -> list[Any]:
    """Maps as pairs, whether they come as dicts, pairs, or structs of key and value (as Polars has them)."""
    found = list(values)
    if not pa.types.is_map(kind):
        return found
    return [
        [_pair(entry) for entry in (v.items() if isinstance(v, dict) else v)] if v is not None else None for v in found
    ]


def _pair(entry: Any) -> tuple[Any, Any]:
    return (entry["key"], entry["value"]) if isinstance(entry, dict) else cast("tuple[Any, Any]", tuple(entry))


def _one(column: pa.ChunkedArray) -> pa.Array:
    found: Any = column.combine_chunks()
    return pa.concat_arrays(found.chunks) if isinstance(found, pa.ChunkedArray) else found

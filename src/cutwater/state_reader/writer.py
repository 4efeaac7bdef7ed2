"""Writing a snapshot out of tables: the state that a dataflow begins with, or another snapshot with some replaced.

What is written is a savepoint.  A table has the columns that reading gives, so that what was read can be changed and
written again; where a result does not say what it was made of, as a mean, the stored columns are asked for
(``Snapshot.table(..., raw=True)``).
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
import pyarrow as pa

from cutwater import __version__
from cutwater.errors import BuildError, ConfigError, DataError
from cutwater.plan.checks import check_complete
from cutwater.plan.compatibility import step_records
from cutwater.plan.planner import HasGraph, make_plan
from cutwater.state.key_index import NullableIndex
from cutwater.state.keys import NullableKeys, hash_keys, key_group_range, key_groups, require_valid_keys, show_row
from cutwater.state.segments import GROUP_COLUMN, Segment
from cutwater.state_reader.layout import VALUE, WINDOW_START, TableLayout, layouts
from cutwater.state_reader.reader import Snapshot, chunks, merged
from cutwater.state_reader.values import StoredAggregate, stored_aggregates
from cutwater.storage.snapshot.channel_log import CHANNEL_KIND, ChannelLog, read_log
from cutwater.storage.snapshot.manifest import Manifest, Shape
from cutwater.storage.snapshot.savepoint import SavepointManifest, is_savepoint, load_savepoint, publish_savepoint
from cutwater.storage.snapshot.savepoint_files import SavepointFile, SavepointWriter
from cutwater.storage.snapshot.segment_files import read_segment
from cutwater.storage.store.opening import joined, open_store, parted

_VERBATIM = (Shape.ELEMENTS, Shape.WATERMARKS, Shape.REQUESTS)
"""Shapes that are written whole at every checkpoint: there is nothing to merge."""


def write_savepoint(
    path: str | os.PathLike[str],
    states: Mapping[str, Any],
    *,
    flow: HasGraph | None = None,
    base: str | os.PathLike[str] | Snapshot | None = None,
    max_parallelism: int = 128,
) -> str:
    """Write a savepoint for ``restore=``: of a dataflow that has not run yet, or of another snapshot.

    Args:
        path: folder to be made.
        states: tables by what names the state, ``STEP`` or ``STEP.STATE``: Arrow, Polars, pandas or Spark DataFrames,
            with the columns that ``Snapshot.table`` gives; ``key_group`` and ``subtask`` need not be among them.
        flow: the dataflow to begin: all state that is not given is empty, and its sources begin at their start.
        base: a snapshot, of which everything else is kept.
        max_parallelism: number of key groups that the job is started with; with ``base`` it is that one's.

    Returns:
        The folder.

    Raises:
        BuildError: no such state, a column that is missing or of another type, or the dataflow is not whole.
        ConfigError: neither or both of ``flow`` and ``base``, or there is something at ``path`` already.
        DataError: a key without value, or a key twice.

    Example::

        history = spark.sql("SELECT user, count(*) AS n FROM clicks GROUP BY user")
        cw.write_savepoint("begin", {"counts": history}, flow=flow)
        flow.start(spark, checkpoint="checkpoints", restore="begin")
    """
    if (flow is None) == (base is None):
        raise ConfigError("give either flow= or base=", hint="base= takes a snapshot, of which the rest is kept.")
    if base is not None:
        source = base if isinstance(base, Snapshot) else Snapshot(base)
        manifest = source.manifest
    else:
        assert flow is not None
        source, manifest = None, _empty(flow, max_parallelism)
    above, folder = parted(path)
    store = open_store(above)
    if is_savepoint(store, folder) or store.names(folder):
        raise ConfigError(f"{os.fspath(path)!r} is there already", hint="Give a folder that is to be made.")
    known = source.layouts if source is not None else layouts(manifest, _no_schema)
    given = _by_layout(known, states)
    writer = SavepointWriter(store, folder)
    try:
        files = [*_new_state(writer, manifest, given)]
        if source is not None:
            files += _kept_state(writer, source, set(given))
            files += _logs(writer, source)
        publish_savepoint(store, folder, _described(manifest, source, files))
    except BaseException:
        writer.abort()
        raise
    return joined(store.uri, folder)


def _no_schema(_: object) -> pa.Schema:
    raise AssertionError("an empty snapshot has no entries")


def _empty(flow: HasGraph, max_parallelism: int) -> Manifest:
    """Manifest of a flow that never ran."""
    check_complete(flow.graph)
    plan = make_plan(flow, 1, max_parallelism)
    now_ms = time.time_ns() // 1_000_000
    return Manifest(
        job=plan.name,
        uid=uuid.uuid4().hex,
        checkpoint_id=1,
        attempt=1,
        protocol="aligned",
        max_parallelism=max_parallelism,
        parallelism=1,
        triggered_ms=now_ms,
        completed_ms=now_ms,
        steps=[msgspec.structs.replace(record, parallelism=1) for record in step_records(plan)],
        subtasks=[],
        entries=[],
        back_edges=plan.back_edges,
        engine=__version__,
    )


def _by_layout(known: list[TableLayout], states: Mapping[str, Any]) -> dict[int, tuple[TableLayout, pa.Table]]:
    """Which table is given for which state; numbered as ``known``."""
    found: dict[int, tuple[TableLayout, pa.Table]] = {}
    names = {f"{t.step}.{t.name}": n for n, t in enumerate(known)}
    for name, frame in states.items():
        mine = [n for n, t in enumerate(known) if t.step == name and t.main]
        number = names.get(name, mine[0] if len(mine) == 1 else None)
        if number is None:
            listed = ", ".join(a for a, n in names.items() if known[n].shape not in _VERBATIM) or "none"
            raise BuildError(f"no state {name!r} to write", hint=f"There are: {listed}.")
        found[number] = (known[number], as_table(frame, name))
    return found


def _new_state(
    writer: SavepointWriter, manifest: Manifest, given: Mapping[int, tuple[TableLayout, pa.Table]]
) -> Iterator[SavepointFile]:
    for layout, table in given.values():
        whole = segments_of(layout, table, manifest.max_parallelism)
        assert layout.record is not None
        for subtask, owned in _subtasks(layout.record.parallelism, manifest.max_parallelism):
            mine = (s for s in whole if s.key_groups is not None and s.key_groups[0] in owned)
            yield from writer.add_state(layout.step, subtask, owned, mine)


def _subtasks(parallelism: int, max_parallelism: int) -> Iterator[tuple[int, range]]:
    return ((n, key_group_range(n, parallelism, max_parallelism)) for n in range(parallelism))


def _kept_state(writer: SavepointWriter, source: Snapshot, replaced: set[int]) -> Iterator[SavepointFile]:
    manifest = source.manifest
    listed: set[tuple[str, str]] = set()
    for number, layout in enumerate(source.layouts):
        listed |= {(layout.step, name) for name in layout.segments}
        if number in replaced or layout.record is None or not layout.entries or layout.shape in _VERBATIM:
            continue
        for name in layout.segments:
            for subtask, owned in _subtasks(layout.record.parallelism, manifest.max_parallelism):
                yield from writer.add_state(layout.step, subtask, owned, _merged(source, layout, name, owned))
    verbatim = {(t.step, n) for t in source.layouts if t.shape in _VERBATIM for n in t.segments}
    parallelism = {record.id: record.parallelism for record in manifest.steps}
    for entry in manifest.entries:
        place = (entry.step, entry.name)
        if entry.kind != CHANNEL_KIND and (place in verbatim or place not in listed):
            owned = key_group_range(entry.subtask, parallelism[entry.step], manifest.max_parallelism)
            segment = read_segment(source.store, source.folder, entry)
            yield from writer.add_state(entry.step, entry.subtask, owned, [segment])


def _merged(source: Snapshot, layout: TableLayout, name: str, owned: range) -> Iterator[Segment]:
    for part in chunks(layout.entries, owned):
        kind = "base"
        for batch in merged(layout, name, source.segments, part):
            yield Segment(name, kind, batch, (part.start, part.stop), len(layout.identity))
            kind = "delta"


def _logs(writer: SavepointWriter, source: Snapshot) -> Iterator[SavepointFile]:
    """Rows on their way, piece by piece."""
    for entry in source.manifest.entries:
        if entry.kind == CHANNEL_KIND:
            assert entry.channel is not None
            items = read_log(source.store, source.folder, entry)
            place = (entry.step, entry.subtask, entry.name, entry.channel, entry.side, entry.first_row)
            yield from writer.add_log(ChannelLog(*place, items))


def _described(manifest: Manifest, source: Snapshot | None, files: list[SavepointFile]) -> SavepointManifest:
    """The new savepoint: for its job it is the one that it was made from."""
    committed_by = manifest.checkpoint_id
    if source is not None and source.is_savepoint:
        committed_by = load_savepoint(source.store, source.folder).committed_by
    replaced = msgspec.structs.replace(manifest, engine=__version__)
    return SavepointManifest.of(replaced, files, committed_by=committed_by)


_SEGMENT_ROWS = 1 << 17
_WRITABLE = (Shape.AGGREGATES, Shape.TABLE, Shape.TOP, Shape.OBJECT, Shape.ROWS)
_DEFAULTS: dict[str, Any] = {"window_fired": False, "window_pending": 0}


def as_table(frame: Any, name: str) -> pa.Table:
    """The rows of a DataFrame of Arrow, Polars, pandas or Spark.

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
        table: rows with the columns that reading gives, or the stored ones.

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

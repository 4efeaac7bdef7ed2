"""Tables of a snapshot.  A state is a named list of segments, as the operator of its step writes them.

| table                      | of                                         | rows                                 |
|----------------------------|--------------------------------------------|--------------------------------------|
| ``aggregates``             | running aggregates                         | a key                                |
| ``windows``, ``slices``    | windows; the shared parts of sliding ones  | a key and window                     |
| ``table``                  | deduplicate, top, joined tables            | a key; of top: a kept row            |
| ``left``, ``right``        | joins of rows                              | a row that waits for its partners    |
| *the name of the state*    | process functions, StatefulProcessor       | a key; of operator state: an element |
| ``timers``                 | process functions, StatefulProcessor       | a timer                              |
| ``watermarks``             | whatever goes by event time                | a key group                          |
| ``requests``               | ``map_async``                              | a row whose result has not come      |
| ``positions``              | sources                                    | a split                              |
| ``handles``                | sinks                                      | what is to be committed              |
| ``rows`` of ``a.0>b.0``    | the edge from a to b                       | a row on its way                     |
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import pyarrow as pa

from cutwater.operators.window.kinds import Period
from cutwater.state.segments import GROUP_COLUMN
from cutwater.storage.snapshot.channel_log import CHANNEL_KIND
from cutwater.storage.snapshot.manifest import Entry, Manifest, Shape, StepRecord, TableRecord

_TIMERS = ("__event_timers", "__processing_timers")
_WATERMARKS = ("__watermark", "watermark")
_NOTHING = pa.schema([])
VALUE = "__value"
SUBTASK = "__subtask"
WINDOW_START = "window_start"


SchemaOf: TypeAlias = Callable[[Entry], pa.Schema]
"""Reads the columns of an entry."""


@dataclass(frozen=True)
class TableLayout:
    """One table.

    Attributes:
        step: id of the step; of rows on their way, name of the edge.
        name: of the table within the step.
        shape: how segments become rows.
        stored: columns of the segments.
        segments: names of the segments that it is made of.
        entries: where the segments lie, in the order they apply.
        identity: stored columns that tell its rows apart; none if rows never replace each other.
        record: what the manifest says of the step; ``None`` for an edge.
        main: whether the name of the step alone may mean it.
        keys: columns that decide in which key group a row lies.
        period: places of the windows that its rows are of, if they have one.
    """

    step: str
    name: str
    shape: Shape
    stored: pa.Schema
    segments: tuple[str, ...] = ()
    entries: tuple[Entry, ...] = ()
    identity: tuple[str, ...] = ()
    record: StepRecord | None = None
    main: bool = True
    keys: tuple[str, ...] = ()
    period: Period | None = None
    beside: tuple[TableLayout, ...] = ()
    """Of sliding windows: the slices that they are made of, and the watermarks that say which have come out."""

    @property
    def partitioning(self) -> list[str]:
        """The stored columns whose hash decides in which key group a row lies; none if no key does."""
        if self.record is None or self.shape in (Shape.POSITIONS, Shape.HANDLES, Shape.REQUESTS, Shape.ELEMENTS):
            return []
        keys = self.keys or self.record.keys
        return list(keys) if all(name in self.stored.names for name in keys) else []


def layouts(manifest: Manifest, schema_of: SchemaOf) -> list[TableLayout]:
    """Every table of a snapshot: state of steps in the order of the program, then rows on their way.

    Args:
        schema_of: reads the columns of an entry; asked once for each table.
    """
    by_step: dict[str, dict[str, list[Entry]]] = {}
    channels: dict[str, list[Entry]] = {}
    for entry in manifest.entries:
        found = channels if entry.kind == CHANNEL_KIND else by_step.setdefault(entry.step, {})
        found.setdefault(entry.name, []).append(entry)
    tables: list[TableLayout] = []
    for record in manifest.steps:
        tables += _of_step(record, by_step.get(record.id, {}), schema_of)
        if any(record.id in s.splits for s in manifest.subtasks):
            tables.append(TableLayout(record.id, "positions", Shape.POSITIONS, _NOTHING, record=record))
        if any(s.handles.get(record.id) for s in manifest.subtasks):
            tables.append(TableLayout(record.id, "handles", Shape.HANDLES, _NOTHING, record=record))
    for edge, entries in sorted(channels.items()):
        columns = schema_of(entries[0])
        tables.append(TableLayout(edge, "rows", Shape.CHANNEL, columns, (edge,), tuple(entries)))
    return tables


def _of_step(record: StepRecord, entries: dict[str, list[Entry]], schema_of: SchemaOf) -> list[TableLayout]:
    tables = list(_plain_tables(record, entries, schema_of))
    beside = tuple(t for t in tables if t.name in ("slices", "watermarks"))
    if len(beside) == 2 and beside[0].shape is Shape.AGGREGATES:
        tables = [replace(t, beside=beside) if t.name == "windows" else t for t in tables]
    return tables


def _plain_tables(record: StepRecord, entries: dict[str, list[Entry]], schema_of: SchemaOf) -> Iterator[TableLayout]:
    found = {name: _columns(of, schema_of) for name, of in entries.items()}
    columns = {name: schema for name, schema in found.items() if schema is not None}
    known = {shape.value for shape in Shape}
    tables = record.tables or tables_of_older(record, columns)
    told = {table.segments: table for table in tables if table.shape in known}  # others are of a newer release
    columns = {**_declared(record, told.values()), **columns}
    for name, stored in columns.items():
        if name in told:
            yield _of_state(record, told[name], stored, tuple(entries.get(name, ())))
    names = {told[name].name or name for name in columns if name in told}

    def beside(name: str, shape: Shape, wanted: tuple[str, ...]) -> Iterator[TableLayout]:
        segments = tuple(segment for segment in wanted if segment in columns and segment not in told)
        while name in names:
            name = f"_{name}"  # the user has a state of this name
        if segments:
            of = tuple(entry for segment in segments for entry in entries.get(segment, ()))
            stored = columns[segments[0]]
            yield TableLayout(record.id, name, shape, stored, segments, of, record=record, main=False)

    yield from beside("timers", Shape.TIMERS, _TIMERS)
    yield from beside("watermarks", Shape.WATERMARKS, _WATERMARKS)


def _of_state(record: StepRecord, told: TableRecord, stored: pa.Schema, entries: tuple[Entry, ...]) -> TableLayout:
    name, shape, keys = told.name or told.segments, Shape(told.shape), tuple(told.keys or record.keys)
    identity = () if shape in (Shape.ROWS, Shape.REQUESTS, Shape.ELEMENTS) else keys
    if shape is Shape.AGGREGATES and WINDOW_START in stored.names:
        identity = (*identity, WINDOW_START)
    period = None if told.period is None else Period(*told.period)
    return TableLayout(
        record.id, name, shape, stored, (told.segments,), entries, identity, record, told.main, keys=keys, period=period
    )


def _columns(entries: list[Entry], schema_of: SchemaOf) -> pa.Schema | None:
    """Of the newest rows, as far as cheap: all segments of a checkpoint hold the same columns but for deletions."""
    rows = [entry for entry in entries if entry.kind != "delete"]
    return schema_of(min(rows, key=lambda entry: entry.length)) if rows else None


def _declared(record: StepRecord, tables: Iterable[TableRecord]) -> dict[str, pa.Schema]:
    """By segment name the columns of the states, as far as the manifest tells them: there may be no rows of one."""
    if not record.types:
        return {}
    state = pa.ipc.read_schema(pa.py_buffer(record.types))
    keys = list(state)[: len(record.keys)]

    def keyed(*fields: pa.Field) -> pa.Schema:
        return pa.schema([pa.field(GROUP_COLUMN, pa.uint16(), nullable=False), *fields])

    declared: dict[str, pa.Schema] = {}
    for table in tables:
        name, shape = table.segments, Shape(table.shape)
        if shape in (Shape.ROWS, Shape.OBJECT) and name not in state.names:
            continue
        if shape is Shape.ROWS:
            side = state.field(name).type
            declared[name] = keyed(*(side.field(i) for i in range(side.num_fields)))
        elif shape is Shape.OBJECT:
            declared[name] = keyed(*keys, pa.field(VALUE, state.field(name).type))
        elif shape in (Shape.AGGREGATES, Shape.TABLE, Shape.TOP) and table.main:
            declared[name] = keyed(*state)
    return declared


def tables_of_older(record: StepRecord, columns: Mapping[str, pa.Schema]) -> list[TableRecord]:
    """Tables of a step in a manifest that does not tell them: the kinds of steps that there were then."""
    if record.kind == "aggregate":
        return [TableRecord("agg", "aggregates", Shape.AGGREGATES)]
    if record.kind == "window":
        period = Period.parse(record.settings.get("windows", ""))
        windows = TableRecord("window", "windows", Shape.AGGREGATES, period=period)
        return [windows, TableRecord("slice", "slices", Shape.AGGREGATES, main=False)]
    if record.kind in ("join", "window_join", "join_as_of"):
        right = record.settings.get("right keys", "").split(", ")
        return [TableRecord("left", shape=Shape.ROWS), TableRecord("right", shape=Shape.ROWS, keys=right)]
    if record.kind in ("process", "processor"):
        unkeyed = {name for name, kind in record.parts if kind in ("elements", "union", "broadcast")}
        unkeyed |= {name for name, stored in columns.items() if SUBTASK in stored.names}
        declared = [name for name, _ in (record.state or [])[len(record.keys) :]]
        names = [name for name in dict.fromkeys([*declared, *columns]) if not name.startswith("__")]
        return [TableRecord(name, shape=Shape.ELEMENTS if name in unkeyed else Shape.OBJECT) for name in names]
    if record.kind == "map_async":
        return [TableRecord("in flight", "requests", Shape.REQUESTS)]
    return [TableRecord("table", shape=Shape.TOP if record.kind == "top" else Shape.TABLE)]

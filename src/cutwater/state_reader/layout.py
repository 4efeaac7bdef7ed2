"""Which tables a snapshot holds.  A state is a named list of segments, as the operator of its step writes them.

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

import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import pyarrow as pa

from cutwater.state.segments import GROUP_COLUMN
from cutwater.storage.snapshot.channel_log import CHANNEL_KIND
from cutwater.storage.snapshot.manifest import Entry, Manifest, StepRecord

_TIMERS = ("__event_timers", "__processing_timers")
_AGGREGATES = ("aggregate", "window")
_JOINS = ("join", "window_join", "join_as_of")
_LOGIC = ("process", "processor")
_WATERMARK = "watermark"
_NOTHING = pa.schema([])
VALUE = "__value"
SUBTASK = "__subtask"
WINDOW_START = "window_start"


class Shape(enum.Enum):
    """How the segments of a table become rows."""

    AGGREGATES = "aggregates"
    """Keys (and window), then accumulators."""
    TABLE = "table"
    """Keys, then values as they are."""
    TOP = "top"
    """Keys, then the list of rows that are kept."""
    ROWS = "rows"
    """Whole rows; none replaces another."""
    OBJECT = "object"
    """Keys, then a value of user logic."""
    ELEMENTS = "elements"
    """Operator state: elements of subtasks."""
    TIMERS = "timers"
    WATERMARKS = "watermarks"
    REQUESTS = "requests"
    """Rows without key group."""
    CHANNEL = "channel"
    POSITIONS = "positions"
    HANDLES = "handles"


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
    beside: tuple[TableLayout, ...] = ()
    """Of sliding windows: the slices that they are made of, and the watermarks that say which have come out."""

    @property
    def partitioning(self) -> list[str]:
        """The stored columns whose hash decides in which key group a row lies; none if no key does."""
        if self.record is None or self.shape in (Shape.POSITIONS, Shape.HANDLES, Shape.REQUESTS, Shape.ELEMENTS):
            return []
        keys = self.record.keys
        if self.shape is Shape.ROWS and self.segments == ("right",):
            keys = self.record.settings["right keys"].split(", ")
        return keys if all(name in self.stored.names for name in keys) else []


def layouts(manifest: Manifest, schema_of: SchemaOf) -> list[TableLayout]:
    """Every table of a snapshot: state of steps in the order of the program, then rows on their way.

    Args:
        manifest: of the snapshot.
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
    if record.kind == "window" and len(beside) == 2:
        tables = [replace(t, beside=beside) if t.name == "windows" else t for t in tables]
    return tables


def _plain_tables(record: StepRecord, entries: dict[str, list[Entry]], schema_of: SchemaOf) -> Iterator[TableLayout]:
    declared = _declared(record)
    columns = {name: _columns(found, schema_of) or declared.get(name) for name, found in entries.items()}
    columns = {**declared, **{name: found for name, found in columns.items() if found is not None}}
    logic = record.kind in _LOGIC
    states = {name: f for name, f in columns.items() if not (name.startswith("__") if logic else name == _WATERMARK)}
    for name, stored in states.items():
        yield from _of_state(record, name, stored, tuple(entries.get(name, ())))

    def beside(name: str, shape: Shape, segments: tuple[str, ...]) -> TableLayout:
        found = tuple(entry for segment in segments for entry in entries.get(segment, ()))
        stored = next(columns[segment] for segment in segments if segment in columns)
        while name in states:
            name = f"_{name}"  # the user has a state of this name
        return TableLayout(record.id, name, shape, stored, segments, found, record=record, main=False)

    if any(name in columns for name in _TIMERS):
        yield beside("timers", Shape.TIMERS, _TIMERS)
    watermark = f"__{_WATERMARK}" if logic else _WATERMARK
    if watermark in columns:
        yield beside("watermarks", Shape.WATERMARKS, (watermark,))


def _of_state(record: StepRecord, name: str, stored: pa.Schema, entries: tuple[Entry, ...]) -> Iterator[TableLayout]:
    shape, title, identity, main = Shape.TABLE, "table", tuple(record.keys), True
    if record.kind in _AGGREGATES:
        shape, title = Shape.AGGREGATES, {"window": "windows", "slice": "slices"}.get(name, "aggregates")
        if WINDOW_START in stored.names:
            identity = (*identity, WINDOW_START)
        main = title != "slices"
    elif record.kind in _JOINS:
        shape, title, identity = Shape.ROWS, name, ()
    elif record.kind == "map_async":
        shape, title, identity = Shape.REQUESTS, "requests", ()
    elif record.kind in _LOGIC:
        elements = SUBTASK in stored.names
        shape, title, identity = Shape.ELEMENTS if elements else Shape.OBJECT, name, () if elements else identity
    elif record.kind == "top":
        shape = Shape.TOP
    yield TableLayout(record.id, title, shape, stored, (name,), entries, identity, record, main)


def _columns(entries: list[Entry], schema_of: SchemaOf) -> pa.Schema | None:
    """Of the newest rows, as far as cheap: all segments of a checkpoint hold the same columns but for deletions."""
    rows = [entry for entry in entries if entry.kind != "delete"]
    return schema_of(min(rows, key=lambda entry: entry.length)) if rows else None


def _declared(record: StepRecord) -> dict[str, pa.Schema]:
    """By segment name the columns of the states, as far as the manifest tells them: there may be no rows of one."""
    if not record.types:
        return {}
    state = pa.ipc.read_schema(pa.py_buffer(record.types))
    keys = list(state)[: len(record.keys)]

    def keyed(*fields: pa.Field) -> pa.Schema:
        return pa.schema([pa.field(GROUP_COLUMN, pa.uint16(), nullable=False), *fields])

    if record.kind in _JOINS:
        return {side.name: keyed(*(side.type.field(i) for i in range(side.type.num_fields))) for side in state}
    if record.kind in _LOGIC:
        unkeyed = {name for name, kind in record.parts if kind in ("elements", "union", "broadcast")}
        values = [field for field in list(state)[len(keys) :] if field.name not in unkeyed]
        return {value.name: keyed(*keys, pa.field(VALUE, value.type)) for value in values}
    if record.kind in _AGGREGATES:
        return {"window" if "windows" in record.settings else "agg": keyed(*state)}
    return {"table": keyed(*state)}

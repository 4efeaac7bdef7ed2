"""Aggregates in the next version of a program: which stay, come, go, get another name or a wider type."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.evolution import Change, Evolution, Former, converted, refusals
from cutwater.state.segments import GROUP_COLUMN, Segment

_Column: TypeAlias = Callable[[pa.RecordBatch], pa.Array]
"""Makes a column of the state from a batch of the former state."""


def aggregate_parts(aggregates: Sequence[Aggregate], schema: pa.Schema) -> dict[str, str]:
    """Descriptions of aggregates by name: two with the same text have the same state.

    >>> aggregate_parts([Aggregate("n", "count"), Aggregate("most", "max", "v")], pa.schema({"v": pa.int32()}))
    {'n': 'count()', 'most': 'max(v)'}
    """
    return {a.name: a.description(schema) for a in aggregates}


def evolve_aggregates(
    former: Former,
    state_schema: pa.Schema,
    aggregates: Sequence[Aggregate],
    input_schema: pa.Schema,
    renames: Mapping[tuple[str, ...], str],
) -> Evolution:
    """What becomes of the state of an earlier version.

    An aggregate that has its name keeps its meaning: function and column.  One that is gone goes on under a new name
    that means the same, or that ``renames`` gives (then its column may have another name, too); else it is dropped.
    What is new begins empty, also for keys that are known.

    Args:
        former: what the snapshot says of the state.
        state_schema: of this program: keys, what a window needs, then the aggregates.
        aggregates: of this program, as the state keeps them.
        input_schema: of the rows.
        renames: new names by ``(old name,)``.
    """
    before, now = former.parts, aggregate_parts(aggregates, input_schema)
    fields = {a.name: a.state_fields(input_schema) for a in aggregates}
    own = {f.name for of in fields.values() for f in of}
    reasons = _other_columns(former.schema, [f for f in state_schema if f.name not in own])
    origins, found = _origins(before, now, renames, reasons)
    columns: dict[str, _Column] = {}
    for aggregate in aggregates:
        origin = origins.get(aggregate.name)
        for position, field in enumerate(fields[aggregate.name]):
            if origin is None:
                columns[field.name] = _empty(aggregate, input_schema, position)
                continue
            source = origin + field.name.removeprefix(aggregate.name)
            columns[field.name] = partial(_taken, source, field)
            if former.schema.get_field_index(source) < 0:
                reasons.append(f"aggregate {aggregate.name!r}: the snapshot has no column {source!r}")
                continue
            was = former.schema.field(source).type
            why = list(refusals(was, field.type, {}, field.name))
            reasons += [f"aggregate {aggregate.name!r}: {reason}" for reason in why]
            if was != field.type and not why:
                found.append(Change("widened", field.name, f"from {was} to {field.type}"))
    wanted = [f.name for f in former.schema]
    same = wanted == state_schema.names and former.schema.types == state_schema.types and not found
    return Evolution(tuple(found), tuple(reasons), convert=None if same else _conversion(wanted, state_schema, columns))


def _other_columns(old: pa.Schema, fixed: list[pa.Field]) -> list[str]:
    """Why keys and what windows need are not as they were."""
    reasons: list[str] = []
    for field in fixed:
        if old.get_field_index(field.name) < 0:
            reasons.append(f"column {field.name!r} is new")
        elif old.field(field.name).type != field.type:
            reasons.append(f"column {field.name!r} was {old.field(field.name).type} and is {field.type}")
    return reasons


def _origins(
    before: Mapping[str, str], now: Mapping[str, str], renames: Mapping[tuple[str, ...], str], reasons: list[str]
) -> tuple[dict[str, str], list[Change]]:
    """Old names by new ones, and what is told of it; adds to the reasons."""
    origins: dict[str, str] = {}
    found: list[Change] = []
    for old, meaning in before.items():
        name = renames.get((old,), "")
        if name in now:
            if _function(now[name]) != _function(meaning):
                reasons.append(f"aggregate {old!r} was {meaning} and cannot become {name}={now[name]}")
            elif name in origins:
                reasons.append(f"two aggregates would be called {name!r}: {origins[name]!r} and {old!r}")
            origins[name] = old
            if name != old:
                found.append(Change("renamed", old, f"to {name}"))
            if now[name] != meaning:
                found.append(Change("changed", name, f"from {meaning} to {now[name]}, as you say"))
        elif old in now:
            origins.setdefault(old, old)
            if now[old] != meaning:
                reasons.append(f"aggregates: was {old}={meaning}, is {old}={now[old]}; another one needs another name")
    for old, meaning in before.items():
        if old in origins.values() or old in now:
            continue
        match = next((n for n, text in now.items() if text == meaning and n not in before and n not in origins), None)
        if match is None:
            found.append(Change("dropped", old, f"({meaning})"))
        else:
            origins[match] = old
            found.append(Change("renamed", old, f"to {match}"))
    added = (name for name in now if name not in origins)
    found += [Change("added", name, f"({now[name]}), empty for keys that are known") for name in added]
    return origins, found


def _function(meaning: str) -> str:
    return meaning.partition("(")[0]


def _taken(source: str, field: pa.Field, batch: pa.RecordBatch) -> pa.Array:
    """A column of the state, from another one."""
    return converted(batch.column(source), field.type, {})


def _empty(aggregate: Aggregate, input_schema: pa.Schema, position: int) -> _Column:
    """One column of the state of an aggregate that has seen nothing."""

    @cache
    def row() -> pa.Array:
        accumulator = aggregate.accumulator(input_schema)
        accumulator.reserve(1)
        return accumulator.state(np.zeros(1, np.int32))[position]

    return lambda batch: row().take(pa.array(np.zeros(batch.num_rows, np.int64)))


def _conversion(
    held: Collection[str], schema: pa.Schema, columns: Mapping[str, _Column]
) -> Callable[[Segment], Segment]:
    """Segments with the columns that this program has."""

    def convert(segment: Segment) -> Segment:
        batch = segment.batch
        if segment.kind == "delete" or not set(held) <= {*batch.schema.names}:
            return segment  # keys that went, or watermarks
        fields = [batch.schema.field(GROUP_COLUMN), *schema]
        arrays = [columns[f.name](batch) if f.name in columns else batch.column(f.name) for f in fields]
        return replace(segment, batch=pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields)))

    return convert

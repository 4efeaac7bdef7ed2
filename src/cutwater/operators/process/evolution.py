"""States of user logic in the next version of a program: of process functions, and of ``StatefulProcessor`` classes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import pyarrow as pa
import pyarrow.types as pt

from cutwater.data.rows import shorten_value
from cutwater.errors import StorageError
from cutwater.operators.evolution import (
    Change,
    Evolution,
    Former,
    Renames,
    changes,
    converted,
    element_type,
    refusals,
    through_list,
    through_map,
)
from cutwater.operators.process.states import VALUE
from cutwater.state.segments import GROUP_COLUMN, Segment


@dataclass(frozen=True)
class StateForm:
    """What a state is: its kind and how it is stored.

    Those that belong to no key (``elements``, ``union``, ``broadcast``) are stored element by element.
    """

    kind: str
    type: pa.DataType
    records: bool = False
    """Values are structs always."""

    @property
    def shape(self) -> str:
        """Which kinds are stored alike."""
        return {"reducing": "value"}.get(self.kind, self.kind)

    @property
    def parts(self) -> tuple[pa.DataType, pa.DataType, bool]:
        """Type of a key of a map (else null), of a value, and whether values expire."""
        if self.kind in ("elements", "union"):
            return pa.null(), self.type.value_type, False
        if self.kind == "broadcast":
            element = self.type.value_type
            return element.field("key").type, element.field("value").type, False
        return element_type(self.shape, self.type, records=self.records)


def evolve_states(
    former: Former,
    keys: list[pa.Field],
    states: Mapping[str, StateForm],
    renames: Mapping[tuple[str, ...], str],
    *,
    gives_up: Callable[[str], bool],
    hint: str,
) -> Evolution:
    """What becomes of the states of an earlier version.

    Args:
        former: what the snapshot says of them.
        keys: the key columns.
        states: those of this program, by name.
        renames: new names by ``(old state,)``, and by ``(old state, old column)``.
        gives_up: whether the program wants nothing more of a state of this name.
        hint: what to do where it does not say so; ``{name!r}`` in it is the state.
    """
    own, old = _without_keys(former.schema, keys)
    taken: dict[str, str] = {}
    found: list[Change] = []
    reasons: list[str] = [
        f"key column {key.name!r} was {was.type} and is {key.type}"
        for was, key in zip(own, keys, strict=False)
        if was.type != key.type
    ]
    dropped: list[str] = []
    converts: dict[str, Callable[[Segment], Segment]] = {}
    for name in old.names:
        now = name if name in states else renames.get((name,), name)
        if now not in states:
            if gives_up(name):
                dropped.append(name)
                found.append(Change("dropped", name, f"({former.rows.get(name, 0):,} rows)"))
            else:
                reasons.append(f"state {name!r} is gone; {hint.format(name=name)}")
            continue
        if now in taken.values():
            reasons.append(f"two states would be called {now!r}: {name!r} and another")
            continue
        taken[name] = now
        kind = former.parts.get(name) or _kind_of(old.field(name).type)
        was = StateForm(kind, old.field(name).type, states[now].records)
        columns = {path[1]: new for path, new in renames.items() if len(path) == 2 and path[0] == name}
        why = list(_state_refusals(was, states[now], columns))
        reasons += [f"state {now!r}: {reason}" for reason in why]
        if now != name:
            found.append(Change("renamed", name, f"to {now}"))
        if not why:
            found += _state_changes(was, states[now], columns, now)
            if was.type != states[now].type or now != name:
                converts[name] = partial(_convert_segment, now, _converter(was, states[now], columns))
    found += [Change("added", name) for name in states if name not in taken.values()]
    return Evolution(tuple(found), tuple(reasons), tuple(dropped), _on_segments(converts, dropped))


def _without_keys(schema: pa.Schema, keys: list[pa.Field]) -> tuple[list[pa.Field], pa.Schema]:
    """The key columns, which come first, and the states; one of these may be called like a key column."""
    fields = list(schema)
    width = next((i for i, (was, key) in enumerate(zip(fields, keys, strict=False)) if was.name != key.name), len(keys))
    return fields[:width], pa.schema(fields[width:])


def _on_segments(
    converts: Mapping[str, Callable[[Segment], Segment]], dropped: Collection[str]
) -> Callable[[Segment], Segment | None] | None:
    if not converts and not dropped:
        return None

    def convert(segment: Segment) -> Segment | None:
        if segment.name in dropped:
            return None
        made = converts.get(segment.name)
        return segment if made is None else made(segment)

    return convert


def _kind_of(stored: pa.DataType) -> str:
    """Of manifests that do not tell; they are of ``StatefulProcessor`` classes."""
    return "list" if pt.is_list(stored) else "map" if pt.is_map(stored) else "value"


def _state_refusals(old: StateForm, new: StateForm, columns: Renames) -> Iterator[str]:
    if old.shape != new.shape:
        yield f"it was stored as {old.type}, of the kind {old.kind!r}, and is a state of the kind {new.kind!r} now"
        return
    if old.type == new.type and not columns:
        return
    (old_key, old_value, expired), (key, value, expires) = old.parts, new.parts
    if old_key != key:
        yield f"its keys were {old_key} and are {key}: the keys of a map state stay as they are"
    if expired != expires:
        had, have = ("had a", "have none") if expired else ("had no", "have one")
        yield f"its values {had} time to live, and {have} now"
    else:
        yield from refusals(old_value, value, columns)


def _state_changes(old: StateForm, new: StateForm, columns: Renames, name: str) -> Iterator[Change]:
    if old.kind != new.kind:
        yield Change("changed", name, f"from a {old.kind} state to a {new.kind} state")
    yield from changes(old.parts[1], new.parts[1], columns, name)


def _converter(old: StateForm, new: StateForm, columns: Renames) -> Callable[[pa.Array], pa.Array]:
    """Of whole columns as they are stored."""
    value, expires = new.parts[1:]

    def one(values: pa.Array) -> pa.Array:
        return converted(values, value, columns)

    def stamped(values: pa.Array) -> pa.Array:
        kept = values
        fields = [pa.field("value", value), pa.field("expires_ms", pa.int64())]
        parts = [one(kept.field(0)), kept.field(1)]  # pyright: ignore[reportAttributeAccessIssue]
        return pa.StructArray.from_arrays(parts, fields=fields, mask=kept.is_null())

    each = stamped if expires else one
    if old.kind == "list":
        return lambda values: through_list(values, new.type, each)
    if old.kind == "map":
        return lambda values: through_map(values, new.type, each)
    if old.kind == "broadcast":
        return lambda values: converted(values, new.type.value_type, {})
    return each


def _convert_segment(name: str, convert: Callable[[pa.Array], pa.Array], segment: Segment) -> Segment:
    """The segment under its new name, its values converted."""
    position = segment.batch.schema.get_field_index(VALUE)
    if segment.kind == "delete" or position < 0:
        return replace(segment, name=name)
    values = segment.batch.column(position)
    try:
        made = convert(values)
    except ValueError as error:
        raise _misfit(name, convert, segment.batch, position, error) from None
    batch = segment.batch.set_column(position, pa.field(VALUE, made.type), made)
    return replace(segment, name=name, batch=batch)


def _misfit(
    name: str, convert: Callable[[pa.Array], pa.Array], batch: pa.RecordBatch, position: int, error: ValueError
) -> StorageError:
    """Names the first key whose value does not fit."""
    row = next(row for row in range(batch.num_rows) if not _fits(convert, batch.column(position).slice(row, 1)))
    names = [n for n in batch.schema.names[:position] if n != GROUP_COLUMN and not n.startswith("__")]
    key = {n: batch.column(n)[row].as_py() for n in names}
    return StorageError(
        f"state {name!r} of key {shorten_value(key)} does not fit its new schema: {error}",
        hint="Leave that column's type as it was.",
    )


def _fits(convert: Callable[[pa.Array], pa.Array], values: pa.Array) -> bool:
    try:
        convert(values)
    except ValueError:
        return False
    return True

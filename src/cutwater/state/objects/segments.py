"""Python objects by key as keyed segments, and back: what process functions keep, on its way to disk.

Segments that hold other columns, or types that do not convert, are a ``StorageError``.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from cutwater.data.python_values import column_values
from cutwater.state.key_index import GroupIds
from cutwater.state.objects.table import Chunk, FrozenObjects, FrozenRocksObjects, Key, KeyedObjects, RocksObjects
from cutwater.state.segments import GROUP_COLUMN, FrozenSegments, Segment, SegmentKind
from cutwater.state.table.keyed_segments import group_segments, keyed_rows


def object_segments(
    name: str,
    keys: Sequence[pa.Field],
    value: pa.Field,
    rows: Iterable[tuple[tuple[Any, ...], Any]],
    groups: int,
    kind: SegmentKind = "base",
) -> Iterator[Segment]:
    """Segments of a state: a row for each key and value.

    Args:
        value: the column of the values; a deletion has none.
        rows: keys, and values as Arrow takes them.
    """
    found, values = [], []
    for key, content in rows:
        found.append(key)
        values.append(content)
    fields = [*keys] if kind == "delete" else [*keys, value]

    def key_arrays(gids: GroupIds) -> list[pa.Array]:
        columns = zip(*(found[i] for i in gids), strict=True)
        return [pa.array(column, field.type) for column, field in zip(columns, keys, strict=True)]

    def arrays(gids: GroupIds) -> list[pa.Array]:
        if kind == "delete":
            return key_arrays(gids)
        return [*key_arrays(gids), pa.array([values[i] for i in gids], value.type)]

    order = np.arange(len(found), dtype=np.int32)
    return group_segments(name, pa.schema(fields), order, key_arrays, arrays, groups, kind, len(keys))


def _chunk_segments(name: str, keys: Sequence[pa.Field], value: pa.Field, chunks: Iterable[Chunk]) -> Iterator[Segment]:
    """Segments of a state that comes in the order of its key groups, one for each chunk.

    The first that holds rows of a group replaces what was there; another that begins in the middle of one adds to it.
    """
    fields = pa.schema([pa.field(GROUP_COLUMN, pa.uint16(), nullable=False), *keys, value])
    last = -1
    for chunk in chunks:
        columns = zip(zip(*chunk.keys, strict=True), keys, strict=True)
        arrays = [
            pa.array(chunk.groups, pa.uint16()),
            *(pa.array(column, field.type) for column, field in columns),
            pa.array(chunk.values, value.type),
        ]
        first = chunk.groups[0]
        kind = "delta" if first == last else "base"
        last = chunk.groups[-1]
        yield Segment(name, kind, pa.RecordBatch.from_arrays(arrays, schema=fields), (first, last + 1), len(keys))


def object_keys(segment: Segment, keys: Sequence[pa.Field], owned: range) -> Iterator[tuple[Any, ...]]:
    """The keys of a segment, as far as they lie in the owned key groups."""
    for batch in keyed_rows([replace(segment, kind="delta")], pa.schema(keys), owned):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def object_columns(
    segments: Iterable[Segment], keys: Sequence[pa.Field], value: pa.Field, owned: range
) -> Iterator[tuple[list[Any], list[Any]]]:
    """Bare keys and values that ``object_segments`` was given, as far as they lie in the owned key groups."""
    for batch in keyed_rows(segments, pa.schema([*keys, value]), owned):
        *of_keys, values = map(column_values, batch.columns)
        yield of_keys[0] if len(of_keys) == 1 else list(zip(*of_keys, strict=True)), values


def object_rows(
    segments: Iterable[Segment], keys: Sequence[pa.Field], value: pa.Field, owned: range
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Keys and values that ``object_segments`` was given, as far as they lie in the owned key groups."""
    for found, values in object_columns(segments, keys, value, owned):
        yield from zip(zip(found, strict=True) if len(keys) == 1 else found, values, strict=True)


def as_written(segments: Iterable[Segment], keys: Sequence[pa.Field], value: pa.Field) -> bool:
    """True if ``object_segments`` would write the same columns: else later ones must not build on these."""
    columns = [(field.name, field.type) for field in (*keys, value)]
    found = (list(zip(s.batch.schema.names, s.batch.schema.types, strict=True))[1:] for s in segments)
    return all(names_and_types in (columns, columns[:-1]) for names_and_types in found)


class RestoredObjects(Protocol):
    """A state that a restore fills."""

    @property
    def stored_type(self) -> pa.DataType:
        """Arrow type of one key's content in a snapshot."""
        ...

    @property
    def objects(self) -> KeyedObjects[Any]: ...

    def restore(self, keys: Sequence[Hashable], stored: Iterable[Any], /) -> None:
        """Set bare keys to what a snapshot held of them."""
        ...


def restore_objects(
    states: Mapping[str, RestoredObjects],
    segments: Iterable[Segment],
    keys: Sequence[pa.Field],
    value: str,
    owned: range,
) -> tuple[dict[str, list[Segment]], bool]:
    """Set states to what segments hold of them.

    Segments of a state that need not fit in memory are applied as they come, and are never all there.

    Returns:
        the other segments by name, and those of states in memory; whether this program would have written those that
        are not among them.
    """
    found: dict[str, list[Segment]] = {}
    known = True
    for segment in segments:
        state = states.get(segment.name)
        if state is None or not isinstance(state.objects, RocksObjects):
            found.setdefault(segment.name, []).append(segment)
            continue
        field = pa.field(value, state.stored_type)
        if segment.kind == "delete":
            for key in object_keys(segment, keys, owned):
                state.objects.remove(key)
        else:
            if segment.kind == "base" and segment.key_groups is not None:
                state.objects.remove_groups(range(*segment.key_groups))
            for part in object_columns([segment], keys, field, owned):
                state.restore(*part)
        known = as_written([segment], keys, field) and known
    for name, state in states.items():
        for part in object_columns(found.get(name, ()), keys, pa.field(value, state.stored_type), owned):
            state.restore(*part)
    return found, known


@dataclass(frozen=True)
class FrozenPart:
    """One state of user logic at one instant.

    Args:
        value: the column of the values.
        objects: what was frozen; released with the part.
        rows: rows, as Arrow takes them, from keys and what the table holds of them: none, one or several for each.
        several: whether a key may have more than one row.
    """

    name: str
    keys: Sequence[pa.Field]
    value: pa.Field
    objects: FrozenObjects[Any]
    rows: Callable[[Iterable[tuple[Key, Any]]], Iterable[tuple[Key, Any]]]
    groups: int
    several: bool = False

    def segments(self) -> Iterator[Segment]:
        """All keys; what lies on disk a chunk at once."""
        if isinstance(self.objects, FrozenRocksObjects):
            return _chunk_segments(self.name, self.keys, self.value, self.objects.chunks())
        return object_segments(self.name, self.keys, self.value, self.rows(self.objects.items()), self.groups)

    def changes(self, changed: Mapping[Key, Any]) -> Iterator[Segment]:
        """The keys that changed: without what they had, where that is not replaced, and with what they have."""
        gone = ((key, None) for key, value in changed.items() if value is None or self.several)
        yield from object_segments(self.name, self.keys, self.value, gone, self.groups, "delete")
        kept = self.rows((key, value) for key, value in changed.items() if value is not None)
        yield from object_segments(self.name, self.keys, self.value, kept, self.groups, "delta")


class FrozenObjectStates(FrozenSegments):
    """States and timers of an operator at one instant.

    Args:
        more: what is written whole each time; under each name, the first segment is a base.
    """

    def __init__(self, parts: Sequence[FrozenPart], more: Sequence[Callable[[], Iterable[Segment]]]) -> None:
        super().__init__()
        self._parts, self._more = parts, more

    def segments(self, *, unsorted: bool = False) -> Iterator[Segment]:
        for part in self._parts:
            yield from part.segments()
        for make in self._more:
            yield from make()

    @property
    def incremental(self) -> bool:
        return any(part.objects.tracked for part in self._parts)

    def changes(self, since: int) -> Iterator[Segment] | None:
        found = [(part, part.objects.changed(since)) for part in self._parts]
        known = [(part, changed) for part, changed in found if changed is not None]
        most = 2 * sum(len(changed) for _, changed in known) > sum(part.objects.size for part in self._parts)
        return None if most or len(known) < len(found) else self._changes(known)

    def _changes(self, changed: list[tuple[FrozenPart, Mapping[Key, Any]]]) -> Iterator[Segment]:
        for part, of_part in changed:
            yield from part.changes(of_part)
        for make in self._more:
            yield from make()

    def release(self) -> None:
        for part in self._parts:
            part.objects.release()
        self._parts, self._more = (), ()

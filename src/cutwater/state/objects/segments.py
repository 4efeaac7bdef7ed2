"""Python objects by key as keyed segments, and back: what process functions keep, on its way to disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from cutwater.state.index.key_index import Slots
from cutwater.state.objects.on_disk import Chunk, FrozenRocksObjects
from cutwater.state.objects.table import FrozenObjects, Key
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
        name: of the state.
        keys: the key columns.
        value: the column of the values; a deletion has none.
        rows: keys, and values as Arrow takes them.
        groups: number of all key groups.
        kind: of the segments.
    """
    found, values = [], []
    for key, content in rows:
        found.append(key)
        values.append(content)
    fields = [*keys] if kind == "delete" else [*keys, value]

    def key_arrays(slots: Slots) -> list[pa.Array]:
        columns = zip(*(found[i] for i in slots), strict=True)
        return [pa.array(column, field.type) for column, field in zip(columns, keys, strict=True)]

    def arrays(slots: Slots) -> list[pa.Array]:
        if kind == "delete":
            return key_arrays(slots)
        return [*key_arrays(slots), pa.array([values[i] for i in slots], value.type)]

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
    """The keys of a segment, as far as they lie in the owned key groups.

    Raises:
        StorageError: it holds other key columns, or types that do not convert.
    """
    for batch in keyed_rows([replace(segment, kind="delta")], pa.schema(keys), owned):
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)


def object_rows(
    segments: Iterable[Segment], keys: Sequence[pa.Field], value: pa.Field, owned: range
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What ``object_segments`` was given, as far as it lies in the owned key groups.

    Raises:
        StorageError: the segments hold other columns, or types that do not convert.
    """
    for batch in keyed_rows(segments, pa.schema([*keys, value]), owned):
        yield from zip(
            zip(*(c.to_pylist() for c in batch.columns[:-1]), strict=True), batch.columns[-1].to_pylist(), strict=True
        )


def as_written(segments: Iterable[Segment], keys: Sequence[pa.Field], value: pa.Field) -> bool:
    """Whether ``object_segments`` would write the same columns: else later ones must not build on these."""
    columns = [(field.name, field.type) for field in (*keys, value)]
    found = (list(zip(s.batch.schema.names, s.batch.schema.types, strict=True))[1:] for s in segments)
    return all(names_and_types in (columns, columns[:-1]) for names_and_types in found)


@dataclass(frozen=True)
class FrozenPart:
    """One state of user logic at one instant.

    Args:
        name: of the state.
        keys: the key columns.
        value: the column of the values.
        objects: what was frozen; released with the part.
        rows: rows, as Arrow takes them, from keys and what the table holds of them: none, one or several for each.
        groups: number of all key groups.
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
        parts: states by key.
        more: what is written whole each time; under each name, the first segment is a base.
    """

    def __init__(self, parts: Sequence[FrozenPart], more: Sequence[Callable[[], Iterable[Segment]]]) -> None:
        super().__init__()
        self._parts, self._more = parts, more

    def segments(self, *, loose: bool = False) -> Iterator[Segment]:
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

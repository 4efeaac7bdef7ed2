"""Rows of keyed state as segments, sorted by key group, and what a restore has to apply of segments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cutwater.errors import StorageError
from cutwater.state import column_kernels as kernels
from cutwater.state.key_index import GroupIds, KeyIndex, NullableIndex
from cutwater.state.keys import hash_keys, key_groups
from cutwater.state.segments import GROUP_COLUMN, Frozen, Segment, SegmentKind
from cutwater.state.table.changes import Changed, Deleted
from cutwater.state.table.keyed_table import KeyedTable
from cutwater.state.table.spill import Spill

_HASHED_ROWS = 1 << 16


def groups_of(
    rows: int, keys: Callable[[slice], list[pa.Array]], max_parallelism: int
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.int32]]:
    """The key group of each row, and the order that sorts them, rows of one group as they were.

    >>> keys = pa.array([2, 2, 5])
    >>> groups, order = groups_of(3, lambda rows: [keys[rows]], 128)
    >>> groups.tolist(), order.tolist()
    ([75, 75, 49], [2, 0, 1])
    """
    groups: npt.NDArray[np.uint16] = np.empty(rows, np.uint16)
    for begin in range(0, rows, _HASHED_ROWS):  # in pieces: the stream wants the interpreter in between
        part = slice(begin, begin + _HASHED_ROWS)
        groups[part] = key_groups(hash_keys(keys(part)), max_parallelism)
    order: npt.NDArray[np.int32] = np.empty(rows, np.int32)
    kernels.order_by_group(groups, np.zeros(max_parallelism + 1, np.int64), order)
    return groups, order


def in_groups(batch: pa.RecordBatch, columns: int, max_parallelism: int) -> pa.RecordBatch:
    """The rows sorted by key group, which becomes their first column: the hash of the first ``columns`` decides.

    >>> batch = in_groups(pa.record_batch({"key": [2, 5]}), 1, 128)
    >>> batch.to_pydict()
    {'__key_group': [49, 75], 'key': [5, 2]}
    """
    groups, order = groups_of(batch.num_rows, lambda rows: _key_slices(batch, columns, rows), max_parallelism)
    fields = pa.schema([pa.field(GROUP_COLUMN, pa.uint16(), nullable=False), *batch.schema])
    grouped = pa.RecordBatch.from_arrays([pa.array(groups), *batch.columns], schema=fields)
    return pc.take(grouped, pa.array(order), boundscheck=False)


def _key_slices(batch: pa.RecordBatch, columns: int, rows: slice) -> list[pa.Array]:
    return [column.slice(rows.start, rows.stop - rows.start) for column in batch.columns[:columns]]


_SEGMENT_ROWS = 1 << 18
_CHANGED = "Give the changed step a new id, or restore with the program that wrote the snapshot."
_FEW_ROWS = 1 << 10
"""May be in memory after a restore, whatever the budget."""


def group_segments(
    name: str,
    schema: pa.Schema,
    gids: GroupIds,
    keys: Callable[[GroupIds], list[pa.Array]],
    rows: Callable[[GroupIds], list[pa.Array]],
    max_parallelism: int,
    kind: SegmentKind = "base",
    identity: int = 0,
    whole: range | None = None,
) -> Iterator[Segment]:
    """Segments of the given group ids, sorted by key group and cut between groups; or one that is unsorted.

    Where a string column of a base would exceed the 2 GB that Arrow allows, the rest follows as deltas.

    Args:
        schema: fields of ``rows``; the segments have ``GROUP_COLUMN`` before them.
        keys: key columns of some group ids, whose hash decides the group.
        identity: so many of the first columns tell the rows apart, whose order says nothing then.
        whole: the segment may be unsorted, if there is only one.  The group ids are the whole state of these key
            groups, and ``keys`` are the columns of the identity.
    """
    if len(gids) == 0:
        return
    if whole is not None and len(gids) <= _SEGMENT_ROWS:
        try:
            batch = pa.RecordBatch.from_arrays(rows(gids), schema=schema)
        except pa.ArrowInvalid:
            pass  # too large for one batch
        else:
            unsorted = (identity, max_parallelism)
            yield Segment(name, kind, batch, (whole.start, whole.stop), identity, ungrouped=unsorted)
            return
    fields = pa.schema([pa.field(GROUP_COLUMN, pa.uint16(), nullable=False), *schema])
    groups, order = groups_of(len(gids), lambda part: keys(gids[part]), max_parallelism)
    if len(gids) <= _SEGMENT_ROWS:  # in the order of the group ids, which memory likes, and sorted as a batch
        try:
            batch = pa.RecordBatch.from_arrays([pa.array(groups), *rows(gids)], schema=fields)
            batch = pc.take(batch, pa.array(order), boundscheck=False)
        except pa.ArrowInvalid:
            pass  # too large for one batch
        else:
            covered = (int(groups[order[0]]), int(groups[order[-1]]) + 1)
            yield Segment(name, kind, batch, covered, identity)
            return
    yield from _cut(name, fields, gids[order], groups[order], rows, kind, identity)


def _cut(
    name: str,
    fields: pa.Schema,
    gids: GroupIds,
    groups: npt.NDArray[np.uint16],
    rows: Callable[[GroupIds], list[pa.Array]],
    kind: SegmentKind,
    identity: int,
) -> Iterator[Segment]:
    """The segments of many sorted group ids."""
    begin = 0
    while begin < len(gids):
        end = min(begin + _SEGMENT_ROWS, len(gids))
        end = int(np.searchsorted(groups, groups[end - 1], side="right"))
        covered = (int(groups[begin]), int(groups[end - 1]) + 1)
        piece = kind
        for first, arrays in _in_pieces(gids, begin, end, rows):
            of_rows = pa.array(groups[first : first + len(arrays[0])])
            batch = pa.RecordBatch.from_arrays([of_rows, *arrays], schema=fields)
            yield Segment(name, piece, batch, covered, identity)
            piece = "delta" if kind == "base" else kind  # the first replaces what was there, the others add to it
        begin = end


def _in_pieces(
    gids: GroupIds, begin: int, end: int, rows: Callable[[GroupIds], list[pa.Array]]
) -> Iterator[tuple[int, list[pa.Array]]]:
    """The rows in as few batches as they fit: a string column holds no more than 2 GB."""
    try:
        arrays = rows(gids[begin:end])
    except pa.ArrowInvalid:
        if end - begin == 1:
            raise
    else:
        yield begin, arrays
        return
    middle = (begin + end) // 2
    yield from _in_pieces(gids, begin, middle, rows)
    yield from _in_pieces(gids, middle, end, rows)


def deleted_segments(
    name: str,
    schema: pa.Schema,
    deleted: Iterable[Deleted],
    keys: Callable[[list[pa.Array]], list[pa.Array]],
    max_parallelism: int,
    identity: Callable[[list[pa.Array]], list[pa.Array]] = list,
) -> Iterator[Segment]:
    """Segments of keys that went.

    Args:
        schema: fields that identify a row.
        deleted: group ids of indexes that still hold the keys.
        keys: key columns among those of the index, whose hash decides the group.
    """
    for gone in deleted:
        columns = gone.index.columns

        def key_columns(gids: GroupIds, columns: Callable[[GroupIds], list[pa.Array]] = columns) -> list[pa.Array]:
            return keys(columns(gids))

        def rows(gids: GroupIds, columns: Callable[[GroupIds], list[pa.Array]] = columns) -> list[pa.Array]:
            return identity(columns(gids))

        yield from group_segments(name, schema, gone.gids, key_columns, rows, max_parallelism, "delete")


def keyed_rows(segments: Iterable[Segment], schema: pa.Schema, owned: range) -> list[pa.RecordBatch]:
    """The batches that a restore has to apply, in order: the columns of ``schema``, rows of the owned key groups only.

    A later base segment replaces what came before it in its key groups, and a deletion takes away the rows of its keys
    that came before it; deltas are to be applied by key.

    Raises:
        StorageError: a segment lacks a column, or holds it in a type that does not convert.
    """
    parts: list[_Part] = []
    for segment in segments:
        if segment.kind == "base" and segment.key_groups is not None:
            parts = [part for old in parts for part in _outside(old, segment.key_groups)]
        groups = segment.batch.column(GROUP_COLUMN).to_numpy()
        inside = slice(*(int(i) for i in np.searchsorted(groups, [owned.start, owned.stop])))
        if inside.stop > inside.start:
            batch = segment.batch.slice(inside.start, inside.stop - inside.start)
            names = [name for name in batch.schema.names if name != GROUP_COLUMN]
            fields = schema if segment.kind != "delete" else pa.schema([schema.field(name) for name in names])
            parts.append(_Part(segment.kind, groups[inside], _conform(batch, fields, segment.name)))
    return _without_deleted(parts)


class RestoredRows(Protocol):
    """Rows by key that a restore sets, some of them perhaps on disk."""

    @property
    def spill(self) -> Spill[Any] | None:
        """The mover of rows to disk, if anything does."""
        ...

    def __len__(self) -> int: ...

    def expect(self, keys: int) -> None:
        """Have room for so many keys at once, if there are none yet."""
        ...

    def make_room(self) -> object:
        """Move rows to disk if there are too many, a part at a time; nobody holds group ids."""
        ...


def restore_rows(
    table: RestoredRows,
    segments: Iterable[Segment],
    schema: pa.Schema,
    owned: range,
    index: Callable[[list[pa.Array]], list[pa.Array]] = list,
) -> Iterator[pa.RecordBatch]:
    """The rows to set in a table, one batch after the other.

    Segments are applied as they come and are never all in memory: always if the table keeps rows on disk, else up to
    the first of which later ones may take rows away.

    Args:
        segments, schema, owned: as in ``keyed_rows``.
        index: the columns of the table's index, from those that identify a row that went.
    """
    spill = table.spill
    if spill is None:
        waiting: list[Segment] = []
        for segment in segments:
            if waiting or not segment.to_come:
                waiting.append(segment)
                continue
            table.expect(segment.to_come)
            yield from keyed_rows([segment], schema, owned)
        batches = keyed_rows(waiting, schema, owned)
        table.expect(sum(batch.num_rows for batch in batches))
        yield from batches
        return
    for segment in segments:
        if segment.kind == "delete":
            keys = pa.schema([schema.field(name) for name in segment.batch.schema.names if name != GROUP_COLUMN])
            for batch in keyed_rows([replace(segment, kind="delta")], keys, owned):
                spill.remove(index(batch.columns))
            continue
        if segment.kind == "base" and segment.key_groups is not None:
            spill.remove_groups(range(*segment.key_groups))
        yield from keyed_rows([replace(segment, kind="delta")], schema, owned)
        while spill.busy or (spill.full and len(table) > _FEW_ROWS):
            table.make_room()


def _without_deleted(parts: list[_Part]) -> list[pa.RecordBatch]:
    """The rows whose keys are not deleted later, in batches that have some."""
    kept: list[pa.RecordBatch] = []
    deleted: KeyIndex | None = None
    keys: list[str] = []
    for part in reversed(parts):
        if part.kind == "delete":
            keys = part.batch.schema.names
            deleted = deleted or NullableIndex(part.batch.schema.types)
            deleted.upsert(part.batch.columns)
            continue
        batch = part.batch
        if deleted is not None:
            gone = deleted.find([batch.column(name) for name in keys]) >= 0
            if gone.all():
                continue
            batch = batch.filter(pa.array(~gone)) if gone.any() else batch
        kept.append(batch)
    return kept[::-1]


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of a segment, sorted by key group, and the group of each."""

    kind: SegmentKind
    groups: npt.NDArray[np.uint16]
    batch: pa.RecordBatch


def _outside(part: _Part, covered: tuple[int, int]) -> Iterator[_Part]:
    if part.groups[-1] < covered[0] or covered[1] <= part.groups[0]:
        yield part
        return
    lo, hi = (int(i) for i in np.searchsorted(part.groups, covered))
    for start, stop in ((0, lo), (hi, len(part.groups))):
        if stop > start:
            yield _Part(part.kind, part.groups[start:stop], part.batch.slice(start, stop - start))


def _conform(batch: pa.RecordBatch, schema: pa.Schema, name: str) -> pa.RecordBatch:
    missing = [field.name for field in schema if batch.schema.get_field_index(field.name) < 0]
    if missing:
        raise StorageError(
            f"state {name!r} in the snapshot has no column {missing[0]!r}, only {', '.join(batch.schema.names)}",
            hint=_CHANGED,
        )
    columns = [batch.column(field.name) for field in schema]
    try:
        arrays = [column.cast(field.type) for column, field in zip(columns, schema, strict=True)]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise StorageError(
            f"state {name!r} in the snapshot does not convert to this program's types: {error}", hint=_CHANGED
        ) from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class FrozenTable:
    """Segments of frozen tables, which are complete when they are made, and released with them.

    Args:
        tables: the frozen tables.
        make: all segments, some of them ``unsorted`` where that is asked for, and each table is one of its parts; or
            those of changed group ids and of keys that went, by table, where the tables keep track.
    """

    def __init__(self, tables: Sequence[KeyedTable[Any]], make: Callable[..., Iterable[Segment]]) -> None:
        self._tables, self._make = tables, make

    def segments(self, *, unsorted: bool = False) -> Iterator[Segment]:
        self._complete()
        yield from self._make(unsorted=unsorted and all(table.spilled is None for table in self._tables))

    def _complete(self) -> None:
        for table in self._tables:
            table.complete()

    @property
    def incremental(self) -> bool:
        return all(table.tracked for table in self._tables)

    def changes(self, since: int) -> Iterator[Segment] | None:
        """The changes of all tables, if it is known of all, and is not most of what they hold together."""
        found = [changed for table in self._tables if (changed := table.changed(since)) is not None]
        if len(found) < len(self._tables):
            return None
        changes = sum(table.changed_rows(part) for table, part in zip(self._tables, found, strict=True))
        most = 2 * changes > sum(table.all_rows for table in self._tables)
        for table in self._tables:
            table.learn(most_changed=most)
        if most:
            return None
        self._complete()
        return iter(self._make(*found))

    def release(self) -> None:
        for table in self._tables:
            table.release()
        self._make = lambda *_, **__: ()


def freeze_table(
    table: KeyedTable[Any],
    checkpoint_id: int,
    name: str,
    schema: pa.Schema,
    owned: range,
    max_parallelism: int,
    before: Sequence[Segment] = (),
) -> Frozen:
    """A table whose index is all of the key, as it is now.

    Args:
        schema: the key columns, then what is kept of each key.
        before: segments that come first in the snapshot.
    """
    frozen, keys = table.frozen(checkpoint_id), len(table.index.types)

    def segments(changed: Changed | None = None, unsorted: bool = False) -> Iterator[Segment]:
        whole = owned if unsorted else None
        yield from before
        if changed is not None:
            identity = pa.schema(list(schema)[:keys])
            yield from deleted_segments(name, identity, changed.deleted, list, max_parallelism)
        for part, gids, kind in frozen.parts(changed):
            of, rows = part.index.columns, part.rows
            yield from group_segments(name, schema, gids, of, rows, max_parallelism, kind, keys, whole)

    return FrozenTable([frozen], segments)


def restore_table(table: KeyedTable[Any], segments: Iterable[Segment], schema: pa.Schema, owned: range) -> None:
    """Set rows of a table whose index is all of the key; see ``restore_rows``."""
    keys = len(table.index.types)
    for batch in restore_rows(table, segments, schema, owned):
        table.restore(batch.columns[:keys], batch.columns[keys:])


def restore_tables(
    tables: Mapping[str, RestoredRows],
    segments: Iterable[Segment],
    schema: pa.Schema,
    owned: range,
    index: Callable[[list[pa.Array]], list[pa.Array]],
) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The name of a state and the rows to set of it, for tables by the names of their states; see ``restore_rows``."""
    waiting: dict[str, list[Segment]] = {name: [] for name in tables}
    for segment in segments:
        table = tables.get(segment.name)
        if table is None:
            continue
        if table.spill is None:
            waiting[segment.name].append(segment)
            continue
        for batch in restore_rows(table, [segment], schema, owned, index):
            yield segment.name, batch
    for name, table in tables.items():
        for batch in restore_rows(table, waiting[name], schema, owned, index):
            yield name, batch

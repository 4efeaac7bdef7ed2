"""Snapshots of tables by key: segments of what was frozen, and tables set to what segments hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from cutwater.state.segments import Frozen, Segment
from cutwater.state.table.changes import Changed
from cutwater.state.table.keyed_segments import RestoredRows, deleted_segments, group_segments, restore_rows
from cutwater.state.table.keyed_table import KeyedTable


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
        yield from self._make(unsorted=unsorted and all(table.in_memory for table in self._tables))

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
        table: to freeze.
        checkpoint_id: what the freeze is for.
        name: of the state.
        schema: the key columns, then what is kept of each key.
        owned: key groups of the subtask.
        max_parallelism: number of all key groups.
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

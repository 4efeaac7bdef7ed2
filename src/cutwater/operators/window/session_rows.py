"""What a session consists of, and the snapshots of sessions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from cutwater.data.words import from_words
from cutwater.operators.aggregate.keyed_table import KeyedTable
from cutwater.state.index.key_index import KeyIndex, Slots
from cutwater.state.index.nullable import NullableIndex
from cutwater.state.segments import Segment, SegmentKind
from cutwater.state.table.changes import Changed, Deleted
from cutwater.state.table.keyed_segments import group_segments
from cutwater.state.table.spill import FrozenSpill

if TYPE_CHECKING:
    from cutwater.operators.window.session_keys import SessionKeys
    from cutwater.operators.window.spec import WindowAggregateSpec


class Book(IntEnum):
    """Books of the table: what there is of a session besides its key and values."""

    STARTS = 0
    ENDS = 1
    PENDING = 2
    """Rows that have not come out."""
    ALIVE = 3
    FIRED = 4
    ANCHORS = 5
    """The anchor of the key plus one; 0: it is the anchor."""


BOOKS = (np.int64, np.int64, np.int64, np.bool_, np.bool_, np.int32)
"""Their types."""


def anchors_of(table: KeyedTable, slots: Slots) -> Slots:
    """The anchor of each slot's key, which may be the slot itself."""
    anchors = table.book(Book.ANCHORS)[slots]
    return np.where(anchors > 0, anchors - 1, slots).astype(np.int32)


def state_rows(spec: WindowAggregateSpec, table: KeyedTable, slots: Slots) -> list[pa.Array]:
    """The columns of ``spec.state_schema`` for some slots, which are live sessions."""
    _, *columns = table.rows(slots)
    width = len(spec.keys)
    borders = [from_words(table.book(side)[slots], spec.time_type) for side in (Book.STARTS, Book.ENDS)]
    window = [*borders, pa.array(table.book(Book.FIRED)[slots])]
    if spec.early is not None:
        window.append(pa.array(table.book(Book.PENDING)[slots]))
    return [*columns[:width], *window, *columns[width:]]


class FrozenSessions:
    """Sessions at one instant, for another thread.

    A change is one of a whole key: an increment takes all rows of the key away, and has those that there are now.

    Args:
        spec: of the windows.
        table: the frozen table.
        keys: all keys in memory, and how rows of disk become a table, where some lie there.
    """

    def __init__(
        self,
        spec: WindowAggregateSpec,
        table: KeyedTable,
        keys: tuple[KeyIndex, Callable[[Sequence[pa.Array], Sequence[pa.Array]], SessionKeys]] | None,
    ) -> None:
        self._spec, self._table, self._keys = spec, table, keys
        self._width = len(spec.keys)

    def segments(self, name: str, groups: int, changed: Changed | None = None) -> Iterator[Segment]:
        """All segments, or those of what changed; see ``MakeSegments``."""
        if changed is None:
            for table, slots, kind in self._parts():
                yield from self._write(name, groups, table, slots, kind)
            return
        for deleted in changed.deleted:
            yield from self._without(name, groups, deleted)
        for page in self._journal(changed.epoch):
            yield from self._without(name, groups, Deleted(page.index, _all_slots(page)))
            yield from self._write(name, groups, page.table, _all_slots(page.table), "delta")
        table, every = self._table, _all_slots(self._table)
        anchors = anchors_of(table, every)
        of_changed = np.zeros(len(table), np.bool_)
        of_changed[anchors[changed.slots]] = True
        yield from self._without(name, groups, Deleted(table.index, np.flatnonzero(of_changed).astype(np.int32)))
        yield from self._write(name, groups, table, every[table.book(Book.ALIVE)[every] & of_changed[anchors]], "delta")

    def _write(self, name: str, groups: int, table: KeyedTable, slots: Slots, kind: SegmentKind) -> Iterator[Segment]:
        rows = partial(state_rows, self._spec, table)
        return group_segments(name, self._spec.state_schema, slots, self._keys_in(table.index), rows, groups, kind)

    def _without(self, name: str, groups: int, deleted: Deleted) -> Iterator[Segment]:
        schema, keys = pa.schema(list(self._spec.state_schema)[: self._width]), self._keys_in(deleted.index)
        return group_segments(name, schema, deleted.slots, keys, keys, groups, "delete")

    def _keys_in(self, index: KeyIndex) -> Callable[[Slots], list[pa.Array]]:
        """The key columns of some slots: sessions have a number before them."""
        return lambda slots: index.columns(slots)[-self._width :]

    # -- what lies on disk

    def _parts(self) -> Iterator[tuple[KeyedTable, Slots, SegmentKind]]:
        """Tables and slots to write one after the other; see ``KeyedTable.parts``."""
        table, spilled = self._table, self._table.spilled
        slots = np.flatnonzero(table.book(Book.ALIVE)[: len(table)]).astype(np.int32)
        if self._keys is None or spilled is None:
            yield table, slots, "base"
            return
        in_memory, make_page = self._keys
        groups = spilled.group_of(self._keys_in(table.index)(slots)) if len(slots) else np.empty(0, np.uint16)
        order = np.argsort(groups, kind="stable")
        slots, groups = slots[order], groups[order]
        newer = _copy(in_memory)
        for chunk in spilled.rows.chunks():
            only = pa.array(newer.find(chunk.keys) < 0)
            page = make_page(*([column.filter(only) for column in part] for part in (chunk.keys, chunk.values)))
            here = int(np.searchsorted(groups, chunk.until))
            if here:
                page.add(state_rows(self._spec, table, slots[:here]))
                slots, groups = slots[here:], groups[here:]
            yield page.table, _all_slots(page.table), "delta" if chunk.goes_on else "base"
        yield table, slots, "base"

    def _journal(self, epoch: int) -> Iterator[SessionKeys]:
        """What left memory after it had changed, one after the other: a key replaces what came of it before."""
        spilled: FrozenSpill | None = self._table.spilled
        if self._keys is None or spilled is None:
            return
        for chunk in spilled.rows.journal(epoch):
            slots = NullableIndex([key.type for key in chunk.keys]).upsert(chunk.keys)
            latest = np.empty(int(slots.max()) + 1, np.int64)
            latest[slots] = np.arange(len(slots))  # a key may have left in several epochs: the last one counts
            rows = pa.array(latest)
            yield self._keys[1](*([column.take(rows) for column in part] for part in (chunk.keys, chunk.values)))


def _all_slots(table: KeyedTable | SessionKeys) -> Slots:
    return np.arange(len(table), dtype=np.int32)


def _copy(index: KeyIndex) -> KeyIndex:
    """The keys of a frozen index in one that finds them."""
    copy = NullableIndex(index.types, len(index))
    if len(index):
        copy.upsert(index.columns(np.arange(len(index), dtype=np.int32)))
    return copy

"""The columnar table of a keyed step: an index and an accumulator per aggregate, and their way to disk and back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.errors import StorageError
from cutwater.operators.accumulators import Accumulator, Aggregate, make_accumulator
from cutwater.state.capture import Capture, Captures
from cutwater.state.changes import ChangeLog, Changes, Deleted
from cutwater.state.index import KeyIndex, Slots
from cutwater.state.intervals import RESTORED
from cutwater.state.keys import hash_keys, key_groups
from cutwater.state.memory import GrowingArray, Values
from cutwater.state.nullable_index import NullableIndex
from cutwater.state.segments import GROUP_COLUMN, FrozenSegments, Segment, SegmentKind

__all__ = ["Changed", "FrozenTable", "KeyedTable", "deleted_segments", "group_segments", "keyed_rows"]

_SEGMENT_ROWS = 1 << 18
_HASHED_ROWS = 1 << 16

Changed: TypeAlias = tuple[Slots, tuple[Deleted, ...]]
"""Slots that changed, and keys that went."""


class KeyedTable:
    """Slots by key, and what each aggregate holds of them.

    Args:
        key_types: types of the index columns.
        aggregates: the aggregates, over rows of ``schema``.
        expected: number of keys to make room for at once.
        books: types of further columns by slot, which are the caller's; zero for a new slot.
    """

    def __init__(
        self,
        key_types: Sequence[pa.DataType],
        aggregates: Sequence[Aggregate],
        schema: pa.Schema,
        expected: int = 0,
        books: Sequence[npt.DTypeLike] = (),
    ) -> None:
        self.index: KeyIndex = NullableIndex(key_types, expected)
        self.accumulators: list[Accumulator] = [make_accumulator(a, schema) for a in aggregates]
        self._state_widths = [len(a.state_fields(schema)) for a in aggregates]
        self._books = [GrowingArray(kind) for kind in books]
        self._frozen_books: list[Values] | None = None
        self._captures = Captures()
        self._capture: Capture | None = None
        self._log: ChangeLog | None = None
        self._changes: Changes | None = None

    def __len__(self) -> int:
        return len(self.index)

    def upsert(self, keys: Sequence[pa.Array]) -> Slots:
        """Slots of the rows; the accumulators are ready for them, and for changes of them."""
        known = len(self.index)
        slots = self.index.upsert(keys)
        if len(self.index) > known:
            for accumulator in self.accumulators:
                accumulator.reserve(len(self.index))
            self.reserve_books(len(self.index))
            self._captures.prepare(self._columns, len(self.index))
        self.touch(slots)
        return slots

    @property
    def _columns(self) -> list[GrowingArray]:
        return [*(column for accumulator in self.accumulators for column in accumulator.columns), *self._books]

    def book(self, number: int) -> Values:
        """A further column; another array after slots were added.  ``touch`` slots before changing it."""
        return self._books[number].values if self._frozen_books is None else self._frozen_books[number]

    def reserve_books(self, slots: int) -> None:
        """Have room for these slots, some of which may not be in the index yet."""
        for book in self._books:
            book.reserve(slots)

    def touch(self, slots: Slots) -> None:
        """The state of these slots is about to change.  ``upsert`` says so of the slots that it returns."""
        self._captures.preserve(slots)
        if self._log is not None:
            self._log.mark(slots, len(self.index))

    @property
    def capturing(self) -> bool:
        """Whether a freeze may be reading the columns: then all that changes must be touched first."""
        return self._captures.open

    def track(self, *, restored: bool = False) -> None:
        """Keep track of changes from now (after a restore) or from the next freeze on: a frozen table tells them."""
        self._log = ChangeLog(RESTORED if restored else None)

    def delete(self, slots: Slots) -> None:
        """The keys of these slots are gone: nobody asks for them again before ``keep`` leaves them out."""
        if self._log is not None:
            self._log.delete(self.index.frozen(), slots)

    def restore(self, keys: Sequence[pa.Array], state: Sequence[pa.Array]) -> Slots:
        """Set rows to what ``state`` returned for them."""
        slots = self.upsert(keys)
        position = 0
        for accumulator, width in zip(self.accumulators, self._state_widths, strict=True):
            accumulator.restore(slots, list(state[position : position + width]))
            position += width
        return slots

    def rows(self, slots: Slots) -> list[pa.Array]:
        """Index columns and state columns of some slots."""
        state = [array for accumulator in self.accumulators for array in accumulator.state(slots)]
        return [*self.index.columns(slots), *state]

    def keep(self, slots: Slots) -> None:
        """Forget all slots but these, which become 0, 1, 2 ..."""
        kept = NullableIndex(self.index.types, len(slots))
        if len(slots):
            kept.upsert(self.index.columns(slots))
        self.index = kept
        for accumulator in self.accumulators:
            accumulator.keep(slots)
        for book in self._books:
            book.replace(book.values[slots])
        self._captures.abandon_columns()
        if self._log is not None:
            self._log.keep(slots)

    def frozen(self, checkpoint_id: int | None = None) -> KeyedTable:
        """The table as it is now, for ``rows`` in another thread, which must call ``complete`` first.

        Copies nothing: see ``cutwater.state.capture``.  ``release`` it when it is no longer read.

        Args:
            checkpoint_id: what the freeze is for, where changes are kept track of.
        """
        copy = object.__new__(KeyedTable)
        copy.index, copy._state_widths, copy._captures = self.index.frozen(), self._state_widths, self._captures
        copy._capture = self._captures.begin(self._columns, len(self.index))
        copy._log = self._log
        copy._changes = None if self._log is None or checkpoint_id is None else self._log.cut(checkpoint_id)
        copies = iter(copy._capture.copies)
        copy.accumulators = [a.frozen(list(itertools.islice(copies, len(a.columns)))) for a in self.accumulators]
        copy._frozen_books = list(copies)
        return copy

    @property
    def tracked(self) -> bool:
        """Of a frozen table: whether it may know what changed."""
        return self._changes is not None

    def changed(self, since: int) -> Changed | None:
        """Of a frozen table: ``Changes.since`` a completed checkpoint.  Changes before it are forgotten."""
        if self._changes is None or self._log is None:
            return None
        self._log.completed(since)
        return self._changes.since(since)

    def learn(self, *, most_changed: bool) -> None:
        """Of a frozen table: whether what changed was too much to be written as such; see ``ChangeLog.learn``."""
        if self._log is not None:
            self._log.learn(most_changed=most_changed)

    def complete(self) -> None:
        """Of a frozen table: copy what the stream has not set aside.  In the snapshot thread, before ``rows``."""
        if self._capture is not None:
            self._capture.complete()

    def release(self) -> None:
        """Give back the memory of a frozen table."""
        if self._capture is not None:
            self._captures.give_back(self._capture)
        self._capture = None
        self.accumulators = []


class FrozenTable(FrozenSegments):
    """Segments of frozen tables, which are complete when they are made, and released with them.

    Args:
        tables: the frozen tables.
        make: all segments.
        make_changes: those of changed slots and of keys that went, by table, where the tables keep track.
    """

    def __init__(
        self,
        tables: Sequence[KeyedTable],
        make: Callable[[], Iterable[Segment]],
        make_changes: Callable[..., Iterable[Segment]],
    ) -> None:
        super().__init__(make)
        self._tables = tables
        self._make_changes = make_changes

    def segments(self) -> Iterator[Segment]:
        self._complete()
        yield from super().segments()

    def _complete(self) -> None:
        for table in self._tables:
            table.complete()

    @property
    def incremental(self) -> bool:
        return all(table.tracked for table in self._tables)

    def changes(self, since: int) -> Iterator[Segment] | None:
        """What changed in all tables, if it is known of all, and is not most of what they hold together."""
        found = [changed for table in self._tables if (changed := table.changed(since)) is not None]
        if len(found) < len(self._tables):
            return None
        most = 2 * sum(len(slots) for slots, _ in found) > sum(map(len, self._tables))
        for table in self._tables:
            table.learn(most_changed=most)
        if most:
            return None
        self._complete()
        return iter(self._make_changes(*found))

    def release(self) -> None:
        super().release()
        for table in self._tables:
            table.release()
        self._make_changes = lambda *_: ()


def group_segments(
    name: str,
    schema: pa.Schema,
    slots: Slots,
    keys: Callable[[Slots], list[pa.Array]],
    rows: Callable[[Slots], list[pa.Array]],
    max_parallelism: int,
    kind: SegmentKind = "base",
    identity: int = 0,
) -> Iterator[Segment]:
    """Segments of the given slots, sorted by key group and cut between groups.

    Where a string column of a base would exceed the 2 GB that Arrow allows, the rest follows as deltas.

    Args:
        name: name of the state.
        schema: fields of ``rows``; the segments have ``GROUP_COLUMN`` before them.
        keys: key columns of some slots, whose hash decides the group.
        rows: all columns of some slots.
        kind: of the segments.
        identity: so many of the first columns tell the rows apart, whose order says nothing then.
    """
    if len(slots) == 0:
        return
    groups: npt.NDArray[np.uint16] = np.empty(len(slots), np.uint16)
    for begin in range(0, len(slots), _HASHED_ROWS):  # in pieces: the stream wants the interpreter in between
        part = slice(begin, begin + _HASHED_ROWS)
        groups[part] = key_groups(hash_keys(keys(slots[part])), max_parallelism)
    order = np.argsort(groups, kind="stable")
    slots, groups = slots[order], groups[order]
    fields = pa.schema([pa.field(GROUP_COLUMN, pa.uint16(), nullable=False), *schema])
    begin = 0
    while begin < len(slots):
        end = min(begin + _SEGMENT_ROWS, len(slots))
        end = int(np.searchsorted(groups, groups[end - 1], side="right"))
        covered = (int(groups[begin]), int(groups[end - 1]) + 1)
        piece = kind
        for first, arrays in _in_pieces(slots, begin, end, rows):
            of_rows = pa.array(groups[first : first + len(arrays[0])])
            batch = pa.RecordBatch.from_arrays([of_rows, *arrays], schema=fields)
            yield Segment(name, piece, batch, covered, identity)
            piece = "delta" if kind == "base" else kind  # the first replaces what was there, the others add to it
        begin = end


def _in_pieces(
    slots: Slots, begin: int, end: int, rows: Callable[[Slots], list[pa.Array]]
) -> Iterator[tuple[int, list[pa.Array]]]:
    """The rows in as few batches as they fit: a string column holds no more than 2 GB."""
    try:
        arrays = rows(slots[begin:end])
    except pa.ArrowInvalid:
        if end - begin == 1:
            raise
    else:
        yield begin, arrays
        return
    middle = (begin + end) // 2
    yield from _in_pieces(slots, begin, middle, rows)
    yield from _in_pieces(slots, middle, end, rows)


def deleted_segments(
    name: str,
    schema: pa.Schema,
    deleted: Iterable[Deleted],
    keys: Callable[[list[pa.Array]], list[pa.Array]],
    max_parallelism: int,
) -> Iterator[Segment]:
    """Segments of keys that went.

    Args:
        name: of the state.
        schema: fields that identify a row: those of the index, in its order.
        deleted: slots of indexes that still hold the keys.
        keys: key columns among those of the index, whose hash decides the group.
        max_parallelism: number of key groups.
    """
    for gone in deleted:
        columns = gone.index.columns

        def keys_of(slots: Slots, columns: Callable[[Slots], list[pa.Array]] = columns) -> list[pa.Array]:
            return keys(columns(slots))

        yield from group_segments(name, schema, gone.slots, keys_of, columns, max_parallelism, "delete")


def keyed_rows(segments: Iterable[Segment], schema: pa.Schema, owned: range) -> list[pa.RecordBatch]:
    """What a restore has to apply, in order: the columns of ``schema``, rows of the owned key groups only.

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
            hint="Give the changed step a new id, or restore with the program that wrote the snapshot.",
        )
    columns = [batch.column(field.name) for field in schema]
    try:
        arrays = [column.cast(field.type) for column, field in zip(columns, schema, strict=True)]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise StorageError(
            f"state {name!r} in the snapshot does not convert to this program's types: {error}"
        ) from error
    return pa.RecordBatch.from_arrays(arrays, schema=schema)

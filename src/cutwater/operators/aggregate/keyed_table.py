"""The columnar table of a keyed step: an index and an accumulator per aggregate, and their way to disk and back."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.operators.aggregate.accumulators import Accumulator, Aggregate
from cutwater.state.growing_array import GrowingArray, Values
from cutwater.state.index.key_index import KeyIndex, Slots
from cutwater.state.index.nullable import NullableIndex
from cutwater.state.segments import Segment, SegmentKind
from cutwater.state.table.capture import Capture, Captures
from cutwater.state.table.changes import Changed, ChangeLog, Changes
from cutwater.state.table.intervals import RESTORED
from cutwater.state.table.spill import FrozenSpill, Spill

if TYPE_CHECKING:
    from cutwater.operators.base import Context
    from cutwater.state.disk.rocks import RocksStore


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
        self.accumulators: list[Accumulator] = [a.accumulator(schema) for a in aggregates]
        self.book_types = list(books)
        self._aggregates, self._schema = aggregates, schema
        self._state_widths = [len(a.state_fields(schema)) for a in aggregates]
        self._books = [GrowingArray(kind) for kind in books]
        self._frozen_books: list[Values] | None = None
        self._captures = Captures()
        self._capture: Capture | None = None
        self._log: ChangeLog | None = None
        self._changes: Changes | None = None
        self._spill: Spill[KeyedTable] | None = None
        self._renumbered: Callable[[Slots], object] | None = None
        self._spilled: FrozenSpill | None = None

    def __len__(self) -> int:
        return len(self.index)

    def expect(self, keys: int) -> None:
        """Have room for so many keys at once, if there are none yet."""
        if len(self.index) == 0:
            self.index = NullableIndex(self.index.types, keys)
            self._captures.expect(keys)

    def upsert(self, keys: Sequence[pa.Array]) -> Slots:
        """Slots of the rows; the accumulators are ready for them, and for changes of them."""
        known = len(self.index)
        slots = self.index.upsert(keys)
        if len(self.index) > known:
            self.reserve(len(self.index))
            self._captures.prepare(self._columns, len(self.index))
            if self._spill is not None:
                self._spill.fetch(known)
        self.touch(slots)
        return slots

    @property
    def _columns(self) -> list[GrowingArray]:
        return [*(column for accumulator in self.accumulators for column in accumulator.columns), *self._books]

    def book(self, number: int) -> Values:
        """A further column; another array after slots were added.  ``touch`` slots before changing it."""
        return self._books[number].values if self._frozen_books is None else self._frozen_books[number]

    def reserve(self, slots: int) -> None:
        """Have room for the state of these slots, some of which may not be in the index yet."""
        for accumulator in self.accumulators:
            accumulator.reserve(slots)
        for book in self._books:
            book.reserve(slots)

    def touch(self, slots: Slots) -> None:
        """The state of these slots is about to change.  ``upsert`` says so of the slots that it returns."""
        self._captures.preserve(slots)
        if self._log is not None:
            self._log.mark(slots, len(self.index))
        if self._spill is not None:
            self._spill.use(slots)

    @property
    def capturing(self) -> bool:
        """Whether a freeze may be reading the columns: then all that changes must be touched first."""
        return self._captures.open

    def track(self, *, restored: bool = False, lasting: bool = False) -> None:
        """Keep track of changes from now (after a restore) or the next freeze on; ``lasting``: no key ever goes."""
        self._log = ChangeLog(RESTORED if restored else None, (lambda: self.all_rows) if lasting else None)

    def delete(self, slots: Slots) -> None:
        """The keys of these slots are gone: nobody asks for them again before ``keep`` leaves them out."""
        if self._spill is not None:
            self._spill.delete(slots, self._log)
        if self._log is not None:
            self._log.delete(self.index.frozen(), slots)

    def restore(self, keys: Sequence[pa.Array], state: Sequence[pa.Array]) -> Slots:
        """Set rows to what ``state`` returned for them."""
        slots = self.upsert(keys)
        self.set_rows(slots, state)
        return slots

    def set_rows(self, slots: Slots, columns: Sequence[pa.Array]) -> None:
        """Set slots to state columns, and further columns if there are any, of ``rows`` and ``book``."""
        position = 0
        for accumulator, width in zip(self.accumulators, self._state_widths, strict=True):
            accumulator.restore(slots, list(columns[position : position + width]))
            position += width
        for number, column in enumerate(columns[position:]):
            self.book(number)[slots] = column.to_numpy(zero_copy_only=False)

    @property
    def value_types(self) -> list[pa.DataType]:
        """Of the state columns and books in ``whole_rows``."""
        state = [field.type for aggregate in self._aggregates for field in aggregate.state_fields(self._schema)]
        return [*state, *(pa.from_numpy_dtype(kind) for kind in self.book_types)]

    def rows(self, slots: Slots) -> list[pa.Array]:
        """Index columns and state columns of some slots."""
        state = [array for accumulator in self.accumulators for array in accumulator.state(slots)]
        return [*self.index.columns(slots), *state]

    def whole_rows(self, slots: Slots) -> list[pa.Array]:
        """Index columns, state columns and books of some slots."""
        return [*self.rows(slots), *(pa.array(self.book(n)[slots]) for n in range(len(self.book_types)))]

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
        if self._spill is not None:
            self._spill.keep(slots)
        if self._renumbered is not None:
            self._renumbered(slots)

    # -- more than memory holds

    def spill_to(
        self,
        store: RocksStore,
        ctx: Context,
        *,
        hashed: int = 0,
        renumbered: Callable[[Slots], object] | None = None,
        tables: int = 1,
    ) -> None:
        """Keep rows on disk that do not fit in memory; the table is empty.

        Args:
            store: where.
            ctx: tells the number of all key groups, and how much memory the step has.
            hashed: how many index columns lie before those whose hash decides the key group.
            renumbered: called by ``keep``, with the slots that stayed.
            tables: that share the memory of the step.
        """
        self._spill = Spill(self, store, hashed, ctx.max_parallelism, (ctx.state_memory_bytes or 0) // 2 // tables)
        self._renumbered = renumbered

    @property
    def log(self) -> ChangeLog | None:
        """What keeps track of changes, where somebody asked for it."""
        return self._log

    @property
    def spill(self) -> Spill[KeyedTable] | None:
        """What moves rows to disk, if anything does."""
        return self._spill

    @property
    def memory_bytes(self) -> int:
        """What the keys and columns take, roughly."""
        width = sum(column.values.strides[0] for column in self._columns)
        varying = sum(accumulator.varying_bytes for accumulator in self.accumulators)
        return len(self.index) * width + varying + self.index.key_bytes

    def make_room(self) -> Slots | None:
        """Between batches, when nobody holds slots: move rows out if there are too many, a portion at a time.

        Returns the slots that stayed, which have become 0, 1, 2 ..., if others have gone.
        """
        kept = None if self._spill is None else self._spill.make_room(self._log)
        if kept is not None:
            self.keep(kept)
        return kept

    def put_page(self, page: KeyedTable, slots: Slots, *, came: bool = False) -> None:
        """Slots of a page of rows on disk, and of none in memory, have changed, or all of them are new."""
        if self._spill is not None:
            self._spill.put_page(page, slots, self._log, came)

    def delete_page(self, page: KeyedTable, slots: Slots) -> None:
        """The keys of slots of a page of rows on disk are gone."""
        if self._spill is not None and len(slots):
            self._spill.delete_page(page, slots, self._log)

    def clean(self, live: Callable[[KeyedTable, Slots], npt.NDArray[np.bool_]]) -> None:
        """Remove some of the rows on disk that are not ``live``: a portion of a pass over all of them."""
        if self._spill is not None:
            self._spill.clean(live, self._log)

    def page(self, keys: Sequence[pa.Array], columns: Sequence[pa.Array]) -> KeyedTable:
        """A small table of the same make that holds these rows."""
        page = self.empty_page()
        page.set_rows(page.upsert(keys), columns)
        return page

    def empty_page(self) -> KeyedTable:
        """A small table of the same make without rows."""
        return KeyedTable(self.index.types, self._aggregates, self._schema, books=self.book_types)

    # -- snapshots

    def frozen(self, checkpoint_id: int | None = None, spill: Spill[Any] | None = None) -> KeyedTable:
        """The table as it is now, for ``rows`` in another thread, which must call ``complete`` first.

        Copies nothing: see ``cutwater.state.table.capture``.  ``release`` it when it is no longer read.

        Args:
            checkpoint_id: what the freeze is for, where changes are kept track of.
            spill: what moves rows to disk, where it is not the table's own.
        """
        spill = spill or self._spill
        copy = object.__new__(KeyedTable)
        copy.index, copy._state_widths, copy._captures = self.index.frozen(), self._state_widths, self._captures
        copy._capture = self._captures.begin(self._columns, len(self.index))
        copy._aggregates, copy._schema, copy.book_types = self._aggregates, self._schema, self.book_types
        copy._log, copy._spill = self._log, None
        copy._changes = None if self._log is None or checkpoint_id is None else self._log.cut(checkpoint_id)
        copy._spilled = None if spill is None else spill.freeze(self._log)
        copies = iter(copy._capture.copies)
        copy.accumulators = [a.frozen(list(itertools.islice(copies, len(a.columns)))) for a in self.accumulators]
        copy._frozen_books = list(copies)
        return copy

    @property
    def spilled(self) -> FrozenSpill | None:
        """Of a frozen table: what lay on disk."""
        return self._spilled

    @property
    def in_memory(self) -> bool:
        """Of a frozen table: whether all of it is, so that it is one of its ``parts``."""
        return self._spilled is None

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

    def changed_rows(self, changed: Changed) -> int:
        """Of a frozen table: at most so many rows changed, wherever they lie."""
        return len(changed.slots) + (0 if self._spilled is None else self._spilled.changed(changed.epoch))

    @property
    def all_rows(self) -> int:
        """How many rows it has, roughly, wherever they lie."""
        return len(self) + (0 if (below := self._spilled or self._spill) is None else below.count)

    def parts(self, changed: Changed | None = None) -> Iterator[tuple[KeyedTable, Slots, SegmentKind]]:
        """Of a frozen table: tables and slots to write one after the other, and what as.

        What lies on disk comes in tables that are made for a moment, with the rows in memory of the same key groups.

        Args:
            changed: only what changed.
        """
        if changed is not None:
            for chunk in () if self._spilled is None else self._spilled.rows.journal(changed.epoch):
                page = self.page(chunk.keys, chunk.values)
                yield page, np.arange(len(page), dtype=np.int32), "delta"
            yield self, changed.slots, "delta"
            return
        slots: Slots = np.arange(len(self), dtype=np.int32)
        if self._spilled is not None and len(slots):
            groups = self._spilled.group_of(self.index.columns(slots))
            slots = np.argsort(groups, kind="stable").astype(np.int32)
            groups = groups[slots]
        else:
            groups = slots
        for chunk in () if self._spilled is None else self._spilled.rows.chunks():
            page = self.page(chunk.keys, chunk.values)
            here = int(np.searchsorted(groups, chunk.until))
            if here:
                page.set_rows(*self._copied(page, slots[:here]))
                slots, groups = slots[here:], groups[here:]
            yield page, np.arange(len(page), dtype=np.int32), "delta" if chunk.goes_on else "base"
        yield self, slots, "base"

    def _copied(self, page: KeyedTable, slots: Slots) -> tuple[Slots, list[pa.Array]]:
        """Slots of a page for the keys of some slots, and what they hold."""
        columns, keys = self.whole_rows(slots), len(self.index.types)
        return page.upsert(columns[:keys]), columns[keys:]

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
        if self._spilled is not None:
            self._spilled.rows.release()
        self._capture = self._spilled = None
        self.accumulators = []


class FrozenTable:
    """Segments of frozen tables, which are complete when they are made, and released with them.

    Args:
        tables: the frozen tables.
        make: all segments, some of them ``loose`` where that is asked for, and each table is one of its parts; or those
            of changed slots and of keys that went, by table, where the tables keep track.
    """

    def __init__(self, tables: Sequence[KeyedTable], make: Callable[..., Iterable[Segment]]) -> None:
        self._tables, self._make = tables, make

    def segments(self, *, loose: bool = False) -> Iterator[Segment]:
        self._complete()
        yield from self._make(loose=loose and all(table.in_memory for table in self._tables))

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

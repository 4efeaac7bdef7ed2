"""The columnar table by key: an index, what is kept of each key, and what of it has left memory."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.state import column_kernels as kernels
from cutwater.state.growing_array import LARGE_ROWS, GrowingArray, Values
from cutwater.state.key_index import GroupIds, KeyIndex, NullableIndex, keys_of
from cutwater.state.segments import SegmentKind
from cutwater.state.table.changes import Changed, ChangeLog, Changes
from cutwater.state.table.intervals import RESTORED
from cutwater.state.table.spill import FrozenSpill, Room, Spill

COPIED_AT_ONCE_BYTES = 1 << 20
_CHUNKS_PER_CALL = 1 << 14
"""Chunks that the snapshot thread copies between two looks at whether the capture is still wanted."""


class Capture:
    """The first ``rows`` rows of some columns as they are at this instant, without copying them first.

    A freeze notes the columns and marks every chunk as waiting.  From then on the stream copies a chunk aside before it
    changes a row of it, and the snapshot thread copies the others ahead, without the GIL.  When it has, the copies are
    the frozen state, and changing rows costs what it did before.

    The copies lie in memory that the capture before has given back, or that is made in the background while the columns
    grow: the first touch of a fresh page costs far more than the copying.

    Args:
        columns: the arrays; their content is captured, whatever becomes of them.
        copies: where to; at least as long as the arrays' chunks in use.
        at_once: copy them now, which takes a core a fraction of a millisecond: asking for every row whether its chunk
            has been set aside would cost more.
    """

    def __init__(
        self, columns: Sequence[Values], rows: int, copies: list[GrowingArray], *, at_once: bool = False
    ) -> None:
        self._columns = list(columns)
        self._copies = copies
        self.copies: list[Values] = [copy.values for copy in copies]
        """The captured columns: complete, and unchanging, after ``complete``."""
        self.open = False
        """True if chunks may be left that the stream has to set aside."""
        if at_once:
            for values, copy in zip(self._columns, self.copies, strict=True):
                copy[:rows] = values[:rows]
            return
        chunks = -(-rows // kernels.CHUNK_ROWS) if copies else 0
        self._state = np.full(chunks, kernels.WAITING, np.uint8)
        self._sources = np.array([values.ctypes.data for values in self._columns], np.int64)
        self._targets = np.array([values.ctypes.data for values in self.copies], np.int64)
        self._widths = np.array([values.strides[0] * kernels.CHUNK_ROWS for values in self._columns], np.int64)
        self.open = chunks > 0

    def preserve(self, gids: npt.NDArray[Any]) -> None:
        """Rows of these group ids are about to change.  Called by the thread that changes them."""
        kernels.preserve(gids, self._state, self._sources, self._targets, self._widths)

    def complete(self) -> None:
        """Copy what is left.  Called by the snapshot thread, before it reads ``copies``."""
        if not self.open:
            return
        for first in range(0, len(self._state), _CHUNKS_PER_CALL):
            if not self.open:
                return
            last = min(first + _CHUNKS_PER_CALL, len(self._state))
            kernels.capture_chunks(self._state, first, last, self._sources, self._targets, self._widths)
        self.open = False

    def release(self) -> list[GrowingArray]:
        """Nobody reads it any more; the memory of the copies."""
        self.open = False
        given, self._copies, self.copies, self._columns = self._copies, [], [], []
        return given


class Captures:
    """The captures of one table under way, and memory for the next.

    All but ``give_back`` belongs to the thread that changes the rows.
    """

    def __init__(self) -> None:
        self._open: list[Capture] = []
        self._spare: deque[list[GrowingArray]] = deque(maxlen=1)
        self._expected = 0

    @property
    def open(self) -> bool:
        """True if there may be something to preserve."""
        return len(self._open) > 0

    def begin(self, columns: Sequence[GrowingArray], rows: int) -> Capture:
        """Capture the first ``rows`` rows; costs a byte per chunk, or the copying of a small table."""
        self._expected = 0
        copies = _memory_for(columns, rows, self._spare.pop() if self._spare else [])
        at_once = rows * sum(column.values.strides[0] for column in columns) <= COPIED_AT_ONCE_BYTES
        capture = Capture([column.values for column in columns], rows, copies, at_once=at_once)
        if capture.open:
            self._open.append(capture)
        return capture

    def expect(self, rows: int) -> None:
        """A restore brings so many rows: memory for a capture can wait until they are there."""
        self._expected = rows

    def prepare(self, columns: Sequence[GrowingArray], rows: int) -> None:
        """The columns have grown: have memory ready for the next capture."""
        if rows > LARGE_ROWS and rows >= self._expected and not self._open:
            self._spare.append(_memory_for(columns, rows, self._spare.pop() if self._spare else []))

    def preserve(self, gids: npt.NDArray[Any]) -> None:
        """Rows of these group ids are about to change."""
        for capture in tuple(self._open):
            if capture.open:
                capture.preserve(gids)
            else:
                self._open.remove(capture)

    def abandon_columns(self) -> None:
        """The columns go on in other arrays: what was captured cannot change any more."""
        self._open.clear()

    def give_back(self, capture: Capture) -> None:
        """Release a capture, from any thread; the next one takes over its memory, whose pages are warm."""
        self._spare.append(capture.release())


def _memory_for(columns: Sequence[GrowingArray], rows: int, spare: list[GrowingArray]) -> list[GrowingArray]:
    copies = spare or [GrowingArray(column.values.dtype, column.values.shape[1:]) for column in columns]
    for copy in copies:
        copy.reserve(rows)
    return copies


class Columns(Protocol):
    """One thing that a table keeps of each key, in arrays by group id: an aggregate, for example.

    Called from one thread; a frozen one serves another thread.  ``columns`` are the arrays that change in place.  A
    table captures them for a snapshot before it lets rows change (see ``Capture``); whatever else is held must never be
    changed in place.
    """

    columns: Sequence[GrowingArray]

    @property
    def varying_bytes(self) -> int:
        """Bytes held besides ``columns``, roughly."""
        ...

    def reserve(self, gids: int) -> None:
        """Have room for the group ids 0 .. ``gids`` - 1; new ones are empty."""
        ...

    def state(self, gids: GroupIds) -> list[pa.Array]:
        """The content of some group ids, one array per type of the ``Layout``."""
        ...

    def restore(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        """Set some (reserved) group ids to what ``state`` returned."""
        ...

    def keep(self, gids: GroupIds) -> None:
        """Forget all group ids but these, which become 0, 1, 2 ..."""
        ...

    def frozen(self, columns: Sequence[Values]) -> Columns:
        """The content as it is now, for ``state`` in another thread.

        Args:
            columns: captured copies of ``columns``, filled by the time they are read.
        """
        ...


V = TypeVar("V", bound=Columns)


class Layout(NamedTuple, Generic[V]):
    """The things that a table keeps of each key."""

    make: Callable[[], list[V]]
    types: Sequence[Sequence[pa.DataType]]


class KeyedTable(Generic[V]):
    """Group ids by key, and what is kept of them.

    Args:
        side_columns: types of further columns by group id, which are the caller's; zero for a new group id.
        room: where rows lie that do not fit in memory; ``None``: all of them do.
        renumbered: called by ``keep``, with the group ids that stayed.
    """

    def __init__(
        self,
        key_types: Sequence[pa.DataType],
        layout: Layout[V],
        side_columns: Sequence[npt.DTypeLike] = (),
        room: Room | None = None,
        renumbered: Callable[[GroupIds], object] | None = None,
    ) -> None:
        self.index: KeyIndex = NullableIndex(key_types)
        self.accumulators: list[V] = layout.make()
        self._layout, self.side_types = layout, list(side_columns)
        self._side_columns = [GrowingArray(kind) for kind in side_columns]
        self._frozen_sides: list[Values] | None = None
        self._captures = Captures()
        self._capture: Capture | None = None
        self.log: ChangeLog | None = None
        """Of changes, where somebody asked for one."""
        self._changes: Changes | None = None
        self.spill: Spill[KeyedTable[V]] | None = None if room is None else Spill(self, room)
        """Moves rows to disk, if anything does."""
        self._renumbered = renumbered
        self.spilled: FrozenSpill | None = None
        """Of a frozen table: what lay on disk."""

    def __len__(self) -> int:
        return len(self.index)

    def expect(self, keys: int) -> None:
        """Have room for so many keys at once, if there are none yet."""
        if len(self.index) == 0:
            self.index = NullableIndex(self.index.types, keys)
            self._captures.expect(keys)

    def upsert(self, keys: Sequence[pa.Array]) -> GroupIds:
        """Group ids of the rows; the accumulators are ready for them, and for changes of them."""
        known = len(self.index)
        gids = self.index.upsert(keys)
        if len(self.index) > known:
            self.reserve(len(self.index))
            self._captures.prepare(self._columns, len(self.index))
            if self.spill is not None:
                self.spill.fetch(known)
        self.touch(gids)
        return gids

    @property
    def _columns(self) -> list[GrowingArray]:
        return [*(column for accumulator in self.accumulators for column in accumulator.columns), *self._side_columns]

    def side(self, number: int) -> Values:
        """A further column; another array after group ids were added.  ``touch`` group ids before changing it."""
        return self._side_columns[number].values if self._frozen_sides is None else self._frozen_sides[number]

    def reserve(self, gids: int) -> None:
        """Have room for the state of these group ids, some of which may not be in the index yet."""
        for accumulator in self.accumulators:
            accumulator.reserve(gids)
        for column in self._side_columns:
            column.reserve(gids)

    def touch(self, gids: GroupIds) -> None:
        """The state of these group ids is about to change.  ``upsert`` says so of the group ids that it returns."""
        self._captures.preserve(gids)
        if self.log is not None:
            self.log.mark(gids, len(self.index))
        if self.spill is not None:
            self.spill.use(gids)

    @property
    def capturing(self) -> bool:
        """True if a freeze may be reading the columns: then all that changes must be touched first."""
        return self._captures.open

    def track(self, *, restored: bool = False, lasting: bool = False) -> None:
        """Keep track of changes from now (after a restore) or the next freeze on; ``lasting``: no key ever goes."""
        self.log = ChangeLog(RESTORED if restored else None, (lambda: self.all_rows) if lasting else None)

    def delete(self, gids: GroupIds) -> None:
        """The keys of these group ids are gone: nobody asks for them again before ``keep`` leaves them out."""
        if self.spill is not None:
            self.spill.delete(gids, self.log)
        if self.log is not None:
            self.log.delete(self.index.frozen(), gids)

    def restore(self, keys: Sequence[pa.Array], state: Sequence[pa.Array]) -> GroupIds:
        """Set rows to what ``state`` returned for them."""
        gids = self.upsert(keys)
        self.set_rows(gids, state)
        return gids

    def set_rows(self, gids: GroupIds, columns: Sequence[pa.Array]) -> None:
        """Set group ids to state columns, and further columns if there are any, of ``rows`` and ``side``."""
        position = 0
        for accumulator, width in zip(self.accumulators, map(len, self._layout.types), strict=True):
            accumulator.restore(gids, list(columns[position : position + width]))
            position += width
        for number, column in enumerate(columns[position:]):
            self.side(number)[gids] = column.to_numpy(zero_copy_only=False)

    @property
    def value_types(self) -> list[pa.DataType]:
        """Of the state columns and side columns in ``whole_rows``."""
        return [*itertools.chain(*self._layout.types), *(pa.from_numpy_dtype(kind) for kind in self.side_types)]

    def rows(self, gids: GroupIds) -> list[pa.Array]:
        """Index columns and state columns of some group ids."""
        state = [array for accumulator in self.accumulators for array in accumulator.state(gids)]
        return [*self.index.columns(gids), *state]

    def whole_rows(self, gids: GroupIds) -> list[pa.Array]:
        """Index columns, state columns and side columns of some group ids."""
        return [*self.rows(gids), *map(pa.array, self.sides(gids))]

    def sides(self, gids: GroupIds) -> list[Values]:
        """All side columns of some group ids."""
        return [self.side(number)[gids] for number in range(len(self.side_types))]

    def keep(self, gids: GroupIds) -> None:
        """Forget all group ids but these, which become 0, 1, 2 ..."""
        self.index = keys_of(self.index, gids)
        for accumulator in self.accumulators:
            accumulator.keep(gids)
        for column in self._side_columns:
            column.replace(column.values[gids])
        self._captures.abandon_columns()
        if self.log is not None:
            self.log.keep(gids)
        if self.spill is not None:
            self.spill.keep(gids)
        if self._renumbered is not None:
            self._renumbered(gids)

    # -- more than memory holds

    @property
    def memory_bytes(self) -> int:
        """Bytes that the keys and columns take, roughly."""
        width = sum(column.values.strides[0] for column in self._columns)
        varying = sum(accumulator.varying_bytes for accumulator in self.accumulators)
        return len(self.index) * width + varying + self.index.key_bytes

    @property
    def scattered(self) -> bool:
        """True if rows have ever left memory."""
        return self.spill is not None and self.spill.rows.used

    @property
    def crowded(self) -> bool:
        """True if rows are about to leave memory, so that it is time to forget those that nobody needs."""
        return self.spill is not None and self.spill.full and not self.spill.busy

    def known(self, gids: GroupIds, before: int) -> npt.NDArray[np.bool_]:
        """Mask of the group ids that the last ``upsert`` returned and found; ``before``: rows in memory until then."""
        known = gids < before
        return known if self.spill is None else known | self.spill.fetched(gids)

    def make_room(self) -> GroupIds | None:
        """Between batches, when nobody holds group ids: move rows out if there are too many, a part at a time.

        Returns the group ids that stayed, which have become 0, 1, 2 ..., if others have gone.
        """
        kept = None if self.spill is None else self.spill.make_room(self.log)
        if kept is not None:
            self.keep(kept)
        return kept

    def put_page(self, page: KeyedTable[V], gids: GroupIds, *, came: bool = False) -> None:
        """Group ids of a page of rows on disk, and of none in memory, have changed, or all of them are new."""
        if self.spill is not None:
            self.spill.put_page(page, gids, self.log, came)

    def delete_page(self, page: KeyedTable[V], gids: GroupIds) -> None:
        """The keys of group ids of a page of rows on disk are gone."""
        if self.spill is not None and len(gids):
            self.spill.delete_page(page, gids, self.log)

    def clean(self, live: Callable[[KeyedTable[V], GroupIds], npt.NDArray[np.bool_]]) -> None:
        """Remove some of the rows on disk that are not ``live``: a part of a pass over all of them."""
        if self.spill is not None:
            self.spill.clean(live, self.log)

    def page(self, keys: Sequence[pa.Array], columns: Sequence[pa.Array]) -> KeyedTable[V]:
        """A small table of the same make that holds these rows."""
        page = self.empty_page()
        page.set_rows(page.upsert(keys), columns)
        return page

    def empty_page(self) -> KeyedTable[V]:
        """A small table of the same make without rows."""
        return KeyedTable(self.index.types, self._layout, self.side_types)

    # -- snapshots

    def frozen(self, checkpoint_id: int | None = None, spill: Spill[Any] | None = None) -> KeyedTable[V]:
        """The table as it is now, for ``rows`` in another thread, which must call ``complete`` first.

        Copies nothing: see ``Capture``.  ``release`` it when it is no longer read.

        Args:
            spill: what moves rows to disk, where it is not the table's own.
        """
        spill = spill or self.spill
        copy: KeyedTable[V] = object.__new__(KeyedTable)
        copy.index, copy._layout, copy._captures = self.index.frozen(), self._layout, self._captures
        copy._capture = self._captures.begin(self._columns, len(self.index))
        copy.side_types, copy.log, copy.spill = self.side_types, self.log, None
        copy._changes = None if self.log is None or checkpoint_id is None else self.log.cut(checkpoint_id)
        copy.spilled = None if spill is None else spill.freeze(self.log)
        copies = iter(copy._capture.copies)
        frozen = (a.frozen(list(itertools.islice(copies, len(a.columns)))) for a in self.accumulators)
        copy.accumulators = [cast("V", one) for one in frozen]
        copy._frozen_sides = list(copies)
        return copy

    @property
    def tracked(self) -> bool:
        """Of a frozen table: whether it may know what changed."""
        return self._changes is not None

    def changed(self, since: int) -> Changed | None:
        """Of a frozen table: ``Changes.since`` a completed checkpoint.  Changes before it are forgotten."""
        if self._changes is None or self.log is None:
            return None
        self.log.completed(since)
        return self._changes.since(since)

    def changed_rows(self, changed: Changed) -> int:
        """Of a frozen table: at most so many rows changed, wherever they lie."""
        return len(changed.gids) + (0 if self.spilled is None else self.spilled.changed(changed.epoch))

    @property
    def all_rows(self) -> int:
        """Number of rows, roughly, wherever they lie."""
        return len(self) + (0 if (below := self.spilled or self.spill) is None else below.count)

    def parts(self, changed: Changed | None = None) -> Iterator[tuple[KeyedTable[V], GroupIds, SegmentKind]]:
        """Of a frozen table: tables and group ids to write one after the other, and what as.

        What lies on disk comes in tables that are made for a moment, with the rows in memory of the same key groups.
        """
        if changed is not None:
            for chunk in () if self.spilled is None else self.spilled.rows.journal(changed.epoch):
                page = self.page(chunk.keys, chunk.values)
                yield page, np.arange(len(page), dtype=np.int32), "delta"
            yield self, changed.gids, "delta"
            return
        gids: GroupIds = np.arange(len(self), dtype=np.int32)
        if self.spilled is not None and len(gids):
            groups = self.spilled.group_of(self.index.columns(gids))
            gids = np.argsort(groups, kind="stable").astype(np.int32)
            groups = groups[gids]
        else:
            groups = gids
        for chunk in () if self.spilled is None else self.spilled.rows.chunks():
            page = self.page(chunk.keys, chunk.values)
            here = int(np.searchsorted(groups, chunk.until))
            if here:
                page.set_rows(*self._copied(page, gids[:here]))
                gids, groups = gids[here:], groups[here:]
            yield page, np.arange(len(page), dtype=np.int32), "delta" if chunk.goes_on else "base"
        yield self, gids, "base"

    def _copied(self, page: KeyedTable[V], gids: GroupIds) -> tuple[GroupIds, list[pa.Array]]:
        """Group ids of a page for the keys of some group ids, and what they hold."""
        columns, keys = self.whole_rows(gids), len(self.index.types)
        return page.upsert(columns[:keys]), columns[keys:]

    def learn(self, *, most_changed: bool) -> None:
        """Of a frozen table: whether what changed was too much to be written as such; see ``ChangeLog.learn``."""
        if self.log is not None:
            self.log.learn(most_changed=most_changed)

    def complete(self) -> None:
        """Of a frozen table: copy what the stream has not set aside.  In the snapshot thread, before ``rows``."""
        if self._capture is not None:
            self._capture.complete()

    def release(self) -> None:
        """Give back the memory of a frozen table."""
        if self._capture is not None:
            self._captures.give_back(self._capture)
        if self.spilled is not None:
            self.spilled.rows.release()
        self._capture = self.spilled = None
        self.accumulators = []

"""Rows of two sides by key: in memory in the order in which they came, on disk key by key.

What moves is a key with all its rows: a value on disk is the rows of a side, packed one behind the other, so that a key
costs one look at the disk however many rows it has, and no row is touched by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.rows import event_times, rows_per_batch, widest_row_bytes
from cutwater.data.time import MIN_WATERMARK
from cutwater.state.disk.row_codec import RowCodec
from cutwater.state.disk.tables import NEVER, FrozenRowJournal, RowJournal, SpillQueue
from cutwater.state.key_index import GroupIds, KeyIndex, NullableIndex, keys_of
from cutwater.state.keys import hash_keys, key_groups
from cutwater.state.rows import kernels
from cutwater.state.segments import GROUP_COLUMN, Segment, SegmentKind
from cutwater.state.table.row_store import RowStore, grown
from cutwater.state.table.spill import PART_KEYS, FrozenSpill, Room, Spill

References: TypeAlias = npt.NDArray[np.int64]

_FIRST_ROWS = 1024
_ROW_BYTES = 20
"""Bytes that a row takes besides its columns."""


class RowChains:
    """Rows in the order in which they came, chained by the group id of their key.

    Columns, times and group ids lie in arrays that are only appended to: a frozen view costs nothing.
    """

    def __init__(self, schema: pa.Schema, rows: int = _FIRST_ROWS) -> None:
        self.schema = schema
        self.rows = 0
        self.latest = -(2**63)
        """Latest event time of all rows."""
        self.widest = 0
        """Bytes of the widest row, or more."""
        self._values = RowStore(schema.types, rows)
        self._times: References = np.empty(rows, np.int64)
        self._gids: GroupIds = np.empty(rows, np.int32)
        self._nexts: References = np.empty(rows, np.int64)
        self._heads: References = np.empty(0, np.int64)
        self._tails: References = np.empty(0, np.int64)

    @property
    def times(self) -> References:
        return self._times[: self.rows]

    @property
    def gids(self) -> GroupIds:
        return self._gids[: self.rows]

    def reserve(self, gids: int) -> None:
        """Be ready for this many group ids."""
        used = len(self._heads)
        if gids > used:
            self._heads, self._tails = (
                grown(chain, used, max(gids, 2 * used), fill=-1) for chain in (self._heads, self._tails)
            )

    def append(self, batch: pa.RecordBatch, gids: GroupIds, times: References) -> None:
        """Add rows; ``reserve`` has been told of their group ids."""
        if batch.num_rows == 0:
            return
        first, self.rows = self.rows, self.rows + batch.num_rows
        if self.rows > len(self._times):
            size = 2 * self.rows
            self._times, self._gids, self._nexts = (
                grown(values, first, size) for values in (self._times, self._gids, self._nexts)
            )
        self._times[first : self.rows] = times
        self._gids[first : self.rows] = gids
        self._values.append(batch.columns)
        self.latest = max(self.latest, int(times.max()))
        self.widest = max(self.widest, widest_row_bytes(batch))
        kernels.link(self.gids[first:], first, self._heads, self._tails, self._nexts)

    def probe(
        self,
        gids: GroupIds,
        times: References,
        start: tuple[int, int],
        bounds: tuple[int, int, int],
        max_steps: int,
        out: tuple[References, References],
    ) -> tuple[int, int, int]:
        """Matches of arriving rows; see ``kernels.probe`` for arguments and result."""
        chains = (self._heads, self._tails, self._nexts, self._times)
        return kernels.probe(gids, times, *start, *bounds, *chains, max_steps, *out)

    def latest_at(self, gids: GroupIds, times: References, settled: int) -> References:
        """The row of each group id that was the latest at a time; see ``kernels.latest``."""
        references = np.empty(len(gids), np.int64)
        kernels.latest(gids, times, settled, self._heads, self._nexts, self._times, references)
        return references

    def of(self, gids: GroupIds) -> tuple[References, References]:
        """The rows of some group ids, of each in the order in which they came, and where those of each begin."""
        bounds, rows = np.empty(len(gids) + 1, np.int64), np.empty(0, np.int64)
        kernels.rows_of(gids, self._heads, self._nexts, bounds, rows)
        rows = np.empty(int(bounds[-1]), np.int64)
        kernels.rows_of(gids, self._heads, self._nexts, bounds, rows)
        return rows, bounds

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take, roughly."""
        return self._values.nbytes + self.rows * _ROW_BYTES

    def take(self, references: References) -> list[pa.Array]:
        """The columns of some rows."""
        return self._values.take(references)

    def frozen(self) -> RowChains:
        """The rows as they are now; serves ``times``, ``gids`` and ``take`` only."""
        view = object.__new__(RowChains)
        view.schema, view.rows, view.latest, view.widest = self.schema, self.rows, self.latest, self.widest
        view._times, view._gids, view._values = self._times, self._gids, self._values.frozen()
        return view

    def kept(self, references: References, gids: GroupIds, gid_count: int) -> RowChains:
        """A new side with some of the rows, under new group ids, and room for as many again."""
        side = RowChains(self.schema, 2 * len(references) + _FIRST_ROWS)
        side.reserve(gid_count)
        most = rows_per_batch(self.widest)
        for begin in range(0, len(references), most):
            part = slice(begin, begin + most)
            batch = pa.RecordBatch.from_arrays(self.take(references[part]), schema=self.schema)
            side.append(batch, gids[part], self._times[references[part]])
        return side

    def segments(
        self,
        name: str,
        references: References,
        keys: Callable[[GroupIds], list[pa.Array]],
        max_parallelism: int,
        kind: SegmentKind = "base",
    ) -> Iterator[Segment]:
        """The rows as segments sorted by key group, each of a bounded size; within a key in the order they came.

        Args:
            kind: "base", or "delta" for rows that come to those of an older snapshot.
        """
        if len(references) == 0:
            return
        groups = key_groups(hash_keys(keys(self.gids[references])), max_parallelism)
        order = np.argsort(groups, kind="stable")
        references, groups = references[order], groups[order]
        schema = pa.schema([pa.field(GROUP_COLUMN, pa.uint16(), nullable=False), *self.schema])
        for part, continues in group_parts(groups, rows_per_batch(self.widest)):
            arrays = [pa.array(groups[part]), *self.take(references[part])]
            covered = (int(groups[part][0]), int(groups[part][-1]) + 1)
            piece = "delta" if continues else kind
            yield Segment(name, piece, pa.RecordBatch.from_arrays(arrays, schema=schema), covered)


def group_parts(groups: npt.NDArray[np.uint16], rows: int) -> Iterator[tuple[slice, bool]]:
    """Cut sorted groups into parts of at most ``rows``, and say whether one goes on with the group before it.

    >>> list(group_parts(np.array([1, 1, 1, 4], np.uint16), 2))
    [(slice(0, 2, None), False), (slice(2, 4, None), True)]
    """
    for begin in range(0, len(groups), rows):
        continues = begin > 0 and bool(groups[begin] == groups[begin - 1])
        yield slice(begin, min(begin + rows, len(groups))), continues


_GROUP_ID_BYTES = 32
"""Bytes that a key takes for the chains of both sides."""

Live: TypeAlias = Callable[[Sequence[RowChains]], Sequence[References]]
"""Rows of each side that still count, ascending."""
Wakes: TypeAlias = Callable[[int, References], References]
"""The times at which rows of a side with these event times want to be looked at; ``NEVER`` for those that do not."""


class RowSides(NamedTuple):
    """The columns of both sides.

    Attributes:
        names: of the state of each side.
        key_types: in which keys are compared.
        schemas: of the rows of each side.
        keys: key columns of each side.
        times: event-time column of each side.
    """

    names: tuple[str, str]
    key_types: Sequence[pa.DataType]
    schemas: tuple[pa.Schema, pa.Schema]
    keys: tuple[Sequence[str], Sequence[str]]
    times: tuple[str, str]

    def key_columns(self, side: int, batch: pa.RecordBatch) -> list[pa.Array]:
        """The keys of rows of a side."""
        columns = (batch.column(name) for name in self.keys[side])
        return [c if c.type == kind else c.cast(kind) for c, kind in zip(columns, self.key_types, strict=True)]


class KeyedRows:
    """One index over the keys of both sides; the rows of each side in chains by key.

    Args:
        renumbered: called with the rows of each side that stayed when others went; they have become 0, 1, 2 ...
        room: of keys that do not fit in memory; ``None``: all of them do.
        wakes: when rows that have left memory want to be looked at.
    """

    def __init__(
        self,
        types: RowSides,
        renumbered: Callable[[Sequence[References]], object] | None = None,
        room: Room | None = None,
        wakes: Wakes | None = None,
    ) -> None:
        self.types = types
        self.index: KeyIndex = NullableIndex(types.key_types)
        self.sides = [RowChains(schema) for schema in types.schemas]
        self.done: References = np.empty(0, np.int64)
        """By group id, up to which watermark the rows of the key have come out, if its operator says so."""
        self._codecs = [RowCodec(schema.types) for schema in types.schemas]
        self._renumbered = renumbered
        self.spill: Spill[KeyedRows] | None = None if room is None else Spill(self, room)
        self.wanted: SpillQueue | None = None
        """Keys on disk by when they want to be looked at."""
        if self.spill is not None and wakes is not None:
            self.wanted = self.spill.look_again(lambda part, gids: part.earliest(gids, wakes))

    def __len__(self) -> int:
        return len(self.index)

    @property
    def count(self) -> int:
        """Rows of both sides in memory."""
        return sum(side.rows for side in self.sides)

    def add(self, side: int, batch: pa.RecordBatch, times: References) -> GroupIds:
        """Add rows, at least one; returns the group ids of their keys."""
        gids = self.upsert(self.types.key_columns(side, batch))
        self.sides[side].append(batch, gids, times)
        return gids

    def upsert(self, keys: Sequence[pa.Array]) -> GroupIds:
        """Group ids of keys, with all their rows."""
        known = len(self.index)
        gids = self.index.upsert(keys)
        for side in self.sides:
            side.reserve(len(self.index))
        if len(self.index) > len(self.done):
            self.done = np.concatenate([self.done[:known], np.full(2 * len(self.index) - known, MIN_WATERMARK)])
        if self.spill is not None:
            if len(self.index) > known:
                self.spill.fetch(known)
            self.spill.use(gids)
        return gids

    def came_out(self, gids: GroupIds, watermark: int) -> None:
        """Rows of these keys have come out, up to a watermark."""
        self.done[gids] = watermark
        if self.spill is not None:
            self.spill.use(gids)

    def retain(self, gids: GroupIds, rows: Sequence[References]) -> None:
        """Forget all but these keys, ascending, which become 0, 1, 2 ..., and these rows of each side, ascending."""
        numbers = np.full(len(self.index), -1, np.int32)
        numbers[gids] = np.arange(len(gids), dtype=np.int32)
        self.index, self.done = keys_of(self.index, gids), self.done[gids]
        pairs = zip(self.sides, rows, strict=True)
        self.sides = [side.kept(some, numbers[side.gids[some]], len(gids)) for side, some in pairs]
        if self.spill is not None:
            self.spill.keep(gids)
        if self._renumbered is not None:
            self._renumbered(rows)

    # -- more than memory holds: see ``Spillable``

    @property
    def value_types(self) -> list[pa.DataType]:
        return [*[pa.large_binary()] * len(self.sides), pa.int64()]

    @property
    def memory_bytes(self) -> int:
        return sum(side.nbytes for side in self.sides) + len(self.index) * _GROUP_ID_BYTES + self.index.key_bytes

    def whole_rows(self, gids: GroupIds) -> list[pa.Array]:
        """Key columns, the rows of each side, packed, and up to where they have come out."""
        columns = self.index.columns(gids)
        for side, codec in zip(self.sides, self._codecs, strict=True):
            rows, bounds = side.of(gids)
            columns.append(codec.pack(side.take(rows), bounds))
        return [*columns, pa.array(self.done[gids])]

    def set_rows(self, gids: GroupIds, columns: Sequence[pa.Array]) -> None:
        *packed_rows, done = columns
        self.done[gids] = done.to_numpy()
        for number, packed in enumerate(packed_rows):
            rows, counts = self._codecs[number].unpack(packed)
            if counts.any():
                batch = pa.RecordBatch.from_arrays(rows, schema=self.types.schemas[number])
                times = event_times(batch, self.types.times[number])
                self.sides[number].append(batch, np.repeat(gids, counts), times)

    def keep(self, gids: GroupIds) -> None:
        self.retain(gids, [np.sort(side.of(gids)[0]) for side in self.sides])

    def page(self, keys: Sequence[pa.Array], columns: Sequence[pa.Array]) -> KeyedRows:
        page = KeyedRows(self.types)
        if len(keys[0]):
            page.set_rows(page.upsert(keys), columns)
        return page

    def earliest(self, gids: GroupIds, wakes: Wakes) -> References:
        """The time at which the first of the rows of each key wants to be looked at."""
        found: References = np.full(len(gids), NEVER, np.int64)
        for number, side in enumerate(self.sides):
            rows, bounds = side.of(gids)
            filled = np.flatnonzero(np.diff(bounds))
            if len(filled):
                of_rows = wakes(number, side.times[rows])
                found[filled] = np.minimum(found[filled], np.minimum.reduceat(of_rows, bounds[filled]))
        return found

    def make_room(self) -> None:
        """Between batches, when nobody holds group ids: move keys out if there are too many, a part at a time."""
        kept = None if self.spill is None else self.spill.make_room(None)
        if kept is not None:
            self.keep(kept)

    def clean(self, live: Live) -> None:
        """Remove some of the keys on disk without a live row: a part of a pass over all of them."""

        def alive(page: KeyedRows, gids: GroupIds) -> npt.NDArray[np.bool_]:
            return page.with_rows(live(page.sides))[gids]

        if self.spill is not None:
            self.spill.clean(alive, None)

    def with_rows(self, rows: Sequence[References]) -> npt.NDArray[np.bool_]:
        """Mask of the keys that have any of these rows."""
        found = np.zeros(len(self.index), np.bool_)
        for side, some in zip(self.sides, rows, strict=True):
            found[side.gids[some]] = True
        return found

    def remove(self, side: int, groups: range) -> None:
        """Remove the rows of a side of some key groups, wherever they lie; for a restore."""
        spill = self.spill
        assert spill is not None
        gids = np.arange(len(self.index), dtype=np.int32)
        rows = [np.arange(each.rows) for each in self.sides]
        if len(gids):
            found = spill.group_of(self.index.columns(gids))
            outside = (found < groups.start) | (found >= groups.stop)
            rows[side] = np.flatnonzero(outside[self.sides[side].gids])
            self.retain(gids, rows)
        frozen = spill.rows.freeze()
        for chunk in frozen.beginning(b"", groups, PART_KEYS):
            values = list(chunk.values)
            values[side] = pa.array([b""] * len(values[side]), pa.large_binary())
            spill.rows.put(chunk.keys, values)
        frozen.release()


class RowsPart(NamedTuple):
    """Rows to write: some of each side, and what they are written as."""

    keys: Callable[[GroupIds], list[pa.Array]]
    sides: Sequence[RowChains]
    rows: Sequence[References]
    kind: SegmentKind


class FrozenKeyedRows:
    """``KeyedRows`` as they are now, for another thread."""

    def __init__(self, rows: KeyedRows, journals: Sequence[RowJournal]) -> None:
        self._types, self._page = rows.types, rows.page
        self.index, self.sides = rows.index.frozen(), [side.frozen() for side in rows.sides]
        self._spilled: FrozenSpill | None = None if rows.spill is None else rows.spill.freeze(None)
        self._journals: list[FrozenRowJournal] = [journal.freeze() for journal in journals]

    @property
    def journaled(self) -> bool:
        """True if ``added`` tells what came."""
        return len(self._journals) > 0

    def parts(self, live: Live) -> Iterator[RowsPart]:
        """All live rows; those on disk in parts made for a moment, with those in memory of the same key groups."""
        rows = list(live(self.sides))
        keys = self.index.columns
        if self._spilled is None or not len(self.index):
            groups = [np.zeros(len(some), np.uint16) for some in rows]
        else:
            by_gid = self._spilled.group_of(keys(np.arange(len(self.index), dtype=np.int32)))
            groups = [by_gid[side.gids[some]] for side, some in zip(self.sides, rows, strict=True)]
        for side, some in enumerate(groups):
            order = np.argsort(some, kind="stable")
            rows[side], groups[side] = rows[side][order], some[order]
        in_memory: KeyIndex | None = None
        for chunk in () if self._spilled is None else self._spilled.rows.chunks():
            if in_memory is None:  # a frozen index finds nothing
                in_memory = keys_of(self.index, np.arange(len(self.index), dtype=np.int32))
            only = pa.array(in_memory.find(chunk.keys) < 0)
            page = self._page(*([column.filter(only) for column in part] for part in (chunk.keys, chunk.values)))
            for side in range(len(self.sides)):
                here = int(np.searchsorted(groups[side], chunk.until))
                self._copy(page, side, rows[side][:here])
                rows[side], groups[side] = rows[side][here:], groups[side][here:]
            yield RowsPart(page.index.columns, page.sides, live(page.sides), "delta" if chunk.goes_on else "base")
        yield RowsPart(keys, self.sides, rows, "base")

    def _copy(self, page: KeyedRows, side: int, rows: References) -> None:
        if len(rows):
            mine = self.sides[side]
            batch = pa.RecordBatch.from_arrays(mine.take(rows), schema=mine.schema)
            page.sides[side].append(batch, page.upsert(self.index.columns(mine.gids[rows])), mine.times[rows])

    def added(self, epoch: int, live: Live) -> Iterator[RowsPart]:
        """The rows that came since an epoch began, without some that no longer count."""
        for side, journal in enumerate(self._journals):
            for columns in journal.chunks(epoch):
                page = KeyedRows(self._types)
                batch = pa.RecordBatch.from_arrays(columns, schema=self._types.schemas[side])
                page.add(side, batch, event_times(batch, self._types.times[side]))
                yield RowsPart(page.index.columns, page.sides, live(page.sides), "delta")

    def release(self) -> None:
        """Give back what is held."""
        if self._spilled is not None:
            self._spilled.rows.release()
        for journal in self._journals:
            journal.release()
        self._spilled, self._journals = None, []

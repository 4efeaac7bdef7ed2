"""The accumulator behind ``TopRows``: ranked rows by group id."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.changes import row_type
from cutwater.data.words import to_words, valid_rows
from cutwater.operators.aggregate import ranked_kernels as kernels
from cutwater.operators.aggregate.accumulators import Accumulator
from cutwater.state.growing_array import GrowingArray, Values
from cutwater.state.hashing import combine
from cutwater.state.index.key_index import GroupIds
from cutwater.state.keys import hash_keys
from cutwater.state.table.row_store import ValueStore

if TYPE_CHECKING:
    from cutwater.operators.aggregate.top_rows import TopRows

_FIRST_ENTRIES = 1 << 10
_OUTPUT_ROWS = 1 << 14
_GARBAGE_ROWS = 4096
"""Rows that nobody refers to are swept out when they are more than this and more than the others."""
_LAST = np.int64(2**63 - 1)
_OFFSETS, _SIZES, _COUNTS = 1, 2, 3


@dataclass(slots=True)
class Work:
    """Rows on their way into the lists."""

    gids: GroupIds
    rows: pa.Array
    words: npt.NDArray[np.int64]
    prints: npt.NDArray[np.int64]
    added: npt.NDArray[np.bool_]
    next: int = 0

    @property
    def done(self) -> bool:
        return self.next == len(self.gids)


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of a portion of the work among the first n rows."""

    rows: list[pa.Array]
    """Columns of the rows."""
    codes: npt.NDArray[np.int8]
    ranks: npt.NDArray[np.int64]
    missing: int
    """Rows to be removed that were not there."""


class RankedRows(Accumulator):
    """Rows in a store, and by group id a sorted list of references to them; see ``ranked_kernels``.

    Args:
        spec: order and number.
        schema: of the rows.
    """

    def __init__(self, spec: TopRows, schema: pa.Schema) -> None:
        self._spec = spec
        self._schema = schema
        self._type = row_type(schema)
        self._store = ValueStore(self._type)
        self._used = 0
        self._entries = 0
        self._width = 2 + len(spec.by)
        self._arena = np.zeros((_FIRST_ENTRIES, self._width), np.int64)
        self._epoch = 1
        self.columns = [GrowingArray(kind) for kind in (np.int32, np.int64, np.int32, np.int32)]
        self._copies: Sequence[Values] | None = None

    @property
    def _books(self) -> tuple[Values, Values, Values, Values]:
        """Epochs, offsets, sizes, counts."""
        columns = [column.values for column in self.columns] if self._copies is None else self._copies
        return columns[0], columns[1], columns[2], columns[3]

    @property
    def varying_bytes(self) -> int:
        return self._arena.nbytes + self._store.nbytes

    def reserve(self, gids: int) -> None:
        self._used = gids
        for column in self.columns:
            column.reserve(gids)

    # -- changes

    def work(self, gids: GroupIds, rows: pa.Array, added: npt.NDArray[np.bool_] | None = None) -> Work:
        """Rows (of the row type) to add, or where ``added`` is false to remove."""
        columns: list[pa.Array] = rows.flatten()  # pyright: ignore[reportAttributeAccessIssue,reportUnknownMemberType,reportUnknownVariableType]
        words = np.empty((len(rows), len(self._spec.by)), np.int64)
        for c, (name, descending) in enumerate(zip(self._spec.by, self._spec.descending, strict=True)):
            column = columns[self._schema.get_field_index(name)]
            ordered = to_words(column, ordered=True)
            words[:, c] = ~ordered if descending else ordered
            valid = valid_rows(column)
            if valid is not None:
                words[~valid, c] = _LAST
        prints = _prints(columns) if self._spec.removing else np.zeros(len(rows), np.int64)
        return Work(gids, rows, words, prints, np.ones(len(rows), np.bool_) if added is None else added)

    def change(self, work: Work) -> Changes:
        """Do a portion of the work: all of it, or as much as one output batch takes."""
        size = _OUTPUT_ROWS + 2 * self._spec.n + 2
        out = (np.empty(size, np.int64), np.empty(size, np.int8), np.empty(size, np.int64))
        accepted = np.empty(len(work.gids) - work.next, np.int64)
        while True:
            why, work.next, self._entries, taken, emitted, missing = kernels.change(
                work.gids,
                (work.words, work.prints),
                work.added,
                work.next,
                (self._spec.n, self._spec.removing, self._spec.ranked),
                len(self._store),
                self._arena,
                self._entries,
                self._epoch,
                self._books,
                accepted,
                out,
            )
            self._store.append(work.rows.take(pa.array(accepted[:taken])))
            if why == kernels.ARENA_FULL and not emitted:
                self._grow()
                continue
            rows: Any = self._store.take(out[0][:emitted])
            if why == kernels.ARENA_FULL:
                self._grow()
            self._sweep()
            return Changes(rows.flatten(), out[1][:emitted], out[2][:emitted], missing)

    def update(self, gids: GroupIds, batch: pa.RecordBatch) -> None:
        fields = [column.with_nullable(True) for column in self._schema]
        self._add(gids, pa.StructArray.from_arrays(batch.select(self._schema.names).columns, fields=fields))

    def _add(self, gids: GroupIds, rows: pa.Array) -> None:
        work = self.work(gids, rows)
        while not work.done:
            self.change(work)

    def running(self, gids: GroupIds, batch: pa.RecordBatch) -> pa.Array:
        lists: list[pa.Array] = []
        for row in range(len(gids)):
            self.update(gids[row : row + 1], batch.slice(row, 1))
            lists.append(self.result(gids[row : row + 1]))
        return pa.concat_arrays(lists)

    # -- memory

    def _live(self) -> int:
        return int(self._books[_COUNTS][: self._used].sum(dtype=np.int64))

    def _grow(self) -> None:
        """Twice the arena; or without the blocks that were left behind, if those are most of it."""
        if self._entries > 4 * self._live() + _FIRST_ENTRIES:
            self._pack()
        else:
            arena = np.zeros((2 * len(self._arena), self._width), np.int64)
            arena[: self._entries] = self._arena[: self._entries]
            self._arena = arena

    def _sweep(self) -> None:
        live = self._live() if len(self._store) > _GARBAGE_ROWS else len(self._store)
        if len(self._store) - live > max(_GARBAGE_ROWS, live):
            self._pack()

    def _pack(self) -> None:
        """Only what is in use, in a new arena and a new store: a snapshot may refer to the old ones."""
        _, offsets, _, counts = self._books
        live, moved, counts = self._live(), offsets[: self._used].copy(), counts[: self._used].copy()
        arena = np.zeros((2 * live + _FIRST_ENTRIES, self._width), np.int64)
        references = np.empty(live, np.int64)
        self._entries = kernels.pack(self._arena, moved, counts, arena, references)
        self._arena, self._store = arena, self._store.compacted(references)
        self.columns[_OFFSETS].replace(moved)
        self.columns[_SIZES].replace(counts)

    # -- state

    def lists(self, gids: GroupIds) -> Iterator[Any]:
        """Starts and rows of the lists of some group ids."""
        _, offsets, _, counts = self._books
        starts = np.zeros(len(gids) + 1, np.int64)
        np.cumsum(counts[gids], out=starts[1:])
        references = np.empty(int(starts[-1]), np.int64)
        kernels.gather(gids, self._arena, offsets, starts, references)
        yield starts
        yield self._store.take(references)

    def result(self, gids: GroupIds) -> pa.Array:
        starts, rows = self.lists(gids)
        if int(starts[-1]) > 2**31 - 1:
            raise pa.ArrowInvalid("lists of more than 2**31 rows do not fit one array")
        return pa.ListArray.from_arrays(pa.array(starts.astype(np.int32)), rows)

    def state(self, gids: GroupIds) -> list[pa.Array]:
        return [self.result(gids)]

    def restore(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        for values in self._books:
            values[gids] = 0
        self.merge(gids, columns)

    def merge(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        lists: Any = columns[0]
        self._add(np.repeat(gids, np.diff(lists.offsets.to_numpy())), lists.flatten())

    def keep(self, gids: GroupIds) -> None:
        for column in self.columns:
            column.replace(column.values[gids])
        self._used = len(gids)
        self._pack()

    def used(self, gids: GroupIds) -> npt.NDArray[np.bool_]:
        """Mask of those of some group ids that hold a row."""
        return self._books[_COUNTS][gids] > 0

    def frozen(self, columns: Sequence[Values]) -> Accumulator:
        copy = object.__new__(RankedRows)
        vars(copy).update(vars(self))
        copy._store, copy._copies = self._store.frozen(), columns
        self._epoch += 1
        return copy


def _prints(columns: Sequence[pa.Array]) -> npt.NDArray[np.int64]:
    """A hash of each row's content; a null has one of its own, whatever other rows hold."""
    prints = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        combine(prints, hash_keys([_hashable(column)]))
    return prints.view(np.int64)


def _hashable(column: pa.Array) -> pa.Array:
    """The column in a type that has a hash: times of day and durations by their number."""
    kind = column.type
    return column.cast(pa.int32() if kind.bit_width == 32 else pa.int64()) if pa.types.is_temporal(kind) else column

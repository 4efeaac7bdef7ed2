"""Top-n: ranked rows by key, and the operator that keeps them up to date."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.changes import OP, added_rows, op_column, row_type
from cutwater.data.words import to_words, valid_rows
from cutwater.operators.aggregate.keyed_operator import AggregateTable, KeyedOperator, as_rows
from cutwater.operators.aggregate.value_accumulators import ArrayAccumulator
from cutwater.operators.base import Outputs
from cutwater.operators.ranking import kernels
from cutwater.state.growing_array import Values
from cutwater.state.kernels import combine
from cutwater.state.key_index import GroupIds
from cutwater.state.keys import hash_keys, require_valid_keys
from cutwater.state.table.row_store import ValueStore

if TYPE_CHECKING:
    from cutwater.operators.ranking.top_spec import TopRows, TopSpec


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
    """The changes of a part of the work among the first n rows."""

    rows: list[pa.Array]
    """Columns of the rows."""
    codes: npt.NDArray[np.int8]
    ranks: npt.NDArray[np.int64]
    missing: int
    """Rows to be removed that were not there."""


class RankedRows(ArrayAccumulator):
    """Rows in a store, and by group id a sorted list of references to them; see ``kernels``.

    Args:
        spec: order and number.
        schema: of the rows.
    """

    def __init__(self, spec: TopRows, schema: pa.Schema) -> None:
        super().__init__(np.int32, np.int64, np.int32, np.int32)  # epochs, offsets, sizes, counts
        self._spec = spec
        self._schema = schema
        self._type = row_type(schema)
        self._store = ValueStore(self._type)
        self._used = 0
        self._entries = 0
        self._width = 2 + len(spec.by)
        self._arena = np.zeros((_FIRST_ENTRIES, self._width), np.int64)
        self._epoch = 1

    @property
    def varying_bytes(self) -> int:
        return self._arena.nbytes + self._store.nbytes

    def reserve(self, gids: int) -> None:
        super().reserve(gids)
        self._used = gids

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
        """Do a part of the work: all of it, or as much as one output batch takes."""
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
                tuple(self._arrays),
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
        self._add(gids, as_rows(batch.select(self._schema.names)))

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
        return int(self._arrays[_COUNTS][: self._used].sum(dtype=np.int64))

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
        _, offsets, _, counts = self._arrays
        live, moved, counts = self._live(), offsets[: self._used].copy(), counts[: self._used].copy()
        arena = np.zeros((2 * live + _FIRST_ENTRIES, self._width), np.int64)
        references = np.empty(live, np.int64)
        self._entries = kernels.pack(self._arena, moved, counts, arena, references)
        self._arena, self._store = arena, self._store.compacted(references)
        self.columns[_OFFSETS].replace(moved)
        self.columns[_SIZES].replace(counts)

    # -- state

    def _lists(self, gids: GroupIds) -> tuple[npt.NDArray[np.int64], pa.Array]:
        """Starts and rows of the lists of some group ids."""
        _, offsets, _, counts = self._arrays
        starts = np.zeros(len(gids) + 1, np.int64)
        np.cumsum(counts[gids], out=starts[1:])
        references = np.empty(int(starts[-1]), np.int64)
        kernels.gather(gids, self._arena, offsets, starts, references)
        return starts, self._store.take(references)

    def result(self, gids: GroupIds) -> pa.Array:
        starts, rows = self._lists(gids)
        if int(starts[-1]) > 2**31 - 1:
            raise pa.ArrowInvalid("lists of more than 2**31 rows do not fit one array")
        return pa.ListArray.from_arrays(pa.array(starts.astype(np.int32)), rows)

    def restore(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        for values in self._arrays:
            values[gids] = 0
        self.merge(gids, columns)

    def merge(self, gids: GroupIds, columns: list[pa.Array]) -> None:
        lists: Any = columns[0]
        self._add(np.repeat(gids, np.diff(lists.offsets.to_numpy())), lists.flatten())

    def keep(self, gids: GroupIds) -> None:
        super().keep(gids)
        self._used = len(gids)
        self._pack()

    def used(self, gids: GroupIds) -> npt.NDArray[np.bool_]:
        """Mask of those of some group ids that hold a row."""
        return self._arrays[_COUNTS][gids] > 0

    def frozen(self, columns: Sequence[Values]) -> Self:
        copy = super().frozen(columns)
        copy._store = self._store.frozen()
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


class Top(KeyedOperator):
    """One table of ranked rows by key; what a batch changes comes out in batches of a bounded size."""

    def __init__(self, spec: TopSpec) -> None:
        types = [field.type for field in spec.key_fields]
        super().__init__(types, (spec.rows,), spec.table, spec.state_schema, timed=False)
        self._spec = spec
        self._work: Work | None = None

    @property
    def _ranked(self) -> RankedRows:
        return cast("RankedRows", self._table.accumulators[0])

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        if batch.num_rows == 0:
            return []
        spec = self._spec
        if spec.updating and self._worth_a_sweep():
            self._keep(self._live(self._table, self._all_gids))
        require_valid_keys(batch, spec.keys)
        added = None
        if spec.updating:
            added = added_rows(batch)
            batch = batch.drop_columns([OP])
        self._make_room()
        gids = self._table.upsert([batch.column(name) for name in spec.keys])
        self._work = self._ranked.work(gids, as_rows(batch), added)
        outputs = self.resume()
        if self.ctx.repeatable:  # where a part ends depends on the room that there is, which a restore changes
            outputs += self._drained()
            if len(outputs) > 1:
                outputs = [(0, pa.concat_batches([rows for _, rows in outputs]))]
        return outputs

    def _live(self, table: AggregateTable, gids: GroupIds) -> npt.NDArray[np.bool_]:
        return cast("RankedRows", table.accumulators[0]).used(gids)

    @property
    def pending(self) -> bool:
        return self._work is not None

    def resume(self) -> Outputs:
        work = self._work
        if work is None:
            return []
        changes = self._ranked.change(work)
        if work.done:
            self._work = None
        if changes.missing:
            self.ctx.count("rows_unmatched", changes.missing)
        if len(changes.codes) == 0:
            return []
        rank = [] if self._spec.rank is None else [pa.array(changes.ranks)]
        columns = [op_column(changes.codes), *changes.rows, *rank]
        return [(0, pa.RecordBatch.from_arrays(columns, schema=self._spec.outputs[0]))]

    def on_watermark(self, watermark: int) -> Outputs:
        return self._drained()

"""Keys that have several rows of a table each, and leave memory with all of them.

On disk the rows of a key are one value, packed one behind the other.  A key that is not in memory is brought in by its
rows, and by the calendar: when the first of its rows wants to be looked at, or when results are asked for early and it
has some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.state.disk.row_codec import RowCodec
from cutwater.state.disk.tables import NEVER
from cutwater.state.growing_array import GrowingArray
from cutwater.state.key_index import GroupIds, KeyIndex, NullableIndex, keys_of
from cutwater.state.segments import SegmentKind
from cutwater.state.table.keyed_table import Columns, KeyedTable
from cutwater.state.table.spill import DELETED_KEYS, PART_KEYS, Room, Spill

V = TypeVar("V", bound=Columns)

_ROW_BYTES = 64
"""Bytes that a row takes besides its columns, in the index and what the owner keeps of it."""


class RowOwner(Protocol[V]):
    """The owner of the rows.  Those of a key hang together from one of them, its *anchor*."""

    @property
    def table(self) -> KeyedTable[V]:
        """The rows."""
        ...

    def insert(self, keys: Sequence[pa.Array]) -> GroupIds:
        """Make the anchors of new keys."""
        ...

    def members(self, anchors: GroupIds) -> tuple[GroupIds, npt.NDArray[np.int64]]:
        """The live rows of some keys, one key after the other, and the number of the key that each belongs to."""
        ...

    def state_rows(self, gids: GroupIds) -> list[pa.Array]:
        """All columns of some rows, the keys first."""
        ...

    def add(self, columns: Sequence[pa.Array]) -> None:
        """Add rows, as ``state_rows`` gives them."""
        ...

    def retain(self, anchors: GroupIds) -> None:
        """Forget all but the live rows of some keys, and renumber those: see ``MultiRowKeys.renumbered``."""
        ...

    def sweep(self) -> None:
        """Forget all but the live rows: see ``MultiRowKeys.forget`` and ``MultiRowKeys.renumbered``."""
        ...

    def instants(self, gids: GroupIds) -> npt.NDArray[np.int64]:
        """The times at which some rows want to be looked at."""
        ...

    def waiting(self, gids: GroupIds) -> npt.NDArray[np.bool_]:
        """Mask of the rows that may come out early."""
        ...

    def empty_page(self) -> MultiRowKeys[V]:
        """Small ones of the same make without rows."""
        ...


class MultiRowKeys(Generic[V]):
    """Keys by group id, each with its anchor in a table; see ``Spillable``.

    Args:
        room: of keys that do not fit in memory; ``None``: all of them do.
        early: rows may come out early.
    """

    def __init__(
        self,
        key_types: Sequence[pa.DataType],
        row_types: Sequence[pa.DataType],
        rows: RowOwner[V],
        room: Room | None,
        *,
        early: bool = False,
    ) -> None:
        self._rows = rows
        self.index: KeyIndex = NullableIndex(key_types)
        self._codec = RowCodec(row_types)
        self._anchors = GrowingArray(np.int32)
        self._numbers = GrowingArray(np.int32)
        """The key of each anchor."""
        self.spill = None if room is None else Spill(self, room, lambda gids: self._anchors.values[gids])
        self._due = None if self.spill is None else self.spill.look_again(lambda part, gids: part.earliest(gids))
        self._early = self.spill.look_again(self._next_round) if self.spill is not None and early else None
        self._round = 0
        """Number of times that early results have been asked for."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def table(self) -> KeyedTable[V]:
        """The rows."""
        return self._rows.table

    def anchors(self, keys: Sequence[pa.Array]) -> GroupIds:
        """The anchors of some keys, which are in memory from now on, and may change."""
        gids = self.upsert(keys)
        anchors: GroupIds = self._anchors.values[gids]
        self.table.touch(anchors)
        return anchors

    def upsert(self, keys: Sequence[pa.Array]) -> GroupIds:
        """Group ids of keys, with all their rows."""
        known = len(self.index)
        gids = self.index.upsert(keys)
        if (count := len(self.index)) > known:
            fresh = np.arange(known, count, dtype=np.int32)
            anchors = self._rows.insert(self.index.columns(fresh))
            self._anchors.reserve(count)
            self._anchors.values[fresh] = anchors
            self._numbers.reserve(len(self.table))
            self._numbers.values[anchors] = fresh
            if self.spill is not None:
                self.spill.fetch(known)
        if self.spill is not None:
            self.spill.use(gids)
        return gids

    def use(self, anchors: GroupIds) -> None:
        """The rows of these keys change: what lies of them elsewhere counts no more."""
        if self.spill is not None:
            self.spill.use(self._numbers.values[anchors])

    def _live(self, gids: GroupIds) -> tuple[GroupIds, npt.NDArray[np.int64]]:
        """The live rows of some keys, one key after the other, and which of these keys each belongs to."""
        return self._rows.members(self._anchors.values[gids])

    # -- more than memory holds

    def _next_round(self, part: MultiRowKeys[V], gids: GroupIds) -> npt.NDArray[np.int64]:
        """Keys that leave with rows which have not come out want to be looked at in the next round."""
        return np.where(part.waiting(gids), self._round, NEVER)

    @property
    def next_instant(self) -> int | None:
        """The time at which a key outside of memory wants to be looked at next; ``None``: none is waiting."""
        return None if self._due is None else self._due.next_instant

    def due(self, watermark: int) -> bool:
        """True if keys outside of memory want to be looked at."""
        return self._due is not None and self._due.due(watermark)

    def bring_due(self, watermark: int) -> Iterator[None]:
        """Bring keys in of which rows want to be looked at, a part at a time; nobody holds group ids meanwhile."""
        while self._due is not None and self._due.due(watermark):
            self._bring(self._due.take(watermark, PART_KEYS))
            yield

    def bring_waiting(self) -> Iterator[GroupIds]:
        """Bring keys in with rows that may come out early, a part at a time: the live rows of each part."""
        before, self._round = self._round, self._round + 1  # what leaves now is for the next round
        while self._early is not None and self._early.due(before):
            yield self._live(np.unique(self._bring(self._early.take(before, PART_KEYS))))[0]

    def _bring(self, keys: Sequence[pa.Array]) -> GroupIds:
        self.make_room()
        return self.upsert(keys) if keys else np.empty(0, np.int32)

    def make_room(self) -> None:
        """Between batches, when nobody holds group ids: move keys out if there are too many, a part at a time."""
        spill = self.spill
        if spill is None:
            return
        crowded = spill.full and not spill.busy
        if crowded:  # what is dead must not be written; half of the others go in any case, not to be back here soon
            self._rows.sweep()
        kept = spill.make_room(self.table.log, begin=crowded)
        if kept is not None:
            self.keep(kept)

    def forget(self, anchors: GroupIds) -> None:
        """The keys of these anchors have no row any more; ``renumbered`` follows."""
        log, gids = self.table.log, self._numbers.values[anchors]
        if self.spill is not None:
            self.spill.delete(gids, log)
        if log is not None and len(gids):
            log.delete(keys_of(self.index, gids), np.arange(len(gids), dtype=np.int32))
            log.restart(DELETED_KEYS)

    @property
    def value_types(self) -> list[pa.DataType]:
        return [pa.large_binary()]

    @property
    def memory_bytes(self) -> int:
        return self.table.memory_bytes + len(self.table) * _ROW_BYTES + self.index.key_bytes

    def whole_rows(self, gids: GroupIds) -> list[pa.Array]:
        """Key columns, and the rows of each key, packed."""
        rows, owners = self._live(gids)
        bounds = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=len(gids)))]).astype(np.int64)
        columns = self._rows.state_rows(rows)[len(self.index.types) :]
        return [*self.index.columns(gids), self._codec.pack(columns, bounds)]

    def set_rows(self, gids: GroupIds, columns: Sequence[pa.Array]) -> None:
        rows, counts = self._codec.unpack(columns[0])
        self.add([*self.index.columns(np.repeat(gids, counts)), *rows])

    def add(self, columns: Sequence[pa.Array]) -> None:
        """Add rows, as ``RowOwner.state_rows`` gives them."""
        self._rows.add(columns)

    def expect(self, keys: int) -> None:
        """Have room for so many rows at once, if there are none yet."""
        self.table.expect(keys)

    def keep(self, gids: GroupIds) -> None:
        self._rows.retain(self._anchors.values[gids])

    def renumbered(self, numbers: GroupIds) -> None:
        """The rows have got these numbers, -1 for those that went; keys whose anchor went have gone."""
        anchors = numbers[self._anchors.values[: len(self)]]
        stay = np.flatnonzero(anchors >= 0).astype(np.int32)
        self.index = keys_of(self.index, stay)
        self._anchors.replace(anchors[stay])
        self._numbers.reserve(len(self.table))
        self._numbers.values[anchors[stay]] = np.arange(len(stay), dtype=np.int32)
        if self.spill is not None:
            self.spill.keep(stay)

    def page(self, keys: Sequence[pa.Array], columns: Sequence[pa.Array]) -> MultiRowKeys[V]:
        page = self._rows.empty_page()
        if len(keys[0]):
            page.set_rows(page.upsert(keys), columns)
        return page

    def earliest(self, gids: GroupIds) -> npt.NDArray[np.int64]:
        """The time at which the first of the rows of each key wants to be looked at."""
        rows, owners = self._live(gids)
        found: npt.NDArray[np.int64] = np.full(len(gids), NEVER, np.int64)
        np.minimum.at(found, owners, self._rows.instants(rows))
        return found

    def waiting(self, gids: GroupIds) -> npt.NDArray[np.bool_]:
        """Mask of the keys with rows that may come out early."""
        rows, owners = self._live(gids)
        return np.bincount(owners[self._rows.waiting(rows)], minlength=len(gids)) > 0

    def frozen(self, checkpoint_id: int) -> FrozenMultiRowKeys[V]:
        """The keys and rows as they are now, for another thread."""
        return FrozenMultiRowKeys(self.table.frozen(checkpoint_id, self.spill), self.index.frozen(), self.page)


class FrozenMultiRowKeys(Generic[V]):
    """Keys with their rows at one instant."""

    def __init__(
        self,
        table: KeyedTable[V],
        index: KeyIndex,
        page: Callable[[Sequence[pa.Array], Sequence[pa.Array]], MultiRowKeys[V]],
    ) -> None:
        self.table, self._index, self._page = table, index, page

    def parts(
        self, gids: GroupIds, state_rows: Callable[[GroupIds], list[pa.Array]]
    ) -> Iterator[tuple[KeyedTable[V], GroupIds, SegmentKind]]:
        """Tables and group ids to write one after the other; see ``KeyedTable.parts``."""
        spilled, keys = self.table.spilled, len(self._index.types)
        if spilled is None:
            yield self.table, gids, "base"
            return
        identity = self.table.index.columns
        groups = spilled.group_of(identity(gids)[-keys:]) if len(gids) else np.empty(0, np.uint16)
        order = np.argsort(groups, kind="stable")
        gids, groups = gids[order], groups[order]
        newer = keys_of(self._index, np.arange(len(self._index), dtype=np.int32))  # a frozen index finds nothing
        for chunk in spilled.rows.chunks():
            only = pa.array(newer.find(chunk.keys) < 0)
            page = self._page(*([column.filter(only) for column in part] for part in (chunk.keys, chunk.values)))
            here = int(np.searchsorted(groups, chunk.until))
            if here:
                page.add(state_rows(gids[:here]))
                gids, groups = gids[here:], groups[here:]
            yield page.table, all_gids(page.table), "delta" if chunk.goes_on else "base"
        yield self.table, gids, "base"

    def journal(self, epoch: int) -> Iterator[MultiRowKeys[V]]:
        """Keys that left memory after they had changed, one after the other: a key replaces what came of it before."""
        spilled = self.table.spilled
        for chunk in () if spilled is None else spilled.rows.journal(epoch):
            gids = NullableIndex([key.type for key in chunk.keys]).upsert(chunk.keys)
            latest = np.empty(int(gids.max()) + 1, np.int64)
            latest[gids] = np.arange(len(gids))  # a key may have left in several epochs: the last one counts
            rows = pa.array(latest)
            yield self._page(*([column.take(rows) for column in part] for part in (chunk.keys, chunk.values)))


def all_gids(table: KeyedTable[Any] | MultiRowKeys[Any]) -> GroupIds:
    """Every group id of a table."""
    return np.arange(len(table), dtype=np.int32)

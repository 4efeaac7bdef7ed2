"""The keys of a table of sessions, where they may be more than memory holds.

What moves is a key with all its sessions: a row looks for neighbours in time among them, and may make one of several.
On disk they are one value, packed one behind the other.  A key on disk is brought in by its rows, and by the calendar:
when the first of its sessions wants to be looked at, or when results are asked for early and it has some.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.operators.window.session_rows import Book, state_rows
from cutwater.state.disk.row_codec import RowCodec
from cutwater.state.disk.spill_queue import NEVER, SpillQueue
from cutwater.state.growing_array import GrowingArray
from cutwater.state.index.key_index import KeyIndex, Slots
from cutwater.state.index.nullable import NullableIndex
from cutwater.state.table.spill import DELETED_KEYS, Spill

if TYPE_CHECKING:
    from cutwater.operators.aggregate.keyed_table import KeyedTable
    from cutwater.operators.base import Context
    from cutwater.operators.window.session_table import SessionTable
    from cutwater.operators.window.spec import WindowAggregateSpec
    from cutwater.operators.window.stored_windows import Times
    from cutwater.state.disk.rocks import RocksStore

PORTION_KEYS = 1 << 14
"""Keys on disk that are brought in at once."""
_SESSION_BYTES = 64
"""What a session takes besides its columns: in the index, the chains and the calendar."""


class SessionKeys:
    """Keys by slot, each with its anchor in the table of sessions; see ``Spillable``.

    Args:
        spec: of the windows.
        sessions: the table, empty.
    """

    def __init__(self, spec: WindowAggregateSpec, sessions: SessionTable) -> None:
        self._spec, self._sessions = spec, sessions
        self.index: KeyIndex = NullableIndex([spec.input_schema.field(name).type for name in spec.keys])
        self._codec = RowCodec(spec.state_schema.types[len(spec.keys) :])
        self._anchors = GrowingArray(np.int32)
        self._numbers = GrowingArray(np.int32)
        """The key of each anchor."""
        self.spill: Spill[SessionKeys] | None = None
        self._due: SpillQueue | None = None
        self._early: SpillQueue | None = None
        self._round = 0
        """How often early results have been asked for."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def table(self) -> KeyedTable:
        """Of the sessions."""
        return self._sessions.table

    def anchors(self, keys: Sequence[pa.Array]) -> Slots:
        """The anchors of some keys, which are in memory from now on, and may change."""
        slots = self.upsert(keys)
        anchors: Slots = self._anchors.values[slots]
        self.table.touch(anchors)
        return anchors

    def upsert(self, keys: Sequence[pa.Array]) -> Slots:
        """Slots of keys, with all their sessions."""
        known = len(self.index)
        slots = self.index.upsert(keys)
        if (count := len(self.index)) > known:
            fresh = np.arange(known, count, dtype=np.int32)
            anchors = self._sessions.upsert(np.zeros(len(fresh), np.int64), self.index.columns(fresh))
            self._anchors.reserve(count)
            self._anchors.values[fresh] = anchors
            self._numbers.reserve(len(self.table))
            self._numbers.values[anchors] = fresh
            if self.spill is not None:
                self.spill.fetch(known)
        if self.spill is not None:
            self.spill.use(slots)
        return slots

    def use(self, anchors: Slots) -> None:
        """The sessions of these keys change: what lies of them on disk counts no more."""
        if self.spill is not None:
            self.spill.use(self._numbers.values[anchors])

    def _live(self, slots: Slots) -> tuple[Slots, npt.NDArray[np.int64]]:
        """The live sessions of some keys, one key after the other, and which of these keys each belongs to."""
        return self._sessions.members(self._anchors.values[slots])

    # -- more than memory holds

    def spill_to(self, store: RocksStore, ctx: Context) -> None:
        """Keep keys on disk that do not fit in memory; there is none yet."""

        def logged(slots: Slots) -> Slots:
            return self._anchors.values[slots]

        self.spill = Spill(self, store, 0, ctx.max_parallelism, (ctx.state_memory_bytes or 0) // 2, logged)
        self._due = self.spill.look_again(lambda part, slots: part.earliest(slots))
        if self._spec.early is not None and self._spec.early.rows is None:
            self._early = self.spill.look_again(self._next_round)

    def _next_round(self, part: SessionKeys, slots: Slots) -> Times:
        """Keys that leave with rows which have not come out want to be looked at in the next round."""
        return np.where(part.waiting(slots), self._round, NEVER)

    @property
    def next_instant(self) -> int | None:
        """When a key on disk wants to be looked at next; ``None``: none is waiting."""
        return None if self._due is None else self._due.next_instant

    def due(self, watermark: int) -> bool:
        """Whether keys on disk want to be looked at."""
        return self._due is not None and self._due.due(watermark)

    def bring_due(self, watermark: int) -> Iterator[None]:
        """Bring keys on disk in of which sessions want to be looked at, a portion at a time; nobody holds slots."""
        while self._due is not None and self._due.due(watermark):
            self._bring(self._due.take(watermark, PORTION_KEYS))
            yield

    def bring_waiting(self) -> Iterator[Slots]:
        """Bring keys on disk in whose sessions have rows that have not come out, in portions: their sessions."""
        before, self._round = self._round, self._round + 1  # what leaves now is for the next round
        while self._early is not None and self._early.due(before):
            yield self._live(np.unique(self._bring(self._early.take(before, PORTION_KEYS))))[0]

    def _bring(self, keys: Sequence[pa.Array]) -> Slots:
        self.make_room()
        return self.upsert(keys) if keys else np.empty(0, np.int32)

    def make_room(self) -> None:
        """Between batches, when nobody holds slots: move keys out if there are too many, a portion at a time."""
        spill = self.spill
        if spill is None:
            return
        crowded = spill.full and not spill.busy
        if crowded:  # what is dead must not be written; half of the others go in any case, not to be back here soon
            self._sessions.sweep()
        kept = spill.make_room(self.table.log, begin=crowded)
        if kept is not None:
            self.keep(kept)

    def forget(self, anchors: Slots) -> None:
        """The keys of these anchors have no session any more; ``renumbered`` follows."""
        log, slots = self.table.log, self._numbers.values[anchors]
        if self.spill is not None:
            self.spill.delete(slots, log)
        if log is not None and len(slots):
            gone = NullableIndex(self.index.types, len(slots))
            log.delete(gone, gone.upsert(self.index.columns(slots)))
            log.restart(DELETED_KEYS)

    @property
    def value_types(self) -> list[pa.DataType]:
        return [pa.large_binary()]

    @property
    def memory_bytes(self) -> int:
        return self.table.memory_bytes + len(self.table) * _SESSION_BYTES + self.index.key_bytes

    def whole_rows(self, slots: Slots) -> list[pa.Array]:
        """Key columns, and the sessions of each key, packed."""
        sessions, owners = self._live(slots)
        bounds = np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=len(slots)))]).astype(np.int64)
        columns = state_rows(self._spec, self.table, sessions)[len(self._spec.keys) :]
        return [*self.index.columns(slots), self._codec.pack(columns, bounds)]

    def set_rows(self, slots: Slots, columns: Sequence[pa.Array]) -> None:
        sessions, counts = self._codec.unpack(columns[0])
        self.add([*self.index.columns(np.repeat(slots, counts)), *sessions])

    def add(self, columns: Sequence[pa.Array]) -> None:
        """Add sessions: rows of ``state_schema``."""
        self._sessions.restore(pa.RecordBatch.from_arrays(list(columns), schema=self._spec.state_schema))

    def keep(self, slots: Slots) -> None:
        self._sessions.retain(self._anchors.values[slots])

    def renumbered(self, numbers: Slots) -> None:
        """The sessions have got these numbers, -1 for those that went; and so have their keys gone."""
        anchors = numbers[self._anchors.values[: len(self)]]
        stay = np.flatnonzero(anchors >= 0).astype(np.int32)
        index = NullableIndex(self.index.types, len(stay))
        if len(stay):
            index.upsert(self.index.columns(stay))
        self.index = index
        self._anchors.replace(anchors[stay])
        self._numbers.reserve(len(self.table))
        self._numbers.values[anchors[stay]] = np.arange(len(stay), dtype=np.int32)
        if self.spill is not None:
            self.spill.keep(stay)

    def page(self, keys: Sequence[pa.Array], columns: Sequence[pa.Array]) -> SessionKeys:
        page = self._sessions.empty_page()
        if len(keys[0]):
            page.set_rows(page.upsert(keys), columns)
        return page

    def earliest(self, slots: Slots) -> Times:
        """When the first of the sessions of each key wants to be looked at."""
        sessions, owners = self._live(slots)
        found: Times = np.full(len(slots), NEVER, np.int64)
        np.minimum.at(found, owners, self._sessions.instants(sessions))
        return found

    def waiting(self, slots: Slots) -> npt.NDArray[np.bool_]:
        """Which keys have rows that have not come out, in sessions that have not fired."""
        sessions, owners = self._live(slots)
        waits = (self.table.book(Book.PENDING)[sessions] > 0) & ~self.table.book(Book.FIRED)[sessions]
        return np.bincount(owners[waits], minlength=len(slots)) > 0

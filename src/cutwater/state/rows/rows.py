"""Rows of two sides by key: what came since a checkpoint, what still counts, and what has left memory and is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import pyarrow as pa

from cutwater.errors import StorageError
from cutwater.state.disk.tables import RowJournal
from cutwater.state.key_index import GroupIds, KeyIndex
from cutwater.state.keys import hash_keys, key_groups
from cutwater.state.rows.keyed_rows import (
    FrozenKeyedRows,
    KeyedRows,
    Live,
    References,
    RowChains,
    RowSides,
    RowsPart,
    Wakes,
)
from cutwater.state.segments import Frozen, FrozenSegments, Segment
from cutwater.state.table.intervals import RESTORED, History, Intervals
from cutwater.state.table.keyed_segments import keyed_rows
from cutwater.state.table.spill import PART_KEYS, Room

LiveAt: TypeAlias = Callable[[Sequence[RowChains], int], Sequence[References]]
"""Rows of each side that still count at a watermark, ascending.  A row that does not, never will again."""
Counts: TypeAlias = tuple[int, int, int]
"""Rows of the first and of the second side, and the epoch: how many freezes there were."""

_FEW_ROWS = 1 << 10
"""May be in memory after a restore, whatever the budget."""
_SLACK_ROWS = 1 << 16
"""Dead rows below this number are not worth a sweep."""
_NO_ROWS: References = np.empty(0, np.int64)


class Rows:
    """Rows of two sides by key, each side in the order in which its rows came.  Belongs to one thread.

    What was added since a freeze are the rows behind those of then, until keys leave memory.  From then on rows that
    come are written to a journal, too, by epoch.

    Args:
        wakes: when rows want to be looked at though their key has left memory; ``NEVER``: they do not.
        room: of keys that do not fit in memory; ``None``: all of them do.
    """

    def __init__(
        self, types: RowSides, live: LiveAt, wakes: Wakes, owned: range, max_parallelism: int, room: Room | None
    ) -> None:
        self._types, self._live, self._wakes = types, live, wakes
        self._owned, self._groups, self._room = owned, max_parallelism, room
        self._log: Intervals[Counts] | None = None
        self._journals: list[RowJournal] = []
        self._epoch = 0
        self._first: Counts = (0, 0, 0)
        """Rows of each side that were there at the last freeze."""
        self._rows = KeyedRows(types, self._renumbered, room, wakes)
        self._sweep_at = _SLACK_ROWS

    @property
    def sides(self) -> list[RowChains]:
        """The rows in memory."""
        return self._rows.sides

    @property
    def index(self) -> KeyIndex:
        """Of the keys in memory."""
        return self._rows.index

    @property
    def done(self) -> References:
        """The watermark up to which the rows of each key have come out, by group id; see ``came_out``."""
        return self._rows.done

    def add(self, side: int, batch: pa.RecordBatch, times: References) -> GroupIds:
        """Add rows with their event times, at least one; returns the group ids of their keys."""
        if self._journals:
            groups = key_groups(hash_keys(self._types.key_columns(side, batch)), self._groups)
            self._journals[side].append(batch.columns, groups, self._epoch)
        return self._rows.add(side, batch, times)

    def came_out(self, gids: GroupIds, watermark: int) -> None:
        """Rows of these keys have come out, up to a watermark."""
        self._rows.came_out(gids, watermark)

    # -- time

    def waits(self, watermark: int) -> bool:
        """True if ``due`` gives anything."""
        return self._rows.wanted is not None and self._rows.wanted.due(watermark)

    def due(self, watermark: int) -> Iterator[int]:
        """Bring keys with rows whose time has come into memory, a part at a time; nobody holds group ids meanwhile.

        Gives the first group id of each part.
        """
        while (wanted := self._rows.wanted) is not None and wanted.due(watermark):
            self.make_room(watermark)
            first = len(self._rows)
            if keys := wanted.take(watermark, PART_KEYS):
                self._rows.upsert(keys)
            yield first

    def make_room(self, watermark: int) -> None:
        """Between batches, when nobody holds group ids: forget what does not count, and move out what is too much."""
        spill = self._rows.spill
        crowded = spill is not None and spill.full and not spill.busy
        if crowded or self._rows.count >= self._sweep_at:
            self._sweep(watermark, crowded=crowded)
        self._rows.make_room()
        if spill is not None and spill.rows.used and self._log is not None and not self._journals:
            self._log.begin(None)  # what came before is not in the journals
            self._begin_journals()

    def _sweep(self, watermark: int, *, crowded: bool = False) -> None:
        """Forget dead rows, and keys without others, if they are half, or a quarter where memory is scarce."""
        total = self._rows.count
        live = self._live(self.sides, watermark)
        remaining = sum(len(rows) for rows in live)
        if 2 * remaining > total and not (crowded and 4 * remaining < 3 * total):
            self._sweep_at = total + total // 2
            return
        wanted = self._rows.with_rows(live)
        if self._rows.spill is not None:
            self._rows.spill.delete(np.flatnonzero(~wanted).astype(np.int32), None)
        self._rows.retain(np.flatnonzero(wanted).astype(np.int32), live)
        self._sweep_at = 2 * remaining + _SLACK_ROWS

    def clean(self, watermark: int) -> None:
        """The watermark has risen: forget some keys outside of memory without a row that counts."""
        self._rows.clean(lambda sides: self._live(sides, watermark))

    def forget_all(self) -> None:
        """No row in memory counts any more."""
        if self._rows.spill is not None:
            self._rows.spill.delete(np.arange(len(self._rows), dtype=np.int32), None)
            self._rows.retain(np.empty(0, np.int32), [_NO_ROWS, _NO_ROWS])
        else:
            self._renumbered([_NO_ROWS, _NO_ROWS])
            self._rows = KeyedRows(self._types, self._renumbered)
        self._sweep_at = _SLACK_ROWS

    def _renumbered(self, kept: Sequence[References]) -> None:
        """These rows of each side have become 0, 1, 2 ..., the others are gone."""

        def moved(first: Counts) -> Counts:
            left, right = (int(np.searchsorted(rows, row)) for rows, row in zip(kept, first[:2], strict=True))
            return left, right, first[2]

        self._first = moved(self._first)
        if self._log is not None:
            self._log.change(moved)

    # -- snapshots

    def track(self, *, restored: bool = False) -> None:
        """Keep in mind which rows come after a freeze, from now (after a restore) or the next freeze on."""
        self._first = self._counts_now
        self._log = Intervals[Counts](_earlier, RESTORED if restored else None)
        if self._rows.spill is not None and self._rows.spill.rows.used:
            self._begin_journals()

    def _begin_journals(self) -> None:
        if self._room is not None:
            self._journals = [RowJournal(self._room.store, schema.types) for schema in self._types.schemas]

    @property
    def _counts_now(self) -> Counts:
        left, right = self.sides
        return left.rows, right.rows, self._epoch

    def freeze(self, checkpoint_id: int, watermark: int, before: Segment) -> Frozen:
        """All rows that count at a watermark, as they are now; the snapshot begins with a segment of the caller's."""
        history = None
        if self._log is not None:
            history = self._log.cut(checkpoint_id, self._first)
            for journal in self._journals:
                journal.forget((self._log.kept or [(0, 0, self._epoch)])[0][2])
        self._epoch += 1
        self._first = self._counts_now

        def segments(parts: Iterable[RowsPart]) -> Iterator[Segment]:
            yield before
            for keys, sides, rows, kind in parts:
                for name, side, references in zip(self._types.names, sides, rows, strict=True):
                    yield from side.segments(name, references, keys, self._groups, kind)

        frozen = FrozenKeyedRows(self._rows, self._journals)
        return FrozenRows(frozen, lambda sides: self._live(sides, watermark), segments, self._log, history)

    def restore(self, segments: Iterable[Segment]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each side that are to be added, perhaps not all of them; segments are taken as they come if they
        need not fit in memory.

        Raises:
            StorageError: a segment is of no side.
        """
        spill, owned, names = self._rows.spill, self._owned, self._types.names
        waiting: tuple[list[Segment], list[Segment]] = ([], [])
        reached: list[tuple[int, int]] = [(owned.stop, owned.start)] * len(names)  # groups that have had rows
        for segment in segments:
            if segment.name not in names:
                raise StorageError(
                    f"the snapshot has a state {segment.name!r}, which a join does not know",
                    hint="Give the changed step a new id, or restore with the program that wrote the snapshot.",
                )
            side = names.index(segment.name)
            if spill is None:
                waiting[side].append(segment)
                continue
            first, last = segment.key_groups or (owned.start, owned.stop)
            if segment.kind == "base" and first < reached[side][1] and reached[side][0] < last:
                self._rows.remove(side, range(first, last))
            reached[side] = min(first, reached[side][0]), max(last, reached[side][1])
            for batch in keyed_rows([replace(segment, kind="delta")], self._types.schemas[side], owned):
                for begin in range(0, batch.num_rows, PART_KEYS):
                    yield side, batch.slice(begin, PART_KEYS)
                    while spill.busy or (spill.full and self._rows.count > _FEW_ROWS):
                        self._rows.make_room()
        for side, of_side in enumerate(waiting):
            for batch in keyed_rows(of_side, self._types.schemas[side], owned):
                yield side, batch
        self._sweep_at = self._rows.count + _SLACK_ROWS


class FrozenRows(FrozenSegments):
    """Both sides at one instant.

    Rows are only ever added, and time forgets them.  So what changed is the rows that came, and a restore forgets those
    that the watermark has left behind.
    """

    def __init__(
        self,
        frozen: FrozenKeyedRows,
        live: Live,
        make: Callable[[Iterable[RowsPart]], Iterator[Segment]],
        log: Intervals[Counts] | None,
        history: History[Counts] | None,
    ) -> None:
        super().__init__(lambda: make(frozen.parts(live)))
        self._frozen, self._live, self._make_of = frozen, live, make
        self._log, self._history = log, history

    @property
    def incremental(self) -> bool:
        return self._history is not None

    def changes(self, since: int) -> Iterator[Segment] | None:
        if self._log is None or self._history is None or not (later := self._history.since(since)):
            return None
        self._log.completed(since)
        left, right, epoch = later[0]
        if self._frozen.journaled:
            return self._make_of(self._frozen.added(epoch, self._live))
        sides = self._frozen.sides
        live = self._live(sides)
        added = [rows[np.searchsorted(rows, first) :] for rows, first in zip(live, (left, right), strict=True)]
        if 2 * sum(map(len, added)) > sum(map(len, live)):
            return None
        return self._make_of([RowsPart(self._frozen.index.columns, sides, added, "delta")])

    def release(self) -> None:
        super().release()
        self._frozen.release()
        self._make_of = lambda parts: iter(())


def _earlier(first: Counts, second: Counts) -> Counts:
    return first

"""Group ids that changed, and keys that went, between the freezes of a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cutwater.state import column_kernels as kernels
from cutwater.state.key_index import GroupIds, KeyIndex
from cutwater.state.table.intervals import History, Intervals

Bits = npt.NDArray[np.uint8]

_LONGEST_REST = 16
"""Freezes without marking in between, where again and again most rows change."""


@dataclass(frozen=True, slots=True)
class Deleted:
    """Keys that went, as group ids of an index that still holds them."""

    index: KeyIndex
    gids: GroupIds


class Changed(NamedTuple):
    """The changes since a freeze.

    Attributes:
        gids: that changed, ascending.
        deleted: keys that went.
        epoch: the first one after that freeze; see ``ChangeLog.epoch``.
    """

    gids: GroupIds
    deleted: tuple[Deleted, ...] = ()
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class _Marks:
    """Of one interval, that began with an epoch."""

    bits: Bits
    deleted: tuple[Deleted, ...]
    epoch: int


_UNKNOWN: History[_Marks] = History(None, ())


@dataclass(frozen=True, slots=True)
class Changes:
    """The events up to a freeze, told since each of the freezes before it."""

    history: History[_Marks]
    end: int = 0
    """The epoch after this freeze."""

    def since(self, checkpoint_id: int) -> Changed | None:
        """The changes since a freeze; ``None`` if that is not known.

        A group id may be of a key that has gone since; keys that went may have come back, in another group id.  So
        deletions are applied first.
        """
        later = self.history.since(checkpoint_id)
        if later is None:
            return None
        marks = reduce(_joined, later) if later else _Marks(np.zeros(0, np.uint8), (), self.end)
        gids: GroupIds = np.empty(8 * len(marks.bits), np.int32)
        return Changed(gids[: kernels.marked(marks.bits, gids)], marks.deleted, marks.epoch)


class ChangeLog:
    """Keeps track of changes; belongs to the thread that makes them.

    Where most rows change between two freezes, all are written anyway and marking them is in vain: once it has seen so
    itself, or been told so (``learn``), the log rests for a freeze, then for two, for four ..., and looks again in
    between.  Nor does it mark what nobody may ask for, as before the first freeze.

    Args:
        start: checkpoint that the present content is that of; ``None``: nothing is known before the first freeze.
        rows: how many the table has; asked for now and then, to see whether most have changed.  Not for tables whose
            rows go: those that changed may be gone by the freeze.

    >>> log = ChangeLog()
    >>> log.mark(np.array([3, 1, 3], np.int32)); _ = log.cut(1)
    >>> log.mark(np.array([2], np.int32)); _ = log.cut(2)
    >>> changes = log.cut(3)
    >>> changes.since(1)[0].tolist(), changes.since(2)[0].tolist(), changes.since(9)
    ([2], [], None)
    """

    def __init__(self, start: int | None = None, rows: Callable[[], int] | None = None) -> None:
        self._rows = rows
        self._unseen = 0  # group ids marked since it was counted how many differ
        self._bits: Bits = np.zeros(0, np.uint8)
        self._deleted: list[Deleted] = []
        self._intervals = Intervals(_joined, start)
        self._resting = 0
        self._next_rest = 1
        self._most_changed = False
        self.epoch = 0
        """Freezes so far."""

    @property
    def epochs(self) -> range:
        """Those that somebody may ask for, the present one among them."""
        kept = self._intervals.kept
        return range(kept[0].epoch if kept else self.epoch, self.epoch + 1)

    def changed(self, gids: GroupIds) -> npt.NDArray[np.bool_]:
        """Mask of those of these group ids that changed in ``epochs``; none, if nobody may ask for the present one."""
        kept = self._intervals.kept
        if self._resting or kept is None:
            return np.zeros(len(gids), np.bool_)
        found = np.zeros(len(gids), np.uint8)
        for bits in (self._bits, *(marks.bits for marks in kept)):
            inside = gids >> 3 < len(bits)
            found[inside] |= bits[gids[inside] >> 3] >> (gids[inside] & 7).astype(np.uint8) & np.uint8(1)
        return found.astype(np.bool_)

    def mark(self, gids: GroupIds, used: int = 0) -> None:
        """These group ids change; ``used``: group ids in use in the table, if the caller knows."""
        if not self.tracking:
            return
        needed = ((used or int(gids.max(initial=0)) + 1) + 7) // 8
        if needed > len(self._bits):
            grown = np.zeros(2 * needed, np.uint8)
            grown[: len(self._bits)] = self._bits
            self._bits = grown
        kernels.mark(gids, self._bits)
        self._unseen += len(gids)
        if self._rows is not None and 2 * self._unseen > (rows := self._rows()):  # counting costs less than marking
            self._unseen = 0
            if 2 * int(kernels.count_marked(self._bits)) > rows:
                self._most_changed = True
                self._give_up()

    def delete(self, index: KeyIndex, gids: GroupIds) -> None:
        """The keys of these group ids of a (frozen) index go."""
        if len(gids) and self.tracking:
            self._deleted.append(Deleted(index, gids))

    def keep(self, gids: GroupIds) -> None:
        """The group ids are renumbered: these become 0, 1, 2 ..., the others are gone."""
        self._bits = _renumbered(self._bits, gids)
        self._intervals.change(lambda marks: replace(marks, bits=_renumbered(marks.bits, gids)))

    def cut(self, checkpoint_id: int) -> Changes:
        """The freeze for a checkpoint: what happened so far."""
        epoch, self.epoch = self.epoch, self.epoch + 1
        if self._resting:
            self._resting -= 1
            if self._resting == 0:
                self._intervals.begin(checkpoint_id)
            return Changes(_UNKNOWN)
        marks = _Marks(self._bits, tuple(self._deleted), epoch)
        changes = Changes(self._intervals.cut(checkpoint_id, marks), self.epoch)
        self._bits, self._deleted, self._unseen = np.zeros(len(self._bits), np.uint8), [], 0
        if self._most_changed:
            self._most_changed = False
            self._resting = self._next_rest
            self._intervals.begin(None)
            self._next_rest = min(2 * self._next_rest, _LONGEST_REST)
        return changes

    def learn(self, *, most_changed: bool) -> None:
        """True if most rows had changed when somebody asked.  May be called from another thread."""
        self._most_changed = most_changed
        if not most_changed:
            self._next_rest = 1

    @property
    def tracking(self) -> bool:
        """True if somebody may ask for changes of the present epoch."""
        return not self._resting and self._intervals.kept is not None

    def restart(self, most_deleted: int) -> None:
        """Of more deletions than these keep nothing: the next checkpoint is whole."""
        if sum(len(deleted.gids) for deleted in self._deleted) > most_deleted:
            self._give_up()

    def _give_up(self) -> None:
        self._intervals.begin(None)
        self._bits, self._deleted = np.zeros(0, np.uint8), []

    def completed(self, checkpoint_id: int) -> None:
        """Nobody will ask for changes since older freezes than this.  May be called from another thread."""
        self._intervals.completed(checkpoint_id)


def _joined(first: _Marks, second: _Marks) -> _Marks:
    bits: Bits = np.zeros(max(len(first.bits), len(second.bits)), np.uint8)
    for marks in (first, second):
        bits[: len(marks.bits)] |= marks.bits
    return _Marks(bits, (*first.deleted, *second.deleted), first.epoch)


def _renumbered(bits: Bits, gids: GroupIds) -> Bits:
    flags = np.zeros(max(8 * len(bits), int(gids.max(initial=-1)) + 1), np.uint8)
    flags[: 8 * len(bits)] = np.unpackbits(bits, bitorder="little")
    return np.packbits(flags[gids], bitorder="little")

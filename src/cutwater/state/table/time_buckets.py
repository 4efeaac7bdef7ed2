"""Group ids in the order of their times: those that are due, and those that can be forgotten."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from cutwater.data.time import MAX_WATERMARK
from cutwater.state.index.key_index import GroupIds

_DEAD_ROWS = 4096
"""Group ids of forgotten buckets are swept out when they are more than this and more than the live ones."""

_NONE: GroupIds = np.empty(0, np.int32)


class TimeBuckets:
    """Group ids in buckets of one time each, and two queues in time order: buckets to come out, and such to forget.

    The bucket of a window is its start.

    Args:
        reach_us: from a bucket's time to the instant at which it is due.
        lateness_us: from there to the instant at which it is forgotten.
    """

    def __init__(self, reach_us: int, lateness_us: int) -> None:
        self._reach_us = reach_us
        self._lateness_us = lateness_us
        self._gids: dict[int, list[GroupIds]] = {}
        self._to_fire: list[int] = []
        self._to_forget: list[int] = []
        self._live = 0
        self._dead = 0
        self._ended = False

    def add(self, first_gid: int, starts: npt.NDArray[np.int64]) -> list[int]:
        """New group ids ``first_gid``, ``first_gid + 1`` ... belong to the windows with these starts.

        Returns the starts of the windows that are new.
        """
        opened: list[int] = []
        if len(starts) == 0:
            return opened
        gids = np.arange(first_gid, first_gid + len(starts), dtype=np.int32)
        self._live += len(gids)
        order = np.argsort(starts, kind="stable")
        ordered = starts[order]
        cuts = np.flatnonzero(np.diff(ordered)) + 1
        bounds = [0, *cuts.tolist(), len(order)]
        gids = gids[order]
        for begin, end in itertools.pairwise(bounds):
            start = int(ordered[begin])
            if start not in self._gids:
                self._gids[start] = []
                heapq.heappush(self._to_fire, start)
                opened.append(start)
            self._gids[start].append(gids[begin:end])
        return opened

    def fired(self, start: int) -> None:
        """A window has come out without group ids: remember when it can be forgotten."""
        if start not in self._gids:
            self._gids[start] = []
            heapq.heappush(self._to_forget, start)

    @property
    def next_instant(self) -> int | None:
        """At which watermark the next window fires; ``None``: none is waiting."""
        return self._to_fire[0] + self._reach_us if self._to_fire else None

    def of(self, start: int) -> list[GroupIds]:
        """The group ids of a window, in pieces."""
        return self._gids.get(start, [])

    def due(self, watermark: int) -> GroupIds:
        """Group ids of the windows that the watermark completes, in time order; each window once."""
        found: list[GroupIds] = []
        while self._to_fire and self._to_fire[0] + self._reach_us <= watermark:
            start = heapq.heappop(self._to_fire)
            heapq.heappush(self._to_forget, start)
            found += self._gids[start]
        return np.concatenate(found) if found else _NONE

    def firing(self, watermark: int) -> list[int]:
        """Starts of the windows that are ``due``, in time order."""
        return sorted(start for start in self._to_fire if start + self._reach_us <= watermark)

    def ending(self, watermark: int) -> list[int]:
        """Starts of the windows that can be forgotten once those that are due have come out, in time order."""
        reach = self._reach_us + self._lateness_us
        return sorted(start for start in (*self._to_fire, *self._to_forget) if start + reach <= watermark)

    def keep(self, gids: GroupIds) -> None:
        """Only these group ids are left, which become 0, 1, 2 ...; windows stay that have none now."""
        last = max((int(part[-1]) for parts in self._gids.values() for part in parts if len(part)), default=-1)
        renumbered = np.full(max(last, int(gids.max(initial=-1))) + 1, -1, np.int32)
        renumbered[gids] = np.arange(len(gids), dtype=np.int32)
        for start, parts in self._gids.items():
            moved = renumbered[np.concatenate(parts) if parts else _NONE]  # ascending, as group ids come
            self._gids[start] = [moved[moved >= 0]]
        self._live, self._dead = len(gids), 0

    def forget(self, watermark: int) -> GroupIds:
        """Forget fired windows that take no more rows; their group ids are dead: no row may find them again.

        At the end of time that is only true of group ids that are swept out: by the clock, windows may come again.
        """
        self._ended = watermark == MAX_WATERMARK
        reach = self._reach_us + self._lateness_us
        parts: list[GroupIds] = []
        while self._to_forget and self._to_forget[0] + reach <= watermark:
            parts += self._gids.pop(heapq.heappop(self._to_forget))
        gone = np.concatenate(parts) if parts else _NONE
        self._live -= len(gone)
        self._dead += len(gone)
        return gone

    @property
    def wasteful(self) -> bool:
        """True if the dead group ids should be swept out."""
        return self._dead > (0 if self._ended else max(_DEAD_ROWS, self._live))

    def live_parts(self) -> list[GroupIds]:
        """The live group ids, in pieces that never change."""
        return [part for parts in self._gids.values() for part in parts]


def join_gids(parts: Iterable[GroupIds]) -> GroupIds:
    """All group ids of the pieces, ascending."""
    pieces = list(parts)
    return np.sort(np.concatenate(pieces)) if pieces else _NONE

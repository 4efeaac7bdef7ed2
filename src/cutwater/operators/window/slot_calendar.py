"""Slots with an instant at which to look at them again."""

from __future__ import annotations

import heapq
import itertools

import numpy as np
import numpy.typing as npt

from cutwater.state.index.key_index import Slots


class SlotCalendar:
    """A rough queue: slots lie in buckets of time, and come back when the bucket begins.

    What an instant means may change meanwhile: whoever takes slots out looks whether it is time, and puts the others
    in again.

    Args:
        width_us: length of a bucket.

    >>> calendar = SlotCalendar(10)
    >>> calendar.add(np.array([4, 5, 6], np.int32), np.array([12, 27, 19]))
    >>> calendar.take(15).tolist(), calendar.take(15).tolist()
    ([4, 6], [])
    """

    def __init__(self, width_us: int) -> None:
        self._width_us = width_us
        self._buckets: dict[int, list[Slots]] = {}
        self._order: list[int] = []

    def add(self, slots: Slots, instants: npt.NDArray[np.int64]) -> None:
        """Put slots in."""
        if len(slots) == 0:
            return
        numbers = instants // self._width_us
        order = np.argsort(numbers, kind="stable")
        slots, numbers = slots[order], numbers[order]
        cuts = (np.flatnonzero(np.diff(numbers)) + 1).tolist()
        for begin, end in itertools.pairwise([0, *cuts, len(slots)]):
            number = int(numbers[begin])
            if number not in self._buckets:
                self._buckets[number] = []
                heapq.heappush(self._order, number)
            self._buckets[number].append(slots[begin:end])

    @property
    def next_instant(self) -> int | None:
        """The last instant of the earliest bucket; ``None``: there is none.

        >>> calendar = SlotCalendar(10)
        >>> calendar.add(np.array([4], np.int32), np.array([12]))
        >>> calendar.next_instant
        19
        """
        return self._order[0] * self._width_us + self._width_us - 1 if self._order else None

    def take(self, now: int) -> Slots:
        """Take out all slots of the buckets that have begun, each once."""
        found: list[Slots] = []
        while self._order and self._order[0] * self._width_us <= now:
            found += self._buckets.pop(heapq.heappop(self._order))
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int32)

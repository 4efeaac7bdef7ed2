"""A larger hash table that is filled while the present one goes on serving."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy.typing as npt

from cutwater.state.growing_array import in_background

AT_ONCE_SLOTS = 1 << 16
"""So many are entered into a new table at once: about a millisecond."""


class NextTable:
    """A larger table that a thread in the background fills, while the present one goes on serving.

    What an index stores of its keys only grows, so the thread reads what nobody changes.  Slots that came meanwhile are
    entered in further rounds, and the last few by the caller.

    Args:
        table: empty.
        enter: enters the slots from one number to another into a table.
        count: slots that there are.
    """

    def __init__(
        self, table: npt.NDArray[Any], enter: Callable[[int, int, npt.NDArray[Any]], None], count: int
    ) -> None:
        self.table = table
        self._enter = enter
        self._entered = 0
        self._next_round(count)

    def _next_round(self, count: int) -> None:
        first, self._entered = self._entered, count
        self._thread = in_background(lambda: self._enter(first, count, self.table))

    def ready(self, count: int, *, wait: bool) -> bool:
        """Whether all slots are in the table: then it can take over.

        Args:
            count: slots that there are.
            wait: until it is so.
        """
        while True:
            if wait:
                self._thread.join()
            elif self._thread.is_alive():
                return False
            if wait or count - self._entered <= AT_ONCE_SLOTS:
                self._enter(self._entered, count, self.table)
                return True
            self._next_round(count)

"""Events between the freezes of a table, for as long as somebody may ask what changed since one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

RESTORED = 0
"""Stands for the checkpoint that an attempt began from."""

_MAX_INTERVALS = 8
"""Freezes whose changes are told apart; with more of them open, the oldest are told together."""


@dataclass(frozen=True, slots=True)
class History(Generic[T]):
    """The events up to a freeze, told since each of the freezes before it.

    Attributes:
        start: checkpoint of the freeze that all this comes after; ``None``: nothing is known.
        intervals: in order, what happened from the freeze before it to that for a checkpoint.
    """

    start: int | None
    intervals: tuple[tuple[int, T], ...]

    def since(self, checkpoint_id: int) -> list[T] | None:
        """The events after a freeze, in order; ``None`` if that is not known."""
        ids = [self.start, *(i for i, _ in self.intervals)]
        if checkpoint_id not in ids:
            return None
        return [happened for _, happened in self.intervals[ids.index(checkpoint_id) :]]


class Intervals(Generic[T]):
    """Keeps what happened; belongs to the thread that changes the table.

    Args:
        join: one interval of two that follow each other.
        start: checkpoint that the present content is that of; ``None``: nothing is known before the first freeze.

    >>> log = Intervals[set[str]](set.union)
    >>> _ = log.cut(1, {"nobody can ask since when"}); _ = log.cut(2, {"a"})
    >>> history = log.cut(3, {"b"})
    >>> history.since(1), history.since(2), history.since(0)
    ([{'a'}, {'b'}], [{'b'}], None)
    """

    def __init__(self, join: Callable[[T, T], T], start: int | None = None) -> None:
        self._join = join
        self._start = start
        self._intervals: list[tuple[int, T]] = []
        self._needed = 0

    def cut(self, checkpoint_id: int, happened: T) -> History[T]:
        """The freeze for a checkpoint; ``happened`` since the freeze before."""
        needed, ids = self._needed, [i for i, _ in self._intervals]
        if needed in ids:
            self._start = needed
            del self._intervals[: ids.index(needed) + 1]
        if self._start is None:
            self._start = checkpoint_id
        else:
            self._intervals.append((checkpoint_id, happened))
        if len(self._intervals) > _MAX_INTERVALS:
            (_, first), (newest, second) = self._intervals[:2]
            self._intervals[:2] = [(newest, self._join(first, second))]
        return History(self._start, tuple(self._intervals))

    def begin(self, checkpoint_id: int | None) -> None:
        """Nothing is known of the time before this freeze; with ``None``, before the next one."""
        self._start = checkpoint_id
        self._intervals.clear()

    @property
    def kept(self) -> list[T] | None:
        """The events of each interval that somebody may ask for; ``None``: nor may they for the present one."""
        return None if self._start is None else [happened for _, happened in self._intervals]

    def change(self, change: Callable[[T], T]) -> None:
        """Put something else in the place of what happened in each interval."""
        self._intervals = [(checkpoint_id, change(happened)) for checkpoint_id, happened in self._intervals]

    def completed(self, checkpoint_id: int) -> None:
        """Nobody will ask for changes since older freezes than this.  May be called from another thread."""
        self._needed = checkpoint_id

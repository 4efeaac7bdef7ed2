"""Event time of a source: of one subtask, and of the whole read step.

That of a subtask is the smallest over the splits that it has yet to read to the end (W1, W4).

A subtask that has read all it was given must not hold the others back, and must not run ahead either: its next split
may be as old as what others read now.  So it takes the time of the step from the coordinator, which alone knows which
splits were dealt and which of them the subtasks have heard of.  A split that was found holds time back from that moment
on, whoever will read it, and also while its reader is dead.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK


def watermark_after(maximum_us: int, bound_us: int) -> int:
    """The watermark that a largest event time gives, microseconds; the smallest value before the first row.

    >>> watermark_after(1_000, 10)
    989
    """
    return max(MIN_WATERMARK, maximum_us - bound_us - 1)


@dataclass(slots=True)
class _Split:
    watermark: int
    """No row that keeps the promise of the split is at or before it."""
    begun: bool
    idle: bool


class SplitTimes:
    """What the splits of one subtask say of time.

    A split that was read as far as event time t promises that no row is to come that is older than t by more than the
    bound.  One that was not read yet has no time, unless it is known that its rows begin at some time (``begins``).
    One that is finished has no say any more, and nor has one that is *idle*: it gave nothing for so long that others
    need not wait for it.

    Args:
        bound_us: how far a row may come after a younger one of its split.
        ordered: splits begin in the order of time, so that of those not begun only the first one is looked at.

    >>> times = SplitTimes(bound_us=10)
    >>> times.add("a"); times.add("b"); times.held
    -9223372036854775808
    >>> times.reached("a", 100); times.begins("b", 50); times.held
    49
    >>> times.finished("b"); times.held
    89
    >>> times.finished("a"); times.held is None, times.highest_finished
    (True, 89)
    """

    def __init__(self, bound_us: int, ordered: bool = False) -> None:
        self._bound_us, self._ordered = bound_us, ordered
        self._splits: dict[str, _Split] = {}
        self._begun: set[str] = set()
        self._unread: list[tuple[int, str]] = []
        """A heap over the splits not begun; entries that are not true any more lie in it, too."""
        self._turns: deque[str] = deque()
        """In the order in which they were added; those begun or finished lie in it, too."""
        self._wanted: deque[str] = deque()
        self.highest_finished = MIN_WATERMARK
        """Of all finished splits, the largest watermark."""

    def add(self, split: str, maximum_us: int = MIN_WATERMARK, *, begun: bool = False, idle: bool = False) -> None:
        """One more to read; ``maximum_us``: how far its event time has come, or is taken to have come."""
        one = self._splits[split] = _Split(watermark_after(maximum_us, self._bound_us), begun or idle, idle)
        if one.begun:
            self._begun.add(split)
            return
        heapq.heappush(self._unread, (one.watermark, split))
        self._turns.append(split)
        self._wanted.append(split)

    @property
    def unknown(self) -> str | None:
        """A split of which it would help to know when its rows begin; it is told once only."""
        while self._wanted:
            split = self._wanted[0]
            if self._is_unread(split):
                if self._ordered and split != self._first_unread:
                    return None
                return self._wanted.popleft()
            self._wanted.popleft()
        return None

    def begins(self, split: str, earliest_us: int) -> None:
        """No row of the split that keeps its promise is before this time; the largest integer: it has no rows.

        One without rows has no say, and must not be taken for the end of time.
        """
        if earliest_us == MAX_WATERMARK:
            self.idles(split)
            return
        one = self._splits[split]
        if earliest_us - 1 > one.watermark:
            one.watermark = earliest_us - 1
            if not one.begun:
                heapq.heappush(self._unread, (one.watermark, split))

    def reached(self, split: str, maximum_us: int) -> None:
        """It was read, and its largest event time so far is this; it is not idle any more."""
        one = self._splits[split]
        one.begun, one.idle = True, False
        one.watermark = max(one.watermark, watermark_after(maximum_us, self._bound_us))
        self._begun.add(split)

    def idles(self, split: str) -> None:
        """It had nothing to give for so long that nobody waits for it until it has."""
        one = self._splits[split]
        one.begun = one.idle = True
        self._begun.add(split)

    def finished(self, split: str) -> None:
        """It was read to its end."""
        one = self._splits.pop(split)
        self._begun.discard(split)
        if one.begun and not one.idle:
            self.highest_finished = max(self.highest_finished, one.watermark)

    def finished_before(self, maximum_us: int) -> None:
        """A split that was finished before a restore had come so far."""
        self.highest_finished = max(self.highest_finished, watermark_after(maximum_us, self._bound_us))

    @property
    def held(self) -> int | None:
        """The watermark that all splits allow; ``None`` if none has a say."""
        held = min((one.watermark for id in self._begun if not (one := self._splits[id]).idle), default=None)
        if self._ordered:
            first = self._first_unread
            unread = self._splits[first].watermark if first is not None else None
        else:
            while self._unread and not self._is_current(*self._unread[0]):
                heapq.heappop(self._unread)
            unread = self._unread[0][0] if self._unread else None
        if held is None or unread is None:
            return unread if held is None else held
        return min(held, unread)

    @property
    def _first_unread(self) -> str | None:
        while self._turns and not self._is_unread(self._turns[0]):
            self._turns.popleft()
        return self._turns[0] if self._turns else None

    def _is_unread(self, split: str) -> bool:
        one = self._splits.get(split)
        return one is not None and not one.begun

    def _is_current(self, watermark: int, split: str) -> bool:
        return self._is_unread(split) and self._splits[split].watermark == watermark


class SubtaskTime(NamedTuple):
    """A report of a subtask of the step about itself."""

    known: int
    """Number of splits that it has heard of, those it has finished included."""
    holding: bool
    """It has something to read: its own time holds."""
    watermark: int
    """The watermark that it has sent downstream."""
    finished: int
    """Of all splits that it has finished, the largest watermark."""
    quiet: bool = False
    """It has had nothing to give for as long as the user's idle timeout."""


class TellTime(NamedTuple):
    """Effect: tell a subtask the time of the step."""

    subtask: int
    watermark: int
    idle: bool
    """Nobody in the step has had anything to give for the idle timeout: nobody outside waits for it."""
    report: bool
    """Another subtask goes by this one: it is to say how far it has come, as it goes on."""


@dataclass
class _Subtask:
    dealt: int = 0
    time: SubtaskTime | None = None
    told: TellTime | None = None


class StepTimes:
    """The coordinator's side of one read step.

    Args:
        parallelism: how many subtasks read.

    >>> step = StepTimes(2)
    >>> step.dealt(0, 1); step.dealt(1, 1)
    >>> step.reported(0, SubtaskTime(known=1, holding=False, watermark=0, finished=5))
    []
    >>> for tell in step.reported(1, SubtaskTime(known=1, holding=True, watermark=7, finished=0)):
    ...     print(tell)
    TellTime(subtask=0, watermark=7, idle=False, report=False)
    TellTime(subtask=1, watermark=-9223372036854775808, idle=False, report=True)
    """

    def __init__(self, parallelism: int) -> None:
        self._subtasks = [_Subtask() for _ in range(parallelism)]
        self._time = MIN_WATERMARK

    def dealt(self, subtask: int, splits: int) -> None:
        """A subtask has been given so many splits in all; it may not have heard of the last ones."""
        self._subtasks[subtask].dealt = splits

    def lost(self, subtask: int) -> None:
        """A subtask goes back to a snapshot: what it said of itself does not count any more."""
        self._subtasks[subtask].time = self._subtasks[subtask].told = None

    def reported(self, subtask: int, time: SubtaskTime) -> list[TellTime]:
        """Take a subtask's report; return what is to be told to subtasks."""
        self._subtasks[subtask].time = time
        return self._news()

    def _news(self) -> list[TellTime]:
        times = [one.time for one in self._subtasks if one.time is not None]
        if len(times) < len(self._subtasks):
            return []  # one that has not been heard of may hold everything back
        holding = [self._holds(one) for one in self._subtasks]
        if any(holding):
            self._time = max(self._time, min(t.watermark for t, holds in zip(times, holding, strict=True) if holds))
        else:
            self._time = max(self._time, *(t.finished for t in times))
        idle = not any(holding) and all(t.quiet for t in times)
        news: list[TellTime] = []
        for number, (one, holds) in enumerate(zip(self._subtasks, holding, strict=True)):
            tell = TellTime(number, self._time, idle, report=holds and not all(holding))
            told = one.told or TellTime(number, MIN_WATERMARK, False, False)
            if holds:  # it goes by its own time
                tell = tell._replace(watermark=told.watermark)
            if tell != told:
                one.told = tell
                news.append(tell)
        return news

    @staticmethod
    def _holds(one: _Subtask) -> bool:
        return one.time is not None and (one.time.holding or one.time.known < one.dealt)

"""Event time of a whole read step, for those of its subtasks that have nothing left to read (W4).

A subtask that has read all it was given must not hold the others back, and must not run ahead either: its next split
may be as old as what others read now.  So it takes the time of the step from the coordinator, which alone knows which
splits were dealt and which of them the subtasks have heard of.  A split that was found holds time back from that moment
on, whoever will read it, and also while its reader is dead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cutwater.data.time import MIN_WATERMARK


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

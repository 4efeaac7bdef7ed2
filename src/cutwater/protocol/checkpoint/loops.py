"""The loop monitor: it decides from what waves report when loops are quiet and when they have ended (C6, W3).

Theory of operation.  A *loop* is a strongly connected component of the physical graph.  Every wave of barriers, stored
or a mere *probe*, is a consistent cut; each subtask of a loop reports what it saw of it.  If no row was in any channel
of the loop, the loop was *quiet*: whatever comes later stems from rows that came in after the cut, so that watermarks
held at its heads before the cut may pass, up to what all ways into the loop had reached (W3).  If moreover nothing more
can come from outside and the last watermark has passed every subtask, the loop has *ended*: termination is a stable
property.

Heads ask for a wave as long as they have a reason.  Between two probes lies a pause; it doubles while waves bring
nothing new: rows in the loop, or no more event time than before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from cutwater.data.time import MAX_WATERMARK
from cutwater.errors import InvariantError
from cutwater.protocol.checkpoint.messages import SubtaskId, Tick
from cutwater.protocol.subtask.host import LoopReport
from cutwater.protocol.subtask.watermarks import merged_time

FIRST_PAUSE_MS = 5.0
LONGEST_PAUSE_MS = 250.0


class ProbeWanted(msgspec.Struct, frozen=True):
    """A head holds a watermark, or its outside has ended: it wants a wave, and says so again after each."""

    subtask: SubtaskId
    now_ms: float


class LoopReported(msgspec.Struct, frozen=True):
    """A subtask acknowledged a wave; harmless for subtasks outside loops."""

    checkpoint_id: int
    subtask: SubtaskId
    report: LoopReport


class WaveCompleted(msgspec.Struct, frozen=True):
    """The coordinator said ``NotifyComplete``."""

    checkpoint_id: int
    now_ms: float


class WaveFailed(msgspec.Struct, frozen=True):
    """The coordinator said ``NotifyAborted``."""

    checkpoint_id: int
    now_ms: float


class StartProbe(msgspec.Struct, frozen=True):
    """Feed ``RequestProbe`` to the checkpoint coordinator."""


class SendVerdict(msgspec.Struct, frozen=True):
    """Send ``LoopVerdict(checkpoint_id, ended, watermark)`` to every subtask of the loop."""

    checkpoint_id: int
    loop: int
    ended: bool
    watermark: int = MAX_WATERMARK


LoopEvent: TypeAlias = ProbeWanted | LoopReported | WaveCompleted | WaveFailed | Tick
LoopEffect: TypeAlias = StartProbe | SendVerdict


class LoopMonitor:
    """Beside the checkpoint coordinator; a new one for every attempt.

    Args:
        loops: the subtasks of each loop, by its number.

    >>> monitor = LoopMonitor({0: frozenset({"head"})})
    >>> monitor.handle(ProbeWanted("head", now_ms=0.0))
    [StartProbe()]
    >>> monitor.handle(LoopReported(1, "head", LoopReport(quiet=True, outside_ended=True, drained=False)))
    []
    >>> monitor.handle(WaveCompleted(1, now_ms=3.0))
    [SendVerdict(checkpoint_id=1, loop=0, ended=False, watermark=9223372036854775807)]
    """

    def __init__(self, loops: Mapping[int, frozenset[SubtaskId]]) -> None:
        self._loops = dict(loops)
        self._loop_of = {subtask: loop for loop, subtasks in loops.items() for subtask in subtasks}
        self._reports: dict[int, dict[SubtaskId, LoopReport]] = {}
        self._reached: dict[int, tuple[bool, int]] = {}
        """The last verdict on each loop: ended, watermark."""
        self._wanted: set[int] = set()
        self._asked = False
        self._pause_ms = FIRST_PAUSE_MS
        self._not_before_ms = -math.inf
        if len(self._loop_of) != sum(map(len, loops.values())):
            raise InvariantError(f"loop monitor: a subtask lies in two loops: {self._loops}")

    @property
    def next_due_ms(self) -> float | None:
        """Time at which a ``Tick`` is wanted; ``None`` if only events can change things."""
        return self._not_before_ms if self._wanted and not self._asked else None

    def handle(self, event: LoopEvent) -> list[LoopEffect]:
        """Take one event; the effects are to be performed in their order.

        Raises:
            InvariantError: a subtask outside all loops wants a probe.
        """
        effects: list[LoopEffect] = []
        match event:
            case ProbeWanted():
                if event.subtask not in self._loop_of:
                    raise InvariantError(f"loop monitor: subtask {event.subtask} lies in no loop, but wants a probe")
                self._wanted.add(self._loop_of[event.subtask])
            case LoopReported():
                if event.subtask in self._loop_of:
                    self._reports.setdefault(event.checkpoint_id, {})[event.subtask] = event.report
                return []
            case WaveCompleted():
                effects = self._completed(event)
            case WaveFailed():
                self._reports.pop(event.checkpoint_id, None)
                self._wave_over(event.now_ms, progress=False)
            case Tick():
                pass
        if self._wanted and not self._asked and event.now_ms >= self._not_before_ms:
            self._asked = True
            effects.append(StartProbe())
        return effects

    def _completed(self, event: WaveCompleted) -> list[LoopEffect]:
        """The verdicts; who still has a reason to ask for a wave asks again."""
        reports = self._reports.pop(event.checkpoint_id, {})
        self._reports = {id: found for id, found in self._reports.items() if id > event.checkpoint_id}
        effects: list[LoopEffect] = []
        further: set[int] = set()
        for loop, subtasks in self._loops.items():
            found = [reports[subtask] for subtask in subtasks if subtask in reports]
            if len(found) < len(subtasks) or not all(report.quiet for report in found):
                continue
            ended = all(report.outside_ended and report.drained for report in found)
            watermark = merged_time(report.outside for report in found).watermark
            effects.append(SendVerdict(event.checkpoint_id, loop, ended, watermark))
            if (ended, watermark) != self._reached.get(loop):
                self._reached[loop] = ended, watermark
                further.add(loop)
        self._wave_over(event.now_ms, progress=self._wanted <= further if self._wanted else None)
        self._wanted.clear()
        return effects

    def _wave_over(self, now_ms: float, *, progress: bool | None) -> None:
        """After a wave the next probe waits a while, and longer every time that there was no progress.

        ``None``: nobody wanted that wave, so that it says nothing about the pause.
        """
        self._asked = False
        if progress:
            self._pause_ms = FIRST_PAUSE_MS
        self._not_before_ms = now_ms + self._pause_ms
        if progress is False:
            self._pause_ms = min(2 * self._pause_ms, LONGEST_PAUSE_MS)

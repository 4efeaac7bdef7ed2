"""When the loops of a dataflow are quiet, and when they have ended (C6, W3): decided from what waves report.

Theory of operation.  A *loop* is a strongly connected component of the physical graph.  Every wave of barriers, stored
or a mere *probe*, is a consistent cut; each subtask of a loop reports what it saw of it.  If no row was in any channel
of the loop, the loop was *quiet*: whatever comes later stems from rows that came in after the cut, so that watermarks
held at its heads before the cut may pass (W3).  If moreover nothing more can come from outside and the last watermark
has passed every subtask, the loop has *ended*: termination is a stable property.

Heads ask for a wave as long as they have a reason.  While waves find rows, the pause between probes doubles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from cutwater.protocol.messages import SubtaskId, Tick

__all__ = [
    "LoopEffect",
    "LoopEvent",
    "LoopMonitor",
    "LoopReport",
    "LoopReported",
    "ProbeWanted",
    "SendVerdict",
    "StartProbe",
    "WaveCompleted",
    "WaveFailed",
]

FIRST_PAUSE_MS = 5.0
LONGEST_PAUSE_MS = 250.0


@dataclass(frozen=True, slots=True)
class LoopReport:
    """What one subtask saw of a wave: ``quiet`` and ``outside_ended`` are those of its ``Acknowledge``."""

    quiet: bool
    outside_ended: bool
    drained: bool
    """``WatermarkMerger.drained`` at its freeze."""


@dataclass(frozen=True, slots=True)
class ProbeWanted:
    """A head holds a watermark, or its outside has ended: it wants a wave, and says so again after each."""

    subtask: SubtaskId
    now_ms: float


@dataclass(frozen=True, slots=True)
class LoopReported:
    """A subtask acknowledged a wave; harmless for subtasks outside loops."""

    checkpoint_id: int
    subtask: SubtaskId
    report: LoopReport


@dataclass(frozen=True, slots=True)
class WaveCompleted:
    """The coordinator said ``NotifyComplete``."""

    checkpoint_id: int
    now_ms: float


@dataclass(frozen=True, slots=True)
class WaveFailed:
    """The coordinator said ``NotifyAborted``."""

    checkpoint_id: int
    now_ms: float


@dataclass(frozen=True, slots=True)
class StartProbe:
    """Feed ``RequestProbe`` to the checkpoint coordinator."""


@dataclass(frozen=True, slots=True)
class SendVerdict:
    """Send ``LoopVerdict(checkpoint_id, ended)`` to every subtask of the loop."""

    checkpoint_id: int
    loop: int
    ended: bool


LoopEvent: TypeAlias = ProbeWanted | LoopReported | WaveCompleted | WaveFailed | Tick
LoopEffect: TypeAlias = StartProbe | SendVerdict


class LoopMonitor:
    """Beside the checkpoint coordinator; a new one for every attempt.

    Args:
        loops: the subtasks of each loop, by its number.
    """

    def __init__(self, loops: Mapping[int, frozenset[SubtaskId]]) -> None:
        self._loops = dict(loops)

    @property
    def next_due_ms(self) -> float | None:
        """When a ``Tick`` is wanted; ``None`` if only events can change things."""
        return None

    def handle(self, event: LoopEvent) -> list[LoopEffect]:
        """Take one event; the effects are to be performed in their order.

        Raises:
            InvariantError: the event is illegal in this state.
        """
        del event
        return []

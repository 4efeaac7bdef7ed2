"""Events that go into the job machine and effects that come out of it; times are of one monotonic clock."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias


class JobPhase(enum.Enum):
    FORMING = "forming"
    DEPLOYING = "deploying"
    RUNNING = "running"
    DRAINING = "draining"
    RESTARTING = "restarting"
    ENDING = "ending"
    ENDED = "ended"


class Outcome(enum.Enum):
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"
    STOPPED = "stopped"
    """Stopped by the user; a later start resumes from the last checkpoint."""


# ---------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """A worker proved the job's secret and fills a slot; an older worker of that slot is fenced from now on.

    ``replaced``: where that one runs, in a user's words.
    """

    slot: int
    incarnation: int
    now_ms: float
    replaced: str = ""


@dataclass(frozen=True, slots=True)
class WorkerLost:
    """The connection of a worker ended, or it was silent for too long; ``where`` it ran, in a user's words."""

    slot: int
    incarnation: int
    reason: str
    now_ms: float
    where: str = ""


@dataclass(frozen=True, slots=True)
class Starting:
    """A slot that has a core, and whose process has not been heard of yet."""

    slot: int
    host: str
    """Place of the process, for people; empty if that is not known."""
    since_ms: float


@dataclass(frozen=True, slots=True)
class Progress:
    """State of the slots that have no worker, as Spark tells it: those that wait for a core, and those that have one.

    A slot that is neither has not been submitted yet, as far as Spark says.
    """

    queued: frozenset[int]
    starting: tuple[Starting, ...]
    now_ms: float


@dataclass(frozen=True, slots=True)
class WorkerReady:
    """All subtasks that a worker holds of a region are restored and connected."""

    slot: int
    attempt: int
    now_ms: float
    region: int = 0


@dataclass(frozen=True, slots=True)
class SubtaskFinished:
    """A subtask handled the end of its data."""

    attempt: int
    subtask: tuple[int, int]
    now_ms: float


@dataclass(frozen=True, slots=True)
class TaskFailed:
    """A subtask, the restore or the coordinator itself failed.  ``retryable``: a restart may help.

    ``region``: where; ``None`` if that cannot be said.
    """

    attempt: int
    reason: str
    retryable: bool
    now_ms: float
    region: int | None = None


@dataclass(frozen=True, slots=True)
class Widened:
    """The regions that are down cannot be brought back beside the running ones: the whole job must go back."""

    attempt: int
    reason: str
    now_ms: float


@dataclass(frozen=True, slots=True)
class FinalCommitted:
    """The final checkpoint is complete and every sink committed it."""

    attempt: int
    now_ms: float


@dataclass(frozen=True, slots=True)
class CheckpointCompleted:
    attempt: int
    now_ms: float


@dataclass(frozen=True, slots=True)
class EndRequested:
    """The user cancels or stops the job."""

    outcome: Outcome
    reason: str
    now_ms: float


@dataclass(frozen=True, slots=True)
class Reshape:
    """The job goes on with another group, from the newest checkpoint; its attempt, if there was one, is stopped.

    Workers of slots beyond the new group have been sent away.
    """

    slots: int
    subtasks: frozenset[tuple[int, int]]
    fewest: int
    """With so many workers the job can go on, at a lower parallelism, where the group does not become complete."""
    now_ms: float
    regions: tuple[frozenset[tuple[int, int]], ...] = ()
    """Parts of ``subtasks`` that can be restarted by themselves."""
    upstream: tuple[frozenset[int], ...] = ()
    """Of each of them, the numbers of those that go back with it (R3)."""


@dataclass(frozen=True, slots=True)
class WorkersGone:
    """After ``ShutDown``: no worker is left (or the patience is)."""

    now_ms: float


@dataclass(frozen=True, slots=True)
class Tick:
    now_ms: float


Event: TypeAlias = (
    WorkerJoined | WorkerLost | Progress | WorkerReady | SubtaskFinished | TaskFailed | Widened | FinalCommitted
    | CheckpointCompleted | EndRequested | Reshape | WorkersGone | Tick
)  # fmt: skip


# --------------------------------------------------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class StopAttempt:
    """Reset every live worker: subtasks of older attempts are dropped, the processes stay."""

    reason: str


@dataclass(frozen=True, slots=True)
class BeginAttempt:
    """Take the log, choose the checkpoint, deploy to all slots.  Answered by WorkerReady or TaskFailed."""

    attempt: int


@dataclass(frozen=True, slots=True)
class StartProcessing:
    """All workers are ready: let rows flow and checkpoints begin."""

    attempt: int


@dataclass(frozen=True, slots=True)
class StopRegions:
    """Reset the subtasks of these regions in every live worker; all others run on, but no checkpoint is taken (R2)."""

    regions: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class BeginRegions:
    """Take the log and deploy these regions from the newest checkpoint.  Answers: WorkerReady, TaskFailed, Widened."""

    attempt: int
    regions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StartRegions:
    """The regions are restored: let their rows flow.  Nothing is down any more, checkpoints go on."""

    attempt: int
    regions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TakeFinalCheckpoint:
    attempt: int


@dataclass(frozen=True, slots=True)
class ShutDown:
    """Tell all workers to leave."""

    outcome: Outcome
    reason: str


@dataclass(frozen=True, slots=True)
class GroupShort:
    """The group did not become complete in time, but is large enough to go on; answered by ``Reshape``."""

    workers: int
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """The group is incomplete for some time, and the job waits for it: something that its user should know."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    outcome: Outcome
    reason: str


Effect: TypeAlias = (
    StopAttempt | BeginAttempt | StartProcessing | StopRegions | BeginRegions | StartRegions | TakeFinalCheckpoint
    | ShutDown | GroupShort | Wait | Ended
)  # fmt: skip

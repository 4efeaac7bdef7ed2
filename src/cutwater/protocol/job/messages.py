"""Events that go into the job machine and effects that come out of it; times are of one monotonic clock."""

from __future__ import annotations

import enum
from typing import TypeAlias

import msgspec

from cutwater.protocol.states import State


class JobPhase(State):
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


class WorkerJoined(msgspec.Struct, frozen=True):
    """A worker proved the job's secret and fills a slot; an older worker of that slot is fenced from now on.

    ``replaced``: where that one runs, in a user's words.
    """

    slot: int
    incarnation: int
    now_ms: float
    replaced: str = ""


class WorkerLost(msgspec.Struct, frozen=True):
    """The connection of a worker ended, or it was silent for too long; ``where`` it ran, in a user's words."""

    slot: int
    incarnation: int
    reason: str
    now_ms: float
    where: str = ""


class Starting(msgspec.Struct, frozen=True):
    """A slot that has a core, and whose process has not been heard of yet."""

    slot: int
    host: str
    """Place of the process, for people; empty if that is not known."""
    since_ms: float


class Progress(msgspec.Struct, frozen=True):
    """State of the slots that have no worker, as Spark tells it: those that wait for a core, and those that have one.

    A slot that is neither has not been submitted yet, as far as Spark says.
    """

    queued: frozenset[int]
    starting: tuple[Starting, ...]
    now_ms: float


class WorkerReady(msgspec.Struct, frozen=True):
    """All subtasks that a worker holds of a region are restored and connected."""

    slot: int
    attempt: int
    now_ms: float
    region: int = 0


class SubtaskFinished(msgspec.Struct, frozen=True):
    """A subtask handled the end of its data."""

    attempt: int
    subtask: tuple[int, int]
    now_ms: float


class TaskFailed(msgspec.Struct, frozen=True):
    """A subtask, the restore or the coordinator itself failed.  ``retryable``: a restart may help.

    ``region``: where; ``None`` if that cannot be said.
    """

    attempt: int
    reason: str
    retryable: bool
    now_ms: float
    region: int | None = None


class Widened(msgspec.Struct, frozen=True):
    """The regions that are down cannot be brought back beside the running ones: the whole job must go back."""

    attempt: int
    reason: str
    now_ms: float


class FinalCommitted(msgspec.Struct, frozen=True):
    """The final checkpoint is complete and every sink committed it."""

    attempt: int
    now_ms: float


class CheckpointCompleted(msgspec.Struct, frozen=True):
    attempt: int
    now_ms: float


class EndRequested(msgspec.Struct, frozen=True):
    """The user cancels or stops the job."""

    outcome: Outcome
    reason: str
    now_ms: float


class Reshape(msgspec.Struct, frozen=True):
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


class WorkersGone(msgspec.Struct, frozen=True):
    """After ``ShutDown``: no worker is left (or the patience is)."""

    now_ms: float


class Tick(msgspec.Struct, frozen=True):
    now_ms: float


Event: TypeAlias = (
    WorkerJoined | WorkerLost | Progress | WorkerReady | SubtaskFinished | TaskFailed | Widened | FinalCommitted
    | CheckpointCompleted | EndRequested | Reshape | WorkersGone | Tick
)  # fmt: skip


# --------------------------------------------------------------------------------------------------------- effects


class StopAttempt(msgspec.Struct, frozen=True):
    """Reset every live worker: subtasks of older attempts are dropped, the processes stay."""

    reason: str


class BeginAttempt(msgspec.Struct, frozen=True):
    """Take the log, choose the checkpoint, deploy to all slots.  Answered by WorkerReady or TaskFailed."""

    attempt: int


class StartProcessing(msgspec.Struct, frozen=True):
    """All workers are ready: let rows flow and checkpoints begin."""

    attempt: int


class StopRegions(msgspec.Struct, frozen=True):
    """Reset the subtasks of these regions in every live worker; all others run on, but no checkpoint is taken (R2)."""

    regions: tuple[int, ...]
    reason: str


class BeginRegions(msgspec.Struct, frozen=True):
    """Take the log and deploy these regions from the newest checkpoint.  Answers: WorkerReady, TaskFailed, Widened."""

    attempt: int
    regions: tuple[int, ...]


class StartRegions(msgspec.Struct, frozen=True):
    """The regions are restored: let their rows flow.  Nothing is down any more, checkpoints go on."""

    attempt: int
    regions: tuple[int, ...]


class TakeFinalCheckpoint(msgspec.Struct, frozen=True):
    attempt: int


class ShutDown(msgspec.Struct, frozen=True):
    """Tell all workers to leave."""

    outcome: Outcome
    reason: str


class GroupShort(msgspec.Struct, frozen=True):
    """The group did not become complete in time, but is large enough to go on; answered by ``Reshape``."""

    workers: int
    reason: str


class Wait(msgspec.Struct, frozen=True):
    """The group is incomplete for some time, and the job waits for it: something that its user should know."""

    text: str


class Ended(msgspec.Struct, frozen=True):
    outcome: Outcome
    reason: str


Effect: TypeAlias = (
    StopAttempt | BeginAttempt | StartProcessing | StopRegions | BeginRegions | StartRegions | TakeFinalCheckpoint
    | ShutDown | GroupShort | Wait | Ended
)  # fmt: skip

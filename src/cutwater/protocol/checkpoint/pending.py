"""A checkpoint as the coordinator sees it: pending, then completed or given up."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

from cutwater.protocol.checkpoint.messages import SubtaskId
from cutwater.protocol.reasons import CheckpointKind
from cutwater.protocol.states import State


class PendingStage(State):
    """How far a checkpoint is, seen from the coordinator."""

    TRIGGERED = "triggered"
    """Sources were asked; some subtask has not acknowledged yet."""
    READY = "ready"
    """All have acknowledged; another checkpoint is being published, or there is nothing to publish."""
    PUBLISHING = "publishing"
    """Manifest and log entry are being written: only the performer knows how it will end."""
    COMPLETED = "completed"
    GIVEN_UP = "given_up"


class PendingStep(State):
    ACKNOWLEDGED = "one of several acknowledgements"
    ALL_ACKNOWLEDGED = "the last acknowledgement"
    PUBLISH = "its turn to be published"
    PUBLISHED = "published"
    PROBED = "a probe: nothing to publish"
    GIVE_UP = "declined, expired, subsumed, job stopped"
    PUBLISH_FAILED = "publishing failed"


PENDING_STAGES: dict[tuple[PendingStage, PendingStep], PendingStage] = {
    (PendingStage.TRIGGERED, PendingStep.ACKNOWLEDGED): PendingStage.TRIGGERED,
    (PendingStage.TRIGGERED, PendingStep.ALL_ACKNOWLEDGED): PendingStage.READY,
    (PendingStage.TRIGGERED, PendingStep.GIVE_UP): PendingStage.GIVEN_UP,
    (PendingStage.READY, PendingStep.PROBED): PendingStage.COMPLETED,
    (PendingStage.READY, PendingStep.PUBLISH): PendingStage.PUBLISHING,
    (PendingStage.READY, PendingStep.GIVE_UP): PendingStage.GIVEN_UP,
    (PendingStage.PUBLISHING, PendingStep.PUBLISHED): PendingStage.COMPLETED,
    (PendingStage.PUBLISHING, PendingStep.PUBLISH_FAILED): PendingStage.GIVEN_UP,
}


@dataclass(slots=True)
class PendingCheckpoint:
    """A checkpoint that was triggered and is neither completed nor given up."""

    checkpoint_id: int
    kind: CheckpointKind
    attempt: int
    triggered_ms: float
    expires_ms: float
    subtasks: frozenset[SubtaskId] = field(repr=False)
    """Who must acknowledge; the job may have others by the time that it is published."""
    request_id: Hashable | None = None
    """Who asked for it, if somebody did."""
    stage: PendingStage = PendingStage.TRIGGERED
    payloads: dict[SubtaskId, object] = field(default_factory=dict[SubtaskId, object], repr=False)
    """What each subtask acknowledged with."""


@dataclass(frozen=True, slots=True)
class CompletedCheckpoint:
    """A checkpoint that is published."""

    checkpoint_id: int
    kind: CheckpointKind
    attempt: int
    triggered_ms: float
    completed_ms: float

    @property
    def duration_ms(self) -> float:
        return self.completed_ms - self.triggered_ms


@dataclass(frozen=True, slots=True)
class CheckpointStatistics:
    """Numbers for people, as they are now: ``triggered = in_progress + completed + failed + subsumed``, no probes."""

    triggered: int = 0
    in_progress: int = 0
    completed: int = 0
    failed: int = 0
    subsumed: int = 0
    consecutive_failed: int = 0
    latest_completed_id: int = 0
    """The newest completed one that a recovery may rely on (0: none)."""
    last_duration_ms: float | None = None
    """From the trigger to the log entry, of the last completed one."""

"""Events and effects of the checkpoint coordinator."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from cutwater.protocol.protocols import AckAnswer, CheckpointKind, FailureReason

SubtaskId: TypeAlias = Hashable

# ------------------------------------------------------------------------------------------------------------ events


class Tick(msgspec.Struct, frozen=True):
    """Time has passed; wanted at ``coordinator.next_due_ms``, harmless at any other time."""

    now_ms: float


class RequestCheckpoint(msgspec.Struct, frozen=True):
    """A user asks for a checkpoint or savepoint (any kind but PERIODIC and FINAL)."""

    now_ms: float
    kind: CheckpointKind
    request_id: Hashable


class RequestFinal(msgspec.Struct, frozen=True):
    """Every subtask has handled its end of data (A7)."""

    now_ms: float


class RequestDrain(msgspec.Struct, frozen=True):
    """A user wants the job to end as if its sources were exhausted, with a savepoint of that end.

    The request is answered when the final checkpoint has completed; the attempt's end, or the final checkpoint's
    failure, is the end of the request, too.
    """

    now_ms: float
    request_id: Hashable


class RequestProbe(msgspec.Struct, frozen=True):
    """The loop monitor wants a wave that stores nothing (C6); whatever is under way or due does as well."""

    now_ms: float


@dataclass(frozen=True, slots=True)
class AckReceived:
    """A subtask's snapshot is durable.  ``payload`` is opaque here; it goes into ``Publish`` or ``Discard``."""

    checkpoint_id: int
    attempt: int
    subtask: SubtaskId
    payload: object = field(repr=False)
    now_ms: float


class DeclineReceived(msgspec.Struct, frozen=True):
    """A subtask cannot complete the checkpoint."""

    checkpoint_id: int
    attempt: int
    subtask: SubtaskId
    reason: FailureReason
    now_ms: float
    detail: str = ""


class Published(msgspec.Struct, frozen=True):
    """Manifest and log entry are durable: the checkpoint exists."""

    checkpoint_id: int
    now_ms: float


class PublishFailed(msgspec.Struct, frozen=True):
    """The checkpoint is not in the log, as far as this attempt may know; ``reason`` is for people."""

    checkpoint_id: int
    reason: str
    now_ms: float
    in_doubt: bool = False
    """It may be in the log nevertheless: whoever restores next looks, and the attempt must end before that."""


class JobRunning(msgspec.Struct, frozen=True):
    """All subtasks of a new attempt run."""

    attempt: int
    now_ms: float


class JobStopped(msgspec.Struct, frozen=True):
    """The attempt is over (failure, cancel, end): what is pending cannot complete any more.

    ``survivors``: only some subtasks went down, the others hear of the outcome of what is being published.
    """

    reason: str
    now_ms: float
    survivors: bool = False


CoordinatorEvent: TypeAlias = (
    Tick | RequestCheckpoint | RequestFinal | RequestDrain | RequestProbe | AckReceived | DeclineReceived | Published
    | PublishFailed | JobRunning | JobStopped
)  # fmt: skip

# ----------------------------------------------------------------------------------------------------------- effects


class SendTrigger(msgspec.Struct, frozen=True):
    """Send ``Trigger`` to every source (row ``synchronous``: to every subtask); of kind PROBE with ``probe``."""

    checkpoint_id: int
    kind: CheckpointKind
    final: bool
    savepoint: bool = False
    """A savepoint is wanted of it: the wave is aligned, whatever the protocol."""


class SendDrain(msgspec.Struct, frozen=True):
    """Tell every source that it has read its last row; from here on only the final checkpoint is triggered."""


class Publish(msgspec.Struct, frozen=True):
    """All subtasks acknowledged: write manifest and log entry, then feed ``Published`` or ``PublishFailed``."""

    checkpoint_id: int
    kind: CheckpointKind
    payloads: tuple[tuple[SubtaskId, object], ...]


class NotifyComplete(msgspec.Struct, frozen=True):
    """Send ``CompleteNotice`` to every subtask."""

    checkpoint_id: int
    kind: CheckpointKind
    commit: bool


class NotifyAborted(msgspec.Struct, frozen=True):
    """Send ``AbortNotice`` to every subtask."""

    checkpoint_id: int
    reason: FailureReason
    latest_completed: int
    detail: str = ""


class Discard(msgspec.Struct, frozen=True):
    """Delete the state that this acknowledgement names; no manifest will."""

    checkpoint_id: int
    payload: object


class AckAnswered(msgspec.Struct, frozen=True):
    """Answer to the acknowledgement just received."""

    checkpoint_id: int
    subtask: SubtaskId
    answer: AckAnswer


class FailJob(msgspec.Struct, frozen=True):
    """More consecutive checkpoints failed than tolerated, or one that the job's stop depends on."""

    reason: FailureReason
    detail: str


class RequestAnswered(msgspec.Struct, frozen=True):
    """The outcome of a user's request: ``reason`` is ``None`` if the checkpoint completed."""

    request_id: Hashable
    checkpoint_id: int | None
    reason: FailureReason | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.reason is None


CoordinatorEffect: TypeAlias = (
    SendTrigger | SendDrain | Publish | NotifyComplete | NotifyAborted | Discard | AckAnswered | FailJob
    | RequestAnswered
)  # fmt: skip

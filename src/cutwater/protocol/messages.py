"""Every event that goes into the protocol machines and every effect that comes out of them.

    performer --event--> machine.handle(event) --list of effects, in the order to perform them--> performer

Both are small frozen values.  An *input* is any hashable name of an input channel, a *subtask* any hashable name of a
subtask; the machines only compare them.  Times are milliseconds of one monotonic clock and come in the events.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeAlias

from cutwater.protocol.reasons import AckAnswer, CheckpointKind, FailureReason

__all__ = [
    "AbortNotice", "AckAnswered", "AckReceived", "Acknowledge", "BarrierTaken", "Block", "BroadcastBarrier", "Commit",
    "CompleteNotice", "CoordinatorEffect", "CoordinatorEvent", "Decline", "DeclineReceived", "Discard", "Durable",
    "Effect", "EndOfInput", "EndTaken", "Event", "FailJob", "Forget", "Freeze", "InputId", "JobRunning", "JobStopped",
    "LogsDurable", "NotifyAborted", "NotifyComplete", "Publish", "PublishFailed", "Published", "Record",
    "RequestAnswered", "RequestCheckpoint", "RequestFinal", "RowsTaken", "SendTrigger", "SourceExhausted",
    "StartRecording", "StopRecording", "SubtaskId", "Tick", "Trigger", "Unblock", "WriteFailed", "WriteLogs",
]  # fmt: skip

InputId: TypeAlias = Hashable
SubtaskId: TypeAlias = Hashable

# ---------------------------------------------------------------------------------------------- events of a subtask


@dataclass(frozen=True, slots=True)
class Trigger:
    """The coordinator injects a barrier into this source (A1)."""

    checkpoint_id: int
    final: bool = False


@dataclass(frozen=True, slots=True)
class BarrierTaken:
    """A barrier was taken from the head of an input."""

    input: InputId
    checkpoint_id: int
    final: bool = False


@dataclass(frozen=True, slots=True)
class EndTaken:
    """EndOfData was taken from an input: it brings no more rows, but still barriers (A7)."""

    input: InputId


@dataclass(frozen=True, slots=True)
class SourceExhausted:
    """This source has read its last row for ever."""


@dataclass(frozen=True, slots=True)
class RowsTaken:
    """Rows were taken from an input.  Needed only while ``machine.recording(input)``; harmless otherwise."""

    input: InputId
    rows: int


@dataclass(frozen=True, slots=True)
class Durable:
    """Everything that ``Freeze`` handed to the writer is durable."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class LogsDurable:
    """Everything that ``WriteLogs`` handed to the writer is durable."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """Something of this checkpoint could not be written; ``reason`` is for people."""

    checkpoint_id: int
    reason: str


@dataclass(frozen=True, slots=True)
class AbortNotice:
    """The coordinator gave the checkpoint up; ``latest_completed`` is the newest one that did complete (0: none)."""

    checkpoint_id: int
    latest_completed: int = 0


@dataclass(frozen=True, slots=True)
class CompleteNotice:
    """The checkpoint is published.  ``commit`` is false for a plain savepoint."""

    checkpoint_id: int
    commit: bool = True


Event: TypeAlias = (
    Trigger | BarrierTaken | EndTaken | SourceExhausted | RowsTaken | Durable | LogsDurable | WriteFailed | AbortNotice
    | CompleteNotice
)  # fmt: skip

# --------------------------------------------------------------------------------------------- effects of a subtask


@dataclass(frozen=True, slots=True)
class Block:
    """Take nothing more from this input."""

    input: InputId


@dataclass(frozen=True, slots=True)
class Unblock:
    """Go on taking from this input.  Several come in the order in which the inputs were blocked (A5)."""

    input: InputId


@dataclass(frozen=True, slots=True)
class Freeze:
    """Freeze all operators of the chain now and hand the writing to the background thread.

    The performer answers with ``Durable`` or ``WriteFailed``.  Writes of one subtask keep their order.
    """

    checkpoint_id: int
    final: bool


@dataclass(frozen=True, slots=True)
class BroadcastBarrier:
    """Put the barrier on every output, behind all rows produced so far."""

    checkpoint_id: int
    final: bool


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Everything is durable: tell the coordinator, with the names and digests of the files."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class Decline:
    """Tell the coordinator that this checkpoint cannot complete here."""

    checkpoint_id: int
    reason: FailureReason
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop what was frozen, recorded and written for this checkpoint; it will not complete.

    Not a sink's pre-commits: the rows in them were handed on before the barrier and come never again.  They stay with
    the sink, belong to its part of the *next* snapshot too, and are committed with it (``Commit`` says up to which).
    """

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Sinks commit every pre-commit of this checkpoint and of all older ones not yet committed."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class StartRecording:
    """From now on rows taken from this input belong to the checkpoint's log of it."""

    checkpoint_id: int
    input: InputId


@dataclass(frozen=True, slots=True)
class Record:
    """Append the rows just taken to the input's log of each of these checkpoints."""

    input: InputId
    checkpoint_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StopRecording:
    """The log of this input is complete; ``rows`` is how many it holds."""

    checkpoint_id: int
    input: InputId
    rows: int


@dataclass(frozen=True, slots=True)
class WriteLogs:
    """All logs of the checkpoint are complete: write them; answer with ``LogsDurable`` or ``WriteFailed``."""

    checkpoint_id: int


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """No more rows will come: let the operators finish, send EndOfData on all outputs, tell the coordinator."""


Effect: TypeAlias = (
    Block | Unblock | Freeze | BroadcastBarrier | Acknowledge | Decline | Forget | Commit | StartRecording | Record
    | StopRecording | WriteLogs | EndOfInput
)  # fmt: skip

# ----------------------------------------------------------------------------------------- events of the coordinator


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; wanted at ``coordinator.next_due_ms``, harmless at any other time."""

    now_ms: float


@dataclass(frozen=True, slots=True)
class RequestCheckpoint:
    """A user asks for a checkpoint or savepoint (any kind but PERIODIC and FINAL)."""

    now_ms: float
    kind: CheckpointKind
    request_id: Hashable


@dataclass(frozen=True, slots=True)
class RequestFinal:
    """Every subtask has handled its end of data (A7)."""

    now_ms: float


@dataclass(frozen=True, slots=True)
class AckReceived:
    """A subtask's snapshot is durable.  ``payload`` is opaque here; it goes into ``Publish`` or ``Discard``."""

    checkpoint_id: int
    attempt: int
    subtask: SubtaskId
    payload: object = field(repr=False)
    now_ms: float


@dataclass(frozen=True, slots=True)
class DeclineReceived:
    """A subtask cannot complete the checkpoint."""

    checkpoint_id: int
    attempt: int
    subtask: SubtaskId
    reason: FailureReason
    now_ms: float
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Published:
    """Manifest and log entry are durable: the checkpoint exists."""

    checkpoint_id: int
    now_ms: float


@dataclass(frozen=True, slots=True)
class PublishFailed:
    """The checkpoint is certainly not in the log; ``reason`` is for people."""

    checkpoint_id: int
    reason: str
    now_ms: float


@dataclass(frozen=True, slots=True)
class JobRunning:
    """All subtasks of a new attempt run."""

    attempt: int
    now_ms: float


@dataclass(frozen=True, slots=True)
class JobStopped:
    """The attempt is over (failure, cancel, end): what is pending cannot complete any more."""

    reason: str
    now_ms: float


CoordinatorEvent: TypeAlias = (
    Tick | RequestCheckpoint | RequestFinal | AckReceived | DeclineReceived | Published | PublishFailed | JobRunning
    | JobStopped
)  # fmt: skip

# ---------------------------------------------------------------------------------------- effects of the coordinator


@dataclass(frozen=True, slots=True)
class SendTrigger:
    """Send ``Trigger`` to every source."""

    checkpoint_id: int
    kind: CheckpointKind
    final: bool


@dataclass(frozen=True, slots=True)
class Publish:
    """All subtasks acknowledged: write manifest and log entry, then feed ``Published`` or ``PublishFailed``."""

    checkpoint_id: int
    kind: CheckpointKind
    payloads: tuple[tuple[SubtaskId, object], ...]


@dataclass(frozen=True, slots=True)
class NotifyComplete:
    """Send ``CompleteNotice`` to every subtask."""

    checkpoint_id: int
    kind: CheckpointKind
    commit: bool


@dataclass(frozen=True, slots=True)
class NotifyAborted:
    """Send ``AbortNotice`` to every subtask."""

    checkpoint_id: int
    reason: FailureReason
    latest_completed: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Discard:
    """Delete the state that this acknowledgement names; no manifest will."""

    checkpoint_id: int
    payload: object


@dataclass(frozen=True, slots=True)
class AckAnswered:
    """What became of the acknowledgement just received."""

    checkpoint_id: int
    subtask: SubtaskId
    answer: AckAnswer


@dataclass(frozen=True, slots=True)
class FailJob:
    """More consecutive checkpoints failed than tolerated, or one that the job's stop depends on."""

    reason: FailureReason
    detail: str


@dataclass(frozen=True, slots=True)
class RequestAnswered:
    """The outcome of a user's request: ``reason`` is ``None`` if the checkpoint completed."""

    request_id: Hashable
    checkpoint_id: int | None
    reason: FailureReason | None = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        return self.reason is None


CoordinatorEffect: TypeAlias = (
    SendTrigger | Publish | NotifyComplete | NotifyAborted | Discard | AckAnswered | FailJob | RequestAnswered
)

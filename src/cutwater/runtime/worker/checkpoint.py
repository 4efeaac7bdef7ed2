"""The life of one checkpoint on a worker, from its first barrier to the notice of its outcome, in one record.

The attempt owns the records, and the thread that writes snapshots keeps its own part in them: what each thread may
touch is said at the field.  An abort removes the record, and with it everything that was kept.  What the core of a
subtask keeps of a checkpoint (``protocol.subtask.performer``) goes when it hears of the outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from cutwater.errors import CutwaterError
from cutwater.protocol.states import State
from cutwater.protocol.subtask.host import LoopReport
from cutwater.runtime.chains.sink_operator import SinkOperator
from cutwater.runtime.channels.log import LoggedChannel
from cutwater.state.segments import Frozen
from cutwater.storage.savepoint.files import SavepointFile, SavepointWriter
from cutwater.storage.snapshot.manifest import Entry, SubtaskRecord
from cutwater.storage.snapshot.segment_files import SnapshotWriter

Key: TypeAlias = tuple[int, int]
"""Vertex and subtask."""


@dataclass(slots=True)
class FrozenSubtask:
    """State of one subtask, handed to the snapshot thread after its freeze."""

    checkpoint_id: int
    record: SubtaskRecord
    states: list[tuple[str, Frozen]]
    sinks: list[tuple[SinkOperator, Callable[[], Any]]]
    freeze_ms: float
    key_groups: range
    savepoint: bool = False
    """It is part of a savepoint, whose folder the trigger tells."""
    checkpoint: bool = True
    """It is part of a checkpoint in the job's folder."""
    logs_follow: bool = False
    """Logs of its channels will be handed over, too."""

    def release(self) -> None:
        """Give the memory back that the state is written from."""
        for _, state in self.states:
            state.release()


@dataclass(slots=True)
class SubtaskLogs:
    """Channel logs of one subtask, handed to the snapshot thread; they are complete."""

    checkpoint_id: int
    subtask: Key
    logs: list[LoggedChannel]


@dataclass(slots=True)
class Written:
    """Outcome of one worker's part of a checkpoint, or of logs that came after it."""

    checkpoint_id: int
    subtasks: list[SubtaskRecord]
    """Subtasks whose state is durable."""
    logs_of: list[Key]
    """Subtasks whose logs are durable."""
    entries: list[Entry]
    files: list[SavepointFile] = field(default_factory=list[SavepointFile])
    """Of a savepoint."""
    freeze_ms: float = 0.0
    write_ms: float = 0.0
    error: CutwaterError | None = None
    fatal: CutwaterError | None = None
    """A sink could not pre-commit: its rows exist nowhere else, so the attempt must fail."""


@dataclass(slots=True)
class PartInProgress:
    """Files of a checkpoint that the snapshot thread is writing."""

    writer: SnapshotWriter
    written: Written
    savepoint: SavepointWriter | None
    checkpoint: bool
    goes_on: bool
    """A later checkpoint may go on with its file."""
    awaited: set[Key] = field(default_factory=set[Key])
    """Announced logs that are not there yet."""
    early: set[Key] = field(default_factory=set[Key])
    """Subtasks whose logs came before their state."""
    frozen: list[FrozenSubtask] = field(default_factory=list[FrozenSubtask])
    """State whose memory the files are written from."""

    def abort(self) -> None:
        """Drop what was written."""
        self.writer.abort()
        if self.savepoint is not None:
            self.savepoint.abort()
        self.release()

    def release(self) -> None:
        """Give the memory back: nothing will be written any more."""
        frozen, self.frozen = self.frozen, []
        for each in frozen:
            each.release()


class CheckpointStage(State):
    """Progress of a checkpoint on a worker."""

    UNDER_WAY = "under way"
    """Some subtask has not acknowledged."""
    ACKNOWLEDGED = "acknowledged"
    """The coordinator was told; its outcome is to come."""
    GIVEN_UP = "given up"
    """A subtask gave it up: nothing is written any more, only sinks make their rows durable."""


@dataclass(slots=True, weakref_slot=True)
class WorkerCheckpoint:
    """One checkpoint, probe or savepoint on one worker.  Belongs to the loop thread but for the fields at the end.

    >>> checkpoints = WorkerCheckpoints()
    >>> checkpoints[7].folder = "/savepoints/monday"
    >>> 7 in checkpoints, checkpoints[7].folder
    (True, '/savepoints/monday')
    >>> aborted = checkpoints.pop(7)
    >>> 7 in checkpoints, checkpoints[7].folder
    (False, '')
    """

    checkpoint_id: int
    stage: CheckpointStage = CheckpointStage.UNDER_WAY
    """Set in the loop thread; the snapshot thread sees it at once."""
    folder: str = ""
    """Of a savepoint, known from the trigger on."""
    homeless: list[FrozenSubtask | SubtaskLogs] = field(default_factory=list[FrozenSubtask | SubtaskLogs])
    """Parts of a savepoint whose folder is not known yet."""
    handed_over: int = 0
    """Subtasks whose state was handed over."""
    written: list[Written] = field(default_factory=list[Written])
    """Durable parts, until all is acknowledged."""
    error: CutwaterError | None = None
    """Why it could not be written."""
    acknowledged: dict[Key, LoopReport | None] = field(default_factory=dict[Key, LoopReport | None])
    """Subtasks whose part is durable, with what they tell of their loop."""
    lengths: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes by file of what this worker wrote of it, or builds upon; where snapshots are copied."""
    part: PartInProgress | None = None
    """Of the snapshot thread alone: files that are being written."""
    files: int = 0
    """Of the snapshot thread alone: files begun so far."""

    def abort_part(self) -> PartInProgress | None:
        """Drop the files that are being written (in the snapshot thread, or once it has ended)."""
        part, self.part = self.part, None
        if part is not None:
            part.abort()
        return part


class WorkerCheckpoints(dict[int, WorkerCheckpoint]):
    """The checkpoints under way in one attempt on one worker, by id; asking for one begins its record."""

    def __missing__(self, checkpoint_id: int) -> WorkerCheckpoint:
        checkpoint = self[checkpoint_id] = WorkerCheckpoint(checkpoint_id)
        return checkpoint

"""What subtasks hand over to the thread that writes snapshots, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from cutwater.errors import CutwaterError
from cutwater.runtime.chains.sink_operator import SinkOperator
from cutwater.runtime.channels.log import LoggedChannel
from cutwater.state.segments import Frozen
from cutwater.storage.savepoint.files import SavepointFile
from cutwater.storage.snapshot.manifest import Entry, SubtaskRecord

Key: TypeAlias = tuple[int, int]
"""Vertex and subtask."""


@dataclass(slots=True)
class FrozenSubtask:
    """What one subtask hands over at its freeze."""

    checkpoint_id: int
    record: SubtaskRecord
    states: list[tuple[str, Frozen]]
    sinks: list[tuple[SinkOperator, Callable[[], Any]]]
    freeze_ms: float
    key_groups: range
    savepoint: bool = False
    """It is part of a savepoint, whose folder is told with ``SnapshotService.savepoint``."""
    checkpoint: bool = True
    """It is part of a checkpoint in the job's folder."""
    logs_follow: bool = False
    """Logs of its channels will be handed over, too."""


@dataclass(slots=True)
class SubtaskLogs:
    """The channel logs of one subtask; they are complete."""

    checkpoint_id: int
    subtask: Key
    logs: list[LoggedChannel]


@dataclass(slots=True)
class Written:
    """The outcome of one worker's part of a checkpoint, or of logs that came after it."""

    checkpoint_id: int
    subtasks: list[SubtaskRecord]
    """Whose state is durable."""
    logs_of: list[Key]
    """Whose logs are durable."""
    entries: list[Entry]
    files: list[SavepointFile] = field(default_factory=list[SavepointFile])
    """Of a savepoint."""
    freeze_ms: float = 0.0
    write_ms: float = 0.0
    error: CutwaterError | None = None
    fatal: CutwaterError | None = None
    """A sink could not pre-commit: its rows exist nowhere else, so the attempt must fail."""

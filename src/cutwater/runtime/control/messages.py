"""Messages between the driver and the workers: typed, schema-checked msgpack.

Every message of an attempt names it; whoever gets one of another attempt drops it (fencing).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from cutwater.errors import WireError
from cutwater.plan.upgrade import Upgrade
from cutwater.runtime.control.read_limit import Limits
from cutwater.storage.log_entries import CheckpointCompleted
from cutwater.storage.snapshot.manifest import Entry, SubtaskRecord
from cutwater.storage.snapshot.savepoint_files import SavepointFile


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a worker, after the handshake."""

    slot: int
    pid: int
    host: str
    data_address: tuple[str, int]
    copies: list[str] = []
    """Files of the job that a predecessor on the same machine left copies of."""

    @property
    def where(self) -> str:
        """Process and host, in a user's words.

        >>> Hello(1, 4242, "node7", ("10.0.0.7", 5000)).where
        'on host node7 (pid 4242)'
        """
        return f"on host {self.host} (pid {self.pid})"


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    attempt: int
    region: int = 0


class SourceTime(msgspec.Struct, frozen=True, tag="source_time"):
    """Time of a subtask of a read step (``protocol.subtask.source_times.SubtaskTime``)."""

    attempt: int
    region: int
    step: str
    subtask: int
    known: int
    holding: bool
    watermark: int
    finished: int
    quiet: bool


class LoopReport(msgspec.Struct, frozen=True, array_like=True):
    """View of a wave by a subtask in a loop (``protocol.subtask.host.LoopReport``)."""

    vertex: int
    subtask: int
    quiet: bool
    outside_ended: bool
    drained: bool
    outside: tuple[int, bool]
    """Watermark and idleness of the inputs from outside the loop."""


class Ack(msgspec.Struct, frozen=True, tag="ack"):
    """All subtasks of the worker froze for this checkpoint and everything is durable (A6)."""

    attempt: int
    checkpoint_id: int
    subtasks: list[SubtaskRecord]
    entries: list[Entry]
    freeze_ms: float
    """Longest stop of the loop for freezing."""
    write_ms: float
    loops: list[LoopReport] = []
    probe: bool = False
    """Nothing was stored: every subtask of the worker has passed the wave on."""
    region: int = 0
    files: list[SavepointFile] = []
    """Of a savepoint."""
    news: bytes = b""
    """Determinant logs as far as the worker knows them; verdicts on loops rest on them (R0)."""


class CaughtUp(msgspec.Struct, frozen=True, tag="caught_up"):
    """Regions restored beside survivors have sent again all that the survivors have (R3, R4)."""

    attempt: int
    region: int


class ProbeWanted(msgspec.Struct, frozen=True, tag="probe"):
    """The head of a loop wants a wave that stores nothing (C6, W3)."""

    attempt: int
    vertex: int
    subtask: int
    region: int = 0


class Decline(msgspec.Struct, frozen=True, tag="decline"):
    attempt: int
    checkpoint_id: int
    vertex: int
    subtask: int
    reason: str
    message: str
    region: int = 0
    error: tuple[str, str, str] | None = None
    """Class, step and hint of what is behind it."""


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """A subtask handled the end of its data."""

    attempt: int
    vertex: int
    subtask: int
    region: int = 0


class Committed(msgspec.Struct, frozen=True, tag="committed"):
    """All sinks that the worker holds of a region committed this checkpoint.  Told where somebody waits for it."""

    attempt: int
    checkpoint_id: int
    region: int = 0


class Failure(msgspec.Struct, frozen=True, tag="failure"):
    attempt: int
    kind: str
    """Class name of the error."""
    message: str
    step: str
    vertex: int
    subtask: int
    traceback: str
    retryable: bool
    hint: str = ""
    secondary: bool = False
    """The loss of another worker: if that one has a story, its own report says more."""
    region: int = 0


class FixedCost(msgspec.Struct, frozen=True, array_like=True):
    """Milliseconds that a call of a step costs whatever the number of its rows, where above ``slice_budget_ms``."""

    first: str
    """The first of the steps that run as one with it."""
    step_ms: float
    chain_ms: float
    """Of all steps that are called together."""
    call_ms: float
    """Milliseconds that a call lasts, with its rows."""
    rows: int
    """Of a call."""


class Metrics(msgspec.Struct, frozen=True, tag="metrics"):
    """Counters since the start of the attempt, per step."""

    attempt: int
    time_ms: float
    rows_in: dict[str, int]
    rows_out: dict[str, int]
    watermarks: dict[str, int]
    counters: dict[str, dict[str, int]]
    busy_ms: dict[str, float]
    """Spent in the step, and in sending what it made."""
    backpressured_ms: dict[str, float]
    """The step could make no rows, because some output of its chain had no room."""
    idle_ms: float
    region: int = 0
    rows_unread: dict[str, dict[int, int]] = {}
    """Rows of outputs that no step reads, by the number of the output."""
    fixed_costs: dict[str, FixedCost] = {}
    """By step, of each chain the one that costs most."""


CONSOLE = "console"
"""Level of what is meant for the user's eyes as it is."""


class Log(msgspec.Struct, frozen=True, tag="log"):
    level: str
    message: str


class Heartbeat(msgspec.Struct, frozen=True, tag="heartbeat"):
    """The worker lives, whatever its loop does."""


class CopiesHeld(msgspec.Struct, frozen=True, tag="copies"):
    """Files of the job that the worker has copies of, its own and for others, and what became of them."""

    files: list[str]
    checkpoint_id: int
    """The newest one whose files were brought where they should be, as far as there was room."""
    missing_bytes: int
    """Of the worker's part of it, without some of the copies that were asked for."""
    memory_bytes: int
    """Held for other workers."""
    local_bytes: int
    restored_bytes: tuple[int, int, int] = (0, 0, 0)
    """By the last restore: from copies on the machine, from other workers, from the checkpoint directory."""


class Message(NamedTuple):
    """A message in a channel.

    ``number`` counts the messages of the channel from 0, for ever; ``colour`` is the newest snapshot that the sender
    had recorded when it sent (Lai-Yang, CL9; 0 under Chandy-Lamport).
    """

    number: int
    kind: str
    body: bytes
    colour: int = 0


class Timer(msgspec.Struct, frozen=True, array_like=True):
    """A pending timer.  ``left_ms`` is counted from the moment of the cut."""

    left_ms: float
    kind: str
    body: bytes


class ProcessPart(msgspec.Struct, frozen=True, array_like=True):
    """Part of one process in a global snapshot (CL4): itself, and the channels that end in it."""

    process: str
    kind: str
    """Name of its class."""
    state: bytes
    """msgpack of its fields."""
    events: int
    """Handlers that ran before the cut."""
    timers: list[Timer]
    sent: dict[str, int]
    """Per output channel: messages sent before the cut."""
    taken: dict[str, int]
    """Per input channel: messages taken before the cut."""
    logs: dict[str, list[Message]]
    """Per input channel: its state, in the order in which the messages are to be taken."""
    time_ms: float = 0.0


class NetworkDeploy(msgspec.Struct, frozen=True, tag="network_deploy"):
    """Build the worker's processes and restore them."""

    attempt: int
    incarnations: list[int]
    """Per slot."""
    peers: list[tuple[str, int]]
    """Per slot: address of its data server."""
    parts: list[ProcessPart] | None
    """Of this worker's processes in the snapshot to restore; None: start from the beginning."""
    sent: dict[str, int]
    """Per channel that ends here: number of the first message after the snapshot."""
    last_id: int
    """No snapshot of this attempt has an id up to this one."""
    restored: int | None
    """Id of the snapshot that ``parts`` are of."""


class SnapshotTrigger(msgspec.Struct, frozen=True, tag="snapshot_trigger"):
    """These processes are to begin a snapshot (CL1)."""

    attempt: int
    snapshot: int
    initiators: list[str]


class SnapshotAbort(msgspec.Struct, frozen=True, tag="snapshot_abort"):
    """The snapshot is given up."""

    attempt: int
    snapshot: int


class SnapshotParts(msgspec.Struct, frozen=True, tag="snapshot_parts"):
    """Some processes of the worker have done their part of a snapshot (CL4)."""

    attempt: int
    snapshot: int
    parts: list[ProcessPart]


class CopyPlaces(msgspec.Struct, frozen=True, tag="places"):
    """Holders of copies of snapshots, and their addresses; sent to all workers before some of them build something."""

    incarnations: list[int]
    """Per slot."""
    peers: list[tuple[str, int]]
    """Per slot: address of its data server."""
    holders: list[int]
    """Slots whose workers hold copies of what this worker writes."""


class SplitAssignment(msgspec.Struct, frozen=True, array_like=True):
    """A split with the position to read it from."""

    id: str
    data: Any
    position: Any
    max_time: int
    done: bool
    idle: bool = False


class Deploy(msgspec.Struct, frozen=True, tag="deploy"):
    """Build the subtasks of an attempt that belong to a region, and restore them."""

    attempt: int
    incarnations: list[int]
    """Per slot."""
    peers: list[tuple[str, int]]
    """Per slot: address of its data server."""
    restore: CheckpointCompleted | None
    """The log's entry of the checkpoint to restore; None: start empty."""
    parallelism: int
    """Of steps that name none: what to plan the program for."""
    restore_from: tuple[str, str] | None
    """Directory and folder that it lies in, where that is not the job's: another job, or a savepoint."""
    upgrade: Upgrade
    """Reading of a checkpoint that another version of the program wrote."""
    splits: dict[str, list[SplitAssignment]]
    """Per read step: what this worker's subtask reads."""
    rates: dict[str, float | None]
    """Per read step: rows per second for this worker's subtask."""
    no_more_splits: list[str]
    """Read steps whose splits are all assigned."""
    last_checkpoint_id: int
    """No checkpoint of this attempt has a number up to this one."""
    region: int = 0
    """Region that goes back: a number in ``WorkerArgs.division``."""
    survivors: list[tuple[int, int]] = []
    """Slots and regions that run on, and will turn to this one (R3, R4)."""
    attempts: list[int] = []
    """Per region: the attempt that it began with (R3, R4)."""
    limits: Limits | None = None
    """Of a fork that follows its leader: how far it may read now."""
    shadows: bool = False
    """Of a fork: its rows go to shadows of its sinks."""
    fresh_sinks: bool = False
    """True if the checkpoint's records of sinks are those of their shadows: sinks begin with nothing."""
    copies: dict[str, list[int]] = {}
    """By file of the checkpoint: slots whose workers have a copy of it."""
    news: bytes = b""
    """Determinant logs as far as the coordinator knows them (R0)."""
    key: bytes = b""
    """Of what the job stores, hidden under the job's secret (``secret.hidden``)."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Everything that begins with the attempt is ready: its rows may flow."""

    attempt: int


class PeersReset(msgspec.Struct, frozen=True, tag="turn"):
    """Others go back without this one (R3, R4): give their connections up, and accept those of the attempt."""

    attempt: int
    regions: list[int]
    """Those that go back."""
    incarnations: list[int]
    """Per slot."""
    checkpoint_id: int
    """Checkpoint that they go back to; 0: the beginning."""


class AssignSplits(msgspec.Struct, frozen=True, tag="splits"):
    attempt: int
    step: str
    splits: list[SplitAssignment]
    no_more: bool


class StepTime(msgspec.Struct, frozen=True, tag="time"):
    """Time of a read step, for those of its subtasks that have nothing to read (W4)."""

    attempt: int
    step: str
    watermark: int
    idle: bool
    report: bool
    """Others go by this subtask: it is to say how far it has come as it goes on."""


class ReadUpTo(msgspec.Struct, frozen=True, tag="limits"):
    """The leader of a fork has gone on."""

    attempt: int
    limits: Limits


class Trigger(msgspec.Struct, frozen=True, tag="trigger"):
    """Inject the barrier into every source subtask of the worker (A1); with ``synchronous`` into every subtask."""

    attempt: int
    checkpoint_id: int
    final: bool
    probe: bool = False
    """The wave stores nothing (C6)."""
    savepoint: str = ""
    """The wave is aligned, whatever the protocol, and every worker writes its state into this folder."""


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """Sources have read their last row."""

    attempt: int


class CompleteNotice(msgspec.Struct, frozen=True, tag="complete"):
    attempt: int
    checkpoint_id: int
    answer: bool
    """Say when its sinks have committed it (``Committed``)."""
    commit: bool = True
    files: list[str] | None = None
    """Files of the checkpoint; told only where copies of them are kept."""


class GloballyCommitted(msgspec.Struct, frozen=True, tag="globally_committed"):
    """The driver has committed this checkpoint, and all before it, for sinks that commit globally."""

    attempt: int
    checkpoint_id: int


class LoopVerdict(msgspec.Struct, frozen=True, tag="verdict"):
    """The wave found this loop without a row; ``ended``: there will never be one again (C6)."""

    attempt: int
    checkpoint_id: int
    vertices: list[int]
    """Of the loop."""
    ended: bool
    watermark: int
    """Watermark that may pass the loop's heads (W3)."""


class AbortNotice(msgspec.Struct, frozen=True, tag="abort"):
    attempt: int
    checkpoint_id: int
    latest_completed: int


class Reset(msgspec.Struct, frozen=True, tag="reset"):
    """Drop all subtasks of some regions; the process stays for the next attempt."""

    attempt: int
    regions: list[int] | None = None
    """None: all."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Leave."""

    reason: str


ToWorker = (
    Deploy
    | CopyPlaces
    | Start
    | AssignSplits
    | StepTime
    | ReadUpTo
    | Trigger
    | Drain
    | CompleteNotice
    | GloballyCommitted
    | AbortNotice
    | LoopVerdict
    | Reset
    | PeersReset
    | Stop
    | NetworkDeploy
    | SnapshotTrigger
    | SnapshotAbort
)

FromWorker = (
    Heartbeat
    | Hello
    | Ready
    | Ack
    | Decline
    | Finished
    | Committed
    | Failure
    | Metrics
    | Log
    | ProbeWanted
    | SourceTime
    | CaughtUp
    | CopiesHeld
    | SnapshotParts
)

_encoder = msgspec.msgpack.Encoder()
_to_worker = msgspec.msgpack.Decoder(ToWorker)
_from_worker = msgspec.msgpack.Decoder(FromWorker)


def encode(message: ToWorker | FromWorker) -> bytes:
    """The body of a control frame.

    >>> decode_to_worker(encode(Start(3)))
    Start(attempt=3)
    """
    return _encoder.encode(message)


def decode_to_worker(body: bytes) -> ToWorker:
    """Raises WireError for anything that is not a message to a worker."""
    try:
        return _to_worker.decode(body)
    except msgspec.DecodeError as e:
        raise WireError(f"malformed control message from the coordinator: {e}") from e


def decode_from_worker(body: bytes) -> FromWorker:
    """Raises WireError for anything that is not a message of a worker."""
    try:
        return _from_worker.decode(body)
    except msgspec.DecodeError as e:
        raise WireError(f"malformed control message from a worker: {e}") from e

"""Messages between the coordinator (driver) and the workers: typed, schema-checked msgpack.

Every message of an attempt names it; whoever gets one of another attempt drops it (fencing).
"""

from __future__ import annotations

from typing import Any

import msgspec

from cutwater.errors import WireError
from cutwater.plan.upgrade import Upgrade
from cutwater.runtime.control.process_network_messages import NetworkToWorker, SnapshotParts
from cutwater.runtime.control.read_limit import Limits
from cutwater.runtime.control.reports import (
    Ack,
    CaughtUp,
    Committed,
    CopiesHeld,
    Decline,
    Failure,
    Finished,
    Heartbeat,
    Hello,
    Log,
    Metrics,
    ProbeWanted,
    Ready,
    SourceTime,
)
from cutwater.storage.log.entries import CheckpointCompleted


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
    | AbortNotice
    | LoopVerdict
    | Reset
    | PeersReset
    | Stop
    | NetworkToWorker
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

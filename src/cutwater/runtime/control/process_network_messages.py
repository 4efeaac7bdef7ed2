"""Messages between the driver and the workers of a process network; ``control`` makes them part of its unions."""

from __future__ import annotations

from typing import NamedTuple

import msgspec


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


NetworkToWorker = NetworkDeploy | SnapshotTrigger | SnapshotAbort

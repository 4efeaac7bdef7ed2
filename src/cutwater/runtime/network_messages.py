"""Messages between the driver and the workers of a process network; ``control`` makes them part of its unions."""

from __future__ import annotations

import msgspec

from cutwater.network.messages import ProcessPart

__all__ = ["NetworkDeploy", "NetworkToWorker", "SnapshotAbort", "SnapshotParts", "SnapshotTrigger"]


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

"""One way to read any snapshot: a checkpoint in its job's folder, or a savepoint wherever it lies.

A snapshot lies in a *folder* of a store: the job's, or the savepoint's own.  ``CheckpointCompleted`` says which one in
that folder is meant; ``snapshots_at`` makes one up for a savepoint, which no log names.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

from cutwater.errors import ConfigError, CorruptSnapshotError
from cutwater.state.segments import Segment
from cutwater.storage.log.entries import CheckpointCompleted, LogState
from cutwater.storage.log.job_log import JobLog
from cutwater.storage.reading.addresses import SnapshotAddress, resolve_snapshot
from cutwater.storage.savepoint.manifest import load_savepoint, savepoint_state
from cutwater.storage.snapshot.channel_log import CHANNEL_KIND, LogItem, read_log
from cutwater.storage.snapshot.manifest import Entry, Manifest
from cutwater.storage.snapshot.segment_files import load_manifest, read_segment, read_verified
from cutwater.storage.store.base import Store
from cutwater.storage.store.paths import SAVEPOINT_FILE
from cutwater.storage.store.seal import Seal


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint or savepoint, open for reading.

    Attributes:
        store: where it lies.
        folder: of the job, or of the savepoint; what ``manifest`` names lies below it.
        completed: which one.
        manifest: what it consists of.
    """

    store: Store
    folder: str
    completed: CheckpointCompleted
    manifest: Manifest

    @property
    def is_savepoint(self) -> bool:
        return self.completed.path == SAVEPOINT_FILE

    def entries(self, step: str | None = None, name: str | None = None) -> list[Entry]:
        """Entries of the states (channel logs are not among them), in the order they apply within a subtask."""
        return [
            e
            for e in self.manifest.entries
            if e.kind != CHANNEL_KIND and (step is None or e.step == step) and (name is None or e.name == name)
        ]

    def segments(self, step: str, name: str | None = None) -> Iterator[tuple[Entry, Segment]]:
        """The state of a step, of all its subtasks, verified before it is handed out; one segment in memory at a time.

        Those of one subtask come in the order they apply: a "base" replaces what came before it in its key groups, a
        "delta" adds or replaces by key, a "delete" takes keys away.  A savepoint has no deletions, and each key once.

        Raises:
            CorruptSnapshotError: names file and offset.
        """
        for entry in self.entries(step, name):
            yield entry, read_segment(self.store, self.folder, entry)

    def logs(self) -> Iterator[tuple[Entry, list[LogItem]]]:
        """Rows on their way, by piece of a channel's log.

        Raises:
            CorruptSnapshotError: names file and offset.
        """
        for entry in self.manifest.entries:
            if entry.kind == CHANNEL_KIND:
                yield entry, read_log(self.store, self.folder, entry)


def open_snapshot(address: SnapshotAddress | str, seal: Seal | None = None) -> Snapshot:
    """Open a snapshot for reading; of a job without number its newest checkpoint.

    Args:
        address: as ``resolve_snapshot`` takes it: ``DIR/JOB``, ``DIR/JOB@7``, ``DIR/JOB/chk-7``, or a savepoint.
        seal: of an address that is a text, as ``resolve_snapshot`` takes it.

    Raises:
        ConfigError: there is no such snapshot; the hint lists what there is.
        CorruptSnapshotError: its manifest is damaged.
    """
    found = resolve_snapshot(address, seal) if isinstance(address, str) else address
    state = snapshots_at(found)
    wanted = found.checkpoint_id
    for completed in state.completed:
        if wanted in (None, completed.checkpoint_id):
            return Snapshot(found.store, found.job, completed, load_snapshot(found.store, found.job, completed))
    raise no_such_checkpoint(found, state)


def snapshots_at(address: SnapshotAddress) -> LogState:
    """Snapshots at an address that can be restored, newest first: those in the log of a job, or the one savepoint.

    Raises:
        CorruptSnapshotError: the log, or the savepoint's manifest, is damaged.
    """
    if address.is_savepoint:
        return savepoint_state(address.store, address.job)
    return JobLog(address.store, address.job).read()


def no_such_checkpoint(address: SnapshotAddress, state: LogState) -> ConfigError:
    """The error for a checkpoint that is not retained."""
    known = ", ".join(str(e.checkpoint_id) for e in state.completed)
    return ConfigError(f"no completed checkpoint {address}", hint=f"Retained there: {known or 'none'}.")


def load_snapshot(store: Store, folder: str, completed: CheckpointCompleted) -> Manifest:
    """The manifest of a checkpoint or savepoint, verified against the digest in ``completed``.

    Raises:
        CorruptSnapshotError: missing, torn, changed, or another one.
        FormatVersionError: written by a newer release.
    """
    if completed.path != SAVEPOINT_FILE:
        return load_manifest(store, folder, completed)
    if savepoint_state(store, folder).completed != (completed,):
        raise CorruptSnapshotError(f"{folder}/{SAVEPOINT_FILE} is not the one that was chosen: it changed since")
    return load_savepoint(store, folder).to_manifest()


MOST_BYTES = 64 << 20
MOST_S = 0.5
LEAST_BYTES = 1 << 20
"""Below this nothing can be said of a rate."""


@dataclass(frozen=True)
class ReadRate:
    """Bytes read and verified, and the time that it took."""

    bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float | None:
        """``None`` if too little was read to tell."""
        return self.bytes / self.seconds if self.bytes >= LEAST_BYTES and self.seconds > 0 else None


def measure_read_rate(snapshot: Snapshot) -> ReadRate:
    """Read the largest pieces of a snapshot, up to 64 MiB and for half a second, and compare them with their digests.

    Raises:
        CorruptSnapshotError: a piece is damaged.
    """
    entries = sorted((e for e in snapshot.manifest.entries if e.file), key=_length, reverse=True)
    read, started = 0, time.perf_counter()
    for entry in entries:
        if read >= MOST_BYTES or time.perf_counter() - started > MOST_S:
            break
        read_verified(snapshot.store, snapshot.folder, entry)
        read += entry.length
    return ReadRate(read, time.perf_counter() - started)


def _length(entry: Entry) -> int:
    return entry.length

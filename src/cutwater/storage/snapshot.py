"""Writing and reading the data of a snapshot: segments to files and back, every byte under a digest."""

from __future__ import annotations

from collections.abc import Iterable

from cutwater.state.segments import Segment
from cutwater.storage.base import Store
from cutwater.storage.log import CheckpointCompleted
from cutwater.storage.manifest import Entry, Manifest

__all__ = ["SnapshotWriter", "dumps_manifest", "load_manifest", "read_segment"]


class SnapshotWriter:
    """Writes one worker's part of one checkpoint: one file, or none if all of it is small.

    Args:
        store: where to.
        job: folder of the job in the store.
        checkpoint_id: of the checkpoint.
        attempt: of the job; with ``incarnation`` it names the file, so that no path is ever written twice.
        incarnation: unique among all workers of the attempt.
        inline_threshold_bytes: segments below this encoded size travel inside their entry.
    """

    def __init__(
        self, store: Store, job: str, checkpoint_id: int, attempt: int, incarnation: int, inline_threshold_bytes: int
    ) -> None: ...

    def add(self, step: str, subtask: int, segments: Iterable[Segment]) -> list[Entry]:
        """Write segments, in order; entries may be acknowledged only after ``close``."""
        ...

    def close(self) -> None:
        """Make everything durable."""
        ...

    def abort(self) -> None:
        """Drop everything written; never raises for a store that fails."""
        ...


def read_segment(store: Store, job: str, entry: Entry) -> Segment:
    """The segment of an entry; its bytes are compared with length and digest before they are decoded.

    Raises:
        CorruptSnapshotError: names file and offset, and what was expected.
        FormatVersionError: the entry's format is not known here.
    """
    ...


def dumps_manifest(manifest: Manifest) -> tuple[bytes, str]:
    """Deterministic JSON of a manifest, and its digest (xxh3_128, hex)."""
    ...


def load_manifest(store: Store, job: str, completed: CheckpointCompleted) -> Manifest:
    """The manifest of a completed checkpoint, verified against the digest in the log.

    Raises:
        CorruptSnapshotError: missing, torn, changed, or of another checkpoint.
        FormatVersionError: written by a newer release.
    """
    ...

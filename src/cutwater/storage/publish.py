"""Publishing a checkpoint: the manifest first, then the log entry that makes it count."""

from __future__ import annotations

from cutwater.storage.base import Store
from cutwater.storage.log import CheckpointCompleted, JobLog
from cutwater.storage.manifest import Manifest

__all__ = ["publish"]


def publish(store: Store, log: JobLog, manifest: Manifest, *, kind: str = "checkpoint") -> CheckpointCompleted:
    """Store the manifest and take the next log number.  Only after it returns may sinks commit.

    Raises:
        FencedError: a newer attempt owns the job: stop, commit nothing.
        StorageError: the checkpoint does not count (``log.in_doubt``: it may count for the next attempt).
    """
    ...

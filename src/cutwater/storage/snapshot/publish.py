"""Publishing a checkpoint: it counts from the moment at which its number in the job log is taken."""

from __future__ import annotations

from cutwater.errors import FencedError, InvariantError, StorageError
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import CheckpointCompleted
from cutwater.storage.snapshot.manifest import Manifest
from cutwater.storage.snapshot.segment_files import dumps_manifest
from cutwater.storage.store.base import Store
from cutwater.storage.store.paths import manifest_path

ATTACHED_BYTES = 1 << 16
"""A larger manifest gets a file of its own: the log keeps entries for longer than checkpoints are kept."""


def publish(store: Store, log: JobLog, manifest: Manifest, *, kind: str = "checkpoint") -> CheckpointCompleted:
    """Take the next log number, with the manifest.  Only after it returns may sinks commit.

    Costs two syncs on a ``LocalStore``, of log file and log folder, and one read; three more if the manifest is large:
    its file, its folder, the job's folder (at first touch of ``chk-<n>``).

    Raises:
        FencedError: a newer attempt owns the job: stop, commit nothing.
        StorageError: the checkpoint does not count.  With ``log.in_doubt`` it may count for the next attempt: this one
            must end, and its files must stay.
    """
    if manifest.attempt != log.attempt:
        raise FencedError(
            f"checkpoint {manifest.checkpoint_id} is of attempt {manifest.attempt}, the driver is at {log.attempt}"
        )
    if manifest.uid != log.state.uid:
        raise InvariantError(
            f"checkpoint {manifest.checkpoint_id} of job uid {manifest.uid!r} was to be published in the log of "
            f"{log.state.uid!r}"
        )
    data, digest = dumps_manifest(manifest, store.seal)
    completed = CheckpointCompleted(
        checkpoint_id=manifest.checkpoint_id,
        attempt=manifest.attempt,
        digest=digest,
        path=manifest_path(manifest.checkpoint_id, manifest.attempt),
        time_ms=manifest.completed_ms,
        kind=kind,
    )
    if len(data) <= ATTACHED_BYTES:
        return log.append(completed, data).completed[0]
    full = f"{log.job}/{completed.path}"
    # An earlier try of the same publish may have come this far.
    if not store.create(full, data) and store.read(full) != data:
        raise StorageError(f"{full} exists already with another content: no path is ever written twice")
    return log.append(completed).completed[0]

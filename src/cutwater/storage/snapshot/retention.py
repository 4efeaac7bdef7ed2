"""Retention of checkpoints: some are kept, the others removed."""

from __future__ import annotations

from cutwater.errors import CorruptSnapshotError, StorageError
from cutwater.storage.log.job_log import JobLog
from cutwater.storage.snapshot.shared_files import SharedFiles
from cutwater.storage.store.base import Store
from cutwater.storage.store.paths import LOG_FOLDER, attempt_of, checkpoint_folder, checkpoint_id_of, log_seq_of


class Retention:
    """Deletes retired checkpoints and leftovers of one job.  Call ``collect`` now and then, after a publish.

    Kept are the completed checkpoints in the log's state (its newest ``num_retained``).  Gone are, of ids *below* the
    newest completed one, all others: retired, aborted, subsumed, left by dead attempts.  Ids above it may still be
    pending and are never touched; nor is a folder that a newer attempt wrote into.

    Files in the shared folder go once no retained checkpoint names them (see ``SharedFiles``).

    A call costs three folder listings, and a listing and a delete for each folder that goes.  One per attempt.
    """

    def __init__(self, store: Store, log: JobLog) -> None:
        self._store = store
        self._log = log
        self.shared = SharedFiles(store, log)

    def collect(self, *, ended: bool = False) -> list[str]:
        """Remove what no restore needs any more; returns warnings (a failed delete is tried again at the next call).

        Args:
            ended: no checkpoint is under way, and none will be.

        Raises:
            FencedError: a newer attempt owns the job; nothing was deleted.
        """
        if self._log.in_doubt:
            return []
        try:
            self._log.check_fence()
            doomed = self._doomed()
        except StorageError as error:
            return [f"old checkpoints stay for now: {error}"]
        warnings: list[str] = []
        for checkpoint_id in doomed:
            try:
                self._delete(checkpoint_id)
            except StorageError as error:
                warnings.append(f"checkpoint {checkpoint_id} stays for now: {error}")
        return warnings + self.shared.collect(ended=ended)

    def _doomed(self) -> list[int]:
        state = self._log.state
        if not state.completed:
            return []
        kept = {c.checkpoint_id for c in state.completed}
        names = self._store.names(self._log.job)
        return sorted({i for i in map(checkpoint_id_of, names) if i is not None and i < state.newest_id} - kept)

    def _delete(self, checkpoint_id: int) -> None:
        folder = f"{self._log.job}/{checkpoint_folder(checkpoint_id)}"
        names = self._store.names(folder)
        attempts = [attempt for name in names if (attempt := attempt_of(name)) is not None]
        if max(attempts, default=0) <= self._log.attempt:
            self._store.delete(folder)


def list_jobs(store: Store) -> list[str]:
    """Names of the jobs in a checkpoint directory, sorted; what lies there besides, links included, is no job."""
    return [name for name in store.names() if _is_job(store, name)]


def _is_job(store: Store, name: str) -> bool:
    try:
        return any(log_seq_of(entry) is not None for entry in store.names(f"{name}/{LOG_FOLDER}"))
    except CorruptSnapshotError:  # not followed
        return False

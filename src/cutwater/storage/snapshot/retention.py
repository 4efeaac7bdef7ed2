"""Retention: removing what none of the checkpoints that are kept needs.

An incremental checkpoint names files of older ones, and one that comes soon after another writes into the same file
(``data_file.Continued``).  The manifests alone say which: a file in the shared folder is needed while a retained
manifest names it, so a crash at any moment leaves files too many, never too few, and the next ``collect`` finds them.

One checkpoint may be under way that builds on one which has just been retired: a worker froze before it heard of the
newer one.  So a file stays for one collection longer than it is named, however many checkpoints complete between two
collections, and ``check`` refuses a manifest that names a file which is gone all the same.

Nobody knows what a retained checkpoint names whose manifest is lost or damaged.  Nothing can be restored from it, and
it is no reason to stop: as long as it is retained, every file stays that it may name, which is all that were written
for it or for an older one.
"""

from __future__ import annotations

from collections.abc import Iterable

from cutwater.errors import CorruptSnapshotError, FormatVersionError, StorageError
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import CheckpointCompleted
from cutwater.storage.snapshot.manifest import Entry, Manifest
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.store.base import Store
from cutwater.storage.store.paths import (
    LOG_FOLDER,
    SHARED_FOLDER,
    attempt_of,
    checkpoint_folder,
    checkpoint_id_of,
    log_seq_of,
    writer_of_shared,
)


def shared_files(entries: Iterable[Entry]) -> frozenset[str]:
    """The shared files among those that entries lie in, relative to the job's folder."""
    return frozenset(e.file for e in entries if writer_of_shared(e.file) is not None)


def older_entries(manifest: Manifest) -> list[Entry]:
    """Entries of a checkpoint that an older one wrote."""
    return [
        e
        for e in manifest.entries
        if (writer := writer_of_shared(e.file)) and (e.written or writer[0]) != manifest.checkpoint_id
    ]


def list_shared(store: Store, job: str) -> list[tuple[str, tuple[int, int]]]:
    """Shared files of a job on disk, with checkpoint and attempt that each was written for."""
    files = [f"{SHARED_FOLDER}/{name}" for name in store.names(f"{job}/{SHARED_FOLDER}")]
    return [(file, writer) for file in files if (writer := writer_of_shared(file)) is not None]


class SharedFiles:
    """The shared files of one job, for the driver of one attempt."""

    def __init__(self, store: Store, log: JobLog) -> None:
        self._store = store
        self._log = log
        self._named: dict[CheckpointCompleted, frozenset[str]] = {}
        """By retained checkpoint."""
        self._kept: frozenset[str] = frozenset()
        """Files that the last collection left."""
        self._leaving: set[str] = set()
        """Named by those that were retired since then."""
        self._unreadable: set[CheckpointCompleted] = set()
        """Retained checkpoints whose manifests are lost or damaged."""
        self._warnings: list[str] = []
        """Not told yet."""

    def check(self, manifest: Manifest) -> None:
        """Before a manifest is published: the files of older checkpoints that it names are there, and stay.

        Raises:
            StorageError: one may be gone; the checkpoint must not count.
        """
        # By the checkpoint: who survived a restart of others writes under an older attempt (R2).
        writers = {e.file: writer for e in manifest.entries if (writer := writer_of_shared(e.file)) is not None}
        older = {file for file, writer in writers.items() if writer[0] != manifest.checkpoint_id}
        try:  # in any case: one that this checkpoint retires would not be read, nor told if it is damaged
            self._read_manifests()
        except StorageError:
            if older:
                raise
        if not older:
            return
        lost = older - self._kept.union(self._leaving, *self._named.values())
        if lost and self._unreadable:  # it may be that one's, and stays with it
            lost -= {file for file, writer in list_shared(self._store, self._log.job) if self._may_be_named(writer)}
        if lost:
            raise StorageError(
                f"checkpoint {manifest.checkpoint_id} builds on {min(lost)}, which no retained checkpoint names",
                hint="The next checkpoint does not; raise num_retained if this happens often.",
            )

    def collect(self, *, ended: bool = False) -> list[str]:
        """Remove files that no retained checkpoint names, with ``ended`` at once; returns warnings.

        Files written for ids above the newest completed one, or by a newer attempt, are left alone.
        """
        newest = self._log.state.newest_id
        try:
            self._read_manifests()
            kept = frozenset[str]().union(set() if ended else self._leaving, *self._named.values())
            doomed = [
                file
                for file, (checkpoint_id, attempt) in list_shared(self._store, self._log.job)
                if checkpoint_id < newest and attempt <= self._log.attempt and file not in kept
                if not self._may_be_named((checkpoint_id, attempt))
            ]
        except StorageError as error:
            return [f"shared files stay for now: {error}"] if self._has_files() else []
        self._kept, self._leaving = kept, set()
        warnings, self._warnings = self._warnings, []
        try:
            self._store.delete_files([f"{self._log.job}/{file}" for file in doomed])
        except StorageError as error:
            warnings.append(f"shared files stay for now: {error}")
        return warnings

    def _read_manifests(self) -> None:
        completed = self._log.state.completed
        for gone in self._named.keys() - set(completed):
            self._leaving |= self._named.pop(gone)
        self._unreadable.intersection_update(completed)
        for each in completed:
            if each not in self._named and each not in self._unreadable:
                try:
                    self._named[each] = shared_files(load_manifest(self._store, self._log.job, each).entries)
                except (CorruptSnapshotError, FormatVersionError) as error:
                    self._unreadable.add(each)
                    self._warnings.append(
                        f"checkpoint {each.checkpoint_id} cannot be restored any more and no longer counts as "
                        f"retained: {error.message}. The job goes on; files that it may need stay until newer ones "
                        "have replaced it"
                    )

    def _may_be_named(self, writer: tuple[int, int]) -> bool:
        """True if a manifest that nobody can read may name what was written for this checkpoint, by this attempt."""
        return any(writer[0] <= each.checkpoint_id for each in self._unreadable)

    def published(self, completed: CheckpointCompleted, manifest: Manifest) -> None:
        """A checkpoint was published: what it names need not be read again."""
        self._named[completed] = shared_files(manifest.entries)

    def _has_files(self) -> bool:
        try:
            return bool(list_shared(self._store, self._log.job))
        except StorageError:
            return True


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

"""Choosing what to restore: the newest completed checkpoint of which every byte verifies."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from cutwater.errors import CorruptSnapshotError
from cutwater.storage.log.entries import CheckpointCompleted, LogState
from cutwater.storage.reading.any_snapshot import load_snapshot
from cutwater.storage.savepoint.manifest import damaged_files
from cutwater.storage.snapshot.manifest import Manifest
from cutwater.storage.snapshot.segment_files import read_segment
from cutwater.storage.snapshot.shared_files import list_shared
from cutwater.storage.store.base import Store
from cutwater.storage.store.paths import SAVEPOINT_FILE, checkpoint_id_of


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a checkpoint."""

    file: str
    """Relative to the store's root."""
    what: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of reading every byte of a checkpoint."""

    checkpoint_id: int
    files: int
    bytes: int
    """Of the manifest's segments, inline ones included."""
    segments: int
    problems: tuple[Problem, ...]
    manifest: Manifest | None = None
    """``None`` if it cannot be read."""

    @property
    def ok(self) -> bool:
        """Every byte is as it was written."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class Restorable:
    """A checkpoint to restore, and the reports on newer ones that had to be passed over."""

    completed: CheckpointCompleted
    manifest: Manifest
    passed_over: tuple[VerifyReport, ...] = ()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user: one sentence per checkpoint passed over."""
        return tuple(
            f"Checkpoint {report.checkpoint_id} is damaged ({report.problems[0].what}); the job restores checkpoint "
            f"{self.completed.checkpoint_id} instead, and output that {report.checkpoint_id} committed is taken back."
            for report in self.passed_over
        )


def verify_checkpoint(
    store: Store, job: str, completed: CheckpointCompleted, held: Collection[str] = ()
) -> VerifyReport:
    """Compare every byte of a checkpoint with its digests, and decode it.  Damage is reported, not raised.

    Args:
        held: files that are left out.

    Raises:
        FormatVersionError: written by a newer release.
        StorageError: the store cannot be read now (no permission, I/O error): that says nothing about the checkpoint.
    """
    try:
        manifest = load_snapshot(store, job, completed)
    except CorruptSnapshotError as error:
        problem = Problem(f"{job}/{completed.path}", error.message)
        return VerifyReport(completed.checkpoint_id, 1, 0, 0, (problem,))
    return VerifyReport(
        checkpoint_id=completed.checkpoint_id,
        files=1 + len({e.file for e in manifest.entries if e.file}),
        bytes=sum(e.length for e in manifest.entries),
        segments=len(manifest.entries),
        problems=tuple(_damaged(store, job, completed, manifest, held)),
        manifest=manifest,
    )


def _damaged(
    store: Store, job: str, completed: CheckpointCompleted, manifest: Manifest, held: Collection[str]
) -> Iterator[Problem]:
    around: set[str] = set()
    for problem in _damaged_segments(store, job, manifest, held):
        around.add(problem.file)
        yield problem
    if completed.path == SAVEPOINT_FILE:  # what lies around the segments of its files
        yield from (Problem(file, what) for file, what in damaged_files(store, job) if file not in around)


def _damaged_segments(store: Store, job: str, manifest: Manifest, held: Collection[str]) -> Iterator[Problem]:
    for entry in manifest.entries:
        if entry.file in held:
            continue
        try:
            read_segment(store, job, entry)
        except CorruptSnapshotError as error:
            yield Problem(f"{job}/{entry.file}" if entry.file else f"{job} (inline)", error.message)


def choose(
    store: Store, job: str, state: LogState, *, verify: bool = True, held: Collection[str] = ()
) -> Restorable | None:
    """The checkpoint to restore (R1, R6); ``None`` if none was ever completed.

    A damaged checkpoint is passed over for the one before it: show ``Restorable.warnings``.

    Args:
        store: where the job lies.
        job: its folder.
        state: what the log says, read *after* the attempt began, or an older driver may still publish.
        verify: read all data now; else only the manifest is verified, and segments when they are read.
        held: files that workers have copies of: they are verified when they are read, as those copies are.

    Raises:
        CorruptSnapshotError: checkpoints were completed and none is usable (never a silent start from nothing).
        FormatVersionError: one that would be taken was written by a newer release.
    """
    passed_over: list[VerifyReport] = []
    for completed in state.completed:
        if verify:
            report = verify_checkpoint(store, job, completed, held)
        else:
            report = _verify_manifest(store, job, completed)
        if report.ok and report.manifest is not None:
            return Restorable(completed, report.manifest, tuple(passed_over))
        passed_over.append(report)
    if not passed_over:
        return None
    found = "; ".join(f"checkpoint {r.checkpoint_id}: {r.problems[0].what}" for r in passed_over)
    raise CorruptSnapshotError(
        f"no completed checkpoint of job {job!r} is usable: {found}",
        hint="Bring the files back from a copy, or start under another job name from a savepoint.",
    )


def _verify_manifest(store: Store, job: str, completed: CheckpointCompleted) -> VerifyReport:
    try:
        manifest = load_snapshot(store, job, completed)
    except CorruptSnapshotError as error:
        problem = Problem(f"{job}/{completed.path}", error.message)
        return VerifyReport(completed.checkpoint_id, 1, 0, 0, (problem,))
    return VerifyReport(completed.checkpoint_id, 1, 0, len(manifest.entries), (), manifest)


def next_checkpoint_id(store: Store, job: str, state: LogState) -> int:
    """First checkpoint id of an attempt: above all completed ones and all leftovers on disk (A1)."""
    on_disk = [i for i in map(checkpoint_id_of, store.names(job)) if i is not None]
    shared = [writer[0] for _, writer in list_shared(store, job)]
    return max([state.newest_id, *on_disk, *shared]) + 1

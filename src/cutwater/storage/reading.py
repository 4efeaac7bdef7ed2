"""Any snapshot by its address, a checkpoint or a savepoint: found, verified, read, and chosen for a restore.

A snapshot lies in a *folder* of a store: the job's, or the savepoint's own.  ``CheckpointCompleted`` says which one in
that folder is meant; ``snapshots_at`` makes one up for a savepoint, which no log names.

Damage is a ``CorruptSnapshotError``, which names file and offset; what a newer release wrote, a ``FormatVersionError``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from cutwater.errors import ConfigError, CorruptSnapshotError
from cutwater.state.segments import Segment
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import CheckpointCompleted, LogState
from cutwater.storage.snapshot.channel_log import CHANNEL_KIND, LogItem, read_log
from cutwater.storage.snapshot.manifest import Entry, Manifest
from cutwater.storage.snapshot.retention import list_jobs, list_shared
from cutwater.storage.snapshot.savepoint import damaged_files, is_savepoint, load_savepoint, savepoint_state
from cutwater.storage.snapshot.segment_files import load_manifest, read_segment, read_verified
from cutwater.storage.store.base import Store
from cutwater.storage.store.opening import absolute_uri, another, joined, parted, store_at
from cutwater.storage.store.paths import SAVEPOINT_FILE, checkpoint_id_of
from cutwater.storage.store.seal import Seal, environment_seal


@dataclass(frozen=True)
class SnapshotAddress:
    """One job in a checkpoint directory, and one of its checkpoints (``None``: not said which); or a savepoint.

    Attributes:
        job: folder in ``directory``: the job's, or the savepoint's.
        is_savepoint: which of both it is.
    """

    store: Store
    directory: str
    job: str
    checkpoint_id: int | None = None
    is_savepoint: bool = False

    def __str__(self) -> str:
        suffix = "" if self.checkpoint_id is None else f"@{self.checkpoint_id}"
        return f"{self.directory}/{self.job}{suffix}"


def resolve_snapshot(address: str, seal: Seal | None = None) -> SnapshotAddress:
    """``DIR/JOB``, ``DIR/JOB@7`` or ``DIR/JOB/chk-7``; ``DIR`` alone if it holds one job; or the folder of a savepoint.

    Args:
        seal: of what lies there; ``None``: that of the environment.

    Raises:
        ConfigError: there is no such job or savepoint; the hint lists what there is.
    """
    seal = environment_seal() if seal is None else seal
    above, name = parted(_unlinked(address))
    if name == SAVEPOINT_FILE:
        above, name = parted(above)
    here = store_at(above, seal)
    if here.exists() and name and is_savepoint(here, name):
        return SnapshotAddress(here, here.uri, name, is_savepoint=True)
    job, at, number = name.rpartition("@")
    checkpoint_id = checkpoint_id_of(name)
    if checkpoint_id is not None:
        above, job = parted(above)
        here = store_at(above, seal)
    elif at and number.isdecimal():
        checkpoint_id = int(number)
    elif at:
        raise ConfigError(f"{number!r} in {address!r} is no checkpoint id", hint="Write for example DIR/JOB@7.")
    else:
        job = name
    if here.exists() and job in list_jobs(here):
        return SnapshotAddress(here, here.uri, job, checkpoint_id)
    return _only_job(here, job, address, checkpoint_id)


def _only_job(above: Store, name: str, address: str, checkpoint_id: int | None) -> SnapshotAddress:
    folder = another(above, joined(above.uri, name))
    jobs = list_jobs(folder) if folder.exists() else []
    if len(jobs) == 1:
        return SnapshotAddress(folder, folder.uri, jobs[0], checkpoint_id)
    if jobs:
        raise ConfigError(
            f"{address!r} holds {len(jobs)} jobs", hint=f"Say which: {', '.join(joined(folder.uri, j) for j in jobs)}."
        )
    beside = list_jobs(above) if above.exists() else []
    forms = "Give DIR/JOB, DIR/JOB@7, DIR/JOB/chk-7, or the folder of a savepoint."
    hint = f"There are: {', '.join(beside)}." if beside else forms
    raise ConfigError(f"no job and no savepoint at {address!r}", hint=hint)


def _unlinked(address: str) -> str:
    """The address of what a link leads to: what a user names may be one, what lies below it may not."""
    place = absolute_uri(address)
    return os.path.realpath(place) if os.path.islink(place) else place


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint or savepoint, open for reading.

    Attributes:
        folder: of the job, or of the savepoint; what ``manifest`` names lies below it.
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
        entries = (e for e in self.manifest.entries if e.kind != CHANNEL_KIND)
        return [e for e in entries if step in (None, e.step) and name in (None, e.name)]

    def segments(self, step: str, name: str | None = None) -> Iterator[tuple[Entry, Segment]]:
        """The state of a step, of all its subtasks, verified before it is handed out; one segment in memory at a time.

        Those of one subtask come in the order they apply: a "base" replaces what came before it in its key groups, a
        "delta" adds or replaces by key, a "delete" takes keys away.  A savepoint has no deletions, and each key once.
        """
        for entry in self.entries(step, name):
            yield entry, read_segment(self.store, self.folder, entry)

    def logs(self) -> Iterator[tuple[Entry, list[LogItem]]]:
        """Rows on their way, by piece of a channel's log."""
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
    """Snapshots at an address that can be restored, newest first: those in the log of a job, or the one savepoint."""
    if address.is_savepoint:
        return savepoint_state(address.store, address.job)
    return JobLog(address.store, address.job).read()


def no_such_checkpoint(address: SnapshotAddress, state: LogState) -> ConfigError:
    """The error for a checkpoint that is not retained."""
    known = ", ".join(str(e.checkpoint_id) for e in state.completed)
    return ConfigError(f"no completed checkpoint {address}", hint=f"Retained there: {known or 'none'}.")


def load_snapshot(store: Store, folder: str, completed: CheckpointCompleted) -> Manifest:
    """The manifest of a checkpoint or savepoint, verified against the digest in ``completed``."""
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
    """Read the largest pieces of a snapshot, up to 64 MiB and for half a second, and compare their digests."""
    entries = sorted((e for e in snapshot.manifest.entries if e.file), key=lambda e: e.length, reverse=True)
    read, started = 0, time.perf_counter()
    for entry in entries:
        if read >= MOST_BYTES or time.perf_counter() - started > MOST_S:
            break
        read_verified(snapshot.store, snapshot.folder, entry)
        read += entry.length
    return ReadRate(read, time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong with a checkpoint."""

    file: str
    """Relative to the store's root."""
    what: str


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Result of reading every byte of a checkpoint, or its manifest alone."""

    checkpoint_id: int
    files: int
    """Of what was read."""
    bytes: int
    """Of the segments that were read, inline ones included."""
    segments: int
    """Of what was read."""
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
    store: Store, job: str, completed: CheckpointCompleted, held: Collection[str] = (), *, data: bool = True
) -> VerifyReport:
    """Compare every byte of a checkpoint with its digests, and decode it.  Damage is reported, not raised.

    Args:
        held: files that are not read.
        data: also what the manifest names; else that alone.

    Raises:
        FormatVersionError: written by a newer release.
        StorageError: the store cannot be read now (no permission, I/O error): that says nothing about the checkpoint.
    """
    try:
        manifest = load_snapshot(store, job, completed)
    except CorruptSnapshotError as error:
        problem = Problem(f"{job}/{completed.path}", error.message)
        return VerifyReport(completed.checkpoint_id, 1, 0, 0, (problem,))
    if not data:
        return VerifyReport(completed.checkpoint_id, 1, 0, 0, (), manifest)
    entries = [entry for entry in manifest.entries if entry.file not in held]
    return VerifyReport(
        checkpoint_id=completed.checkpoint_id,
        files=1 + len({entry.file for entry in entries if entry.file}),
        bytes=sum(entry.length for entry in entries),
        segments=len(entries),
        problems=tuple(_damaged(store, job, completed, entries)),
        manifest=manifest,
    )


def _damaged(store: Store, job: str, completed: CheckpointCompleted, entries: Sequence[Entry]) -> Iterator[Problem]:
    around: set[str] = set()
    for entry in entries:
        try:
            read_segment(store, job, entry)
        except CorruptSnapshotError as error:
            file = f"{job}/{entry.file}" if entry.file else f"{job} (inline)"
            around.add(file)
            yield Problem(file, error.message)
    if completed.path == SAVEPOINT_FILE:  # what lies around the segments of its files
        yield from (Problem(file, what) for file, what in damaged_files(store, job) if file not in around)


def choose(
    store: Store, job: str, state: LogState, *, verify: bool = True, held: Collection[str] = ()
) -> Restorable | None:
    """The checkpoint to restore (R1, R6); ``None`` if none was ever completed.

    A damaged checkpoint is passed over for the one before it: show ``Restorable.warnings``.

    Args:
        state: what the log says, read *after* the attempt began, or an older driver may still publish.
        verify: read all data now; else only the manifest is verified, and segments when they are read.
        held: files that workers have copies of: they are verified when they are read, as those copies are.

    Raises:
        CorruptSnapshotError: checkpoints were completed and none is usable (never a silent start from nothing).
        FormatVersionError: one that would be taken was written by a newer release.
    """
    passed_over: list[VerifyReport] = []
    for completed in state.completed:
        report = verify_checkpoint(store, job, completed, held, data=verify)
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


def next_checkpoint_id(store: Store, job: str, state: LogState) -> int:
    """First checkpoint id of an attempt: above all completed ones and all leftovers on disk (A1)."""
    on_disk = [i for i in map(checkpoint_id_of, store.names(job)) if i is not None]
    shared = [writer[0] for _, writer in list_shared(store, job)]
    return max([state.newest_id, *on_disk, *shared]) + 1

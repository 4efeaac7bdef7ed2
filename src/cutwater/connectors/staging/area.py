"""The staging of a sink: what its files are called, whose they are, and which of them are left over."""

from __future__ import annotations

import re
from collections.abc import Container, Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

import pyarrow as pa

from cutwater.config import FileAccess
from cutwater.connectors.staging.folders import REMOVED_HINT, STAGING_FOLDER, StagedFolder, StoreFolder, TargetFolder
from cutwater.errors import CorruptSnapshotError, SealError, StorageError
from cutwater.storage.snapshot.limits import check_name
from cutwater.storage.store.seal import PLAIN, Kind, Seal

TAMPERED = "Somebody changed the snapshot: look who can write there, and restore an older one, restore='DIR/JOB@ID'."
_PIECE = re.compile(r"wal-\d{5,19}-\d{10,19}-\d{6,19}\.arrows", re.ASCII)
_STAGED = re.compile(r"(?:wal|part)-.*-\d{10,19}-\d{4,19}\.[a-z.]+", re.ASCII)
"""Names of files in a staging folder that are ours, files half written included."""


@dataclass(frozen=True)
class Guard:
    """Access to staged files, and the seal by which changes are noticed."""

    seal: Seal = PLAIN
    access: FileAccess = "owner"


UNGUARDED = Guard()


def check_piece(name: str) -> str:
    """The name back, if it is that of a piece.

    Raises:
        CorruptSnapshotError: it is another one; nothing is done with it.

    >>> check_piece("../../elsewhere/thesis")
    Traceback (most recent call last):
    cutwater.errors.CorruptSnapshotError: '../../elsewhere/thesis' is no file that a sink stages...
    """
    if not _PIECE.fullmatch(name):
        raise CorruptSnapshotError(
            f"{name[:128]!r} is no file that a sink stages",
            hint=TAMPERED,
        )
    return name


F_co = TypeVar("F_co", bound=StagedFolder, covariant=True)


class StagingArea(Generic[F_co]):
    """The staging folder of one write step of one job: its files by their names, and whose they are.

    Names in it that come from a snapshot are checked before (``check_piece``, ``part_commit.check_part``).

    Args:
        folder: see ``staging_beside`` and ``staging_in_store``.
        job_uid, step: whose it is.
        guard: of the files.
    """

    def __init__(self, folder: F_co, job_uid: str, step: str, guard: Guard = UNGUARDED) -> None:
        self.folder = folder
        self.job_uid, self.step, self.guard = job_uid, step, guard

    def path(self, name: str) -> str:
        """Of a file, for messages."""
        return f"{self.folder.path}/{name}"

    def require(self, what: str, items: Sized) -> None:
        """Raise ``StorageError`` if there are such items but the folder is gone, and they with it."""
        if items and not self.folder.exists():
            raise StorageError(f"the staging folder {self.folder.path!r} is gone, with {what}", hint=REMOVED_HINT)

    def sweep(self, incarnation: int, keep: Container[str] = (), subtasks: Container[int] | None = None) -> None:
        """Remove what writers below ``incarnation`` left, except ``keep``; with ``subtasks`` only theirs."""
        ours = (name for name in self.folder.names() if _STAGED.fullmatch(name))
        old = (name for name in ours if incarnation_of(name) < incarnation and name not in keep)
        self.folder.remove(name for name in old if subtasks is None or subtask_of(name) in subtasks)

    def problem(self, kind: Kind, data: pa.Buffer, digest: str, what: str) -> str:
        """The fault of bytes that another process wrote; empty if there is none.

        Raises:
            SealError: nobody who is known sealed them.
        """
        try:
            return self.guard.seal.problem(kind, data, digest)
        except SealError as error:
            raise SealError(f"{what}: {error.message}", hint=error.hint) from error

    def finish(self, incarnation: int) -> None:
        """Remove what writers up to ``incarnation`` left, and the folder unless a later one is at work there."""
        self.sweep(incarnation + 1)
        self.folder.remove_if_empty()


def staging_beside(root: str, job_uid: str, step: str, guard: Guard = UNGUARDED) -> StagingArea[TargetFolder]:
    """The staging of a step whose output lies in the file system.

    Args:
        root: folder of the output.

    Raises:
        CorruptSnapshotError: uid or step name no folder.
    """
    return StagingArea(TargetFolder(root, _parts(job_uid, step), guard.access), job_uid, step, guard)


def staging_in_store(uri: str, job_uid: str, step: str, guard: Guard = UNGUARDED) -> StagingArea[StoreFolder]:
    """The staging of a step whose output is no file: it lies in the job's store.

    Args:
        uri: what the runtime gave the sink with ``bind``.

    Raises:
        CorruptSnapshotError: uid or step name no folder.
    """
    return StagingArea(StoreFolder(uri, _parts(job_uid, step), guard.seal, guard.access), job_uid, step, guard)


def _parts(job_uid: str, step: str) -> list[str]:
    return [STAGING_FOLDER, check_name(job_uid, "the job's uid"), check_name(step, "the step")]


def incarnation_of(name: str) -> int:
    """Incarnation in the name of a staged file: ``wal-<subtask>-<incarnation>-...``, or a part ``...-<one more>``."""
    try:
        return int(name.split("-")[2] if name.startswith("wal-") else name.rsplit("-", 2)[1])
    except (IndexError, ValueError):
        return -1


def subtask_of(name: str) -> int:
    """Subtask in the name of a staged file (see ``incarnation_of``).

    >>> subtask_of("wal-00002-0000000007-000000.arrows"), subtask_of("part-1f-out-00003-0000000001-0000000007-0000.csv")
    (2, 3)
    """
    try:
        return int(name.split("-")[1] if name.startswith("wal-") else name.rsplit("-", 4)[1])
    except (IndexError, ValueError):
        return -1

"""The staging folder of a sink, as the file system knows it: its names, its modes, and that no link leads out of it."""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import re
import stat
from collections.abc import Container, Generator, Iterable, Sized
from dataclasses import dataclass

import pyarrow as pa

from cutwater.config import FileAccess
from cutwater.errors import CorruptSnapshotError, SealError, StorageError
from cutwater.storage.snapshot.limits import check_name
from cutwater.storage.store.beneath import open_folder, open_to_read, opened_folder
from cutwater.storage.store.seal import PLAIN, Kind, Seal

STAGING_FOLDER = "_cutwater"
"""Spark, pyarrow and DuckDB globs skip names that start with an underscore."""


TAMPERED = "Somebody changed the snapshot: look who can write there, and restore an older one, restore='DIR/JOB@ID'."
_PIECE = re.compile(r"wal-\d{5,19}-\d{10,19}-\d{6,19}\.arrows", re.ASCII)
_STAGED = re.compile(r"(?:wal|part)-.*-\d{10,19}-\d{4,19}\.[a-z.]+", re.ASCII)
"""What lies in a staging folder that is ours, files half written included."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

_HINTS = {
    errno.ENOSPC: "The disk is full: free space; the job then goes on from its last checkpoint.",
    errno.EDQUOT: "The quota is used up: free space; the job then goes on from its last checkpoint.",
    errno.ENOENT: "It was removed while the job was running: leave the target and its _cutwater folder to the job.",
    errno.ENOTDIR: "A part of this path is a file where a folder should be.",
    errno.EACCES: "Give the user that the Spark workers run as the right to write there.",
    errno.EPERM: "Give the user that the Spark workers run as the right to write there.",
    errno.EROFS: "The file system is mounted read-only.",
}


@contextlib.contextmanager
def storage_errors(what: str, path: str) -> Generator[None, None, None]:
    """Turn an ``OSError`` of the block into a ``StorageError`` that says what was tried, where, and what to do.

    >>> with storage_errors("cannot list", "/nowhere"):
    ...     os.listdir("/nowhere")
    Traceback (most recent call last):
    ...
    cutwater.errors.StorageError: cannot list '/nowhere': No such file or directory...
    """
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        hint = _HINTS.get(error.errno or 0, "")
        raise StorageError(f"{what} {path!r}: {reason}", hint=hint) from error


def fsync_path(path: str) -> None:
    """Make a file, or the entries of a directory, durable.

    Raises:
        StorageError: it is not there, or the device reported an error.
    """
    with storage_errors("cannot make durable", path):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


@dataclass(frozen=True)
class Guard:
    """Who may read what is staged, and how it is known to be what was."""

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


class StagingArea:
    """The staging folder of one write step of one job.

    It is opened, with all above it up to the root, without following a link; names in it that come from a snapshot are
    checked before (``check_piece``, ``part_commit.check_part``).  The folders of a job are its own; what is to become
    the user's lies there with the modes that the user's umask gives.

    Raises:
        CorruptSnapshotError: uid or step name no folder.
    """

    def __init__(self, root: str, job_uid: str, step: str, guard: Guard = UNGUARDED) -> None:
        self.root = root
        self.job_uid = check_name(job_uid, "the job's uid")
        self.step = step
        self.guard = guard
        self.directory = os.path.join(root, STAGING_FOLDER, job_uid, step)
        self._parts = [STAGING_FOLDER, job_uid, check_name(step, "the step")]

    def path(self, name: str) -> str:
        """Of a file, for messages."""
        return os.path.join(self.directory, name)

    def opened(self) -> contextlib.AbstractContextManager[int]:
        """A descriptor of the folder."""
        return opened_folder(self.root, self._parts)

    def create(self) -> None:
        """Make the folder, durably; an existing one is fine.

        Raises:
            StorageError: the target cannot be written.
            CorruptSnapshotError: there is a link in its place.
        """
        top = os.path.dirname(self.root)
        while not os.path.isdir(top):
            top = os.path.dirname(top)
        if os.path.isdir(self.root):
            top = self.root
        with storage_errors("cannot make the staging folder", self.directory):
            for attempt in range(8):
                try:
                    os.makedirs(self.root, exist_ok=True)
                    self._make()
                    break
                except FileNotFoundError:
                    # Another job that ended just now removed the (empty) parent between two steps of this.
                    if attempt == 7:
                        raise
        parent = self.directory
        while parent != top:
            parent = os.path.dirname(parent)
            fsync_path(parent)

    def _make(self) -> None:
        folder = open_folder(self.root)
        try:
            for part in self._parts:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o777 if part == STAGING_FOLDER else 0o700, dir_fd=folder)
                    if self.guard.access == "group" and part != STAGING_FOLDER:
                        os.chmod(part, 0o770, dir_fd=folder)
                below = open_folder(part, folder)
                os.close(folder)
                folder = below
        finally:
            os.close(folder)

    def exists(self) -> bool:
        try:
            with self.opened():
                return True
        except OSError:
            return False

    def has(self, name: str) -> bool:
        """Whether there is a file of this name."""
        try:
            with self.opened() as folder:
                return stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        except OSError:
            return False

    def new_file(self, name: str, mode: int) -> io.FileIO:
        """A file that is not there yet, to be written."""
        with storage_errors("cannot make", self.path(name)), self.opened() as folder:
            # A file object, not a descriptor: that of a writer which nobody closed is given back with the object.
            return io.FileIO(name, "x", opener=lambda name, _: os.open(name, _NEW, mode, dir_fd=folder))

    def mapped(self, name: str) -> pa.Buffer:
        """The bytes of a file, without copying them.

        Raises:
            CorruptSnapshotError: it is no file.
            OSError: it is not there, or cannot be read.
        """
        with self.opened() as folder:
            fd, status = open_to_read(name, folder, repr(self.path(name)))
        try:
            empty = not status.st_size
            return pa.py_buffer(b"" if empty else mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ))
        finally:
            os.close(fd)

    def require(self, what: str, items: Sized) -> None:
        """Raise ``StorageError`` if there are such items but the folder is gone, and they with it."""
        if items and not self.exists():
            raise StorageError(f"the staging folder {self.directory!r} is gone, with {what}", hint=_HINTS[errno.ENOENT])

    def files(self) -> list[str]:
        """Names of all files in the folder, sorted; none if the folder is not there."""
        try:
            with self.opened() as folder:
                return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; what is gone already is fine."""
        with storage_errors("cannot clean", self.directory), contextlib.suppress(FileNotFoundError):
            names = list(names)
            with self.opened() as folder:
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder)

    def sweep(self, incarnation: int, keep: Container[str] = (), subtasks: Container[int] | None = None) -> None:
        """Remove what writers below ``incarnation`` left, except ``keep``; with ``subtasks`` only theirs."""
        ours = (name for name in self.files() if _STAGED.fullmatch(name))
        old = (name for name in ours if incarnation_of(name) < incarnation and name not in keep)
        self.remove(name for name in old if subtasks is None or subtask_of(name) in subtasks)

    def problem(self, kind: Kind, data: pa.Buffer, digest: str, what: str) -> str:
        """What is wrong with bytes that another process wrote; empty if nothing is.

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
        self._remove_if_empty()

    def _remove_if_empty(self) -> None:
        """Remove the folder and those above it (up to the root) that are empty."""
        for depth in range(len(self._parts), 0, -1):
            *above, name = self._parts[:depth]
            try:
                with opened_folder(self.root, above) as folder:
                    os.rmdir(name, dir_fd=folder)
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    return
                raise StorageError(f"cannot remove {self.directory!r}: {os.strerror(error.errno or 0)}") from error


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

"""Folders that sinks stage in: in the job's store, or beside output that a rename makes visible.

Nothing here knows what the files are; ``StagingArea`` does.
"""

from __future__ import annotations

import contextlib
import errno
import io
import mmap
import os
import stat
from collections.abc import Generator, Iterable, Sequence
from typing import Any, BinaryIO, Protocol, cast

import pyarrow as pa

from cutwater.config import FileAccess
from cutwater.errors import CorruptSnapshotError, StorageError
from cutwater.storage.store.no_follow import open_folder, open_to_read, opened_folder
from cutwater.storage.store.opening import joined, open_store, store_at
from cutwater.storage.store.seal import Seal

STAGING_FOLDER = "_cutwater"
"""Spark, pyarrow and DuckDB globs skip names that start with an underscore."""

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
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
REMOVED_HINT = _HINTS[errno.ENOENT]


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


class StagedFolder(Protocol):
    """A folder for staging; file names are plain, paths are for messages."""

    path: str

    def create(self) -> None:
        """Make the folder, durably; an existing one is fine.

        Raises:
            StorageError: it cannot be made.
            CorruptSnapshotError: there is a link in its place.
        """

    def exists(self) -> bool: ...

    def names(self) -> list[str]:
        """All files, sorted; none if the folder is not there."""
        ...

    def new_piece(self, name: str) -> BinaryIO:
        """A file that is not there yet, to be written in one thread: it is there to be read once it is durable."""
        ...

    def end_piece(self, file: BinaryIO) -> None:
        """Nothing more is written to a piece; it may not be durable yet."""

    def make_durable(self, names: Sequence[str], new: bool) -> None:
        """Make durable what was written to pieces; in a store, all of them have ended.

        Args:
            new: some were never durable: their names are to be, too.

        Raises:
            StorageError: one is gone, or the device failed.
        """

    def read(self, name: str, length: int) -> pa.Buffer:
        """The first bytes of a file; fewer if it is shorter.

        Raises:
            FileNotFoundError: it is not there.
            CorruptSnapshotError: it is no file.
            StorageError: it cannot be read.
        """
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; what is gone already is fine."""

    def remove_if_empty(self) -> None:
        """Remove the folder, and those of staging above it, as far as they are empty."""

    def close(self) -> None:
        """Close pieces that are not durable: they never will be."""


class StoreFolder:
    """A ``StagedFolder`` of a store: whoever writes a piece ends it before it is made durable.

    Args:
        uri: of what lies beside a job for one sink; made with the folder.
        parts: of the folder below it.
        seal, access: of the store.
    """

    def __init__(self, uri: str, parts: Sequence[str], seal: Seal, access: FileAccess) -> None:
        self._uri, self._parts, self._folder = uri, parts, "/".join(parts)
        self._seal = seal
        self._access: FileAccess = access
        self._store = store_at(uri, seal, access)
        self.path = joined(uri, self._folder)
        self._written: dict[str, BinaryIO] = {}
        """Pieces that are not durable."""
        self._proven = False
        """Something has just been put there."""

    def create(self) -> None:
        self._store = open_store(self._uri, self._seal, self._access)
        self._store.make_folder(self._folder)

    def exists(self) -> bool:
        proven, self._proven = self._proven, False
        return proven or self._store.exists(self._folder)

    def names(self) -> list[str]:
        return self._store.names(self._folder) if self.exists() else []

    def new_piece(self, name: str) -> BinaryIO:
        self._written[name] = file = self._store.write(f"{self._folder}/{name}")
        return file

    def end_piece(self, file: BinaryIO) -> None:
        """See ``StagedFolder.end_piece``: it stays open until it is durable."""

    def make_durable(self, names: Sequence[str], new: bool) -> None:
        for name in names:
            if (file := self._written.pop(name, None)) is not None:
                self._store.close_durably(file)
                self._proven = not self._store.appends  # what goes on being written may have been removed meanwhile

    def put(self, name: str, data: bytes) -> None:
        """A whole piece, durable.

        Raises:
            StorageError: there is one, or the store does not take it.
        """
        file = self.new_piece(name)
        file.write(data)
        self.make_durable([name], new=True)

    def read(self, name: str, length: int) -> pa.Buffer:
        path = f"{self._folder}/{name}"
        try:
            return pa.py_buffer(self._store.read(path, 0, length))
        except CorruptSnapshotError:
            if name not in self._store.names(self._folder):
                raise FileNotFoundError(errno.ENOENT, "there is no such piece", name) from None
            return pa.py_buffer(self._store.read(path))  # shorter than that, or no file

    def remove(self, names: Iterable[str]) -> None:
        self._store.delete_files(f"{self._folder}/{name}" for name in names)

    def remove_if_empty(self) -> None:
        for depth in range(len(self._parts), 0, -1):
            if not self._store.delete_empty("/".join(self._parts[:depth])):
                return

    def close(self) -> None:
        written, self._written = self._written, {}
        for file in written.values():
            file.close()


class TargetFolder:
    """A ``StagedFolder`` below the output, in the file system: a part becomes visible by a rename out of it.

    It is opened, with all above it up to the root, without following a link.  The folders of a job are its own; what is
    to become the user's lies there with the modes that the user's umask gives.

    Args:
        root: the output.
        parts: of the folder below it.
        access: who may read and write what is staged.
    """

    def __init__(self, root: str, parts: Sequence[str], access: FileAccess) -> None:
        self.root = root
        self.path = os.path.join(root, *parts)
        self._parts, self._access = list(parts), access

    def opened(self) -> contextlib.AbstractContextManager[int]:
        """A descriptor of the folder."""
        return opened_folder(self.root, self._parts)

    def create(self) -> None:
        top = os.path.dirname(self.root)
        while not os.path.isdir(top):
            top = os.path.dirname(top)
        if os.path.isdir(self.root):
            top = self.root
        with storage_errors("cannot make the staging folder", self.path):
            for attempt in range(8):
                try:
                    os.makedirs(self.root, exist_ok=True)
                    self._make()
                    break
                except FileNotFoundError:
                    # Another job that ended just now removed the (empty) parent between two steps of this.
                    if attempt == 7:
                        raise
        parent = self.path
        while parent != top:
            parent = os.path.dirname(parent)
            fsync_path(parent)

    def _make(self) -> None:
        folder = open_folder(self.root)
        try:
            for part in self._parts:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(part, 0o777 if part == STAGING_FOLDER else 0o700, dir_fd=folder)
                    if self._access == "group" and part != STAGING_FOLDER:
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

    def there(self, names: Iterable[str]) -> set[str]:
        """Those of the names that files have.

        Raises:
            CorruptSnapshotError: something else has one of them, or there is a link in the place of the folder.
            StorageError: they cannot be looked at.
        """
        found: set[str] = set()
        with storage_errors("cannot look at", self.path), contextlib.suppress(FileNotFoundError):
            with self.opened() as folder:
                found.update(name for name in names if self._is_file(name, folder))
        return found

    def _is_file(self, name: str, folder: int) -> bool:
        try:
            mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(mode):
            path = os.path.join(self.path, name)
            raise CorruptSnapshotError(
                f"{path!r} is not a file", hint="Somebody put it there: look who can write into the target."
            )
        return True

    def new_file(self, name: str, mode: int) -> io.FileIO:
        """A file that is not there yet, to be written; every write goes to the operating system."""
        with storage_errors("cannot make", os.path.join(self.path, name)), self.opened() as folder:
            # A file object, not a descriptor: that of a writer which nobody closed is given back with the object.
            return _NewFile(name, "x", opener=lambda name, _: os.open(name, _NEW, mode, dir_fd=folder))

    def new_part(self, name: str) -> BinaryIO:
        """A file that is to become the user's, with the mode that the umask gives; the group reads what is staged."""
        file = self.new_file(name, 0o666)
        if self._access == "group":
            os.fchmod(file.fileno(), os.fstat(file.fileno()).st_mode | stat.S_IRGRP)
        return cast(BinaryIO, file)

    def give_name(self, name: str, another: str) -> None:
        """Give a file that nobody writes to any more a second name; where there are no such links, it is copied.

        Raises:
            StorageError: the first is gone, or the disk is full.
        """
        self.remove([another])  # of a try that failed
        with storage_errors("cannot finish", os.path.join(self.path, another)), self.opened() as folder:
            try:
                os.link(name, another, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                self._copy(name, another)

    def _copy(self, name: str, another: str) -> None:
        with self.new_part(another) as file:
            left = memoryview(self.mapped(name))
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())

    def new_piece(self, name: str) -> BinaryIO:
        return cast(BinaryIO, self.new_file(name, 0o660 if self._access == "group" else 0o600))

    def end_piece(self, file: BinaryIO) -> None:
        file.close()

    def make_durable(self, names: Sequence[str], new: bool) -> None:
        for name in names:
            fsync_path(os.path.join(self.path, name))
        if new:
            fsync_path(self.path)

    def read(self, name: str, length: int) -> pa.Buffer:
        """See ``StagedFolder.read``; nothing is copied."""
        return self.mapped(name)[:length]

    def mapped(self, name: str) -> pa.Buffer:
        """The bytes of a file, without copying them.

        Raises:
            CorruptSnapshotError: it is no file.
            OSError: it is not there, or cannot be read.
        """
        with self.opened() as folder:
            fd, status = open_to_read(name, folder, repr(os.path.join(self.path, name)))
        try:
            empty = not status.st_size
            return pa.py_buffer(b"" if empty else mmap.mmap(fd, status.st_size, prot=mmap.PROT_READ))
        finally:
            os.close(fd)

    def names(self) -> list[str]:
        try:
            with self.opened() as folder:
                return sorted(os.listdir(folder))
        except FileNotFoundError:
            return []

    def remove(self, names: Iterable[str]) -> None:
        with storage_errors("cannot clean", self.path), contextlib.suppress(FileNotFoundError):
            names = list(names)
            with self.opened() as folder:
                for name in names:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(name, dir_fd=folder)

    def remove_if_empty(self) -> None:
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
                raise StorageError(f"cannot remove {self.path!r}: {os.strerror(error.errno or 0)}") from error

    def close(self) -> None:
        """See ``StagedFolder.close``: whoever writes a piece closes it."""


class _NewFile(io.FileIO):
    def write(self, b: Any, /) -> int:
        return os.write(self.fileno(), b)

"""A checkpoint directory on a local (or mounted) file system."""

from __future__ import annotations

import errno
import itertools
import os
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa
import xxhash

from cutwater.errors import ConfigError, CorruptSnapshotError, StorageError
from cutwater.storage.new_file import NewFile, write_all

__all__ = ["LocalStore"]

_TEMP_PREFIX = ".cw-tmp-"
_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_KNOWN_FOLDERS_LIMIT = 1_024
_STALE_S = 24 * 3600.0
_POOLED_BYTES = 1 << 20


class LocalStore:
    """Files below one root folder; implements ``Store``.

    ``create`` writes a temporary file in the target's folder, syncs it, and gives it its name with ``link(2)``, which
    fails if the name is taken: exclusive and never partly visible, on local file systems and on NFS.  One create costs
    two syncs (file, folder); a written file three at most (file, its folder, and that one's parent at first touch).

    Workers make one from the same root; the object pickles as its root.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root).absolute()
        self._base = str(self.root)  # a path object for each file was a tenth of a checkpoint's time in the driver
        self.atomic_create = True
        self._temp_tag = f"{_TEMP_PREFIX}{_pid_space()}-{os.getpid()}-{uuid.uuid4().hex[:8]}-"
        self._counter = itertools.count()
        self._synced: set[str] = set()

    def __reduce__(self) -> tuple[object, ...]:
        return LocalStore, (str(self.root),)

    def __repr__(self) -> str:
        return f"LocalStore({str(self.root)!r})"

    @classmethod
    def open(cls, root: str | os.PathLike[str]) -> LocalStore:
        """A store whose root exists and can be written; finds out whether the file system can create atomically.

        Raises:
            ConfigError: the root is a file.
            StorageError: it cannot be made or written.
        """
        store = cls(root)
        missing = [p for p in (store.root, *store.root.parents) if not os.path.exists(p)]
        existing = missing[-1].parent if missing else store.root
        if not existing.is_dir():
            what = "is" if existing == store.root else f"would lie below {existing},"
            raise ConfigError(f"checkpoint directory {store.root} {what} a file", hint="Give a folder.")
        try:
            store.root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(
                f"cannot make the checkpoint directory {store.root}: {os.strerror(error.errno or 0)}",
                hint=f"Give another one, or the right to write in {existing}.",
            ) from error
        with store._errors("open", "."):
            for folder in missing:
                _sync_folder(str(folder.parent))
            one, two = store._temp_path(store._base), store._temp_path(store._base)
            try:
                Path(one).touch()
                os.link(one, two)
            except OSError as error:
                if error.errno not in _NO_LINKS or not os.path.exists(one):
                    raise
                store.atomic_create = False
            finally:
                _unlink(one)
                _unlink(two)
        return store

    # -- Store

    def create(self, path: str, data: bytes) -> bool:
        """See ``Store.create``.  A ``False`` is durable too: the entry that was there first has been synced."""
        target = self._resolve(path)
        with self._errors("create", path):
            folder = os.path.dirname(target)
            fd, temp = self._open_new(folder)
            try:
                write_all(fd, [memoryview(data)])
                os.fsync(fd)
                made = _link(fd, temp, target)
            finally:
                os.close(fd)
                _unlink(temp)
            _sync_folder(folder)
            return made

    def overwrite(self, path: str, data: bytes) -> None:
        """See ``Store.overwrite``.  In place: over NFS, a file that was replaced stays the old one for a minute."""
        with self._errors("write", path):
            try:
                fd = os.open(self._resolve(path), os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            except FileNotFoundError:
                self.create(path, data)
                return
            try:
                if not stat.S_ISREG(os.fstat(fd).st_mode):
                    raise StorageError(f"{path} is not a file")
                os.pwrite(fd, data, 0)
            finally:
                os.close(fd)

    def write(self, path: str) -> BinaryIO:
        """See ``Store.write``."""
        target = self._resolve(path)
        with self._errors("create", path):
            self._make_folder(os.path.dirname(target))
            return cast(BinaryIO, NewFile(target, lambda: self._errors("write", path)))

    def sync(self, file: BinaryIO) -> None:
        """See ``Store.sync``."""
        assert isinstance(file, NewFile)
        target = str(file.name)
        with self._errors("write", target):
            file.flush()
            os.fsync(file.fileno())
            if not file.named:
                _sync_folder(os.path.dirname(target))
                file.named = True

    def close_durably(self, file: BinaryIO) -> None:
        """See ``Store.close_durably``."""
        with self._errors("write", file.name):
            try:
                self.sync(file)
            finally:
                file.close()

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes | memoryview:
        """See ``Store.read``."""
        target = self._resolve(path)
        with self._errors("read", path):
            fd = os.open(target, os.O_RDONLY | os.O_CLOEXEC)
            try:
                info = os.fstat(fd)
                if not stat.S_ISREG(info.st_mode):
                    raise CorruptSnapshotError(f"{path} is not a file")
                wanted = max(0, info.st_size - offset) if length is None else length
                data = _pread_all(fd, offset, wanted)
            finally:
                os.close(fd)
        if len(data) < wanted:
            raise CorruptSnapshotError(
                f"{path} is too short: {wanted} bytes expected at offset {offset}, {len(data)} there"
            )
        return data

    def list(self, prefix: str = "") -> list[str]:
        """See ``Store.list``.  Temporary files of unfinished creates are not shown."""
        found: list[str] = []
        with self._errors("list", prefix or "."):
            for path in _walk(Path(self._resolve(prefix))):
                if not path.name.startswith(_TEMP_PREFIX):
                    found.append(path.relative_to(self.root).as_posix())
        return sorted(found)

    def names(self, folder: str = "") -> list[str]:
        """See ``Store.names``."""
        with self._errors("list", folder or "."):
            try:
                names = os.listdir(self._resolve(folder))
            except (FileNotFoundError, NotADirectoryError):
                self._require_root("list", folder)
                return []
        return sorted(n for n in names if not n.startswith(_TEMP_PREFIX))

    def delete(self, path: str) -> None:
        """See ``Store.delete``.  Not synced: a delete undone by a power failure is done again later."""
        target = self._resolve(path)
        if os.path.normpath(target) == self._base:
            raise StorageError(f"refused to delete the whole checkpoint directory {self.root}")
        with self._errors("delete", path):
            try:
                if stat.S_ISDIR(os.lstat(target).st_mode):
                    gone = f"{target}{os.sep}"
                    self._synced = {f for f in self._synced if not f"{f}{os.sep}".startswith(gone)}
                    shutil.rmtree(target)
                else:
                    os.unlink(target)
            except FileNotFoundError:
                return

    def sweep(self, prefix: str = "") -> int:
        """See ``Store.sweep``: temporary files whose writers are dead or, of other hosts, older than a day."""
        removed = 0
        with self._errors("sweep", prefix or "."):
            for path in _walk(Path(self._resolve(prefix))):
                if path.name.startswith(_TEMP_PREFIX) and _is_abandoned(path):
                    path.unlink(missing_ok=True)
                    removed += 1
        return removed

    # -- inside

    def _resolve(self, path: str) -> str:
        if path.startswith("/") or ".." in path.split("/") or "\0" in path:
            raise StorageError(f"path {path!r} leads out of the checkpoint directory")
        return os.path.join(self._base, path) if path else self._base

    def _temp_path(self, folder: str) -> str:
        return os.path.join(folder, f"{self._temp_tag}{next(self._counter)}")

    def _open_new(self, folder: str) -> tuple[int, str]:
        self._make_folder(folder)
        temp = self._temp_path(folder)
        return os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), temp

    def _make_folder(self, folder: str) -> None:
        """Make a folder below the root, durably: whoever made it, this process syncs its parent once."""
        if folder == self._base or (folder in self._synced and os.path.isdir(folder)):
            return
        self._require_root("write", folder)
        parent = os.path.dirname(folder)
        self._make_folder(parent)
        with suppress(FileExistsError):
            os.mkdir(folder)
        _sync_folder(parent)
        if len(self._synced) >= _KNOWN_FOLDERS_LIMIT:
            self._synced = set()
        self._synced.add(folder)

    def _require_root(self, what: str, path: str) -> None:
        if not self.root.is_dir():
            raise StorageError(
                f"cannot {what} {path}: checkpoint directory {self.root} is gone, it was deleted during the run",
                hint="Stop the job; what it had stored is lost.",
            )

    @contextmanager
    def _errors(self, what: str, path: str) -> Generator[None]:
        """Operating system errors become ours, with what to do about them."""
        try:
            yield
        except OSError as error:
            raise self._translated(error, what, path) from error

    def _translated(self, error: OSError, what: str, path: str) -> StorageError:
        self._require_root(what, path)
        if error.errno in _FULL:
            return StorageError(
                f"cannot {what} {path}: the file system of {self.root} is full",
                hint="Free space there; completed checkpoints are untouched.",
            )
        if what in ("read", "list"):
            if error.errno in (errno.ENOENT, errno.ENOTDIR):
                return CorruptSnapshotError(f"{path} is missing in {self.root}")
        elif error.errno == errno.EEXIST:
            return StorageError(f"{path} exists already in {self.root}: no path is ever written twice")
        elif error.errno in _NO_LINKS and what == "create" and os.access(self.root, os.W_OK):
            return StorageError(
                f"cannot create {path}: the file system of {self.root} has no hard links ({error.strerror})",
                hint="Put the checkpoints on a file system that has them (ext4, xfs, NFS ...).",
            )
        if error.errno in _NOT_WRITABLE:
            return StorageError(
                f"cannot {what} {path}: no permission in {self.root} ({error.strerror})",
                hint="Check owner, mode and mount options of the checkpoint directory.",
            )
        return StorageError(f"cannot {what} {path} in {self.root}: {error.strerror or error}")


def _unlink(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)


def _link(fd: int, temp: str, target: str) -> bool:
    try:
        os.link(temp, target)
    except OSError as error:
        # Over NFS the answer to a link that worked can get lost, and its repetition fails: two names mean it is ours.
        if os.fstat(fd).st_nlink == 2:
            return True
        if error.errno == errno.EEXIST:
            return False
        raise
    return True


def _pread_all(fd: int, offset: int, length: int) -> bytes | memoryview:
    """As many bytes as there are (the system stops at 2 GiB).

    Much is read into memory of Arrow's pool, which uses what the piece before has given back: the first touch of fresh
    pages costs several times the reading.
    """
    if length < _POOLED_BYTES:
        return os.pread(fd, length, offset)
    data, done = memoryview(pa.allocate_buffer(length)).cast("B"), 0
    while read := os.preadv(fd, [data[done:]], offset + done):
        done += read
    return data[:done]


def _sync_folder(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _walk(folder: Path) -> Iterator[Path]:
    """All files below a folder; what vanishes meanwhile is left out."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in entries:
        if entry.is_dir(follow_symlinks=False):
            yield from _walk(Path(entry.path))
        else:
            yield Path(entry.path)


def _pid_space() -> str:
    """Names the host and process-id name space in which a process id means something."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    return xxhash.xxh32_hexdigest(f"{socket.gethostname()}/{space}".encode())


def _is_abandoned(path: Path) -> bool:
    space, _, rest = path.name.removeprefix(_TEMP_PREFIX).partition("-")
    pid = rest.partition("-")[0]
    if space == _pid_space() and pid.isdigit():
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
    try:
        return time.time() - path.stat().st_mtime > _STALE_S
    except FileNotFoundError:
        return False

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
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

import pyarrow as pa
import xxhash

from cutwater.config import FileAccess
from cutwater.errors import ConfigError, CorruptSnapshotError, StorageError
from cutwater.storage.store.beneath import check_relative, open_folder, open_to_read, opened_folder
from cutwater.storage.store.new_file import NewFile, write_all
from cutwater.storage.store.seal import PLAIN, Seal

TEMP_PREFIX = ".cw-tmp-"
_STALE_S = 24 * 3600.0


def temp_tag() -> str:
    """Prefix of the names of this process's temporary files."""
    return f"{TEMP_PREFIX}{_pid_space()}-{os.getpid()}-{uuid.uuid4().hex[:8]}-"


def _pid_space() -> str:
    """Names the host and process-id name space in which a process id means something."""
    try:
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        space = 0
    return xxhash.xxh32_hexdigest(f"{socket.gethostname()}/{space}".encode())


def is_abandoned(name: str, folder: int) -> bool:
    """True if the writer of a temporary file in a folder is dead or, on another host, has been silent for a day."""
    space, _, rest = name.removeprefix(TEMP_PREFIX).partition("-")
    pid = rest.partition("-")[0]
    if space == _pid_space() and pid.isdigit():
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            return True
        except PermissionError:
            pass
    try:
        return time.time() - os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime > _STALE_S
    except FileNotFoundError:
        return False


_NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_WRITABLE = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_KNOWN_FOLDERS_LIMIT = 1_024
_POOLED_BYTES = 1 << 20
_READ_BYTES_MAX = 1 << 28
"""Largest file that is read whole (log entries, manifests); segments say their length, which has a bound, too."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class LocalStore:
    """Files below one root folder; implements ``Store``.

    ``create`` writes a temporary file in the target's folder, syncs it, and gives it its name with ``link(2)``, which
    fails if the name is taken: exclusive and never partly visible, on local file systems and on NFS.  One create costs
    two syncs (file, folder); a written file three at most (file, its folder, and that one's parent at first touch).

    Links below the root are not followed (``beneath``).  What is made here may be read and written by its owner only,
    or by the owner's group, too.

    Workers make one from the same root; the object pickles as its root, without the key.

    Args:
        root: the folder.
        seal: of what lies in it.
        access: who may read and write what is made here.
    """

    def __init__(self, root: str | os.PathLike[str], seal: Seal = PLAIN, access: FileAccess = "owner") -> None:
        if "\0" in os.fspath(root):
            raise StorageError(f"{os.fspath(root)[:128]!r} names no folder")
        self.root = Path(root).absolute()
        self.seal = seal
        self.access: FileAccess = access
        self._base = str(self.root)  # a path object for each file was a tenth of a checkpoint's time in the driver
        self.atomic_create = True
        self._temp_tag = temp_tag()
        self._counter = itertools.count()
        self._synced: set[str] = set()

    def __reduce__(self) -> tuple[object, ...]:
        return LocalStore, (self._base, PLAIN, self.access)

    def __repr__(self) -> str:
        return f"LocalStore({self._base!r})"

    def sealed(self, seal: Seal) -> LocalStore:
        """See ``Store.sealed``."""
        if not (seal.keyed or self.seal.keyed):
            return self
        return LocalStore(self._base, seal, self.access)

    @property
    def uri(self) -> str:
        """See ``Store.uri``: the path."""
        return self._base

    @classmethod
    def open(cls, root: str | os.PathLike[str], seal: Seal = PLAIN, access: FileAccess = "owner") -> LocalStore:
        """A store whose root exists and can be written; finds out whether the file system can create atomically.

        Raises:
            ConfigError: the root is a file.
            StorageError: it cannot be made or written.
        """
        store = cls(root, seal, access)
        missing = [p for p in (store.root, *store.root.parents) if not os.path.exists(p)]
        existing = missing[-1].parent if missing else store.root
        if not existing.is_dir():
            what = "is" if existing == store.root else f"would lie below {existing},"
            raise ConfigError(f"checkpoint directory {store.root} {what} a file", hint="Give a folder.")
        try:
            store.root.parent.mkdir(parents=True, exist_ok=True)
            if missing:
                with suppress(FileExistsError):
                    store._make(store._base, None)
        except OSError as error:
            raise StorageError(
                f"cannot make the checkpoint directory {store.root}: {os.strerror(error.errno or 0)}",
                hint=f"Give another one, or the right to write in {existing}.",
            ) from error
        with store._errors("open", "."):
            for folder in missing:
                _sync_folder(str(folder.parent))
            with opened_folder(store._base, []) as fd:
                store.atomic_create = store._can_link(fd)
        return store

    # -- Store

    def create(self, path: str, data: bytes) -> bool:
        """See ``Store.create``.  A ``False`` is durable too: the entry that was there first has been synced."""
        parent, name = _split(path)
        with self._errors("create", path), self._made(parent) as folder:
            fd, temp = self._open_new(folder)
            try:
                write_all(fd, [memoryview(data)])
                os.fsync(fd)
                made = _link(fd, temp, name, folder)
            finally:
                os.close(fd)
                _unlink(temp, folder)
            _sync_names(folder)
            return made

    def overwrite(self, path: str, data: bytes) -> None:
        """See ``Store.overwrite``.  In place: over NFS, a file that was replaced stays the old one for a minute."""
        parent, name = _split(path)
        with self._errors("write", path), self._made(parent) as folder:
            try:
                fd = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
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
        parent, name = _split(path)
        with self._errors("create", path), self._made(parent) as folder:
            fd = self._open_exclusively(name, folder)
            return cast(BinaryIO, NewFile(path, fd, lambda: self._errors("write", path)))

    def sync(self, file: BinaryIO) -> None:
        """See ``Store.sync``."""
        assert isinstance(file, NewFile)
        with self._errors("write", file.path):
            file.flush()
            os.fsync(file.fileno())
            if not file.named:
                with opened_folder(self._base, _split(file.path)[0]) as folder:
                    os.fsync(folder)
                file.named = True

    def close_durably(self, file: BinaryIO) -> None:
        """See ``Store.close_durably``."""
        assert isinstance(file, NewFile)
        with self._errors("write", file.path):
            try:
                self.sync(file)
            finally:
                file.close()

    def exists(self, folder: str = "") -> bool:
        """See ``Store.exists``.  A link is no folder of the place."""
        try:
            with opened_folder(self._base, check_relative(folder)):
                return True
        except (OSError, CorruptSnapshotError):
            return False

    def local_folder(self, path: str = "") -> str:
        """See ``Store.local_folder``."""
        return "/".join([self._base.rstrip("/"), *check_relative(path)]) or "/"

    def shares_device(self, directory: str) -> bool:
        """See ``Store.shares_device``."""
        return os.stat(self._base).st_dev == os.stat(directory).st_dev

    def make_folder(self, path: str) -> None:
        """See ``Store.make_folder``."""
        with self._errors("create", path), self._made(check_relative(path)):
            pass

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes | memoryview:
        """See ``Store.read``."""
        parent, name = _split(path)
        with self._errors("read", path):
            with opened_folder(self._base, parent) as folder:
                fd, status = open_to_read(name, folder, path)
            try:
                there = max(0, status.st_size - offset)
                wanted = there if length is None else length
                if length is None and there > _READ_BYTES_MAX:
                    raise CorruptSnapshotError(f"{path} is too large: {there} bytes, where few belong")
                data = _pread_all(fd, offset, wanted) if 0 <= wanted <= there and offset >= 0 else b""
            finally:
                os.close(fd)
        if len(data) < wanted or wanted < 0:
            raise CorruptSnapshotError(
                f"{path} is too short: {wanted} bytes expected at offset {offset}, {there} there"
            )
        return data

    def list(self, prefix: str = "") -> list[str]:
        """See ``Store.list``.  Temporary files of unfinished creates are not shown."""
        found: list[str] = []
        with self._errors("list", prefix or "."):
            for folder, _, names in self._walk(prefix):
                found += [f"{folder}{name}" for name in names if not name.startswith(TEMP_PREFIX)]
        return sorted(found)

    def names(self, folder: str = "") -> list[str]:
        """See ``Store.names``."""
        with self._errors("list", folder or "."):
            try:
                with opened_folder(self._base, check_relative(folder)) as fd:
                    names = os.listdir(fd)
            except (FileNotFoundError, NotADirectoryError):
                self._require_root("list", folder)
                return []
        return sorted(n for n in names if not n.startswith(TEMP_PREFIX))

    def delete(self, path: str) -> None:
        """See ``Store.delete``.  Not synced: a delete undone by a power failure is done again later."""
        if not check_relative(path):
            raise StorageError(f"refused to delete the whole checkpoint directory {self.root}")
        parent, name = _split(path)
        with self._errors("delete", path):
            try:
                with opened_folder(self._base, parent) as folder:
                    if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                        gone = f"{'/'.join([*parent, name])}/"
                        self._synced = {f for f in self._synced if not f"{f}/".startswith(gone)}
                        shutil.rmtree(name, dir_fd=folder)
                    else:
                        os.unlink(name, dir_fd=folder)
            except FileNotFoundError:
                return

    def delete_empty(self, folder: str) -> bool:
        """See ``Store.delete_empty``; temporary files count, too."""
        parent, name = _split(folder)
        with self._errors("delete", folder):
            try:
                with opened_folder(self._base, parent) as above:
                    os.rmdir(name, dir_fd=above)
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return False
        self._synced.discard("/".join([*parent, name]))
        return True

    def sweep(self, prefix: str = "") -> int:
        """See ``Store.sweep``: temporary files whose writers are dead or, of other hosts, older than a day."""
        removed = 0
        with self._errors("sweep", prefix or "."):
            for _, folder, names in self._walk(prefix):
                for name in names:
                    if name.startswith(TEMP_PREFIX) and is_abandoned(name, folder):
                        _unlink(name, folder)
                        removed += 1
        return removed

    # -- inside

    def _walk(self, prefix: str) -> Generator[tuple[str, int, list[str]]]:
        """Of each folder below one: its path with a slash, its descriptor, its files; what vanishes is left out."""
        parts = check_relative(prefix)
        above = "".join(f"{part}/" for part in parts)
        try:
            with opened_folder(self._base, parts) as top:
                for path, _, names, fd in os.fwalk(dir_fd=top):
                    inner = path.removeprefix(".").removeprefix("/")
                    yield f"{above}{inner}{'/' if inner else ''}", fd, names
        except (FileNotFoundError, NotADirectoryError):
            return

    def _can_link(self, folder: int) -> bool:
        one, two = self._temp_name(), self._temp_name()
        try:
            os.close(os.open(one, _NEW, 0o600, dir_fd=folder))
            os.link(one, two, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return False
        finally:
            _unlink(one, folder)
            _unlink(two, folder)
        return True

    def _temp_name(self) -> str:
        return f"{self._temp_tag}{next(self._counter)}"

    def _open_new(self, folder: int) -> tuple[int, str]:
        temp = self._temp_name()
        return self._open_exclusively(temp, folder), temp

    def _open_exclusively(self, name: str, folder: int) -> int:
        """A new file, for the owner or the owner's group, whatever the umask says."""
        fd = os.open(name, _NEW, 0o600, dir_fd=folder)
        if self.access == "group":
            os.fchmod(fd, 0o660)
        return fd

    def _make(self, name: str, parent: int | None) -> None:
        """A new folder, as ``_open_exclusively``."""
        os.mkdir(name, 0o700, dir_fd=parent)
        if self.access == "group":
            os.chmod(name, 0o770, dir_fd=parent)

    @contextmanager
    def _made(self, parts: list[str]) -> Generator[int]:
        """A folder below the root, made if it is not there, durably: whoever made it, this process syncs its parent
        once."""
        folder, path = open_folder(self._base), ""
        try:
            for part in parts:
                path = f"{path}/{part}" if path else part
                try:
                    below = open_folder(part, folder)
                except FileNotFoundError:
                    self._synced.discard(path)
                    with suppress(FileExistsError):
                        self._make(part, folder)
                    below = open_folder(part, folder)
                above, folder = folder, below
                try:
                    if path not in self._synced:
                        os.fsync(above)
                        self._know(path)
                finally:
                    os.close(above)
            yield folder
        finally:
            os.close(folder)

    def _know(self, path: str) -> None:
        if len(self._synced) >= _KNOWN_FOLDERS_LIMIT:
            self._synced = set()
        self._synced.add(path)

    def _require_root(self, what: str, path: str) -> None:
        if not os.path.isdir(self._base):
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


def _sync_names(folder: int) -> None:
    os.fsync(folder)


def _split(path: str) -> tuple[list[str], str]:
    """The folder of a file, and its name there."""
    parts = check_relative(path)
    return parts[:-1], parts[-1] if parts else "."


def _unlink(name: str, folder: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _link(fd: int, temp: str, name: str, folder: int) -> bool:
    try:
        os.link(temp, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
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

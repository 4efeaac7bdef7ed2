"""A checkpoint directory on a local (or mounted) file system."""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import mmap
import os
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, cast

import pyarrow as pa
import xxhash

from cutwater.config import FileAccess
from cutwater.errors import ConfigError, CorruptSnapshotError, StorageError
from cutwater.storage.store.no_follow import check_relative, open_folder, open_to_read, opened_folder
from cutwater.storage.store.seal import PLAIN, Seal

_KEPT_BYTES = 1 << 20
_PIECES_PER_CALL = 1_024  # the system takes no more
_DIRECT_BYTES = 1 << 25
"""So much of what is written until a flush goes to the device directly."""
_STAGE_BYTES = 4 << 20
"""Bytes that go to the device at once: more than it takes in one call of most checkpoints."""
_BLOCK_BYTES = 4_096
"""Alignment of places in a file and in memory where nothing is copied."""
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_STAGES: list[mmap.mmap] = []
"""Memory to use again.  It is of the shared kind, of which a fork makes no copies while a device reads it; so a child
that wrote there, too, would write into its parent's file."""
_STAGES_KEPT = 2
os.register_at_fork(after_in_child=_STAGES.clear)


class NewFile(io.FileIO):
    """A file that is not there yet, written front to back with few calls, and without a copy in the system's memory.

    A file that the system keeps in its memory costs it fresh pages, and their return when the file goes: 9 MB cost ten
    milliseconds of processor time or more, and two to four if they go to the device directly (``O_DIRECT``).  Nobody
    reads a checkpoint unless something fails.  A large one stays in memory beyond its beginning all the same: after a
    failure reading it from the device would be what the restore waits for.

    What is written is kept, not copied, until there is much of it: it must not change meanwhile.

    Args:
        fd: of the file, just made; closed with this object.
    """

    def __init__(self, path: str, fd: int, errors: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(fd, "wb")
        self.path = path
        self.named = False
        """Its name is durable."""
        self._errors = errors
        self._pieces: list[memoryview] = []
        self._kept_bytes = 0
        self._begun = False
        self._direct: _Direct | None = None

    def write(self, b: Any, /) -> int:
        piece = memoryview(b).cast("B")
        self._pieces.append(piece)
        self._kept_bytes += len(piece)
        if self._kept_bytes >= _KEPT_BYTES:
            with self._errors():
                self._hand_over()
        return len(piece)

    def flush(self) -> None:
        if self._pieces or self._direct is not None:
            with self._errors():
                self._hand_over()
                self._end_direct()
        self._begun = False

    def _hand_over(self) -> None:
        if not self._begun:
            self._begun = True
            self._direct = _Direct.begin(self.fileno()) if self._kept_bytes >= _KEPT_BYTES else None
        if self._direct is not None:
            self._direct.write(self._pieces)
            if self._direct.length >= _DIRECT_BYTES:
                self._end_direct()
        write_all(self.fileno(), self._pieces)
        self._kept_bytes = 0

    def _end_direct(self) -> None:
        if self._direct is not None:
            self._direct.end()
            self._direct = None


class _Direct:
    """The beginning of what is written until a flush: whole blocks go to the device from memory of our own."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory = _STAGES.pop() if _STAGES else mmap.mmap(-1, _STAGE_BYTES)
        self._stage = memoryview(self._memory)
        self._filled = 0
        self.length = 0

    @classmethod
    def begin(cls, fd: int) -> _Direct | None:
        """``None`` where the file system does not do that, or a file ends within a block."""
        if os.lseek(fd, 0, os.SEEK_CUR) % _BLOCK_BYTES:
            return None
        return cls(fd) if _O_DIRECT and _switch(fd, on=True) else None

    def write(self, pieces: list[memoryview]) -> None:
        """Take what fits into the beginning; the rest of the pieces is left."""
        while pieces and self.length < _DIRECT_BYTES:
            piece = pieces[0][: _STAGE_BYTES - self._filled]
            self._stage[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            self.length += len(piece)
            if len(piece) == len(pieces[0]):
                del pieces[0]
            else:
                pieces[0] = pieces[0][len(piece) :]
            if self._filled == _STAGE_BYTES:
                self._pass_on(_STAGE_BYTES)

    def end(self) -> None:
        """Write the ordinary way from now on, as what is left of a block."""
        filled, whole = self._filled, self._filled // _BLOCK_BYTES * _BLOCK_BYTES
        if whole:
            self._pass_on(whole)
        _switch(self._fd, on=False)
        if filled > whole:
            write_all(self._fd, [self._stage[whole:filled]])
        if len(_STAGES) < _STAGES_KEPT:
            _STAGES.append(self._memory)

    def _pass_on(self, size: int) -> None:
        left = [self._stage[:size]]
        try:
            write_all(self._fd, left)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _switch(self._fd, on=False)  # the device has larger blocks
            write_all(self._fd, left)
        self._filled = 0


def _switch(fd: int, *, on: bool) -> bool:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
    except OSError:
        return False
    return True


def write_all(fd: int, pieces: list[memoryview]) -> None:
    """Write and take out all pieces."""
    while pieces:
        written = os.writev(fd, pieces[:_PIECES_PER_CALL])
        while pieces and written >= len(pieces[0]):
            written -= len(pieces.pop(0))
        if written:
            pieces[0] = pieces[0][written:]


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

    Links below the root are not followed (``no_follow``).  What is made here may be read and written by its owner only,
    or by the owner's group, too.

    Workers make one from the same root; the object pickles as its root, without the key.
    """

    def __init__(self, root: str | os.PathLike[str], seal: Seal = PLAIN, access: FileAccess = "owner") -> None:
        if "\0" in os.fspath(root):
            raise StorageError(f"{os.fspath(root)[:128]!r} names no folder")
        self.root = Path(root).absolute()
        self.seal = seal
        self.access: FileAccess = access
        self._base = str(self.root)  # a path object for each file took a tenth of a checkpoint in the driver
        self.atomic_create = self.appends = True
        self.look_s = 0.0
        self._temp_tag = temp_tag()
        self._counter = itertools.count()
        self._synced: set[str] = set()

    def __reduce__(self) -> tuple[object, ...]:
        return LocalStore, (self._base, PLAIN, self.access)

    def __repr__(self) -> str:
        return f"LocalStore({self._base!r})"

    def sealed(self, seal: Seal) -> LocalStore:
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
                with opened_folder(str(folder.parent), []) as fd:
                    os.fsync(fd)
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
        parent, name = _split(path)
        with self._errors("create", path), self._made(parent) as folder:
            fd = self._open_exclusively(name, folder)
            return cast(BinaryIO, NewFile(path, fd, lambda: self._errors("write", path)))

    def sync(self, file: BinaryIO) -> None:
        assert isinstance(file, NewFile)
        with self._errors("write", file.path):
            file.flush()
            os.fsync(file.fileno())
            if not file.named:
                with opened_folder(self._base, _split(file.path)[0]) as folder:
                    os.fsync(folder)
                file.named = True

    def close_durably(self, file: BinaryIO) -> None:
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
        return "/".join([self._base.rstrip("/"), *check_relative(path)]) or "/"

    def shares_device(self, directory: str) -> bool:
        return os.stat(self._base).st_dev == os.stat(directory).st_dev

    def make_folder(self, path: str) -> None:
        with self._errors("create", path), self._made(check_relative(path)):
            pass

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes | memoryview:
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

    def delete_files(self, paths: Iterable[str]) -> None:
        for path in paths:
            self.delete(path)

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
                        if len(self._synced) >= _KNOWN_FOLDERS_LIMIT:
                            self._synced = set()
                        self._synced.add(path)
                finally:
                    os.close(above)
            yield folder
        finally:
            os.close(folder)

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
    """The names in a folder last: only then is a log entry there for good (``tests/contract`` leaves this step out)."""
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

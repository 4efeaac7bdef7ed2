"""Copies of snapshot files outside the checkpoint directory, so that a restore need not wait for it.

A copy is never the truth: nothing depends on one being there, whoever reads it compares digests, and the checkpoint
directory stands behind it.  A shelf holds what the newest completed checkpoint names, up to a number of bytes; what
does not fit is not held.
"""

from __future__ import annotations

import abc
import contextlib
import os
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from mmap import mmap
from typing import Literal, Protocol, TypeAlias

from cutwater.errors import CorruptSnapshotError
from cutwater.state.disk.private_folder import PrivateFolder

ShelfAnswer: TypeAlias = Literal["send", "have", "full", "stale"]
"""Answer of a shelf to an offer: send it; it is here; there is no room; a newer checkpoint does not name it."""

_PART = ".part"


def copies_folder(directory: str) -> str:
    """Folder of this user's copies below a directory."""
    return os.path.join(directory, f"cutwater-copies-{os.getuid()}")


class ShelfWriter(Protocol):
    """A copy that is coming into being."""

    def write(self, data: bytes | memoryview, /) -> None:
        """The next bytes."""
        ...

    def finish(self) -> None:
        """All bytes are there: it can be read."""
        ...

    def abort(self) -> None:
        """They will not come."""
        ...


@dataclass(slots=True)
class _Held:
    length: int
    checkpoint_id: int
    """The newest one known to name it."""
    whole: bool = False


class Shelf(abc.ABC):
    """Files by the path that they have in the job's folder.  Used by several threads."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._newest = 0
        self._named: Collection[str] = ()

    @property
    def files(self) -> list[str]:
        """Files that can be read, sorted."""
        with self._lock:
            return sorted(file for file, held in self._held.items() if held.whole)

    @property
    def held_bytes(self) -> int:
        """Of all files together."""
        with self._lock:
            return self._total

    @property
    def _total(self) -> int:
        return sum(held.length for held in self._held.values())

    def offer(self, file: str, length: int, checkpoint_id: int) -> ShelfAnswer:
        """Somebody has a file that a checkpoint names; after "send" its place is kept until ``write`` ends."""
        with self._lock:
            held = self._held.get(file)
            if held is not None and held.length >= length:
                held.checkpoint_id = max(held.checkpoint_id, checkpoint_id)
                return "have" if held.whole else "stale"  # somebody else is just bringing it
            if checkpoint_id < self._newest and file not in self._named:
                return "stale"
            if self._total + length > self.capacity_bytes:
                return "full"
            self._held[file] = _Held(length, checkpoint_id)
            return "send"

    def keep(self, checkpoint_id: int, files: Collection[str]) -> None:
        """A checkpoint is complete and names these files: what only older ones name goes."""
        with self._lock:
            if checkpoint_id <= self._newest:
                return
            self._newest, self._named = checkpoint_id, frozenset(files)
            gone = [f for f, h in self._held.items() if h.checkpoint_id <= checkpoint_id and f not in self._named]
            for file in gone:
                del self._held[file]
                self._drop(file)

    def _arrived(self, file: str) -> bool:
        """A copy is whole; False if it was dropped meanwhile."""
        with self._lock:
            held = self._held.get(file)
            if held is not None:
                held.whole = True
            return held is not None

    def forget(self, file: str) -> None:
        """It did not come, or is damaged."""
        with self._lock:
            if self._held.pop(file, None) is not None:
                self._drop(file)

    def has(self, file: str) -> bool:
        """True if it can be read."""
        with self._lock:
            held = self._held.get(file)
            return held is not None and held.whole

    def write(self, file: str) -> ShelfWriter:
        """Take a file after "send".

        Raises:
            OSError: there is no room for it after all; its place is free again.
        """
        try:
            return self._begin(file)
        except OSError:
            self.forget(file)
            raise

    @abc.abstractmethod
    def _begin(self, file: str) -> ShelfWriter:
        """As ``write``."""

    @abc.abstractmethod
    def read(self, file: str, offset: int, length: int) -> bytes | memoryview:
        """Bytes of a file.

        Raises:
            CorruptSnapshotError: it is not here (any more), or shorter than asked for.
        """

    @abc.abstractmethod
    def _drop(self, file: str) -> None:
        """Free what a file takes; with the lock held."""

    @abc.abstractmethod
    def close(self) -> None:
        """Free everything."""


class MemoryShelf(Shelf):
    """Anonymous memory outside the Python heap: given back to the system as soon as a file goes.

    >>> shelf = MemoryShelf(capacity_bytes=8)
    >>> shelf.offer("chk-1/1-0.data", 5, 1)
    'send'
    >>> copy = shelf.write("chk-1/1-0.data")
    >>> copy.write(b"state"), copy.finish(), bytes(shelf.read("chk-1/1-0.data", 1, 3))
    (None, None, b'tat')
    >>> shelf.offer("chk-2/1-0.data", 5, 2)
    'full'
    >>> shelf.keep(2, ["chk-2/1-0.data"]), shelf.files
    (None, [])
    """

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._memory: dict[str, mmap] = {}

    def _begin(self, file: str) -> ShelfWriter:
        with self._lock:
            length = self._held[file].length if file in self._held else 0
        return _MemoryCopy(self, file, mmap(-1, max(1, length)), length)

    def finished(self, file: str, memory: mmap) -> None:
        """A copy is whole."""
        self._memory[file] = memory
        if not self._arrived(file):
            self._memory.pop(file, None)

    def read(self, file: str, offset: int, length: int) -> bytes | memoryview:
        """See ``Shelf.read``; without a copy: the memory lives as long as what is returned."""
        memory = self._memory.get(file)
        if memory is None or offset + length > len(memory):
            raise CorruptSnapshotError(f"the copy of {file} in memory is gone, or too short")
        return memoryview(memory)[offset : offset + length]

    def _drop(self, file: str) -> None:
        self._memory.pop(file, None)  # whoever reads it just now keeps it alive

    def close(self) -> None:
        with self._lock:
            self._held.clear()
            self._memory.clear()


class _MemoryCopy:
    def __init__(self, shelf: MemoryShelf, file: str, memory: mmap, length: int) -> None:
        self._shelf, self._file, self._memory, self._length = shelf, file, memory, length

    def write(self, data: bytes | memoryview, /) -> None:
        self._memory.write(data)

    def finish(self) -> None:
        if self._memory.tell() == self._length:
            self._shelf.finished(self._file, self._memory)
        else:
            self.abort()

    def abort(self) -> None:
        self._shelf.forget(self._file)


class FolderShelf(Shelf):
    """Files in a folder of this process on a disk of its machine.

    The next process of the same job on this machine inherits them: a restarted worker finds what its predecessor kept.
    Nothing is synced, since a copy that a power failure tears is found by its digest.

    Args:
        directory: the user's; copies lie in a private folder below.

    Raises:
        StorageError: the directory is somebody else's.
        OSError: it cannot be written.
    """

    def __init__(self, directory: str, job_uid: str, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes)
        self._job_uid = job_uid
        self._private = PrivateFolder(copies_folder(directory), self._inherit)
        self._folder = os.path.join(self._private.path, job_uid)
        os.makedirs(self._folder, exist_ok=True)
        self._closed = False

    def _inherit(self, abandoned: str, mine: str) -> None:
        """Move what a dead process of this job kept, as far as there is room."""
        folder = os.path.join(mine, self._job_uid)
        os.makedirs(folder, exist_ok=True)
        for file, path, length in _copies_in(os.path.join(abandoned, self._job_uid)):
            if self.offer(file, length, 0) == "send":
                os.replace(path, os.path.join(folder, os.path.basename(path)))
                self._arrived(file)

    def _begin(self, file: str) -> ShelfWriter:
        return _FileCopy(self, file, self._path(file))

    def finished(self, file: str) -> None:
        """A copy is whole."""
        path = self._path(file)
        os.replace(path + _PART, path)
        if not self._arrived(file):
            self._drop(file)

    def read(self, file: str, offset: int, length: int) -> bytes | memoryview:
        try:
            with open(self._path(file), "rb") as copy:
                copy.seek(offset)
                data = copy.read(length)
        except OSError as e:
            raise CorruptSnapshotError(f"the copy of {file} on this machine cannot be read: {e.strerror}") from e
        if len(data) < length:
            raise CorruptSnapshotError(f"the copy of {file} on this machine is too short")
        return data

    def _path(self, file: str) -> str:
        return os.path.join(self._folder, file.replace("/", "~"))

    def _drop(self, file: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._path(file))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._private.remove()


class _FileCopy:
    def __init__(self, shelf: FolderShelf, file: str, path: str) -> None:
        self._shelf, self._file, self._path = shelf, file, path
        self._out = open(path + _PART, "xb", buffering=0)  # noqa: SIM115 - closed by finish and abort

    def write(self, data: bytes | memoryview, /) -> None:
        view = memoryview(data)
        while view:
            view = view[self._out.write(view) :]

    def finish(self) -> None:
        self._out.close()
        self._shelf.finished(self._file)

    def abort(self) -> None:
        self._out.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path + _PART)
        self._shelf.forget(self._file)


def _copies_in(folder: str) -> Iterator[tuple[str, str, int]]:
    """File, path and length of the whole copies in a folder."""
    try:
        entries = sorted(os.scandir(folder), key=lambda e: e.name)
    except OSError:
        return
    for entry in entries:
        if not entry.name.endswith(_PART):
            yield entry.name.replace("~", "/"), entry.path, entry.stat().st_size

"""A store in memory; faults are data."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, cast

from cutwater.config import FileAccess
from cutwater.errors import ConfigError, CorruptSnapshotError, StorageError
from cutwater.storage.store.seal import PLAIN, Seal

Operation = Literal["create", "overwrite", "open", "append", "sync", "close", "read", "list", "names", "delete"]


class SimulatedCrash(BaseException):
    """The process died at a store operation.  Not an ``Exception``: no handler of the code under test may live on."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and its moment.

    Attributes:
        nth: at which operation, counted from 1 over all that match.
        kind: "error" fails before any effect; "doubt" after it (a sync that failed); "full" fails before any effect as
            a full disk does; "torn" lets half of the bytes of an append in and fails; "crash" and "crash_after" end
            the process before or after the effect: from then on every operation crashes, until ``after_crash``.
        operation: only operations of this kind count; ``None``: all.
        path: only operations on paths that contain this text count.
        every: also at all later operations that match.
    """

    nth: int
    kind: Literal["error", "doubt", "full", "torn", "crash", "crash_after"]
    operation: Operation | None = None
    path: str = ""
    every: bool = False


class MemoryStore:
    """Files in a dictionary; implements ``Store``.

    ``watch`` is called before each operation with its kind and path: a scheduler can switch drivers there.
    """

    def __init__(
        self,
        faults: Iterable[Fault] = (),
        watch: Callable[[Operation, str], None] | None = None,
        seal: Seal = PLAIN,
    ) -> None:
        self.uri = f"memory:/{id(self):x}"
        self.seal = seal
        self.access: FileAccess = "owner"
        self.atomic_create = self.appends = True
        self.look_s = 0.0
        self.files: dict[str, bytes] = {}
        """Content by path; a test may change it, as a failing disk would."""
        self.unsynced: dict[str, int] = {}
        """Paths written and not closed durably, and how many of their bytes were synced: after a crash any part of the
        others may be there."""
        self._folders: set[str] = set()
        """Those that were made."""
        self.operations: list[tuple[Operation, str]] = []
        """All operations so far."""
        self.watch = watch
        self._faults = list(faults)
        self._counts = [0] * len(self._faults)
        self._dead = False

    def after_crash(self, *, keep: float = 0.0) -> MemoryStore:
        """The store of the next process: durable files, and this fraction of the bytes of the others."""
        store = MemoryStore(seal=self.seal)
        store.atomic_create = self.atomic_create
        for path, data in self.files.items():
            durable = self.unsynced.get(path, len(data))
            if path not in self.unsynced or durable or keep > 0:
                store.files[path] = data[: durable + int((len(data) - durable) * keep)]
        return store

    # -- Store

    def create(self, path: str, data: bytes) -> bool:
        after = self._begin("create", path)
        made = path not in self.files
        if made:
            self.files[path] = bytes(data)
        self._end(after, "create", path)
        return made

    def overwrite(self, path: str, data: bytes) -> None:
        after = self._begin("overwrite", path)
        self.files[path] = bytes(data)
        self._end(after, "overwrite", path)

    def write(self, path: str) -> BinaryIO:
        after = self._begin("open", path)
        if path in self.files:
            raise StorageError(f"{path} exists already: no path is ever written twice")
        self.files[path] = b""
        self.unsynced[path] = 0
        self._end(after, "open", path)
        return cast(BinaryIO, _MemoryFile(self, path))

    def sync(self, file: BinaryIO) -> None:
        path = file.name
        after = self._begin("sync", path)
        if path in self.unsynced:
            self.unsynced[path] = len(self.files[path])
        self._end(after, "sync", path)

    def close_durably(self, file: BinaryIO) -> None:
        path = file.name
        file.close()
        after = self._begin("close", path)
        self.unsynced.pop(path, None)
        self._end(after, "close", path)

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        self._end(self._begin("read", path), "read", path)
        if path not in self.files:
            raise CorruptSnapshotError(f"{path} is missing")
        data = self.files[path]
        wanted = max(0, len(data) - offset) if length is None else length
        part = data[offset : offset + wanted]
        if len(part) < wanted:
            raise CorruptSnapshotError(
                f"{path} is too short: {wanted} bytes expected at offset {offset}, {len(part)} there"
            )
        return part

    def list(self, prefix: str = "") -> list[str]:
        self._end(self._begin("list", prefix), "list", prefix)
        return sorted(p for p in self.files if not prefix or p.startswith(prefix.rstrip("/") + "/"))

    def names(self, folder: str = "") -> list[str]:
        self._end(self._begin("names", folder), "names", folder)
        start = folder.rstrip("/") + "/" if folder else ""
        return sorted({p[len(start) :].partition("/")[0] for p in self.files if p.startswith(start)})

    def delete(self, path: str) -> None:
        if not path.strip("/"):
            raise StorageError("refused to delete the whole checkpoint directory")
        after = self._begin("delete", path)
        gone = path.strip("/")
        self._folders -= {f for f in self._folders if f == gone or f.startswith(f"{gone}/")}
        for found in [p for p in self.files if p == path or p.startswith(path.rstrip("/") + "/")]:
            del self.files[found]
            self.unsynced.pop(found, None)
        self._end(after, "delete", path)

    def delete_files(self, paths):
        for path in paths:
            self.delete(path)

    def delete_empty(self, folder: str) -> bool:
        if self.names(folder):
            return False
        self.delete(folder)
        return True

    def sealed(self, seal: Seal) -> MemoryStore:
        """See ``Store.sealed``; files are those of this one."""
        if not (seal.keyed or self.seal.keyed):
            return self
        store = MemoryStore(seal=seal)
        store.files, store.unsynced, store._folders = self.files, self.unsynced, self._folders
        return store

    def exists(self, folder: str = "") -> bool:
        return not folder or folder in self._folders or any(p.startswith(f"{folder}/") for p in self.files)

    def make_folder(self, path: str) -> None:
        self._folders.add(path.strip("/"))

    def local_folder(self, path: str = "") -> str:
        """See ``Store.local_folder``."""
        raise ConfigError(f"{self.uri}/{path} is no folder of a file system", hint="Choose a directory for it.")

    def shares_device(self, directory: str) -> bool:
        return False

    def sweep(self, prefix: str = "") -> int:
        """See ``Store.sweep``: a create in memory leaves nothing half done."""
        return 0

    # -- faults

    def _begin(self, operation: Operation, path: str) -> Fault | None:
        """Before the effect; returns the fault to strike after it."""
        if self.watch is not None:
            self.watch(operation, path)
        if self._dead:
            raise SimulatedCrash(f"{operation} {path} after the crash")
        self.operations.append((operation, path))
        for i, fault in enumerate(self._faults):
            if fault.operation not in (None, operation) or fault.path not in path:
                continue
            self._counts[i] += 1
            if self._counts[i] == fault.nth or (fault.every and self._counts[i] > fault.nth):
                if fault.kind in ("doubt", "crash_after", "torn"):
                    return fault
                self._strike(fault, operation, path)
        return None

    def _end(self, fault: Fault | None, operation: Operation, path: str) -> None:
        if fault is not None:
            self._strike(fault, operation, path)

    def _strike(self, fault: Fault, operation: Operation, path: str) -> None:
        if fault.kind in ("crash", "crash_after"):
            self._dead = True
            raise SimulatedCrash(f"{fault.kind} at {operation} {path}")
        if fault.kind == "full":
            raise StorageError(f"cannot {operation} {path}: the file system is full")
        raise StorageError(f"cannot {operation} {path}: injected fault ({fault.kind})")

    def append(self, path: str, data: bytes) -> None:
        """Bytes of a file that is being written."""
        after = self._begin("append", path)
        if after is not None and after.kind == "torn":
            data = data[: len(data) // 2]
        if path in self.files:  # else it was deleted meanwhile: as on a file system, the writer does not notice
            self.files[path] += data
        self._end(after, "append", path)


class _MemoryFile(io.RawIOBase):
    def __init__(self, store: MemoryStore, path: str) -> None:
        self._store = store
        self.name = path

    def writable(self) -> bool:
        return True

    def write(self, b: Any, /) -> int:
        data = bytes(b)
        self._store.append(self.name, data)
        return len(data)

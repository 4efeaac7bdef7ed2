"""What a worker has of snapshot files outside the checkpoint directory: kept, handed out, and read at a restore."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from cutwater.config import JobConfig
from cutwater.errors import CorruptSnapshotError, StorageError, WireError
from cutwater.runtime.control.messages import CopyPlaces
from cutwater.runtime.control.reports import CopiesHeld
from cutwater.runtime.copies.copier import Copier
from cutwater.runtime.copies.links import CopyLink, CopyServer, dial_copies
from cutwater.runtime.transport.secret import Secret
from cutwater.state.disk.private_folder import remove_abandoned
from cutwater.storage.snapshot.copies import FolderShelf, MemoryShelf, Shelf, copies_folder
from cutwater.storage.snapshot.manifest import Entry
from cutwater.storage.store.base import Readable, Store
from cutwater.storage.store.seal import Seal

_log = logging.getLogger(__name__)

T = TypeVar("T")


def choose_holders(hosts: Sequence[str], copies: int) -> list[list[int]]:
    """Per slot, the slots whose workers hold its copies: on other machines as far as there are, and evenly.

    Args:
        hosts: per slot, the machine of its worker.
        copies: how many each wants; fewer where there are not so many others.

    >>> choose_holders(["a", "a", "b", "b"], 1)
    [[2], [3], [0], [1]]
    >>> choose_holders(["a", "a"], 3)
    [[1], [0]]
    """
    slots = len(hosts)
    load = [0] * slots
    chosen: list[list[int]] = []
    for slot in range(slots):
        mine: list[int] = []
        while len(mine) < min(copies, slots - 1):
            used = {hosts[slot], *(hosts[other] for other in mine)}
            free = [other for other in range(slots) if other != slot and other not in mine]
            best = min(free, key=lambda o: (hosts[o] in used, load[o], (o - slot) % slots))
            load[best] += 1
            mine.append(best)
        chosen.append(mine)
    return chosen


def lengths_of(entries: Iterable[Entry]) -> dict[str, int]:
    """The files that entries lie in, each as far as they reach."""
    lengths: dict[str, int] = {}
    for entry in entries:
        if entry.file:
            lengths[entry.file] = max(lengths.get(entry.file, 0), entry.offset + entry.length)
    return lengths


def open_copies(
    config: JobConfig,
    store: Store,
    job: str,
    uid: str,
    slot: int,
    secret: Secret,
    report: Callable[[CopiesHeld], None],
    note: Callable[[str], None],
) -> Copies | None:
    """The copies of a worker; ``None`` where the job wants none.

    A directory that cannot be used, or cannot help, is told in the log: the job runs all the same.

    Args:
        report: sends a message to the coordinator (any thread).
        note: is told why there are fewer copies than the job wants.
    """
    local = _local_shelf(config, store, uid, note)
    if local is None and not config.state_replicas:
        return None
    memory = MemoryShelf(config.replica_memory_bytes) if config.state_replicas else None
    return Copies(store, job, uid, slot, secret, local, memory, report)


def sweep_copies(config: JobConfig) -> None:
    """Remove what workers that were killed left on this machine."""
    if config.local_copies_dir is not None:
        remove_abandoned(copies_folder(config.local_copies_dir))


def _local_shelf(config: JobConfig, store: Store, uid: str, note: Callable[[str], None]) -> FolderShelf | None:
    directory = config.local_copies_dir
    if directory is None:
        return None
    try:
        os.makedirs(directory, exist_ok=True)
        if store.shares_device(directory):
            note(f"no local copies: {directory} lies on the same file system as the checkpoints")
            return None
        return FolderShelf(directory, uid, config.local_copies_bytes)
    except (OSError, StorageError) as e:
        note(f"no local copies: {e}")
        return None


class Copies:
    """All copies of one worker; lives as long as its process.

    Args:
        store, job: the truth.
        local: on this machine's disk, of what this worker wrote.
        memory: of what other workers wrote, and without ``local`` what this one wrote.
    """

    def __init__(
        self,
        store: Store,
        job: str,
        uid: str,
        slot: int,
        secret: Secret,
        local: FolderShelf | None,
        memory: MemoryShelf | None,
        report: Callable[[CopiesHeld], None],
    ) -> None:
        self._job, self._uid, self._slot, self._secret = job, uid, slot, secret
        self._local, self._memory, self._report = local, memory, report
        self._shelves: list[Shelf] = [shelf for shelf in (local, memory) if shelf is not None]
        self._addresses: Sequence[tuple[str, int]] = ()
        self._restored = (0, 0, 0)
        self._server = CopyServer(self._shelves, memory, self._changed)
        # What is its own a survivor reads again when it goes back: from its disk, if it has copies there.
        self._copier = Copier(store, job, local or memory, self._dial, self._changed)

    @property
    def files(self) -> list[str]:
        """What can be read here."""
        return sorted({file for shelf in self._shelves for file in shelf.files})

    def serve(self, sock: socket.socket) -> None:
        """Another worker dialled (any thread)."""
        self._server.serve(sock)

    def placed(self, places: CopyPlaces) -> None:
        """Some workers may have been replaced."""
        self._addresses = [(host, port) for host, port in places.peers]
        self._copier.placed(places.holders, tuple(places.incarnations))

    def reader(self, copies: Mapping[str, Sequence[int]]) -> CopyReader:
        """What a restore reads copies with; ``copies``: by file, slots whose workers have one."""
        others = {file: [slot for slot in slots if slot != self._slot] for file, slots in copies.items()}
        return CopyReader(self._job, self._shelves, others, self._dial, self._read_all)

    def completed(self, checkpoint_id: int, files: Collection[str], mine: Mapping[str, int]) -> None:
        """A checkpoint is complete: what it does not name is dropped, and what this worker brought to it is copied.

        Args:
            files: all that it names.
            mine: bytes by file of what this worker wrote of it or builds upon.
        """
        for shelf in self._shelves:
            shelf.keep(checkpoint_id, files)
        self._copier.completed(checkpoint_id, mine)

    def close(self) -> None:
        """Hang up, end the threads and free everything."""
        self._server.close()
        self._copier.close()
        for shelf in self._shelves:
            shelf.close()

    def _dial(self, slot: int) -> CopyLink:
        return dial_copies(self._addresses[slot], self._secret, self._uid, self._slot)

    def _read_all(self, restored: tuple[int, int, int]) -> None:
        self._restored = restored
        self._changed()

    def _changed(self) -> None:
        self._report(
            CopiesHeld(
                files=self.files,
                checkpoint_id=self._copier.checkpoint_id,
                missing_bytes=self._copier.missing_bytes,
                memory_bytes=self._memory.held_bytes if self._memory is not None else 0,
                local_bytes=self._local.held_bytes if self._local is not None else 0,
                restored_bytes=self._restored,
            )
        )


class CopyReader:
    """Reads parts of a snapshot during one restore: from this machine, else from another worker, else from storage.

    Whatever is read is compared with its digest.  A copy that is damaged, gone or out of reach is passed over with a
    warning.  Used by several threads.
    """

    def __init__(
        self,
        job: str,
        shelves: Sequence[Shelf],
        others: Mapping[str, Sequence[int]],
        dial: Callable[[int], CopyLink],
        done: Callable[[tuple[int, int, int]], None],
    ) -> None:
        self._job, self._shelves, self._others, self._dial, self._done = job, shelves, others, dial, done
        self._lock = threading.Lock()
        self._idle: defaultdict[int, list[CopyLink]] = defaultdict(list)
        self._lost: set[int] = set()
        self._closed = False
        self._here = self._there = self._stored = 0

    def read(self, decode: Callable[[Readable, str, Entry], T], store: Readable, entry: Entry) -> T:
        """An entry, decoded by a function that compares digests, such as ``read_segment``.

        Raises:
            CorruptSnapshotError: storage has it damaged, too.
            FormatVersionError: it is not known here.
            StorageError: storage cannot be read.
        """
        if not entry.file:
            return decode(store, self._job, entry)
        for shelf in self._shelves:
            if shelf.has(entry.file):
                try:
                    found = decode(_OnShelf(shelf, f"{self._job}/", store.seal), self._job, entry)
                except CorruptSnapshotError as e:
                    shelf.forget(entry.file)
                    _passed_over("on this machine", e)
                    continue
                with self._lock:
                    self._here += entry.length
                return found
        for slot in self._others.get(entry.file, ()):
            if slot not in self._lost:
                try:
                    found = decode(_InWorker(self, slot, f"{self._job}/", store.seal), self._job, entry)
                except (CorruptSnapshotError, WireError) as e:
                    if isinstance(e, WireError):
                        self._lost.add(slot)
                    _passed_over(f"in worker {slot}", e)
                    continue
                with self._lock:
                    self._there += entry.length
                return found
        found = decode(store, self._job, entry)
        with self._lock:
            self._stored += entry.length
        return found

    def fetch(self, slot: int, file: str, offset: int, length: int) -> bytes:
        """Bytes from another worker, over a connection that nobody else uses meanwhile."""
        with self._lock:
            link = self._idle[slot].pop() if self._idle[slot] else None
        link = link or self._dial(slot)
        try:
            data = link.fetch(file, offset, length)
        except WireError:
            link.close()
            raise
        except CorruptSnapshotError:
            self._give_back(slot, link)
            raise
        self._give_back(slot, link)
        return data

    def _give_back(self, slot: int, link: CopyLink) -> None:
        with self._lock:
            self._idle[slot].append(link)

    def close(self) -> None:
        """The restore is over, however it ended; again is allowed."""
        with self._lock:
            closed, self._closed = self._closed, True
            links = [link for idle in self._idle.values() for link in idle]
            self._idle.clear()
        for link in links:
            link.close()
        if not closed:
            self._done((self._here, self._there, self._stored))


def _passed_over(where: str, error: Exception) -> None:
    _log.warning("a copy %s is passed over, the restore goes on without it: %s", where, error)


@dataclass(frozen=True, slots=True)
class _OnShelf:
    shelf: Shelf
    prefix: str
    seal: Seal

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes | memoryview:
        return self.shelf.read(path.removeprefix(self.prefix), offset, length or 0)


@dataclass(frozen=True, slots=True)
class _InWorker:
    reader: CopyReader
    slot: int
    prefix: str
    seal: Seal

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes | memoryview:
        return self.reader.fetch(self.slot, path.removeprefix(self.prefix), offset, length or 0)

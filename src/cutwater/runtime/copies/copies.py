"""Copies of snapshot files outside the checkpoint directory: made, kept, handed out, and read at a restore."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from cutwater.config import JobConfig
from cutwater.errors import CorruptSnapshotError, CutwaterError, StorageError, WireError
from cutwater.runtime.control.messages import CopiesHeld, CopyPlaces
from cutwater.runtime.copies.links import CopyLink, CopyServer, dial_copies
from cutwater.runtime.transport.secret import Secret
from cutwater.state.disk.private_folder import remove_abandoned
from cutwater.storage.snapshot.copies import FolderShelf, MemoryShelf, Shelf, ShelfWriter, copies_folder
from cutwater.storage.snapshot.manifest import Entry
from cutwater.storage.store.base import Readable, Store
from cutwater.storage.store.seal import Seal

_log = logging.getLogger(__name__)

_PIECE_BYTES: Final = 1 << 20
_NICENESS: Final = 10
_JOIN_S: Final = 2.0


class Copier:
    """A thread that reads what a completed checkpoint names and is not where it should be, and brings it there.

    It begins when a checkpoint is complete, so it neither delays one nor copies what will not count; a newer one makes
    it leave the rest of an older one alone.  Files that older checkpoints wrote and the newest still names are offered
    again, so that a replaced worker gets what its predecessor held.

    Args:
        store, job: what is copied.
        local: the shelf of this worker, if there is one.
        dial: connects to the copies of another slot's worker.
        changed: called from the thread when it has done what it can for a checkpoint.
    """

    def __init__(
        self,
        store: Store,
        job: str,
        local: Shelf | None,
        dial: Callable[[int], CopyLink],
        changed: Callable[[], None],
    ) -> None:
        self._store, self._job, self._local, self._dial, self._changed = store, job, local, dial, changed
        self._lock = threading.Condition()
        self._work = 0
        """Grows with everything that makes what the thread is doing out of date."""
        self._checkpoint_id, self._wanted = 0, dict[str, int]()
        self._era: object = None
        self._closed = False
        self._links: dict[int, CopyLink] = {}
        self._known: dict[int, set[str]] = {}
        """By slot of a holder: what it certainly has."""
        self.checkpoint_id = 0
        """The newest one that was looked after."""
        self.missing_bytes = 0
        """Of that one, what is not wherever it should be."""
        self._thread = threading.Thread(target=self._run, name="cutwater-copier", daemon=True)
        self._thread.start()

    def placed(self, holders: Sequence[int], era: object) -> None:
        """Slots whose workers hold copies for this one; another ``era``: some may have been replaced."""
        with self._lock:
            if era != self._era:
                self._era = era
                self._known = {slot: set() for slot in holders}
                links, self._links = self._links, {}
                for link in links.values():
                    link.close()
                self._work += 1

    def completed(self, checkpoint_id: int, files: Mapping[str, int]) -> None:
        """A checkpoint is complete; what this worker wrote of it, or builds upon: bytes by file.

        Called for each region that the worker holds a part of.
        """
        with self._lock:
            if checkpoint_id < self._checkpoint_id:
                return
            self._wanted = {**self._wanted, **files} if checkpoint_id == self._checkpoint_id else dict(files)
            self._checkpoint_id = checkpoint_id
            self._work += 1
            self._lock.notify()

    def close(self) -> None:
        """End the thread; what is under way is dropped."""
        with self._lock:
            self._closed = True
            self._work += 1
            for link in self._links.values():
                link.close()
            self._lock.notify()
        self._thread.join(_JOIN_S)

    # ------------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        _let_others_go_first()
        done = 0
        while True:
            with self._lock:
                while self._work == done and not self._closed:
                    self._lock.wait()
                if self._closed:
                    return
                done, checkpoint_id, wanted = self._work, self._checkpoint_id, dict(self._wanted)
            missing = self._look_after(checkpoint_id, wanted, done)
            if missing is None:
                continue
            if missing > self.missing_bytes == 0:
                _log.warning(
                    "%d bytes of checkpoint %d have fewer copies than asked for: a restore would read them from the "
                    "checkpoint directory (replica_memory_bytes, local_copies_bytes)",
                    missing,
                    checkpoint_id,
                )
            self.checkpoint_id, self.missing_bytes = checkpoint_id, missing
            self._changed()

    def _look_after(self, checkpoint_id: int, wanted: Mapping[str, int], work: int) -> int | None:
        """Bytes that stay without some copy; ``None``: something newer has come."""
        missing, down = 0, set[int]()
        for there in self._known.values():
            there.intersection_update(wanted)
        for file, length in wanted.items():
            if self._work != work:
                return None
            try:
                whole = self._copy(file, length, checkpoint_id, down)
            except (CutwaterError, OSError) as e:
                if self._work != work:
                    return None
                _log.info("no copy of %s: %s", file, e)
                whole = False
            missing += 0 if whole else length
        return missing

    def _copy(self, file: str, length: int, checkpoint_id: int, down: set[int]) -> bool:
        """Bring one file wherever it lacks; whether it then is everywhere.

        Raises:
            CutwaterError, OSError: it cannot be read, or be kept on this machine.
        """
        everywhere = True
        known, targets = self._known, dict[int, CopyLink]()
        for slot, there in known.items():
            if file in there:
                continue
            answer, link = self._offer(slot, file, length, checkpoint_id, down)
            everywhere &= answer in ("have", "send")
            if answer == "have":
                there.add(file)
            elif answer == "send" and link is not None:
                targets[slot] = link
        local: ShelfWriter | None = None
        try:
            if self._local is not None:
                answer = self._local.offer(file, length, checkpoint_id)
                everywhere &= answer in ("have", "send")
                local = self._local.write(file) if answer == "send" else None
            everywhere &= self._pump(file, length, local, targets)
            for slot, link in list(targets.items()):
                if link.sent():
                    known[slot].add(file)
                del targets[slot]
        except BaseException:
            if local is not None:
                local.abort()
            for slot in targets:  # they wait for bytes that do not come
                self._hang_up(slot)
            raise
        if local is not None:
            local.finish()
        return everywhere

    def _pump(self, file: str, length: int, local: ShelfWriter | None, targets: dict[int, CopyLink]) -> bool:
        """Read once, write everywhere; whether everybody took it."""
        lost = False
        offset = 0 if local is not None or targets else length
        while offset < length:
            data = self._read(file, offset, min(_PIECE_BYTES, length - offset))
            offset += len(data)
            if local is not None:
                local.write(data)
            for slot, link in list(targets.items()):
                try:
                    link.send(data)
                except WireError:
                    lost = True
                    del targets[slot]
                    self._hang_up(slot)
        return not lost

    def _read(self, file: str, offset: int, length: int) -> bytes | memoryview:
        if self._closed:
            raise StorageError("the worker is about to end")
        if self._local is not None and self._local.has(file):
            return self._local.read(file, offset, length)
        return self._store.read(f"{self._job}/{file}", offset, length)

    def _offer(
        self, slot: int, file: str, length: int, checkpoint_id: int, down: set[int]
    ) -> tuple[str, CopyLink | None]:
        if slot in down:
            return "lost", None
        try:
            link = self._links.get(slot)
            if link is None:
                link = self._dial(slot)
                with self._lock:
                    self._links[slot] = link
                    if self._closed:
                        link.close()
            return link.offer(file, length, checkpoint_id), link
        except CutwaterError as e:
            _log.info("worker %d takes no copies: %s", slot, e)
            self._hang_up(slot)
            down.add(slot)
            return "lost", None

    def _hang_up(self, slot: int) -> None:
        with self._lock:
            link = self._links.pop(slot, None)
        if link is not None:
            link.close()


def _let_others_go_first() -> None:
    """This thread yields to all others of its process, where the system knows such a thing."""
    with contextlib.suppress(OSError, AttributeError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


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
        """Files that can be read here."""
        return sorted({file for shelf in self._shelves for file in shelf.files})

    def serve(self, sock: socket.socket) -> None:
        """Another worker dialled (any thread)."""
        self._server.serve(sock)

    def placed(self, places: CopyPlaces) -> None:
        """Some workers may have been replaced."""
        self._addresses = [(host, port) for host, port in places.peers]
        self._copier.placed(places.holders, tuple(places.incarnations))

    def reader(self, copies: Mapping[str, Sequence[int]]) -> CopyReader:
        """A reader of copies for a restore; ``copies``: by file, slots whose workers have one."""
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
                    found = decode(_Copied(shelf.read, f"{self._job}/", store.seal), self._job, entry)
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
                    found = decode(_Copied(partial(self.fetch, slot), f"{self._job}/", store.seal), self._job, entry)
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
class _Copied:
    """Files of the job as a store shows them, read from somewhere else by their names in the job's folder."""

    read_from: Callable[[str, int, int], bytes | memoryview]
    prefix: str
    seal: Seal

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes | memoryview:
        return self.read_from(path.removeprefix(self.prefix), offset, length or 0)

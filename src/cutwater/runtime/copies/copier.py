"""Puts copies of a worker's part of each completed checkpoint where a restore finds them sooner than in storage."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from cutwater.errors import CutwaterError, StorageError, WireError
from cutwater.runtime.copies.links import CopyLink
from cutwater.storage.snapshot.copies import Shelf, ShelfWriter
from cutwater.storage.store.base import Store

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

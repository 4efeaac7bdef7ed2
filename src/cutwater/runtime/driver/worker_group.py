"""The workers of a job as the driver knows them: who fills which slot, and getting the slots filled."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from cutwater.entry_points import package_of
from cutwater.errors import CutwaterError, ResourceError
from cutwater.protocol.job import messages as j
from cutwater.protocol.job.machine import duration_text
from cutwater.protocol.wire import encode_control
from cutwater.runtime.control import messages as c
from cutwater.runtime.control.links import WorkerLink, now_ms
from cutwater.runtime.control.messages import CopiesHeld
from cutwater.runtime.failures import root_cause
from cutwater.runtime.spark_host import SlotTask, SparkHost
from cutwater.runtime.worker.worker import SlotArgs

_REPLACEMENT_LIMIT = 8
"""A slot's Spark job may end this often in a row without its worker ever saying hello."""
_BROKEN_PYTHON = ("ModuleNotFoundError", "ImportError", "PYTHON_VERSION_MISMATCH", "Cannot run program")
"""In the cause of a Spark job's end: the next try would end in the same way."""
_NO_MODULE = re.compile(r"No module named '([\w.]+)'")
_LAST_WORDS_S = 1.0
"""Time for which the end of the job waits for connections of dead workers to be read to their end."""


class Roster(Protocol):
    """Shows who is there."""

    def joined(self, hello: c.Hello) -> None: ...

    def left(self, slot: int) -> None: ...

    def copied(self, slot: int, copies: CopiesHeld) -> None: ...


class WorkerGroup:
    """Belongs to the coordinator's thread.

    Args:
        slots: number of workers of a full group.
        host: submits the Spark jobs.
        make_args: what a worker of a slot is started with.
        later: calls a function in the coordinator's thread after some seconds.
    """

    def __init__(
        self,
        slots: int,
        host: SparkHost,
        board: Roster,
        make_args: Callable[[int], SlotArgs],
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self.slots, self._reach = slots, slots
        self._host, self._board = host, board
        self._make_args, self._later = make_args, later
        self.links: dict[int, WorkerLink] = {}
        self.changed = False
        """Workers came or went since somebody looked."""
        self._incarnation = 0
        self._silent_ends: Counter[int] = Counter()
        self._submitted: Counter[int] = Counter()
        self._hung: dict[int, str] = {}
        """Slots whose task was ended because its process did not come, and why."""
        self._with_core: frozenset[int] = frozenset()
        self._closing = False

    def launch_all(self) -> None:
        """Submit the Spark jobs of all slots."""
        for slot in range(self.slots):
            self._submit(slot)

    def _submit(self, slot: int) -> None:
        self._submitted[slot] += 1
        self._host.launch(slot, self._make_args(slot))

    def recruit(self, slots: int) -> None:
        """Submit the Spark jobs of slots beyond the group, which may become part of it."""
        first, self._reach = self._reach, max(self._reach, slots)
        for slot in range(first, self._reach):
            self._submit(slot)

    def resize(self, slots: int, reason: str) -> list[j.WorkerLost]:
        """The group has so many slots from now on: workers beyond leave, and missing ones are on their way."""
        self.recruit(slots)
        self.slots = self._reach = slots
        left: list[j.WorkerLost] = []
        for slot in [slot for slot, running in self._submitted.items() if slot >= slots and running]:
            link = self.links.pop(slot, None)
            if link is None:
                self._host.cancel(slot)
                continue
            self.changed = True
            link.send(c.Stop(reason))
            link.close()
            self._board.left(slot)
            left.append(j.WorkerLost(slot, link.incarnation, reason, now_ms(), link.where))
        return left

    def is_current(self, link: WorkerLink) -> bool:
        """False for a worker that was replaced: whatever it says is ignored."""
        return self.links.get(link.slot) is link

    @property
    def members(self) -> dict[int, WorkerLink]:
        """The workers of the group, without recruits."""
        return {slot: link for slot, link in self.links.items() if slot < self.slots}

    def broadcast(self, message: c.ToWorker) -> None:
        """To all workers of the group."""
        frame = encode_control(c.encode(message))
        for link in self.members.values():
            link.send_frame(frame)

    def joined(self, link: WorkerLink, hello: c.Hello) -> j.WorkerJoined | None:
        """A worker said hello; None if it is not wanted."""
        if self._closing or not 0 <= hello.slot < self._reach:
            link.send(c.Stop("the job has ended"))
            link.close()
            return None
        self._incarnation += 1
        link.slot, link.incarnation, link.hello, link.seen_ms = hello.slot, self._incarnation, hello, now_ms()
        link.copies = frozenset(hello.copies)
        old = self.links.get(hello.slot)
        if old is not None:  # a zombie of the slot: fenced from here on
            old.send(c.Stop("replaced"))
            old.close()
        self.links[hello.slot] = link
        self.changed = True
        self._silent_ends[hello.slot] = 0
        self._hung.pop(hello.slot, None)
        self._board.joined(hello)
        return j.WorkerJoined(hello.slot, link.incarnation, now_ms(), old.where if old is not None else "")

    def copied(self, link: WorkerLink, copies: CopiesHeld) -> None:
        """A worker told which files of the job it has copies of."""
        link.copies = frozenset(copies.files)
        self._board.copied(link.slot, copies)

    def lost(self, link: WorkerLink, reason: str) -> j.WorkerLost | None:
        """A connection ended; None if it was not that of a current worker."""
        if not self.is_current(link):
            return None
        del self.links[link.slot]
        self.changed = True
        link.close()
        self._board.left(link.slot)
        return j.WorkerLost(link.slot, link.incarnation, reason, now_ms(), link.where)

    def silent(self, timeout_ms: float) -> list[WorkerLink]:
        """Workers that have not been heard of for too long.  A stopped process would keep its core: Spark kills it."""
        found = [link for link in self.links.values() if now_ms() - link.seen_ms > timeout_ms]
        for link in found:
            self._host.cancel(link.slot)
        return found

    def disconnect(self, slot: int) -> None:
        """Break the connection to a slot's worker, as a network does; both ends hear of it."""
        if slot in self.links:
            self.links[slot].sever()

    def slot_ended(self, slot: int, error: BaseException | None) -> CutwaterError | None:
        """A slot's Spark job ended: ask for a replacement; an error if that has no point any more."""
        self._submitted[slot] -= 1
        hung = self._hung.pop(slot, None)
        if self._closing or slot >= self._reach or self._submitted[slot]:  # a dismissed one's, perhaps
            return None
        if isinstance(error, CutwaterError):
            return error if slot < self.slots else None
        self._silent_ends[slot] += 1
        times = self._silent_ends[slot]
        cause = hung or (root_cause(str(error)) if error is not None else "its Spark job ends without an error")
        broken_python = any(sign in cause for sign in _BROKEN_PYTHON)
        if times > _REPLACEMENT_LIMIT or (broken_python and times > 1):
            if slot >= self.slots:
                return None  # the rescale that wants it ends by its deadline
            why = f"the worker of slot {slot} does not start: {cause}"
            return ResourceError(why, hint=_what_python_needs(cause) if broken_python else "")
        if times == 1:
            self._submit(slot)
        else:  # later and later
            self._later(min(0.1 * 2**times, 5.0), lambda: self._replace(slot))
        return None

    def _replace(self, slot: int) -> None:
        if not self._closing and slot < self._reach and slot not in self.links and not self._submitted[slot]:
            self._submit(slot)

    @property
    def missing(self) -> frozenset[int]:
        """Slots that are wanted, recruits' included, and have no worker."""
        return frozenset(range(self._reach)).difference(self.links)

    @property
    def cores(self) -> frozenset[int]:
        """Slots with a worker, or with a core as far as Spark said last."""
        return self._with_core.union(self.links)

    def progress(self) -> j.Progress:
        """State of the slots that have no worker, as Spark tells it."""
        missing = self.missing
        try:
            found = self._host.activity(sorted(missing))
        except Exception:  # a status call must not end the job; whatever has an end still has it
            found = dict[int, SlotTask | None].fromkeys(missing)
        now = now_ms()
        starting = [(slot, task) for slot, task in found.items() if task is not None]
        self._with_core = frozenset(slot for slot, _ in starting)
        return j.Progress(
            frozenset(slot for slot, task in found.items() if task is None),
            tuple(j.Starting(slot, task.host, now - task.age_ms) for slot, task in starting),
            now,
        )

    def end_hung(self, progress: j.Progress, timeout_ms: float) -> list[str]:
        """Processes that do not come although they have a core: Spark ends them, so that another core has its turn."""
        told: list[str] = []
        for task in progress.starting:
            if progress.now_ms - task.since_ms <= timeout_ms:
                continue
            self._host.cancel(task.slot)
            if task.slot not in self._hung:
                where = f" on host {task.host}" if task.host else ""
                why = f"it had a core{where} for {duration_text(timeout_ms)}, and its Python did not come"
                self._hung[task.slot] = f"{why} (boot_timeout)"
                told.append(f"worker {task.slot} is started anew: {self._hung[task.slot]}")
        return told

    def shut_down(self, reason: str, timeout_s: float, gone: Callable[[], None]) -> None:
        """Ask all workers to leave, then have Spark end those that do not; ``gone`` is called from a thread."""
        self._closing = True
        for link in list(self.links.values()):
            link.send(c.Stop(reason))
        for slot in set(range(self._reach)) - set(self.links):
            self._host.cancel(slot)  # waits for a core, or starts just now: there is nobody to ask

        links = list(self.links.values())

        def wait() -> None:
            if not self._host.join(timeout_s):
                self._host.cancel_all()
                self._host.join(timeout_s)
            deadline = time.monotonic() + _LAST_WORDS_S
            for link in links:  # Spark's word that a worker ended can come before the worker's own last ones
                link.drain(max(0.0, deadline - time.monotonic()))
            gone()

        threading.Thread(target=wait, name="cutwater-shutdown", daemon=True).start()

    def abandon(self) -> None:
        """The coordinator itself failed: end everything at once."""
        self._closing = True
        self._host.cancel_all()

    def close(self) -> None:
        for link in list(self.links.values()):
            link.close()


def _what_python_needs(cause: str) -> str:
    """What to do about an executor's Python that cannot load the program."""
    missing = _NO_MODULE.search(cause)
    package = package_of(missing[1]) if missing is not None else None
    if package is not None and package[0] != "cutwater":
        name, version = package
        return (
            f"It is of the package {name}, of which the driver has {version}: install it where the workers run, too "
            f"(pip install {name}=={version})."
        )
    return (
        "The executors' Python needs cutwater and your modules too: set PYSPARK_PYTHON before the session is "
        "made, or add them with spark.addArtifacts(..., pyfile=True)."
    )

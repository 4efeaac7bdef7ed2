"""Faults that strike a running job, one after the other, at moments that come from a seed."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Collection, Sequence
from random import Random

import msgspec

from cutwater.api.jobs.job import Job
from cutwater.chaos.shadow import HOOKS, SLOW, Orders, Pace
from cutwater.errors import ConfigError, CutwaterError
from cutwater.runtime.status.status import WorkerStatus

FAULTS = {
    "kill": "SIGKILL of a worker's process; one in four hits two at once, or another one during the recovery",
    "stop": "SIGSTOP of a worker's process until it has been replaced, then SIGCONT",
    "exception": "an exception in a worker: while it reads, writes, pre-commits or commits",
    "disk-full": "no file of a worker can grow, until that has failed something",
    "slow-disk": "a worker takes a second longer to write its part of a snapshot",
    "disconnect": "the connection between the driver and a worker breaks",
}
"""Name and meaning of what can strike."""

_POLL_S = 0.005
RECOVERY_LIMIT_S = 120.0
"""A job that does not run again so long after a fault has failed the trial."""
_ORDER_LIMIT_S = 10.0
"""An order that nobody comes by to take, or a full disk that nobody wants to write to, is given up after so long."""
_BEHIND_A_CHECKPOINT = 0.75
"""Probability that a fault waits for a checkpoint since the last one, so that it finds something to restore."""
_PROMPTLY = 0.25
"""Probability that it then strikes at once, while sinks hear of that checkpoint and commit."""
_AGAIN = 0.25
"""Probability that a kill is not the only one: another worker dies with it, or during the recovery."""


class Strike(msgspec.Struct, frozen=True):
    """A fault that hit a running job.

    ``slot`` is the worker's number, -1 where the first that came by was hit.  ``recovery_ms`` is the time until every
    worker ran again; ``None`` if the job went on without a restart, or if it was hit while it recovered.
    """

    kind: str
    slot: int
    at_ms: float
    recovery_ms: float | None = None
    detail: str = ""


class Storm:
    """Strikes a job until ``count`` faults have hit, or it has ended.

    Args:
        job: a running job of a shadowed dataflow; its workers run on this machine.
        kinds: of ``FAULTS``.
        count: faults that are to hit.
        seed: of the kinds, moments and victims.
        orders, pace: those of the shadowed dataflow.
        told: called with a line for every fault.

    Raises:
        ConfigError: workers run on another machine.
        CutwaterError: the job does not recover.
    """

    def __init__(
        self,
        job: Job,
        kinds: Sequence[str],
        count: int,
        seed: int,
        orders: Orders,
        pace: Pace,
        told: Callable[[str], None],
        *,
        interval_s: float,
    ) -> None:
        self._job, self._kinds, self._count = job, list(kinds), count
        self._dice = Random(seed)
        self._orders, self._pace, self._told = orders, pace, told
        self._interval_s = interval_s
        self._began_s = time.monotonic()
        self.strikes: list[Strike] = []

    def run(self) -> list[Strike]:
        """Strike; returns what hit."""
        acts: dict[str, Callable[[], None]] = {
            "kill": self._kill,
            "stop": self._stop,
            "exception": self._exception,
            "disk-full": self._fill,
            "slow-disk": self._slow,
            "disconnect": self._disconnect,
        }
        tries = 0
        while len(self.strikes) < self._count and tries < 3 * self._count and self._running():
            tries += 1
            if len(self.strikes) + 1 == self._count:
                self._pace.at_will()  # once the last one has hit
            behind = self._dice.random() < _BEHIND_A_CHECKPOINT
            if behind:
                self._checkpointed()
            if not behind or self._dice.random() > _PROMPTLY:
                self._wait(self._dice.uniform(0, 2 * self._interval_s))
            if self._running():
                self._require_here()
                acts[self._dice.choice(self._kinds)]()
        self._pace.release()
        return self.strikes

    @staticmethod
    def time_s(count: int, interval_s: float) -> float:
        """So long the rows should last: all faults, without the recoveries, in which none are read, and some more."""
        return 1.5 * count * (2.5 * interval_s + 0.3)

    # ------------------------------------------------------------------------------------------------------ faults

    def _kill(self) -> None:
        first = self._victim()
        restarts, began_s = self._restarts, time.monotonic()
        again = len(self.strikes) + 1 < self._count and self._dice.random() < _AGAIN
        at_once = again and self._dice.random() < 0.5
        second = self._another({first.pid}) if at_once else None
        if not _kill_living(first):
            return
        dead, detail = {first.pid}, ""
        if at_once:
            detail = self._kill_too(second, dead, "at once")
        elif again:
            self._until(lambda: self._restarts > restarts and bool(self._alive(dead)))
            if not self._all_run:
                detail = self._kill_too(self._another(dead), dead, "during the recovery")
        self._recovered("kill", first.slot, began_s, restarts, dead, detail)

    def _kill_too(self, second: WorkerStatus | None, dead: set[int], when: str) -> str:
        """Kill one more worker, which counts by itself; says so of the first kill."""
        if second is None or not _kill_living(second):
            return ""
        dead.add(second.pid)
        self._note("kill", second.slot, None, when)
        return f"one more {when}"

    def _stop(self) -> None:
        victim = self._victim()
        restarts, began_s = self._restarts, time.monotonic()
        if not _signal(victim.pid, signal.SIGSTOP):
            return
        try:
            self._recovered("stop", victim.slot, began_s, restarts, {victim.pid})
        finally:
            _signal(victim.pid, signal.SIGCONT)

    def _exception(self) -> None:
        """Only after a checkpoint: the same exception again and again without one ends a job, and rightly so."""
        self._checkpointed()
        hook = self._dice.choice(HOOKS)
        before = self._counts
        self._orders.give(hook)
        if self._taken(hook):
            self._failed("exception", -1, time.monotonic(), before, f"in {hook}")

    def _slow(self) -> None:
        self._orders.give(SLOW)
        if self._taken(SLOW):
            self._note("slow-disk", -1, None, "")

    def _fill(self) -> None:
        """A limit of the operating system: whatever the worker writes to files fails, and nothing else does."""
        victim = self._victim()
        before, began_s = self._counts, time.monotonic()
        try:
            old = resource.prlimit(victim.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (0, old[1]))
        except ProcessLookupError:
            return
        self._until(lambda: self._counts != before, _ORDER_LIMIT_S)
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, old)
        if self._counts != before:
            self._failed("disk-full", victim.slot, began_s, before)

    def _disconnect(self) -> None:
        victim = self._victim()
        restarts, began_s = self._restarts, time.monotonic()
        self._job.disconnect(victim.slot)
        self._recovered("disconnect", victim.slot, began_s, restarts, set())  # Spark uses the process again

    # ------------------------------------------------------------------------------------------------------- parts

    def _victim(self) -> WorkerStatus:
        return self._dice.choice(self._job.status.workers)

    def _another(self, dead: set[int]) -> WorkerStatus | None:
        """A victim that is none of the dead."""
        others = self._alive(dead)
        return self._dice.choice(others) if others else None

    @property
    def _all_run(self) -> bool:
        """True if nothing recovers.  A job with a region that is down is running all the same."""
        failures = self._job.status.failures
        return bool(failures) and failures[-1].running_ms is not None

    def _alive(self, dead: set[int]) -> list[WorkerStatus]:
        return [w for w in self._job.status.workers if w.pid not in dead]

    def _running(self) -> bool:
        """Wait until every worker runs; False if the job ended."""
        self._until(lambda: self._job.status.phase == "running" and bool(self._job.status.workers))
        return self._job.is_active

    def _recovered(self, kind: str, slot: int, began_s: float, restarts: int, dead: set[int], detail: str = "") -> None:
        """Wait until the job runs again, without the dead."""
        took_ms = recovery_ms(self._job, began_s, restarts, dead)
        if took_ms is not None:
            self._note(kind, slot, took_ms, detail)
        elif self._job.is_active:
            raise CutwaterError(
                f"the job was not running again {RECOVERY_LIMIT_S:.0f} s after fault {len(self.strikes) + 1}: {kind} "
                f"of worker {slot}; it is {self._job.status.phase}"
            )
        elif self._job.exception() is None:
            self._note(kind, slot, None, "the job ended")

    def _failed(self, kind: str, slot: int, began_s: float, before: tuple[int, int], detail: str = "") -> None:
        """A restart, or a failed checkpoint that the job tolerates."""
        self._until(lambda: self._counts != before, _ORDER_LIMIT_S)
        if self._restarts > before[0] or self._job.status.checkpoints.failed == before[1]:
            self._recovered(kind, slot, began_s, before[0], set(), detail)
        else:
            self._note(kind, slot, None, f"{detail}, a checkpoint failed".removeprefix(", "))

    def _note(self, kind: str, slot: int, recovery_ms: float | None, detail: str) -> None:
        strike = Strike(kind, slot, (time.monotonic() - self._began_s) * 1000, recovery_ms, detail)
        self.strikes.append(strike)
        where = f" of worker {slot}" if slot >= 0 else ""
        text = f", running again after {recovery_ms / 1000:.2f} s" if recovery_ms is not None else ""
        more = f", {detail}" if detail else ""
        self._told(f"fault {len(self.strikes)} of {self._count}: {kind}{where}{more}{text}")

    def _taken(self, order: str) -> bool:
        """Wait until a worker carries an order out; False if none did, and none will."""
        self._until(lambda: not self._orders.open(order), _ORDER_LIMIT_S)
        return not self._orders.take(order)

    def _until(self, condition: Callable[[], object], limit_s: float = RECOVERY_LIMIT_S) -> bool:
        return _until(self._job, condition, limit_s)

    def _wait(self, seconds: float) -> None:
        self._until(lambda: False, seconds)

    def _checkpointed(self) -> None:
        """Wait for a checkpoint."""
        completed = self._job.status.checkpoints.completed
        self._until(lambda: self._job.status.checkpoints.completed > completed)

    def _require_here(self) -> None:
        here = socket.gethostname()
        away = sorted({w.host for w in self._job.status.workers} - {here})
        if away:
            raise ConfigError(
                f"workers run on {', '.join(away)}: faults can only strike processes of this machine ({here})",
                hint="Use a local master, for example --master local[4].",
            )

    @property
    def _restarts(self) -> int:
        return self._job.status.restarts

    @property
    def _counts(self) -> tuple[int, int]:
        """Restarts and failed checkpoints."""
        status = self._job.status
        return status.restarts, status.checkpoints.failed


def recovery_ms(
    job: Job, began_s: float, restarts: int, dead: Collection[int] = (), limit_s: float = RECOVERY_LIMIT_S
) -> float | None:
    """Wait until a job that was struck has all its workers at work again, and say how long that took.

    Args:
        job: what was struck.
        began_s: when (``time.monotonic``).
        restarts: ``job.status.restarts`` before.
        dead: processes that are not among the workers any more when it is over.
        limit_s: how long to wait.

    Returns ``None`` if it has not come to that in time, or the job has ended.
    """

    def back() -> bool:
        status = job.status
        runs = bool(status.failures) and status.failures[-1].running_ms is not None
        return status.restarts > restarts and runs and not set(dead) & {w.pid for w in status.workers}

    if not _until(job, back, limit_s):
        return None
    failures = job.status.failures[restarts:]  # a worker may have failed before it was seen to
    noticed_ms, running_ms = failures[0].failed_ms, failures[-1].running_ms or 0.0
    return running_ms - min(began_s * 1000, noticed_ms)


def _until(job: Job, condition: Callable[[], object], limit_s: float) -> bool:
    """Poll; False after the time, or when the job has ended."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if not job.is_active or time.monotonic() > deadline:
            return bool(condition())
        time.sleep(_POLL_S)
    return True


def _kill_living(worker: WorkerStatus) -> bool:
    """SIGKILL; False if there is nothing to kill: the process is gone, or it has died and nobody has asked after it."""
    try:
        with open(f"/proc/{worker.pid}/stat", encoding="ascii", errors="replace") as file:
            if file.read().rpartition(")")[2].split()[0] in "ZX":
                return False
    except OSError:  # it is gone, or this system keeps no such files
        pass
    return _signal(worker.pid, signal.SIGKILL)


def _signal(pid: int, number: signal.Signals) -> bool:
    """False if there is no such process any more."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True

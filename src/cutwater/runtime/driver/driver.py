"""The driver's part of anything that runs on a group of workers: one thread that owns all state.

Workers' connections, Spark's threads and the user's calls only put functions into its queue, and it runs one after the
other; so nothing here needs a lock.
"""

from __future__ import annotations

import abc
import queue
import secrets
import threading
from collections.abc import Callable
from random import Random

from cutwater.config import JobConfig
from cutwater.errors import CutwaterError, FencedError, InvariantError
from cutwater.protocol.job import messages as j
from cutwater.protocol.job.machine import JobMachine
from cutwater.protocol.job.regions import Division
from cutwater.protocol.job.restart import RestartDecider
from cutwater.runtime.control import messages as c
from cutwater.runtime.control import reports as cr
from cutwater.runtime.control.copy_messages import CopiesHeld
from cutwater.runtime.control.links import ControlServer, WorkerLink
from cutwater.runtime.driver.checkpointing import now_ms
from cutwater.runtime.driver.failure_ledger import FailureLedger
from cutwater.runtime.driver.group import Group, Roster
from cutwater.runtime.failures import internal_error
from cutwater.runtime.hosts.spark import SparkHost
from cutwater.runtime.transport.secret import new_secret
from cutwater.runtime.worker.worker import SlotArgs

MakeHost = Callable[[Callable[[int, BaseException | None], None]], SparkHost]
"""Makes a host from the callback for a slot's Spark job that ended."""

_ATTEMPT = frozenset({j.JobPhase.DEPLOYING, j.JobPhase.RUNNING, j.JobPhase.DRAINING})
_WANTED = frozenset({j.JobPhase.FORMING, j.JobPhase.DEPLOYING, j.JobPhase.RUNNING})
"""Missing workers are on their way."""
_PATIENCE_S = 0.5
"""So long a lost connection between workers waits for the report of the worker that caused it."""
_POLL_MS = 400.0
"""How often Spark is asked for workers that the job waits for."""
_POLL_RECRUITS_MS = 2_000.0
"""The same, for workers that it runs on without."""
_LOOK_MS = 300.0
"""The longest time without a look at the clock's business, and at who is there."""


class Driver(abc.ABC):
    """Forms a group of workers, deploys attempts to it and restarts them.

    Args:
        name: of the job; a worker of another job is refused.
        slots: number of workers.
        config: settings.
        host: makes the host.
        roster: is told of workers that come and go.
        subtasks: once all of them have said that they are finished the job ends; what has no end has one that never
            says it.
        attempt: the last one known.
        division: of ``subtasks`` into what goes back by itself; ``None``: only all together.
    """

    def __init__(
        self,
        name: str,
        slots: int,
        config: JobConfig,
        host: MakeHost,
        roster: Roster,
        *,
        subtasks: frozenset[tuple[int, int]] = frozenset({(0, 0)}),
        attempt: int = 0,
        division: Division | None = None,
    ) -> None:
        self.config = config
        self.error: CutwaterError | None = None
        self.ended = threading.Event()
        self.secret = new_secret()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._failures = FailureLedger()
        self._polled_ms = self._looked_ms = 0.0
        self._machine = JobMachine(
            slots,
            subtasks,
            RestartDecider(config.restart, Random(secrets.randbits(64))),
            config.resource_timeout_ms,
            config.resource_stabilization_timeout_ms,
            now_ms=now_ms(),
            attempt=attempt,
            regions=division.regions if division is not None else (),
            upstream=division.upstream if division is not None else (),
        )
        made = host(lambda slot, error: self._later(lambda: self._slot_ended(slot, error)))
        self._group = Group(slots, made, roster, self._worker_args, self._after)
        self._server = ControlServer(
            made.address,
            self.secret,
            name,
            joined=lambda link, hello: self._later(lambda: self._job(self._group.joined(link, hello))),
            received=lambda link, message: self._later(lambda: self._received(link, message)),
            lost=lambda link, reason: self._later(lambda: self._job(self._group.lost(link, reason))),
            told=lambda text: self._later(lambda: self.note(text)),
        )
        self._thread = threading.Thread(target=self._run, name=f"cutwater-{name}", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """Where workers find this driver."""
        return self._server.address

    @property
    def cores(self) -> frozenset[int]:
        """Slots with a worker, or a core for one."""
        return self._group.cores

    @property
    def waits(self) -> bool:
        """Whether nothing but missing workers keeps the job, or a part of it, from going on."""
        return self._machine.waits

    # ------------------------------------------------------------------------------------------ from other threads

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has cleaned up."""
        if self._thread.ident is not None:
            self._thread.join()

    def request_end(self, outcome: j.Outcome, reason: str) -> None:
        """Cancel or stop; wait for ``ended`` afterwards."""
        self._later(lambda: self._job(j.EndRequested(outcome, reason, now_ms())))

    def disconnect(self, slot: int) -> None:
        """Break the connection to a worker, as a network does; nothing if there is none."""
        self._later(lambda: self._group.disconnect(slot))

    def _later(self, function: Callable[[], None]) -> None:
        self._calls.put(function)

    def _after(self, delay_s: float, function: Callable[[], None]) -> None:
        timer = threading.Timer(delay_s, lambda: self._later(function))
        timer.daemon = True
        timer.start()

    # ---------------------------------------------------------------------------------------------------- the loop

    def _run(self) -> None:
        try:
            self._server.start()
            self._group.launch_all()
            self._launched()
            while not self.ended.is_set():
                self._step()
        except BaseException as e:
            self.error = e if isinstance(e, CutwaterError) else internal_error(e)
            self._group.abandon()
            self._crashed(self.error)
        finally:
            self._closing()
            self._server.close()
            self._group.close()
            self.ended.set()
            self._stepped()

    def _step(self) -> None:
        dues = [d for d in (self._machine.next_due_ms, self._due_ms()) if d is not None]
        due = min([*dues, self._looked_ms + _LOOK_MS])
        try:
            function = self._calls.get(timeout=max(0.0, due - now_ms()) / 1000)
        except queue.Empty:
            function = None
        try:
            if function is not None:
                function()
            if (now := now_ms()) >= due or self._group.changed:
                self._looked_ms, self._group.changed = now, False
                self._on_time()
        except FencedError as e:
            self._failures.error = e
            self._job(j.EndRequested(j.Outcome.FAILED, str(e), now_ms()))
        self._stepped()

    def _on_time(self) -> None:
        now = now_ms()
        pause_ms = _POLL_MS if self._machine.waits else _POLL_RECRUITS_MS
        if self._machine.phase in _WANTED and self._group.missing and now - self._polled_ms > pause_ms:
            self._polled_ms = now
            progress = self._group.progress()
            self._job(progress)
            for text in self._group.end_hung(progress, self.config.boot_timeout_ms):
                self.note(text)
        due = self._machine.next_due_ms
        if due is not None and due <= now:
            self._job(j.Tick(now))
        self._tick()
        for link in self._group.silent(self.config.heartbeat_timeout_ms):
            silence = f"it was silent for {self.config.heartbeat_timeout_ms / 1000:.0f} s"
            self._job(self._group.lost(link, silence))

    # -------------------------------------------------------------------------------------------------- the events

    def _received(self, link: WorkerLink, message: c.FromWorker) -> None:
        link.seen_ms = now_ms()
        attempt: int | None = getattr(message, "attempt", None)
        current = attempt is None or self._machine.is_current(attempt, getattr(message, "region", 0))
        if not current or not self._group.is_current(link):
            return
        match message:
            case cr.Ready():
                self._job(j.WorkerReady(link.slot, message.attempt, now_ms(), message.region))
            case cr.Failure():
                if message.secondary:
                    self._after(_PATIENCE_S, lambda: self._still_failed(message))
                else:
                    self._failed(message)
            case CopiesHeld():
                self._group.copied(link, message)
            case _:
                self._message(link, message)

    def _slot_ended(self, slot: int, error: BaseException | None) -> None:
        hopeless = self._group.slot_ended(slot, error)
        if hopeless is not None:
            self._failures.note(type(hopeless).__name__, hopeless.message, hopeless.step or "", False, hopeless.hint)
            self._job(j.EndRequested(j.Outcome.FAILED, str(self._failures.error), now_ms()))

    def _failed(self, failure: cr.Failure, alone: bool = True) -> None:
        """A worker told of a failure; not ``alone``: everything goes back."""
        text = f"{failure.message}\n{failure.traceback}" if failure.traceback else failure.message
        self._fail(
            failure.kind,
            text,
            step=failure.step,
            retryable=failure.retryable,
            hint=failure.hint,
            attempt=failure.attempt if alone else self._machine.attempt,
            region=failure.region if alone else None,
        )

    def _still_failed(self, failure: cr.Failure) -> None:
        """A worker lost another one some time ago, and nobody has told a better reason since."""
        if self._machine.is_current(failure.attempt, failure.region) and self._machine.phase in _ATTEMPT:
            self._failed(failure)

    def _fail(
        self,
        kind: str,
        message: str,
        *,
        step: str = "",
        retryable: bool = True,
        hint: str = "",
        attempt: int = 0,
        region: int | None = None,
    ) -> None:
        """The current attempt failed, or that of a region."""
        if self._failures.counts(kind, retryable, self._machine.phase):
            retryable = self._failures.note(kind, message, step, retryable, hint)
            reason, number = str(self._failures.error), attempt or self._machine.attempt
            self._job(j.TaskFailed(number, reason, retryable, now_ms(), region))

    # ------------------------------------------------------------------------------------------ effects of the job

    def _job(self, event: j.Event | None) -> None:
        """Feed the job machine and perform what it asks for."""
        if event is None:
            return
        for effect in self._machine.handle(event):
            match effect:
                case j.BeginAttempt(attempt=attempt):
                    self._deploy(attempt)
                case j.StartProcessing(attempt=attempt):
                    self._group.broadcast(c.Start(attempt))
                    self._running()
                case j.StopAttempt(reason=reason):
                    self._stepped()  # first: whoever sees that the job restarts must not see that it runs
                    self._stopped(reason)
                    self._group.broadcast(c.Reset(self._machine.attempt))
                case j.StopRegions(regions=regions, reason=reason):
                    self._stop_regions(regions, reason)
                case j.BeginRegions(attempt=attempt, regions=regions):
                    self._begin_regions(attempt, regions)
                case j.StartRegions(attempt=attempt):
                    self._group.broadcast(c.Start(attempt))
                    self._resumed()
                case j.GroupShort(workers=workers, reason=reason):
                    self._short(workers, reason)
                case j.Wait(text=text):
                    self.note(text)
                case j.TakeFinalCheckpoint():
                    self._take_final()
                case j.ShutDown(outcome=outcome, reason=reason):
                    self._shutting_down(reason)
                    timeout_s = self.config.cancel_timeout_ms / 1000
                    self._group.shut_down(
                        outcome.value, timeout_s, lambda: self._later(lambda: self._job(j.WorkersGone()))
                    )
                case j.Ended(outcome=outcome, reason=reason):
                    if outcome is j.Outcome.FAILED:
                        self.error = self._failures.final(reason)
                        reason = str(self.error)
                    self._end(outcome, reason)
                    self.ended.set()

    # ------------------------------------------------------------------------------------ what a certain driver does

    @abc.abstractmethod
    def _worker_args(self, slot: int) -> SlotArgs:
        """What a worker is started with."""

    @abc.abstractmethod
    def _deploy(self, attempt: int) -> None:
        """Tell every worker what to build."""

    @abc.abstractmethod
    def _running(self) -> None:
        """Every worker is ready, and has just been told to start."""

    @abc.abstractmethod
    def _stopped(self, reason: str) -> None:
        """The attempt is over, another one will begin."""

    @abc.abstractmethod
    def _shutting_down(self, reason: str) -> None:
        """The workers are about to be sent away."""

    @abc.abstractmethod
    def _message(self, link: WorkerLink, message: c.FromWorker) -> None:
        """A message of a worker of the current attempt."""

    @abc.abstractmethod
    def note(self, text: str) -> None:
        """Tell the user."""

    @abc.abstractmethod
    def _due_ms(self) -> float | None:
        """When ``_tick`` is wanted."""

    @abc.abstractmethod
    def _tick(self) -> None:
        """Do what time has made due."""

    def _launched(self) -> None:  # noqa: B027 - a hook
        """The workers' Spark jobs are submitted."""

    def _stop_regions(self, regions: tuple[int, ...], reason: str) -> None:
        """Reset these regions, no others; only where ``regions`` were given."""
        raise InvariantError(f"{reason}: there are no regions that go back by themselves")

    def _begin_regions(self, attempt: int, regions: tuple[int, ...]) -> None:
        """Deploy these regions from the newest checkpoint; only where ``regions`` were given."""
        raise InvariantError("there are no regions that go back by themselves")

    def _resumed(self) -> None:  # noqa: B027 - a hook
        """Everything runs again after regions went back."""

    def _short(self, workers: int, reason: str) -> None:  # noqa: B027 - a hook
        """The group did not become complete, but is large enough to go on."""

    def _take_final(self) -> None:  # noqa: B027 - a hook
        """Every subtask is finished."""

    def _end(self, outcome: j.Outcome, reason: str) -> None:  # noqa: B027 - a hook
        """All workers are gone; ``ended`` is set when this returns."""

    def _crashed(self, error: CutwaterError) -> None:  # noqa: B027 - a hook
        """The driver's own thread failed."""

    def _closing(self) -> None:  # noqa: B027 - a hook
        """The thread is about to end, however it came to that."""

    def _stepped(self) -> None:  # noqa: B027 - a hook
        """Something that users look at may have changed."""

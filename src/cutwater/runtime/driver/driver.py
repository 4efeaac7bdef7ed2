"""The driver of anything that runs on a group of workers: one thread that owns all state.

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
from cutwater.runtime.control.links import ControlServer, WorkerLink
from cutwater.runtime.control.reports import CopiesHeld
from cutwater.runtime.driver.checkpointing import now_ms
from cutwater.runtime.driver.group import Group, Roster
from cutwater.runtime.failures import FailureLedger, internal_error
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
"""Pause between two questions to Spark for workers that the job waits for."""
_POLL_RECRUITS_MS = 2_000.0
"""The same, for workers that it runs on without."""
_LOOK_MS = 300.0
"""The longest time without a look at the clock's business, and at who is there."""


class Duties(abc.ABC):
    """The duties of a driver that depend on what its workers run: a dataflow, or a process network.

    Everything is called in the driver's thread.
    """

    @abc.abstractmethod
    def worker_args(self, slot: int) -> SlotArgs:
        """The arguments that the worker of a slot is started with."""

    @abc.abstractmethod
    def deploy(self, attempt: int) -> None:
        """Tell every worker what to build."""

    @abc.abstractmethod
    def running(self) -> None:
        """Every worker is ready, and has just been told to start."""

    @abc.abstractmethod
    def stopped(self, reason: str) -> None:
        """The attempt is over, another one will begin."""

    @abc.abstractmethod
    def shutting_down(self, reason: str) -> None:
        """The workers are about to be sent away."""

    @abc.abstractmethod
    def message(self, link: WorkerLink, message: c.FromWorker) -> None:
        """A message of a worker of the current attempt."""

    @abc.abstractmethod
    def note(self, text: str) -> None:
        """Tell the user."""

    @abc.abstractmethod
    def due_ms(self) -> float | None:
        """Monotonic time at which ``on_time`` is wanted."""

    @abc.abstractmethod
    def on_time(self) -> None:
        """Do what time has made due."""

    def launched(self) -> None:  # noqa: B027 - a hook
        """The workers' Spark jobs are submitted."""

    def failing(self, failure: cr.Failure) -> bool:
        """A worker told of a failure; false if everything must go back, although it concerns one region."""
        return True

    def stop_regions(self, regions: tuple[int, ...], reason: str) -> None:
        """Reset these regions, no others; only where ``regions`` were given."""
        raise InvariantError(f"{reason}: there are no regions that go back by themselves")

    def begin_regions(self, attempt: int, regions: tuple[int, ...]) -> None:
        """Deploy these regions from the newest checkpoint; only where ``regions`` were given."""
        raise InvariantError("there are no regions that go back by themselves")

    def resumed(self) -> None:  # noqa: B027 - a hook
        """Everything runs again after regions went back."""

    def short(self, workers: int, reason: str) -> None:  # noqa: B027 - a hook
        """The group did not become complete, but is large enough to go on."""

    def take_final(self) -> None:  # noqa: B027 - a hook
        """Every subtask is finished."""

    def end(self, outcome: j.Outcome, reason: str) -> None:  # noqa: B027 - a hook
        """All workers are gone; ``ended`` is set when this returns."""

    def crashed(self, error: CutwaterError) -> None:  # noqa: B027 - a hook
        """The driver's own thread failed."""

    def closing(self) -> None:  # noqa: B027 - a hook
        """The thread is about to end, however it came to that."""

    def stepped(self) -> None:  # noqa: B027 - a hook
        """Something that users look at may have changed."""


class Driver:
    """Forms a group of workers, has attempts deployed to it and restarts them.

    Args:
        duties: what the workers are started with and told, and what their messages mean.
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
        duties: Duties,
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
        self._duties = duties
        self.error: CutwaterError | None = None
        self.ended = threading.Event()
        self.secret = new_secret()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.failures = FailureLedger()
        self._polled_ms = self._looked_ms = 0.0
        self.machine = JobMachine(
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
        made = host(lambda slot, error: self.later(lambda: self._slot_ended(slot, error)))
        self.group = Group(slots, made, roster, self._duties.worker_args, self._after)
        self._server = ControlServer(
            made.address,
            self.secret,
            name,
            joined=lambda link, hello: self.later(lambda: self.handle(self.group.joined(link, hello))),
            received=lambda link, message: self.later(lambda: self._received(link, message)),
            lost=lambda link, reason: self.later(lambda: self.handle(self.group.lost(link, reason))),
            told=lambda text: self.later(lambda: self._duties.note(text)),
        )
        self._thread = threading.Thread(target=self._run, name=f"cutwater-{name}", daemon=True)

    @property
    def address(self) -> tuple[str, int]:
        """Address at which workers find this driver."""
        return self._server.address

    # ------------------------------------------------------------------------------------------ from other threads

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def join(self) -> None:
        """Wait until the thread has cleaned up."""
        if self._thread.ident is not None:
            self._thread.join()

    def end_unstarted(self) -> None:
        """End without having begun: there is nothing to do."""
        self._server.close()
        self._duties.closing()
        self.ended.set()

    def request_end(self, outcome: j.Outcome, reason: str) -> None:
        """Cancel or stop; wait for ``ended`` afterwards."""
        self.later(lambda: self.handle(j.EndRequested(outcome, reason, now_ms())))

    def disconnect(self, slot: int) -> None:
        """Break the connection to a worker, as a network does; nothing if there is none."""
        self.later(lambda: self.group.disconnect(slot))

    def later(self, function: Callable[[], None]) -> None:
        """Call a function in the driver's thread; from any thread."""
        self._calls.put(function)

    def _after(self, delay_s: float, function: Callable[[], None]) -> None:
        timer = threading.Timer(delay_s, lambda: self.later(function))
        timer.daemon = True
        timer.start()

    # ---------------------------------------------------------------------------------------------------- the loop

    def _run(self) -> None:
        try:
            self._server.start()
            self.group.launch_all()
            self._duties.launched()
            while not self.ended.is_set():
                self._step()
        except BaseException as e:
            self.error = e if isinstance(e, CutwaterError) else internal_error(e)
            self.group.abandon()
            self._duties.crashed(self.error)
        finally:
            self._duties.closing()
            self._server.close()
            self.group.close()
            self.ended.set()
            self._duties.stepped()

    def _step(self) -> None:
        dues = [d for d in (self.machine.next_due_ms, self._duties.due_ms()) if d is not None]
        due = min([*dues, self._looked_ms + _LOOK_MS])
        try:
            function = self._calls.get(timeout=max(0.0, due - now_ms()) / 1000)
        except queue.Empty:
            function = None
        try:
            if function is not None:
                function()
            if (now := now_ms()) >= due or self.group.changed:
                self._looked_ms, self.group.changed = now, False
                self._on_time()
        except FencedError as e:
            self.failures.error = e
            self.handle(j.EndRequested(j.Outcome.FAILED, str(e), now_ms()))
        self._duties.stepped()

    def _on_time(self) -> None:
        now = now_ms()
        pause_ms = _POLL_MS if self.machine.waits else _POLL_RECRUITS_MS
        if self.machine.phase in _WANTED and self.group.missing and now - self._polled_ms > pause_ms:
            self._polled_ms = now
            progress = self.group.progress()
            self.handle(progress)
            for text in self.group.end_hung(progress, self.config.boot_timeout_ms):
                self._duties.note(text)
        due = self.machine.next_due_ms
        if due is not None and due <= now:
            self.handle(j.Tick(now))
        self._duties.on_time()
        for link in self.group.silent(self.config.heartbeat_timeout_ms):
            silence = f"it was silent for {self.config.heartbeat_timeout_ms / 1000:.0f} s"
            self.handle(self.group.lost(link, silence))

    # -------------------------------------------------------------------------------------------------- the events

    def _received(self, link: WorkerLink, message: c.FromWorker) -> None:
        link.seen_ms = now_ms()
        attempt: int | None = getattr(message, "attempt", None)
        current = attempt is None or self.machine.is_current(attempt, getattr(message, "region", 0))
        if not current or not self.group.is_current(link):
            return
        match message:
            case cr.Ready():
                self.handle(j.WorkerReady(link.slot, message.attempt, now_ms(), message.region))
            case cr.Failure():
                if message.secondary:
                    self._after(_PATIENCE_S, lambda: self._still_failed(message))
                else:
                    self._failed(message)
            case CopiesHeld():
                self.group.copied(link, message)
            case _:
                self._duties.message(link, message)

    def _slot_ended(self, slot: int, error: BaseException | None) -> None:
        hopeless = self.group.slot_ended(slot, error)
        if hopeless is not None:
            self.failures.note(type(hopeless).__name__, hopeless.message, hopeless.step or "", False, hopeless.hint)
            self.handle(j.EndRequested(j.Outcome.FAILED, str(self.failures.error), now_ms()))

    def _failed(self, failure: cr.Failure) -> None:
        alone = self._duties.failing(failure)
        text = f"{failure.message}\n{failure.traceback}" if failure.traceback else failure.message
        self.fail(
            failure.kind,
            text,
            step=failure.step,
            retryable=failure.retryable,
            hint=failure.hint,
            attempt=failure.attempt if alone else self.machine.attempt,
            region=failure.region if alone else None,
        )

    def _still_failed(self, failure: cr.Failure) -> None:
        """A worker lost another one some time ago, and nobody has told a better reason since."""
        if self.machine.is_current(failure.attempt, failure.region) and self.machine.phase in _ATTEMPT:
            self._failed(failure)

    def fail(
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
        if self.failures.counts(kind, retryable, self.machine.phase):
            retryable = self.failures.note(kind, message, step, retryable, hint)
            reason, number = str(self.failures.error), attempt or self.machine.attempt
            self.handle(j.TaskFailed(number, reason, retryable, now_ms(), region))

    # ------------------------------------------------------------------------------------------ effects of the job

    def handle(self, event: j.Event | None) -> None:
        """Feed the job machine and perform what it asks for."""
        if event is None:
            return
        for effect in self.machine.handle(event):
            match effect:
                case j.BeginAttempt(attempt=attempt):
                    self._duties.deploy(attempt)
                case j.StartProcessing(attempt=attempt):
                    self.group.broadcast(c.Start(attempt))
                    self._duties.running()
                case j.StopAttempt(reason=reason):
                    self._duties.stepped()  # first: whoever sees that the job restarts must not see that it runs
                    self._duties.stopped(reason)
                    self.group.broadcast(c.Reset(self.machine.attempt))
                case j.StopRegions(regions=regions, reason=reason):
                    self._duties.stop_regions(regions, reason)
                case j.BeginRegions(attempt=attempt, regions=regions):
                    self._duties.begin_regions(attempt, regions)
                case j.StartRegions(attempt=attempt):
                    self.group.broadcast(c.Start(attempt))
                    self._duties.resumed()
                case j.GroupShort(workers=workers, reason=reason):
                    self._duties.short(workers, reason)
                case j.Wait(text=text):
                    self._duties.note(text)
                case j.TakeFinalCheckpoint():
                    self._duties.take_final()
                case j.ShutDown(outcome=outcome, reason=reason):
                    self._duties.shutting_down(reason)
                    timeout_s = self.config.cancel_timeout_ms / 1000
                    self.group.shut_down(
                        outcome.value, timeout_s, lambda: self.later(lambda: self.handle(j.WorkersGone(now_ms())))
                    )
                case j.Ended(outcome=outcome, reason=reason):
                    if outcome is j.Outcome.FAILED:
                        self.error = self.failures.final(reason)
                        reason = str(self.error)
                    self._duties.end(outcome, reason)
                    self.ended.set()

"""The driver of anything that runs on a group of workers: one thread that owns all state.

Workers' connections, Spark's threads and the user's calls only put functions into its queue, and it runs one after the
other; so nothing here needs a lock.
"""

from __future__ import annotations

import abc
import queue
import secrets
import threading
from collections.abc import Callable, Hashable
from random import Random
from typing import cast

from cutwater.config import JobConfig
from cutwater.errors import CutwaterError, FencedError, InvariantError
from cutwater.protocol.job import messages as j
from cutwater.protocol.job import rescale as r
from cutwater.protocol.job.core import JobCore
from cutwater.protocol.job.hosts import CheckpointHost, Topology
from cutwater.protocol.job.restart_budget import RestartDecider
from cutwater.runtime.control import messages as c
from cutwater.runtime.control.links import ControlServer, WorkerLink, now_ms
from cutwater.runtime.control.messages import CopiesHeld
from cutwater.runtime.driver.worker_group import Roster, WorkerGroup
from cutwater.runtime.failures import FailureLedger, internal_error
from cutwater.runtime.spark_host import SparkHost
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
    def deploy(self, attempt: int, regions: tuple[int, ...] | None) -> None:
        """Tell every worker what to build; ``regions``: of these only, from the newest checkpoint."""

    @abc.abstractmethod
    def running(self) -> None:
        """Every subtask runs; a worker that begins has just been told to start."""

    @abc.abstractmethod
    def going_back(self, reason: str, regions: tuple[int, ...] | None) -> None:
        """An attempt, or that of these regions, is over, and another one will begin."""

    @abc.abstractmethod
    def shutting_down(self, reason: str) -> None:
        """The workers are about to be sent away."""

    @abc.abstractmethod
    def message(self, link: WorkerLink, message: c.FromWorker) -> None:
        """A message of a worker of the current attempt."""

    @abc.abstractmethod
    def note(self, text: str) -> None:
        """Tell the user."""

    def due_ms(self) -> float | None:
        """Monotonic time at which ``on_time`` is wanted, beside what the core has due."""
        return None

    def on_time(self) -> None:  # noqa: B027 - a hook
        """Do what time has made due."""

    def launched(self) -> None:  # noqa: B027 - a hook
        """The workers' Spark jobs are submitted."""

    def failing(self, failure: c.Failure) -> bool:
        """A worker told of a failure; false if everything must go back, although it concerns one region."""
        return True

    def switch(self, shape: r.Shape, reason: str) -> Topology:
        """Take on another shape, or begin anew; only where that was asked for."""
        raise InvariantError(f"{reason}: there is no other parallelism")

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
        config: settings.
        host: makes the host.
        roster: is told of workers that come and go.
        topology: once all its subtasks have said that they are finished the job ends; what has no end has one that
            never says it.
        rescaler: decides over the parallelism.
        checkpoints: performs checkpoints; ``None``: there are none.
        attempt: the last one known.
        catch_up_ms: how long what went back may send again what others have; ``None``: no rows pass between regions.
    """

    def __init__(
        self,
        duties: Duties,
        name: str,
        config: JobConfig,
        host: MakeHost,
        roster: Roster,
        *,
        topology: Topology,
        rescaler: r.Rescaler,
        checkpoints: CheckpointHost | None = None,
        attempt: int = 0,
        catch_up_ms: float | None = None,
    ) -> None:
        self.config = config
        self._duties = duties
        self.error: CutwaterError | None = None
        self.ended = threading.Event()
        self.secret = new_secret()
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.failures = FailureLedger()
        self._polled_ms = self._looked_ms = 0.0
        restart = RestartDecider(config.restart, Random(secrets.randbits(64)))
        self.core = JobCore(
            self,
            checkpoints,
            config,
            topology,
            restart,
            rescaler,
            attempt=attempt,
            catch_up_ms=catch_up_ms,
            now_ms=now_ms(),
        )
        self.machine = self.core.machine
        made = host(lambda slot, error: self.later(lambda: self._slot_ended(slot, error)))
        self.group = WorkerGroup(topology.slots, made, roster, self._duties.worker_args, self._after)
        self._server = ControlServer(
            made.address,
            self.secret,
            name,
            joined=lambda link, hello: self.later(lambda: self.handle(self.group.joined(link, hello))),
            received=self._heard,
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
        dues = [d for d in (self.core.next_due_ms, self._duties.due_ms()) if d is not None]
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
        self.core.on_time(now)
        self.core.look(now)
        self._duties.on_time()
        for link in self.group.silent(self.config.heartbeat_timeout_ms):
            silence = f"it was silent for {self.config.heartbeat_timeout_ms / 1000:.0f} s"
            self.handle(self.group.lost(link, silence))

    # -------------------------------------------------------------------------------------------------- the events

    def _heard(self, link: WorkerLink, message: c.FromWorker) -> None:
        """In the connection's thread: that the driver is busy for long, with sinks to settle, is no silence."""
        link.seen_ms = now_ms()
        self.later(lambda: self._received(link, message))

    def _received(self, link: WorkerLink, message: c.FromWorker) -> None:
        attempt: int | None = getattr(message, "attempt", None)
        if not self.core.hears(link.slot, link.incarnation, attempt, getattr(message, "region", 0)):
            return
        match message:
            case c.Ready():
                self.handle(j.WorkerReady(link.slot, message.attempt, now_ms(), message.region))
            case c.Failure():
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

    def _failed(self, failure: c.Failure) -> None:
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

    def _still_failed(self, failure: c.Failure) -> None:
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

    def handle(self, event: j.Event | None) -> None:
        """Tell the core, and perform what comes of it."""
        if event is not None:
            self.core.handle(event)

    # ------------------------------------------------------------------------------------------------ see ``JobHost``

    @property
    def cores(self) -> frozenset[int]:
        return self.group.cores

    def begin(self, attempt: int, regions: tuple[int, ...] | None) -> None:
        self._duties.deploy(attempt, regions)

    def start_rows(self, attempt: int, regions: tuple[int, ...] | None) -> None:
        self.group.broadcast(c.Start(attempt))

    def runs(self) -> None:
        self._duties.running()

    def going_back(self, reason: str, regions: tuple[int, ...] | None) -> None:
        if regions is None:
            self._duties.stepped()  # first: whoever sees that the job restarts must not see that it runs
        self._duties.going_back(reason, regions)

    def reset(self, regions: tuple[int, ...] | None) -> None:
        self.group.broadcast(c.Reset(self.machine.attempt, None if regions is None else list(regions)))

    def overdue(self, slots: list[int]) -> None:
        who = ", ".join(f"worker {slot}" for slot in slots)
        took = f"within {self.config.catch_up_timeout_ms / 1000:g} s (catch_up_timeout)"
        self.fail(
            "JobFailedError",
            f"{who} did not catch up with the others {took}, and no checkpoint could begin: everything goes back",
            hint="Checkpoints at shorter intervals leave less to catch up with.",
        )

    def recruit(self, workers: int) -> None:
        self.group.recruit(workers)

    def dismiss(self) -> None:
        self.group.resize(self.group.slots, "the job goes on without it")

    def switch(self, shape: r.Shape, reason: str) -> Topology:
        self.group.resize(shape.workers, reason)
        return self._duties.switch(shape, reason)

    def shut_down(self, outcome: j.Outcome, reason: str) -> None:
        self._duties.shutting_down(reason)
        timeout_s = self.config.cancel_timeout_ms / 1000
        gone = lambda: self.later(lambda: self.handle(j.WorkersGone(now_ms())))  # noqa: E731
        self.group.shut_down(outcome.value, timeout_s, gone)

    def job_over(self, outcome: j.Outcome, reason: str) -> None:
        if outcome is j.Outcome.FAILED:
            self.error = self.failures.final(reason)
            reason = str(self.error)
        self._duties.end(outcome, reason)
        self.ended.set()

    def note(self, text: str) -> None:
        self._duties.note(text)

    def rescaled(self, request: Hashable, error: str) -> None:
        cast("queue.SimpleQueue[str]", request).put(error)

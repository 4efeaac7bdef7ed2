"""A worker: one Python process in one Spark task, holding one subtask of every vertex.

One thread runs the mailbox loop: messages of the coordinator first, then a round of every subtask, then sleep until
somebody has something.  The network and the writing of snapshots have threads of their own.  Across attempts the
process stays; only the subtasks are built anew.
"""

from __future__ import annotations

import abc
import contextlib
import gc
import logging
import os
import socket
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from cutwater.config import JobConfig, LogLevelName
from cutwater.connectors.console import CONSOLE_LOGGER
from cutwater.connectors.staging import Guard
from cutwater.errors import CutwaterError, FencedError, WireError
from cutwater.plan.graph import PhysicalPlan
from cutwater.plan.planner import replan
from cutwater.plan.recovery import recovery_division
from cutwater.plan.replaced_sinks import guarded_plan, shadowed_plan
from cutwater.protocol.job.recovery_scope import Division
from cutwater.protocol.wire import Peer, Refusal
from cutwater.runtime.channels.connection import Connection, DataServer
from cutwater.runtime.control import messages as c
from cutwater.runtime.control.links import dial_coordinator
from cutwater.runtime.control.messages import CopiesHeld, CopyPlaces, NetworkDeploy
from cutwater.runtime.copies.copies import Copies, open_copies
from cutwater.runtime.transport.secret import Secret, shown
from cutwater.runtime.transport.sockets import Signal
from cutwater.runtime.worker.attempt import Attempt
from cutwater.runtime.worker.peers import Built, ConnectedAttempt, InterruptedBuildError, Posted
from cutwater.storage.store.base import Store

_MAX_SLEEP_S = 0.5
_LINGER_S = 2.0
"""For the last messages to the driver."""
_REPORT_S = 0.2
"""How often counters go to the driver."""


@dataclass(frozen=True)
class SlotArgs(abc.ABC):
    """What Spark ships to a slot, whatever is to run there."""

    slot: int
    address: tuple[str, int]
    """Of the coordinator."""
    secret: Secret = field(repr=False)
    job: str
    uid: str
    config: JobConfig

    @property
    def steps(self) -> Mapping[str, object]:
        """What a user wrote of it, by the id of the step: so that one which cannot be shipped has a name."""
        return {}

    @abc.abstractmethod
    def attempt(self, deploy: Any, worker: Worker) -> ConnectedAttempt:
        """What runs there, not built yet."""

    def open_copies(self, report: Callable[[CopiesHeld], None], note: Callable[[str], None]) -> Copies | None:
        """Where the worker keeps copies of snapshots, if it keeps some."""
        return None


@dataclass(frozen=True)
class WorkerArgs(SlotArgs):
    """The workers of a dataflow."""

    plan: PhysicalPlan
    parallelism: int
    """What the plan is made for; a rescaled job's worker makes its own for another one."""
    division: Division
    """What goes back together after a failure."""
    store: Store
    """The checkpoint directory."""
    shadow_dir: str
    """For what a fork's sinks would be given."""

    @property
    def steps(self) -> Mapping[str, object]:
        return self.plan.steps

    def attempt(self, deploy: Any, worker: Worker) -> ConnectedAttempt:
        plan, division = self.plan, self.division
        if deploy.parallelism != self.parallelism:
            plan = replan(plan, deploy.parallelism)
            division = recovery_division(plan, self.config.recovery)
        if deploy.shadows:
            plan = shadowed_plan(plan, self.shadow_dir)
        seal = shown(deploy.key, self.secret)
        guarded = guarded_plan(plan, Guard(seal, self.config.file_access))
        known = {"plan": guarded, "parallelism": deploy.parallelism, "division": division}
        return Attempt(deploy, worker, replace(self, **known, store=self.store.sealed(seal)))

    def open_copies(self, report: Callable[[CopiesHeld], None], note: Callable[[str], None]) -> Copies | None:
        return open_copies(self.config, self.store, self.job, self.uid, self.slot, self.secret, report, note)


def run_worker(args: SlotArgs) -> str:
    """Run until the coordinator says stop; returns why it ended."""
    # The loop shares the interpreter with the network threads: a shorter turn keeps their latency low.
    interval = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)
    try:
        return Worker(args).run()
    finally:
        sys.setswitchinterval(interval)


class Worker:
    """The mailbox loop of one process."""

    def __init__(self, args: SlotArgs) -> None:
        self.args = args
        self.signal = Signal()
        self._mailbox: deque[Any] = deque()
        self._attempts: dict[int, ConnectedAttempt] = {}
        """By region; replaced, never changed: threads of the data server look into it."""
        self._dropped = False
        """Of attempts that are no more, something may still be in memory."""
        self._end: str | None = None
        self._reported_s = 0.0
        self.link = dial_coordinator(
            args.address,
            args.secret,
            args.job,
            args.slot,
            self.post,
            lambda reason: self.post(_LinkLost(reason)),
            heartbeat_s=args.config.heartbeat_interval_ms / 1000,
        )
        self._notes: list[str] = []  # for the driver, once it knows this worker
        self.copies = args.open_copies(self.link.send, self._notes.append)
        self.data_server = DataServer(
            Peer("data", args.uid, args.slot),
            args.secret,
            self._check_peer,
            self._accepted,
            host=self.link.local_host,
            max_frame_bytes=args.config.max_frame_bytes,
            on_copies=self.copies.serve if self.copies is not None else None,
        )

    def post(self, message: Any) -> None:
        """Put something into the mailbox (any thread)."""
        self._mailbox.append(message)
        self.signal.set()

    @property
    def called(self) -> bool:
        """A message waits: who works should come to an end soon."""
        return bool(self._mailbox)

    def run(self) -> str:
        address = self.data_server.address
        self.data_server.start()
        self.link.start()
        left = self.copies.files if self.copies is not None else []
        self.link.send(c.Hello(self.args.slot, os.getpid(), socket.gethostname(), address, left))
        for note in self._notes:
            self.link.send(c.Log("info", note))
        try:
            with log_to_driver(self.link.send, self.args.config.worker_log_level):
                while self._end is None:
                    self._turn()
        finally:
            self._drop(self._attempts)
            self.data_server.close()
            if self.copies is not None:
                self.copies.close()
            self.link.close(_LINGER_S)
        return self._end

    # ---------------------------------------------------------------------------------------------------- the loop

    def _turn(self) -> None:
        while self._mailbox:
            self._take(self._mailbox.popleft())
        if self._end is not None:
            return
        self._free()
        now_s = time.monotonic()
        sleep_s = _MAX_SLEEP_S
        attempts = self._attempts
        for attempt in attempts.values():
            if attempt.running:
                got = self._guarded(attempt, attempt.round, now_s)
                sleep_s = min(sleep_s, got) if got is not None else 0.0
        if attempts and now_s - self._reported_s >= _REPORT_S:
            self._reported_s = now_s
            self._report()
        if sleep_s > 0 and not self._mailbox:
            started = time.monotonic()
            self.signal.wait(sleep_s)
            slept_s = time.monotonic() - started
            for attempt in attempts.values():
                attempt.rested = True
                attempt.idle_s += slept_s

    def _guarded(self, attempt: ConnectedAttempt, function: Any, argument: Any) -> Any:
        """Call; a failure of the attempt goes to the coordinator, the process stays."""
        try:
            return function(argument)
        except Exception as e:
            self._fail(attempt.number, attempt.region, e)
            return None

    def _fail(self, number: int, region: int, error: BaseException) -> None:
        """Report a failure of the attempt of a region and drop it; those of other regions go on."""
        self.report(error, number, region)
        self._drop([region])

    def report(self, error: BaseException, number: int, region: int) -> None:
        """Tell the coordinator of a failure of the attempt of a region, which may be another worker's."""
        self._report()  # a peer that stopped first looks like a lost one: what this worker did counts all the same
        ours = isinstance(error, CutwaterError)
        self.link.send(
            c.Failure(
                attempt=number,
                kind=type(error).__name__ if ours else "InvariantError",
                message=error.message if ours else f"{type(error).__name__}: {error}",
                step=(error.step or "") if ours else "",
                vertex=-1,
                subtask=self.args.slot,
                traceback=_story(error),
                retryable=not isinstance(error, FencedError),
                hint=error.hint if ours else "",
                secondary=isinstance(error, WireError),
                region=region,
            )
        )

    def _report(self) -> None:
        for attempt in self._attempts.values():
            if not attempt.building:
                self.link.send(attempt.metrics())

    # ---------------------------------------------------------------------------------------------------- messages

    def _take(self, message: Any) -> None:
        match message:
            case c.Deploy() | NetworkDeploy():
                self._deploy(message)
            case c.Reset(regions=regions):
                self._drop(self._attempts if regions is None else regions)
            case Posted(attempt=attempt, message=posted):
                self._deliver(attempt, posted)
            case Built(attempt=attempt, error=error):
                self._built(attempt, error)
            case CopyPlaces():
                if self.copies is not None:
                    self.copies.placed(message)
            case c.Stop(reason=reason):
                for attempt in self._attempts.values():  # whoever stops a job finds all of its last checkpoint
                    attempt.finish()
                self._report()  # the last counts
                self._end = reason
            case _LinkLost(reason=reason):
                self._end = f"lost the coordinator: {reason}"
            case _:  # what the coordinator says to an attempt, it says to those that survived it, too
                for attempt in self._attempts.values():
                    if message.attempt >= attempt.number:
                        self._deliver(attempt, message)

    def _deliver(self, attempt: ConnectedAttempt, message: object) -> None:
        if self._attempts.get(attempt.region) is not attempt:
            return
        if attempt.building:
            attempt.early.append(message)
        else:
            self._guarded(attempt, attempt.take, message)

    def _deploy(self, deploy: c.Deploy | NetworkDeploy) -> None:
        region = 0 if isinstance(deploy, NetworkDeploy) else deploy.region
        self._drop([region])
        self._free()
        try:
            attempt = self.args.attempt(deploy, self)
        except Exception as e:
            self._fail(deploy.attempt, region, e)
            return
        self._attempts = {**self._attempts, region: attempt}
        if len(self._attempts) == 1 and not attempt.has_company:
            self._built(attempt, attempt.try_build())
        else:  # other regions go on meanwhile, or are built
            attempt.build_aside()

    def _built(self, attempt: ConnectedAttempt, error: Exception | None) -> None:
        if self._attempts.get(attempt.region) is not attempt:
            return
        attempt.building = False
        if error is None:
            self.link.send(c.Ready(attempt.number, attempt.region))
            for message in attempt.early:
                self._deliver(attempt, message)
        elif isinstance(error, InterruptedBuildError):
            self._drop([attempt.region])
        else:
            self._fail(attempt.number, attempt.region, error)

    def wants_something_else(self, region: int) -> bool:
        """A message waits that makes what is being built for a region useless."""
        return any(_ends(message, region) for message in list(self._mailbox))

    def _check_peer(self, peer: Peer) -> Refusal | None:
        if peer.job != self.args.uid or peer.role not in ("data", "copies"):
            return Refusal("this is a worker of another job")
        if peer.role == "copies":  # they depend on no attempt: files have names of their own, and digests
            return None if self.copies is not None else Refusal("no copies are kept here")
        attempt = self._attempts.get(peer.region)
        return attempt.check_peer(peer) if attempt is not None else Refusal("nothing is deployed here yet", later=True)

    def _accepted(self, connection: Connection) -> None:
        attempt = self._attempts.get(connection.peer.region)
        if attempt is None or attempt.check_peer(connection.peer) is not None:
            connection.close()
            return
        attempt.accept(connection)

    def _drop(self, regions: Iterable[int]) -> None:
        dropped = [self._attempts[region] for region in regions if region in self._attempts]
        self._attempts = {region: a for region, a in self._attempts.items() if a not in dropped}
        for attempt in dropped:
            attempt.abandon()
            with contextlib.suppress(Exception):  # the failure that led here is reported already
                attempt.close()
            self._dropped = True

    def _free(self) -> None:
        """Free what was dropped, which refers to itself: the next attempt wants that memory, whose pages are there."""
        if self._dropped:
            self._dropped = False
            gc.collect()


@dataclass(frozen=True, slots=True)
class _LinkLost:
    reason: str


def _ends(message: Any, region: int) -> bool:
    """Whether the coordinator says that it wants nothing more of what runs for a region."""
    match message:
        case c.Reset(regions=regions):
            return regions is None or region in regions
        case c.Deploy():
            return message.region == region
        case c.Stop() | NetworkDeploy() | _LinkLost():
            return True
        case _:
            return False


def _story(error: BaseException) -> str:
    """Our own errors say all there is to say (a user's traceback is part of the message); others need theirs."""
    return "" if isinstance(error, CutwaterError) else "".join(traceback.format_exception(error))


LINES_PER_S = 100
"""A function that logs each of a million rows must not drown the driver: of what comes faster it gets the number."""


@contextmanager
def log_to_driver(send: Callable[[c.Log], None], level: LogLevelName) -> Generator[None]:
    """Send what this process logs, from this level on.

    Spark gives a process to the next task when this one is done: so all is as before afterwards.
    """
    root = logging.getLogger()
    handler, before = _ToDriver(send), root.level
    root.addHandler(handler)
    root.setLevel(level.upper())
    try:
        yield
    finally:
        root.setLevel(before)
        root.removeHandler(handler)


class _ToDriver(logging.Handler):
    def __init__(self, send: Callable[[c.Log], None]) -> None:
        super().__init__()
        self._send = send
        self._second, self._lines, self._left_out = 0, 0, 0

    def emit(self, record: logging.LogRecord) -> None:
        """Send one line; what a console sink shows is output, and comes whole."""
        if record.name == CONSOLE_LOGGER:
            self._send(c.Log(c.CONSOLE, self.format(record)))
            return
        second = int(time.monotonic())
        if second != self._second:
            left_out, self._second, self._lines, self._left_out = self._left_out, second, 0, 0
            if left_out:
                self._send(c.Log("warning", f"{left_out:,} lines of this worker's log were left out: it logs too much"))
        self._lines += 1
        if self._lines > LINES_PER_S:
            self._left_out += 1
        else:
            self._send(c.Log(record.levelname.lower(), self.format(record)))

"""One simulated driver: performs what the core decides over a job, with workers, storage and users of its world.

Its thread is a clock and the queue of what it hears; its group says who fills which slot, and gets the slots filled.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING, Any

from cutwater.protocol import messages as m
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.checkpoint.loops import SendVerdict
from cutwater.protocol.job import messages as j
from cutwater.protocol.job import rescale as r
from cutwater.protocol.job.core import JobCore
from cutwater.protocol.job.hosts import Topology
from cutwater.protocol.job.restart_budget import RestartDecider
from cutwater.protocol.protocols import CheckpointKind
from cutwater.sim.world.disk import Done
from cutwater.sim.world.driver_storage import DriverStorage
from cutwater.sim.world.worker import SimWorker

if TYPE_CHECKING:
    from cutwater.sim.world.attempt import Attempt
    from cutwater.sim.world.world import World

HEARTBEAT_TIMEOUT_MS = 40.0
_KINDS = {
    "checkpoint": CheckpointKind.ON_DEMAND,
    "savepoint": CheckpointKind.SAVEPOINT,
    "stop": CheckpointKind.ON_DEMAND,
    "stop_with_savepoint": CheckpointKind.STOP_WITH_SAVEPOINT,
}
"""What a user's wish is to the core."""


class Driver:
    """A driver with its workers; performs for a ``JobCore`` as its ``JobHost`` and ``CheckpointHost``."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.dead = False
        self.outcome = ""
        self.known: dict[int, int] = {}
        """R0: of each subtask's determinant log, how much it has heard of with what its verdicts on loops rest on."""
        self.plan = world.disk.plan or world.plan_at(0)
        """The dataflow at its present parallelism."""
        self.thread = DriverThread(world, self)
        self.hear = self.thread.hear
        self.core = self.make_core()
        self._changed = False
        """The coordinator did more than to take an acknowledgement."""
        self._storage = DriverStorage(self, world.goes_back)
        world.goes_back = 0
        self._deployed: Attempt | None = None
        self._group = DriverGroup(self)

    def make_core(self) -> JobCore:
        """What decides over the job, before anything has happened."""
        world, plan = self.world, self.plan
        return world.job_core_class(
            self,
            self,
            world.settings,
            plan.topology,
            RestartDecider(world.schedule.restart, random.Random(self.number)),
            r.Rescaler(r.Shape(plan.parallelism, plan.graph.workers), deadline_ms=1e12),
            attempt=world.disk.owner,
            catch_up_ms=float("inf") if world.keeps_order else None,
            coordinator=world.coordinator_class,
            monitor=world.monitor_class,
        )

    # ------------------------------------------------------------------------------------------------------ its life

    @property
    def over(self) -> bool:
        return self.dead or bool(self.outcome)

    @property
    def workers(self) -> dict[int, SimWorker]:
        """The worker of each slot that has one."""
        return self._group.workers

    def kill(self) -> None:
        """SIGKILL.  Its workers see the connection end, some a little later than others."""
        self.dead = True
        self.world.disk.crash(self)
        for worker in self.workers.values():
            worker.to_driver.dead = True
            self.world.after(self.world.draws.below(16), lambda _, w=worker: w.kill())

    def lose(self, worker: SimWorker) -> None:
        """The worker's connection ended, or it was silent for too long."""
        self.hear(("lost", worker))

    def fenced(self) -> None:
        """Another driver owns the job: stop, commit nothing."""
        self.world.seen["fenced driver"] += 1
        self.end(j.Outcome.FAILED, "another driver owns the job")

    def end(self, outcome: j.Outcome, reason: str) -> None:
        """The job is to end."""
        self.core.handle(j.EndRequested(outcome, reason, self.thread.clock_ms))

    # -------------------------------------------------------------------------------------------------- its messages

    def take(self, message: tuple[Any, ...]) -> bool:
        """Act on a message; false if ``next_due_ms`` cannot be sooner than before."""
        sooner = self._act(message)
        looks = not self.thread.waits and not self.over
        return (looks and self.core.look(self.thread.clock_ms)) or sooner

    def _act(self, message: tuple[Any, ...]) -> bool:
        kind = message[0]
        if kind == "lost":
            self._group.lost(message[1])
        elif kind == "tick":
            self.core.on_time(self.thread.clock_ms)
        elif kind == "request":
            self._asked(message[1], message[2])
        elif message[1] == "joined":
            self._group.joined(message[0])
        else:
            return self._heard(*message)
        return True

    def _asked(self, what: str, place: int) -> None:
        """A user wants something."""
        core, now_ms = self.core, self.thread.clock_ms
        if what in ("cancel", "go_back"):
            if what == "go_back":
                self.world.goes_back = 1 + place % 2
            self.end(j.Outcome.CANCELLED, "cancelled by the user")
        elif what != "rescale":
            wish = "savepoint" if what == "burst" else what
            for _ in range(2 + place % 4 if what == "burst" else 1):
                core.request(_KINDS[wish], wish, now_ms)
        elif self.world.row.name != "none":
            self.world.strike("rescale")
            core.request_rescale(self._group.shape_at(place), "rescale", now_ms)

    def _heard(self, worker: SimWorker, kind: str, attempt: int, *rest: Any) -> bool:
        core, plan, now_ms = self.core, self.plan, self.thread.clock_ms
        if not core.hears(worker.slot, worker.incarnation, attempt, self._region(kind, rest)):
            self.world.seen["fenced message"] += 1
            return False
        if kind == "ready":
            core.handle(j.WorkerReady(worker.slot, attempt, now_ms, rest[0]))
        elif kind == "failed":
            core.handle(j.TaskFailed(attempt, "a function raised an exception", True, now_ms, rest[0]))
        elif kind == "caught_up":
            core.caught_up([plan.name_of(rest[0])], now_ms)
        elif kind == "finished":
            core.handle(j.SubtaskFinished(attempt, plan.name_of(rest[0]), now_ms))
        elif kind == "ack":
            subtask, self._changed = plan.name_of(rest[1]), False
            if rest[3] is not None:
                self._hear_of(rest[4])
            reports = [(subtask, rest[3])] if rest[3] is not None else []
            core.acknowledged(rest[0], [(subtask, rest[2])], reports, now_ms)
            return self._changed
        elif kind == "probe":
            core.probe_wanted(plan.name_of(rest[0]), now_ms)
        elif kind == "decline":
            id, task, reason, detail = rest
            core.declined(id, plan.name_of(task), reason, detail, now_ms)
        elif kind == "committed":
            places = [place for place in core.machine.parts if place[0] == worker.slot]
            core.committed(places, rest[0], now_ms)
        return True

    def _hear_of(self, known: dict[int, int] | None) -> None:
        """A verdict on a loop will rest on these choices (R0)."""
        for task, choices in (known or {}).items():
            self.known[task] = max(choices, self.known.get(task, 0))

    def _region(self, kind: str, rest: tuple[Any, ...]) -> int | None:
        """The region that a message is about; ``None``: all."""
        if kind == "committed":
            return None
        if kind in ("ready", "failed"):
            return rest[0]
        task, region_of = rest[1] if kind in ("ack", "decline") else rest[0], self.plan.region_of
        return region_of[task] if task < len(region_of) else -1

    # ------------------------------------------------------------------------------------- attempts: see ``JobHost``

    @property
    def cores(self) -> frozenset[int]:
        """None: slots that have a worker are known."""
        return frozenset()

    def begin(self, attempt: int, regions: tuple[int, ...] | None) -> None:
        if regions is None:
            self.known.clear()  # not before: until it has a number of its own the old one's are heard
        self._storage.begin(attempt, regions or ())

    def deploy(self, attempt: int, restored: Done | None, regions: tuple[int, ...]) -> None:
        """Tell the workers what to begin with."""
        world = self.world
        self.core.log_taken(world.disk.newest_id())
        before = None if regions == self.plan.everything else self._deployed
        self._deployed = world.attempt_class(world, self.plan, attempt, self.core.last_id, restored, regions, before)
        world.attempts[attempt] = self._deployed
        self._group.broadcast("deploy", self._deployed)

    def start_rows(self, attempt: int, regions: tuple[int, ...] | None) -> None:
        self.world.seen["started" if regions is None else "regions restarted"] += 1
        self._group.broadcast("start", attempt)

    def runs(self) -> None:
        """Nobody looks at a simulated job."""

    def going_back(self, reason: str, regions: tuple[int, ...] | None) -> None:
        self.world.seen["restart" if regions is None else "regions stopped"] += 1

    def reset(self, regions: tuple[int, ...] | None) -> None:
        self._group.broadcast("reset", self.core.machine.attempt, self.plan.everything if regions is None else regions)

    def overdue(self, slots: list[int]) -> None:
        raise AssertionError("there is no end to the time that simulated workers have to catch up")

    def recruit(self, workers: int) -> None:
        self._group.recruit(workers)

    def dismiss(self) -> None:
        self._group.resize(self.plan.graph.workers)

    def switch(self, shape: r.Shape, reason: str) -> Topology:
        if self.core.machine.waits:
            self.world.seen["rescaled while it waited"] += 1
        self.plan = self.world.plan_at(shape.parallelism)
        self._group.resize(shape.workers)
        return self.plan.topology

    def shut_down(self, outcome: j.Outcome, reason: str) -> None:
        self._group.broadcast("leave")
        self.core.handle(j.WorkersGone(self.thread.clock_ms))

    def job_over(self, outcome: j.Outcome, reason: str) -> None:
        self.outcome = outcome.value
        if outcome is j.Outcome.FINISHED:
            self._storage.finish()
        self.world.ended(self, reason)

    def note(self, text: str) -> None:
        """No simulated user reads."""

    def rescaled(self, request: Hashable, error: str) -> None:
        self.world.seen["not rescaled" if error else "rescaled"] += 1

    # --------------------------------------------------------------------------- checkpoints: see ``CheckpointHost``

    def trigger(self, effect: cm.SendTrigger) -> None:
        probe = effect.kind is CheckpointKind.PROBE
        attempt, id = self.core.machine.attempt, effect.checkpoint_id
        self._group.broadcast("trigger", attempt, id, effect.final, probe, effect.savepoint)

    def drain(self) -> None:
        raise AssertionError("no simulated user drains a job")

    def verdict(self, verdict: SendVerdict) -> None:
        self.world.seen["loop ended" if verdict.ended else "loop quiet"] += 1
        told = m.LoopVerdict(verdict.checkpoint_id, verdict.ended, verdict.watermark)
        loop = self.plan.graph.loop_tasks[verdict.loop]
        self._group.broadcast("verdict", self.core.machine.attempt, loop, told)

    def publish(self, effect: cm.Publish) -> None:
        self._storage.publish(effect)

    def completed(self, checkpoint_id: int, kind: CheckpointKind) -> None:
        self.world.completed += 1

    def complete(self, effect: cm.NotifyComplete) -> None:
        attempt, kind = self.core.machine.attempt, effect.kind
        self._group.broadcast("complete", attempt, effect.checkpoint_id, effect.commit, kind.final)

    def stopped_behind(self, checkpoint_id: int) -> None:
        self.end(j.Outcome.STOPPED, "stopped with a savepoint")

    def abort(self, effect: cm.NotifyAborted) -> None:
        attempt, id = self.core.machine.attempt, effect.checkpoint_id
        self.world.seen[f"aborted: {effect.reason.code}"] += 1
        self.world.note("aborted", 0, attempt, id)
        self._group.broadcast("abort", attempt, id, effect.latest_completed)

    def stopped(self, reason: str) -> None:
        """Savepoints without a checkpoint behind them are forgotten when the next attempt begins."""

    def acknowledged(self, effect: cm.AckAnswered) -> None:
        self.world.seen[f"ack {effect.answer.value}"] += 1
        if not self._changed:
            self._validate()

    def answered(self, answer: cm.RequestAnswered) -> None:
        if answer.request_id == "stop":
            self.end(j.Outcome.STOPPED, "stopped by the user")

    def too_many_failed(self, effect: cm.FailJob) -> None:
        self._failed(effect.detail)

    def in_doubt(self, checkpoint_id: int) -> None:
        self._failed("it is not known what was published")

    def _failed(self, reason: str) -> None:
        self.core.handle(j.TaskFailed(self.core.machine.attempt, reason, True, self.thread.clock_ms))

    def changed(self) -> None:
        self._changed = True
        self._validate()

    def _validate(self) -> None:
        if self.core.checkpoints is not None:
            self.core.checkpoints.validate()


class DriverThread:
    """Has the driver take messages one at a time, none while it is stopped or waits for the log."""

    def __init__(self, world: World, driver: Driver) -> None:
        self._world, self._driver = world, driver
        self._skew_ms = 0.0
        self._pauses = 0
        self.waits = False
        """It waits for storage, and hears nothing."""
        self._inbox: list[tuple[Any, ...]] = []
        self._held: list[Callable[[], None]] = []
        self._due_ms = float("inf")

    # ------------------------------------------------------------------------------------------------- what it hears

    def hear(self, message: tuple[Any, ...]) -> None:
        """A message arrives: of a worker, a user, or its own clock."""
        if self._driver.over:
            return
        if self.waits or self._pauses:
            self._inbox.append(message)
            return
        if self._driver.take(message):
            self._set_timer()

    def pause(self) -> None:
        """Stop, as a process does whose machine sleeps."""
        self._pauses += 1

    def resume(self) -> None:
        """Run again."""
        self._pauses -= 1
        held, self._held = self._held, []
        for call in held:
            call()
        self.go_on()

    def wait(self) -> None:
        """Hear nothing until ``go_on``."""
        self.waits = True

    def stop_waiting(self) -> None:
        """Storage has answered; ``go_on`` takes what has come meanwhile."""
        self.waits = False

    def go_on(self) -> None:
        """Take what has come meanwhile."""
        while self._inbox and not self.waits and not self._pauses and not self._driver.over:
            self.hear(self._inbox.pop(0))
        if not self.waits and not self._pauses:
            self.hear(("tick",))

    def when_awake(self, call: Callable[..., None]) -> Callable[..., None]:
        """The answer of storage is acted on when the process runs, and never by a dead one."""
        return partial(self._answered, call)

    def _answered(self, call: Callable[..., None], *answer: Any) -> None:
        if self._driver.over:
            return
        if self._pauses:
            self._held.append(partial(self._answered, call, *answer))
        else:
            call(*answer)

    # ----------------------------------------------------------------------------------------------------- its clock

    @property
    def clock_ms(self) -> float:
        """The driver's own clock."""
        return self._world.now + self._skew_ms

    def _set_timer(self) -> None:
        if self._driver.over:
            return
        due = self._driver.core.next_due_ms
        if due is None or due > 1e11:
            return
        world = self._world
        at = max(due - self._skew_ms, world.now) + 0.01
        if at < self._due_ms or self._due_ms <= world.now:
            self._due_ms = at
            world.at(at, self._timer, at)

    def _timer(self, at: float) -> None:
        if at == self._due_ms:
            self._due_ms = float("inf")
            self.hear(("tick",))

    def jump(self, by_ms: float) -> None:
        """The clock jumps."""
        self._skew_ms += by_ms
        self._due_ms = float("inf")
        self.hear(("tick",))


class DriverGroup:
    """Starts workers, hears of those that come and go, and sends them away."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._world = driver, driver.world
        self.workers: dict[int, SimWorker] = {}
        self._incarnations: defaultdict[int, int] = defaultdict(int)
        self._wanted = 0
        """Slots that are to be filled."""
        self.recruit(driver.plan.graph.workers)

    def recruit(self, workers: int) -> None:
        """Start a process for every slot up to this number."""
        first, self._wanted = self._wanted, max(self._wanted, workers)
        for slot in range(first, self._wanted):
            self._launch(slot)

    def _launch(self, slot: int) -> None:
        self._incarnations[slot] += 1
        worker = SimWorker(self._world, self._driver, slot, self._incarnations[slot])
        self._world.workers.append(worker)
        self._world.cores.start(worker, lambda: self._boot(worker))

    def _boot(self, worker: SimWorker) -> None:
        self._world.after(2.0 + self._world.draws.below(16), self._booted, worker)

    def _booted(self, worker: SimWorker) -> None:
        if not worker.dead:
            worker.tell("joined", None)

    def joined(self, worker: SimWorker) -> None:
        """A worker says that it is there."""
        known = self.workers.get(worker.slot)
        if worker.slot >= self._wanted:
            worker.from_driver.send(("leave",))
        elif known is None or known.incarnation < worker.incarnation:
            self.workers[worker.slot] = worker
            driver = self._driver
            driver.core.handle(j.WorkerJoined(worker.slot, worker.incarnation, driver.thread.clock_ms))

    def lost(self, worker: SimWorker) -> None:
        """The worker's connection ended, or it was silent for too long: fill its slot again."""
        if self.workers.get(worker.slot) is worker:
            driver = self._driver
            del self.workers[worker.slot]
            worker.from_driver.dead = True
            self._world.seen["worker lost"] += 1
            if worker.slot < self._wanted:
                self._launch(worker.slot)
            lost = j.WorkerLost(worker.slot, worker.incarnation, "connection ended", driver.thread.clock_ms)
            driver.core.handle(lost)
            self._world.after(self._world.draws.below(64), lambda _: worker.kill())  # it is told that it was replaced

    def broadcast(self, *message: Any) -> None:
        """Tell all of them."""
        for worker in self.workers.values():
            worker.from_driver.send(message)

    def resize(self, workers: int) -> None:
        """There are so many slots from now on: workers beyond leave, and missing ones are started."""
        self.recruit(workers)
        self._wanted = workers
        self._world.cores.withdraw(self._driver, workers)
        for slot in [s for s in self.workers if s >= workers]:
            self.workers.pop(slot).from_driver.send(("leave",))

    def shape_at(self, place: int) -> r.Shape:
        """The shape that a user asks for."""
        parallelism = 1 + place % 3
        return r.Shape(parallelism, self._world.plan_at(parallelism).graph.workers)

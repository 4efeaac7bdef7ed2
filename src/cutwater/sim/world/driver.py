"""One simulated driver: performs what the core decides over a job, with workers, storage and users of its world."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from cutwater.protocol import messages as m
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.checkpoint.loops import SendVerdict
from cutwater.protocol.job import messages as j
from cutwater.protocol.job import rescale as r
from cutwater.protocol.job.core import JobCore
from cutwater.protocol.job.hosts import Topology
from cutwater.protocol.job.restart import RestartDecider
from cutwater.protocol.protocols import CheckpointKind
from cutwater.sim.world.disk import Done
from cutwater.sim.world.driver_group import DriverGroup
from cutwater.sim.world.driver_storage import DriverStorage
from cutwater.sim.world.driver_thread import DriverThread
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

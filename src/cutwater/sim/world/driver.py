"""One simulated driver: job machine, checkpoint coordinator and loop monitor, performed as the runtime does it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from cutwater.protocol import messages as m
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.checkpoint.coordinator import CheckpointCoordinator
from cutwater.protocol.checkpoint.loops import (
    LoopEvent,
    LoopReported,
    ProbeWanted,
    StartProbe,
    WaveCompleted,
    WaveFailed,
)
from cutwater.protocol.job import messages as j
from cutwater.protocol.job.machine import JobMachine
from cutwater.protocol.job.rescale import AttemptFailed, AttemptRuns
from cutwater.protocol.job.restart import RestartDecider
from cutwater.protocol.reasons import CheckpointKind
from cutwater.sim.world.disk import Done
from cutwater.sim.world.driver_process import DriverProcess
from cutwater.sim.world.driver_rescaling import DriverRescaling
from cutwater.sim.world.driver_storage import DriverStorage
from cutwater.sim.world.worker import SimWorker

if TYPE_CHECKING:
    from cutwater.sim.schedules.graphs import Plan
    from cutwater.sim.world.attempt import Attempt
    from cutwater.sim.world.world import World

HEARTBEAT_TIMEOUT_MS = 40.0
_KINDS = {
    "checkpoint": CheckpointKind.ON_DEMAND,
    "savepoint": CheckpointKind.SAVEPOINT,
    "stop": CheckpointKind.ON_DEMAND,
    "stop_with_savepoint": CheckpointKind.STOP_WITH_SAVEPOINT,
}
"""What a user's wish is to the coordinator."""


class Driver(DriverProcess):
    """A driver with its workers."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, number)
        graph = self.plan.graph
        self.machine = JobMachine(
            graph.workers,
            frozenset(graph.tasks),
            RestartDecider(world.schedule.restart, random.Random(number)),
            attempt=world.disk.owner,
            regions=self.plan.division.regions,
            upstream=self.plan.division.upstream,
        )
        self._coordinator: CheckpointCoordinator | None = None
        self.monitor = world.new_monitor(self.plan)
        self._rescaling = DriverRescaling(self)
        self._storage = DriverStorage(self, world.goes_back)
        world.goes_back = 0
        self._last: tuple[int, CheckpointKind] | None = None
        """The checkpoint after whose commit nothing is left to do, or the job stops."""
        self._committing: set[int] = set()
        self._deployed: Attempt | None = None
        self._behind: set[int] = set()
        """Subtasks that send again what others have."""
        for slot in range(graph.workers):
            self.launch(slot)

    @property
    def coordinator(self) -> CheckpointCoordinator:
        """Made when the log is taken: only then is the highest id known for good."""
        if self._coordinator is None:
            world = self.world
            graph = self.plan.graph
            tasks = frozenset(range(len(graph.tasks)))
            self._coordinator = world.coordinator_class(world.settings, tasks, graph.sources, world.disk.newest_id())
        return self._coordinator

    def reshape(self, plan: Plan, reason: str) -> None:
        """From the next attempt on the dataflow has another parallelism; what runs ends here."""
        if self._coordinator is not None:
            self.coordinate(cm.JobStopped(reason, self.clock_ms))
            self._coordinator.reshape(frozenset(range(len(plan.graph.tasks))), plan.graph.sources)
        self.broadcast("reset", self.machine.attempt, self.plan.everything)
        self.plan = plan
        self._behind.clear()

    # -------------------------------------------------------------------------------------------------- its messages

    def take(self, message: tuple[Any, ...]) -> bool:
        sooner = self._act(message)
        return (not self._waits and self._rescaling.look()) or sooner

    def _act(self, message: tuple[Any, ...]) -> bool:
        kind = message[0]
        if kind == "lost":
            self._lost(message[1])
        elif kind == "tick":
            self._tick()
        elif kind == "request":
            self._asked(message[1], message[2])
        elif kind == "snapshot":
            self._rescaling.snapshot_ended(message[1])
        else:
            return self._heard(*message)
        return True

    def _asked(self, what: str, place: int) -> None:
        """A user wants something."""
        if what in ("cancel", "go_back"):
            if what == "go_back":
                self.world.goes_back = 1 + place % 2
            self.job(j.EndRequested(j.Outcome.CANCELLED, "cancelled by the user", self.clock_ms))
        elif what == "rescale":
            self._rescaling.asked(place)
        elif self._coordinator is not None:
            wish = "savepoint" if what == "burst" else what
            for _ in range(2 + place % 4 if what == "burst" else 1):
                self.coordinate(cm.RequestCheckpoint(self.clock_ms, _KINDS[wish], wish))

    def _heard(self, worker: SimWorker, kind: str, attempt: int | None, *rest: Any) -> bool:
        if kind == "joined":
            known = self.workers.get(worker.slot)
            if worker.slot >= self._rescaling.wanted:
                worker.from_driver.send(("leave",))
            elif known is None or known.incarnation < worker.incarnation:
                self.workers[worker.slot] = worker
                self.job(j.WorkerJoined(worker.slot, worker.incarnation, self.clock_ms))
            return True
        region, current = self._region(kind, attempt or 0, rest)
        if not current or self.workers.get(worker.slot) is not worker:
            self.world.seen["fenced message"] += 1
            if self.world.fences:
                return False
        now = self.clock_ms
        if current and kind in ("ack", "decline"):
            attempt = self.coordinator.attempt_of(rest[0])
        if kind == "ready":
            self.job(j.WorkerReady(worker.slot, attempt or 0, now, region))
        elif kind == "failed":
            self.job(j.TaskFailed(attempt or 0, "a function raised an exception", True, now, region))
        elif kind == "caught_up" and rest[0] in self._behind:
            self._behind.discard(rest[0])
            self._resume()
        elif kind == "finished":
            self.job(j.SubtaskFinished(attempt or 0, self.plan.graph.tasks[rest[0]]))
        elif kind == "ack":
            if rest[3] is not None:
                self._hear_of(rest[4])
                self._watch_loops(LoopReported(rest[0], rest[1], rest[3]))
            return self.coordinate(cm.AckReceived(rest[0], attempt or 0, rest[1], rest[2], now)) > 1
        elif kind == "probe":
            self._watch_loops(ProbeWanted(rest[0], now))
        elif kind == "decline":
            id, task, reason, detail = rest
            self.coordinate(cm.DeclineReceived(id, attempt or 0, task, reason, now, detail))
        elif kind == "committed" and self._last is not None and rest[0] == self._last[0]:
            self._committing.discard(worker.slot)
            if not self._committing:
                self._all_committed(self._last[1])
        return True

    def _hear_of(self, known: dict[int, int] | None) -> None:
        """A verdict on a loop will rest on these choices (R0)."""
        for task, choices in (known or {}).items():
            self.known[task] = max(choices, self.known.get(task, 0))

    def _region(self, kind: str, attempt: int, rest: tuple[Any, ...]) -> tuple[int, bool]:
        """The region that a message is about, and whether it belongs to that one's present attempt."""
        if kind == "committed":
            return 0, attempt == self.machine.attempt
        if kind in ("ready", "failed"):
            region = rest[0]
        else:
            task, region_of = rest[1] if kind in ("ack", "decline") else rest[0], self.plan.region_of
            region = region_of[task] if task < len(region_of) else -1
        return region, self.machine.is_current(attempt, region)

    def _all_committed(self, kind: CheckpointKind) -> None:
        if kind is CheckpointKind.FINAL:
            self.job(j.FinalCommitted(self.machine.attempt))
        else:
            self.job(j.EndRequested(j.Outcome.STOPPED, "stopped with a savepoint", self.clock_ms))

    def _lost(self, worker: SimWorker) -> None:
        if self.workers.get(worker.slot) is worker:
            del self.workers[worker.slot]
            worker.from_driver.dead = True
            self.world.seen["worker lost"] += 1
            if worker.slot < self._rescaling.wanted:
                self.launch(worker.slot)
            self.job(j.WorkerLost(worker.slot, worker.incarnation, "connection ended", self.clock_ms))
            self.world.after(self.world.draws.below(64), lambda _: worker.kill())  # it is told that it was replaced

    def broadcast(self, *message: Any) -> None:
        for worker in self.workers.values():
            worker.from_driver.send(message)

    # ----------------------------------------------------------------------------------------------------- its clock

    def next_due_ms(self) -> float | None:
        due = self.machine.next_due_ms
        if self.machine.phase in (j.JobPhase.RUNNING, j.JobPhase.DRAINING):
            for wanted in (self.coordinator.next_due_ms, self.monitor.next_due_ms):
                if wanted is not None and (due is None or wanted < due):
                    due = wanted
        return due

    def _tick(self) -> None:
        due = self.machine.next_due_ms
        if due is not None and due <= self.clock_ms:
            self.job(j.Tick(self.clock_ms))
        if not self._waits and not self.over and self.machine.phase in (j.JobPhase.RUNNING, j.JobPhase.DRAINING):
            due = self.coordinator.next_due_ms
            if due is not None and due <= self.clock_ms:
                self.coordinate(cm.Tick(self.clock_ms))
            due = self.monitor.next_due_ms
            if due is not None and due <= self.clock_ms:
                self._watch_loops(cm.Tick(self.clock_ms))

    # ----------------------------------------------------------------------------------------- effects of the machines

    def job(self, event: j.Event) -> None:
        for effect in self.machine.handle(event):
            match effect:
                case j.BeginAttempt(attempt=attempt):
                    self.known.clear()  # not before: until it has a number of its own the old one's are heard
                    self._storage.begin(attempt)
                case j.StartProcessing(attempt=attempt):
                    self.broadcast("start", attempt)
                    self.monitor = self.world.new_monitor(self.plan)
                    self.coordinate(cm.JobRunning(attempt, self.clock_ms))
                    self._rescaling.handle(AttemptRuns(self.clock_ms))
                case j.StopAttempt(reason=reason):
                    self.world.seen["restart"] += 1
                    self._behind.clear()
                    if self._coordinator is not None:
                        self.coordinate(cm.JobStopped(reason, self.clock_ms))
                    self.broadcast("reset", self.machine.attempt, self.plan.everything)
                    self._rescaling.handle(AttemptFailed(reason, self.clock_ms))
                case j.StopRegions(regions=regions, reason=reason):
                    self._stop_regions(regions, reason)
                case j.BeginRegions(attempt=attempt, regions=regions):
                    self._storage.begin(attempt, regions)
                case j.StartRegions(attempt=attempt, regions=regions):
                    self.world.seen["regions restarted"] += 1
                    self.broadcast("start", attempt)
                    if self.world.keeps_order and self.world.waits:
                        self._behind |= {t for t, region in enumerate(self.plan.region_of) if region in regions}
                    self._resume()
                case j.GroupShort() | j.Wait():
                    raise AssertionError("no simulated job is adaptive, and none hears what cores it has")
                case j.TakeFinalCheckpoint():
                    self.coordinate(cm.RequestFinal(self.clock_ms))
                case j.ShutDown():
                    if self._coordinator is not None:
                        self.coordinate(cm.JobStopped("the job ends", self.clock_ms))
                    self.broadcast("leave")
                    self.job(j.WorkersGone())
                case j.Ended(outcome=outcome, reason=reason):
                    self._end(outcome, reason)

    def _resume(self) -> None:
        """Checkpoints go on, once everything that went back is where it was."""
        if not self._behind and not self.machine.down:
            self.coordinate(cm.JobRunning(self.machine.attempt, self.clock_ms))
            self._watch_loops(WaveFailed(self.coordinator.last_id, self.clock_ms))
            self._rescaling.handle(AttemptRuns(self.clock_ms))

    def _stop_regions(self, regions: tuple[int, ...], reason: str) -> None:
        if self.coordinator.final_under_way:  # the others may have passed it, and read no more
            self.job(j.Widened(self.machine.attempt, reason, self.clock_ms))
            return
        self.coordinate(cm.JobStopped(reason, self.clock_ms, survivors=True))
        self._rescaling.handle(AttemptFailed(reason, self.clock_ms))
        self.broadcast("reset", self.machine.attempt, regions)

    def coordinate(self, event: cm.CoordinatorEvent) -> int:
        """Feed the coordinator and perform what it asks for; the number of its effects."""
        effects = self.coordinator.handle(event)
        self.coordinator.validate()
        for effect in effects:
            match effect:
                case cm.SendTrigger(checkpoint_id=id, final=final, kind=kind, savepoint=savepoint):
                    probe = kind is CheckpointKind.PROBE
                    self.broadcast("trigger", self.machine.attempt, id, final, probe, savepoint)
                case cm.Publish():
                    self._storage.publish(effect)
                case cm.NotifyComplete(checkpoint_id=id, kind=kind, commit=commit):
                    if kind.stored:
                        self._completed(id, kind)
                    self._watch_loops(WaveCompleted(id, self.clock_ms))
                    self.broadcast("complete", self.machine.attempt, id, commit, kind.final)
                case cm.NotifyAborted(checkpoint_id=id, latest_completed=latest, reason=reason):
                    self.world.seen[f"aborted: {reason.code}"] += 1
                    self.world.note("aborted", 0, self.machine.attempt, id)
                    self._watch_loops(WaveFailed(id, self.clock_ms))
                    self.broadcast("abort", self.machine.attempt, id, latest)
                case cm.FailJob(detail=detail):
                    self.job(j.TaskFailed(self.machine.attempt, detail, True, self.clock_ms))
                case cm.RequestAnswered(request_id="savepoint", reason=None):
                    follow = cm.RequestCheckpoint(self.clock_ms, CheckpointKind.ON_DEMAND, "what commits its rows")
                    self.coordinate(follow)
                case cm.RequestAnswered(request_id="rescale", reason=failed):
                    error = failed.code if failed else ""
                    self.world.after(0.0, lambda _, error=error: self.hear(("snapshot", error)))
                case cm.RequestAnswered(request_id="stop"):
                    self.job(j.EndRequested(j.Outcome.STOPPED, "stopped by the user", self.clock_ms))
                case cm.AckAnswered(answer=answer):
                    self.world.seen[f"ack {answer.value}"] += 1
                case _:
                    pass
        return len(effects)

    def _watch_loops(self, event: LoopEvent) -> None:
        for effect in self.monitor.handle(event):
            if isinstance(effect, StartProbe):
                self.world.seen["probe"] += 1
                self.coordinate(cm.RequestProbe(self.clock_ms))
            else:
                loop = self.plan.graph.loop_tasks[effect.loop]
                self.world.seen["loop ended" if effect.ended else "loop quiet"] += 1
                verdict = m.LoopVerdict(effect.checkpoint_id, effect.ended, effect.watermark)
                self.broadcast("verdict", self.machine.attempt, loop, verdict)

    def _completed(self, id: int, kind: CheckpointKind) -> None:
        self.world.completed += 1
        if kind.final:
            self._last, self._committing = (id, kind), set(range(self.plan.graph.workers))
        self.job(j.CheckpointCompleted(self.machine.attempt, self.clock_ms))

    def _end(self, outcome: j.Outcome, reason: str) -> None:
        self.outcome = outcome.value
        if outcome is j.Outcome.FINISHED:
            self._storage.finish()
        self.world.ended(self, reason)

    def deploy(self, attempt: int, restored: Done | None, regions: tuple[int, ...]) -> None:
        """Tell the workers what to begin with."""
        world = self.world
        before = None if regions == self.plan.everything else self._deployed
        self._deployed = world.attempt_class(
            world, self.plan, attempt, self.coordinator.last_id, restored, regions, before
        )
        world.attempts[attempt] = self._deployed
        self.broadcast("deploy", self._deployed)

    def fenced(self) -> None:
        """Another driver owns the job: stop, commit nothing."""
        self.world.seen["fenced driver"] += 1
        self.job(j.EndRequested(j.Outcome.FAILED, "another driver owns the job", self.clock_ms))

"""One simulated driver process: job machine, checkpoint coordinator and log, performed as the runtime does it."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

from cutwater.protocol import job_messages as j
from cutwater.protocol import messages as m
from cutwater.protocol.coordinator import CheckpointCoordinator
from cutwater.protocol.job import JobMachine
from cutwater.protocol.loops import LoopEvent, LoopReported, ProbeWanted, StartProbe, WaveCompleted, WaveFailed
from cutwater.protocol.reasons import CheckpointKind
from cutwater.protocol.restart import RestartDecider
from cutwater.sim.disk import AttemptBegan, Done, Finished
from cutwater.sim.worker import SimWorker

if TYPE_CHECKING:
    from cutwater.sim.world import World

__all__ = ["HEARTBEAT_TIMEOUT_MS", "Driver"]

HEARTBEAT_TIMEOUT_MS = 40.0
RETAINED = 3


class Driver:
    """A driver with its workers.  It takes messages one at a time and waits for the log as its thread would."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        graph = world.graph
        self.skew_ms = 0.0
        self.dead = False
        self.outcome = ""
        self.machine = JobMachine(
            graph.workers,
            frozenset(graph.tasks),
            RestartDecider(world.schedule.restart, random.Random(number)),
            group_deadline_ms=1e12,
            boot_deadline_ms=1e12,
            attempt=max((e.attempt for e in world.disk.log if type(e) is AttemptBegan), default=0),
        )
        self._coordinator: CheckpointCoordinator | None = None
        self.monitor = world.new_monitor()
        self.workers: dict[int, SimWorker] = {}
        self._incarnations = dict.fromkeys(range(graph.workers), 0)
        self._pauses = 0
        self._busy = False
        self._inbox: list[Any] = []
        self._known = 0
        self._taken = 0
        self._final_id = 0
        self._committing: set[int] = set()
        self._due_ms = float("inf")
        for slot in range(graph.workers):
            self._launch(slot)

    # ------------------------------------------------------------------------------------------------------ its life

    @property
    def clock_ms(self) -> float:
        """The driver's own clock."""
        return self.world.now + self.skew_ms

    @property
    def coordinator(self) -> CheckpointCoordinator:
        """Made when the log is taken: only then is the highest id known for good."""
        if self._coordinator is None:
            world = self.world
            tasks = frozenset(range(len(world.graph.tasks)))
            self._coordinator = world.coordinator_class(
                world.settings, tasks, world.graph.sources, world.disk.newest_id()
            )
        return self._coordinator

    @property
    def over(self) -> bool:
        return self.dead or bool(self.outcome)

    def pause(self) -> None:
        self._pauses += 1

    def resume(self) -> None:
        self._pauses -= 1
        self._drain()

    def kill(self) -> None:
        """SIGKILL.  Its workers see the connection end, some a little later than others."""
        self.dead = True
        self.world.disk.crash(self)
        for worker in self.workers.values():
            worker.to_driver.dead = True
            self.world.after(self.world.draws.below(16), lambda _, w=worker: w.kill())

    def lose(self, worker: SimWorker, reason: str) -> None:
        """The worker's connection ended, or it was silent for too long: fill its slot again."""
        self._do(("lost", worker, reason))

    def ask(self, kind: CheckpointKind) -> None:
        """A user wants a checkpoint."""
        self._do(("request", kind))

    def _launch(self, slot: int) -> None:
        self._incarnations[slot] += 1
        worker = SimWorker(self.world, self, slot, self._incarnations[slot])
        self.world.after(2.0 + self.world.draws.below(16), self._booted, worker)

    def _booted(self, worker: SimWorker) -> None:
        if not worker.dead:
            worker.tell("joined", None)

    # -------------------------------------------------------------------------------------------------- its messages

    def hear(self, message: tuple[Any, ...]) -> None:
        """A worker's message arrives."""
        self._do(message)

    def _do(self, message: tuple[Any, ...]) -> None:
        if self.over:
            return
        if self._busy or self._pauses:
            self._inbox.append(message)
            return
        kind = message[0]
        if kind == "lost":
            self._lost(message[1])
        elif kind == "tick":
            self._tick()
        elif kind == "request":
            if self._coordinator is not None:
                self._coordinate(m.RequestCheckpoint(self.clock_ms, message[1], len(self._inbox)))
        else:
            self._heard(*message)
        self._set_timer()

    def _drain(self) -> None:
        while self._inbox and not self._busy and not self._pauses and not self.over:
            self._do(self._inbox.pop(0))
        if not self.over and not self._busy and not self._pauses:
            self._do(("tick",))

    def _heard(self, worker: SimWorker, kind: str, attempt: int | None, *rest: Any) -> None:
        if kind == "joined":
            known = self.workers.get(worker.slot)
            if known is None or known.incarnation < worker.incarnation:
                self.workers[worker.slot] = worker
                self._job(j.WorkerJoined(worker.slot, worker.incarnation, self.clock_ms))
            return
        if attempt != self.machine.attempt or self.workers.get(worker.slot) is not worker:
            self.world.seen["fenced message"] += 1
            if self.world.fences:
                return
        now = self.clock_ms
        if kind == "ready":
            self._job(j.WorkerReady(worker.slot, attempt or 0, now))
        elif kind == "finished":
            self._job(j.SubtaskFinished(attempt or 0, self.world.graph.tasks[rest[0]]))
        elif kind == "ack":
            self._watch_loops(LoopReported(rest[0], rest[1], rest[3]))
            self._coordinate(m.AckReceived(rest[0], attempt or 0, rest[1], rest[2], now))
        elif kind == "probe":
            self._watch_loops(ProbeWanted(rest[0], now))
        elif kind == "decline":
            id, task, reason, detail = rest
            self._coordinate(m.DeclineReceived(id, attempt or 0, task, reason, now, detail))
        elif kind == "committed" and rest[0] == self._final_id:
            self._committing.discard(worker.slot)
            if not self._committing:
                self._job(j.FinalCommitted(self.machine.attempt))

    def _lost(self, worker: SimWorker) -> None:
        if self.workers.get(worker.slot) is worker:
            del self.workers[worker.slot]
            worker.from_driver.dead = True
            self.world.seen["worker lost"] += 1
            self._launch(worker.slot)
            self._job(j.WorkerLost(worker.slot, worker.incarnation, "connection ended", self.clock_ms))
            self.world.after(self.world.draws.below(64), lambda _: worker.kill())  # it is told that it was replaced

    def _broadcast(self, *message: Any) -> None:
        for worker in self.workers.values():
            worker.from_driver.send(message)

    # ----------------------------------------------------------------------------------------------------- its clock

    def _set_timer(self) -> None:
        """Ask for a tick when the core wants one."""
        if self.over:
            return
        due = self.machine.next_due_ms
        if self.machine.phase in (j.JobPhase.RUNNING, j.JobPhase.DRAINING):
            for wanted in (self.coordinator.next_due_ms, self.monitor.next_due_ms):
                if wanted is not None and (due is None or wanted < due):
                    due = wanted
        if due is None or due > 1e11:
            return
        at = max(due - self.skew_ms, self.world.now) + 0.01
        if at < self._due_ms or self._due_ms <= self.world.now:
            self._due_ms = at
            self.world.at(at, self._timer, at)

    def _timer(self, at: float) -> None:
        if at == self._due_ms:
            self._due_ms = float("inf")
            self._do(("tick",))

    def jump(self, by_ms: float) -> None:
        """The clock jumps."""
        self.skew_ms += by_ms
        self._due_ms = float("inf")
        self._do(("tick",))

    def _tick(self) -> None:
        self._job(j.Tick(self.clock_ms))
        if not self._busy and not self.over and self.machine.phase in (j.JobPhase.RUNNING, j.JobPhase.DRAINING):
            due = self.coordinator.next_due_ms
            if due is not None and due <= self.clock_ms:
                self._coordinate(m.Tick(self.clock_ms))
            due = self.monitor.next_due_ms
            if due is not None and due <= self.clock_ms:
                self._watch_loops(m.Tick(self.clock_ms))

    # ----------------------------------------------------------------------------------------- effects of the machines

    def _job(self, event: j.Event) -> None:
        for effect in self.machine.handle(event):
            match effect:
                case j.BeginAttempt(attempt=attempt):
                    self._begin(attempt)
                case j.StartProcessing(attempt=attempt):
                    self._broadcast("start", attempt)
                    self.monitor = self.world.new_monitor()
                    self._coordinate(m.JobRunning(attempt, self.clock_ms))
                case j.StopAttempt(reason=reason):
                    self.world.seen["restart"] += 1
                    if self._coordinator is not None:
                        self._coordinate(m.JobStopped(reason, self.clock_ms))
                    self._broadcast("reset", self.machine.attempt)
                case j.TakeFinalCheckpoint():
                    self._coordinate(m.RequestFinal(self.clock_ms))
                case j.ShutDown():
                    if self._coordinator is not None:
                        self._coordinate(m.JobStopped("the job ends", self.clock_ms))
                    self._broadcast("leave")
                    self._job(j.WorkersGone())
                case j.Ended(outcome=outcome, reason=reason):
                    self._end(outcome, reason)

    def _coordinate(self, event: m.CoordinatorEvent) -> None:
        effects = self.coordinator.handle(event)
        if self.world.validates:
            self.coordinator.validate()
        for effect in effects:
            match effect:
                case m.SendTrigger(checkpoint_id=id, final=final, kind=kind):
                    self._broadcast("trigger", self.machine.attempt, id, final, kind is CheckpointKind.PROBE)
                case m.Publish():
                    self._publish(effect)
                case m.NotifyComplete(checkpoint_id=id, kind=kind, commit=commit):
                    if kind.stored:
                        self._completed(id, kind is CheckpointKind.FINAL)
                    self._watch_loops(WaveCompleted(id, self.clock_ms))
                    self._broadcast("complete", self.machine.attempt, id, commit)
                case m.NotifyAborted(checkpoint_id=id, latest_completed=latest, reason=reason):
                    self.world.seen[f"aborted: {reason.code}"] += 1
                    self.world.note("aborted", 0, self.machine.attempt, id)
                    self._watch_loops(WaveFailed(id, self.clock_ms))
                    self._broadcast("abort", self.machine.attempt, id, latest)
                case m.FailJob(detail=detail):
                    self._job(j.TaskFailed(self.machine.attempt, detail, True, self.clock_ms))
                case m.AckAnswered(answer=answer):
                    self.world.seen[f"ack {answer.value}"] += 1
                case _:
                    pass

    def _watch_loops(self, event: LoopEvent) -> None:
        for effect in self.monitor.handle(event):
            if isinstance(effect, StartProbe):
                self.world.seen["probe"] += 1
                self._coordinate(m.RequestProbe(self.clock_ms))
            else:
                loop = self.world.graph.loop_tasks[effect.loop]
                self.world.seen["loop ended" if effect.ended else "loop quiet"] += 1
                verdict = m.LoopVerdict(effect.checkpoint_id, effect.ended, effect.watermark)
                self._broadcast("verdict", self.machine.attempt, loop, verdict)

    def _completed(self, id: int, final: bool) -> None:
        self.world.completed += 1
        if final:
            self._final_id, self._committing = id, set(self.workers)
        self._job(j.CheckpointCompleted(self.machine.attempt, self.clock_ms))

    def _end(self, outcome: j.Outcome, reason: str) -> None:
        self.outcome = outcome.value
        if outcome is j.Outcome.FINISHED:
            self.world.disk.append(self, self._known, Finished(self.machine.attempt), lambda _: None)
        self.world.ended(self, reason)

    # ---------------------------------------------------------------------------------------------------- the log

    def _begin(self, attempt: int) -> None:
        """Take the job: every older attempt is fenced from here on."""
        log = self.world.disk.log
        owner = max((e.attempt for e in log if type(e) is AttemptBegan), default=0)
        if owner != attempt - 1 or (self._taken and owner != self._taken):
            self._fenced()
            return
        self._known = len(log)
        self._busy = True
        entry = AttemptBegan(attempt, self.number)

        def done(answer: str) -> None:
            self._busy = False
            if self.over:
                return
            if answer == "ok":
                self._known += 1
                self._taken = attempt
                self._restore(attempt)
            elif answer == "taken":
                self._fenced()
            else:
                self._job(j.TaskFailed(attempt, f"log: {answer}", True, self.clock_ms))
            self._set_timer()
            self._drain()

        self.world.disk.append(self, self._known, entry, done)

    def _restore(self, attempt: int) -> None:
        disk = self.world.disk
        restored: Done | None = None
        completed = [e for e in disk.log if type(e) is Done][-RETAINED:]
        for entry in reversed(completed):
            if disk.whole(entry):
                restored = entry
                break
            self.world.judge.passed_over(entry.checkpoint_id)
        if completed and restored is None:
            self._job(j.TaskFailed(attempt, "no completed checkpoint is usable", False, self.clock_ms))
            return
        handles = {h for part in restored.manifest.values() for h in part.handles} if restored else set[Any]()
        for handle in sorted(handles) if self.world.driver_settles else ():
            self.world.output.commit(handle, restored.checkpoint_id if restored else 0)
        self.world.output.abort_all_but(handles if self.world.driver_settles else set())
        self.world.restores += 1
        if restored is not None:
            self.world.judge.restored(restored)
        if restored is not None and restored.final:
            self._job(j.FinalCommitted(attempt))
            return
        deployed = self.world.attempt_class(self.world, attempt, self.coordinator.last_id, restored)
        self.world.attempts[attempt] = deployed
        self._broadcast("deploy", deployed)

    def _publish(self, effect: m.Publish) -> None:
        """Manifest, then the next number of the log; only that makes the checkpoint exist."""
        id, attempt = effect.checkpoint_id, self.machine.attempt
        manifest = dict(effect.payloads)
        self._busy = True

        def written(error: str) -> None:
            if self.over:
                return
            entry = Done(id, attempt, effect.kind.final, manifest)
            if error:
                finish("failed")
            elif effect.kind.commits:
                self.world.disk.append(self, self._known, entry, finish)
            else:  # a savepoint is the user's: no recovery depends on it, the log does not name it
                self.world.judge.published(entry)
                self._known -= 1
                finish("ok")

        def finish(answer: str) -> None:
            self._busy = False
            if self.over:
                return
            if answer == "ok":
                self._known += 1
                self._coordinate(m.Published(id, self.clock_ms))
            elif answer == "taken":
                self._fenced()
            else:
                self._coordinate(m.PublishFailed(id, answer, self.clock_ms))
                if answer == "doubt":  # it may count for the next attempt, which looks
                    self._job(j.TaskFailed(attempt, "it is not known what was published", True, self.clock_ms))
            self._set_timer()
            self._drain()

        self.world.disk.write(self, f"{id}/manifest-{attempt}", written)

    def _fenced(self) -> None:
        """Another driver owns the job: stop, commit nothing."""
        self.world.seen["fenced driver"] += 1
        self._job(j.EndRequested(j.Outcome.FAILED, "another driver owns the job", self.clock_ms))

"""One job's decisions, joined: its life, its checkpoints, its loops and its parallelism.

Theory of operation.  Four machines decide: ``JobMachine`` over attempts, ``CheckpointCoordinator`` over checkpoints,
``LoopMonitor`` over probes and verdicts, ``Rescaler`` over the parallelism.  ``JobCore`` takes the events of a *host*
(the runtime's driver, the simulator's), tells each machine what the decisions of the others mean for it, and has the
host perform them through two narrow ports: ``JobHost`` has the workers, ``CheckpointHost`` the storage and the users.

Everything that is decided goes through one queue and is performed in the order in which it was decided.  A host may
report events while it performs something: what comes of them is performed after what was decided before them, never in
the middle of it.  So no abort overtakes its trigger, and what completes is told only once it is published.

=============================  ===============================================================================
decision                       its meaning for the others
=============================  ===============================================================================
an attempt ends                checkpoints under way are given up, nobody is waited for, a rescale under way ends
regions go back                the same, but survivors hear what becomes of checkpoints; if a wave after which nothing
                               is read has begun, everything goes back instead
an attempt runs                new loop monitor, checkpoints begin, a rescale is over
regions run again              the same with the old monitor, once all have caught up; a wave that was asked for
                               meanwhile never began
a checkpoint completes         it is progress for restarts if a recovery may rely on it; verdicts on loops follow; if
                               nothing is read behind it, its commits are waited for
a savepoint completes          a checkpoint is asked for, which commits what was handed out before it
it is not known whether one    the attempt ends: the next one looks
completed
=============================  ===============================================================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import msgspec

from cutwater.config import JobConfig
from cutwater.errors import InvariantError
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.checkpoint.coordinator import CheckpointCoordinator
from cutwater.protocol.checkpoint.loops import (
    LoopEvent,
    LoopMonitor,
    LoopReport,
    LoopReported,
    ProbeWanted,
    SendVerdict,
    StartProbe,
    WaveCompleted,
    WaveFailed,
)
from cutwater.protocol.job import messages as j
from cutwater.protocol.job import rescale as r
from cutwater.protocol.job.hosts import CheckpointHost, Follow, JobHost, Topology
from cutwater.protocol.job.machine import JobMachine
from cutwater.protocol.job.recovery_scope import Place, Subtask
from cutwater.protocol.job.restart_budget import RestartDecider
from cutwater.protocol.protocols import CheckpointKind, FailureReason


class _ForRescale(msgspec.Struct, frozen=True):
    """The request for the checkpoint that a rescale goes on from."""


class JobCore:
    """Decides over one job in one driver.

    Args:
        host: performs what concerns attempts and workers.
        checkpoint_host: performs what concerns checkpoints; ``None``: there are none, and the log is never taken.
        settings: of checkpoints, of the wait for workers.
        topology: what the job begins with.
        restart: the restart strategy.
        rescaler: decides over the parallelism.
        attempt: the last one known (from the log).
        catch_up_ms: rows pass between regions, so that what went back has so long to send again what the others have;
            ``None``: none pass.
        now_ms: of the clock that the events' times are of.
        coordinator, monitor: made when they are needed.

    >>> class Host:
    ...     def __getattr__(self, name):
    ...         return lambda *args: print(name, *args)
    >>> from random import Random
    >>> from cutwater.config import RestartConfig
    >>> both = Host()
    >>> topology = Topology(1, frozenset({(0, 0)}), frozenset({(0, 0)}))
    >>> restart = RestartDecider(RestartConfig(), Random(0))
    >>> core = JobCore(both, both, JobConfig(), topology, restart, r.Rescaler(r.Shape(1, 1)))
    >>> core.handle(j.WorkerJoined(slot=0, incarnation=1, now_ms=0.0))
    begin 1 None
    >>> core.log_taken(newest_id=0)
    >>> core.handle(j.WorkerReady(slot=0, attempt=1, now_ms=5.0))
    start_rows 1 None
    runs
    changed
    >>> core.hears(slot=0, incarnation=1, attempt=1), core.hears(slot=0, incarnation=1, attempt=0)
    (True, False)
    """

    def __init__(
        self,
        host: JobHost,
        checkpoint_host: CheckpointHost | None,
        settings: JobConfig,
        topology: Topology,
        restart: RestartDecider,
        rescaler: r.Rescaler,
        *,
        attempt: int = 0,
        catch_up_ms: float | None = None,
        now_ms: float = 0.0,
        coordinator: type[CheckpointCoordinator] = CheckpointCoordinator,
        monitor: type[LoopMonitor] = LoopMonitor,
    ) -> None:
        self._host, self._with_checkpoints, self._settings = host, checkpoint_host, settings
        self._coordinator_class, self._monitor_class = coordinator, monitor
        self._catch_up_ms, self._now_ms = catch_up_ms, now_ms
        self.topology = topology
        self.machine = JobMachine(
            topology.slots,
            topology.subtasks,
            restart,
            settings.resource_timeout_ms,
            settings.resource_stabilization_timeout_ms,
            now_ms=now_ms,
            attempt=attempt,
            fewest=rescaler.fewest,
            regions=topology.regions,
            upstream=topology.upstream,
        )
        self.rescaler = rescaler
        self.checkpoints: CheckpointCoordinator | None = None
        """Made when the log is taken: only then is the highest id known for good."""
        self._monitor = monitor(topology.loops)
        self.behind: dict[Subtask, float] = {}
        """Subtasks that send again what others have, and the end of the time that they have for it: no checkpoint may
        begin (R3, R4)."""
        self.committed_id = 0
        """The checkpoint behind which nothing is read in this attempt, once all workers have committed it."""
        self._committing: tuple[int, CheckpointKind, set[Place]] | None = None
        """Such a checkpoint, and what of the workers has not committed it yet."""
        self._publishes = 0
        """The attempt that publishes a checkpoint, or did last."""
        self._seen: tuple[frozenset[int], bool] = frozenset(), False
        self._queue: deque[tuple[Callable[[Any], None], Any]] = deque()
        """Decided and not performed yet."""
        self._performing = False

    # ------------------------------------------------------------------------------------------------- questions

    @property
    def next_due_ms(self) -> float | None:
        """Time at which ``on_time`` is wanted; ``None`` if only events can change things."""
        due = self.machine.next_due_ms
        others = [self.rescaler.next_due_ms, *self.behind.values()]
        if self._runs and self.checkpoints is not None:
            others += (self.checkpoints.next_due_ms, self._monitor.next_due_ms)
        for other in others:
            if other is not None and (due is None or other < due):
                due = other
        return due

    @property
    def _runs(self) -> bool:
        phase = self.machine.phase
        return phase is j.JobPhase.RUNNING or phase is j.JobPhase.DRAINING

    @property
    def running_attempt(self) -> int:
        """The attempt of which all subtasks run; 0: there is none."""
        running = self.machine.phase is j.JobPhase.RUNNING and not self.machine.down
        return self.machine.attempt if running else 0

    @property
    def awaited(self) -> list[int]:
        """Workers that are not there, or not where the others are: checkpoints wait for them."""
        if not self.machine.down and not self.behind:
            return []
        down = {slot for slot, region in self.machine.parts if region in self.machine.down}
        return sorted(down | {slot for _, slot in self.behind})

    @property
    def last_id(self) -> int:
        """The highest checkpoint id used so far."""
        return self._coordinator.last_id

    def hears(self, slot: int, incarnation: int, attempt: int | None = None, region: int | None = None) -> bool:
        """True if a worker's message counts (fencing).

        Args:
            slot, incarnation: of the worker; one that was replaced is never heard.
            attempt: in the name of which it speaks; ``None``: of none.
            region: that it speaks of; ``None``: of all.
        """
        if self.machine.workers.get(slot) != incarnation:
            return False
        if attempt is None:
            return True
        return attempt == self.machine.attempt if region is None else self.machine.is_current(attempt, region)

    # --------------------------------------------------------------------------------------- events: workers, attempts

    def handle(self, event: j.Event) -> None:
        """Take an event of the job's life, and perform what comes of it."""
        self._now_ms = event.now_ms
        self._job(event)
        self._perform()

    def log_taken(self, newest_id: int) -> None:
        """The log is this driver's; ``newest_id`` is the highest checkpoint id ever used (A1)."""
        if self.checkpoints is None:
            found = self.topology
            self.checkpoints = self._coordinator_class(self._settings, found.subtasks, found.sources, newest_id)

    def caught_up(self, subtasks: Iterable[Subtask], now_ms: float) -> None:
        """Subtasks that went back have sent all that others have.

        Their word may come when it is not waited for any more: their attempt has failed meanwhile, but no other began.
        """
        self._now_ms = now_ms
        found = [subtask for subtask in subtasks if subtask in self.behind]
        for subtask in found:
            del self.behind[subtask]
        if found:
            self._resume()
            self._perform()

    def on_time(self, now_ms: float) -> None:
        """Do what time has made due: attempts first, then the parallelism, then checkpoints, then probes."""
        self._now_ms = now_ms
        if _is_due(self.machine.next_due_ms, now_ms):
            self._job(j.Tick(now_ms))
            self._perform()
        if _is_due(self.rescaler.next_due_ms, now_ms):
            self._rescale(self._group_seen())
            self._rescale(r.Tick(now_ms))
            self._perform()
        if late := sorted({slot for (_, slot), due_ms in self.behind.items() if due_ms <= now_ms}):
            self.behind.clear()
            self._then(self._host.overdue, late)
            self._perform()
        if self._runs and self.checkpoints is not None:
            if _is_due(self.checkpoints.next_due_ms, now_ms):
                self._coordinate(cm.Tick(now_ms))
                self._perform()
            if _is_due(self._monitor.next_due_ms, now_ms):
                self._watch(cm.Tick(now_ms))
                self._perform()

    def look(self, now_ms: float) -> bool:
        """See whether workers came or went, or the job waits for some; false if that is as it was."""
        seen = frozenset(self.machine.workers), self.machine.waits
        if seen == self._seen:
            return False
        self._now_ms, self._seen = now_ms, seen
        self._rescale(self._group_seen())
        self._perform()
        return True

    # ------------------------------------------------------------------------------------------- events: checkpoints

    def acknowledged(
        self,
        checkpoint_id: int,
        parts: Iterable[tuple[Subtask, object]],
        reports: Iterable[tuple[Subtask, LoopReport]],
        now_ms: float,
    ) -> None:
        """A worker did its part of a wave.

        Args:
            parts: subtasks, and what goes into the manifest.
            reports: what subtasks of loops saw of the wave.
        """
        self._now_ms = now_ms
        coordinator = self._coordinator
        for subtask, report in reports:
            self._watch(LoopReported(checkpoint_id, subtask, report))
        for subtask, part in parts:
            attempt = coordinator.attempt_of(checkpoint_id)
            self._coordinate(cm.AckReceived(checkpoint_id, attempt, subtask, part, now_ms))
            self._perform()

    def declined(self, checkpoint_id: int, subtask: Subtask, reason: FailureReason, detail: str, now_ms: float) -> None:
        """A subtask cannot do its part."""
        self._now_ms = now_ms
        attempt = self._coordinator.attempt_of(checkpoint_id)
        self._coordinate(cm.DeclineReceived(checkpoint_id, attempt, subtask, reason, now_ms, detail))
        self._perform()

    def probe_wanted(self, subtask: Subtask, now_ms: float) -> None:
        """The head of a loop wants to know whether its loop is quiet (C6, W3)."""
        self._now_ms = now_ms
        self._watch(ProbeWanted(subtask, now_ms))
        self._perform()

    def published(self, outcome: cm.Published | cm.PublishFailed) -> None:
        """The outcome of a publication is known."""
        self._published(outcome)
        self._perform()

    def committed(self, places: Iterable[Place], checkpoint_id: int, now_ms: float) -> None:
        """A worker has committed what its parts of these regions had staged for a checkpoint."""
        self._now_ms = now_ms
        if self._committing is None or self._committing[0] != checkpoint_id:
            return
        id, kind, missing = self._committing
        missing.difference_update(places)
        if missing:
            return
        self._committing, self.committed_id = None, id
        if kind is CheckpointKind.FINAL:
            self._job(j.FinalCommitted(self.machine.attempt, now_ms))
        else:
            self._then(self._checkpoint_host.stopped_behind, id)
        self._perform()

    # ------------------------------------------------------------------------------------------------ events: requests

    def request(self, kind: CheckpointKind, request: Hashable, now_ms: float) -> None:
        """A user wants a checkpoint or savepoint; before the first attempt there is nothing to take one of."""
        self._ask(cm.RequestCheckpoint(now_ms, kind, request))

    def request_drain(self, request: Hashable, now_ms: float) -> None:
        """A user wants the job to end as if its sources were exhausted, with a savepoint."""
        self._ask(cm.RequestDrain(now_ms, request))

    def _ask(self, event: cm.RequestCheckpoint | cm.RequestDrain) -> None:
        self._now_ms = event.now_ms
        if self.checkpoints is None:
            self._then(self._answered, cm.RequestAnswered(event.request_id, None, FailureReason.JOB_NOT_RUNNING))
        self._coordinate(event)
        self._perform()

    def request_rescale(self, shape: r.Shape, request: Hashable, now_ms: float) -> None:
        """A user wants another parallelism."""
        self._now_ms = now_ms
        self._rescale(r.Requested(shape, request, now_ms))
        self._perform()

    def begin_anew(self, reason: str, now_ms: float) -> None:
        """The job is to go on from its newest checkpoint, at the parallelism that it has."""
        self._now_ms = now_ms
        self._switch(r.Switch(self.rescaler.shape, reason))
        self._perform()

    # --------------------------------------------------------------------------------------- what one means for others

    def _stop(self, reason: str, *, survivors: bool = False) -> None:
        """What is under way cannot complete any more."""
        self._committing, self.committed_id = None, 0
        self._coordinate(cm.JobStopped(reason, self._now_ms, survivors))
        if self._with_checkpoints is not None:
            self._then(self._with_checkpoints.stopped, reason)

    def _stop_attempt(self, reason: str) -> None:
        self._host.going_back(reason, None)
        self.behind.clear()
        self._stop(reason)
        self._then(self._host.reset, None)
        self._then(self._rescale, r.AttemptFailed(reason, self._now_ms))

    def _stop_regions(self, regions: tuple[int, ...], reason: str) -> None:
        if self._final_under_way():
            self._job(j.Widened(self.machine.attempt, reason, self._now_ms))
            return
        self._host.going_back(reason, regions)
        for subtask in self._subtasks_of(regions):
            self.behind.pop(subtask, None)
        self._stop(reason, survivors=True)
        self._then(self._host.reset, regions)
        self._then(self._rescale, r.AttemptFailed(reason, self._now_ms))

    def _final_under_way(self) -> bool:
        """Others may have passed a wave behind which nothing is read: they cannot go on beside what goes back."""
        return self._coordinator.final_under_way

    def _begin_regions(self, attempt: int, regions: tuple[int, ...]) -> None:
        self._host.begin(attempt, regions)
        if self._catch_up_ms is not None:
            self._wait_for(self._subtasks_of(regions), self._now_ms + self._catch_up_ms)

    def _wait_for(self, subtasks: Iterable[Subtask], due_ms: float) -> None:
        """Survivors have more of these subtasks than those have sent since they went back."""
        self.behind |= dict.fromkeys(subtasks, due_ms)

    def _subtasks_of(self, regions: Iterable[int]) -> frozenset[Subtask]:
        return frozenset[Subtask]().union(*(self.machine.regions[region] for region in regions))

    def _start(self, attempt: int) -> None:
        self._host.start_rows(attempt, None)
        self._monitor = self._monitor_class(self.topology.loops)
        self._goes_on()

    def _resume(self) -> None:
        """Checkpoints go on, once everything that went back is where it was."""
        if not self.behind and not self.machine.down:
            self._goes_on()
            if self.checkpoints is not None:  # a wave that a head asked for meanwhile never began
                self._watch(WaveFailed(self.checkpoints.last_id, self._now_ms))

    def _goes_on(self) -> None:
        self._host.runs()
        self._coordinate(cm.JobRunning(self.machine.attempt, self._now_ms))
        self._then(self._rescale, r.AttemptRuns(self._now_ms))

    def _switch(self, switch: r.Switch) -> None:
        self.behind.clear()
        self._stop(switch.reason)
        self._then(self._host.reset, None)
        self._then(self._reshape, switch)

    def _reshape(self, switch: r.Switch) -> None:
        found = self.topology = self._host.switch(switch.shape, switch.reason)
        if self.checkpoints is not None:
            self.checkpoints.reshape(found.subtasks, found.sources)
        fewest, now_ms = self.rescaler.fewest, self._now_ms
        self._job(j.Reshape(found.slots, found.subtasks, fewest, now_ms, found.regions, found.upstream))

    def _shut_down(self, effect: j.ShutDown) -> None:
        self._host.shut_down(effect.outcome, effect.reason)

    def _dismiss(self) -> None:
        self._host.dismiss()
        for slot, incarnation in list(self.machine.workers.items()):
            if slot >= self.machine.slots:
                self._job(j.WorkerLost(slot, incarnation, "the job goes on without it", self._now_ms))

    def _group_seen(self) -> r.GroupSeen:
        slots = frozenset(self.machine.workers)
        return r.GroupSeen(slots, self._host.cores | slots, self.machine.waits, self._now_ms)

    def _completed(self, effect: cm.NotifyComplete, host: CheckpointHost) -> None:
        id, kind = effect.checkpoint_id, effect.kind
        if kind.final:
            self._committing = id, kind, set(self.machine.parts)
        if kind.stored:
            host.completed(id, kind)
        if kind.commits:
            self._job(j.CheckpointCompleted(self.machine.attempt, self._now_ms))
        self._watch(WaveCompleted(id, self._now_ms))
        host.complete(effect)

    def _published(self, outcome: cm.Published | cm.PublishFailed) -> None:
        self._now_ms = outcome.now_ms
        in_doubt = isinstance(outcome, cm.PublishFailed) and outcome.in_doubt
        if in_doubt and self._publishes == self.machine.attempt:  # it may count for the next attempt, which looks
            self._then(self._checkpoint_host.in_doubt, outcome.checkpoint_id)
        self._coordinate(outcome)

    def _answered(self, answer: cm.RequestAnswered) -> None:
        if isinstance(answer.request_id, _ForRescale):
            reason, detail = answer.reason, answer.detail
            error = f"the checkpoint failed: {reason.message} {detail}".rstrip() if reason is not None else ""
            self._then(self._rescale, r.SnapshotEnded(error, self._now_ms))
            return
        self._checkpoint_host.answered(answer)
        if answer.ok and answer.checkpoint_id is not None:
            done = self._coordinator.completed(answer.checkpoint_id)
            if done is not None and done.kind is CheckpointKind.SAVEPOINT:
                follow = Follow(answer.request_id)
                self._coordinate(cm.RequestCheckpoint(self._now_ms, CheckpointKind.ON_DEMAND, follow))

    # --------------------------------------------------------------------------------------- machines and their effects

    @property
    def _checkpoint_host(self) -> CheckpointHost:
        if self._with_checkpoints is None:
            raise InvariantError("a checkpoint of a job that has none")
        return self._with_checkpoints

    @property
    def _coordinator(self) -> CheckpointCoordinator:
        if self.checkpoints is None:
            raise InvariantError("a checkpoint before the first attempt")
        return self.checkpoints

    def _then(self, call: Callable[[Any], None], argument: object) -> None:
        """Perform something after all that is decided already."""
        self._queue.append((call, argument))

    def _perform(self) -> None:
        """Perform what is decided, unless that is being done: then it has its turn."""
        if self._performing:
            return
        self._performing = True
        try:
            while self._queue:
                call, argument = self._queue.popleft()
                call(argument)
        finally:
            self._performing = False
            self._queue.clear()  # there is something left only if a call raised: then the job ends

    def _job(self, event: j.Event) -> None:
        for effect in self.machine.handle(event):
            self._queue.append((self._perform_job, effect))

    def _coordinate(self, event: cm.CoordinatorEvent) -> None:
        if self.checkpoints is None:
            return
        effects = self.checkpoints.handle(event)
        for effect in effects:
            self._queue.append((self._perform_checkpoint, effect))
        if len(effects) > 1 or not isinstance(event, cm.AckReceived):
            self._checkpoint_host.changed()

    def _watch(self, event: LoopEvent) -> None:
        """Verdicts are told at once: of a wave that completes, before anything that the completion leads to."""
        for effect in self._monitor.handle(event):
            match effect:
                case StartProbe():
                    self._coordinate(cm.RequestProbe(self._now_ms))
                case SendVerdict():
                    self._checkpoint_host.verdict(effect)

    def _rescale(self, event: r.RescaleEvent) -> None:
        for effect in self.rescaler.handle(event):
            self._queue.append((self._perform_rescale, effect))
        if isinstance(event, r.AttemptRuns):
            self.machine.fewest = self.rescaler.fewest

    def _perform_job(self, effect: j.Effect) -> None:
        match effect:
            case j.BeginAttempt(attempt=attempt):
                self._host.begin(attempt, None)
            case j.StartProcessing(attempt=attempt):
                self._start(attempt)
            case j.StopAttempt(reason=reason):
                self._stop_attempt(reason)
            case j.StopRegions(regions=regions, reason=reason):
                self._stop_regions(regions, reason)
            case j.BeginRegions(attempt=attempt, regions=regions):
                self._begin_regions(attempt, regions)
            case j.StartRegions(attempt=attempt, regions=regions):
                self._host.start_rows(attempt, regions)
                self._resume()
            case j.GroupShort(workers=workers, reason=reason):
                self._rescale(r.Short(workers, reason, self._now_ms))
            case j.Wait(text=text):
                self._host.note(text)
            case j.TakeFinalCheckpoint():
                self._coordinate(cm.RequestFinal(self._now_ms))
            case j.ShutDown(reason=reason):
                self.behind.clear()
                self._stop(reason)
                self._then(self._shut_down, effect)
            case j.Ended(outcome=outcome, reason=reason):
                self._host.job_over(outcome, reason)

    def _perform_checkpoint(self, effect: cm.CoordinatorEffect) -> None:
        host = self._checkpoint_host
        match effect:
            case cm.AckAnswered():
                host.acknowledged(effect)
            case cm.SendTrigger():
                host.trigger(effect)
            case cm.SendDrain():
                host.drain()
            case cm.Publish():
                self._publishes = self.machine.attempt
                outcome = host.publish(effect)
                if outcome is not None:
                    self._published(outcome)
            case cm.NotifyComplete():
                self._completed(effect, host)
            case cm.NotifyAborted(checkpoint_id=checkpoint_id):
                self._watch(WaveFailed(checkpoint_id, self._now_ms))
                host.abort(effect)
            case cm.FailJob():
                host.too_many_failed(effect)
            case cm.RequestAnswered():
                self._answered(effect)
            case cm.Discard():
                pass  # what an aborted checkpoint wrote lies in its folder, which retention removes

    def _perform_rescale(self, effect: r.RescaleEffect) -> None:
        match effect:
            case r.Recruit(workers=workers):
                self._host.recruit(workers)
            case r.Dismiss():
                self._dismiss()
            case r.TakeSnapshot():
                self._coordinate(cm.RequestCheckpoint(self._now_ms, CheckpointKind.ON_DEMAND, _ForRescale()))
            case r.Switch():
                self._switch(effect)
            case r.Answered(request=request, error=error):
                self._host.rescaled(request, error)
            case r.Note(text=text):
                self._host.note(text)


def _is_due(due_ms: float | None, now_ms: float) -> bool:
    return due_ms is not None and due_ms <= now_ms

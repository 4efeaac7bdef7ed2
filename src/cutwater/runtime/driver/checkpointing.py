"""Performs the checkpoint coordinator's decisions: triggers, publishing, notices."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import TYPE_CHECKING, TypeAlias, cast

from cutwater.config import JobConfig
from cutwater.errors import CutwaterError, FencedError, StorageError
from cutwater.plan.graph import PhysicalPlan
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.checkpoint.coordinator import CheckpointCoordinator
from cutwater.protocol.checkpoint.loops import (
    LoopEvent,
    LoopMonitor,
    LoopReported,
    ProbeWanted,
    SendVerdict,
    StartProbe,
    WaveCompleted,
    WaveFailed,
)
from cutwater.protocol.reasons import AckAnswer, CheckpointKind, FailureReason
from cutwater.protocol.subtask.host import LoopReport
from cutwater.protocol.subtask.watermarks import InputTime
from cutwater.runtime.control import messages as c
from cutwater.runtime.control import reports as cr
from cutwater.runtime.driver.publisher import Publisher
from cutwater.runtime.driver.savepoints import Follow, SavepointRequest, Savepoints
from cutwater.runtime.failures import error_of, first_line
from cutwater.runtime.status.board import StatusBoard
from cutwater.storage.savepoint.files import SavepointFile
from cutwater.storage.snapshot.manifest import Entry, SubtaskRecord

if TYPE_CHECKING:
    from cutwater.runtime.worker.tracing import DriverTrace

Key: TypeAlias = tuple[int, int]
"""Vertex and subtask."""


def now_ms() -> float:
    """The driver's monotonic clock."""
    return time.monotonic() * 1000


class Checkpointing:
    """The checkpoints and probes of one job in this driver.  Belongs to the coordinator's thread.

    Args:
        broadcast: sends a message to all workers.
        completed: called with (id, final) after a checkpoint is published and before the workers hear of it.
        failed: called with what the newest one failed of, when too many checkpoints in a row failed.
        trace: is told what becomes of each checkpoint, before anybody else is.
    """

    def __init__(
        self,
        config: JobConfig,
        plan: PhysicalPlan,
        publisher: Publisher,
        board: StatusBoard,
        *,
        broadcast: Callable[[c.ToWorker], None],
        completed: Callable[[int, CheckpointKind], None],
        failed: Callable[[CutwaterError], None],
        trace: DriverTrace | None,
    ) -> None:
        self._core = CheckpointCoordinator(
            config, *_everyone_and_sources(plan), first_id=publisher.next_checkpoint_id() - 1
        )
        self._config, self._plan = config, plan
        self._named: list[str] | None = None
        """Files of the newest checkpoint, if workers keep copies."""
        self._loops = LoopMonitor(_loop_subtasks(plan))
        self._publisher, self._board = publisher, board
        self._broadcast, self._completed, self._failed = broadcast, completed, failed
        self._attempt = 0
        self._triggered: dict[int, int] = {}
        self._trace = trace
        self._savepoints = Savepoints(lambda reason: failed(StorageError(reason)))
        self._cause: CutwaterError | None = None
        """Of the decline that is being handled: what made the snapshot failed, not its storage."""

    @property
    def next_due_ms(self) -> float | None:
        dues = [d for d in (self._core.next_due_ms, self._loops.next_due_ms) if d is not None]
        return min(dues, default=None)

    @property
    def last_id(self) -> int:
        """The highest checkpoint id used so far."""
        return self._core.last_id

    def running(self, attempt: int) -> None:
        """All subtasks of an attempt run."""
        self._attempt = attempt
        self._loops = LoopMonitor(_loop_subtasks(self._plan))
        self.handle(cm.JobRunning(attempt, now_ms()))

    def stopped(self, reason: str) -> None:
        self.handle(cm.JobStopped(reason, now_ms()))
        self._savepoints.stopped(reason)

    @property
    def final_under_way(self) -> bool:
        """Some subtasks may have passed a barrier after which they read nothing."""
        return self._core.final_under_way

    def suspended(self, reason: str) -> None:
        """A part of the job goes back, the rest runs on: what is pending is given up, and nothing new begins."""
        self.handle(cm.JobStopped(reason, now_ms(), survivors=True))
        self._savepoints.stopped(reason)

    def resumed(self, attempt: int) -> None:
        """All subtasks run again."""
        self._attempt = attempt
        self.handle(cm.JobRunning(attempt, now_ms()))
        self._loop(WaveFailed(self._core.last_id, now_ms()))  # a wave that a head asked for meanwhile never began

    def reshape(self, plan: PhysicalPlan) -> None:
        """The next attempt runs another plan."""
        self._core.reshape(*_everyone_and_sources(plan))
        self._plan = plan

    def request(self, done: Callable[[cm.RequestAnswered], None]) -> None:
        """Somebody wants a checkpoint now; ``done`` gets the answer."""
        self.handle(cm.RequestCheckpoint(now_ms(), CheckpointKind.ON_DEMAND, done))

    def request_savepoint(self, request: SavepointRequest) -> None:
        """A user wants a savepoint, perhaps the end of the job with it; the request gets its answer."""
        if request.kind == "drain":
            self.handle(cm.RequestDrain(now_ms(), request))
        else:
            kind = CheckpointKind.SAVEPOINT if request.kind == "savepoint" else CheckpointKind.STOP_WITH_SAVEPOINT
            self.handle(cm.RequestCheckpoint(now_ms(), kind, request))

    def acknowledged(self, subtasks: Iterable[Key], ack: cr.Ack) -> None:
        """These subtasks, all that a worker holds of a region, did their part."""
        for r in ack.loops:
            report = LoopReport(r.quiet, r.outside_ended, r.drained, InputTime(*r.outside))
            self._loop(LoopReported(ack.checkpoint_id, (r.vertex, r.subtask), report))
        if ack.probe:
            for subtask in subtasks:
                self._acknowledged(ack, subtask, None)
            return
        self._board.acked(ack)
        for record in ack.subtasks:
            steps = self._plan.vertices[record.vertex].steps
            entries = [e for e in ack.entries if e.subtask == record.subtask and e.step in steps]
            files = [f for f in ack.files if f.subtask == record.subtask and f.step in steps]
            self._acknowledged(ack, (record.vertex, record.subtask), (record, entries, files))

    def _acknowledged(self, ack: cr.Ack, subtask: Key, payload: object) -> None:
        attempt = self._core.attempt_of(ack.checkpoint_id)
        self.handle(cm.AckReceived(ack.checkpoint_id, attempt, subtask, payload, now_ms()))

    def probe_wanted(self, wanted: cr.ProbeWanted) -> None:
        """The head of a loop wants to know whether its loop is quiet (C6, W3)."""
        self._loop(ProbeWanted((wanted.vertex, wanted.subtask), now_ms()))

    def on_time(self) -> None:
        """``next_due_ms`` is reached."""
        self._loop(cm.Tick(now_ms()))
        self.handle(cm.Tick(now_ms()))

    def _loop(self, event: LoopEvent) -> None:
        """Feed the loop monitor and perform what it asks for."""
        for effect in self._loops.handle(event):
            match effect:
                case StartProbe():
                    self.handle(cm.RequestProbe(now_ms()))
                case SendVerdict(checkpoint_id=checkpoint_id, loop=loop, ended=ended, watermark=watermark):
                    vertices = sorted(self._plan.loops[loop])
                    self._broadcast(c.LoopVerdict(self._attempt, checkpoint_id, vertices, ended, watermark))

    def declined(self, decline: cr.Decline) -> None:
        reason = FailureReason.of(decline.reason)
        subtask = (decline.vertex, decline.subtask)
        attempt = self._core.attempt_of(decline.checkpoint_id)
        error, detail = None, decline.message
        if decline.error is not None:
            kind, step, hint = decline.error
            error = error_of(kind, decline.message, step, hint)
            detail = str(error)
        self._cause = None if isinstance(error, StorageError) else error
        self.handle(cm.DeclineReceived(decline.checkpoint_id, attempt, subtask, reason, now_ms(), detail))
        self._cause = None

    def handle(self, event: cm.CoordinatorEvent) -> None:
        """Feed the core and perform what it asks for.

        Raises:
            FencedError: another driver owns the job.
        """
        pending: deque[cm.CoordinatorEffect] = deque(self._core.handle(event))
        counts = False
        while pending:
            effect = pending.popleft()
            counts = counts or not isinstance(effect, cm.AckAnswered)  # most are: one for each subtask and checkpoint
            pending.extend(self._perform(effect))
        if counts:
            self._board.counts(self._core.statistics)

    def _perform(self, effect: cm.CoordinatorEffect) -> list[cm.CoordinatorEffect]:
        match effect:
            case cm.SendTrigger(checkpoint_id=checkpoint_id, kind=kind, final=final):
                if kind.stored:
                    self._triggered[checkpoint_id] = int(time.time() * 1000)
                request = self._request(checkpoint_id)
                folder = request.path if request is not None else ""
                self._broadcast(c.Trigger(self._attempt, checkpoint_id, final, not kind.stored, folder))
            case cm.SendDrain():
                self._broadcast(c.Drain(self._attempt))
            case cm.Publish():
                effects = self._core.handle(self._publish(effect))
                if self._publisher.in_doubt:  # it may count for the next attempt, which looks
                    doubt = f"it is not known whether checkpoint {effect.checkpoint_id} was published"
                    self._failed(StorageError(doubt))
                return effects
            case cm.NotifyComplete():
                self._notify_complete(effect)
            case cm.NotifyAborted(checkpoint_id=checkpoint_id, reason=reason, latest_completed=latest):
                stored = self._triggered.pop(checkpoint_id, None) is not None
                if stored and self._trace is not None:
                    self._trace.aborted(checkpoint_id, self._attempt)
                if stored and reason is not FailureReason.JOB_STOPPED:
                    why = first_line(f"{reason.message} {effect.detail}".rstrip())
                    self._board.warn(f"checkpoint {checkpoint_id} failed: {why}")
                self._broadcast(c.AbortNotice(self._attempt, checkpoint_id, latest))
                self._loop(WaveFailed(checkpoint_id, now_ms()))
            case cm.FailJob(reason=reason, detail=detail):
                self._failed(self._cause or StorageError(f"checkpoint failed: {reason.message} {detail}".rstrip()))
            case cm.RequestAnswered(request_id=SavepointRequest() | Follow()):
                follow = self._savepoints.answered(effect)
                if follow is not None:
                    return self._core.handle(cm.RequestCheckpoint(now_ms(), CheckpointKind.ON_DEMAND, follow))
            case cm.RequestAnswered(request_id=request_id):
                cast("Callable[[cm.RequestAnswered], None]", request_id)(effect)
            case cm.AckAnswered(answer=answer) if answer is AckAnswer.UNKNOWN:
                self._board.log(f"acknowledgement of unknown checkpoint {effect.checkpoint_id}")
            case _:
                pass  # what an aborted checkpoint wrote lies in its folder, which retention removes
        return []

    def _request(self, checkpoint_id: int) -> SavepointRequest | None:
        """The savepoint that a pending checkpoint was asked for as."""
        pending = next((p for p in self._core.pending if p.checkpoint_id == checkpoint_id), None)
        request = pending.request_id if pending is not None else None
        return request if isinstance(request, SavepointRequest) else None

    def _notify_complete(self, effect: cm.NotifyComplete) -> None:
        checkpoint_id, kind = effect.checkpoint_id, effect.kind
        if kind.commits:
            self._completed(checkpoint_id, kind)
        named = self._named if kind.commits else None
        self._broadcast(c.CompleteNotice(self._attempt, checkpoint_id, kind.final, effect.commit, named))
        self._loop(WaveCompleted(checkpoint_id, now_ms()))
        if kind.commits:
            self._savepoints.committed(checkpoint_id)
            for warning in self._publisher.collect():
                self._board.warn(warning)

    def _publish(self, effect: cm.Publish) -> cm.Published | cm.PublishFailed:
        parts = [cast("tuple[SubtaskRecord, list[Entry], list[SavepointFile]]", p) for _, p in effect.payloads]
        manifest = self._publisher.manifest(
            effect.checkpoint_id,
            attempt=self._attempt,
            final=effect.kind is CheckpointKind.FINAL,
            triggered_ms=self._triggered.pop(effect.checkpoint_id, 0),
            parts=[(record, entries) for record, entries, _ in parts],
        )
        if effect.kind.commits:
            try:
                size, written = self._publisher.publish(manifest)
            except FencedError:
                raise
            except CutwaterError as e:
                return cm.PublishFailed(effect.checkpoint_id, str(e), now_ms())
            self._board.completed(effect.checkpoint_id, size, written)
            if self._config.keeps_copies:
                self._named = sorted({entry.file for entry in manifest.entries if entry.file})
        request = self._request(effect.checkpoint_id)
        if request is not None:
            self._savepoints.durable(request, manifest, [file for _, _, files in parts for file in files])
        if self._trace is not None:
            self._trace.completed(effect.checkpoint_id, self._attempt)
        return cm.Published(effect.checkpoint_id, now_ms())


def _everyone_and_sources(plan: PhysicalPlan) -> tuple[frozenset[Key], frozenset[Key]]:
    subtasks = {v.index: frozenset((v.index, i) for i in range(v.parallelism)) for v in plan.vertices}
    sources = frozenset[Key]().union(*(subtasks[v.index] for v in plan.vertices if not plan.inputs(v.index)))
    return frozenset[Key]().union(*subtasks.values()), sources


def _loop_subtasks(plan: PhysicalPlan) -> dict[int, frozenset[Hashable]]:
    return {
        loop: frozenset((v, i) for v in vertices for i in range(plan.vertices[v].parallelism))
        for loop, vertices in enumerate(plan.loops)
    }

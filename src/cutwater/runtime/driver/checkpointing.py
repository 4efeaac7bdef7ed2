"""Performs what the core decides over checkpoints: triggers, publishing, notices, answers to users."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias, cast

from cutwater.config import JobConfig
from cutwater.connectors.base import Committer, Json
from cutwater.errors import CutwaterError, FencedError, StorageError
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.checkpoint.loops import SendVerdict
from cutwater.protocol.job.core import JobCore
from cutwater.protocol.job.hosts import Follow
from cutwater.protocol.protocols import AckAnswer, CheckpointKind, FailureReason
from cutwater.protocol.subtask.host import LoopReport
from cutwater.protocol.subtask.watermarks import InputTime
from cutwater.runtime.control import messages as c
from cutwater.runtime.control.links import now_ms
from cutwater.runtime.driver.global_commits import GlobalCommits
from cutwater.runtime.driver.publisher import Publisher
from cutwater.runtime.driver.savepoints import SavepointRequest, Savepoints
from cutwater.runtime.failures import error_of, first_line
from cutwater.runtime.status.board import StatusBoard
from cutwater.storage.snapshot.manifest import Entry, SubtaskRecord
from cutwater.storage.snapshot.savepoint_files import SavepointFile

if TYPE_CHECKING:
    from cutwater.runtime.driver.driver import Driver
    from cutwater.runtime.worker.tracing import DriverTrace

Key: TypeAlias = tuple[int, int]
"""Vertex and subtask."""


class Checkpointing:
    """Performs the checkpoints and probes of one job (``CheckpointHost``).  Belongs to the coordinator's thread.

    Args:
        driver: of the job; made after this object.
        completed: called with (id, kind) after a checkpoint is published and before the workers hear of it.
        committed: called when all output before a savepoint with which the job stops is committed.
        commits: performs what the driver commits for all subtasks.
        trace: is told what becomes of each checkpoint, before anybody else is.
    """

    def __init__(
        self,
        config: JobConfig,
        publisher: Publisher,
        board: StatusBoard,
        *,
        driver: Callable[[], Driver],
        completed: Callable[[int, CheckpointKind], None],
        committed: Callable[[], None],
        commits: GlobalCommits,
        trace: DriverTrace | None,
    ) -> None:
        self._config = config
        self._named: list[str] | None = None
        """Files of the newest checkpoint, if workers keep copies."""
        self._publisher, self._board = publisher, board
        self._driver = driver
        self._on_completed, self._on_committed = completed, committed
        self._commits = commits
        self._triggered: dict[int, int] = {}
        self._trace = trace
        self._savepoints = Savepoints(lambda reason: self._failed(StorageError(reason)))
        self._cause: CutwaterError | None = None
        """Of the decline that is being handled: what made the snapshot failed, not its storage."""

    # -------------------------------------------------------------------------------------------------- the events

    def hear_ack(self, subtasks: Iterable[Key], ack: c.Ack) -> None:
        """These subtasks, all that a worker holds of a region, did their part."""
        reports = [
            ((r.vertex, r.subtask), LoopReport(r.quiet, r.outside_ended, r.drained, InputTime(*r.outside)))
            for r in ack.loops
        ]
        parts: list[tuple[Key, object]] = []
        if ack.probe:
            parts = [(subtask, None) for subtask in subtasks]
        else:
            self._board.acked(ack)
            for record in ack.subtasks:
                steps = self._publisher.plan.vertices[record.vertex].steps
                entries = [e for e in ack.entries if e.subtask == record.subtask and e.step in steps]
                files = [f for f in ack.files if f.subtask == record.subtask and f.step in steps]
                parts.append(((record.vertex, record.subtask), (record, entries, files)))
        self._core.acknowledged(ack.checkpoint_id, parts, reports, now_ms())

    def hear_decline(self, decline: c.Decline) -> None:
        """A subtask cannot do its part."""
        error, detail = None, decline.message
        if decline.error is not None:
            kind, step, hint = decline.error
            error = error_of(kind, decline.message, step, hint)
            detail = str(error)
        self._cause = None if isinstance(error, StorageError) else error
        subtask, reason = (decline.vertex, decline.subtask), FailureReason.of(decline.reason)
        self._core.declined(decline.checkpoint_id, subtask, reason, detail, now_ms())
        self._cause = None

    def request(self, done: Callable[[cm.RequestAnswered], None]) -> None:
        """Somebody wants a checkpoint now; ``done`` gets the answer."""
        self._core.request(CheckpointKind.ON_DEMAND, done, now_ms())

    def request_savepoint(self, request: SavepointRequest) -> None:
        """A user wants a savepoint, perhaps the end of the job with it; the request gets its answer."""
        if request.kind == "drain":
            self._core.request_drain(request, now_ms())
        else:
            kind = CheckpointKind.SAVEPOINT if request.kind == "savepoint" else CheckpointKind.STOP_WITH_SAVEPOINT
            self._core.request(kind, request, now_ms())

    # -------------------------------------------------------------------------------------- see ``CheckpointHost``

    @property
    def _core(self) -> JobCore:
        return self._driver().core

    @property
    def _attempt(self) -> int:
        return self._core.machine.attempt

    def _broadcast(self, message: c.ToWorker) -> None:
        self._driver().group.broadcast(message)

    def _failed(self, error: CutwaterError) -> None:
        self._driver().fail(type(error).__name__, error.message, step=error.step or "", hint=error.hint)

    def trigger(self, effect: cm.SendTrigger) -> None:
        if effect.kind.stored:
            self._triggered[effect.checkpoint_id] = int(time.time() * 1000)
        request = self._request(effect.checkpoint_id)
        folder = request.path if request is not None else ""
        probe = not effect.kind.stored
        self._broadcast(c.Trigger(self._attempt, effect.checkpoint_id, effect.final, probe, folder))

    def drain(self) -> None:
        self._broadcast(c.Drain(self._attempt))

    def verdict(self, verdict: SendVerdict) -> None:
        vertices = sorted(self._publisher.plan.loops[verdict.loop])
        told = c.LoopVerdict(self._attempt, verdict.checkpoint_id, vertices, verdict.ended, verdict.watermark)
        self._broadcast(told)

    def completed(self, checkpoint_id: int, kind: CheckpointKind) -> None:
        self._on_completed(checkpoint_id, kind)

    def complete(self, effect: cm.NotifyComplete) -> None:
        """Tell the workers; of the end of the job only when the driver has committed its part of it."""
        checkpoint_id, kind, attempt = effect.checkpoint_id, effect.kind, self._attempt
        work = self._publisher.global_commits(checkpoint_id) if kind.commits else {}
        if work and kind.final:
            then = lambda: self._tell_complete(effect) if attempt == self._attempt else None  # noqa: E731
            self._commits.submit(checkpoint_id, work, lambda: self._driver().later(then))
        else:
            self._tell_complete(effect)
            self.commit_globally(checkpoint_id, work)

    def commit_globally(self, checkpoint_id: int, work: Mapping[str, tuple[Committer, list[Json]]]) -> None:
        """Commit a published checkpoint for the sinks that commit globally, and tell the workers when that is done."""
        if work:
            then = lambda: self._broadcast(c.GloballyCommitted(self._attempt, checkpoint_id))  # noqa: E731
            self._commits.submit(checkpoint_id, work, lambda: self._driver().later(then))

    def _tell_complete(self, effect: cm.NotifyComplete) -> None:
        checkpoint_id, kind = effect.checkpoint_id, effect.kind
        named = self._named if kind.commits else None
        self._broadcast(c.CompleteNotice(self._attempt, checkpoint_id, kind.final, effect.commit, named))
        if kind.commits:
            self._savepoints.committed(checkpoint_id)
            for warning in self._publisher.collect():
                self._board.warn(warning)

    def stopped_behind(self, checkpoint_id: int) -> None:
        self._on_committed()

    def abort(self, effect: cm.NotifyAborted) -> None:
        checkpoint_id, reason = effect.checkpoint_id, effect.reason
        stored = self._triggered.pop(checkpoint_id, None) is not None
        if stored and self._trace is not None:
            self._trace.aborted(checkpoint_id, self._attempt)
        if stored and reason is not FailureReason.JOB_STOPPED:
            why = first_line(f"{reason.message} {effect.detail}".rstrip())
            self._board.warn(f"checkpoint {checkpoint_id} failed: {why}")
        self._broadcast(c.AbortNotice(self._attempt, checkpoint_id, effect.latest_completed))

    def stopped(self, reason: str) -> None:
        self._savepoints.stopped(reason)

    def acknowledged(self, effect: cm.AckAnswered) -> None:
        if effect.answer is AckAnswer.UNKNOWN:
            self._board.log(f"acknowledgement of unknown checkpoint {effect.checkpoint_id}")

    def answered(self, answer: cm.RequestAnswered) -> None:
        match answer.request_id:
            case SavepointRequest() as request:
                self._savepoints.answered(request, answer)
            case Follow(request=SavepointRequest() as request):
                self._savepoints.answered(request, answer)
            case done:
                cast("Callable[[cm.RequestAnswered], None]", done)(answer)

    def too_many_failed(self, effect: cm.FailJob) -> None:
        why = f"checkpoint failed: {effect.reason.message} {effect.detail}".rstrip()
        self._failed(self._cause or StorageError(why))

    def in_doubt(self, checkpoint_id: int) -> None:
        self._failed(StorageError(f"it is not known whether checkpoint {checkpoint_id} was published"))

    def changed(self) -> None:
        if (coordinator := self._core.checkpoints) is not None:
            self._board.counts(coordinator.statistics)

    def _request(self, checkpoint_id: int) -> SavepointRequest | None:
        """The savepoint that a checkpoint under way was asked for as."""
        coordinator = self._core.checkpoints
        request = coordinator.request_of(checkpoint_id) if coordinator is not None else None
        return request if isinstance(request, SavepointRequest) else None

    def publish(self, effect: cm.Publish) -> cm.Published | cm.PublishFailed:
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
                doubt = self._publisher.in_doubt
                return cm.PublishFailed(effect.checkpoint_id, str(e), now_ms(), in_doubt=doubt)
            self._board.completed(effect.checkpoint_id, size, written)
            if self._config.keeps_copies:
                self._named = sorted({entry.file for entry in manifest.entries if entry.file})
        request = self._request(effect.checkpoint_id)
        if request is not None:
            self._savepoints.durable(request, manifest, [file for _, _, files in parts for file in files])
        if self._trace is not None:
            self._trace.completed(effect.checkpoint_id, self._attempt)
        return cm.Published(effect.checkpoint_id, now_ms())

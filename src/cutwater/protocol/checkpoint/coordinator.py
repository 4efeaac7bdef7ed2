"""When checkpoints are taken and what becomes of them: the coordinator's decisions.

Theory of operation.  A checkpoint is *pending* from its trigger until it is published or given up.  When every subtask
has acknowledged, the performer is asked to *publish* it, one checkpoint at a time and the oldest first; until the
outcome is reported nobody else can end this checkpoint, because it may already lie in the log.  Only after
``Published`` do the subtasks hear of it.  A completed checkpoint *subsumes* older pending ones: sinks commit everything
up to it, so nothing older may become the newest entry of the log.  Savepoints belong to the user: they neither subsume
nor are subsumed.

A *probe* (C6) is a wave that stores nothing.  It takes no place, counts as nothing, and begins only when nothing else
is under way or due; any checkpoint that begins meanwhile ends it, because it tells the same about the loops.

While a part of the job goes back and the rest runs on (R2-R4), nothing can be taken; what users ask for meanwhile is
held until all subtasks run again.

Several reasons end a checkpoint early; those that count (declines, expiry, I/O) add up, and more than
``tolerable_failed`` of them in a row fail the job.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.checkpoint.messages import CoordinatorEffect, CoordinatorEvent
from cutwater.protocol.checkpoint.pending import CompletedCheckpoint, PendingCheckpoint, PendingStage, PendingStep
from cutwater.protocol.checkpoint.state import CoordinatorState
from cutwater.protocol.reasons import AckAnswer, CheckpointKind, FailureReason

WAITING_REQUESTS_MAX = 1000


class CheckpointCoordinator(CoordinatorState):
    """Decides over the checkpoints of a job.

    Args:
        settings: interval, pause, timeout, tolerable failures, concurrency, protocol.
        subtasks: everyone who must acknowledge.
        sources: the subtasks that are triggered.
        first_id: the highest id ever used (on disk, by any attempt or driver): ids start above it (A1).
        latest_completed: id of the checkpoint that the job was restored from.

    >>> from cutwater.config import JobConfig
    >>> coordinator = CheckpointCoordinator(JobConfig(interval_ms=100.0), frozenset({"a"}), frozenset({"a"}), 7)
    >>> coordinator.handle(cm.JobRunning(attempt=1, now_ms=0)), coordinator.next_due_ms
    ([], 100.0)
    >>> coordinator.handle(cm.Tick(100))
    [SendTrigger(checkpoint_id=8, kind=<CheckpointKind.PERIODIC: 'periodic'>, final=False)]
    """

    # ---------------------------------------------------------------------------------------------------- events

    def handle(self, event: CoordinatorEvent) -> list[CoordinatorEffect]:
        """Take one event; the effects are to be performed in their order.

        Raises:
            InvariantError: the event is illegal in this state; the coordinator must not be used any more.
        """
        self._events.append(event)
        self._now_ms = max(self._now_ms, event.now_ms)
        match event:
            case cm.Tick():
                self._expire()
            case cm.RequestCheckpoint():
                self._on_request(event)
            case cm.RequestFinal():
                self._final_wanted = self._running
            case cm.RequestDrain():
                self._on_drain(event)
            case cm.AckReceived():
                self._on_ack(event)
            case cm.DeclineReceived():
                self._on_decline(event)
            case cm.Published():
                self._on_published(event)
            case cm.PublishFailed():
                self._on_publish_failed(event)
            case cm.JobRunning():
                self._on_running(event)
            case cm.JobStopped():
                self._on_stopped(event)
            case cm.RequestProbe():
                self._probe_wanted = self._running and not self._pending
        self._finish_probe()
        self._publish_next()
        self._trigger_due()
        effects, self._effects = self._effects, []
        return effects

    def _on_request(self, event: cm.RequestCheckpoint) -> None:
        if event.kind in (CheckpointKind.PERIODIC, CheckpointKind.FINAL, CheckpointKind.PROBE):
            raise self._broken(f"nobody asks for a checkpoint of kind {event.kind.value}")
        refused = self._refusal(event.kind)
        if refused is not None:
            self._effects.append(cm.RequestAnswered(event.request_id, None, refused))
        elif self._part_away:
            self._held.append(event)
        elif event.kind is CheckpointKind.ON_DEMAND:
            self._waiting.append(event.request_id)
        else:
            if event.kind.final:  # whatever becomes of it, the attempt ends: none that waits is ever begun
                self._refuse_waiting(FailureReason.JOB_ENDING, "")
            self._trigger(event.kind, event.request_id)

    def _on_drain(self, event: cm.RequestDrain) -> None:
        """From here on only the final checkpoint may be triggered: no other may say that a source is exhausted."""
        refused = self._refusal(CheckpointKind.STOP_WITH_SAVEPOINT)
        if refused is not None:
            self._effects.append(cm.RequestAnswered(event.request_id, None, refused))
            return
        if self._part_away:
            self._held.append(event)
            return
        self._refuse_waiting(FailureReason.JOB_ENDING, "")
        self._drain = event.request_id
        self._effects.append(cm.SendDrain())

    def _refusal(self, kind: CheckpointKind) -> FailureReason | None:
        if not (self._running or self._part_away):
            return FailureReason.JOB_NOT_RUNNING
        if self._settings.protocol == "none":
            return FailureReason.CHECKPOINTING_DISABLED
        if self._running and not self._may_trigger:
            return FailureReason.JOB_ENDING
        waiting = self._held if self._part_away else self._waiting if kind is CheckpointKind.ON_DEMAND else ()
        return FailureReason.TOO_MANY_REQUESTS if len(waiting) >= WAITING_REQUESTS_MAX else None

    def _on_ack(self, event: cm.AckReceived) -> None:
        answer = self._answer(event)
        self._effects.append(cm.AckAnswered(event.checkpoint_id, event.subtask, answer))
        if answer is AckAnswer.SUCCESS:
            pending = self._pending[event.checkpoint_id]
            pending.payloads[event.subtask] = event.payload
            last = len(pending.payloads) == len(pending.subtasks)
            self._step(pending, PendingStep.ALL_ACKNOWLEDGED if last else PendingStep.ACKNOWLEDGED)
        elif answer is AckAnswer.DISCARDED or self._is_stranger(event):
            self._effects.append(cm.Discard(event.checkpoint_id, event.payload))

    def _answer(self, event: cm.AckReceived) -> AckAnswer:
        """State is deleted only where it is certain that no manifest names it; the store collects the rest."""
        pending = self._pending.get(event.checkpoint_id)
        if pending is not None and pending.attempt == event.attempt and event.subtask in pending.subtasks:
            return AckAnswer.DUPLICATE if event.subtask in pending.payloads else AckAnswer.SUCCESS
        if event.checkpoint_id in self._completed and event.subtask in self._subtasks:
            return AckAnswer.DUPLICATE
        if self._given_up.get(event.checkpoint_id) == event.attempt and event.subtask in self._subtasks:
            return AckAnswer.DISCARDED
        return AckAnswer.UNKNOWN

    def _is_stranger(self, event: cm.AckReceived) -> bool:
        """No subtask of the job, but about one of its checkpoints: nobody will ever name what it wrote."""
        pending = self._pending.get(event.checkpoint_id)
        return pending is not None and pending.attempt == event.attempt and event.subtask not in pending.subtasks

    def _on_decline(self, event: cm.DeclineReceived) -> None:
        pending = self._pending.get(event.checkpoint_id)
        if pending is None or pending.attempt != event.attempt or event.subtask not in pending.subtasks:
            return
        if event.subtask not in pending.payloads:
            self._fail(pending, event.reason, f"subtask {event.subtask}: {event.detail}".removesuffix(": "))

    def _on_published(self, event: cm.Published) -> None:
        pending = self._publishing(event.checkpoint_id)
        self._step(pending, PendingStep.PUBLISHED)
        id, kind = pending.checkpoint_id, pending.kind
        done = CompletedCheckpoint(id, kind, pending.attempt, pending.triggered_ms, self._now_ms)
        del self._pending[id]
        self._remember_completed(done)
        self._completed_count += 1
        self._consecutive_failed = 0
        self._last_duration_ms, self._last_end_ms = done.duration_ms, self._now_ms
        if kind.commits:
            self._latest_completed = max(self._latest_completed, id)
        if kind.final:
            self._ending = True
            self._final_wanted = self._final_wanted and kind is not CheckpointKind.FINAL
        if self._running or self._survivors:
            self._effects.append(cm.NotifyComplete(id, kind, kind.commits))
        if pending.request_id is not None:
            self._effects.append(cm.RequestAnswered(pending.request_id, id))
        if kind.commits:
            for older in [p for p in self._pending.values() if p.checkpoint_id < id and not p.kind.user_owned]:
                self._subsume(older, id)

    def _on_publish_failed(self, event: cm.PublishFailed) -> None:
        pending = self._publishing(event.checkpoint_id)
        self._fail(pending, FailureReason.PUBLISH_FAILED, event.reason, PendingStep.PUBLISH_FAILED)

    def _on_running(self, event: cm.JobRunning) -> None:
        if self._running or event.attempt <= self._attempt:
            raise self._broken(f"attempt {event.attempt} runs, but attempt {self._attempt} did before")
        if self._pending:
            raise self._broken("a new attempt runs while the old one's publishing is undecided")
        self._running, self._survivors, self._ending, self._attempt = True, False, False, event.attempt
        self._consecutive_failed = 0
        self._last_end_ms = -math.inf
        periodic = self._settings.protocol != "none"
        self._periodic_ms = self._now_ms + self._settings.interval_ms if periodic else math.inf
        while self._held:
            request = self._held.popleft()
            if isinstance(request, cm.RequestDrain):
                self._on_drain(request)
            else:
                self._on_request(request)

    def _on_stopped(self, event: cm.JobStopped) -> None:
        self._running = self._final_wanted = self._probe_wanted = False
        self._survivors = event.survivors
        for pending in [p for p in self._pending.values() if p.stage is not PendingStage.PUBLISHING]:
            self._give_up(pending, FailureReason.JOB_STOPPED, event.reason)
            self._failed_count += pending.kind.stored
        if not event.survivors:
            self._refuse_waiting(FailureReason.JOB_STOPPED, event.reason)
        while self._waiting:  # for a place, and now until what goes back is there again
            self._held.append(cm.RequestCheckpoint(event.now_ms, CheckpointKind.ON_DEMAND, self._waiting.popleft()))
        if self._drain is not None:
            self._effects.append(cm.RequestAnswered(self._drain, None, FailureReason.JOB_STOPPED, event.reason))
            self._drain = None

    # --------------------------------------------------------------------------------------------------- triggers

    def _trigger_due(self) -> None:
        """Start whatever is due: the final checkpoint before requests, requests before the periodic one."""
        if not self._running:
            return
        if self._final_wanted:
            self._refuse_waiting(FailureReason.JOB_ENDING, "")
            if not any(p.kind.final for p in self._pending.values()):
                drain, self._drain = self._drain, None
                self._trigger(CheckpointKind.FINAL, drain)
        while self._waiting and self._may_trigger and self._place_free:
            self._trigger(CheckpointKind.ON_DEMAND, self._waiting.popleft())
        if self._periodic_due_ms <= self._now_ms and self._may_trigger and self._place_free:
            missed = math.floor((self._now_ms - self._periodic_ms) / self._settings.interval_ms)
            self._periodic_ms += (missed + 1) * self._settings.interval_ms
            self._trigger(CheckpointKind.PERIODIC, None)
        if self._probe_wanted and self._may_probe and not self._pending:
            self._trigger(CheckpointKind.PROBE, None)

    def _trigger(self, kind: CheckpointKind, request_id: Hashable | None) -> None:
        """Begin a checkpoint; it serves whoever wanted a probe, and ends the one under way (C6)."""
        self._probe_wanted = False
        for probe in [p for p in self._pending.values() if not p.kind.stored]:
            self._give_up(probe, FailureReason.SUBSUMED, f"by checkpoint {self._last_id + 1}")
        self._last_id += 1
        self._triggered += kind.stored
        now, timeout = self._now_ms, self._settings.timeout_ms
        self._pending[self._last_id] = PendingCheckpoint(
            self._last_id, kind, self._attempt, now, now + timeout, self._subtasks, request_id
        )
        savepoint = kind.user_owned or (kind is CheckpointKind.FINAL and request_id is not None)
        self._effects.append(cm.SendTrigger(self._last_id, kind, kind.final, savepoint))

    def _expire(self) -> None:
        for pending in list(self._pending.values()):
            if pending.stage is PendingStage.TRIGGERED and pending.expires_ms <= self._now_ms:
                missing = sorted(map(str, pending.subtasks - pending.payloads.keys()))
                self._fail(pending, FailureReason.EXPIRED, f"missing: {', '.join(missing[:8])}")

    def _refuse_waiting(self, reason: FailureReason, detail: str) -> None:
        waiting = [*self._waiting, *(request.request_id for request in self._held)]
        self._effects += [cm.RequestAnswered(request_id, None, reason, detail) for request_id in waiting]
        self._waiting.clear()
        self._held.clear()

    # ------------------------------------------------------------------------------------------------ transitions

    def _finish_probe(self) -> None:
        """All have answered: that is all that a probe is for."""
        for probe in [p for p in self._pending.values() if not p.kind.stored and p.stage is PendingStage.READY]:
            self._step(probe, PendingStep.PROBED)
            id, kind = probe.checkpoint_id, probe.kind
            del self._pending[id]
            self._remember_completed(CompletedCheckpoint(id, kind, probe.attempt, probe.triggered_ms, self._now_ms))
            self._effects.append(cm.NotifyComplete(id, kind, kind.commits))

    def _publish_next(self) -> None:
        if any(p.stage is PendingStage.PUBLISHING for p in self._pending.values()):
            return
        for pending in self._pending.values():
            if pending.stage is PendingStage.READY:
                self._step(pending, PendingStep.PUBLISH)
                payloads = tuple(pending.payloads.items())
                self._effects.append(cm.Publish(pending.checkpoint_id, pending.kind, payloads))
                return

    def _publishing(self, id: int) -> PendingCheckpoint:
        pending = self._pending.get(id)
        if pending is None:
            raise self._broken(f"checkpoint {id} was published or not, but nobody asked for that")
        return pending

    def _subsume(self, pending: PendingCheckpoint, by: int) -> None:
        """The newer checkpoint serves whoever asked for the older one."""
        if pending.request_id is not None:
            self._effects.append(cm.RequestAnswered(pending.request_id, by))
            pending.request_id = None
        self._give_up(pending, FailureReason.SUBSUMED, f"by checkpoint {by}")
        self._subsumed_count += 1

    def _fail(
        self, pending: PendingCheckpoint, reason: FailureReason, detail: str, step: PendingStep = PendingStep.GIVE_UP
    ) -> None:
        """A subtask, the clock or the store ended the checkpoint; that may end the attempt."""
        self._give_up(pending, reason, detail, step)
        kind = pending.kind
        self._failed_count += kind.stored
        if not self._running or not kind.stored:
            return
        if reason.counts and not kind.user_owned:
            self._consecutive_failed += 1
        awaited = kind.final and pending.request_id is not None  # a user's stop: it must not end without the savepoint
        if awaited or self._consecutive_failed > self._settings.tolerable_failed:
            self._running = False
            what = f"{kind.value} checkpoint {pending.checkpoint_id}, {self._consecutive_failed} failed in a row"
            self._effects.append(cm.FailJob(reason, f"{what}: {detail}".removesuffix(": ")))

    def _give_up(
        self, pending: PendingCheckpoint, reason: FailureReason, detail: str, step: PendingStep = PendingStep.GIVE_UP
    ) -> None:
        self._step(pending, step)
        id = pending.checkpoint_id
        del self._pending[id]
        self._remember_given_up(pending)
        if pending.kind.stored:
            self._last_end_ms = self._now_ms
        self._effects.append(cm.NotifyAborted(id, reason, self._latest_completed, detail))
        self._effects += [cm.Discard(id, payload) for payload in pending.payloads.values()]
        if pending.request_id is not None:
            self._effects.append(cm.RequestAnswered(pending.request_id, id, reason, detail))

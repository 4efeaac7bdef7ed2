"""The checkpoint coordinator: it decides when checkpoints are taken and what becomes of them.

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
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec

from cutwater.config import JobConfig
from cutwater.errors import InvariantError
from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.checkpoint.messages import CoordinatorEffect, CoordinatorEvent, SubtaskId
from cutwater.protocol.protocols import PROTOCOLS, AckAnswer, CheckpointKind, FailureReason
from cutwater.protocol.states import State

_T = TypeVar("_T")

WAITING_REQUESTS_MAX = 1000
STORY_EVENTS = 16
IDS_REMEMBERED = 1024


class PendingStage(State):
    """Stage of a checkpoint, seen from the coordinator."""

    TRIGGERED = "triggered"
    """Sources were asked; some subtask has not acknowledged yet."""
    READY = "ready"
    """All have acknowledged; another checkpoint is being published, or there is nothing to publish."""
    PUBLISHING = "publishing"
    """Manifest and log entry are being written: only the performer knows how it will end."""
    COMPLETED = "completed"
    GIVEN_UP = "given_up"


class PendingStep(State):
    """An event in the life of a pending checkpoint."""

    ACKNOWLEDGED = "one of several acknowledgements"
    ALL_ACKNOWLEDGED = "the last acknowledgement"
    PUBLISH = "its turn to be published"
    PUBLISHED = "published"
    PROBED = "a probe: nothing to publish"
    GIVE_UP = "declined, expired, subsumed, job stopped"
    PUBLISH_FAILED = "publishing failed"


PENDING_STAGES: dict[tuple[PendingStage, PendingStep], PendingStage] = {
    (PendingStage.TRIGGERED, PendingStep.ACKNOWLEDGED): PendingStage.TRIGGERED,
    (PendingStage.TRIGGERED, PendingStep.ALL_ACKNOWLEDGED): PendingStage.READY,
    (PendingStage.TRIGGERED, PendingStep.GIVE_UP): PendingStage.GIVEN_UP,
    (PendingStage.READY, PendingStep.PROBED): PendingStage.COMPLETED,
    (PendingStage.READY, PendingStep.PUBLISH): PendingStage.PUBLISHING,
    (PendingStage.READY, PendingStep.GIVE_UP): PendingStage.GIVEN_UP,
    (PendingStage.PUBLISHING, PendingStep.PUBLISHED): PendingStage.COMPLETED,
    (PendingStage.PUBLISHING, PendingStep.PUBLISH_FAILED): PendingStage.GIVEN_UP,
}


@dataclass(slots=True)
class PendingCheckpoint:
    """A checkpoint that was triggered and is neither completed nor given up."""

    checkpoint_id: int
    kind: CheckpointKind
    attempt: int
    triggered_ms: float
    expires_ms: float
    subtasks: frozenset[SubtaskId] = field(repr=False)
    """Those that must acknowledge; the job may have others by the time that it is published."""
    request_id: Hashable | None = None
    """The request it answers, if somebody asked for it."""
    stage: PendingStage = PendingStage.TRIGGERED
    payloads: dict[SubtaskId, object] = field(default_factory=dict[SubtaskId, object], repr=False)
    """The payload of each acknowledgement so far."""


class CompletedCheckpoint(msgspec.Struct, frozen=True):
    """A checkpoint that is published."""

    checkpoint_id: int
    kind: CheckpointKind
    attempt: int
    triggered_ms: float
    completed_ms: float

    @property
    def duration_ms(self) -> float:
        return self.completed_ms - self.triggered_ms


class CheckpointStatistics(msgspec.Struct, frozen=True):
    """Numbers for people, as they are now: ``triggered = in_progress + completed + failed + subsumed``, no probes."""

    triggered: int = 0
    in_progress: int = 0
    completed: int = 0
    failed: int = 0
    subsumed: int = 0
    consecutive_failed: int = 0
    latest_completed_id: int = 0
    """The newest completed one that a recovery may rely on (0: none)."""
    last_duration_ms: float | None = None
    """From the trigger to the log entry, of the last completed one."""


class CheckpointCoordinator:
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
    [SendTrigger(checkpoint_id=8, kind=<CheckpointKind.PERIODIC: 'periodic'>, final=False, savepoint=False)]
    """

    def __init__(
        self,
        settings: JobConfig,
        subtasks: frozenset[SubtaskId],
        sources: frozenset[SubtaskId],
        first_id: int,
        *,
        latest_completed: int = 0,
    ) -> None:
        self._settings = settings
        self._subtasks = subtasks
        self._last_id = first_id
        self._latest_completed = latest_completed
        self._now_ms = -math.inf
        self._attempt = 0
        self._running = False
        self._survivors = False
        self._final_wanted = False
        self._probe_wanted = False
        self._drain: Hashable | None = None
        self._ending = False
        self._periodic_ms = math.inf
        self._last_end_ms = -math.inf
        self._consecutive_failed = 0
        self._pending: dict[int, PendingCheckpoint] = {}
        self._given_up: dict[int, int] = {}  # id -> attempt
        self._completed: dict[int, CompletedCheckpoint] = {}
        self._waiting: deque[Hashable] = deque()
        self._held: deque[cm.RequestCheckpoint | cm.RequestDrain] = deque()
        """Requests that came while a part of the job went back."""
        self._triggered = self._completed_count = self._failed_count = self._subsumed_count = 0
        self._last_duration_ms: float | None = None
        self._events: deque[CoordinatorEvent] = deque(maxlen=STORY_EVENTS)
        self._effects: list[CoordinatorEffect] = []
        self.reshape(subtasks, sources)

    def reshape(self, subtasks: frozenset[SubtaskId], sources: frozenset[SubtaskId]) -> None:
        """The next attempt has these subtasks; ids and counts go on.  Only while the job does not run.

        Raises:
            InvariantError: it runs, or there is no source among them.
        """
        if self._running:
            raise self._broken("the subtasks cannot change while the job runs")
        if not sources or not sources <= subtasks:
            raise self._broken("sources must be subtasks, and there must be one")
        self._subtasks = subtasks

    # ------------------------------------------------------------------------------------------------- questions

    @property
    def pending(self) -> tuple[PendingCheckpoint, ...]:
        """Checkpoints under way, oldest first (to look at only)."""
        return tuple(self._pending.values())

    @property
    def latest_completed(self) -> CompletedCheckpoint | None:
        """The newest completed checkpoint of this run that a recovery may rely on."""
        return self._completed.get(self._latest_completed)

    def completed(self, checkpoint_id: int) -> CompletedCheckpoint | None:
        """A checkpoint that completed in this run, if it is not too long ago."""
        return self._completed.get(checkpoint_id)

    def request_of(self, checkpoint_id: int) -> Hashable | None:
        """The request that a checkpoint under way answers, if there is one."""
        pending = self._pending.get(checkpoint_id)
        return pending.request_id if pending is not None else None

    @property
    def last_id(self) -> int:
        """The highest id used so far."""
        return self._last_id

    @property
    def final_under_way(self) -> bool:
        """A wave after which nothing is read has begun or completed: subtasks that have passed it never go on alone."""
        return self._ending or self._drain is not None or any(p.kind.final for p in self._pending.values())

    def attempt_of(self, checkpoint_id: int) -> int:
        """The attempt that a checkpoint belongs to: the present one, unless it was begun under an older one."""
        return self._given_up.get(checkpoint_id, self._attempt)

    @property
    def statistics(self) -> CheckpointStatistics:
        """The numbers as they are now."""
        return CheckpointStatistics(
            triggered=self._triggered,
            in_progress=sum(p.kind.stored for p in self._pending.values()),
            completed=self._completed_count,
            failed=self._failed_count,
            subsumed=self._subsumed_count,
            consecutive_failed=self._consecutive_failed,
            latest_completed_id=self._latest_completed,
            last_duration_ms=self._last_duration_ms,
        )

    @property
    def next_due_ms(self) -> float | None:
        """Time of the next trigger or expiry, when a ``Tick`` is wanted; ``None`` if only events can change things."""
        due = math.inf
        for pending in self._pending.values():
            if pending.stage is PendingStage.TRIGGERED:
                due = min(due, pending.expires_ms)
        if self._may_trigger and self._place_free:
            due = min(due, self._periodic_due_ms)
        return due if due < math.inf else None

    @property
    def _part_away(self) -> bool:
        """Some subtasks run, and the others come back to them."""
        return self._survivors and not self._running

    @property
    def _may_trigger(self) -> bool:
        return self._may_probe and self._drain is None

    @property
    def _may_probe(self) -> bool:
        if not self._running or self._final_wanted or self._ending:
            return False
        return not any(p.kind.final for p in self._pending.values())

    @property
    def _place_free(self) -> bool:
        if not self._pending:
            return True
        row = PROTOCOLS[self._settings.protocol]
        if (row.switches or row.halts) and any(p.kind.user_owned for p in self._pending.values()):
            return False  # its barriers would overtake those of the savepoint, and end it
        taken = sum(p.kind.stored and not p.kind.user_owned for p in self._pending.values())
        return taken < self._settings.max_concurrent

    @property
    def _periodic_due_ms(self) -> float:
        return max(self._periodic_ms, self._last_end_ms + self._settings.min_pause_ms)

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
        id, kind, done = pending.checkpoint_id, pending.kind, self._complete(pending, PendingStep.PUBLISHED)
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
            self._complete(probe, PendingStep.PROBED)
            self._effects.append(cm.NotifyComplete(probe.checkpoint_id, probe.kind, probe.kind.commits))

    def _complete(self, pending: PendingCheckpoint, step: PendingStep) -> CompletedCheckpoint:
        self._step(pending, step)
        id, kind = pending.checkpoint_id, pending.kind
        done = CompletedCheckpoint(id, kind, pending.attempt, pending.triggered_ms, self._now_ms)
        del self._pending[id]
        _remember(self._completed, id, done)
        return done

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
        _remember(self._given_up, id, pending.attempt)
        if pending.kind.stored:
            self._last_end_ms = self._now_ms
        self._effects.append(cm.NotifyAborted(id, reason, self._latest_completed, detail))
        self._effects += [cm.Discard(id, payload) for payload in pending.payloads.values()]
        if pending.request_id is not None:
            self._effects.append(cm.RequestAnswered(pending.request_id, id, reason, detail))

    # ------------------------------------------------------------------------------------------------ the tables

    def _step(self, pending: PendingCheckpoint, step: PendingStep) -> None:
        after = PENDING_STAGES.get((pending.stage, step))
        if after is None:
            raise self._broken(f"checkpoint {pending.checkpoint_id} is {pending.stage.value}: no '{step.value}'")
        pending.stage = after

    def _broken(self, what: str) -> InvariantError:
        events = "".join(f"\n  {event}" for event in self._events) or " none"
        return InvariantError(f"checkpoint coordinator: {what}\npending {self.pending}, last events:{events}")

    # ------------------------------------------------------------------------------------------------- invariants

    def validate(self) -> None:
        """Check every invariant.

        Raises:
            InvariantError: one is broken.
        """
        if broken := self._broken_of_all():
            raise self._broken(f"invariant broken: {broken}")
        for id, pending in self._pending.items():
            if broken := self._broken_of(id, pending):
                raise self._broken(f"invariant broken of checkpoint {id}: {broken}")

    def _broken_of_all(self) -> str:
        """The first invariant that does not hold of all checkpoints together."""
        pending, given_up, completed = self._pending, self._given_up, self._completed
        publishing = places = stored = final = 0
        for p in pending.values():
            publishing += p.stage is PendingStage.PUBLISHING
            places += p.kind is CheckpointKind.PERIODIC or p.kind is CheckpointKind.ON_DEMAND
            stored += p.kind.stored
            final += p.kind.final
        if len(pending) > 1 and list(pending) != sorted(pending):
            return "pending ids grow"
        if max([self._last_id, *pending, *given_up, *completed]) > self._last_id:
            return "no id above the last one"
        if not given_up.keys().isdisjoint(completed):
            return "what is given up is not completed"
        if publishing > 1:
            return "one is published at a time"
        if places > self._settings.max_concurrent:
            return "no more pending than allowed"
        if 1 < len(pending) != stored:
            return "a probe is under way alone"
        if final > 1:
            return "one final checkpoint at a time"
        if self._held and not self._part_away:
            return "requests are held only while a part is away"
        if self._triggered != stored + self._completed_count + self._failed_count + self._subsumed_count:
            return "every checkpoint is counted once"
        if not len(given_up) <= IDS_REMEMBERED >= len(completed):
            return "the memory of ids is bounded"
        return ""

    def _broken_of(self, id: int, p: PendingCheckpoint) -> str:
        """The first that does not hold of one that is under way."""
        triggered = p.stage is PendingStage.TRIGGERED
        if id in self._given_up or id in self._completed:
            return "it is neither given up nor completed"
        if not p.payloads.keys() <= p.subtasks:
            return "only subtasks have acknowledged"
        if triggered != (len(p.payloads) < len(p.subtasks)):
            return "ready means acknowledged by all"
        if not (triggered or p.kind.stored):
            return "nothing of a probe is published"
        if p.attempt != self._attempt:
            return "nothing outlives its attempt"
        return ""


def _remember(known: dict[int, _T], id: int, what: _T) -> None:
    known[id] = what
    while len(known) > IDS_REMEMBERED:
        del known[min(known)]

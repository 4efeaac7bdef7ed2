"""What the coordinator knows of its checkpoints, the questions it answers, and every invariant that must hold."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable, Iterable

from cutwater.config import JobConfig
from cutwater.errors import InvariantError
from cutwater.protocol.checkpoint.messages import (
    CoordinatorEffect,
    CoordinatorEvent,
    RequestCheckpoint,
    RequestDrain,
    SubtaskId,
)
from cutwater.protocol.checkpoint.pending import (
    PENDING_STAGES,
    CheckpointStatistics,
    CompletedCheckpoint,
    PendingCheckpoint,
    PendingStage,
    PendingStep,
)
from cutwater.protocol.protocols import PROTOCOLS
from cutwater.protocol.reasons import CheckpointKind

STORY_EVENTS = 16
IDS_REMEMBERED = 1024


class CoordinatorState:
    """The state of a ``CheckpointCoordinator``, with the questions that a performer may ask."""

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
        self._held: deque[RequestCheckpoint | RequestDrain] = deque()
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
        """When a ``Tick`` is wanted: the next trigger or the next expiry; ``None`` if only events can change things."""
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

    # ------------------------------------------------------------------------------------------------ the tables

    def _remember_given_up(self, pending: PendingCheckpoint) -> None:
        self._given_up[pending.checkpoint_id] = pending.attempt
        while len(self._given_up) > IDS_REMEMBERED:
            del self._given_up[min(self._given_up)]

    def _remember_completed(self, done: CompletedCheckpoint) -> None:
        self._completed[done.checkpoint_id] = done
        while len(self._completed) > IDS_REMEMBERED:
            del self._completed[min(self._completed)]

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
        for what, holds in self._invariants():
            if not holds:
                raise self._broken(f"invariant broken: {what}")
        for pending in self._pending.values():
            for what, holds in self._invariants_of(pending):
                if not holds:
                    raise self._broken(f"invariant broken of checkpoint {pending.checkpoint_id}: {what}")

    def _invariants(self) -> Iterable[tuple[str, bool]]:
        pending, found = self._pending, self._pending.values()
        no_place = (CheckpointKind.FINAL, CheckpointKind.PROBE)
        places = sum(not p.kind.user_owned and p.kind not in no_place for p in found)
        ended = self._completed_count + self._failed_count + self._subsumed_count
        newest = max(max(ids, default=0) for ids in (pending, self._given_up, self._completed))
        return (
            ("pending ids grow", len(pending) < 2 or list(pending) == sorted(pending)),
            ("no id above the last one", newest <= self._last_id),
            ("what is given up is not completed", self._given_up.keys().isdisjoint(self._completed)),
            ("one is published at a time", sum(p.stage is PendingStage.PUBLISHING for p in found) <= 1),
            ("no more pending than allowed", places <= self._settings.max_concurrent),
            ("a probe is under way alone", len(pending) < 2 or all(p.kind.stored for p in found)),
            ("one final checkpoint at a time", sum(p.kind.final for p in found) <= 1),
            ("requests are held only while a part is away", self._part_away or not self._held),
            ("every checkpoint is counted once", self._triggered == sum(p.kind.stored for p in found) + ended),
            ("the memory of ids is bounded", len(self._given_up) <= IDS_REMEMBERED >= len(self._completed)),
        )

    def _invariants_of(self, p: PendingCheckpoint) -> Iterable[tuple[str, bool]]:
        id = p.checkpoint_id
        triggered = p.stage is PendingStage.TRIGGERED
        return (
            ("it is neither given up nor completed", id not in self._given_up and id not in self._completed),
            ("only subtasks have acknowledged", p.payloads.keys() <= p.subtasks),
            ("ready means acknowledged by all", triggered == (len(p.payloads) < len(p.subtasks))),
            ("nothing of a probe is published", triggered or p.kind.stored),
            ("nothing outlives its attempt", p.attempt == self._attempt),
        )

"""Rescale of a running job: when workers are asked for and sent away, and when the job changes its parallelism.

The job runs on while the workers it lacks start (as *recruits*, beyond its group); so too few cores cost it nothing.
Then a checkpoint is taken, and the next attempt begins from it at the new parallelism::

    IDLE ──asked──> WAITING ──the job runs──> RECRUITING ──all there──> SNAPSHOT ──complete──> SWITCHING ──runs──> IDLE
     ^                    │                       │ no cores in time      │ failed                │ not all there
     └─── at the old parallelism ─────────────────┴───────────────────────┘                       v in time
                          │                                               the old group, from the same checkpoint
                          └─the job lacks workers, and has enough for what was asked: SWITCHING at once

A failure of the job before the switch ends the rescale: the recovery needs the cores more.  A later request takes the
place of one that still waits for cores.  An *adaptive* job does it all by itself: where cores stay lost it goes on with
fewer workers, and it keeps asking for those it lacks.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Hashable
from typing import NamedTuple, TypeAlias

import msgspec

_TELL_MS = 8_000.0
"""Recruits that lack for so long are told of."""


class Shape(NamedTuple):
    """Width of a job: the parallelism of steps that name none, and the workers that this takes."""

    parallelism: int
    workers: int


class RescalePhase(enum.Enum):
    IDLE = "idle"
    WAITING = "waiting"
    RECRUITING = "recruiting"
    SNAPSHOT = "snapshot"
    SWITCHING = "switching"


# ---------------------------------------------------------------------------------------------------------- events


class Requested(msgspec.Struct, frozen=True):
    """Somebody wants another parallelism; ``request`` comes back in the answer."""

    shape: Shape
    request: Hashable
    now_ms: float


class GroupSeen(msgspec.Struct, frozen=True):
    """Slots with a live worker, recruits included; ``cores``: those with a worker or at least a core.

    ``waits``: nothing but missing workers keeps the job from going on.
    """

    slots: frozenset[int]
    cores: frozenset[int]
    waits: bool
    now_ms: float


class SnapshotEnded(msgspec.Struct, frozen=True):
    """The checkpoint asked for is complete; with ``error``: it is not, and why."""

    error: str
    now_ms: float


class AttemptRuns(msgspec.Struct, frozen=True):
    """All subtasks of an attempt run."""

    now_ms: float


class AttemptFailed(msgspec.Struct, frozen=True):
    """The attempt is over without the rescale's doing."""

    reason: str
    now_ms: float


class Short(msgspec.Struct, frozen=True):
    """The group did not become complete in time; so many workers are there."""

    workers: int
    reason: str
    now_ms: float


class Tick(msgspec.Struct, frozen=True):
    now_ms: float


RescaleEvent: TypeAlias = Requested | GroupSeen | SnapshotEnded | AttemptRuns | AttemptFailed | Short | Tick

# --------------------------------------------------------------------------------------------------------- effects


class Recruit(msgspec.Struct, frozen=True):
    """Start a worker for every slot up to ``workers`` that has none."""

    workers: int


class Dismiss(msgspec.Struct, frozen=True):
    """Send away all recruits."""


class TakeSnapshot(msgspec.Struct, frozen=True):
    """Take a checkpoint; answered by ``SnapshotEnded``."""


class Switch(msgspec.Struct, frozen=True):
    """Go on at another parallelism from the newest checkpoint; what is beyond the new group leaves."""

    shape: Shape
    reason: str


class Answered(msgspec.Struct, frozen=True):
    """The request is done; with ``error``: it failed, and the job goes on as it was."""

    request: Hashable
    error: str


class Note(msgspec.Struct, frozen=True):
    """Something that the user should know."""

    text: str


RescaleEffect: TypeAlias = Recruit | Dismiss | TakeSnapshot | Switch | Answered | Note


class Rescaler:
    """Decides over the parallelism of one job.

    Args:
        shape: what it begins with.
        deadline_ms: how long after the last one that came a missing recruit is waited for.
        least: an adaptive job goes on with as little as this; ``None``: the job is not adaptive.
        stable_ms: how long an adaptive job's recruits must be there before it makes use of only a part of them.
        shape_of: the widest shape that so many workers suffice for.

    >>> rescaler = Rescaler(Shape(2, 2))
    >>> rescaler.handle(AttemptRuns(0)), rescaler.handle(Requested(Shape(3, 3), "r", 0))
    ([], [Recruit(workers=3)])
    >>> everyone = frozenset({0, 1, 2})
    >>> rescaler.handle(GroupSeen(everyone, everyone, False, 10)), rescaler.handle(SnapshotEnded("", 20))
    ([TakeSnapshot()], [Switch(shape=Shape(parallelism=3, workers=3), reason='rescaled from 2 to 3')])
    >>> rescaler.handle(AttemptRuns(30)), rescaler.shape.parallelism
    ([Answered(request='r', error='')], 3)
    """

    def __init__(
        self,
        shape: Shape,
        *,
        deadline_ms: float = 10_000.0,
        least: Shape | None = None,
        stable_ms: float = 0.0,
        shape_of: Callable[[int], Shape] = lambda workers: Shape(workers, workers),
    ) -> None:
        self.shape = shape
        self.phase = RescalePhase.IDLE
        self._deadline_ms, self._stable_ms = deadline_ms, stable_ms
        self._least, self._shape_of = least, shape_of
        self._wanted = shape
        self._target = shape
        self._before: Shape | None = None
        self._request: Hashable | None = None
        self._runs = False
        self._slots: frozenset[int] = frozenset()
        self._cores: frozenset[int] = frozenset()
        self._job_waits = False
        self._recruiting = False
        self._changed_ms = 0.0
        self._tell_ms: float | None = None
        """Time at which whoever asked for recruits is told that they lack cores."""

    @property
    def wanted(self) -> Shape:
        """Shape that somebody asked for last; an adaptive job may run with less for a while."""
        asked = self.phase is RescalePhase.SWITCHING and self._request is not None
        return self.shape if asked else self._wanted

    @property
    def fewest(self) -> int:
        """With so many workers the job can go on where its group does not become complete; 0: with no fewer."""
        options = [s.workers for s in (self._least, self._before) if s is not None and s.workers < self.shape.workers]
        return min(options, default=0)

    @property
    def next_due_ms(self) -> float | None:
        """Time at which a Tick is wanted."""
        if self.phase is RescalePhase.RECRUITING:
            deadline_ms = self._changed_ms + self._deadline_ms
            return deadline_ms if self._tell_ms is None else min(deadline_ms, self._tell_ms)
        if self.phase is RescalePhase.IDLE and self._recruiting and self._usable.workers > self.shape.workers:
            return self._changed_ms + self._stable_ms
        return None

    def handle(self, event: RescaleEvent) -> list[RescaleEffect]:
        """Take one event; the effects are to be performed in order."""
        match event:
            case Requested():
                return self._requested(event)
            case GroupSeen():
                if event.slots - self._slots:
                    self._changed_ms = event.now_ms
                self._slots, self._cores, self._job_waits = event.slots, event.cores, event.waits
                return self._advance(event.now_ms)
            case SnapshotEnded():
                return self._snapshot_ended(event)
            case AttemptRuns():
                self._runs = True
                return self._attempt_runs(event)
            case AttemptFailed():
                self._runs = False
                return self._failed(event.reason)
            case Short():
                return self._short(event)
            case Tick():
                return self._tick(event.now_ms)

    # ------------------------------------------------------------------------------------------------------ rules

    def _requested(self, event: Requested) -> list[RescaleEffect]:
        if self.phase in (RescalePhase.SNAPSHOT, RescalePhase.SWITCHING):
            underway = f"a rescale to parallelism {self._target.parallelism} is under way"
            return [Answered(event.request, underway)]
        withdrawn = self._answer(f"a rescale to parallelism {event.shape.parallelism} was asked for meanwhile")
        if event.shape == self.shape:
            self._wanted, self.phase = event.shape, RescalePhase.IDLE
            return [*withdrawn, Answered(event.request, ""), *self._dismiss()]
        self._request, self._target, self.phase = event.request, event.shape, RescalePhase.WAITING
        return withdrawn + (self._begin(event.now_ms) if self._runs else self._advance(event.now_ms))

    def _begin(self, now_ms: float) -> list[RescaleEffect]:
        self.phase, self._changed_ms, self._tell_ms = RescalePhase.RECRUITING, now_ms, now_ms + _TELL_MS
        effects: list[RescaleEffect] = []
        if self._target.workers > self.shape.workers:
            self._recruiting = True
            effects.append(Recruit(self._target.workers))
        return effects + self._advance(now_ms)

    def _advance(self, now_ms: float) -> list[RescaleEffect]:
        """Workers came or went."""
        if self.phase is RescalePhase.WAITING and self._job_waits and len(self._slots) >= self._target.workers:
            return self._switch(self._target, f"rescaled from {self.shape.parallelism} to {self._target.parallelism}")
        if self.phase is RescalePhase.IDLE and self._recruiting and self._usable == self._wanted:
            self._target, self.phase = self._wanted, RescalePhase.RECRUITING
            self._changed_ms, self._tell_ms = now_ms, None
        if self.phase is RescalePhase.RECRUITING and self._slots >= set(range(self._target.workers)):
            self.phase = RescalePhase.SNAPSHOT
            return [TakeSnapshot()]
        return []

    def _snapshot_ended(self, event: SnapshotEnded) -> list[RescaleEffect]:
        if self.phase is not RescalePhase.SNAPSHOT:
            return []  # the attempt failed meanwhile, and the request is answered
        if event.error and self._request is None:  # the recruits stay, for another try
            self.phase, self._changed_ms = RescalePhase.IDLE, event.now_ms
            return [Note(f"not rescaled: {event.error}; the job goes on at parallelism {self.shape.parallelism}")]
        if event.error:
            return self._give_up(event.error)
        if not self._slots >= set(range(self._target.workers)):
            return self._give_up("a new worker was lost")
        return self._switch(self._target, f"rescaled from {self.shape.parallelism} to {self._target.parallelism}")

    def _switch(self, shape: Shape, reason: str) -> list[RescaleEffect]:
        self._before = self.shape if self.phase is RescalePhase.SNAPSHOT else None
        self.phase, self.shape, self._runs, self._recruiting = RescalePhase.SWITCHING, shape, False, False
        return [Switch(shape, reason)]

    def _attempt_runs(self, event: AttemptRuns) -> list[RescaleEffect]:
        effects: list[RescaleEffect] = []
        self._before = None
        if self.phase is RescalePhase.SWITCHING:
            self.phase = RescalePhase.IDLE
            self._wanted = self.shape if self._request is not None else self._wanted
            effects += self._answer("")
        if self.phase is RescalePhase.WAITING:
            return effects + self._begin(event.now_ms)
        return effects + self._look_for_more(event.now_ms)

    def _look_for_more(self, now_ms: float) -> list[RescaleEffect]:
        if self._least is None or self._recruiting or self._wanted.workers <= self.shape.workers:
            return []
        self._recruiting, self._changed_ms = True, now_ms
        return [Recruit(self._wanted.workers)]

    def _failed(self, reason: str) -> list[RescaleEffect]:
        if self.phase in (RescalePhase.RECRUITING, RescalePhase.SNAPSHOT):
            return self._give_up(f"the job had to restart: {reason}")
        return self._dismiss()

    def _short(self, event: Short) -> list[RescaleEffect]:
        """The group stays incomplete: go back to the old one, or with ``least`` on with what there is."""
        why, before = event.reason, self._before
        if before is not None and before.workers <= event.workers:
            shape = before
        else:
            shape = self._shape_of(min(event.workers, self.shape.workers - 1))
        note = Note(f"{why}; the job goes on at parallelism {shape.parallelism}")
        self.phase = RescalePhase.SWITCHING
        request, self._request = self._request, None
        answers: list[RescaleEffect] = [] if request is None else [Answered(request, note.text)]
        return [note, *answers, *self._switch(shape, why)]

    def _tick(self, now_ms: float) -> list[RescaleEffect]:
        due = self.next_due_ms
        if due is None or now_ms < due:
            return []
        if self.phase is RescalePhase.RECRUITING and now_ms < self._changed_ms + self._deadline_ms:
            self._tell_ms = None
            wanted, now = self._target.parallelism, self.shape.parallelism
            return [Note(f"rescale to {wanted}: {self._shortage()}; the job runs on at parallelism {now} meanwhile")]
        if self.phase is RescalePhase.RECRUITING:
            return self._give_up(self._shortage())
        self._target, self.phase = self._usable, RescalePhase.RECRUITING
        self._changed_ms, self._tell_ms = now_ms, None
        return self._advance(now_ms)

    def _shortage(self) -> str:
        """Reason for which the recruits are not there, in a user's words."""
        wanted = frozenset(range(self._target.workers))
        missing = len(wanted - self._cores)
        if not missing:
            there = len(self._slots & wanted)
            return f"{there} of {len(wanted)} workers are there, the others have a core, and their Python is starting"
        free = f"free {missing} {'core' if missing == 1 else 'cores'}"
        return f"{len(wanted) - missing} of {len(wanted)} workers got a core of the Spark cluster; {free}"

    def _give_up(self, reason: str) -> list[RescaleEffect]:
        self.phase = RescalePhase.IDLE
        text = f"{reason}; the job goes on at parallelism {self.shape.parallelism}"
        effects = self._dismiss()
        if self._request is None:
            return [Note(f"not rescaled: {text}"), *effects]
        return [*effects, *self._answer(text)]

    def _dismiss(self) -> list[RescaleEffect]:
        recruiting, self._recruiting = self._recruiting, False
        return [Dismiss()] if recruiting else []

    def _answer(self, error: str) -> list[RescaleEffect]:
        request, self._request = self._request, None
        return [] if request is None else [Answered(request, error)]

    @property
    def _usable(self) -> Shape:
        """The widest shape that all slots from 0 on suffice for, up to the one wanted."""
        workers = 0
        while workers in self._slots and workers < self._wanted.workers:
            workers += 1
        return self._wanted if workers == self._wanted.workers else self._shape_of(workers)

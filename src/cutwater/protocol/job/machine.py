"""The life of a job, as a pure machine: membership, attempts, restarts, the end.

The coordinator in the driver owns the group of workers.  A *slot* is a place in the group (0 .. n-1); a *worker* is one
process that fills it, told apart from earlier processes of the slot by its incarnation.  An *attempt* is one run of all
subtasks from one checkpoint; everything that belongs to an older attempt is ignored (fencing).

Phases::

    FORMING ──all slots joined──> DEPLOYING ──all ready──> RUNNING ──all subtasks finished──> DRAINING
       ^                              │                       │                                  │
       │<───────── delay over ── RESTARTING <──── a worker or subtask failed ────────────────────┤
       │                              │ budget used up                              final checkpoint committed
       v                              v                                                          v
    (time out) ───────────────────> ENDING ──workers gone──> FINISHED | FAILED | CANCELLED <── ENDING

A *recruit* is a worker of a slot beyond the group: it waits there for a rescale, and its loss is no failure.
``Reshape`` gives the job another group: the attempt ends without a failure, and the next one begins as soon as all are
there.

A failure while RUNNING that concerns some *regions* only (``protocol.job.recovery_scope``) takes just these down: the
phase stays, the others run on, and once the workers are there the regions begin again under a new attempt number::

    region up ──failed──> down ──delay over, its slots filled──> deploying ──all its workers ready──> up

All regions that are down come back together; what fails meanwhile joins them.  If all are down, or they cannot be
restored beside the others, the whole job restarts.

Rules: A7 (no subtask ends before the job), R1 (restart of the whole job), R2 (restart of regions).  An incomplete group
is waited for (``Waiting``); that ends the job only where its user wants it to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from cutwater.errors import InvariantError
from cutwater.protocol.job import messages as j
from cutwater.protocol.job.messages import Effect, Event, JobPhase, Outcome
from cutwater.protocol.job.recovery_scope import Division, Region
from cutwater.protocol.job.restart_budget import GiveUp, RestartDecider

_LIVE = frozenset({JobPhase.FORMING, JobPhase.DEPLOYING, JobPhase.RUNNING, JobPhase.DRAINING, JobPhase.RESTARTING})
_ATTEMPT = frozenset({JobPhase.DEPLOYING, JobPhase.RUNNING, JobPhase.DRAINING})


_TELL_CORES_MS = 8_000.0
"""So long a group lacks a core before its user is told: within 10 s, the looks at Spark included."""
_TELL_STARTING_MS = 30_000.0
"""So long a process may be starting before its user is told."""
_SHOWN_MAX = 3
"""Workers that are starting are named up to this number."""


def duration_text(ms: float) -> str:
    """
    >>> duration_text(61_900), duration_text(312_000)
    ('61 s', '5m 12s')
    """
    seconds = int(ms // 1000)
    return f"{seconds} s" if seconds < 120 else f"{seconds // 60}m {seconds % 60:02}s"


@dataclass
class Waiting:
    """The wait of an incomplete group of workers: for cores, or for processes that are starting on those it has.

    Lost cores are a state and no end: a node of a cluster that scales itself comes after minutes.  So the wait has no
    end of its own; it is told of once, it has numbers, hosts and times for whoever looks, and ends the job only where
    its user set a time for that.  Belongs to the job machine, which says who is there.

    Args:
        resource_timeout_ms: cores must come so long after the last that came, else the job ends; ``None``: never.
        stabilization_ms: the same, for a group that can do with fewer.
        progress_ms: when it begins.

    >>> waiting = Waiting(None, 10_000.0, 0.0)
    >>> waiting.look({0: 1}, 3, 5_000.0)
    >>> waiting.hear(j.Progress(frozenset({1}), (j.Starting(2, "node7", 4_000.0),), 5_000.0))
    >>> waiting.text(65_000.0)
    'waiting for cores, 2 of 3 since 60 s; worker 2 has a core, Python is starting since 61 s on host node7'
    """

    resource_timeout_ms: float | None
    stabilization_ms: float
    progress_ms: float
    """Time at which the last worker or core came, or the wait began."""
    since_ms: float | None = None
    """Time at which the group became incomplete; ``None``: it is not."""
    _slots: int = 0
    _missing: frozenset[int] = frozenset()
    _queued: frozenset[int] = frozenset()
    _starting: dict[int, j.Starting] = field(default_factory=dict[int, j.Starting])
    _told: set[str] = field(default_factory=set[str])

    def look(self, workers: Iterable[int], slots: int, now_ms: float) -> None:
        """These slots of a group of ``slots`` have a worker."""
        self._slots, self._missing = slots, frozenset(range(slots)).difference(workers)
        if self._queued or self._starting:
            self._queued &= self._missing
            self._starting = {slot: found for slot, found in self._starting.items() if slot in self._missing}
        if not self._missing:
            self.since_ms = None
            self._told.clear()
        elif self.since_ms is None:
            self.since_ms = now_ms

    def hear(self, progress: j.Progress) -> None:
        """Take what Spark tells of slots without a worker."""
        known = len(self._queued) + len(self._starting), len(self._starting)
        starting = {found.slot: found for found in progress.starting if found.slot in self._missing}
        self._queued = (progress.queued & self._missing).difference(starting)
        self._starting = starting
        if (len(self._queued) + len(starting), len(starting)) > known:
            self.progress_ms = progress.now_ms

    def progressed(self, now_ms: float) -> None:
        """A worker came or went, or the group is another one: whoever waits has patience anew."""
        self.progress_ms = now_ms

    @property
    def cores(self) -> int:
        """Slots of the group with a core, or a worker."""
        return self._slots - len(self._missing) + len(self._starting)

    @property
    def present(self) -> int:
        """Slots of the group with a worker."""
        return self._slots - len(self._missing)

    @property
    def starting(self) -> list[j.Starting]:
        """Slots that have a core and no worker yet."""
        return [self._starting[slot] for slot in sorted(self._starting)]

    @property
    def lacks_cores(self) -> bool:
        """Spark knows of a worker that is wanted, and has no core for it; any other that is missing is starting."""
        return bool(self._queued)

    def due_ms(self, enough: bool) -> float | None:
        """Time at which something is to be told or decided; ``enough``: the job can go on with those that are there."""
        dues = [due for kind, due in self._tellings(enough) if kind not in self._told]
        if (deadline := self.deadline_ms(enough)) is not None:
            dues.append(deadline)
        return min(dues, default=None)

    def deadline_ms(self, enough: bool) -> float | None:
        """Time at which the wait for cores is over; ``enough`` as above."""
        patience_ms = self.stabilization_ms if enough else self.resource_timeout_ms
        return self.progress_ms + patience_ms if patience_ms is not None and self.lacks_cores else None

    def tell(self, enough: bool, now_ms: float) -> str:
        """Text that the user has to be told now; empty: he knows."""
        fresh = [kind for kind, due in self._tellings(enough) if kind not in self._told and now_ms >= due]
        self._told.update(fresh)
        if not fresh:
            return ""
        advice = f" ({self._advice}; the job goes on when they are there)" if "cores" in fresh else ""
        return self.text(now_ms) + advice

    def _tellings(self, enough: bool) -> list[tuple[str, float]]:
        tellings: list[tuple[str, float]] = []
        if self.lacks_cores and self.since_ms is not None and not enough:
            tellings.append(("cores", self.since_ms + _TELL_CORES_MS))
        tellings += [(f"starting {s.slot}", s.since_ms + _TELL_STARTING_MS) for s in self._starting.values()]
        return tellings

    def text(self, now_ms: float) -> str:
        """The state in one line, for a user."""
        if self.since_ms is None:
            return ""
        parts: list[str] = []
        if self.lacks_cores:
            parts.append(f"waiting for cores, {self.cores} of {self._slots} since {_age(self.since_ms, now_ms)}")
        elif len(self._starting) < len(self._missing):
            parts.append(f"waiting for workers, {self.present} of {self._slots} since {_age(self.since_ms, now_ms)}")
        starting = self.starting
        for found in starting[:_SHOWN_MAX]:
            host = f" on host {found.host}" if found.host else ""
            age = _age(found.since_ms, now_ms)
            parts.append(f"worker {found.slot} has a core, Python is starting since {age}{host}")
        if len(starting) > _SHOWN_MAX:
            parts.append(f"{len(starting) - _SHOWN_MAX} more are starting")
        return "; ".join(parts)

    def shortage(self) -> str:
        """Reason for which the group is not complete."""
        return f"{self.cores} of {self._slots} workers got a core of the Spark cluster; {self._advice}"

    @property
    def _advice(self) -> str:
        missing = self._slots - self.cores
        ask = f" or ask for parallelism {self.cores}" if self.cores else ""
        return f"free {missing} {'core' if missing == 1 else 'cores'}{ask}"


def _age(since_ms: float, now_ms: float) -> str:
    return duration_text(max(0.0, now_ms - since_ms))


@dataclass
class JobMachine:
    """Decides when attempts begin and end.

    Args:
        slots: number of workers of a full group.
        subtasks: all subtasks as (vertex, subtask).
        restart: the restart strategy.
        resource_timeout_ms: how long after the last progress a group that lacks cores is given up; ``None``: never.
        stabilization_ms: the same, where the job can go on with those that are there.
        attempt: number of the last attempt known (from the log); the first one here is above it.
        fewest: with so many workers the job can go on, where the group does not become complete; 0: with no fewer than
            all.
        regions: parts of ``subtasks`` that can be restarted by themselves; none: only all of them together.
        upstream: of each region, the numbers of those that go back with it (R3); none: each goes back alone.
    """

    slots: int
    subtasks: frozenset[tuple[int, int]]
    restart: RestartDecider
    resource_timeout_ms: float | None = None
    stabilization_ms: float = 10_000.0
    now_ms: float = 0.0
    attempt: int = 0
    fewest: int = 0
    regions: tuple[Region, ...] = ()
    upstream: tuple[frozenset[int], ...] = ()
    phase: JobPhase = JobPhase.FORMING
    workers: dict[int, int] = field(default_factory=dict[int, int])
    """Live workers: slot -> incarnation; those of slots beyond the group are recruits."""
    down: set[int] = field(default_factory=set[int])
    """Regions that do not run while others do."""
    _deploying: bool = False
    """True while the regions that are down are being restored."""
    _ready: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """Slots and regions."""
    _finished: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    _resume_ms: float = 0.0
    _outcome: tuple[Outcome, str] | None = None
    _story: deque[tuple[JobPhase, Event]] = field(default_factory=lambda: deque[tuple[JobPhase, Event]](maxlen=16))

    def __post_init__(self) -> None:
        self.waiting = Waiting(self.resource_timeout_ms, self.stabilization_ms, self.now_ms)
        self.waiting.look(self.workers, self.slots, self.now_ms)
        self._divide()

    def _divide(self) -> None:
        """Work out what the regions need."""
        self.regions = self.regions or (self.subtasks,)
        self._division = Division(self.regions, self.upstream, self.slots)
        self.parts = self._division.parts
        """Slots and the regions that their workers hold a part of."""
        self._attempts = [self.attempt] * len(self.regions)

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; the effects are to be performed in order."""
        self._story.append((self.phase, event))
        self.now_ms = max(self.now_ms, event.now_ms)
        effects = self._dispatch(event)
        self.waiting.look(self.workers, self.slots, self.now_ms)
        self.validate()
        return effects

    @property
    def next_due_ms(self) -> float | None:
        """Time at which a Tick is wanted."""
        if self.waits:
            return self.waiting.due_ms(self._enough)
        if self.phase is JobPhase.RESTARTING or (self.down and not self._deploying and self.phase is JobPhase.RUNNING):
            return self._resume_ms
        return None

    @property
    def waits(self) -> bool:
        """True if nothing but missing workers keeps the job, or regions that are down, from going on."""
        if self.phase is JobPhase.FORMING:
            return self.present < self.slots
        down = self.down and not self._deploying and self.phase is JobPhase.RUNNING
        return bool(down) and self.present < self.slots and self.now_ms >= self._resume_ms

    @property
    def _enough(self) -> bool:
        """With the workers that are there the job can go on, at a lower parallelism."""
        return 0 < self.fewest <= len(self.workers)

    @property
    def present(self) -> int:
        """Slots of the group that a live worker fills."""
        return sum(slot < self.slots for slot in self.workers)

    def is_current(self, attempt: int, region: int) -> bool:
        """True if something said in the name of an attempt of a region counts (fencing)."""
        if not 0 <= region < len(self.regions) or (region in self.down and not self._deploying):
            return False
        return attempt == self._attempts[region]

    def validate(self) -> None:
        """Every invariant, once."""
        problems: list[str] = []
        if self.workers and min(self.workers) < 0:
            problems.append(f"a worker fills a slot below 0: {sorted(self.workers)}")
        waiting = frozenset[int]() if self._deploying else self.down
        missing = [r for s, r in self.parts if s not in self.workers] if self.phase in _ATTEMPT else ()
        if not waiting.issuperset(missing):
            problems.append(f"attempt {self.attempt} goes on with {self.present} of {self.slots} workers")
        if self.phase is JobPhase.RUNNING and not self.down.issuperset([r for _, r in self.parts - self._ready]):
            problems.append("running before every worker was ready")
        if self.down and (self.phase is not JobPhase.RUNNING or len(self.down) == len(self.regions)):
            problems.append(f"regions {sorted(self.down)} are down by themselves while {self.phase.value}")
        if self.down and self._division.with_upstream(self.down) != self.down:
            problems.append(f"regions {sorted(self.down)} are down without what they depend on (R3)")
        if self.phase is JobPhase.DRAINING and self._finished < self.subtasks:
            problems.append("draining before every subtask finished")
        if self.phase in (JobPhase.ENDING, JobPhase.ENDED) and self._outcome is None:
            problems.append("ending without an outcome")
        if problems:
            story = "".join(f"\n  {phase.value}: {event}" for phase, event in self._story)
            raise InvariantError(f"job machine: {'; '.join(problems)}. Story:{story}")

    # ------------------------------------------------------------------------------------------------------ rules

    def _dispatch(self, event: Event) -> list[Effect]:
        match event:
            case j.WorkerJoined():
                return self._joined(event)
            case j.WorkerLost():
                return self._lost(event)
            case j.Progress():
                self.waiting.hear(event)
                return []
            case j.WorkerReady():
                return self._worker_ready(event)
            case j.SubtaskFinished():
                return self._subtask_finished(event)
            case j.TaskFailed():
                return self._task_failed(event)
            case j.Widened():
                return self._widened(event)
            case j.FinalCommitted():
                # DEPLOYING: the checkpoint to restore is a final one, its handles were just committed.
                if self.phase in (JobPhase.DRAINING, JobPhase.DEPLOYING) and event.attempt == self.attempt:
                    return self._end(Outcome.FINISHED, "every row is processed and committed")
                return []
            case j.CheckpointCompleted():
                if event.attempt == self.attempt:
                    self.restart.on_checkpoint_completed()
                return []
            case j.EndRequested():
                return self._end(event.outcome, event.reason) if self.phase in _LIVE else []
            case j.Reshape():
                return self._reshape(event)
            case j.WorkersGone():
                if self.phase is not JobPhase.ENDING or self._outcome is None:
                    return []
                self.phase = JobPhase.ENDED
                return [j.Ended(*self._outcome)]
            case j.Tick():
                return self._tick()

    def _joined(self, event: j.WorkerJoined) -> list[Effect]:
        if self.phase not in _LIVE:
            return []
        known = self.workers.get(event.slot)
        if known is not None and known >= event.incarnation:
            return []
        effects: list[Effect] = []
        if self.phase in _ATTEMPT and known is not None and event.slot < self.slots:  # its end was not seen yet
            what = f"{_worker(event.slot, event.replaced)} was replaced"
            effects = self._fail(what, True, self._division.at(event.slot))
            if self.phase not in _LIVE:
                return effects
        self.workers[event.slot] = event.incarnation
        self.waiting.progressed(self.now_ms)
        return effects or self._maybe_begin()

    def _lost(self, event: j.WorkerLost) -> list[Effect]:
        if self.workers.get(event.slot) != event.incarnation:
            return []
        del self.workers[event.slot]
        if self.phase in _ATTEMPT and event.slot < self.slots:
            what = f"{_worker(event.slot, event.where)} was lost: {event.reason}"
            return self._fail(what, True, self._division.at(event.slot))
        # While ENDING the loss of a connection is no proof that the process is gone: WorkersGone says that.
        self.waiting.progressed(self.now_ms)
        return []

    def _worker_ready(self, event: j.WorkerReady) -> list[Effect]:
        awaited = self.phase is JobPhase.DEPLOYING or (self._deploying and event.region in self.down)
        if not awaited or not self.is_current(event.attempt, event.region):
            return []
        self._ready.add((event.slot, event.region))
        if not self._ready >= self.parts:
            return []
        if self.phase is JobPhase.DEPLOYING:
            self.phase = JobPhase.RUNNING
            return [j.StartProcessing(self.attempt)]
        regions = tuple(sorted(self.down))
        self.down.clear()
        self._deploying = False
        return [j.StartRegions(self.attempt, regions)]

    def _subtask_finished(self, event: j.SubtaskFinished) -> list[Effect]:
        if event.subtask not in self.subtasks:
            raise InvariantError(f"unknown subtask {event.subtask} finished")
        region = self._division.region_of[event.subtask]
        if self.phase is not JobPhase.RUNNING or region in self.down or event.attempt != self._attempts[region]:
            return []
        self._finished.add(event.subtask)
        if self._finished < self.subtasks:
            return []
        self.phase = JobPhase.DRAINING
        return [j.TakeFinalCheckpoint(self.attempt)]

    def _tick(self) -> list[Effect]:
        if self.phase is JobPhase.RESTARTING and self.now_ms >= self._resume_ms:
            self.phase = JobPhase.FORMING
            self.waiting.progressed(self.now_ms)
            return self._maybe_begin()
        if effects := self._maybe_begin():
            return effects
        if not self.waits:
            return []
        enough, deadline = self._enough, self.waiting.deadline_ms(self._enough)
        if deadline is None or self.now_ms < deadline:
            text = self.waiting.tell(enough, self.now_ms)
            return [j.Wait(text)] if text else []
        if not enough:
            return self._end(Outcome.FAILED, self.waiting.shortage())
        if self.down:  # fewer workers are another group, and that is for all
            return self._restart(self.waiting.shortage(), self.now_ms)
        self.waiting.progressed(self.now_ms)
        return [j.GroupShort(len(self.workers), self.waiting.shortage())]

    def _reshape(self, event: j.Reshape) -> list[Effect]:
        if self.phase not in _LIVE:
            return []
        self.slots, self.subtasks, self.fewest = event.slots, event.subtasks, event.fewest
        self.regions, self.upstream = event.regions, event.upstream
        self._divide()
        self.workers = {slot: number for slot, number in self.workers.items() if slot < event.slots}
        self.waiting.progressed(self.now_ms)
        if self.phase in _ATTEMPT:
            self.phase = JobPhase.FORMING
        self.down.clear()
        self._deploying = False
        return self._maybe_begin()

    def _maybe_begin(self) -> list[Effect]:
        if self.present < self.slots:
            return []
        if self.phase is JobPhase.FORMING:
            self.attempt += 1
            self._attempts = [self.attempt] * len(self.regions)
            self._ready.clear()
            self._finished.clear()
            self.phase = JobPhase.DEPLOYING
            return [j.BeginAttempt(self.attempt)]
        if self.phase is JobPhase.RUNNING and self.down and not self._deploying and self.now_ms >= self._resume_ms:
            self.attempt += 1
            self._deploying = True
            for region in self.down:
                self._attempts[region] = self.attempt
            return [j.BeginRegions(self.attempt, tuple(sorted(self.down)))]
        return []

    def _task_failed(self, event: j.TaskFailed) -> list[Effect]:
        if self.phase not in _LIVE:
            return []
        if event.region is None:
            return self._fail(event.reason, event.retryable) if event.attempt == self.attempt else []
        if not self.is_current(event.attempt, event.region):
            return []
        return self._fail(event.reason, event.retryable, {event.region})

    def _widened(self, event: j.Widened) -> list[Effect]:
        """The failure that took the regions down is counted already."""
        if not self.down or event.attempt != self.attempt:
            return []
        return self._restart(event.reason, self.now_ms)

    def _fail(self, reason: str, retryable: bool, regions: set[int] | None = None) -> list[Effect]:
        """``regions``: what the failure concerns; everything if that is not known."""
        if not retryable:
            return self._end(Outcome.FAILED, reason)
        if self.phase in (JobPhase.RESTARTING, JobPhase.FORMING):
            return []  # this attempt's failure is already being handled
        known = regions if self.phase is JobPhase.RUNNING else None
        alone = None if known is None else self._division.with_upstream(known)
        if alone is not None and alone <= self.down and not self._deploying:
            return []
        decision = self.restart.on_failure(self.now_ms)
        if isinstance(decision, GiveUp):
            return self._end(Outcome.FAILED, f"{reason} ({decision.reason})")
        resume_ms = self.now_ms + decision.delay_ms
        if alone is None or len(self.down | alone) == len(self.regions):
            return self._restart(reason, resume_ms)
        self.down |= alone
        self._deploying = False
        self._ready = {part for part in self._ready if part[1] not in self.down}
        self._finished = {subtask for subtask in self._finished if self._division.region_of[subtask] not in self.down}
        self._resume_ms = resume_ms
        self.waiting.progressed(self.now_ms)
        return [j.StopRegions(tuple(sorted(self.down)), reason)]

    def _restart(self, reason: str, resume_ms: float) -> list[Effect]:
        """Everything goes back."""
        self.down.clear()
        self._deploying = False
        self.phase = JobPhase.RESTARTING
        self._resume_ms = resume_ms
        return [j.StopAttempt(reason)]

    def _end(self, outcome: Outcome, reason: str) -> list[Effect]:
        self._outcome = (outcome, reason)
        self.down.clear()
        self.phase = JobPhase.ENDING
        return [j.ShutDown(outcome, reason)]


def _worker(slot: int, where: str) -> str:
    return f"worker {slot} {where}" if where else f"worker {slot}"

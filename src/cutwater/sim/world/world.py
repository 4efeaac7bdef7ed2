"""One simulated run: a clock, a queue of what is to come, and everything that lives in it."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from typing import Any

from cutwater.config import JobConfig
from cutwater.protocol.channel.receiving import ReceivingEnd
from cutwater.protocol.channel.sending import SendingEnd
from cutwater.protocol.checkpoint.coordinator import CheckpointCoordinator
from cutwater.protocol.checkpoint.loops import LoopMonitor
from cutwater.protocol.job.core import JobCore
from cutwater.protocol.protocols import PROTOCOLS, FreezeOn
from cutwater.protocol.subtask.core import SubtaskCore
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.protocol.subtask.performer import Performer
from cutwater.protocol.subtask.watermarks import RedistributedEdge, WatermarkMerger
from cutwater.sim.schedules.graphs import Plan, dataflow
from cutwater.sim.schedules.schedule import ChoiceTape, Fault, Schedule
from cutwater.sim.world.attempt import Attempt, reroute
from cutwater.sim.world.choices import Choices
from cutwater.sim.world.disk import Disk
from cutwater.sim.world.driver import Driver
from cutwater.sim.world.faults import inject
from cutwater.sim.world.oracle import Oracle
from cutwater.sim.world.output import Output, Settle, retire, settle
from cutwater.sim.world.subtask import SimSubtask
from cutwater.sim.world.worker import Cores, SimWorker

LIVENESS_MS = 1500.0
"""Virtual time in which a job must end once nothing disturbs it any more."""
EVENTS_MAX = 40_000
AFTERMATH_MS = 60.0
"""How long drivers that lost their job are watched after it has ended."""


class World:
    """Runs one schedule.

    >>> from cutwater.sim.schedules.schedule import make_schedule
    >>> world = World(make_schedule(1, "four", "aligned"))
    >>> world.run()
    >>> world.driver.outcome, world.completed > 0
    ('finished', True)
    """

    def __init__(
        self,
        schedule: Schedule,
        *,
        machine: type[SubtaskMachine] = SubtaskMachine,
        coordinator: type[CheckpointCoordinator] = CheckpointCoordinator,
        monitor: type[LoopMonitor] = LoopMonitor,
    ) -> None:
        self.schedule, self.graph, self.row = schedule, dataflow(schedule.world), PROTOCOLS[schedule.protocol]
        self.machine_class, self.coordinator_class, self.monitor_class = machine, coordinator, monitor
        self.subtask_class, self.attempt_class, self.choices_class = SimSubtask, Attempt, Choices
        self.core_class, self.performer_class, self.merger_class = SubtaskCore, Performer, WatermarkMerger
        self.sending_class, self.receiving_class = SendingEnd, ReceivingEnd
        self.job_core_class = JobCore
        self.settings = JobConfig(
            protocol=schedule.protocol,  # type: ignore[arg-type]
            interval_ms=schedule.interval_ms,
            timeout_ms=schedule.timeout_ms,
            min_pause_ms=schedule.min_pause_ms,
            max_concurrent=schedule.max_concurrent,
            tolerable_failed=schedule.tolerable_failed,
            aligned_timeout_ms=schedule.aligned_timeout_ms,
        )
        self._plans: dict[int, Plan] = {}
        self.keeps_order = schedule.recovery in ("task", "upstream")
        self.keeps_output = schedule.recovery == "task"
        self.passes_on = self.asks_for_all = self.forgets = True
        self.oracle = Oracle(self)
        self.triggers_all = self.row.freeze_on is FreezeOn.TRIGGER
        self.checks_lateness = self.oracle.exactly
        self.settle: Settle = settle
        self.redistributed_edge, self.rerouting = RedistributedEdge, reroute
        self.retire = retire
        self.rolls_back = self.savepoints_wait = True
        self.goes_back = 0
        """The next driver begins so many checkpoints before the newest: a user wants that."""
        self.reorders = False
        self.reorder_acks = self.jitter = 0
        self.crossing = 0
        """Above 0: each source hears of a wave in its own time, of a newer one before an older one, too (A8)."""
        self.draws = ChoiceTape(schedule.seed, schedule.draws)
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._count = 0
        self._over_ms = float("inf")
        self.history: list[tuple[Any, ...]] = []
        """Everything that happened, in order (``record`` makes a trace of it)."""
        self.seen: Counter[str] = Counter()
        self.struck: Counter[str] = Counter()
        self.completed = self.restores = 0
        self.published: set[int] = set()
        self.attempts: dict[int, Attempt] = {}
        self.disk = Disk(self)
        self.cores = Cores(self)
        self.output = Output(self)
        self.workers: list[SimWorker] = []
        """All that ever lived."""
        self.driver: Driver = Driver(self, 1)
        self.drivers = [self.driver]

    # ------------------------------------------------------------------------------------------------------- running

    def run(self) -> None:
        """Until the job has ended.

        Raises:
            Violation: a promise is broken.
            InvariantError: a machine of the core says so itself.
        """
        for fault in (*self.schedule.faults, *self.schedule.requests):
            self.at(fault.at_ms, self._inject, fault)
        deadline = self.schedule.faults_over_ms + LIVENESS_MS
        queue, pop = self._queue, heapq.heappop
        most = self._count + EVENTS_MAX
        while queue:
            at, _, call, argument = pop(queue)
            if at > self._over_ms:
                break
            if at > deadline or self._count > most:
                self.oracle.broken("no progress", f"the job has not ended {LIVENESS_MS:g} ms after the last fault")
            self.now = at
            call(argument)
        if not self.driver.outcome:
            self.oracle.broken("no progress", "nothing is left to happen, and the job has not ended")
        self.oracle.at_end(self.driver.outcome == "finished")

    @property
    def void(self) -> bool:
        """Nothing was proved: no rows came out, no checkpoint was taken, or faults were planned and none struck."""
        idle = not self.completed or not any(self.output.visible.values())
        planned = {fault.kind for fault in self.schedule.faults}
        return idle or (bool(planned) and not planned & self.struck.keys())

    def at(self, at_ms: float, call: Callable[[Any], None], argument: Any = None) -> None:
        """Call something at a moment."""
        self._count += 1
        heapq.heappush(self._queue, (at_ms, self._count, call, argument))

    def after(self, delay_ms: float, call: Callable[[Any], None], argument: Any = None) -> None:
        """Call something when so much time has passed."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay_ms, self._count, call, argument))

    def send(self, call: Callable[[Any], None], argument: Any = None) -> None:
        """Call something when a message has come."""
        self._count += 1
        heapq.heappush(self._queue, (self.now + self.latency(), self._count, call, argument))

    def latency(self) -> float:
        """Of the next message."""
        delay = 0.2 + 0.15 * (self.draws.below(256) & 7)
        return delay + 0.1 * self.draws.below(256) if self.jitter else delay

    def _inject(self, fault: Fault) -> None:
        if self._over_ms == float("inf"):
            inject(self, fault)

    # --------------------------------------------------------------------------------------------- who lives in it

    def start_driver(self) -> None:
        """A driver takes over from the last one."""
        if any(d.outcome == "finished" for d in self.drivers):
            return
        self.driver = Driver(self, len(self.drivers) + 1)
        self.drivers.append(self.driver)

    def ended(self, driver: Driver, reason: str) -> None:
        """A driver says that its job is over."""
        self.seen[f"ended: {driver.outcome}"] += 1
        if driver.outcome == "finished":
            self.driver = driver
            self._over_ms = min(self._over_ms, self.now + AFTERMATH_MS)
        elif driver is self.driver and self._over_ms == float("inf"):
            others = [d for d in self.drivers if not d.over]
            if others:
                self.driver = others[-1]
            else:  # who took the job from it is gone, too: somebody starts it again
                self.after(5.0, lambda _: self.start_driver())

    def plan_at(self, parallelism: int) -> Plan:
        """The dataflow at a parallelism; 0: at what it begins with."""
        if parallelism not in self._plans:
            self._plans[parallelism] = Plan(self.graph.at(parallelism), parallelism, self.schedule.recovery)
        return self._plans[parallelism]

    @property
    def rescaled(self) -> bool:
        """The job has had another parallelism."""
        return any(attempt.plan.parallelism for attempt in self.attempts.values())

    def dissolve(self) -> None:
        """Cut the references that run in circles, so that everything goes at once.  Nothing works afterwards."""
        links = {link for attempt in self.attempts.values() for link in attempt.links}
        for subtask in {subtask for link in links for subtask in (link.sender, link.receiver) if subtask is not None}:
            subtask.dissolve()
        for link in links:
            del link.sending, link.receiving
        living: list[object] = [*self.drivers, *self.workers, self]
        for thing in living:
            thing.__dict__.clear()

    # ------------------------------------------------------------------------------------------------------ the books

    def note(self, *what: Any) -> None:
        """Something happened."""
        self.history.append((self.now, *what))

    def strike(self, kind: str) -> None:
        """A fault hit something."""
        self.struck[kind] += 1

"""A simulated driver as a process: its life, its clock, and the queue of what it hears."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cutwater.sim.world.worker import SimWorker

if TYPE_CHECKING:
    from cutwater.sim.world.world import World


class DriverProcess(ABC):
    """Takes messages one at a time, none while it is stopped or waits for the log as its thread would."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.skew_ms = 0.0
        self.dead = False
        self.outcome = ""
        self.workers: dict[int, SimWorker] = {}
        self.known: dict[int, int] = {}
        """R0: of each subtask's determinant log, how much it has heard of with what its verdicts on loops rest on."""
        self.plan = world.disk.plan or world.plan_at(0)
        """The dataflow at its present parallelism."""
        self._incarnations: defaultdict[int, int] = defaultdict(int)
        self._pauses = 0
        self._waits = False
        self._inbox: list[tuple[Any, ...]] = []
        self._held: list[Callable[[], None]] = []
        self._due_ms = float("inf")

    # ------------------------------------------------------------------------------------------------------ its life

    @property
    def clock_ms(self) -> float:
        """The driver's own clock."""
        return self.world.now + self.skew_ms

    @property
    def over(self) -> bool:
        return self.dead or bool(self.outcome)

    def pause(self) -> None:
        self._pauses += 1

    def resume(self) -> None:
        self._pauses -= 1
        held, self._held = self._held, []
        for call in held:
            call()
        self.go_on()

    def kill(self) -> None:
        """SIGKILL.  Its workers see the connection end, some a little later than others."""
        self.dead = True
        self.world.disk.crash(self)
        for worker in self.workers.values():
            worker.to_driver.dead = True
            self.world.after(self.world.draws.below(16), lambda _, w=worker: w.kill())

    def lose(self, worker: SimWorker) -> None:
        """The worker's connection ended, or it was silent for too long: fill its slot again."""
        self.hear(("lost", worker))

    def launch(self, slot: int) -> None:
        """Start a process for a slot."""
        self._incarnations[slot] += 1
        worker = SimWorker(self.world, self, slot, self._incarnations[slot])
        self.world.workers.append(worker)
        self.world.cores.start(worker, lambda: self._boot(worker))

    def _boot(self, worker: SimWorker) -> None:
        self.world.after(2.0 + self.world.draws.below(16), self._booted, worker)

    def _booted(self, worker: SimWorker) -> None:
        if not worker.dead:
            worker.tell("joined", None)

    # ------------------------------------------------------------------------------------------------- what it hears

    def hear(self, message: tuple[Any, ...]) -> None:
        """A message arrives: of a worker, a user, or its own clock."""
        if self.over:
            return
        if self._waits or self._pauses:
            self._inbox.append(message)
            return
        if self.take(message):
            self._set_timer()

    @abstractmethod
    def take(self, message: tuple[Any, ...]) -> bool:
        """Act on a message; false if ``next_due_ms`` cannot be sooner than before."""

    def wait(self) -> None:
        """Hear nothing until ``go_on``: the thread waits for storage."""
        self._waits = True

    def stop_waiting(self) -> None:
        """The thread runs again; ``go_on`` takes what has come meanwhile."""
        self._waits = False

    def go_on(self) -> None:
        """Take what has come meanwhile."""
        while self._inbox and not self._waits and not self._pauses and not self.over:
            self.hear(self._inbox.pop(0))
        if not self._waits and not self._pauses:
            self.hear(("tick",))

    def when_awake(self, call: Callable[..., None]) -> Callable[..., None]:
        """The answer of storage is acted on when the process runs, and never by a dead one."""

        def answered(*answer: Any) -> None:
            if self.over:
                return
            if self._pauses:
                self._held.append(lambda: answered(*answer))
            else:
                call(*answer)

        return answered

    # ----------------------------------------------------------------------------------------------------- its clock

    @abstractmethod
    def next_due_ms(self) -> float | None:
        """When the driver wants to look at its clock."""

    def _set_timer(self) -> None:
        if self.over:
            return
        due = self.next_due_ms()
        if due is None or due > 1e11:
            return
        at = max(due - self.skew_ms, self.world.now) + 0.01
        if at < self._due_ms or self._due_ms <= self.world.now:
            self._due_ms = at
            self.world.at(at, self._timer, at)

    def _timer(self, at: float) -> None:
        if at == self._due_ms:
            self._due_ms = float("inf")
            self.hear(("tick",))

    def jump(self, by_ms: float) -> None:
        """The clock jumps."""
        self.skew_ms += by_ms
        self._due_ms = float("inf")
        self.hear(("tick",))

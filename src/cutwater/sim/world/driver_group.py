"""The workers of a simulated driver: who fills which slot, and getting the slots filled."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from cutwater.protocol.job import messages as j
from cutwater.protocol.job import rescale as r
from cutwater.sim.world.worker import SimWorker

if TYPE_CHECKING:
    from cutwater.sim.world.driver import Driver


class DriverGroup:
    """Starts workers, hears of those that come and go, and sends them away."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._world = driver, driver.world
        self.workers: dict[int, SimWorker] = {}
        self._incarnations: defaultdict[int, int] = defaultdict(int)
        self._wanted = 0
        """Slots that are to be filled."""
        self.recruit(driver.plan.graph.workers)

    def recruit(self, workers: int) -> None:
        """Start a process for every slot up to this number."""
        first, self._wanted = self._wanted, max(self._wanted, workers)
        for slot in range(first, self._wanted):
            self._launch(slot)

    def _launch(self, slot: int) -> None:
        self._incarnations[slot] += 1
        worker = SimWorker(self._world, self._driver, slot, self._incarnations[slot])
        self._world.workers.append(worker)
        self._world.cores.start(worker, lambda: self._boot(worker))

    def _boot(self, worker: SimWorker) -> None:
        self._world.after(2.0 + self._world.draws.below(16), self._booted, worker)

    def _booted(self, worker: SimWorker) -> None:
        if not worker.dead:
            worker.tell("joined", None)

    def joined(self, worker: SimWorker) -> None:
        """A worker says that it is there."""
        known = self.workers.get(worker.slot)
        if worker.slot >= self._wanted:
            worker.from_driver.send(("leave",))
        elif known is None or known.incarnation < worker.incarnation:
            self.workers[worker.slot] = worker
            driver = self._driver
            driver.core.handle(j.WorkerJoined(worker.slot, worker.incarnation, driver.thread.clock_ms))

    def lost(self, worker: SimWorker) -> None:
        """The worker's connection ended, or it was silent for too long: fill its slot again."""
        if self.workers.get(worker.slot) is worker:
            driver = self._driver
            del self.workers[worker.slot]
            worker.from_driver.dead = True
            self._world.seen["worker lost"] += 1
            if worker.slot < self._wanted:
                self._launch(worker.slot)
            lost = j.WorkerLost(worker.slot, worker.incarnation, "connection ended", driver.thread.clock_ms)
            driver.core.handle(lost)
            self._world.after(self._world.draws.below(64), lambda _: worker.kill())  # it is told that it was replaced

    def broadcast(self, *message: Any) -> None:
        """Tell all of them."""
        for worker in self.workers.values():
            worker.from_driver.send(message)

    def resize(self, workers: int) -> None:
        """There are so many slots from now on: workers beyond leave, and missing ones are started."""
        self.recruit(workers)
        self._wanted = workers
        self._world.cores.withdraw(self._driver, workers)
        for slot in [s for s in self.workers if s >= workers]:
            self.workers.pop(slot).from_driver.send(("leave",))

    def shape_at(self, place: int) -> r.Shape:
        """The shape that a user asks for."""
        parallelism = 1 + place % 3
        return r.Shape(parallelism, self._world.plan_at(parallelism).graph.workers)

"""A simulated driver's side of a rescale: performs what the core's ``Rescaler`` decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.job import messages as j
from cutwater.protocol.job import rescale as r
from cutwater.protocol.reasons import CheckpointKind

if TYPE_CHECKING:
    from cutwater.sim.world.driver import Driver


class DriverRescaling:
    """Recruits workers, takes the snapshot, and gives the job its other shape."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._world = driver, driver.world
        graph = driver.plan.graph
        shape = r.Shape(driver.plan.parallelism, graph.workers)
        self.wanted = graph.workers
        """Slots that are to be filled."""
        self._core = r.Rescaler(shape, deadline_ms=1e12)
        self._seen: tuple[frozenset[int], bool] = frozenset(), False

    def asked(self, place: int) -> None:
        """A user wants another parallelism."""
        if self._world.row.name == "none":
            return
        self._world.strike("rescale")
        parallelism = 1 + place % 3
        shape = r.Shape(parallelism, self._world.plan_at(parallelism).graph.workers)
        self.handle(r.Requested(shape, "rescale", self._driver.clock_ms))

    def look(self) -> bool:
        """See who is there, and whether the job waits for others; false if that is as it was."""
        seen = frozenset(self._driver.workers), self._driver.machine.waits
        if seen == self._seen or self._driver.over:
            return False
        self._seen = seen
        self.handle(r.GroupSeen(seen[0], seen[0], seen[1], self._driver.clock_ms))
        return True

    def handle(self, event: r.RescaleEvent) -> None:
        """Feed the core and perform what it asks for."""
        driver = self._driver
        for effect in self._core.handle(event):
            match effect:
                case r.Recruit(workers=workers):
                    for slot in range(self.wanted, workers):
                        driver.launch(slot)
                    self.wanted = max(self.wanted, workers)
                case r.Dismiss():
                    self._resize(driver.plan.graph.workers)
                case r.TakeSnapshot():
                    driver.coordinate(cm.RequestCheckpoint(driver.clock_ms, CheckpointKind.ON_DEMAND, "rescale"))
                case r.Switch(shape=shape, reason=reason):
                    self._switch(shape, reason)
                case r.Answered(error=error):
                    self._world.seen["not rescaled" if error else "rescaled"] += 1
                case r.Note():
                    pass

    def snapshot_ended(self, error: str) -> None:
        """What became of the checkpoint."""
        self.handle(r.SnapshotEnded(error, self._driver.clock_ms))

    def _switch(self, shape: r.Shape, reason: str) -> None:
        driver, world = self._driver, self._world
        if driver.machine.waits:
            world.seen["rescaled while it waited"] += 1
        plan = world.plan_at(shape.parallelism)
        driver.reshape(plan, reason)
        for slot in range(self.wanted, shape.workers):
            driver.launch(slot)
        self._resize(shape.workers)
        tasks = frozenset(plan.graph.tasks)
        division = plan.division
        driver.job(j.Reshape(shape.workers, tasks, 0, driver.clock_ms, division.regions, division.upstream))

    def _resize(self, workers: int) -> None:
        """What is beyond so many slots leaves."""
        driver = self._driver
        self.wanted = workers
        self._world.cores.withdraw(driver, workers)
        for slot in [s for s in driver.workers if s >= workers]:
            worker = driver.workers.pop(slot)
            worker.from_driver.send(("leave",))
            driver.job(j.WorkerLost(slot, worker.incarnation, "the job goes on without it", driver.clock_ms))

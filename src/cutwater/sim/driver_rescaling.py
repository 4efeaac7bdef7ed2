"""A simulated driver's side of a rescale: performs what the core's ``Rescaler`` decides."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cutwater.protocol import job_messages as j
from cutwater.protocol import messages as m
from cutwater.protocol import rescale as r
from cutwater.protocol.reasons import CheckpointKind

if TYPE_CHECKING:
    from cutwater.sim.driver import Driver

__all__ = ["DriverRescaling"]


class DriverRescaling:
    """Recruits workers, takes the snapshot, and gives the job its other shape."""

    def __init__(self, driver: Driver) -> None:
        self._driver, self._world = driver, driver.world
        graph = driver.plan.graph
        shape = r.Shape(driver.plan.parallelism, graph.workers)
        self.wanted = graph.workers
        """Slots that are to be filled."""
        self._core = r.Rescaler(shape, deadline_ms=1e12)

    def asked(self, place: int) -> None:
        """A user wants another parallelism."""
        if self._world.row.name == "none":
            return
        self._world.strike("rescale")
        parallelism = 1 + place % 3
        shape = r.Shape(parallelism, self._world.plan_at(parallelism).graph.workers)
        self.handle(r.Requested(shape, "rescale", self._driver.clock_ms))

    def group_changed(self) -> None:
        """A worker came or went.

        No simulated user gives up waiting for workers: what records a run knows the shape of each attempt by the one
        before, and such a rescale comes between two.
        """
        slots = frozenset(self._driver.workers)
        self.handle(r.GroupSeen(slots, slots, False, self._driver.clock_ms))

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
                    driver.coordinate(m.RequestCheckpoint(driver.clock_ms, CheckpointKind.ON_DEMAND, "rescale"))
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
        driver.coordinate(m.JobStopped(reason, driver.clock_ms))
        driver.broadcast("reset", driver.machine.attempt, driver.plan.everything)
        plan = world.plan_at(shape.parallelism)
        driver.reshape(plan)
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
        for slot in [s for s in driver.workers if s >= workers]:
            worker = driver.workers.pop(slot)
            worker.from_driver.send(("leave",))
            driver.job(j.WorkerLost(slot, worker.incarnation, "the job goes on without it", driver.clock_ms))

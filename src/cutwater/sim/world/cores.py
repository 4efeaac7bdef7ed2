"""The cores that processes start on: enough for all, but while some are lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cutwater.sim.world.driver import Driver
    from cutwater.sim.world.worker import SimWorker
    from cutwater.sim.world.world import World


class Cores:
    """While cores are lost, a process starts on one that another has left, or waits until they are back."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lost = 0
        self._free = 0
        self._queue: list[tuple[SimWorker, Callable[[], None]]] = []

    def lose(self, for_ms: float) -> None:
        """No core is free for a while but those that are left meanwhile."""
        self._lost += 1
        self._world.after(for_ms, self._back)

    def start(self, worker: SimWorker, boot: Callable[[], None]) -> None:
        """``boot`` the process as soon as there is a core."""
        self._queue.append((worker, boot))
        self._serve()
        if any(waiting is worker for waiting, _ in self._queue):
            self._world.strike("no_cores")

    def left(self) -> None:
        """A process has ended and its machine lives: the core is another one's."""
        if self._lost:
            self._free += 1
            self._serve()

    def withdraw(self, driver: Driver, slots: int) -> None:
        """A driver wants no process any more for its slots from this number on."""
        self._queue = [(w, boot) for w, boot in self._queue if w.driver is not driver or w.slot < slots]

    def _back(self, _: object) -> None:
        self._lost -= 1
        if not self._lost:
            self._free = 0
            self._serve()

    def _serve(self) -> None:
        self._queue = [(worker, boot) for worker, boot in self._queue if not worker.driver.over]
        while self._queue and (self._free or not self._lost):
            self._free = max(0, self._free - 1)
            self._queue.pop(0)[1]()

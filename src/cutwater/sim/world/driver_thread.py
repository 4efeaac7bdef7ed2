"""A simulated driver's thread: its clock, and the queue of what it hears."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cutwater.sim.world.driver import Driver
    from cutwater.sim.world.world import World


class DriverThread:
    """Has the driver take messages one at a time, none while it is stopped or waits for the log."""

    def __init__(self, world: World, driver: Driver) -> None:
        self._world, self._driver = world, driver
        self._skew_ms = 0.0
        self._pauses = 0
        self.waits = False
        """It waits for storage, and hears nothing."""
        self._inbox: list[tuple[Any, ...]] = []
        self._held: list[Callable[[], None]] = []
        self._due_ms = float("inf")

    # ------------------------------------------------------------------------------------------------- what it hears

    def hear(self, message: tuple[Any, ...]) -> None:
        """A message arrives: of a worker, a user, or its own clock."""
        if self._driver.over:
            return
        if self.waits or self._pauses:
            self._inbox.append(message)
            return
        if self._driver.take(message):
            self._set_timer()

    def pause(self) -> None:
        """Stop, as a process does whose machine sleeps."""
        self._pauses += 1

    def resume(self) -> None:
        """Run again."""
        self._pauses -= 1
        held, self._held = self._held, []
        for call in held:
            call()
        self.go_on()

    def wait(self) -> None:
        """Hear nothing until ``go_on``."""
        self.waits = True

    def stop_waiting(self) -> None:
        """Storage has answered; ``go_on`` takes what has come meanwhile."""
        self.waits = False

    def go_on(self) -> None:
        """Take what has come meanwhile."""
        while self._inbox and not self.waits and not self._pauses and not self._driver.over:
            self.hear(self._inbox.pop(0))
        if not self.waits and not self._pauses:
            self.hear(("tick",))

    def when_awake(self, call: Callable[..., None]) -> Callable[..., None]:
        """The answer of storage is acted on when the process runs, and never by a dead one."""

        def answered(*answer: Any) -> None:
            if self._driver.over:
                return
            if self._pauses:
                self._held.append(lambda: answered(*answer))
            else:
                call(*answer)

        return answered

    # ----------------------------------------------------------------------------------------------------- its clock

    @property
    def clock_ms(self) -> float:
        """The driver's own clock."""
        return self._world.now + self._skew_ms

    def _set_timer(self) -> None:
        if self._driver.over:
            return
        due = self._driver.core.next_due_ms
        if due is None or due > 1e11:
            return
        world = self._world
        at = max(due - self._skew_ms, world.now) + 0.01
        if at < self._due_ms or self._due_ms <= world.now:
            self._due_ms = at
            world.at(at, self._timer, at)

    def _timer(self, at: float) -> None:
        if at == self._due_ms:
            self._due_ms = float("inf")
            self.hear(("tick",))

    def jump(self, by_ms: float) -> None:
        """The clock jumps."""
        self._skew_ms += by_ms
        self._due_ms = float("inf")
        self.hear(("tick",))

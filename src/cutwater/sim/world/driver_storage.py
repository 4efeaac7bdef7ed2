"""A simulated driver's side of storage: it takes the job, restores and publishes, as ``runtime.driver`` does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from cutwater.protocol.checkpoint import messages as cm
from cutwater.protocol.job import messages as j
from cutwater.protocol.protocols import CheckpointKind
from cutwater.sim.world.disk import AttemptBegan, Done, Entry, Finished, RolledBack
from cutwater.sim.world.output import EVERYBODY

if TYPE_CHECKING:
    from cutwater.sim.world.driver import Driver


class DriverStorage:
    """The log and the sinks, in the hands of one driver.

    Args:
        back: a user wants to begin so many checkpoints before the newest.
    """

    def __init__(self, driver: Driver, back: int) -> None:
        self._driver, self._world = driver, driver.world
        self._back = back
        self._origin = 0
        """The checkpoint that the user wanted, until this driver has completed one."""
        self._known = 0
        self._taken = 0
        self._publishing = False
        self._begins: tuple[int, tuple[int, ...]] | None = None
        """The attempt that begins once it is known what was published, and its regions."""
        self._saved: list[Done] = []
        """Savepoints that are durable, and no checkpoint behind them yet."""
        self._done: dict[int, Done] = {}
        """What the sinks know as restorable."""

    # ------------------------------------------------------------------------------------------------------- restore

    def begin(self, attempt: int, regions: tuple[int, ...] = ()) -> None:
        """Take the job: every older attempt is fenced from here on.  ``regions``: what begins; none: everything."""
        self._saved.clear()
        if self._publishing:
            self._begins = attempt, regions
            return
        disk = self._world.disk
        finished = bool(disk.log) and type(disk.log[-1]) is Finished
        if finished or disk.owner != attempt - 1 or (self._taken and disk.owner != self._taken):
            self._driver.fenced()
            return
        self._known = len(disk.log)

        def began() -> None:
            self._taken = attempt
            self._restore(attempt, regions)

        self._append(AttemptBegan(attempt, self._driver.number, self._driver.plan), attempt, began)

    def _append(self, entry: Entry, attempt: int, then: Callable[[], None]) -> None:
        """Write to the log while the driver waits; ``then`` it goes on, unless another driver or an error forbids."""
        driver = self._driver
        driver.thread.wait()

        def done(answer: str) -> None:
            if answer == "ok":
                self._known += 1
                then()
                return
            driver.thread.stop_waiting()
            if answer == "taken":
                driver.fenced()
            else:
                driver.core.handle(j.TaskFailed(attempt, f"log: {answer}", True, driver.thread.clock_ms))
            driver.thread.go_on()

        self._world.disk.append(driver, self._known, entry, driver.thread.when_awake(done))

    def _restore(self, attempt: int, regions: tuple[int, ...]) -> None:
        retained = self._world.disk.retained
        chosen = self._choose(retained)
        everything = self._driver.plan.everything
        if regions and self._world.disk.owner != attempt:  # what runs on here is no cut with another one's checkpoint
            self._driver.thread.stop_waiting()
            self._driver.fenced()
            self._driver.thread.go_on()
        elif regions:
            if chosen is (retained[-1] if retained else None):
                self._settle(attempt, chosen, regions)
            else:
                self._widen(attempt, "the newest checkpoint is damaged")
        elif chosen is None and retained:
            self._fail(attempt, "no completed checkpoint is usable")
        elif chosen is not None and retained[-1] is not chosen and self._world.rolls_back:
            rolled_back = RolledBack(attempt, chosen.checkpoint_id)
            self._append(rolled_back, attempt, lambda: self._settle(attempt, chosen, everything))
        else:
            self._settle(attempt, chosen, everything)

    def _choose(self, retained: list[Done]) -> Done | None:
        """The newest whole one, or what the user wants."""
        if self._back and retained:
            self._origin = retained[max(len(retained) - 1 - self._back, 0)].checkpoint_id
            self._back = 0
        newest_first = retained[::-1]
        for done in sorted(newest_first, key=lambda d: d.checkpoint_id != self._origin):
            if self._world.disk.whole(done):
                return done
            self._world.seen["passed over"] += 1
        return None

    def _settle(self, attempt: int, restored: Done | None, regions: tuple[int, ...]) -> None:
        """T2, one storage operation after the other; then the workers hear of the attempt."""
        world, driver = self._world, self._driver
        self._done = {done.checkpoint_id: done for done in world.disk.retained}
        tasks = frozenset(t for t, region in enumerate(driver.plan.region_of) if region in regions)
        if regions == driver.plan.everything:
            tasks = EVERYBODY
        steps = world.settle(world.output, restored, list(self._done.values()), attempt, tasks)
        self._step(steps, partial(self._settled, restored, attempt, regions))

    def _step(self, steps: Iterator[object], settled: Callable[[], None], _: object = None) -> None:
        world = self._world
        for _ in steps:
            next_step = self._driver.thread.when_awake(partial(self._step, steps, settled))
            world.after(0.1 + 0.1 * world.draws.below(4), next_step)
            return
        settled()

    def _settled(self, restored: Done | None, attempt: int, regions: tuple[int, ...]) -> None:
        world, driver = self._world, self._driver
        world.oracle.settled(restored, attempt, driver.plan, regions)
        world.restores += 1
        if restored is not None and not world.disk.whole(restored):
            self._fail(attempt, f"checkpoint {restored.checkpoint_id} is damaged")
            return
        driver.thread.stop_waiting()
        if restored is not None:
            world.oracle.restored(restored)
        if restored is not None and restored.final:
            driver.core.handle(j.FinalCommitted(attempt, driver.thread.clock_ms))
        else:
            driver.deploy(attempt, restored, regions)
        driver.thread.go_on()

    def _widen(self, attempt: int, what: str) -> None:
        self._world.seen["widened"] += 1
        self._driver.thread.stop_waiting()
        self._driver.core.handle(j.Widened(attempt, what, self._driver.thread.clock_ms))
        self._driver.thread.go_on()

    def _fail(self, attempt: int, what: str) -> None:
        self._driver.thread.stop_waiting()
        self._driver.core.handle(j.TaskFailed(attempt, what, True, self._driver.thread.clock_ms))
        self._driver.thread.go_on()

    # ------------------------------------------------------------------------------------------------------- publish

    def publish(self, effect: cm.Publish) -> None:
        """Manifest, then the next number of the log; only that makes the checkpoint exist.

        As with a large manifest: one that lies in the log comes to be in the same step, which leaves less to go wrong.
        """
        world, driver, id, attempt = self._world, self._driver, effect.checkpoint_id, self._taken
        done = Done(id, attempt, effect.kind is CheckpointKind.FINAL, driver.plan.by_task(effect.payloads))
        self._publishing = True
        if not world.schedule.publishes_aside:
            driver.thread.wait()

        def written(error: str) -> None:
            if error:
                self._published(done, "failed")
            elif effect.kind.commits:
                world.disk.append(
                    driver, self._known, done, driver.thread.when_awake(lambda a: self._published(done, a))
                )
            else:  # a savepoint is the user's: no recovery depends on it, the log does not name it
                self._saved.append(done)
                if not world.savepoints_wait:
                    self._hand_out(None)
                self._published(done, "saved")

        world.disk.write(driver, f"{id}/manifest-{attempt}", driver.thread.when_awake(written))

    def _published(self, done: Done, answer: str) -> None:
        driver, id = self._driver, done.checkpoint_id
        self._publishing = False
        driver.thread.stop_waiting()
        if answer == "taken":
            driver.fenced()
        elif answer in ("ok", "saved"):
            if answer == "ok":
                self._known += 1
                self._done[id] = done
                self._origin = 0
                self._hand_out(done)
            driver.core.published(cm.Published(id, driver.thread.clock_ms))
            self._collect()
        else:
            driver.core.published(cm.PublishFailed(id, answer, driver.thread.clock_ms, in_doubt=answer == "doubt"))
        if self._begins and not driver.over:
            begins, self._begins = self._begins, None
            self.begin(*begins)
        driver.thread.go_on()

    def _hand_out(self, behind: Done | None) -> None:
        """An entry of the log is behind these savepoints: no other driver had the job, and their rows are committed."""
        for done in self._saved:
            self._world.oracle.published(done, logged=False, behind=behind)
        self._saved.clear()

    def _collect(self) -> None:
        """Retention: what no checkpoint that may be restored needs goes."""
        kept = {done.checkpoint_id for done in self._world.disk.retained}
        retired = [self._done.pop(id) for id in list(self._done) if id not in kept]
        if retired:
            self._world.retire(self._world.output, retired, self._done.values())

    def finish(self) -> None:
        """Say that the job is over; then nothing staged is needed any more."""
        output, attempt = self._world.output, self._taken

        def done(answer: str) -> None:
            if answer == "ok":
                output.sweep(attempt + 1, set(), EVERYBODY)

        self._world.disk.append(self._driver, self._known, Finished(attempt), done)

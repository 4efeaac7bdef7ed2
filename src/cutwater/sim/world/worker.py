"""One simulated worker process: a loop over its subtasks, and messages of its driver; and the cores it starts on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from cutwater.protocol import messages as m
from cutwater.protocol.job.recovery_scope import partners
from cutwater.sim.world.channels import Pipe

if TYPE_CHECKING:
    from cutwater.sim.world.attempt import Attempt
    from cutwater.sim.world.driver import Driver
    from cutwater.sim.world.subtask import SimSubtask
    from cutwater.sim.world.world import World

ACTIONS_PER_ROUND = 2


class SimWorker:
    """A process that fills a slot of a driver's group."""

    def __init__(self, world: World, driver: Driver, slot: int, incarnation: int) -> None:
        self.world, self.driver, self.slot, self.incarnation = world, driver, slot, incarnation
        self.dead = False
        self.number = 0
        """Of the newest attempt that it is part of; 0: of none."""
        self.subtasks: list[SimSubtask] = []
        self.known: dict[int, dict[int, int]] = {}
        """R0: of each subtask's determinant log, how much the parts of regions in this worker have heard of."""
        self.from_driver = Pipe(world, self.post)
        self.to_driver = Pipe(world, driver.hear)
        self.slow = 0
        self._pauses = 0
        self._running = False
        self._scheduled = False
        self._free_ms = 0.0
        """Until then it is busy."""
        self._turn = 0
        self._inbox: list[Any] = []

    # ------------------------------------------------------------------------------------------------------ its life

    @property
    def paused(self) -> bool:
        return self._pauses > 0

    def pause(self) -> None:
        self._pauses += 1

    def resume(self) -> None:
        self._pauses -= 1
        if not self._pauses and not self.dead:
            inbox, self._inbox = self._inbox, []
            for message in inbox:
                self.post(message)
            self.wake()

    def kill(self, *, with_core: bool = False) -> None:
        """SIGKILL: memory and everything in its sockets is gone; ``with_core``: so is the machine."""
        if self.dead:
            return
        self.dead = True
        if not with_core:
            self.world.cores.left()
        self.from_driver.dead = True
        self.world.disk.crash(self)
        if self.subtasks:
            self.world.note("crashed", self.slot, self.number, [(s.task, s.attempt.number) for s in self.subtasks])
            self._drop(self.subtasks)

    def fail(self, subtask: SimSubtask) -> None:
        """A user's function raises: all that is connected with the subtask ends here, the driver hears of it."""
        region = subtask.attempt.plan.region_of[subtask.task]
        self.tell("failed", subtask.attempt.number, region)
        self._reset(self._of((region,)))

    def _of(self, regions: Iterable[int]) -> list[SimSubtask]:
        return [s for s in self.subtasks if s.attempt.plan.region_of[s.task] in regions]

    def tell(self, *message: Any) -> None:
        """Send a message to the driver."""
        if not self.dead:
            if self.world.reorder_acks and message[0] == "ack":
                self.world.strike("reorder")
                self.to_driver.send_out_of_order((self, *message))
                if self.world.draws.chance(64):
                    self.to_driver.send_out_of_order((self, *message))
            else:
                self.to_driver.send((self, *message))

    # ------------------------------------------------------------------------------------------------------ the loop

    def wake(self) -> None:
        """There may be something to do."""
        if self._running and not self._scheduled and not self.dead and not self._pauses:
            self._scheduled = True
            world = self.world
            free_ms, soon_ms = self._free_ms, world.now + 0.05
            world.at(free_ms if free_ms > soon_ms else soon_ms, self._round)

    def _round(self, _: None) -> None:
        self._scheduled = False
        if self.dead or self._pauses or not self._running:
            return
        subtasks = self.subtasks
        count = len(subtasks)
        self._turn = (self._turn + 1) % count
        worked = 0
        for i in range(self._turn - count, self._turn):
            subtask = subtasks[i]
            if subtask.awake and subtask.running:
                for _again in range(ACTIONS_PER_ROUND):
                    if not subtask.act():
                        subtask.awake = False
                        break
                    worked += 1
                    if not self._running:
                        return
        if worked:
            cost = 0.1 * worked + 0.05 * self.world.draws.below(8)
            self._free_ms = self.world.now + cost * (20 if self.slow else 1)
            for subtask in subtasks:
                if subtask.awake and subtask.running:
                    self.wake()
                    break

    # -------------------------------------------------------------------------------------------------- its messages

    def post(self, message: tuple[Any, ...] | Callable[[], None]) -> None:
        """A message of the driver, or the outcome of a write."""
        if self.dead:
            return
        if self._pauses:
            self._inbox.append(message)
            return
        if callable(message):
            message()
        elif message[0] == "deploy":
            self._deploy(message[1])
        elif message[0] == "reset":
            self._reset(self._of(message[2]))
        elif message[0] == "leave":
            self._reset(self.subtasks)
            self.kill()
        elif self.subtasks and message[1] >= self.number:
            self._take(message)
        if not self._scheduled:
            for subtask in self.subtasks:
                if subtask.awake:
                    self.wake()
                    break

    def _take(self, message: tuple[Any, ...]) -> None:
        match message:
            case ("start", number):
                self._running = True
                for subtask in self.subtasks:
                    if subtask.attempt.number == number:
                        subtask.start()
            case ("trigger", _, id, final, probe, savepoint):
                for subtask in self.subtasks:
                    if subtask.machine.is_source or (self.world.triggers_all and not savepoint):
                        self._trigger(subtask, m.Trigger(id, final, probe, savepoint))
            case ("complete", number, id, commit, final):
                for subtask in self.subtasks:
                    subtask.outcome(m.CompleteNotice(id, commit))
                if final:  # the driver waits for nothing else
                    self.tell("committed", number, id)
            case ("abort", _, id, latest):
                for subtask in self.subtasks:
                    subtask.outcome(m.AbortNotice(id, latest))
            case ("verdict", _, loop, verdict):
                for subtask in self.subtasks:
                    if subtask.task in loop:
                        subtask.when_idle(verdict)
            case _:
                raise AssertionError(f"a worker hears {message}")

    def _trigger(self, subtask: SimSubtask, trigger: m.Trigger) -> None:
        world = self.world

        def hear() -> None:
            if not subtask.dropped:
                subtask.when_idle(trigger)

        if world.crossing and not trigger.final:
            world.strike("cross")
            world.after(0.5 * world.draws.below(64), lambda _: self.post(hear))
        else:
            hear()

    def _deploy(self, attempt: Attempt) -> None:
        world, graph = self.world, attempt.plan.graph
        self._reset(self._of(attempt.regions) if attempt.others_live else self.subtasks)
        for subtask in self.subtasks:
            subtask.survive(attempt)
        mine = [task for task in attempt.tasks if graph.tasks[task][1] == self.slot]
        if not mine:
            return
        self.number = attempt.number
        self.subtasks += [world.subtask_class(self, attempt, task, attempt.parts.get(task)) for task in mine]
        self.subtasks.sort(key=lambda s: s.task)
        self._ready(attempt)

    def _ready(self, attempt: Attempt) -> None:
        """Every survivor has turned to the new channels; only now they say all that they know."""
        fresh = [s for s in self.subtasks if s.attempt is attempt]
        if not fresh:  # all of its subtasks live on, or it was told to drop those that it had begun
            return
        if not attempt.turned(self.driver.workers.values()):
            self.world.after(1.0, lambda _: self.post(lambda: self._ready(attempt)))
            return
        id = attempt.restored.checkpoint_id if attempt.restored else None
        self.world.note("restored", self.slot, attempt.number, id)
        if self.world.keeps_order and attempt.others_live:
            for region in {attempt.plan.region_of[s.task] for s in fresh}:
                self._ask(attempt, region)
        for subtask in fresh:
            subtask.choices.follow()
        for region in {attempt.plan.region_of[s.task]: None for s in fresh}:
            self.tell("ready", attempt.number, region)

    def _ask(self, attempt: Attempt, region: int) -> None:
        """Survivors that it is connected with say all: to follow a choice is to depend on what that depended on.

        But for choices that this region can never depend on: nobody would ask here for them.
        """
        plan, mine = attempt.plan, self.known[region]
        division, region_of = plan.division, plan.region_of
        concern = division.with_upstream({region}) if division.upstream else range(len(division.regions))
        others = {(s, r) for s, r in partners(division, plan.recovery, (self.slot, region)) if r not in attempt.regions}
        told = [
            {task: choices for task, choices in known.items() if region_of[task] in concern}
            for worker in self.driver.workers.values()
            for r, known in worker.known.items()
            if not worker.dead and (worker.slot, r) in others
        ]
        own = {s.task for s in self._of((region,))}
        for known in (self.driver.known, *told):
            for task, choices in known.items():
                if self.world.asks_for_all or task in own:
                    mine[task] = max(choices, mine.get(task, 0))

    def _reset(self, subtasks: list[SimSubtask]) -> None:
        """R1, R2: the process stays, these subtasks are dropped."""
        self._drop(subtasks)
        self.subtasks = [s for s in self.subtasks if not s.dropped]
        self._forget()
        if not self.subtasks:
            self.number, self._running = 0, False

    def _forget(self) -> None:
        """What a part that went back knew is gone as if its worker had died: what the rest depends on, it was told."""
        left = {s.attempt.plan.region_of[s.task] for s in self.subtasks}
        if self.world.forgets or not left:
            self.known = {region: known for region, known in self.known.items() if region in left}

    def _drop(self, subtasks: list[SimSubtask]) -> None:
        for subtask in subtasks:
            subtask.dropped, subtask.running = True, False
            for link in (*subtask.inputs, *subtask.outputs):
                link.die()


class Cores:
    """Enough cores for all; while some are lost, a process starts on one that another has left, or waits for them."""

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

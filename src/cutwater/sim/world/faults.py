"""Makes the faults of a schedule happen, and notes which of them struck something."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cutwater.protocol.job.messages import JobPhase
from cutwater.sim.schedules.schedule import REQUESTS
from cutwater.sim.world.channels import Link, Pipe
from cutwater.sim.world.driver import HEARTBEAT_TIMEOUT_MS

if TYPE_CHECKING:
    from cutwater.sim.schedules.schedule import Fault
    from cutwater.sim.world.worker import SimWorker
    from cutwater.sim.world.world import World


def inject(world: World, fault: Fault) -> None:
    """The moment of a fault has come."""
    _FAULTS[fault.kind](world, fault)


def _worker(world: World, fault: Fault) -> SimWorker | None:
    workers = [w for w in world.driver.workers.values() if not w.dead]
    return workers[fault.place % len(workers)] if workers else None


def _kill_worker(world: World, fault: Fault) -> None:
    worker = _worker(world, fault)
    if worker is not None:
        if worker.subtasks:
            world.strike("kill_worker")
        worker.kill(with_core=True)
        driver = worker.driver
        world.after(0.5 + world.draws.below(8), lambda _: driver.lose(worker))


def _fail_subtask(world: World, fault: Fault) -> None:
    """A user's function raises an exception."""
    running = [s for w in world.driver.workers.values() if not (w.dead or w.paused) for s in w.subtasks if s.running]
    if running:
        world.strike("fail_subtask")
        subtask = running[fault.place % len(running)]
        subtask.worker.fail(subtask)


def _kill_driver(world: World, fault: Fault) -> None:
    driver = world.driver
    if driver.over:
        return
    world.strike("kill_driver")
    driver.kill()
    world.after(1.0 + fault.for_ms / 8, lambda _: world.start_driver())


def _zombie_driver(world: World, fault: Fault) -> None:
    """The driver is stopped, another one takes over, and then the first wakes up."""
    driver = world.driver
    if driver.over or driver.core.machine.phase is JobPhase.FORMING:
        return
    world.strike("zombie_driver")
    driver.thread.pause()
    world.after(1.0, lambda _: world.start_driver())
    world.after(fault.for_ms, lambda _: driver.thread.resume())


def _pause(world: World, fault: Fault) -> None:
    worker = _worker(world, fault)
    if worker is None:
        return
    world.strike("pause")
    worker.pause()
    world.after(fault.for_ms, lambda _: worker.resume())
    _watch_silence(world, worker, fault)


def _watch_silence(world: World, worker: SimWorker, fault: Fault) -> None:
    """A worker that is not heard for too long is replaced; it may live on as a zombie."""
    if fault.for_ms > HEARTBEAT_TIMEOUT_MS:
        driver = worker.driver
        world.after(HEARTBEAT_TIMEOUT_MS, lambda _: driver.lose(worker))


def _partition(world: World, fault: Fault) -> None:
    """No control message passes between a worker and its driver; what was sent arrives when it heals."""
    worker = _worker(world, fault)
    if worker is None:
        return
    pipes = [worker.to_driver, worker.from_driver]
    if fault.place & 64:  # one-way
        del pipes[fault.place & 1]
    world.strike("partition")
    for pipe in pipes:
        _clog_pipe(world, pipe, fault.for_ms)
    if worker.to_driver in pipes:
        _watch_silence(world, worker, fault)


def _clog_pipe(world: World, pipe: Pipe, for_ms: float) -> None:
    pipe.clogs += 1
    world.after(for_ms, lambda _: pipe.unclog())


def _links(world: World) -> list[Link]:
    attempt = world.attempts.get(world.driver.core.machine.attempt)
    return attempt.links if attempt is not None else []


def _clog(world: World, fault: Fault) -> None:
    links = _links(world)
    if links:
        world.strike("clog")
        _clog_link(world, links[fault.place % len(links)], fault.for_ms)


def _clog_link(world: World, link: Link, for_ms: float) -> None:
    link.clogs += 1

    world.after(for_ms, lambda _: link.unclog())


def _swizzle(world: World, fault: Fault) -> None:
    """A part of the links stops, one after the other, and comes back in another order."""
    for number, link in enumerate(_links(world)):
        if (fault.place >> number % 8) & 1:
            world.strike("swizzle")
            delay = world.draws.below(32) / 2
            world.after(delay, lambda _, link=link: _clog_link(world, link, fault.for_ms / 4 + world.draws.below(64)))


def _slow(world: World, fault: Fault) -> None:
    worker = _worker(world, fault)
    if worker is not None:
        world.strike("slow")
        worker.slow += 1
        world.after(fault.for_ms, lambda _: setattr(worker, "slow", worker.slow - 1))


def _clock_jump(world: World, fault: Fault) -> None:
    """Forward by much, or back a little: what a driver's clock may do when its machine sleeps."""
    if not world.driver.over:
        world.strike("clock_jump")
        world.driver.thread.jump(-fault.for_ms / 4 if fault.place & 1 else fault.for_ms * 10)


def _rot(world: World, fault: Fault) -> None:
    """A disk loses what it said was durable: mostly of the newest checkpoint, for a while or for ever, never all.

    At once, or from the next checkpoint on; then with a machine that goes down, as it happens to disks that lied.
    """
    disk = world.disk

    def strike(_: object) -> None:
        whole = [done for done in disk.retained if disk.whole(done)]
        if len(whole) > 1:
            done = whole[-2] if fault.place & 6 == 6 else whole[-1]
            disk.rot(done, fault.for_ms if fault.place & 1 else None)

    if fault.place & 8:
        strike(None)
        return

    def lied(_: object) -> None:
        strike(None)
        _kill_worker(world, fault)

    disk.lies.append(lied)


def _for_a_time(target: str, name: str, amount: int, strikes: str = "") -> Callable[[World, Fault], None]:
    def start(world: World, fault: Fault) -> None:
        thing = getattr(world, target) if target else world
        setattr(thing, name, getattr(thing, name) + amount)
        if strikes:
            world.strike(strikes)
        world.after(fault.for_ms, lambda _: setattr(thing, name, getattr(thing, name) - amount))

    return start


def _request(world: World, request: Fault) -> None:
    """Not a fault: a user wants something."""
    driver = world.driver
    if not driver.over:
        if request.kind != "rescale":  # the driver says whether there is something to rescale
            world.strike(request.kind)
        driver.hear(("request", request.kind, request.place))


_FAULTS: dict[str, Callable[[World, Fault], None]] = {
    "kill_worker": _kill_worker,
    "kill_driver": _kill_driver,
    "zombie_driver": _zombie_driver,
    "pause": _pause,
    "partition": _partition,
    "clog": _clog,
    "swizzle": _swizzle,
    "slow": _slow,
    "slow_disk": _for_a_time("disk", "slow", 1, "slow_disk"),
    "reorder": _for_a_time("", "reorder_acks", 1),
    "jitter": _for_a_time("", "jitter", 1, "jitter"),
    "cross": _for_a_time("", "crossing", 1),
    "write_error": _for_a_time("disk", "failing", 48),
    "full_disk": _for_a_time("disk", "full", 1),
    "doubt": _for_a_time("disk", "doubtful", 64),
    "rot": _rot,
    "clock_jump": _clock_jump,
    "fail_subtask": _fail_subtask,
    "no_cores": lambda world, fault: world.cores.lose(fault.for_ms),
    **dict.fromkeys(REQUESTS, _request),
}

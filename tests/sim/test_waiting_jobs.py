"""Jobs that lose a core: they wait for it, or their user asks for less."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest

from cutwater.protocol.protocols import PROTOCOLS
from cutwater.sim.schedules.schedule import Fault, Schedule, make_schedule
from cutwater.sim.simulate import play
from cutwater.sim.world.record import to_trace
from cutwater.sim.world.world import World
from cutwater.trace.checker import check

LOST_MS, BACK_MS = 60.0, 360.0
LOST = (Fault(LOST_MS, "no_cores", 0, BACK_MS - LOST_MS), Fault(LOST_MS + 0.5, "kill_worker", 1, 0.0))
LESS, MORE = 0, 2
"""Places of requests for parallelism 1 and 3."""


def ridden_out(faults: tuple[Fault, ...], *requests: Fault, **settings: object) -> World:
    plain = Schedule(world="four", protocol="aligned", seed=3, rows=200)
    world, violation = play(msgspec.structs.replace(plain, faults=faults, requests=requests, **settings))
    assert violation is None, violation
    assert world.driver.outcome == "finished"
    return world


def begun(world: World) -> list[tuple[float, int]]:
    """When attempts began, and with how many workers."""
    found: dict[int, float] = {}
    for at, kind, _, attempt, *_ in world.history:
        if kind == "restored":
            found.setdefault(attempt, at)
    return [(at, world.attempts[attempt].plan.graph.workers) for attempt, at in found.items()]


def test_a_job_that_has_lost_a_core_waits_for_it() -> None:
    world = ridden_out(LOST)
    (first, before), (again, after) = begun(world)
    assert first < LOST_MS
    assert again > BACK_MS
    assert (before, after) == (2, 2)
    assert world.struck["no_cores"] == 1


@pytest.mark.parametrize("recovery", ["job", "task"])
def test_a_job_that_waits_for_a_core_goes_on_with_fewer_workers_at_once(recovery: str) -> None:
    asked_ms = 100.0
    world = ridden_out(LOST, Fault(asked_ms, "rescale", LESS, 0.0), recovery=recovery)
    (_, before), (again, after) = begun(world)
    assert asked_ms < again < asked_ms + 10.0
    assert (before, after) == (2, 1)
    assert world.seen["rescaled while it waited"] == world.seen["rescaled"] == 1
    assert world.attempts[2].restored is not None


def test_a_job_that_waits_for_a_core_cannot_have_more_workers_before_it_comes() -> None:
    world = ridden_out(LOST, Fault(100.0, "rescale", MORE, 0.0))
    _, (again, after), (rescaled, more) = begun(world)
    assert BACK_MS < again < rescaled
    assert (after, more) == (2, 3)
    assert world.seen["rescaled while it waited"] == 0


def test_a_running_job_runs_on_until_its_recruits_have_a_core() -> None:
    world = ridden_out(LOST[:1], Fault(100.0, "rescale", MORE, 0.0), rows=600)
    _, (rescaled, more) = begun(world)
    assert rescaled > BACK_MS
    assert more == 3
    assert world.completed > 20


def test_a_core_that_is_left_is_taken_by_who_waits() -> None:
    """One machine is gone; the driver's death leaves one core, on which one of its successor's workers can start."""
    world = ridden_out((*LOST, Fault(90.0, "kill_driver", 0, 8.0)), Fault(120.0, "rescale", LESS, 0.0))
    (_, before), (again, after) = begun(world)
    assert 120.0 < again < 130.0
    assert (before, after) == (2, 1)


def test_before_its_first_checkpoint_a_waiting_job_begins_anew_at_another_parallelism() -> None:
    """The trace of the run tells of each parallelism by itself, and no snapshot leads from one to the other."""
    world = ridden_out(LOST, Fault(100.0, "rescale", LESS, 0.0), interval_ms=300.0)
    assert [attempt.restored for attempt in world.attempts.values()] == [None, None]
    assert len(world.attempts[1].links) > len(world.attempts[2].links)
    trace = to_trace(world)
    assert len(trace.header.channels) == len(world.attempts[2].links)
    assert check(trace).ok


@pytest.mark.parametrize("protocol", [name for name in PROTOCOLS if name != "none"])
def test_jobs_that_wait_for_a_core_are_rescaled_in_schedules_with_other_faults(protocol: str) -> None:
    seen = Counter[str]()
    for name in ("four", "sources", "self_loop", "nested", "two_jobs", "sliced_join"):
        for seed in range(4):
            schedule = make_schedule(seed, name, protocol)
            faults = (*schedule.faults, Fault(40.0, "no_cores", 0, 60.0), Fault(40.5, "kill_worker", seed, 0.0))
            wishes = tuple(Fault(at_ms, "rescale", seed % 2, 0.0) for at_ms in (45.0, 60.0, 90.0))
            world, violation = play(msgspec.structs.replace(schedule, faults=faults, requests=wishes))
            assert violation is None, f"{name}, seed {seed}: {violation}"
            seen.update(world.seen)
    assert seen["rescaled while it waited"] > 8

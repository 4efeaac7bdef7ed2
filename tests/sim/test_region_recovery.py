"""Not everything goes back (R2, R3, R4), in simulation: judged as every run, and counted."""

from __future__ import annotations

from collections import Counter
from functools import cache

import msgspec
import pytest

from cutwater.protocol.rows import PROTOCOLS
from cutwater.sim.graphs import WORLDS
from cutwater.sim.schedule import Fault, Recovery, Schedule, make_schedule
from cutwater.sim.simulate import play

WORLDS_OF_REGIONS = [name for name, graph in WORLDS.items() if len(graph.regions) > 1]


def schedules(protocol: str, seeds: int) -> list[Schedule]:
    made = [make_schedule(seed, world, protocol) for world in WORLDS_OF_REGIONS for seed in range(seeds)]
    return [msgspec.structs.replace(schedule, recovery="region") for schedule in made]


@cache
def survivals(protocol: str) -> Counter[str]:
    seen = Counter[str]()
    for schedule in schedules(protocol, 20):
        world, violation = play(schedule, validates=True)
        assert violation is None, f"{schedule.world}, seed {schedule.seed}: {violation}"
        seen.update(world.seen)
        newest = world.attempts[max(world.attempts)]
        seen["kept their state"] += len(set(newest.attempt_of)) > 1
    return seen


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_r2_no_schedule_breaks_a_promise(protocol: str) -> None:
    seen = survivals(protocol)
    assert seen["regions restarted"] > 5
    assert seen["kept their state"] > 0


def test_worlds_fall_into_regions_as_drawn() -> None:
    assert {name: len(WORLDS[name].regions) for name in WORLDS_OF_REGIONS} == {"two_jobs": 2, "side_by_side": 3}


@pytest.mark.parametrize("protocol", ["aligned", "unaligned", "chandy_lamport", "synchronous"])
def test_r4_a_replacement_makes_the_same_rows_again(protocol: str) -> None:
    """The judge compares each with the one that survivors have, and follows nobody who drops by number alone."""
    seen = Counter[str]()
    for name in ("shuffle", "sources", "fan", "wide"):
        for seed in range(12):
            schedule = msgspec.structs.replace(make_schedule(seed, name, protocol), recovery="task")
            world, violation = play(schedule, validates=True)
            assert violation is None, f"{name}, seed {seed}: {violation}"
            seen.update(world.seen)
    assert seen["regions restarted"] > 10
    assert seen["followed an order"] > 10


LOOPS = [name for name, graph in WORLDS.items() if graph.cyclic and graph.workers > 1]


@pytest.mark.parametrize("recovery", ["task", "upstream"])
@pytest.mark.parametrize("protocol", ["aligned", "unaligned", "chandy_lamport", "synchronous"])
def test_r3_r4_loops_go_on_as_they_had_begun(protocol: str, recovery: Recovery) -> None:
    """Verdicts on loops are choices, and feedback channels are numbered as all others."""
    seen = Counter[str]()
    for name in LOOPS:
        for seed in range(3):
            schedule = msgspec.structs.replace(make_schedule(seed, name, protocol), recovery=recovery)
            world, violation = play(schedule, validates=True)
            assert violation is None, f"{name}, seed {seed}: {violation}"
            seen.update(world.seen)
    assert seen["regions restarted"] > 2
    assert seen["followed an order"] > 2
    assert seen["loop ended"] > 10


def test_r3_what_goes_back_takes_along_what_it_depends_on() -> None:
    graph = WORLDS["moody_loop"]
    units, upstream = graph.divided("upstream")
    names = {unit: {graph.names[graph.tasks.index(t)] for t in found} for unit, found in enumerate(units)}
    back = [{name for other in needed for name in names[other]} for needed in upstream]
    loop = {"loop 0", "loop 1", "loop 2"}
    assert sorted(back, key=sorted) == sorted(
        [{"read 0"}, loop | {"read 0"}, loop | {"read 0", "sink 0"}, loop | {"read 0", "sink 1"}], key=sorted
    )


@pytest.mark.parametrize("protocol", [name for name in PROTOCOLS if name != "none"])
def test_a_job_is_rescaled_in_the_middle_of_a_schedule(protocol: str) -> None:
    """Also in loops, and from snapshots with rows on their way: each of these goes to the owner of its key."""
    seen, wishes = Counter[str](), tuple(Fault(at_ms, "rescale", at_ms // 15, 0.0) for at_ms in (20, 45, 70))
    for name in ("four", "sources", "self_loop", "nested", "moody_loop", "two_jobs"):
        for seed in range(4):
            schedule = msgspec.structs.replace(make_schedule(seed, name, protocol), requests=wishes)
            world, violation = play(schedule, validates=True)
            assert violation is None, f"{name}, seed {seed}: {violation}"
            seen.update(world.seen)
    assert seen["rescaled"] > 10

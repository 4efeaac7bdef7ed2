"""Not everything goes back (R2, R3, R4), in simulation: judged as every run, and counted."""

from __future__ import annotations

from collections import Counter
from functools import cache

import msgspec
import pytest

from cutwater.protocol.protocols import PROTOCOLS
from cutwater.sim.schedules.graphs import WORLDS
from cutwater.sim.schedules.schedule import Fault, Recovery, Schedule, make_schedule
from cutwater.sim.simulate import play

WORLDS_OF_REGIONS = [name for name, graph in WORLDS.items() if len(graph.regions) > 1]


def schedules(protocol: str, seeds: int) -> list[Schedule]:
    made = [make_schedule(seed, world, protocol) for world in WORLDS_OF_REGIONS for seed in range(seeds)]
    return [msgspec.structs.replace(schedule, recovery="region") for schedule in made]


@cache
def survivals(protocol: str) -> Counter[str]:
    seen = Counter[str]()
    for schedule in schedules(protocol, 20):
        world, violation = play(schedule)
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
    """The oracle compares each with the one that survivors have, and follows nobody who drops by number alone."""
    seen = Counter[str]()
    for name in ("shuffle", "sources", "fan", "wide"):
        for seed in range(12):
            schedule = msgspec.structs.replace(make_schedule(seed, name, protocol), recovery="task")
            world, violation = play(schedule)
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
            world, violation = play(schedule)
            assert violation is None, f"{name}, seed {seed}: {violation}"
            seen.update(world.seen)
    assert seen["regions restarted"] > 2
    assert seen["followed an order"] > 2
    assert seen["loop ended"] > 10


IN_PARTS = [name for name, graph in WORLDS.items() if len(graph.divided("upstream").regions) > 2]


def go_back_together(world: str) -> list[set[str]]:
    """What goes back at the loss of the same workers, as the runtime has it."""
    graph = WORLDS[world]
    return [{graph.names[graph.tasks.index(t)] for t in found} for found in graph.divided("upstream").regions]


def test_r3_some_worlds_have_regions_of_several_subtasks_and_survivors_before_the_last_exchange() -> None:
    assert go_back_together("moody_stairs") == [
        {"read 0", "read 1", "first 2"},
        {"first 0", "first 1", "right 0", "right 1"},
        {"left 0", "low 0", "high 0", "sink 0"},
        {"left 1", "low 1", "high 1", "sink 1"},
        {"left 2", "sink 2"},
    ]
    aside = ({"aside 0", "sink 0"}, {"aside 1", "sink 1"}, {"aside 2"})
    loop = {"sort 0", "sort 1", "loop 0", "loop 1"}
    assert go_back_together("moody_aside") == [{"read 0", "read 1", "read 2", "sort 2"}, loop, *aside]


def test_r3_what_goes_back_takes_along_what_it_depends_on() -> None:
    division = WORLDS["moody_spin"].divided("upstream")
    parts = go_back_together("moody_spin")
    back = [set[str]().union(*(parts[r] for r in division.with_upstream({region}))) for region in range(len(parts))]
    first, spin = {"read 0", "read 1", "spin 2"}, {"spin 0", "spin 1"}
    assert back == [
        first,
        first | spin,
        *(first | spin | {f"sink {i}", f"rest {i}"} for i in (0, 1)),
        first | {"rest 2"},
    ]


SCHEDULES = 5_000
"""Under four protocols together."""


def ridden_out(protocol: str, seeds: range) -> Counter[str]:
    """Schedules of all worlds in parts, each judged."""
    seen = Counter[str]()
    for name in IN_PARTS:
        for seed in seeds:
            schedule = msgspec.structs.replace(make_schedule(seed, name, protocol), recovery="upstream")
            world, violation = play(schedule)
            assert violation is None, f"{name}, seed {seed}: {violation}"
            seen.update(world.seen)
            seen["schedules"] += 1
            world.dissolve()
    return seen


@pytest.mark.parametrize("protocol", ["aligned", "unaligned"])
def test_r3_regions_of_several_subtasks_go_back_together(protocol: str) -> None:
    seen = ridden_out(protocol, range(2))
    assert seen["regions restarted"] > 3
    assert seen["followed an order"] > 3


@pytest.mark.full
@pytest.mark.parametrize("protocol", ["aligned", "unaligned", "chandy_lamport", "synchronous"])
def test_r3_thousands_of_schedules_break_no_promise(protocol: str) -> None:
    seen = ridden_out(protocol, range(2, 3 + SCHEDULES // (4 * len(IN_PARTS))))
    assert seen["schedules"] >= SCHEDULES // 4
    assert seen["regions restarted"] > 200
    assert seen["followed a verdict"] > 20


@pytest.mark.parametrize("protocol", [name for name in PROTOCOLS if name != "none"])
def test_a_job_is_rescaled_in_the_middle_of_a_schedule(protocol: str) -> None:
    """Also in loops, and from snapshots with rows on their way: each of these goes to the owner of its key."""
    seen, wishes = Counter[str](), tuple(Fault(at_ms, "rescale", at_ms // 15, 0.0) for at_ms in (20, 45, 70))
    for name in ("four", "sources", "self_loop", "nested", "moody_loop", "two_jobs"):
        for seed in range(4):
            schedule = msgspec.structs.replace(make_schedule(seed, name, protocol), requests=wishes)
            world, violation = play(schedule)
            assert violation is None, f"{name}, seed {seed}: {violation}"
            seen.update(world.seen)
    assert seen["rescaled"] > 10

"""Not everything goes back (R2, R4), in simulation: judged as every run, and counted."""

from __future__ import annotations

from collections import Counter
from functools import cache

import msgspec
import pytest

from cutwater.protocol.rows import PROTOCOLS
from cutwater.sim.graphs import WORLDS
from cutwater.sim.schedule import Schedule, make_schedule
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

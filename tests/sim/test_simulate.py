"""Schedules with faults under every protocol, judged by the checker; and bugs that it must find."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import cache

import msgspec
import pytest
from click.testing import CliRunner

from cutwater.protocol.channel.items import rows_in
from cutwater.protocol.protocols import PROTOCOLS
from cutwater.sim.schedules.graphs import WORLDS
from cutwater.sim.schedules.schedule import FAULTS, REQUESTS, Fault, Schedule, make_schedule
from cutwater.sim.simulate import MUTANTS, UNREACHABLE, Report, Simulation, play
from cutwater.sim.world.disk import Done
from cutwater.sim.world.record import digest as digest_of
from cutwater.sim.world.world import World
from cutwater.ui.cli import cli

SCHEDULES = 340
SEEDS_MAX = 2_000
RARE = (
    "takes acknowledgements of an older attempt",
    "choices are told to neighbours only (R0)",
    "a replacement asks for its own choices only (R0)",
    "what was overtaken is not sent again (R4)",
    "a rescale leaves rows with the number of their subtask",
    "a restore mixes up the parts of a log",
)
"""Planted bugs that need some hundred seeds, because several faults have to meet."""


@cache
def simulated(protocol: str) -> Report:
    return Simulation(protocols=[protocol]).run(range(SCHEDULES))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_schedule_breaks_a_promise(protocol: str) -> None:
    report = simulated(protocol)
    assert report.failures == []
    assert report.void < report.schedules // 10
    assert report.passed == report.schedules - report.void
    assert report.recoveries > SCHEDULES // 2
    assert report.fallbacks > SCHEDULES // 20 or protocol == "none"
    assert report.checkpoints > (0 if protocol == "none" else SCHEDULES)


def test_every_transition_and_every_fault_was_reached() -> None:
    whole = Report()
    for protocol in PROTOCOLS:
        whole.add(simulated(protocol))
    assert whole.schedules >= 2_000
    assert whole.missing() == []
    assert {name for name, count in whole.walked.items() if not count} == UNREACHABLE.keys()  # an excuse that is none
    assert whole.struck.keys() == {*FAULTS, *REQUESTS, "torn", "lost"}


def channels_in(world: World) -> tuple[int, int]:
    """Rows of channels in the checkpoints that completed: those of back-edges, and those of others."""
    back = others = 0
    for done in (entry for entry in world.disk.log if type(entry) is Done):
        edges = world.attempts[done.attempt].plan.graph.back
        for part in done.manifest.values():
            for channel, items in (*part.logs.items(), *part.overtaken.items()):
                if channel in edges:
                    back += rows_in(items)
                else:
                    others += rows_in(items)
    return back, others


@pytest.mark.parametrize("protocol", ["aligned", "at_least_once", "chandy_lamport", "unaligned", "synchronous"])
@pytest.mark.parametrize("name", ["shuffle", "self_loop"])
def test_a6_cl6_a_snapshot_holds_of_its_channels_what_its_protocol_says(name: str, protocol: str) -> None:
    """A6, C3, CL6: every schedule judges whether it is a consistent cut; here, that it holds what it should."""
    back = others = blocked = 0
    for seed in range(40):
        world, violation = play(make_schedule(seed, name, protocol))
        assert violation is None, f"seed {seed}: {violation}"
        found = channels_in(world)
        back, others, blocked = back + found[0], others + found[1], blocked + world.seen["blocked"]
    if protocol in ("aligned", "at_least_once"):
        assert others == 0, "channels are empty, but for what comes round a loop"
        assert (back > 0) == (name == "self_loop")
    else:
        assert back + others > 0
    assert blocked > 0 or protocol != "aligned"


def test_what_was_not_reached_is_named() -> None:
    report = Simulation(["four"], ["none"]).run(range(2))
    assert "snapshot: recording + another barrier" in report.missing()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.full) if name in RARE else name for name in MUTANTS]
)
def test_a_planted_bug_is_found(name: str) -> None:
    mutant = MUTANTS[name]
    simulation = Simulation([mutant.world], [mutant.protocol], planted=name)
    assert next(simulation.violations(range(SEEDS_MAX)), None) is not None


@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.settings])
def test_settings_in_which_a_bug_shows_break_nothing_without_it(name: str) -> None:
    mutant = MUTANTS[name]
    simulation = Simulation([mutant.world], [mutant.protocol], planted=name)
    for seed in range(3):
        _, violation = play(msgspec.structs.replace(simulation.schedule(seed), planted=""))
        assert violation is None, f"seed {seed}: {violation}"


SLICED = [name for name, graph in WORLDS.items() if graph.sliced]
IN_WORK = "an alignment that takes too long does not wait for work (A1)"


@pytest.mark.parametrize("name", SLICED)
def test_a1_what_may_freeze_the_state_waits_until_all_that_was_made_has_left(name: str) -> None:
    """That it does so is what the planted bugs show; here, that schedules get there at all."""
    seen = Counter[str]()
    for seed in range(10):
        world, violation = play(make_schedule(seed, name, "unaligned"))
        assert violation is None, f"seed {seed}: {violation}"
        seen.update(world.seen)
    assert seen["sent a slice"] > 100
    assert seen["waited for work"] > 0


@pytest.mark.parametrize("name", ["shuffle", "moody_join", "nested"])
def test_worlds_without_slices_cannot_show_a_freeze_in_the_middle_of_work(name: str) -> None:
    """Nothing in them is ever in the middle of work: with the bug every event is as it is without."""
    schedule = make_schedule(1, name, "unaligned")
    planted = msgspec.structs.replace(schedule, planted=IN_WORK)
    assert digest_of(play(planted)[0]) == digest_of(play(schedule)[0])


def test_a_run_without_load_or_without_its_fault_proves_nothing() -> None:
    plain = Schedule(world="four", protocol="aligned", seed=1)
    late = (Fault(5_000.0, "kill_worker", 0, 1.0),)
    in_time = (Fault(20.0, "kill_worker", 0, 1.0),)
    void = {
        "no load": msgspec.structs.replace(plain, rows=0),
        "struck nothing": msgspec.structs.replace(plain, faults=late),
        "fine": plain,
        "struck": msgspec.structs.replace(plain, faults=in_time),
    }
    found = {name: play(schedule) for name, schedule in void.items()}
    assert [violation for _, violation in found.values()] == [None] * 4
    assert {name: world.void for name, (world, _) in found.items()} == {
        "no load": True, "struck nothing": True, "fine": False, "struck": False,
    }  # fmt: skip


def test_a_void_run_is_reported_and_not_counted_as_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(["four"], ["aligned"])
    idle = msgspec.structs.replace(simulation.schedule(0), rows=0)
    monkeypatch.setattr(simulation, "schedule", lambda seed: idle)
    report = simulation.run(range(3))
    assert (report.schedules, report.void, report.passed, report.failures) == (3, 3, 0, [])


def digest(seed: int, world: str, protocol: str, hash_seed: str) -> str:
    code = "from cutwater.ui.cli import main; main()"
    command = [sys.executable, "-c", code, "simulate", "--json", "--seed", str(seed), "--world", world]
    environment = os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    command += ["--protocol", protocol]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return msgspec.json.decode(done.stdout, type=Report).digest


def test_the_same_seed_gives_the_same_trace_in_every_process() -> None:
    found = {digest(11, "nested", "unaligned", hash_seed) for hash_seed in ("1", "2")}
    assert len(found) == 1
    assert found == {Simulation(["nested"], ["unaligned"]).run(range(11, 12)).digest}
    assert found != {Simulation(["nested"], ["unaligned"]).run(range(12, 13)).digest}


def test_several_processes_find_what_one_finds() -> None:
    one = CliRunner().invoke(cli, ["simulate", "--schedules", "30", "--world", "four", "--json"])
    two = CliRunner().invoke(cli, ["simulate", "--schedules", "30", "--world", "four", "--json", "--jobs", "2"])
    reports = [msgspec.json.decode(found.stdout, type=Report) for found in (one, two)]
    for report in reports:
        report.cpu_s = 0.0
    assert reports[0] == reports[1]


def test_the_command_tells_what_came_of_the_schedules() -> None:
    found = CliRunner().invoke(cli, ["simulate", "--schedules", "30", "--world", "four"])
    assert found.exit_code == 0, found.output
    assert "30 schedules: 0 inconsistent cuts, 0 failures" in found.output
    assert " passed" in found.output


def test_rare_bugs_are_planted_ones() -> None:
    assert set(RARE) <= MUTANTS.keys()


def test_worlds_have_cycles_and_none() -> None:
    assert {graph.cyclic for graph in WORLDS.values()} == {True, False}

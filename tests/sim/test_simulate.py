"""Schedules with faults under every protocol, judged by the checker; and bugs that it must find."""

from __future__ import annotations

import pytest
from click.testing import CliRunner

from cutwater.protocol.rows import PROTOCOLS
from cutwater.sim.planted import PLANTED
from cutwater.sim.schedule import Schedule
from cutwater.sim.simulate import Simulation
from cutwater.ui.cli import cli

SCHEDULES = 340
SEEDS_MAX = 2_000


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_no_schedule_breaks_a_promise(protocol: str) -> None:
    report = Simulation(protocols=[protocol]).run(range(SCHEDULES))
    assert report.failures == []
    assert report.void < report.schedules // 10
    assert report.recoveries > SCHEDULES // 4
    assert report.checkpoints > (0 if protocol == "none" else SCHEDULES)


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found(name: str) -> None:
    plant = PLANTED[name]
    simulation = Simulation([plant.world], [plant.protocol], planted=name)
    assert next(simulation.violations(range(SEEDS_MAX)), None) is not None


def test_the_same_schedule_gives_the_same_history() -> None:
    from cutwater.sim.simulate import play

    schedule: Schedule = Simulation(["self_loop"], ["unaligned"]).schedule(11)
    first, second = play(schedule)[0].history, play(schedule)[0].history
    assert first == second
    assert first


def test_the_command_tells_what_came_of_the_schedules() -> None:
    found = CliRunner().invoke(cli, ["simulate", "--schedules", "60", "--world", "four", "--seed", "1"])
    assert found.exit_code in (0, 1), found.output
    found = CliRunner().invoke(cli, ["simulate", "--schedules", "60", "--world", "four"])
    assert found.exit_code == 0, found.output
    assert "0 inconsistent cuts" in found.output + (found.stderr or "")

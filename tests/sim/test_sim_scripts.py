"""Scripts: schedules that once broke a promise, or break one with a planted bug."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cutwater.errors import DataError
from cutwater.sim.schedules.schedule import make_schedule
from cutwater.sim.scripts import parse_script, script_of, shrink
from cutwater.sim.simulate import Simulation, verdict

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_ends_as_it_says(path: Path) -> None:
    schedule, expect = parse_script(path.read_text(), path.name)
    assert verdict(schedule) == expect
    if schedule.planted:
        assert expect != "ok"
        assert verdict(msgspec.structs.replace(schedule, planted="")) == "ok"


def test_there_are_scripts_of_real_and_of_planted_bugs() -> None:
    planted = [parse_script(path.read_text())[0].planted for path in SCRIPTS]
    assert planted.count("") >= 2
    assert len(set(planted) - {""}) >= 3


@pytest.mark.parametrize("seed", range(5))
def test_a_script_says_all_of_a_schedule(seed: int) -> None:
    schedule = make_schedule(seed, "self_loop", "unaligned")
    assert parse_script(script_of(schedule, "ok", "a comment")) == (schedule, "ok")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("fault 1 flood 0 1", "no fault 'flood'"),
        ("fault 1 pause", "missing"),
        ("request 1 coffee 0", "no request 'coffee'"),
        ("speed 3", "no setting 'speed'"),
        ("draws 1:2", "draws"),
        ("rows x", "rows"),
        ("world flat", "no world 'flat'"),
    ],
)
def test_a_line_that_says_nothing_known_is_named(line: str, what: str) -> None:
    with pytest.raises(DataError, match=what):
        parse_script(f"world four\nprotocol aligned\n{line}\n", "mine.txt")


def test_a_failing_schedule_becomes_short_and_fails_the_same_way() -> None:
    name = "commits only the completed id"
    simulation = Simulation(["four"], ["aligned"], planted=name)
    seed, violation = next(simulation.violations(range(100)))
    schedule = simulation.schedule(seed)
    short, kind = shrink(schedule, runs_max=120)
    assert kind == violation.kind == verdict(short)
    assert short.rows <= schedule.rows
    assert len(short.faults) <= len(schedule.faults)
    assert len(script_of(short, kind)) < 1_000

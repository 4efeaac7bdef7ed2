"""All interleavings of small worlds: every invariant in every state, every complete snapshot a consistent cut."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable
from typing import Any

import explored
import pytest
from click.testing import CliRunner

from cutwater.errors import ConfigError
from cutwater.sim.explorer.explore import Explored, combinations, explore_world, first_state
from cutwater.sim.explorer.job import JobState
from cutwater.sim.explorer.world import Budget, JobWorld
from cutwater.sim.mutants.core import Mutant
from cutwater.sim.schedules.graphs import Graph, Step
from cutwater.sim.simulate import MUTANTS
from cutwater.ui.cli import cli

STATES_MIN, STATES_MIN_FULL = 10_000, 200_000

WORLDS: defaultdict[str, list[str]] = defaultdict(list)
"""Protocol -> the worlds that it runs in."""
for _world, _protocol in combinations():
    WORLDS[_protocol].append(_world)


def all_of(world: str, protocol: str, *, large: bool) -> Explored:
    found = explore_world(world, protocol, large=large)
    assert not found.violation, str(found)
    assert found.complete
    assert found.ends > 0
    assert found.checked > 0
    return found


@pytest.mark.parametrize("protocol", WORLDS)
def test_no_interleaving_breaks_a_promise(protocol: str) -> None:
    found = [all_of(world, protocol, large=False) for world in WORLDS[protocol]]
    assert sum(f.states for f in found) >= STATES_MIN
    told = [*map(explored.row, found), explored.total(protocol, found)]
    page = explored.PAGE.read_text()
    assert [line for line in told if line not in page] == [], "python tests/sim/explored.py writes the table anew"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("protocol", WORLDS)
def test_no_interleaving_of_larger_worlds_breaks_a_promise(protocol: str) -> None:
    found = [all_of(world, protocol, large=True) for world in WORLDS[protocol]]
    assert sum(f.states for f in found) >= STATES_MIN_FULL


# --------------------------------------------------------------------------------------------------------- the alarm

QUICK = Budget(eager=True, prompt=True)
ROUND = QUICK._replace(rows=(3,), requests=1)
CROSS = QUICK._replace(rows=(), requests=0, savepoints=2, crashes=0, crossing=True)
BUGS = {
    "skips alignment": ("join", QUICK, "inconsistent cut"),
    "freezes on the first barrier": ("join", QUICK, "nobody took its marker"),
    "commits before the complete notice": ("join", QUICK, "early commit"),
    "leaves early back-edges open (C2)": ("loop", ROUND, "inconsistent cut"),
    "records no back-edge": ("loop", ROUND, "inconsistent cut"),
    "forgets one channel": ("join", QUICK, "nobody took its marker"),
    "drops the snapshot id": ("join", QUICK, "brought barrier 2 after 2"),
    "ignores aborts": ("join", QUICK._replace(expiries=1), "stuck"),
    "waits for barriers that were skipped (A8)": ("crossing", CROSS, "one checkpoint at a time aligns and blocks"),
    "publishes without the last acknowledgement": ("line", QUICK, "part missing"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_found_and_the_shortest_way_to_it_told(bug: str) -> None:
    world, budget, what = BUGS[bug]
    mutant = MUTANTS[bug]
    found = explore_world(world, mutant.protocol, budget=budget, mutant=mutant)
    assert what in found.violation
    assert not found.complete
    assert found.script
    assert not explore_world(world, mutant.protocol, budget=budget, states_max=found.states).violation


@pytest.mark.full
def test_a1_a_freeze_in_the_middle_of_work_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An alignment that takes too long is heard while a part of what a row was made into has not left."""
    monkeypatch.setattr(JobState, "is_idle", lambda self, task: True)
    found = explore_world("slices", "unaligned")
    assert found.violation.startswith("lost or doubled rows")
    work, cut = "sink 0 goes on with its work", found.script.index("publish: checkpoint 1")
    frozen = max(n for n, step in enumerate(found.script[:cut]) if " hears Trigger" in step)
    assert found.script[:frozen].count(work) == 1, "of the two parts"
    assert work in found.script[frozen:cut]
    assert "crash" in found.script[cut:]


def test_the_way_is_a_shortest_one_and_readable() -> None:
    """The sink freezes with the barrier of one source, and nobody ever takes that of the other."""
    mutant = MUTANTS["freezes on the first barrier"]
    found = explore_world("join", "aligned", budget=QUICK._replace(requests=1), mutant=mutant)
    assert str(found).splitlines()[1:] == [
        "  1. request",
        "  2. read 0 hears Trigger(checkpoint_id=1, final=False, probe=False, savepoint=False)",
        "  3. take read 0 > sink 0 0: barrier 1",
        "  4. read 1 hears Trigger(checkpoint_id=1, final=False, probe=False, savepoint=False)",
        "  5. publish: checkpoint 1",
    ]


def test_markers_in_channels_that_reorder_are_wrong_and_the_independent_checker_says_so_too() -> None:
    """CL9: a marker that overtakes a message loses it."""
    found = explore_world("pair", "chandy_lamport", budget=Budget(crashes=0))
    assert found.violation.startswith("inconsistent cut: snapshot 1, p > q: sent 1, taken [], recorded ()")
    assert len(found.script) == 5


# ------------------------------------------------------------------------------------- a snapshot does not change a run


def computations(protocol: str, requests: int, savepoints: int) -> set[Hashable]:
    """The rows that each channel has carried, in their order, and what was committed: of every way to an end."""
    merge = Graph("merge", [Step("read", 2), Step("merge"), Step("sink")],
                  [("read", "merge", "hash"), ("merge", "sink", "forward")])  # fmt: skip
    budget = QUICK._replace(rows=(0, 1), requests=requests, savepoints=savepoints, crashes=0, direct=True, hasty=True)
    todo: list[Any] = [JobState(JobWorld(merge, protocol, budget, Mutant("")))]
    seen, found = {todo[0].key()}, set[Hashable]()
    while todo:
        state = todo.pop()
        inner, outer = state.actions()
        if not inner:
            found.add((*state.history, *sorted(row for *_, rows in state.committed for row in rows)))
        for action in (*inner, *outer):
            after = state.copy()
            after.act(action)
            if (key := after.key()) not in seen:
                seen.add(key)
                todo.append(after)
    return found


LONG = [pytest.param(name, marks=pytest.mark.full) for name in ("chandy_lamport", "unaligned", "synchronous")]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("protocol", ["aligned", "at_least_once", *LONG])
def test_a_snapshot_makes_no_computation_possible_and_none_impossible(protocol: str) -> None:
    """Two sources meet in a step: what it sends depends on which it hears first, in six ways."""
    without = computations(protocol, 0, 0)
    assert len(without) == 6
    assert computations(protocol, 1, 0) == without
    assert computations(protocol, 0, 1) == without


# ------------------------------------------------------------------------------------------------------- the worlds


def test_in_the_loop_a_row_goes_through_both_subtasks() -> None:
    """Else the world with a loop would show nothing."""
    state = first_state("loop", "aligned", ROUND._replace(requests=0, crashes=0))
    seen = set[str]()
    while actions := state.actions()[0]:
        seen.add(state.describe(actions[0]))
        state.act(actions[0])
    assert {"take read 0 > loop 1 0: row 0", "take loop 1 > loop 0 1: row 0"} <= seen
    state.check_end()


@pytest.mark.parametrize(("world", "protocol"), [("line", "aligned"), ("loop", "synchronous"), ("pair", "lai_yang")])
def test_a_search_that_is_bounded_says_so(world: str, protocol: str) -> None:
    found = explore_world(world, protocol, states_max=100)
    assert not found.complete
    assert "the search ended early" in str(found)


def test_worlds_that_are_not_there_are_refused() -> None:
    with pytest.raises(ConfigError, match="no small world 'line' under 'lai_yang'"):
        explore_world("line", "lai_yang")
    with pytest.raises(ConfigError, match="none of the core's"):
        explore_world("line", "aligned", mutant=MUTANTS["ignores fencing"])


# ------------------------------------------------------------------------------------------------------ the command


def test_the_command_tells_what_it_found() -> None:
    done = CliRunner().invoke(cli, ["explore", "--protocol", "none", "--world", "line"], catch_exceptions=False)
    assert done.exit_code == 0
    assert done.output.startswith("line, none: ")
    for word in ("states (all of them)", "transitions", "ends", "depth", " s: no violation"):
        assert word in done.output


def test_the_command_adds_the_states_of_each_protocol_up() -> None:
    done = CliRunner().invoke(cli, ["explore", "--world", "two_lines", "--states", "100"], catch_exceptions=False)
    assert done.output.splitlines()[-1] == "states by protocol: unaligned 100, aligned 100"


def test_the_command_fails_with_the_way_to_a_planted_bug() -> None:
    bug = "freezes on the first barrier"
    done = CliRunner().invoke(cli, ["explore", "--world", "join", "--plant", bug, "--json"])
    told = json.loads(done.output.splitlines()[0])
    assert done.exit_code != 0
    assert told["violation"].startswith("independent checker: marker out of its place")
    assert told["script"][-1] == "publish: checkpoint 1"

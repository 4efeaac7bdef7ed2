"""Small worlds of which a part goes back: what each rule forbids is found when it is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from cutwater.protocol.job.recovery_scope import Division
from cutwater.sim.explorer.explore import explore_world
from cutwater.sim.explorer.job import JobState
from cutwater.sim.explorer.scopes import Parts
from cutwater.sim.explorer.world import Budget

REPLAY = Budget(requests=0, eager=True, prompt=True)
AGAIN = REPLAY._replace(requests=1)


def _alone(self: Division, regions: Any) -> set[int]:
    return set(regions)


def _asks_nobody(self: Parts, state: JobState, going: frozenset[int]) -> tuple[int, ...]:
    return (0,) * len(self.made)


def _sends_all_again(self: Parts, state: JobState, channel: int, row: int) -> int:
    number, self.sent[channel] = self.sent[channel], self.sent[channel] + 1
    if number == len(state.history[channel]):
        state.history[channel] += (row,)
        self.told[channel] += (self.knows[state.world.graph.channels[channel].source],)
    state.send(channel, number)
    return number


NO_WAIT = ("merge_task", AGAIN, Parts, "_caught_up", lambda self, state: True, "inconsistent cut")
ORDER = "replay: row 0 of merge 0 > sink 0"


@pytest.mark.parametrize(
    ("world", "budget", "owner", "name", "plant", "what"),
    [
        ("merge_upstream", REPLAY, Parts, "_known_to_survivors", _asks_nobody, ORDER),
        ("merge_task", REPLAY, Parts, "_known_to_survivors", _asks_nobody, ORDER),
        ("merge_upstream", REPLAY, Division, "with_upstream", _alone, "replay: nobody keeps"),
        ("merge_task", REPLAY, Parts, "emit", _sends_all_again, "order of a channel"),
        pytest.param(*NO_WAIT, marks=pytest.mark.full),
    ],
    ids=[
        "order asked of nobody (R3)",
        "order asked of nobody (R4)",
        "goes back alone (R3)",
        "nothing dropped",
        "no wait",
    ],
)
def test_a_planted_bug_is_found_and_a_shortest_way_told(
    monkeypatch: pytest.MonkeyPatch, world: str, budget: Budget, owner: type, name: str, plant: Any, what: str
) -> None:
    monkeypatch.setattr(owner, name, plant)
    found = explore_world(world, "aligned", budget=budget)
    assert found.violation.startswith(what)
    assert any(line.startswith("crash: ") for line in found.script)

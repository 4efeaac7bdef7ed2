"""The generated page, and the tables that it is made from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cutwater.protocol.checkpoint.coordinator import PENDING_STAGES, PendingStage, PendingStep
from cutwater.protocol.diagrams import states_page
from cutwater.protocol.subtask.stages import PHASES, STAGES, Phase, PhaseStep, Stage, StageStep

PAGE = Path(__file__).parents[2] / "docs" / "protocol-states.md"


def test_the_page_is_current():
    if os.environ.get("REWRITE"):
        PAGE.parent.mkdir(exist_ok=True)
        PAGE.write_text(states_page())
    assert PAGE.read_text() == states_page()


@pytest.mark.parametrize(
    ("table", "states", "steps", "first", "last"),
    [
        (STAGES, Stage, StageStep, Stage.ABSENT, {Stage.COMPLETED, Stage.ABORTED}),
        (PHASES, Phase, PhaseStep, Phase.RUNNING, set()),
        (
            PENDING_STAGES,
            PendingStage,
            PendingStep,
            PendingStage.TRIGGERED,
            {PendingStage.COMPLETED, PendingStage.GIVEN_UP},
        ),
    ],
)
def test_every_state_can_be_reached_every_step_is_used_and_only_ends_are_ends(table, states, steps, first, last):
    reached, before = {first}, set()
    while before != reached:
        before = set(reached)
        reached |= {after for (state, _), after in table.items() if state in before}
    assert reached == set(states)
    assert {step for _, step in table} == set(steps)
    assert {s for s in states if not any(state is s for state, _ in table)} == last

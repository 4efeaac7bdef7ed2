"""The generated page, and the tables that it is made from."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import pytest

from cutwater.protocol.checkpoint.coordinator import PENDING_STAGES, PendingStage, PendingStep
from cutwater.protocol.protocols import PROTOCOLS, FailureReason
from cutwater.protocol.subtask.stages import PHASES, STAGES, Phase, PhaseStep, Stage, StageStep

PAGE = Path(__file__).parents[2] / "docs" / "protocol-states.md"

_State = TypeVar("_State", bound=enum.Enum)
_Step = TypeVar("_Step", bound=enum.Enum)

_HEAD = """# States of the protocol machines

This page is generated from the transition tables in `cutwater/protocol/`; a test keeps it current
(`REWRITE=1 pytest tests/protocol/test_diagrams.py` writes it). What is not drawn raises `InvariantError`.
"""


def states_page() -> str:
    """The whole page, Markdown with Mermaid diagrams."""
    parts = [
        _HEAD,
        "## Protocols\n\nEach is a row of three parameters of one subtask machine.\n",
        _protocols(),
        "## Snapshot of one checkpoint in one subtask\n",
        _diagram(STAGES, "absent", ("completed", "aborted")),
        "## Life of a subtask\n",
        _diagram(PHASES, "running", ()),
        "## Checkpoint in the coordinator\n",
        _diagram(PENDING_STAGES, "triggered", ("completed", "given_up")),
        "## Why a checkpoint fails\n\nOnly reasons that count add to the consecutive failures that "
        "`tolerable_failed` bounds.\n",
        _reasons(),
    ]
    return "\n".join(parts)


def _diagram(table: Mapping[tuple[_State, _Step], _State], first: str, last: tuple[str, ...]) -> str:
    arrows = [f"    {before.value} --> {after.value}: {step.value}" for (before, step), after in table.items()]
    ends = [f"    {state} --> [*]" for state in last]
    return "\n".join(["```mermaid", "stateDiagram-v2", f"    [*] --> {first}", *arrows, *ends, "```\n"])


def _protocols() -> str:
    rows = [
        f"| `{r.name}` | {r.freeze_on.value} | {r.before_freeze.value} | {r.after_freeze.value} |"
        for r in PROTOCOLS.values()
    ]
    head = "| protocol | freeze on | input whose barrier came, before the freeze | inputs without barrier, after it |"
    return "\n".join([head, "|---|---|---|---|", *rows, ""])


def _reasons() -> str:
    rows = [
        f"| `{r.code}` | {r.message} | {'yes' if r.counts else 'no'} | {'yes' if r.preflight else 'no'} |"
        for r in FailureReason
    ]
    return "\n".join(["| reason | meaning | counts | before any subtask heard of it |", "|---|---|---|---|", *rows, ""])


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

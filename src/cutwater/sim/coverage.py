"""Which transitions of the core's tables a simulation has walked: a run that never got there proves nothing."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from functools import cache

from cutwater.protocol.coordinator import CheckpointCoordinator
from cutwater.protocol.pending import PENDING_STAGES, PendingCheckpoint, PendingStep
from cutwater.protocol.stages import PHASES, STAGES, PhaseStep, Snapshot, StageStep
from cutwater.protocol.subtask import SubtaskMachine
from cutwater.sim.schedule import FAULTS

__all__ = ["Walked", "counting_coordinator", "counting_machine", "every_fault", "every_transition"]

Walked = Counter[tuple[Enum, Enum]]


@cache
def every_transition() -> dict[tuple[Enum, Enum], str]:
    """All transitions of all tables, with their names.

    >>> len(every_transition()) > 30
    True
    """
    tables = {"subtask": PHASES, "snapshot": STAGES, "checkpoint": PENDING_STAGES}
    return {
        (before, step): f"{table}: {before.value} + {step.value}"
        for table, transitions in tables.items()
        for before, step in transitions
    }


def every_fault() -> tuple[str, ...]:
    """All kinds of faults that can strike."""
    return (*FAULTS, "torn", "lost")


def counting_machine(machine: type[SubtaskMachine], walked: Walked) -> type[SubtaskMachine]:
    """The same machine; each transition it takes adds to ``walked``."""

    class Counting(machine):
        def _step(self, snapshot: Snapshot, step: StageStep) -> None:
            walked[snapshot.stage, step] += 1
            super()._step(snapshot, step)

        def _turn(self, step: PhaseStep) -> None:
            walked[self.phase, step] += 1
            super()._turn(step)

    return Counting


def counting_coordinator(coordinator: type[CheckpointCoordinator], walked: Walked) -> type[CheckpointCoordinator]:
    """The same coordinator; each transition it takes adds to ``walked``."""

    class Counting(coordinator):
        def _step(self, pending: PendingCheckpoint, step: PendingStep) -> None:
            walked[pending.stage, step] += 1
            super()._step(pending, step)

    return Counting

"""Coverage of the core's transition tables by simulations: a run that never got there proves nothing."""

from __future__ import annotations

from collections import defaultdict

from cutwater.protocol.checkpoint.coordinator import (
    PENDING_STAGES,
    CheckpointCoordinator,
    PendingCheckpoint,
    PendingStep,
)
from cutwater.protocol.subtask.machine import SubtaskMachine
from cutwater.protocol.subtask.stages import PHASES, STAGES, PhaseStep, Snapshot, StageStep
from cutwater.sim.schedules.schedule import FAULTS, REQUESTS

_TABLES = {"subtask": PHASES, "snapshot": STAGES, "checkpoint": PENDING_STAGES}

UNREACHABLE = {
    "subtask: stopped + freeze for a final barrier": (
        "Needs two final barriers in one attempt, the first of them before the input ended, that is of a stop with "
        "savepoint.  If that one is given up, the coordinator fails the attempt; if it completes, it starts no other "
        "but FINAL, and FINAL only when every subtask has handled its end of data, so that none is in STOPPED."
    ),
}
"""Transitions that one subtask allows and no coordinator brings about, each with the proof."""


def every_fault() -> tuple[str, ...]:
    """All kinds of faults that can strike, and all requests."""
    return (*FAULTS, "torn", "lost", *REQUESTS)


class Coverage:
    """Counts the transitions of machines that it makes.

    >>> coverage = Coverage()
    >>> machine = coverage.machine(SubtaskMachine)
    >>> len(coverage.by_name()) > 30, sum(coverage.by_name().values())
    (True, 0)
    """

    def __init__(self) -> None:
        self._walked: defaultdict[tuple[int, int], int] = defaultdict(int)
        """(state before, step), by their addresses: the hash of an enum is slow Python."""
        self._machines: dict[type[SubtaskMachine], type[SubtaskMachine]] = {}
        self._coordinators: dict[type[CheckpointCoordinator], type[CheckpointCoordinator]] = {}

    def by_name(self) -> dict[str, int]:
        """Every transition of every table, and how often it was walked."""
        return {
            f"{table}: {before.value} + {step.value}": self._walked[id(before), id(step)]
            for table, transitions in _TABLES.items()
            for before, step in transitions
        }

    def machine(self, machine: type[SubtaskMachine]) -> type[SubtaskMachine]:
        """The same machine, counting."""
        if machine not in self._machines:
            self._machines[machine] = _counting_machine(machine, self._walked)
        return self._machines[machine]

    def coordinator(self, coordinator: type[CheckpointCoordinator]) -> type[CheckpointCoordinator]:
        """The same coordinator, counting."""
        if coordinator not in self._coordinators:
            self._coordinators[coordinator] = _counting_coordinator(coordinator, self._walked)
        return self._coordinators[coordinator]


def _counting_machine(machine: type[SubtaskMachine], walked: defaultdict[tuple[int, int], int]) -> type[SubtaskMachine]:
    make_step, make_turn = machine._step, machine._turn  # pyright: ignore[reportPrivateUsage]

    class Counting(machine):
        def _step(self, snapshot: Snapshot, step: StageStep) -> None:
            walked[id(snapshot.stage), id(step)] += 1
            make_step(self, snapshot, step)

        def _turn(self, step: PhaseStep) -> None:
            walked[id(self.phase), id(step)] += 1
            make_turn(self, step)

    return Counting


def _counting_coordinator(
    coordinator: type[CheckpointCoordinator], walked: defaultdict[tuple[int, int], int]
) -> type[CheckpointCoordinator]:
    class Counting(coordinator):
        def _step(self, pending: PendingCheckpoint, step: PendingStep) -> None:
            walked[id(pending.stage), id(step)] += 1
            super()._step(pending, step)

    return Counting

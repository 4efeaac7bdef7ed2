"""A dataflow at one parallelism."""

from __future__ import annotations

from cutwater.config import RecoveryName
from cutwater.protocol.job.regions import Division
from cutwater.sim.schedules.graphs import Graph


class Plan:
    """A dataflow at one parallelism, and what of it goes back after a failure.

    Args:
        parallelism: of the steps that can be rescaled; 0: what each began with.

    >>> from cutwater.sim.schedules.dataflows import WORLDS
    >>> [len(Plan(WORLDS["four"].at(p), p, "job").graph.tasks) for p in (0, 1, 3)]
    [4, 3, 7]
    """

    def __init__(self, graph: Graph, parallelism: int, recovery: RecoveryName) -> None:
        self.graph, self.parallelism = graph, parallelism
        self.recovery: RecoveryName = recovery
        self.divide(graph.divided(recovery))

    def divide(self, division: Division) -> None:
        """What goes back together, and what goes back with it (R1-R4)."""
        self.division = division
        self.region_of = [division.region_of[t] for t in self.graph.tasks]

    @property
    def everything(self) -> tuple[int, ...]:
        """All regions."""
        return tuple(range(len(self.division.regions)))

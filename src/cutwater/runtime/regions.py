"""What of a physical plan can be restarted by itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import cast

from cutwater.config import RecoveryName
from cutwater.connectors.base import Sink
from cutwater.dataflow.graph import PhysicalPlan
from cutwater.protocol.regions import Region, Subtask, regions_of

__all__ = ["recovery_regions", "subtasks_of"]


def subtasks_of(plan: PhysicalPlan) -> frozenset[Subtask]:
    """All subtasks of a plan."""
    return frozenset((v.index, i) for v in plan.vertices for i in range(v.parallelism))


def recovery_regions(plan: PhysicalPlan, recovery: RecoveryName) -> tuple[Region, ...]:
    """The parts that go back by themselves after a failure (R1, R2)."""
    everything = subtasks_of(plan)
    return (everything,) if recovery == "job" else regions_of(everything, _together(plan))


def _together(plan: PhysicalPlan) -> Iterator[tuple[Subtask, Subtask]]:
    """Both ends of each channel, and the subtasks of a sink that cannot go back for some of them only."""
    for edge in plan.edges:
        for channel in plan.channels(edge):
            yield (edge.source, channel.source), (edge.target, channel.target)
    for vertex in plan.vertices:
        if not all(_settles_subtasks(plan, step) for step in vertex.steps):
            yield from pairwise((vertex.index, i) for i in range(vertex.parallelism))


def _settles_subtasks(plan: PhysicalPlan, step_id: str) -> bool:
    step = plan.steps[step_id]
    if step.role != "sink":
        return True
    source = step.inputs[0]
    schema = plan.steps[source.step].outputs[source.output].schema
    return hasattr(cast(Sink, step.spec).committer(schema, "", step_id), "settle_subtasks")

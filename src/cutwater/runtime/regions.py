"""What of a physical plan can be restarted by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import cast

from cutwater.config import RecoveryName
from cutwater.connectors.base import Sink
from cutwater.dataflow.graph import PhysicalPlan
from cutwater.protocol.regions import Region, Subtask, regions_of

__all__ = ["recovery_regions", "subtasks_of", "widened"]


def subtasks_of(plan: PhysicalPlan) -> frozenset[Subtask]:
    """All subtasks of a plan."""
    return frozenset((v.index, i) for v in plan.vertices for i in range(v.parallelism))


def recovery_regions(plan: PhysicalPlan, recovery: RecoveryName) -> tuple[Region, ...]:
    """The parts that go back by themselves after a failure: connected ones (R2), or what lives in one worker (R4)."""
    everything = subtasks_of(plan)
    if recovery == "job":
        return (everything,)
    ties = _connected(plan) if recovery == "region" else _same_worker(everything)
    return regions_of(everything, chain(ties, _settled_together(plan)))


def widened(plan: PhysicalPlan, recovery: RecoveryName) -> str:
    """Why the failure of one worker takes others along, although that is not asked for (R4); empty: it does not."""
    if recovery != "task" or plan.parallelism == 1 or len(recovery_regions(plan, recovery)) == plan.parallelism:
        return ""
    tied = [step for v in plan.vertices if v.parallelism > 1 for step in v.steps if not _settles_subtasks(plan, step)]
    return (
        f"recovery is 'task', but all workers that write {tied[0]!r} go back together: its sink cannot go back for some"
    )


def _connected(plan: PhysicalPlan) -> Iterator[tuple[Subtask, Subtask]]:
    """Both ends of each channel."""
    for edge in plan.edges:
        for channel in plan.channels(edge):
            yield (edge.source, channel.source), (edge.target, channel.target)


def _same_worker(subtasks: Iterable[Subtask]) -> Iterator[tuple[Subtask, Subtask]]:
    first: dict[int, Subtask] = {}
    for vertex, slot in sorted(subtasks):
        yield first.setdefault(slot, (vertex, slot)), (vertex, slot)


def _settled_together(plan: PhysicalPlan) -> Iterator[tuple[Subtask, Subtask]]:
    """The subtasks of a sink that cannot go back for some of them only."""
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

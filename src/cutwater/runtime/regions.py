"""What of a physical plan can be restarted by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import cast

from cutwater.config import RecoveryName
from cutwater.connectors.base import Sink
from cutwater.dataflow.graph import PhysicalPlan
from cutwater.protocol.regions import Division, Place, Subtask, lost_together, regions_of, units_of

__all__ = ["partners", "recovery_division", "subtasks_of", "widened"]


def subtasks_of(plan: PhysicalPlan) -> frozenset[Subtask]:
    """All subtasks of a plan."""
    return frozenset((v.index, i) for v in plan.vertices for i in range(v.parallelism))


def recovery_division(plan: PhysicalPlan, recovery: RecoveryName) -> Division:
    """The parts that go back by themselves after a failure: connected ones (R2), what lives in one worker (R4).

    With ``"upstream"`` (R3) they are what goes back at the loss of the same workers: most often all that stands before
    the last exchange of rows, and of what stands behind it, what lives in one worker.
    """
    everything = subtasks_of(plan)
    if recovery == "job":
        return Division((everything,), (), plan.parallelism)
    settled = _settled_together(plan)
    if recovery == "upstream":
        both_ways = chain.from_iterable(((one, other), (other, one)) for one, other in settled)
        return Division(*lost_together(*units_of(everything, chain(_connected(plan), both_ways))), plan.parallelism)
    ties = _connected(plan) if recovery == "region" else _same_worker(everything)
    return Division(regions_of(everything, chain(ties, settled)), (), plan.parallelism)


def partners(division: Division, recovery: RecoveryName, place: Place) -> frozenset[Place]:
    """Whom a worker's part of a region has connections with.

    They are those that rows pass to or from, and those that may be the only ones to know of its choices, or whose
    choices only it may know of.
    """
    _, region = place
    if recovery == "task":
        return division.parts - {place}
    needs = [division.with_upstream({other}) for other in range(len(division.regions))]
    return frozenset((s, r) for s, r in division.parts if r in needs[region] or region in needs[r]) - {place}


def widened(plan: PhysicalPlan, recovery: RecoveryName) -> str:
    """Why the failure of one worker takes others along, although that is not asked for; empty: it does not."""
    if recovery not in ("upstream", "task"):
        return ""
    tied = [step for v in plan.vertices if v.parallelism > 1 for step in v.steps if not _settles_subtasks(plan, step)]
    if not tied:
        return ""
    return (
        f"recovery is {recovery!r}, but all workers that write {tied[0]!r} go back together: its sink cannot go back "
        "for some"
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

"""Recovery of a part of a job (R3, R4): parts that go back by themselves, steps that make every row again as it was."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import cast

from cutwater.config import JobConfig, RecoveryName
from cutwater.connectors.base import Sink, Source, SourceHooks, settles_subtasks
from cutwater.errors import BuildError
from cutwater.plan.graph import PhysicalPlan
from cutwater.protocol.job.hosts import Topology
from cutwater.protocol.job.recovery_scope import Division, Subtask, divide


def check_recovery(plan: PhysicalPlan, config: JobConfig) -> None:
    """Check that every step can do again, row for row, what it did, where ``recovery`` relies on it.

    Raises:
        BuildError: one cannot; names it.
    """
    for step in plan.steps.values() if config.records_order else ():
        if step.operator is not None and not step.operator.repeatable:
            raise BuildError(
                f"a step of kind {step.kind!r} may send its rows in another order after a restore, and recovery is "
                f"{config.recovery!r}: what it sent could not be made again row for row",
                step=step.id,
                hint="Choose recovery='region' or 'job'.",
            )
        if step.role == "source" and not SourceHooks(cast(Source, step.spec)).repeatable:
            raise BuildError(
                f"its source may give other rows after a restore, and recovery is {config.recovery!r}: what it sent "
                "could not be made again row for row",
                step=step.id,
                hint="Choose recovery='region' or 'job'.",
            )


def pin_tables(plan: PhysicalPlan, config: JobConfig) -> PhysicalPlan:
    """The plan with tables in files as they are now, where ``recovery`` relies on every worker reading the same.

    Raises:
        BuildError: files cannot be read; names the step.
    """
    steps = dict(plan.steps)
    for step in plan.steps.values() if config.records_order else ():
        if step.operator is not None:
            try:
                steps[step.id] = replace(step, spec=step.operator.pinned())
            except BuildError as e:
                raise BuildError(e.message, step=step.id, hint=e.hint) from e
    return replace(plan, steps=steps)


def subtasks_of(plan: PhysicalPlan) -> frozenset[Subtask]:
    """All subtasks of a plan."""
    return frozenset((v.index, i) for v in plan.vertices for i in range(v.parallelism))


def topology_of(plan: PhysicalPlan, division: Division) -> Topology:
    """A plan as the machines of a job know it, with what goes back together."""
    sources = frozenset((v.index, i) for v in plan.vertices if not plan.inputs(v.index) for i in range(v.parallelism))
    loops = {
        loop: frozenset((v, i) for v in vertices for i in range(plan.vertices[v].parallelism))
        for loop, vertices in enumerate(plan.loops)
    }
    return Topology(plan.parallelism, subtasks_of(plan), sources, loops, division.regions, division.upstream)


def recovery_division(plan: PhysicalPlan, recovery: RecoveryName) -> Division:
    """Parts of a plan that go back by themselves (``divide``), and those that its sinks tie together."""
    return divide(recovery, subtasks_of(plan), _connected(plan), plan.parallelism, tied=_settled_together(plan))


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
    return settles_subtasks(cast(Sink, step.spec).committer(schema, "any", step_id))

"""A plan with its sinks replaced: by such as guard what they stage, by shadows.

What a sink would have been given lies in its shadow, exactly once, in a folder of the job.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pyarrow as pa

from cutwater.connectors.base import Sink, SinkHooks, Source, SourceHooks
from cutwater.connectors.staging import Guard
from cutwater.errors import BuildError
from cutwater.plan.graph import LogicalGraph, PhysicalPlan, Step
from cutwater.storage.store.opening import joined

if TYPE_CHECKING:
    from cutwater.connectors.files.sink import CollectSink


def _sink_schema(graph: LogicalGraph | PhysicalPlan, step: Step) -> pa.Schema:
    """Of the rows that a write step is given."""
    source = step.inputs[0]
    return graph.steps[source.step].outputs[source.output].schema


def shadow_of(graph: LogicalGraph | PhysicalPlan, step: Step, sink: CollectSink) -> Step:
    """A write step with another sink, whose files end at every checkpoint.

    Raises:
        BuildError: the rows cannot be kept; names the step.
    """
    try:
        sink.check(_sink_schema(graph, step))
    except BuildError as e:
        raise BuildError(f"its rows cannot be kept for a comparison: {e.message}", step=step.id) from e
    return replace(step, kind="collect", spec=replace(sink, roll_interval_ms=0))


def shadowed_plan(plan: PhysicalPlan, folder: str) -> PhysicalPlan:
    """The plan with shadows for sinks; each writes into a folder below ``folder``.

    Raises:
        BuildError: as ``shadow_of``.
    """
    from cutwater.connectors.files.sink import CollectSink  # with all of Parquet, which few workers need

    steps = dict(plan.steps)
    for step in plan.steps.values():
        if step.role == "sink":
            shadow = shadow_of(plan, step, CollectSink(joined(folder, step.id)))
            steps[step.id] = replace(shadow, kind=step.kind)  # what checkpoints say of it
    return replace(plan, steps=steps)


def guarded_plan(plan: PhysicalPlan, guard: Guard) -> PhysicalPlan:
    """The plan with sinks and sources that guard what they stage; with a key it cannot be shipped any more."""
    steps = dict(plan.steps)
    for step in plan.steps.values():
        if step.role == "sink":
            steps[step.id] = replace(step, spec=SinkHooks(cast(Sink, step.spec)).guarded(guard))
        elif step.role == "source":
            steps[step.id] = replace(step, spec=SourceHooks(cast(Source, step.spec)).guarded(guard))
    return replace(plan, steps=steps)

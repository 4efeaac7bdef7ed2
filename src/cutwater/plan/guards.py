"""A plan whose sinks guard what they stage."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from cutwater.connectors.base import Sink, SinkHooks
from cutwater.connectors.staging.area import Guard
from cutwater.plan.graph import PhysicalPlan


def guarded_plan(plan: PhysicalPlan, guard: Guard) -> PhysicalPlan:
    """The plan with sinks that guard what they stage; with a key it cannot be shipped any more."""
    steps = dict(plan.steps)
    for step in plan.steps.values():
        if step.role == "sink":
            steps[step.id] = replace(step, spec=SinkHooks(cast(Sink, step.spec)).guarded(guard))
    return replace(plan, steps=steps)

"""What a manifest says of every step: enough for a later program to see whether it can go on from there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from cutwater.config import format_us
from cutwater.operators.evolution import Evolving
from cutwater.plan.graph import PhysicalPlan, Step
from cutwater.storage.snapshot.manifest import EdgeRecord, StepRecord

if TYPE_CHECKING:
    from cutwater.operators.base import OperatorSpec


def step_records(plan: PhysicalPlan) -> list[StepRecord]:
    """What the manifest says of every step, for the upgrade check of a later program."""
    vertices = {id: v for v in plan.vertices for id in v.steps}
    return [_record(step, vertices[step.id].parallelism, vertices[step.id].index) for step in plan.steps.values()]


def edge_records(plan: PhysicalPlan) -> list[EdgeRecord]:
    """What the manifest says of every edge: a later program may give it another number, or other columns."""
    return [EdgeRecord(e.name, [(f.name, str(f.type)) for f in e.schema]) for e in plan.edges]


def _record(step: Step, parallelism: int, vertex: int) -> StepRecord:
    state = cast("OperatorSpec", step.spec).state_schema if step.role == "operator" else None
    evolving = step.spec if state is not None and isinstance(step.spec, Evolving) else None
    return StepRecord(
        id=step.id,
        kind=step.kind,
        parallelism=parallelism,
        keys=list(step.inputs[0].keys) if step.inputs else [],
        outputs=[[(f.name, str(f.type)) for f in o.schema] for o in step.outputs],
        state=None if state is None else [(f.name, str(f.type)) for f in state],
        settings={} if state is None else describe_state(step),
        types=b"" if state is None else state.serialize().to_pybytes(),
        parts=list(evolving.state_parts.items()) if evolving is not None else [],
        vertex=vertex,
    )


def describe_state(step: Step) -> dict[str, str]:
    """What the meaning of a step's state depends on besides its schema, as text by name.

    A changed lateness is none of it: it only says when state goes.
    """
    spec: Any = step.spec
    found: dict[str, str] = {}
    if hasattr(spec, "aggregates"):
        found["aggregates"] = ", ".join(f"{a.name}={a}" for a in spec.aggregates)
    if hasattr(spec, "window"):
        found["windows"] = str(spec.window)
        found["event time"] = spec.event_time or "none"
        if spec.early is not None:
            found["early results"] = str(spec.early)
        if spec.discarding:
            found["results"] = "discarding"
    if hasattr(spec, "time_mode"):
        found["time mode"] = spec.time_mode.value
    right = getattr(spec, "right", None)
    if right is not None:
        found["right keys"] = ", ".join(right.keys) or ("broadcast" if right.broadcast else "none")
    if hasattr(spec, "lower_us"):
        found["within"] = f"{format_us(spec.lower_us)} to {format_us(spec.upper_us)}"
        found["event time"] = f"{spec.left_time}, {spec.right_time}"
        found["right keys"] = ", ".join(spec.right_keys)
    found.update(getattr(spec, "meaning", {}))
    return found

"""Records of steps and edges in a manifest: enough for a later program to see whether it can go on from there."""

from __future__ import annotations

import msgspec

from cutwater.plan.graph import PhysicalPlan, Step
from cutwater.storage.snapshot.manifest import EdgeRecord, StepRecord


def step_records(plan: PhysicalPlan) -> list[StepRecord]:
    """Records of all steps, for the upgrade check of a later program."""
    vertices = {id: v for v in plan.vertices for id in v.steps}
    return [_record(step, vertices[step.id].parallelism, vertices[step.id].index) for step in plan.steps.values()]


def edge_records(plan: PhysicalPlan) -> list[EdgeRecord]:
    """Records of all edges: a later program may give an edge another number, or other columns."""
    return [EdgeRecord(e.name, [(f.name, str(f.type)) for f in e.schema]) for e in plan.edges]


def _record(step: Step, parallelism: int, vertex: int) -> StepRecord:
    spec = step.operator
    record = StepRecord(
        id=step.id,
        kind=step.kind,
        parallelism=parallelism,
        keys=list(step.inputs[0].keys) if step.inputs else [],
        outputs=[[(f.name, str(f.type)) for f in o.schema] for o in step.outputs],
        vertex=vertex,
    )
    if spec is None:
        return record
    record = msgspec.structs.replace(record, tables=list(spec.state_tables))
    state = spec.state_schema
    if state is None:
        return record
    return msgspec.structs.replace(
        record,
        state=[(f.name, str(f.type)) for f in state],
        settings=spec.settings,
        types=state.serialize().to_pybytes(),
        parts=list(spec.state_parts.items()),
    )

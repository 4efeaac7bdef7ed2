"""Whether a program can go on from a checkpoint that another version of it wrote."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pyarrow as pa

from cutwater.config import format_us
from cutwater.dataflow.graph import PhysicalPlan, Step
from cutwater.errors import BuildError
from cutwater.storage.channel_log import CHANNEL_KIND
from cutwater.storage.manifest import Manifest, StepRecord

if TYPE_CHECKING:
    from cutwater.operators.base import OperatorSpec

__all__ = ["check_compatible", "describe_state", "incompatibilities", "step_records"]

Columns = list[tuple[str, str]]


def check_compatible(plan: PhysicalPlan, manifest: Manifest) -> None:
    """Check that every part of the checkpoint has a step in the plan that can take it.

    Steps are matched by id.  Stateless steps may come, go and change; a new step with state begins empty.

    Raises:
        BuildError: lists every reason.
    """
    reasons = list(incompatibilities(plan, manifest))
    if reasons:
        listed = "".join(f"\n  - {r}" for r in reasons)
        raise BuildError(
            f"dataflow {plan.name!r} cannot go on from checkpoint {manifest.checkpoint_id}:{listed}\n",
            hint="Give the steps their old ids and settings back, or start under a new name.",
        )


def incompatibilities(plan: PhysicalPlan, manifest: Manifest) -> Iterator[str]:
    """Every reason why the plan cannot take the checkpoint, in the order of the manifest."""
    if plan.max_parallelism != manifest.max_parallelism:
        yield (
            f"max_parallelism was {manifest.max_parallelism} and is {plan.max_parallelism}: "
            "it fixes the key groups for the life of the job"
        )
    current = {r.id: r for r in step_records(plan)}
    for old in manifest.steps:
        holds = _holds(old, manifest)
        if not holds:
            continue
        new = current.get(old.id)
        if new is None:
            yield f"step {old.id!r} ({old.kind}) is gone, its {holds} would be lost"
        elif new.kind != old.kind:
            yield f"step {old.id!r} was of kind {old.kind} and is of kind {new.kind}, its {holds} would be lost"
        else:
            spec: Any = plan.steps[old.id].spec
            if old.types and hasattr(spec, "refusals"):
                reasons = spec.refusals(pa.ipc.read_schema(pa.py_buffer(old.types)))
                yield from (f"step {old.id!r}, {reason}" for reason in reasons)
                old = msgspec.structs.replace(old, state=new.state)
            yield from _changes(old, new)
    yield from _lost_rows(plan, manifest)


def _lost_rows(plan: PhysicalPlan, manifest: Manifest) -> Iterator[str]:
    """Edges that rows were on at the cut, and that the program has no more.

    That an edge closes a loop now, or no longer does, is no hindrance: rows that were on it come first on any edge.
    """
    there = {edge.name for edge in plan.edges}
    rows: dict[str, int] = {}
    for entry in manifest.entries:
        if entry.kind == CHANNEL_KIND and entry.rows and entry.name not in there:
            rows[entry.name] = rows.get(entry.name, 0) + entry.rows
    for name, count in rows.items():
        yield f"edge {name} is gone, {count} {'row' if count == 1 else 'rows'} on the way there would be lost"


def _holds(step: StepRecord, manifest: Manifest) -> str:
    """What the checkpoint holds of a step, in a word; nothing for a step that can be left out."""
    if step.state is not None:
        return "state"
    if any(step.id in s.splits for s in manifest.subtasks):
        return "read positions"
    if any(step.id in s.handles or step.id in s.sinks for s in manifest.subtasks):
        return "uncommitted rows"
    return "state" if any(e.step == step.id and e.kind != CHANNEL_KIND for e in manifest.entries) else ""


def _changes(old: StepRecord, new: StepRecord) -> Iterator[str]:
    if old.keys != new.keys:
        yield f"step {old.id!r} was keyed by ({', '.join(old.keys)}) and is keyed by ({', '.join(new.keys)})"
    if old.state is not None and old.state != new.state:
        yield f"state of step {old.id!r} changed: {'; '.join(_differences(old.state, new.state or []))}"
    for name in sorted(old.settings.keys() | new.settings.keys()):
        before, after = old.settings.get(name, "none"), new.settings.get(name, "none")
        if before != after:
            yield f"{name} of step {old.id!r}: was {before}, is {after}"


def _differences(old: Columns, new: Columns) -> Iterator[str]:
    before, after = dict(old), dict(new)
    for name, kind in before.items():
        if name not in after:
            yield f"column {name!r} is gone"
        elif after[name] != kind:
            yield f"column {name!r} was {kind} and is {after[name]}"
    yield from (f"column {name!r} is new" for name in after if name not in before)
    if before == after:
        yield "the order of the columns"


# ------------------------------------------------------------------------------------------ records of the manifest


def step_records(plan: PhysicalPlan) -> list[StepRecord]:
    """What the manifest says of every step, for the upgrade check of a later program."""
    parallelism = {id: v.parallelism for v in plan.vertices for id in v.steps}
    return [_record(step, parallelism[step.id]) for step in plan.steps.values()]


def _record(step: Step, parallelism: int) -> StepRecord:
    state = cast("OperatorSpec", step.spec).state_schema if step.role == "operator" else None
    return StepRecord(
        id=step.id,
        kind=step.kind,
        parallelism=parallelism,
        keys=list(step.inputs[0].keys) if step.inputs else [],
        outputs=[[(f.name, str(f.type)) for f in o.schema] for o in step.outputs],
        state=None if state is None else [(f.name, str(f.type)) for f in state],
        settings={} if state is None else describe_state(step),
        types=b"" if state is None else state.serialize().to_pybytes(),
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

"""Whether a program can go on from a checkpoint that another version of it wrote."""

from __future__ import annotations

from collections.abc import Iterator

from cutwater.dataflow.graph import PhysicalPlan
from cutwater.dataflow.plan import step_records
from cutwater.errors import BuildError
from cutwater.storage.manifest import Manifest, StepRecord

__all__ = ["check_compatible", "incompatibilities"]

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
            yield f"step {old.id!r} was a {old.kind} step and is a {new.kind} step, its {holds} would be lost"
        else:
            yield from _changes(old, new)


def _holds(step: StepRecord, manifest: Manifest) -> str:
    """What the checkpoint holds of a step, in a word; nothing for a step that can be left out."""
    if step.state is not None:
        return "state"
    if any(step.id in s.splits for s in manifest.subtasks):
        return "read positions"
    if any(step.id in s.handles or step.id in s.sinks for s in manifest.subtasks):
        return "uncommitted rows"
    return "state" if any(e.step == step.id for e in manifest.entries) else ""


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

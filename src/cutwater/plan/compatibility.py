"""Fate of every step if a program began from a checkpoint that another version of it wrote.

A manifest has a record of each step and edge, enough for a later program to see whether it can go on from there.  Steps
are matched by id.  Stateless steps may come, go and change; a new step with state begins empty; what a checkpoint holds
of a step that is gone is lost only where the user says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
import pyarrow as pa

from cutwater.errors import BuildError
from cutwater.operators.evolution import Change, Evolution, Former
from cutwater.plan.graph import PhysicalPlan, Step
from cutwater.plan.upgrade import Upgrade, in_new_ids, without_steps
from cutwater.storage.snapshot.channel_log import CHANNEL_KIND
from cutwater.storage.snapshot.manifest import EdgeRecord, Manifest, StepRecord


@dataclass(frozen=True)
class Bound:
    """A manifest as this program reads it, and what becomes of it.

    Attributes:
        manifest: with the new ids, without what is dropped.
        report: for people.
        evolutions: by step, where state is taken in another form.
    """

    manifest: Manifest
    report: RestoreReport
    evolutions: dict[str, Evolution]


def compare(plan: PhysicalPlan, manifest: Manifest, upgrade: Upgrade, *, foreign: bool = False) -> Bound:
    """Match the steps of a program with those of a checkpoint.

    Args:
        plan: of the program.
        manifest: of the checkpoint.
        upgrade: what the user says of the changes.
        foreign: the checkpoint is another job's, whose uncommitted rows stay its own (T3).

    Raises:
        ConfigError: ``upgrade`` names steps that there are not.
    """
    upgrade.check(plan)
    told = in_new_ids(manifest, plan, upgrade.step_ids)
    matching = _Matching(plan, told, upgrade, foreign)
    report = matching.report()
    dropped = {s.id for s in report.steps if s.verdict == "dropped"}
    edges = {e.name for e in report.edges if e.verdict == "dropped"}
    return Bound(without_steps(told, dropped, edges), report, matching.evolutions)


def check_compatible(
    plan: PhysicalPlan, manifest: Manifest, upgrade: Upgrade | None = None, *, foreign: bool = False
) -> Bound:
    """As ``compare``, where the program can go on.

    Raises:
        BuildError: it cannot; lists every reason.
        ConfigError: as ``compare``.
    """
    bound = compare(plan, manifest, upgrade or Upgrade(), foreign=foreign)
    if not bound.report.ok:
        listed = "".join(f"\n  - {r}" for r in bound.report.all_reasons)
        advice = bound.report.advice or ["Give the steps their old ids and settings back, or start under a new name."]
        raise BuildError(
            f"dataflow {plan.name!r} cannot go on from checkpoint {manifest.checkpoint_id}:{listed}\n",
            hint=" ".join(advice),
        )
    return bound


class _Matching:
    """Compares one step after the other."""

    def __init__(self, plan: PhysicalPlan, manifest: Manifest, upgrade: Upgrade, foreign: bool) -> None:
        self._plan, self._manifest, self._upgrade, self._foreign = plan, manifest, upgrade, foreign
        self._old = {r.id: r for r in manifest.steps}
        self._new = {r.id: r for r in step_records(plan)}
        self._was = {new: old for old, new in upgrade.step_ids.items()}
        self.evolutions: dict[str, Evolution] = {}

    def report(self) -> RestoreReport:
        steps = [self._of_program(r) for r in self._new.values()]
        steps += [self._not_in_program(r) for r in self._old.values() if r.id not in self._new]
        plan, manifest = self._plan, self._manifest
        reasons: list[str] = []
        if plan.max_parallelism != manifest.max_parallelism:
            reasons.append(
                f"max_parallelism was {manifest.max_parallelism} and is {plan.max_parallelism}: "
                "it fixes the key groups for the life of the job"
            )
        return RestoreReport(steps=steps, edges=list(self._edges()), reasons=reasons)

    # -- steps

    def _of_program(self, new: StepRecord) -> StepReport:
        old = self._old.get(new.id)
        if old is None:
            return StepReport(id=new.id, kind=new.kind, verdict="new", parallelism=new.parallelism)
        holds = self._holds(old)
        changes: list[Change] = []
        reasons: list[str] = []
        if holds and new.kind != old.kind:
            reasons.append(
                f"step {old.id!r} was of kind {old.kind} and is of kind {new.kind}, its {holds} would be lost"
            )
        elif holds:
            evolution = self._evolution(old, new)
            changes += evolution.changes
            reasons += evolution.refusals
            if evolution.convert is not None and not evolution.refusals:
                self.evolutions[new.id] = evolution
        elif new.kind != old.kind:
            changes.append(Change("changed", "kind", f"from {old.kind} to {new.kind}"))
        if self._renamed_sink(new.id, old) and not self._foreign:
            reasons.append(f"step {self._was[new.id]!r} has uncommitted rows, which are named by its id")
        rows, size = self._amount(new.id)
        return StepReport(
            id=new.id,
            kind=new.kind,
            verdict="refused" if reasons else "changed" if changes else "bound",
            holds=holds,
            rows=rows,
            bytes=size,
            was_id=self._was.get(new.id, ""),
            parallelism=new.parallelism,
            was_parallelism=old.parallelism,
            changes=changes,
            reasons=reasons,
        )

    def _renamed_sink(self, id: str, old: StepRecord) -> bool:
        """True for a write step that has another id now, and something that is named by the old one."""
        return id in self._was and self._was[id] != id and self._holds(old) == "uncommitted rows"

    def _not_in_program(self, old: StepRecord) -> StepReport:
        holds = self._holds(old)
        rows, size = self._amount(old.id)
        verdict: Verdict = "gone" if not holds else "dropped" if self._upgrade.allow_dropped_state else "orphaned"
        reasons: list[str] = []
        advice = likely = ""
        if verdict == "orphaned":
            reasons.append(f"step {old.id!r} ({old.kind}) is gone, its {holds} would be lost")
            advice = (
                f"Give {old.id!r} back, or let what is kept of it go: allow_dropped_state=True (--allow-dropped-state)."
            )
            if likely := self._likely(old):
                told = f"step_ids={{{old.id!r}: {likely!r}}} (--map {old.id}={likely})"
                advice = f"Was {old.id!r} renamed to {likely!r}? Then say {told}."
        return StepReport(
            id=old.id,
            kind=old.kind,
            verdict=verdict,
            holds=holds,
            rows=rows,
            bytes=size,
            was_parallelism=old.parallelism,
            reasons=reasons,
            likely=likely,
            advice=advice,
        )

    def _likely(self, old: StepRecord) -> str:
        """Likely name of this step now: the one new step that is as it was, or else could take its state."""
        near = [
            new
            for new in self._new.values()
            if new.id not in self._old and (new.kind, new.keys) == (old.kind, old.keys)
        ]
        if old.state is None:
            found = [new for new in near if new.outputs == old.outputs]
        else:
            found = [new for new in near if (new.state, new.settings) == (old.state, old.settings)]
            found = found or [new for new in near if self._could_take(old, new)]
        return found[0].id if len(found) == 1 else ""

    def _could_take(self, old: StepRecord, new: StepRecord) -> bool:
        """True if something of the state would go on there, and nothing refuses it."""
        evolution = self._evolution(old, new)
        dropped = sum(change.what == "dropped" for change in evolution.changes)
        return not evolution.refusals and dropped < len(old.parts)

    def _evolution(self, old: StepRecord, new: StepRecord) -> Evolution:
        """Fate of the state; refusals are whole sentences."""
        spec = self._plan.steps[new.id].operator
        same = {"aggregates"} if old.parts else set[str]()
        evolution = Evolution()
        found = None
        if spec is not None and old.types and _tells(old, new):
            former = Former(pa.ipc.read_schema(pa.py_buffer(old.types)), dict(old.parts), self._rows_by_name(old.id))
            found = spec.evolve(former, self._upgrade.renames(new.id), drop=self._upgrade.allow_dropped_state)
        if found is not None:
            told = tuple(f"step {old.id!r}, {reason}" for reason in found.refusals)
            evolution = Evolution(found.changes, told, found.dropped, found.convert)
            old = msgspec.structs.replace(old, state=new.state)
        more = tuple(_other_changes(old, new, same))
        return Evolution(evolution.changes, (*evolution.refusals, *more), evolution.dropped, evolution.convert)

    # -- what the checkpoint holds

    def _rows_by_name(self, step: str) -> dict[str, int]:
        rows: dict[str, int] = {}
        for entry in self._manifest.entries:
            if entry.step == step and entry.kind in ("base", "delta"):
                rows[entry.name] = rows.get(entry.name, 0) + entry.rows
        return rows

    def _amount(self, step: str) -> tuple[int, int]:
        """Rows and bytes of a step's state."""
        mine = [e for e in self._manifest.entries if e.step == step and e.kind != CHANNEL_KIND]
        return sum(e.rows for e in mine if e.kind != "delete"), sum(e.length for e in mine)

    def _holds(self, step: StepRecord) -> str:
        """Kind of data that the checkpoint holds of a step, in a word; empty for a step that can be left out."""
        subtasks = self._manifest.subtasks
        if step.state is not None:
            return "state"
        if any(step.id in s.splits for s in subtasks):
            return "read positions"
        waiting = any(s.handles.get(step.id) or s.sinks.get(step.id) is not None for s in subtasks)
        if waiting and not self._foreign:
            return "uncommitted rows"
        entries = self._manifest.entries
        return "state" if any(e.step == step.id and e.kind != CHANNEL_KIND for e in entries) else ""

    # -- rows on their way

    def _edges(self) -> Iterator[EdgeReport]:
        """Edges that rows were on at the cut.

        That an edge closes a loop now, or no longer does, is no hindrance: rows that were on it come first on any edge.
        """
        now = {edge.name: edge.columns for edge in edge_records(self._plan)}
        before = {edge.name: edge.columns for edge in self._manifest.edges}
        rows: dict[str, int] = {}
        for entry in self._manifest.entries:
            if entry.kind == CHANNEL_KIND and entry.rows:
                rows[entry.name] = rows.get(entry.name, 0) + entry.rows
        dropped = [
            record.id
            for record in self._old.values()
            if record.id not in self._new and self._holds(record) and self._upgrade.allow_dropped_state
        ]
        for name, count in rows.items():
            what = f"{count:,} {'row' if count == 1 else 'rows'} on the way there"
            if name not in now and any(name.startswith(f"{step}.") or f">{step}." in name for step in dropped):
                yield EdgeReport(name=name, rows=count, verdict="dropped")
            elif name not in now:
                reason = f"edge {name} is gone, {what} would be lost"
                yield EdgeReport(name=name, rows=count, verdict="refused", reason=reason)
            elif missing := [column for column in now[name] if before.get(name) and column not in before[name]]:
                column, kind = missing[0]
                reason = f"edge {name} has the column {column!r} ({kind}) now, {what} have it not"
                yield EdgeReport(name=name, rows=count, verdict="refused", reason=reason)
            else:
                yield EdgeReport(name=name, rows=count, verdict="bound")


def _tells(old: StepRecord, new: StepRecord) -> bool:
    """True if enough is known of the old state; older releases told less of some, which must be as it was then."""
    return bool(old.parts) or ("time mode" in old.settings and old.state != new.state)


def _other_changes(old: StepRecord, new: StepRecord, same: set[str]) -> Iterator[str]:
    if old.keys != new.keys:
        yield f"step {old.id!r} was keyed by ({', '.join(old.keys)}) and is keyed by ({', '.join(new.keys)})"
    if old.state is not None and old.state != new.state:
        yield f"state of step {old.id!r} changed: {'; '.join(_differences(old.state, new.state or []))}"
    for name in sorted((old.settings.keys() | new.settings.keys()) - same):
        before, after = old.settings.get(name, "none"), new.settings.get(name, "none")
        if before != after:
            yield f"{name} of step {old.id!r}: was {before}, is {after}"


def _differences(old: list[tuple[str, str]], new: list[tuple[str, str]]) -> Iterator[str]:
    before, after = dict(old), dict(new)
    for name, kind in before.items():
        if name not in after:
            yield f"column {name!r} is gone"
        elif after[name] != kind:
            yield f"column {name!r} was {kind} and is {after[name]}"
    yield from (f"column {name!r} is new" for name in after if name not in before)
    if before == after:
        yield "the order of the columns"


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


Verdict = Literal["bound", "changed", "new", "gone", "orphaned", "dropped", "refused"]
"""``bound``: as it was.  ``changed``: its state is taken in another form.  ``new``: begins empty.  ``gone``: not in the
program, and nothing is kept of it.  ``orphaned``: not in the program, but something is kept of it.  ``dropped``: the
same, and the user lets it go.  ``refused``: cannot be taken."""


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """Fate of one step."""

    id: str
    kind: str
    verdict: Verdict
    holds: str = ""
    """Data that the checkpoint has of it: "state", "read positions", "uncommitted rows"; empty for nothing."""
    rows: int = 0
    bytes: int = 0
    """Of state, in the checkpoint."""
    was_id: str = ""
    """Its old id, if it has another one now."""
    parallelism: int = 0
    """Subtasks now; 0 if it is not in the program."""
    was_parallelism: int = 0
    """Subtasks in the checkpoint; 0 if it is not there."""
    changes: list[Change] = []
    """Differences that are taken."""
    reasons: list[str] = []
    """Why it cannot be taken."""
    likely: str = ""
    """Of an orphaned step: what it may be called now."""
    advice: str = ""
    """Advice for the reasons."""

    @property
    def rescaled(self) -> bool:
        return bool(self.parallelism and self.was_parallelism) and self.parallelism != self.was_parallelism


class EdgeReport(msgspec.Struct, frozen=True, kw_only=True):
    """Fate of rows that were on their way at the cut."""

    name: str
    rows: int
    verdict: Literal["bound", "dropped", "refused"]
    reason: str = ""


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """The whole report, steps in the order of the program, then those that are not in it."""

    steps: list[StepReport]
    edges: list[EdgeReport]
    reasons: list[str] = []
    """Why no step at all can go on."""

    @property
    def ok(self) -> bool:
        """True if the program can go on from the checkpoint."""
        return not self.all_reasons

    @property
    def all_reasons(self) -> list[str]:
        """Every reason why not, one sentence each."""
        found = [*self.reasons, *(reason for step in self.steps for reason in step.reasons)]
        return found + [edge.reason for edge in self.edges if edge.verdict == "refused"]

    @property
    def advice(self) -> list[str]:
        """Advice for the reasons."""
        found = [s.advice for s in self.steps if s.reasons and s.advice]
        if any(edge.verdict == "refused" for edge in self.edges):
            found.append("Take a savepoint with the old program: it is aligned, and no rows are on their way in it.")
        return list(dict.fromkeys(found))

    @property
    def warnings(self) -> list[str]:
        """Warnings of state that goes."""
        told = [
            f"{step.holds.capitalize()} of step {step.id!r} ({step.kind}) dropped: {step.rows:,} rows, "
            f"{step.bytes:,} bytes."
            for step in self.steps
            if step.verdict == "dropped"
        ]
        told += [
            f"Step {step.id!r} no longer has {change.name!r}: dropped {change.detail}."
            for step in self.steps
            for change in step.changes
            if change.what == "dropped"
        ]
        told += [f"{e.rows:,} rows on their way along {e.name} dropped." for e in self.edges if e.verdict == "dropped"]
        return told

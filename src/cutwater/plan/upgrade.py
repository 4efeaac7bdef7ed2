"""Names of an older version of a program in this one, as the user tells them, and a manifest told in new ids."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import msgspec

from cutwater.data.decoding import prepare
from cutwater.errors import ConfigError
from cutwater.plan.graph import Edge, PhysicalPlan
from cutwater.storage.snapshot.channel_log import CHANNEL_KIND
from cutwater.storage.snapshot.manifest import Entry, Manifest, SubtaskRecord


class Upgrade(msgspec.Struct, frozen=True):
    """Directions for reading a snapshot of an older version.

    It may stay where it was given once the new version has a checkpoint of its own: old names that are no longer there
    are passed over.

    >>> Upgrade(state_names={"counts/n": "visits", "pages/last/url": "page"}).renames("pages")
    {('last', 'url'): 'page'}
    """

    step_ids: dict[str, str] = {}
    """New ids by old ones."""
    state_names: dict[str, str] = {}
    """New names of aggregates, states and their columns, by ``"step/name"`` or ``"step/state/column"`` (the step's new
    id)."""
    allow_dropped_state: bool = False
    """State of steps that the program no longer has may go."""

    def check(self, plan: PhysicalPlan) -> None:
        """Refuse what cannot be meant.

        Raises:
            ConfigError: an unknown new id, two steps that become one, or a path that is none.
        """
        for old, new in self.step_ids.items():
            if new not in plan.steps:
                known = ", ".join(plan.steps)
                raise ConfigError(f"step_ids: {old!r} is to be {new!r}, which is no step", hint=f"Steps: {known}.")
        twice = [new for new in self.step_ids.values() if list(self.step_ids.values()).count(new) > 1]
        if twice:
            raise ConfigError(f"step_ids: two steps are to be {twice[0]!r}", hint="State goes to one step.")
        for path in self.state_names:
            parts = path.split("/")
            if not 2 <= len(parts) <= 3 or not all(parts) or parts[0] not in plan.steps:
                raise ConfigError(
                    f"state_names: {path!r} is no name of a state",
                    hint='Write "step/aggregate", "step/state" or "step/state/column", with the new id of the step.',
                )

    def renames(self, step: str) -> dict[tuple[str, ...], str]:
        """New names of what a step keeps, by the path of the old one."""
        paths = ((tuple(path.split("/")), new) for path, new in self.state_names.items())
        return {path[1:]: new for path, new in paths if path[0] == step}


prepare(Upgrade)


def upgrade_of(settings: Mapping[str, Any]) -> tuple[Upgrade, dict[str, Any]]:
    """Split keyword arguments into those about an upgrade, and the others.

    Raises:
        ConfigError: a value is of the wrong kind.

    >>> upgrade_of({"step_ids": {"a": "b"}, "interval": "1s"})[1]
    {'interval': '1s'}
    """
    mine = {name: value for name, value in settings.items() if name in Upgrade.__struct_fields__}
    try:
        upgrade = msgspec.convert({name: value for name, value in mine.items() if value is not None}, Upgrade)
    except msgspec.ValidationError as e:
        raise ConfigError(
            f"what is said of the upgrade is of the wrong type: {e}", hint='Write step_ids={"old": "new"}.'
        ) from e
    return upgrade, {name: value for name, value in settings.items() if name not in mine}


def in_new_ids(manifest: Manifest, plan: PhysicalPlan, step_ids: Mapping[str, str]) -> Manifest:
    """The manifest as if the steps had always had their new ids, also in the names of edges.

    Raises:
        ConfigError: an old id is unknown, or its new one belongs to another step of the manifest already.
    """
    known = {step.id for step in manifest.steps}
    ids = {old: new for old, new in step_ids.items() if old in known}
    for old, new in step_ids.items():
        if old not in known and new not in known:
            raise ConfigError(
                f"step_ids: checkpoint {manifest.checkpoint_id} has no step {old!r}",
                hint=f"It has: {', '.join(sorted(known))}.",
            )
        if old in known and new in known and new not in ids:
            raise ConfigError(
                f"step_ids: {old!r} is to be {new!r}, but the checkpoint has a step of that id too",
                hint=f"Say what becomes of the old {new!r} as well.",
            )
    if not ids:
        return manifest
    names = _edge_names(plan, ids)

    def new_id(step: str) -> str:
        return ids.get(step, step)

    def entry(e: Entry) -> Entry:
        name = names.get(e.name, e.name) if e.kind == CHANNEL_KIND else e.name
        return msgspec.structs.replace(e, step=new_id(e.step), name=name)

    def by_id(of: Mapping[str, Any]) -> dict[str, Any]:
        return {new_id(step): value for step, value in of.items()}

    def subtask(r: SubtaskRecord) -> SubtaskRecord:
        return msgspec.structs.replace(r, splits=by_id(r.splits), handles=by_id(r.handles), sinks=by_id(r.sinks))

    return msgspec.structs.replace(
        manifest,
        steps=[msgspec.structs.replace(s, id=new_id(s.id)) for s in manifest.steps],
        entries=[entry(e) for e in manifest.entries],
        subtasks=[subtask(r) for r in manifest.subtasks],
        edges=[msgspec.structs.replace(e, name=names.get(e.name, e.name)) for e in manifest.edges],
        back_edges=[(new_id(a), new_id(b)) for a, b in manifest.back_edges],
    )


def _edge_names(plan: PhysicalPlan, ids: Mapping[str, str]) -> dict[str, str]:
    """New names of the plan's edges by old ones."""
    old = {new: old for old, new in ids.items()}

    def before(edge: Edge) -> str:
        source, target = (old.get(s, s) for s in (edge.source_step, edge.target_step))
        return f"{source}.{edge.source_output}>{target}.{edge.target_input}"

    return {before(edge): edge.name for edge in plan.edges}


def without_steps(manifest: Manifest, steps: Collection[str], edges: Collection[str]) -> Manifest:
    """The manifest without what it holds of some steps and edges."""
    if not steps and not edges:
        return manifest

    def left(of: Mapping[str, Any]) -> dict[str, Any]:
        return {step: value for step, value in of.items() if step not in steps}

    return msgspec.structs.replace(
        manifest,
        steps=[s for s in manifest.steps if s.id not in steps],
        entries=[
            e for e in manifest.entries if (e.name not in edges if e.kind == CHANNEL_KIND else e.step not in steps)
        ],
        subtasks=[
            msgspec.structs.replace(r, splits=left(r.splits), handles=left(r.handles), sinks=left(r.sinks))
            for r in manifest.subtasks
        ],
    )

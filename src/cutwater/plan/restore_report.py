"""Fate of each step and edge of a checkpoint in another program: plain values, for people and as JSON."""

from __future__ import annotations

from typing import Literal

import msgspec

from cutwater.operators.evolution import Change

Verdict = Literal["bound", "changed", "new", "gone", "orphaned", "dropped", "refused"]
"""``bound``: as it was.  ``changed``: its state is taken in another form.  ``new``: begins empty.  ``gone``: not in the
program, and nothing is kept of it.  ``orphaned``: not in the program, but something is kept of it.  ``dropped``: the
same, and the user lets it go.  ``refused``: cannot be taken."""


class StepOutlook(msgspec.Struct, frozen=True, kw_only=True):
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


class EdgeOutlook(msgspec.Struct, frozen=True, kw_only=True):
    """Fate of rows that were on their way at the cut."""

    name: str
    rows: int
    verdict: Literal["bound", "dropped", "refused"]
    reason: str = ""


class Compatibility(msgspec.Struct, frozen=True, kw_only=True):
    """The whole outlook, steps in the order of the program, then those that are not in it."""

    steps: list[StepOutlook]
    edges: list[EdgeOutlook]
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

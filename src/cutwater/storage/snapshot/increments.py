"""Incremental checkpoints on the worker's side: which files of older ones make up the state with what is new.

The *increments* of a step's state are its entries: bases, then deltas and deletions in the order they apply.  Those of
a checkpoint are those of a *completed* one with the changes since then behind them.  One that is still under way, was
declined or aborted is never built upon: what changed before it is in the next delta as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from cutwater.state.table.intervals import RESTORED
from cutwater.storage.snapshot.manifest import Entry
from cutwater.storage.store.paths import writer_of_shared
from cutwater.storage.store.seal import Seal

StepKey: TypeAlias = tuple[str, int]
"""Step and subtask."""

_KINDS = ("base", "delta", "delete")

MAX_DELTAS = 16
"""Checkpoints with deltas after which all are folded into a new base: a restore applies all of them."""


class Increments:
    """The increments of one worker in one attempt.  Belongs to the thread that writes snapshots.

    Args:
        restored: the increments of the checkpoint that the attempt began from, as far as it can be built upon.
    """

    def __init__(self, restored: Mapping[StepKey, list[Entry]] | None = None) -> None:
        self._written: dict[int, dict[StepKey, list[Entry]]] = {RESTORED: dict(restored or {})}
        self._completed = RESTORED

    def of(self, step: StepKey) -> tuple[int, list[Entry]] | None:
        """The newest completed checkpoint and the step's increments in it; ``None`` if nothing can be built upon."""
        increments = self._written.get(self._completed, {}).get(step)
        return None if increments is None else (self._completed, increments)

    def written(self, checkpoint_id: int, step: StepKey, increments: Sequence[Entry]) -> None:
        """The step's state in a checkpoint that is under way."""
        self._written.setdefault(checkpoint_id, {})[step] = list(increments)

    def completed(self, checkpoint_id: int) -> None:
        """The checkpoint counts: all later ones build on it."""
        if checkpoint_id in self._written:
            self._completed = checkpoint_id
            self._written = {n: steps for n, steps in self._written.items() if n >= checkpoint_id}

    def dropped(self, checkpoint_id: int) -> None:
        """The checkpoint will not complete."""
        if checkpoint_id != self._completed:
            self._written.pop(checkpoint_id, None)


def increments_of(entries: Iterable[Entry], seal: Seal) -> dict[StepKey, list[Entry]]:
    """The increments in a manifest that can be built upon: those of which nothing goes with its checkpoint.

    What another key sealed, or none, is written anew: so that key need not be kept for long.
    """
    found: dict[StepKey, list[Entry]] = {}
    bound: set[StepKey] = set()
    for entry in entries:
        step = (entry.step, entry.subtask)
        if entry.kind not in _KINDS:
            continue
        found.setdefault(step, []).append(entry)
        if (entry.file and writer_of_shared(entry.file) is None) or not seal.is_current(entry.digest):
            bound.add(step)
    return {step: increments for step, increments in found.items() if step not in bound}


def worth_extending(increments: Iterable[Entry]) -> bool:
    """True if one more delta is better than a new base: fewer than ``MAX_DELTAS``, and smaller together than half of
    what they change.

    A delta of many rows is cut into pieces, which lie in the same file.
    """
    sizes = {"base": 0, "delta": 0, "delete": 0}
    deltas: dict[str, set[str | int]] = {}
    for position, entry in enumerate(increments):
        sizes[entry.kind] += entry.length
        if entry.kind != "base":
            deltas.setdefault(entry.name, set()).add(entry.file or position)
    longest = max(map(len, deltas.values()), default=0)
    return longest < MAX_DELTAS and 2 * (sizes["delta"] + sizes["delete"]) <= sizes["base"]


def extended(increments: Iterable[Entry], changes: Sequence[Entry]) -> list[Entry]:
    """Increments with what changed behind them; a state whose changes hold a base starts anew with them."""
    renewed = {entry.name for entry in changes if entry.kind == "base"}
    return [*(entry for entry in increments if entry.name not in renewed), *changes]

"""Tells sources which checkpoints are retained, so that other systems need not keep what lies before them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import cast

from cutwater.connectors.base import Source, SourceCommitter, SourceHooks, SourceSnapshot
from cutwater.errors import CutwaterError
from cutwater.plan.graph import PhysicalPlan
from cutwater.runtime.failures import first_line
from cutwater.storage.snapshot.manifest import Manifest
from cutwater.storage.snapshot.packed_splits import unpack

_END_S = 10.0


class SourceCommits:
    """Calls the committers of the read steps that have one.  Belongs to the coordinator's thread.

    ``retain`` is performed in a thread of its own: another system that does not answer holds nobody up, and of several
    states that wait the newest is told.
    """

    def __init__(self, plan: PhysicalPlan, uid: str) -> None:
        self._committers: dict[str, SourceCommitter] = {}
        for step in plan.steps.values():
            if step.role == "source":
                own = SourceHooks(cast(Source, step.spec)).committer(uid, step.id)
                if own is not None:
                    self._committers[step.id] = own
        self._known: dict[int, dict[str, SourceSnapshot]] = {}
        self._told: tuple[int, ...] = ()
        self._due: Mapping[str, list[SourceSnapshot]] | None = None
        self._warnings: list[str] = []
        self._ended = self._busy = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def settle(self, retained: Iterable[Manifest], attempt: int) -> list[str]:
        """Before workers of ``attempt`` are deployed; returns warnings."""
        if not self._committers:
            return []
        with self._changed:
            self._due = None
        self._known, self._told = {}, ()
        for manifest in retained:
            self.published(manifest)
        warnings: list[str] = []
        for step, committer in self._committers.items():
            settle = partial(committer.settle, self._of(step, self._known), attempt)
            warnings += _warned(f"what older attempts left for step {step!r} stays for now", settle)
        return warnings

    def published(self, manifest: Manifest) -> None:
        """A checkpoint is in the log."""
        if self._committers:
            self._known[manifest.checkpoint_id] = {step: _snapshot(manifest, step) for step in self._committers}

    def retain(self, retained: Iterable[int]) -> list[str]:
        """These checkpoints are retained; returns warnings of what was told before."""
        kept = set(retained)
        self._known = {id: snapshots for id, snapshots in self._known.items() if id in kept}
        ids = tuple(sorted(self._known))
        with self._changed:
            if ids and ids != self._told and not self._ended:
                self._told, self._due = ids, {step: self._of(step, ids) for step in self._committers}
                if self._thread is None:
                    self._thread = threading.Thread(target=self._run, name="cutwater-retained", daemon=True)
                    self._thread.start()
                self._changed.notify_all()
            warnings, self._warnings = self._warnings, []
        return warnings

    def finish(self, attempt: int) -> list[str]:
        """The log says that the job finished; returns warnings."""
        with self._changed:
            self._due = None  # what it would say, the final checkpoint does
        warnings = self._end()
        for step, committer in self._committers.items():
            final = self._of(step, [max(self._known)])[0] if self._known else None
            warnings += _warned(f"what is kept for step {step!r} stays", partial(committer.finish, final, attempt))
        return warnings

    def close(self) -> list[str]:
        """Say what is due, then tell nobody any more; returns warnings."""
        warnings = self._end()
        for step, committer in self._committers.items():
            warnings += _warned(f"step {step!r}", committer.close)
        self._committers = {}
        return warnings

    def _end(self) -> list[str]:
        """End the thread, once it has said what is due."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._due is None and not self._busy, _END_S)
            self._due = None
            warnings, self._warnings = self._warnings, []
        return warnings

    def _of(self, step: str, ids: Collection[int]) -> list[SourceSnapshot]:
        return [self._known[id][step] for id in sorted(ids)]

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._due is not None or self._ended)
                due, self._due = self._due, None
                if due is None:
                    return
                self._busy = True
            warnings = [
                warning
                for step, snapshots in due.items()
                for warning in _warned(f"step {step!r}", partial(self._committers[step].retain, snapshots))
            ]
            with self._changed:
                self._busy = False
                self._warnings += [warning for warning in warnings if warning not in self._warnings]
                self._changed.notify_all()


def _warned(what: str, call: Callable[[], None]) -> list[str]:
    """An error is a warning: no row depends on what other systems keep too long."""
    try:
        call()
    except CutwaterError as error:
        return [f"{what}: {error}"]
    except Exception as error:
        return [f"{what}: {type(error).__name__}: {first_line(str(error))}"]
    return []


def _snapshot(manifest: Manifest, step: str) -> SourceSnapshot:
    records = [
        split
        for subtask in manifest.subtasks
        for splits in (*map(unpack, subtask.packed.get(step, ())), subtask.splits.get(step, []))
        for split in splits
    ]
    return SourceSnapshot(manifest.checkpoint_id, {split.id: split.position for split in records})

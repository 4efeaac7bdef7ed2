"""The write steps of a job as the driver sees them: what a restore, retention and the end do to their output."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import msgspec

from cutwater.connectors.base import Committer, Sink, SinkSnapshot, SubtaskCommitter
from cutwater.errors import StorageError
from cutwater.plan.graph import PhysicalPlan
from cutwater.protocol.job.regions import Region
from cutwater.storage.snapshot.manifest import Manifest


class Sinks:
    """Calls the committers of all write steps.  Belongs to the coordinator's thread.

    It knows, from the last ``settle`` on, what each retained checkpoint says of the sinks: staged rows stay as long as
    one of them needs them, so that falling back to any is exact.
    """

    def __init__(self, plan: PhysicalPlan, uid: str) -> None:
        self._plan = plan
        self._committers: dict[str, Committer] = {}
        for step in plan.steps.values():
            if step.role == "sink":
                source = step.inputs[0]
                schema = plan.steps[source.step].outputs[source.output].schema
                self._committers[step.id] = cast(Sink, step.spec).committer(schema, uid, step.id)
        self._known: dict[int, dict[str, SinkSnapshot]] = {}

    @property
    def not_taken_back(self) -> list[str]:
        """The steps whose output stays where it is when the job falls back behind it."""
        return [step for step, committer in self._committers.items() if not committer.takes_back]

    def settle(self, restored: Manifest | None, retained: Iterable[Manifest], attempt: int) -> None:
        """Commit what ``restored`` names and undo everything later (T2), before workers of ``attempt`` are deployed.

        Args:
            restored: this job's own checkpoint; ``None``: it begins with nothing committed.
            retained: all checkpoints that a later restore may choose, ``restored`` included.
        """
        self._known = {}
        for manifest in retained:
            self.published(manifest)
        for step, committer in self._committers.items():
            chosen = self._known[restored.checkpoint_id][step] if restored is not None else None
            committer.settle(chosen, [snapshots[step] for snapshots in self._known.values()], attempt)

    def settle_subtasks(self, restored: Manifest | None, attempt: int, subtasks: Region) -> None:
        """``settle`` for these subtasks only; what others have in progress is not touched (R2).

        Every committer of which they are not all the subtasks is a ``SubtaskCommitter``: see ``recovery_division``.
        """
        theirs = None
        if restored is not None:
            records = [r for r in restored.subtasks if (r.vertex, r.subtask) in subtasks]
            theirs = msgspec.structs.replace(restored, subtasks=records)
        for step, committer in self._committers.items():
            vertex = self._plan.vertex_of(step)
            members = {subtask for v, subtask in subtasks if v == vertex.index}
            chosen = _snapshot(theirs, step) if theirs is not None else None
            retained = [snapshots[step] for snapshots in self._known.values()]
            if len(members) == vertex.parallelism:
                committer.settle(chosen, retained, attempt)
            elif members:
                cast(SubtaskCommitter, committer).settle_subtasks(chosen, retained, attempt, members)

    def published(self, manifest: Manifest) -> None:
        """A checkpoint is in the log."""
        self._known[manifest.checkpoint_id] = {step: _snapshot(manifest, step) for step in self._committers}

    def collect(self, retained: Iterable[int]) -> list[str]:
        """Remove what only checkpoints needed that are not ``retained``; returns warnings."""
        kept = set(retained)
        warnings: list[str] = []
        for checkpoint_id in sorted(self._known.keys() - kept):
            retired = self._known.pop(checkpoint_id)
            for step, committer in self._committers.items():
                try:
                    committer.retire(retired[step], [self._known[i][step] for i in self._known.keys() & kept])
                except StorageError as error:  # the next restore, or the job's end, removes it
                    warnings.append(f"staged output of checkpoint {checkpoint_id} stays for now: {error}")
        return warnings

    def finish(self, attempt: int) -> list[str]:
        """The log says that the job finished: remove all staging up to ``attempt``; returns warnings."""
        warnings: list[str] = []
        for step, committer in self._committers.items():
            try:
                committer.finish(attempt)
            except StorageError as error:
                warnings.append(f"staged output of step {step!r} stays: {error}")
        return warnings


def _snapshot(manifest: Manifest, step: str) -> SinkSnapshot:
    """One write step in the records of all subtasks."""
    return SinkSnapshot(
        manifest.checkpoint_id,
        [handle for record in manifest.subtasks for handle in record.handles.get(step, [])],
        [record.sinks[step] for record in manifest.subtasks if step in record.sinks],
    )

"""Reading a snapshot in the worker: what each subtask gets back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cutwater.dataflow.graph import Channel, PhysicalPlan
from cutwater.runtime.control import Deploy
from cutwater.state.segments import Segment
from cutwater.storage.base import Store
from cutwater.storage.local import LocalStore
from cutwater.storage.manifest import ChannelRecord, Manifest, SubtaskRecord
from cutwater.storage.snapshot import load_manifest, read_segment

__all__ = ["Restore"]


@dataclass(frozen=True)
class Restore:
    """A chosen snapshot; without manifest everything starts empty.

    Keyed segments come back to every subtask whose key groups they overlap, so the parallelism may differ from the
    snapshot's; numbers of rows and watermarks of channels only hold where it does not.
    """

    store: Store
    job: str
    manifest: Manifest | None
    same_shape: bool
    foreign: bool = False
    """Of another job: what its sinks have in progress stays theirs (T3)."""

    @classmethod
    def load(cls, store: Store, job: str, deploy: Deploy, plan: PhysicalPlan) -> Restore:
        """The snapshot that the coordinator chose, verified once more.

        Raises:
            CorruptSnapshotError: it changed since.
        """
        if deploy.restore is None:
            return cls(store, job, None, True)
        foreign = deploy.restore_foreign
        if foreign is not None:
            store, job = LocalStore(foreign[0]), foreign[1]
        manifest = load_manifest(store, job, deploy.restore)
        had = {(r.vertex, r.subtask) for r in manifest.subtasks}
        has = {(v.index, i) for v in plan.vertices for i in range(v.parallelism)}
        return cls(store, job, manifest, had == has, foreign is not None)

    def record(self, vertex: int, subtask: int) -> SubtaskRecord | None:
        """What the snapshot says of one subtask (only if the job has the same shape)."""
        if self.manifest is None or not self.same_shape:
            return None
        return next((r for r in self.manifest.subtasks if (r.vertex, r.subtask) == (vertex, subtask)), None)

    def channel(self, key: Channel, sending: bool) -> ChannelRecord | None:
        """Row number and watermark of a channel's end at the cut."""
        if self.manifest is None or not self.same_shape:
            return None
        for record in self.manifest.subtasks:
            for channel in record.output_rows if sending else record.inputs:
                if (channel.edge, channel.source, channel.target) == key:
                    return channel
        return None

    def segments(self, step: str, subtask: int, parallelism: int, key_groups: range) -> Iterator[Segment]:
        """Segments of a step that concern a subtask, in the order they apply."""
        for entry in self.manifest.entries if self.manifest else ():
            if entry.step != step:
                continue
            if entry.key_groups is None:
                if entry.subtask % parallelism == subtask:
                    yield read_segment(self.store, self.job, entry)
            elif entry.key_groups[0] < key_groups.stop and key_groups.start < entry.key_groups[1]:
                yield read_segment(self.store, self.job, entry)

    def sink_states(self, step: str, subtask: int, parallelism: int) -> list[Any]:
        """States of the writers that a subtask takes over."""
        if self.foreign:
            return []
        return [
            record.sinks[step]
            for record in (self.manifest.subtasks if self.manifest else ())
            if step in record.sinks and record.subtask % parallelism == subtask and record.sinks[step] is not None
        ]

"""Operators fed by hand, whose incremental checkpoints lie on disk as those of a job do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

import cutwater as cw
from cutwater.data.time import MAX_WATERMARK
from cutwater.plan.compatibility import step_records
from cutwater.plan.planner import make_plan
from cutwater.state.keys import hash_keys, key_group_owner, key_groups
from cutwater.storage.job_log import JobLog
from cutwater.storage.snapshot.increments import Increments, extended
from cutwater.storage.snapshot.manifest import Entry, Manifest
from cutwater.storage.snapshot.publish import publish
from cutwater.storage.snapshot.segment_files import SnapshotWriter
from cutwater.storage.store.local import LocalStore
from subtask_context import Subtask

__all__ = ["GROUPS", "Running"]

GROUPS = 16


class Running:
    """The keyed steps of a flow, at work: rows go to the subtask that owns their key."""

    def __init__(self, flow: cw.Dataflow, folder: Path, parallelism: int = 2, inline_below: int = 300) -> None:
        self.plan = make_plan(flow, parallelism, GROUPS)
        self.folder, self.parallelism, self.inline_below = folder, parallelism, inline_below
        self.store = LocalStore.open(str(folder))
        self.log = JobLog(self.store, flow.name, num_retained=50)
        self.log.begin_attempt("test")
        self.operators: dict[tuple[str, int], Any] = {}
        self.increments = Increments()
        for step in self.plan.steps.values():
            for subtask in range(parallelism if step.role == "operator" else 0):
                operator = self.operators[step.id, subtask] = step.spec.build()
                operator.open(Subtask(subtask, parallelism, GROUPS, step.id, now_ms=1_000))

    def feed(self, step: str, rows: pa.RecordBatch, input: int = 0) -> None:
        (key,) = self.plan.steps[step].inputs[input].keys
        groups = key_groups(hash_keys([rows.column(key)]), GROUPS)
        for subtask in range(self.parallelism):
            mine = [key_group_owner(int(g), self.parallelism, GROUPS) == subtask for g in groups]
            self.operators[step, subtask].process(input, rows.filter(pa.array(mine)))

    def watermark(self, step: str, watermark: int = MAX_WATERMARK) -> None:
        for subtask in range(self.parallelism):
            operator = self.operators[step, subtask]
            operator.on_watermark(watermark)
            while operator.pending:
                operator.resume()

    def checkpoint(self, more: Mapping[str, Any] | None = None) -> str:
        """Take one, incrementally; returns its address."""
        checkpoint_id = self.log.state.newest_id + 1
        writer = SnapshotWriter(self.store, self.log.job, checkpoint_id, self.log.attempt, 0, self.inline_below)
        entries: list[Entry] = []
        for place, operator in self.operators.items():
            frozen = operator.freeze(checkpoint_id)
            known = self.increments.of(place)
            changes = frozen.changes(known[0]) if frozen.incremental and known else None
            if changes is None or known is None:
                chain = writer.add(*place, frozen.segments(unsorted=True), shared=True)
            else:
                chain = extended(known[1], writer.add(*place, changes, shared=True))
            frozen.release()
            self.increments.written(checkpoint_id, place, chain)
            entries += chain
        writer.close()
        name, attempt = self.log.job, self.log.attempt
        described = {"steps": step_records(self.plan), "subtasks": [], "entries": entries, **(more or {})}
        shape = {"max_parallelism": GROUPS, "parallelism": self.parallelism, "triggered_ms": 0, "completed_ms": 1}
        manifest = Manifest(name, self.log.state.uid, checkpoint_id, attempt, "aligned", **shape, **described)
        publish(self.store, self.log, manifest)
        self.increments.completed(checkpoint_id)
        return f"{self.folder}/{name}@{checkpoint_id}"

"""Incremental checkpoints against a dictionary: whatever completes is what a full snapshot of that moment would be."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from keyed_world import Subtask

from cutwater.errors import StorageError
from cutwater.operators.accumulators import Aggregate
from cutwater.operators.keyed_table import (
    FrozenTable,
    KeyedTable,
    deleted_segments,
    group_segments,
    keyed_rows,
)
from cutwater.state.changes import ChangeLog, Changes
from cutwater.state.segments import Frozen, Segment
from cutwater.storage import shared as shared_module
from cutwater.storage.chains import Chains, chains_of, extended, worth_extending
from cutwater.storage.log import JobLog
from cutwater.storage.manifest import Entry, Manifest
from cutwater.storage.memory import MemoryStore
from cutwater.storage.publish import publish
from cutwater.storage.recovery import next_checkpoint_id, verify_checkpoint
from cutwater.storage.retention import Retention
from cutwater.storage.shared import list_shared, shared_files
from cutwater.storage.snapshot import SnapshotWriter, load_manifest, read_segment

SCHEMA = pa.schema([("k", pa.int64()), ("s", pa.string()), ("v", pa.int64())])
KEYS = pa.schema(list(SCHEMA)[:2])
AGGREGATES = (Aggregate("n", "count"), Aggregate("total", "sum", "v"), Aggregate("latest", "last", "v"))
STATE = pa.schema([*KEYS, *(f for a in AGGREGATES for f in a.state_fields(SCHEMA))])
GROUPS = 16
JOB = "job"

Content = dict[tuple[int, str], tuple[int, int, int]]


class Keyed:
    """A step with a keyed table whose keys also go, as those of windows do."""

    def __init__(self, ctx: Subtask) -> None:
        self.ctx = ctx
        self.table = KeyedTable(list(KEYS.types), AGGREGATES, SCHEMA)
        self.dead: set[int] = set()
        self.table.track()

    def add(self, batch: pa.RecordBatch) -> None:
        slots = self.table.upsert(batch.columns[:2])
        assert not self.dead & set(slots.tolist()), "a key that went is asked for before the sweep"
        for accumulator in self.table.accumulators:
            accumulator.update(slots, batch)

    def remove(self, keys: list[tuple[int, str]]) -> None:
        slots = self.table.index.find(key_columns(keys))
        self.table.delete(slots)
        self.dead |= set(slots.tolist())
        self.sweep()

    def sweep(self) -> None:
        self.table.keep(np.array([s for s in range(len(self.table)) if s not in self.dead], np.int32))
        self.dead = set()

    def freeze(self, checkpoint_id: int) -> Frozen:
        table, groups = self.table.frozen(checkpoint_id), self.ctx.max_parallelism

        def of(slots: Any, kind: Any) -> Iterator[Segment]:
            return group_segments("state", STATE, slots, table.index.columns, table.rows, groups, kind)

        def changes(slots: Any, deleted: Any) -> Iterator[Segment]:
            yield from deleted_segments("state", KEYS, deleted, list, groups)
            yield from of(slots, "delta")

        return FrozenTable(table, lambda: of(np.arange(len(table), dtype=np.int32), "base"), changes)

    def restore(self, segments: Iterable[Segment]) -> None:
        for batch in keyed_rows(segments, STATE, self.ctx.key_groups):
            self.table.restore(batch.columns[:2], batch.columns[2:])
        self.table.track(restored=True)

    def content(self) -> Content:
        rows = zip(*(c.to_pylist() for c in self.table.rows(np.arange(len(self.table), dtype=np.int32))), strict=True)
        return {(k, s): tuple(state) for k, s, *state in rows}  # type: ignore[misc]


def key_columns(keys: list[tuple[int, str]]) -> list[pa.Array]:
    return [pa.array([k for k, _ in keys], pa.int64()), pa.array([s for _, s in keys], pa.string())]


@dataclass
class World:
    """One subtask, its storage, and what a dictionary says."""

    seed: int
    model: Content = field(default_factory=dict)
    expected: dict[int, Content] = field(default_factory=dict)
    kinds: set[str] = field(default_factory=set)
    rests: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.store = MemoryStore()
        self.log = JobLog(self.store, JOB, num_retained=self.random.randint(1, 3))
        self.log.begin_attempt("driver")
        self.retention = Retention(self.store, self.log)
        self.step = Keyed(Subtask())
        self.chains = Chains()
        self.pending: list[tuple[int, list[Entry]]] = []
        self.next_id = 1
        self.value = 0

    def run(self, steps: int = 40) -> World:
        for _ in range(steps):
            steps_ = [self.rows, self.rows, self.remove, self.checkpoint, self.outcome, self.outcome]
            self.random.choice(steps_ if self.random.random() < 0.95 else [self.restart])()
            self.check()
        return self

    def rows(self) -> None:
        few = self.random.random() < 0.7 and self.model
        keys = [self._key(few) for _ in range(self.random.randint(1, 5 if few else 60))]
        values = list(range(self.value, self.value + len(keys)))
        self.value += len(keys)
        self.step.add(pa.RecordBatch.from_arrays([*key_columns(keys), pa.array(values)], schema=SCHEMA))
        for key, value in zip(keys, values, strict=True):
            count, total, _ = self.model.get(key, (0, 0, 0))
            self.model[key] = (count + 1, total + value, value)

    def _key(self, few: bool) -> tuple[int, str]:
        number = self.random.randint(0, 5 if few else 80)
        return number, "ab"[number % 2] * (number % 5)

    def remove(self) -> None:
        keys = self.random.sample(sorted(self.model), min(len(self.model), self.random.randint(0, 6)))
        self.step.remove(keys)
        for key in keys:
            del self.model[key]

    def checkpoint(self) -> None:
        if len(self.pending) == 2:
            return
        checkpoint_id, self.next_id = self.next_id, self.next_id + 1
        frozen = self.step.freeze(checkpoint_id)
        self.expected[checkpoint_id] = dict(self.model)
        assert self.step.table._log is not None
        self.rests += self.step.table._log._resting > 0
        if self.random.random() < 0.5:
            self.rows()  # while it is written
        writer = SnapshotWriter(self.store, JOB, checkpoint_id, self.log.attempt, 0, 900)
        known = self.chains.of(("step", 0))
        changes = frozen.changes(known[0]) if known and worth_extending(known[1]) else None
        if changes is None:
            entries = writer.add("step", 0, frozen.segments(), shared=True)
        else:
            assert known is not None
            entries = extended(known[1], writer.add("step", 0, changes, shared=True))
        writer.close()
        frozen.release()
        self.chains.written(checkpoint_id, ("step", 0), entries)
        self.pending.append((checkpoint_id, entries))

    def outcome(self) -> None:
        if not self.pending:
            return
        checkpoint_id, entries = self.pending.pop(self.random.randrange(len(self.pending)))
        self.kinds |= {e.kind for e in entries}
        if self.random.random() < 0.3:
            self.chains.dropped(checkpoint_id)
            return
        self.pending = [p for p in self.pending if p[0] > checkpoint_id]  # subsumed
        manifest = Manifest(
            JOB, self.log.state.uid, checkpoint_id, self.log.attempt, "aligned", GROUPS, 1, 0, 0, [], [], entries
        )
        self.retention.shared.check(manifest)
        self.retention.shared.published(publish(self.store, self.log, manifest), manifest)
        assert self.retention.collect() == []
        self.chains.completed(checkpoint_id)

    def restart(self) -> None:
        """A new attempt goes on from the newest completed checkpoint, in the same shape."""
        self.log.begin_attempt("driver")
        self.retention = Retention(self.store, self.log)
        self.pending, self.step, self.chains, self.model = [], Keyed(Subtask()), Chains(), {}
        self.next_id = next_checkpoint_id(self.store, JOB, self.log.state)
        if self.log.state.completed:
            completed = self.log.state.completed[0]
            entries = load_manifest(self.store, JOB, completed).entries
            self.step.restore(read_segment(self.store, JOB, e) for e in entries)
            self.chains = Chains(chains_of(entries))
            self.model = dict(self.expected[completed.checkpoint_id])

    def check(self) -> None:
        """Every retained checkpoint is whole, and is what was there at its freeze, at any parallelism."""
        for completed in self.log.state.completed:
            report = verify_checkpoint(self.store, JOB, completed)
            assert report.ok, report.problems
            entries = load_manifest(self.store, JOB, completed).entries
            parallelism = self.random.randint(1, 3)
            content: Content = {}
            for subtask in range(parallelism):
                restored = Keyed(Subtask(subtask, parallelism))
                restored.restore(read_segment(self.store, JOB, e) for e in entries)
                content |= restored.content()
            assert content == self.expected[completed.checkpoint_id]

    def files(self) -> set[str]:
        return {file for file, _ in list_shared(self.store, JOB)}


def test_restores_are_what_full_snapshots_would_be() -> None:
    kinds: set[str] = set()
    rests = 0
    for seed in range(30):
        world = World(seed)
        kinds |= world.run().kinds
        rests += world.rests
    assert kinds == {"base", "delta", "delete"}
    assert rests >= 10, "the log did not rest, or nobody noticed"


def test_files_go_once_nobody_names_them_and_a_crash_leaves_none_for_ever() -> None:
    for seed in range(10):
        world = World(seed).run()
        world.log.begin_attempt("the next driver")  # in the midst of whatever was under way
        world.retention, world.chains, world.pending = Retention(world.store, world.log), Chains(), []
        assert world.next_id >= next_checkpoint_id(world.store, JOB, world.log.state)
        for _ in range(3):
            world.checkpoint()
            world.random.random = lambda: 0.9  # type: ignore[method-assign] # completes
            world.outcome()
        manifests = [load_manifest(world.store, JOB, c) for c in world.log.state.completed]
        named = set[str]().union(*(shared_files(m.entries) for m in manifests))
        retired = world.retention.shared._retired
        assert named <= world.files() <= named | retired


def _no_deletions(self: ChangeLog, index: object, slots: object) -> None: ...


def _since_the_freeze_before(self: Changes, checkpoint_id: int) -> Any:
    newest = Changes(None, self.intervals[-1:]) if self.intervals else self
    return SINCE(Changes(checkpoint_id, newest.intervals), checkpoint_id)


def _builds_on_anything(self: Chains, checkpoint_id: int) -> None:
    self._completed = max(self._written)
    self._written = {self._completed: self._written[self._completed]}


def _rests_in_secret(self: ChangeLog, checkpoint_id: int) -> Changes:
    resting, intervals = self._resting, list(self._intervals)
    changes = CUT(self, checkpoint_id)
    if resting or not self._resting:
        return changes
    self._start, self._intervals = checkpoint_id, intervals  # as if it had marked all along
    self._resting = 0
    self.mark = lambda slots, used=0: None  # type: ignore[method-assign]
    return changes


SINCE = Changes.since
CUT = ChangeLog.cut


@pytest.mark.parametrize(
    ("place", "name", "bug"),
    [
        (ChangeLog, "delete", _no_deletions),
        (Changes, "since", _since_the_freeze_before),
        (Chains, "completed", _builds_on_anything),
        (shared_module, "shared_files", lambda entries: frozenset(e.file for e in list(entries)[-1:] if e.file)),
        (ChangeLog, "keep", lambda self, slots: None),
        (ChangeLog, "cut", _rests_in_secret),
    ],
    ids=["deletion", "aborted", "pending", "shared file", "renumbered", "rest"],
)
def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, bug: Any) -> None:
    """A deletion is forgotten; a delta holds what changed since the aborted checkpoint only; a checkpoint builds on one
    that is still under way; a file goes that a retained checkpoint names; marks stay with the old slot numbers; nothing
    is marked, and nobody is told."""
    monkeypatch.setattr(place, name, bug)
    with pytest.raises((AssertionError, StorageError, ValueError)):
        for seed in range(30):
            World(seed).run()

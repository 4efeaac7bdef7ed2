"""Incremental checkpoints against a dictionary: whatever completes is what a full snapshot of that moment would be."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from cutwater.errors import StorageError
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.aggregate.keyed_operator import aggregate_layout
from cutwater.state.disk.rocks import RocksStore
from cutwater.state.disk.tables import SpilledRows
from cutwater.state.key_index import GroupIds
from cutwater.state.segments import Frozen, Segment
from cutwater.state.table import spill
from cutwater.state.table.changes import Changed, ChangeLog, Changes
from cutwater.state.table.intervals import History
from cutwater.state.table.keyed_segments import FrozenTable, deleted_segments, group_segments, restore_rows
from cutwater.state.table.keyed_table import KeyedTable
from cutwater.state.table.spill import Room
from cutwater.storage.reading import next_checkpoint_id
from cutwater.storage.snapshot import retention as shared_module
from cutwater.storage.snapshot.increments import Increments
from cutwater.storage.snapshot.retention import Retention, shared_files
from cutwater.storage.snapshot.segment_files import load_manifest
from incremental_world import JOB, Content, World, short
from subtask_context import Subtask

needs_rocksdb = pytest.mark.skipif(find_spec("rocksdict") is None, reason="rocksdict is not installed")

SCHEMA = pa.schema([("k", pa.int64()), ("s", pa.string()), ("v", pa.int64())])
KEYS = pa.schema(list(SCHEMA)[:2])
AGGREGATES = (Aggregate("n", "count"), Aggregate("total", "sum", "v"), Aggregate("latest", "last", "v"))
LAYOUT = aggregate_layout(AGGREGATES, SCHEMA)
STATE = pa.schema([*KEYS, *(f for a in AGGREGATES for f in a.state_fields(SCHEMA))])

Model = dict[tuple[int, str], tuple[int, int, int]]


class Keyed:
    """A step with a keyed table whose keys also go, as those of windows do, beside a dictionary."""

    rests = 0
    few = 5
    often = 0.7

    def __init__(self, subtask: int, parallelism: int) -> None:
        self.ctx = Subtask(subtask, parallelism)
        self.model: Model = {}
        self.table = KeyedTable(list(KEYS.types), LAYOUT)
        self.dead: set[int] = set()
        self.table.track()

    def change(self, dice: random.Random) -> None:
        dice.choice([self._rows, self._rows, self._remove])(dice)

    def _rows(self, dice: random.Random) -> None:
        few = dice.random() < self.often and len(self.model) > 0
        numbers = [dice.randint(0, self.few if few else 80) for _ in range(dice.randint(1, 5 if few else 60))]
        keys = [(number, "ab"[number % 2] * (number % 5)) for number in numbers]
        values = [dice.randint(-99, 99) for _ in keys]
        self._add(pa.RecordBatch.from_arrays([*key_columns(keys), pa.array(values)], schema=SCHEMA))
        for key, value in zip(keys, values, strict=True):
            count, total, _ = self.model.get(key, (0, 0, 0))
            self.model[key] = (count + 1, total + value, value)

    def _add(self, batch: pa.RecordBatch) -> None:
        gids = self.table.upsert(batch.columns[:2])
        assert not self.dead & set(gids.tolist()), "a key that went is asked for before the sweep"
        for accumulator in self.table.accumulators:
            accumulator.update(gids, batch)

    def _remove(self, dice: random.Random) -> None:
        keys = dice.sample(sorted(self.model), min(len(self.model), dice.randint(0, 6)))
        gids = self._gids(keys)
        self.table.delete(gids)
        self.dead |= set(gids.tolist())
        self.sweep()
        for key in keys:
            del self.model[key]

    def _gids(self, keys: list[tuple[int, str]]) -> GroupIds:
        return self.table.index.find(key_columns(keys))

    def sweep(self) -> None:
        self.table.keep(np.array([s for s in range(len(self.table)) if s not in self.dead], np.int32))
        self.dead = set()

    def freeze(self, checkpoint_id: int) -> Frozen:
        table, groups = self.table.frozen(checkpoint_id), self.ctx.max_parallelism
        assert self.table.log is not None
        Keyed.rests += self.table.log._resting > 0

        owned = self.ctx.key_groups

        def segments(changed: Changed | None = None, unsorted: bool = False) -> Iterator[Segment]:
            whole = owned if unsorted else None
            if changed is not None:
                yield from deleted_segments("state", KEYS, changed.deleted, list, groups)
            for part, gids, kind in table.parts(changed):
                of, rows = part.index.columns, part.rows
                yield from group_segments("state", STATE, gids, of, rows, groups, kind, len(KEYS), whole)

        return FrozenTable([table], segments)

    def expected(self, frozen: Frozen) -> Content:
        return sorted((*key, *state) for key, state in self.model.items())

    def restore(self, segments: Iterable[Segment], expected: Any = ()) -> None:
        for batch in restore_rows(self.table, segments, STATE, self.ctx.key_groups):
            self.table.restore(batch.columns[:2], batch.columns[2:])
        self.table.track(restored=True)
        self.model = {(k, s): tuple(state) for k, s, *state in expected}  # type: ignore[misc]

    def content(self) -> Content:
        columns = self.table.rows(np.arange(len(self.table), dtype=np.int32))
        return list(zip(*(c.to_pylist() for c in columns), strict=True))


class Spilled(Keyed):
    """The same with memory for some ten keys, and keys that leave it soon after they changed."""

    moved = 0
    few = 80
    often = 0.95

    def __init__(self, subtask: int, parallelism: int) -> None:
        super().__init__(subtask, parallelism)
        self.table = KeyedTable(list(KEYS.types), LAYOUT, room=Room(store(), self.ctx.max_parallelism, 600))
        self.table.track()

    def change(self, dice: random.Random) -> None:
        super().change(dice)
        Spilled.moved += self.table.make_room() is not None

    def _gids(self, keys: list[tuple[int, str]]) -> GroupIds:
        return self.table.upsert(key_columns(keys))

    def content(self) -> Content:
        """What another table, in memory, restores of it."""
        whole = Keyed(self.ctx.subtask, self.ctx.parallelism)
        frozen = self.freeze(10**9)
        whole.restore(frozen.segments())
        frozen.release()
        return whole.content()


@cache
def store() -> RocksStore:
    """One for all tables: each has its own range of keys."""
    return RocksStore(1 << 20)


def key_columns(keys: list[tuple[int, str]]) -> list[pa.Array]:
    return [pa.array([k for k, _ in keys], pa.int64()), pa.array([s for _, s in keys], pa.string())]


def test_restores_are_what_full_snapshots_would_be() -> None:
    Keyed.rests = 0
    kinds = set[tuple[str, str]]().union(*(World(seed, Keyed).run().kinds for seed in range(30)))
    assert {kind for _, kind in kinds} == {"base", "delta", "delete"}
    assert Keyed.rests >= 10, "the log did not rest, or nobody noticed"


@needs_rocksdb
def test_restores_are_the_same_where_rows_lie_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "_PART_ROWS", 3)
    Spilled.moved = 0
    kinds = set[tuple[str, str]]().union(*(World(seed, Spilled, short).run().kinds for seed in range(15)))
    assert {kind for _, kind in kinds} == {"base", "delta", "delete"}
    assert Spilled.moved > 50


def deleted_after_it_left() -> None:
    """A key changes, leaves memory, comes back and is deleted, all between two checkpoints."""
    step, line = Spilled(0, 1), Keyed(0, 1)
    keys = key_columns([(number, "") for number in range(80)])
    for begin in range(0, 80, 5):
        step._add(pa.record_batch([*(k.slice(begin, 5) for k in keys), pa.array([1] * 5)], schema=SCHEMA))
        step.table.make_room()
    first = step.freeze(1)
    step._add(pa.record_batch([*(k.slice(5, 1) for k in keys), pa.array([7])], schema=SCHEMA))
    for begin in range(20, 60, 5):
        step._gids([(number, "") for number in range(begin, begin + 5)])
        step.table.make_room()
    assert step.table.index.find([k.slice(5, 1) for k in keys]).tolist() == [-1]
    step.table.delete(step._gids([(5, "")]))
    step.dead = {int(gid) for gid in step._gids([(5, "")])}
    step.sweep()
    second = step.freeze(2)
    changes = list(second.changes(1) or ())
    assert any(len(segment.batch) for segment in changes if segment.kind == "delta")
    line.restore([*first.segments(), *changes])
    assert sorted(row[0] for row in line.content()) == [number for number in range(80) if number != 5]


@needs_rocksdb
def test_a_key_that_left_memory_changed_can_be_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "_PART_ROWS", 3)
    deleted_after_it_left()


def test_files_go_once_nobody_names_them_and_a_crash_leaves_none_for_ever() -> None:
    for seed in range(10):
        world = World(seed, Keyed).run()
        world.log.begin_attempt("the next driver")  # in the midst of whatever was under way
        world.retention, world.increments, world.pending = Retention(world.store, world.log), Increments(), []
        assert world.next_id >= next_checkpoint_id(world.store, JOB, world.log.state)
        for _ in range(3):
            world.checkpoint()
            world.random.random = lambda: 0.9  # type: ignore[method-assign] # completes
            world.outcome()
        manifests = [load_manifest(world.store, JOB, c) for c in world.log.state.completed]
        named = set[str]().union(*(shared_files(m.entries) for m in manifests))
        retired = world.retention.shared._kept  # at the last collection, by checkpoints that have gone since too
        assert named <= world.files() <= named | retired


def _no_deletions(self: ChangeLog, index: object, gids: object) -> None: ...


def _since_the_freeze_before(self: History[Any], checkpoint_id: int) -> Any:
    return [happened for _, happened in self.intervals[-1:]]


def _builds_on_anything(self: Increments, checkpoint_id: int) -> None:
    self._completed = max(self._written)
    self._written = {self._completed: self._written[self._completed]}


def _rests_in_secret(self: ChangeLog, checkpoint_id: int) -> Changes:
    resting, log = self._resting, self._intervals
    start, intervals = log._start, list(log._intervals)
    changes = CUT(self, checkpoint_id)
    if resting or not self._resting:
        return changes
    log._start, log._intervals = checkpoint_id if start is None else start, intervals  # as if it had marked all along
    self._resting = 0
    self.mark = lambda gids, used=0: None  # type: ignore[method-assign]
    return changes


CUT = ChangeLog.cut


@pytest.mark.parametrize(
    ("place", "name", "bug"),
    [
        (ChangeLog, "delete", _no_deletions),
        (History, "since", _since_the_freeze_before),
        (Increments, "completed", _builds_on_anything),
        (shared_module, "shared_files", lambda entries: frozenset(e.file for e in list(entries)[-1:] if e.file)),
        (ChangeLog, "keep", lambda self, gids: None),
        (ChangeLog, "cut", _rests_in_secret),
    ],
    ids=["deletion", "aborted", "pending", "shared file", "renumbered", "rest"],
)
def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, bug: Any) -> None:
    """A deletion is forgotten; a delta holds what changed since the aborted checkpoint only; a checkpoint builds on one
    that is still under way; a file goes that a retained checkpoint names; marks stay with the old group ids; nothing
    is marked, and nobody is told."""
    monkeypatch.setattr(place, name, bug)
    with pytest.raises((AssertionError, StorageError, ValueError)):
        for seed in range(30):
            World(seed, Keyed).run()


def _no_journal(self: SpilledRows, keys: Any, values: Any, changed: Any = None, epoch: int = 0) -> None:
    PUT(self, keys, values)


def _journal_keeps(self: SpilledRows, keys: Any, epochs: range) -> None:
    REMOVE(self, keys, range(0))


PUT, REMOVE = SpilledRows.put, SpilledRows.remove


@needs_rocksdb
@pytest.mark.parametrize(
    ("place", "name", "bug"),
    [
        (spill.Spill, "fetch", lambda self, known: [f.reserve(99) for f in (self._used, self._recent, self._stored)]),
        (spill.Spill, "use", lambda self, gids: None),
        (spill.Spill, "delete", lambda self, gids, log: None),
        (SpilledRows, "put", _no_journal),
        (SpilledRows, "remove", _journal_keeps),
    ],
    ids=["never fetched", "used while it leaves", "deletion", "not in the journal", "deleted but in the journal"],
)
def test_planted_bugs_in_moving_rows_are_found(
    monkeypatch: pytest.MonkeyPatch, place: Any, name: str, bug: Any
) -> None:
    monkeypatch.setattr(spill, "_PART_ROWS", 3)
    monkeypatch.setattr(place, name, bug)
    with pytest.raises(AssertionError):
        deleted_after_it_left()
        for seed in range(30):
            World(seed, Spilled, short).run()

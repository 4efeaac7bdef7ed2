"""States of process functions and timers in incremental checkpoints, against plain dictionaries."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import pyarrow as pa
import pytest
from process_world import Clock, clocked

import cutwater as cw
from cutwater.errors import StorageError
from cutwater.operators.process.functions import ProcessContext, ProcessFunction
from cutwater.operators.process.object_operator import ObjectOperator
from cutwater.operators.process.operator_state import OperatorState
from cutwater.operators.process.spec import ProcessSpec
from cutwater.state.disk.rocks import RocksStore
from cutwater.state.objects.segments import FrozenObjectStates, FrozenPart
from cutwater.state.objects.table import ObjectTable
from cutwater.state.segments import Frozen, Segment
from cutwater.state.table.intervals import Intervals
from cutwater.storage.snapshot.increments import Increments
from cutwater.storage.snapshot.segment_files import SnapshotWriter, read_segment
from incremental_world import Content, World, written
from memory_store import MemoryStore

needs_rocksdb = pytest.mark.skipif(find_spec("rocksdict") is None, reason="rocksdict is not installed")

SCHEMA = pa.schema([("k", pa.int64()), ("what", pa.string()), ("n", pa.int64())])
LAST = 2**40


class Ledger(ProcessFunction):
    """Does to its states what each row says."""

    total = cw.ValueState("long")
    most = cw.ReducingState("long", max)
    seen = cw.ListState("long")
    counts = cw.MapState("long", "long")
    recent = cw.ValueState("long", ttl="1h")
    rows = cw.OperatorListState("long")

    def process(self, row: dict[str, Any], ctx: ProcessContext) -> Iterator[dict[str, Any]]:
        n = row["n"]
        match row["what"]:
            case "add":
                self.total.value = self.total.get(0) + n
                self.most.add(n)
                self.seen.append(n)
                self.counts[n % 4] = n
                self.recent.value = n
                self.rows.append(n)
            case "drop":
                self.total.clear()
                self.counts.pop(n % 4, None)
                self.seen.set(list(self.seen)[1:])
                self.rows.clear()
            case "clear":
                for state in (self.total, self.most, self.seen, self.counts, self.recent):
                    state.clear()
            case "set timer":
                ctx.timers.register_event(n)
                ctx.timers.register_processing(LAST + n)
            case "delete timer":
                ctx.timers.delete_event(n)
        return iter(())

    def on_timer(self, time: int, domain: str, ctx: ProcessContext) -> Iterator[dict[str, Any]]:
        self.seen.append(-time)
        return iter(())


Model = dict[str, dict[int, Any]]


def model_after(model: Model, key: int, what: str, n: int) -> None:
    total, most, seen, counts = (model[name] for name in ("total", "most", "seen", "counts"))
    match what:
        case "add":
            total[key] = total.get(key, 0) + n
            most[key] = max(n, most.get(key, n))
            seen.setdefault(key, []).append(n)
            counts.setdefault(key, {})[n % 4] = n
            model["recent"][key] = n
            model["rows"].setdefault(0, []).append(n)
        case "drop":
            total.pop(key, None)
            counts.get(key, {}).pop(n % 4, None)
            seen[key] = seen.get(key, [])[1:]
            model["rows"].clear()
        case "clear":
            for name in ("total", "most", "seen", "counts", "recent"):
                model[name].pop(key, None)
        case "set timer":
            model["event"].setdefault(key, set()).add(n)
            model["processing"].setdefault(key, set()).add(LAST + n)
        case "delete timer":
            model["event"].get(key, set()).discard(n)


class Objects:
    """One subtask of the step, beside dictionaries by state and key."""

    names = ("total", "most", "seen", "counts", "recent", "rows", "event", "processing")

    memory_bytes: int | None = None

    def __init__(self, subtask: int, parallelism: int) -> None:
        self.spec = ProcessSpec(SCHEMA, ("k",), Ledger(), "n long")
        self.operator = clocked(self.spec, Clock(1000), subtask, parallelism, self.memory_bytes)
        self.model: Model = {name: {} for name in self.names}
        self.now = 0

    def change(self, dice: random.Random) -> None:
        if dice.random() < 0.15:
            self.now += dice.randint(0, 20)
            self._watermark()
            return
        few = dice.random() < 0.8
        kinds = ("add", "add", "drop", "clear", "set timer", "set timer", "delete timer")
        keys = [dice.randint(0, 3 if few else 40) for _ in range(dice.randint(1, 3 if few else 40))]
        rows = [(key, dice.choice(kinds), self.now + dice.randint(1, 30)) for key in keys]
        self.operator.process(0, batch_of(rows))
        for row in rows:
            model_after(self.model, *row)

    def _watermark(self) -> None:
        self.operator.on_watermark(self.now)
        while self.operator.pending:
            self.operator.resume()
        due = [(time, key) for key, times in self.model["event"].items() for time in times if time <= self.now]
        for time, key in sorted(due):
            self.model["event"][key].remove(time)
            self.model["seen"].setdefault(key, []).append(-time)

    def freeze(self, checkpoint_id: int) -> Frozen:
        return self.operator.freeze(checkpoint_id)

    def expected(self, frozen: Frozen) -> Content:
        kept = copy.deepcopy(self.model)
        found: Content = []
        for name, by_key in kept.items():
            for key, value in by_key.items():
                if value or (isinstance(value, int) and value == 0):
                    found += rows_of(name, key, value)
        return sorted(found)

    def restore(self, segments: Iterable[Segment], expected: Content | None = None) -> None:
        self.operator.restore(segments)
        for name, key, value in expected or ():
            of_name = self.model[name]
            if name in ("event", "processing"):
                of_name.setdefault(key, set()).add(value)
            elif name == "rows":
                of_name.setdefault(0, []).append(value)
            elif name in ("seen", "counts"):
                of_name[key] = list(value) if name == "seen" else dict(value)
            else:
                of_name[key] = value

    def content(self) -> Content:
        assert isinstance(self.operator, ObjectOperator)
        states = self.operator._states
        found: Content = []
        for name, state in states.items():
            for key, value in state.objects.freeze().items():
                found += rows_of(name, key[0], value[0] if name == "recent" else value)
        for domain, timers in self.operator._timers.items():
            for key, times in timers.freeze().items():
                found += rows_of(domain, key[0], times)
        function = self.operator._function  # type: ignore[attr-defined]
        return found + rows_of("rows", 0, list(function.rows))


class ObjectsOnDisk(Objects):
    """With a budget of some keys for each state."""

    memory_bytes = 1 << 20


def rows_of(name: str, key: int, value: Any) -> Content:
    if name in ("event", "processing", "rows"):
        return [(name, key, each) for each in value]
    if isinstance(value, dict):
        return [(name, key, tuple(value.items()))]
    return [(name, key, tuple(value) if isinstance(value, list) else value)]


def batch_of(rows: list[tuple[int, str, int]]) -> pa.RecordBatch:
    arrays = [pa.array([row[i] for row in rows], field.type) for i, field in enumerate(SCHEMA)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


@pytest.mark.full
@needs_rocksdb
def test_restores_of_states_on_disk_are_what_the_dictionaries_say() -> None:
    World(176, ObjectsOnDisk).run(14)  # few: each step opens several databases


def test_restores_are_what_the_dictionaries_say() -> None:
    worlds = [World(seed, Objects).run() for seed in range(12)]
    kinds = set[tuple[str, str]]().union(*(world.kinds for world in worlds))
    for name in ("total", "seen", "counts", "__event_timers"):
        assert {kind for n, kind in kinds if n == name} == {"base", "delta", "delete"}, name
    assert sum(world.built_on_restored for world in worlds) > 0, "no checkpoint built on the one restored"


@needs_rocksdb
def test_a_state_on_disk_is_written_and_restored_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cutwater.state.objects.table._CHUNK_ROWS", 7)
    step = ObjectsOnDisk(0, 1)
    step.operator.process(0, batch_of([(key, "add", key) for key in range(200)]))
    segments = list(step.freeze(1).segments())
    kinds = [segment.kind for segment in segments if segment.name == "seen"]
    assert len(kinds) == 29
    assert set(kinds) == {"base", "delta"}
    restored = [ObjectsOnDisk(subtask, 3) for subtask in range(3)]
    for each in restored:
        each.restore(segments)
    assert sorted(row for each in restored for row in each.content()) == sorted(step.content())


@needs_rocksdb
def test_the_states_of_many_keys_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step = ObjectsOnDisk(0, 1)
    looks: list[int] = []
    get_many = RocksStore.get_many
    monkeypatch.setattr(RocksStore, "get_many", lambda self, keys: (looks.append(len(keys)), get_many(self, keys))[1])
    step.operator.process(0, batch_of([(key % 200, "add", 1) for key in range(400)]))
    assert looks == [200] * 5, "one look for each state"


@pytest.mark.parametrize(
    ("make", "other"),
    [
        (Objects, Objects),
        pytest.param(Objects, ObjectsOnDisk, marks=needs_rocksdb),
        pytest.param(ObjectsOnDisk, Objects, marks=needs_rocksdb),
    ],
)
def test_few_changed_keys_are_few_bytes(make: type[Objects], other: type[Objects]) -> None:
    """And they restore at another parallelism, also on the other backend."""
    step, store, increments, sizes = make(0, 1), MemoryStore(), Increments(), list[int]()
    step.operator.process(0, batch_of([(key, what, key) for key in range(5000) for what in ("add", "set timer")]))
    step.operator.process(0, batch_of([(0, "drop", 1)]))  # the list state that is always whole is empty
    for checkpoint_id in (1, 2):
        frozen = step.freeze(checkpoint_id)
        writer = SnapshotWriter(store, "job", checkpoint_id, 1, 0, 0)
        entries = written(writer, increments, frozen)
        writer.close()
        frozen.release()
        restored = [other(subtask, 2) for subtask in range(2)]
        for each in restored:
            each.restore(read_segment(store, "job", e) for e in entries)
        assert sorted(row for each in restored for row in each.content()) == sorted(step.content())
        sizes.append(sum(e.length for e in entries) - sum(sizes))
        increments.written(checkpoint_id, ("step", 0), entries)
        increments.completed(checkpoint_id)
        step.operator.process(0, batch_of([(key, "add", 1) for key in range(50)]))
        step.operator.process(0, batch_of([(0, "drop", 1)]))
    assert sizes[1] < sizes[0] / 20


def test_a_state_that_is_no_more_is_not_carried_on() -> None:
    class Smaller(Ledger):
        most = None  # type: ignore[assignment]

        def process(self, row: dict[str, Any], ctx: ProcessContext) -> Iterator[dict[str, Any]]:
            self.total.value = row["n"]
            return iter(())

    before = Objects(0, 1)
    before.operator.process(0, batch_of([(key, "add", 1) for key in range(100)]))
    frozen = before.freeze(1)
    segments = list(frozen.segments())
    for function, incremental in ((Ledger(), True), (Smaller(), False)):
        after = clocked(ProcessSpec(SCHEMA, ("k",), function, "n long"), Clock(0))
        after.restore(segments)
        after.process(0, batch_of([(1, "add", 1)]))
        assert (after.freeze(2).changes(0) is not None) == incremental


def _no_deletions(self: FrozenPart, changed: dict[Any, Any]) -> Iterator[Segment]:
    return (s for s in CHANGES(self, changed) if s.kind != "delete")


def _whole_is_forgotten(self: FrozenObjectStates, changed: Any) -> Iterator[Segment]:
    return (s for s in ALL_CHANGES(self, changed) if not s.name.startswith("rows"))


def _added(self: OperatorState, elements: Any, ctx: Any) -> Iterator[Segment]:
    return (s for s in SEGMENTS(self, elements, ctx) if s.kind != "base")


def _forgets_the_overlay(self: ObjectTable[Any]) -> None:
    MERGE(self)
    if self._log is not None:
        self._log.change(lambda changed: set(list(changed)[1:]))


CHANGES = FrozenPart.changes
ALL_CHANGES = FrozenObjectStates._changes
SEGMENTS = OperatorState._segments
MERGE = ObjectTable._merge


@pytest.mark.parametrize(
    ("place", "name", "bug"),
    [
        (FrozenPart, "changes", _no_deletions),
        (FrozenObjectStates, "_changes", _whole_is_forgotten),
        (OperatorState, "_segments", _added),
        (ObjectTable, "_merge", _forgets_the_overlay),
        (Intervals, "completed", lambda self, checkpoint_id: self.begin(checkpoint_id)),
    ],
    ids=["deletion", "operator state", "added to", "merged", "completed"],
)
def test_planted_bugs_are_found(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, bug: Any) -> None:
    """Keys that went stay; an operator state is not written; it is added to what was there; a key that changed before
    layers were merged is not told; changes since a checkpoint under way are forgotten."""
    monkeypatch.setattr(place, name, bug)
    with pytest.raises((AssertionError, StorageError)):
        for seed in range(12):
            World(seed, Objects).run()

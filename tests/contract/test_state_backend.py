"""Tables of keyed objects against plain dicts, in memory and on disk: frozen, read late and released at any moment."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from state_backends import STORES

from cutwater.errors import ConfigError, StorageError
from cutwater.state.disk.rocks import OrderedStore, RocksStore, require_rocksdb
from cutwater.state.objects import memory_records
from cutwater.state.objects.memory_records import MemoryRecords
from cutwater.state.objects.table import (
    FrozenObjects,
    KeyedObjects,
    ObjectLayout,
    ObjectTable,
    RocksObjects,
    RocksTable,
)
from cutwater.state.table.intervals import RESTORED

needs_rocksdb = pytest.mark.skipif(find_spec("rocksdict") is None, reason="rocksdict is not installed")

KEYS = st.integers(0, 5).map(lambda n: (n,))
VALUES = st.integers(-(2**63), 2**63 - 1)
Model = dict[tuple[int, ...], list[int]]


class Tables(RuleBasedStateMachine):
    """Lists that grow in place are where a freeze could be seen to change."""

    def __init__(self) -> None:
        super().__init__()
        self.table = self.make()
        self.model: Model = {}
        self.frozen: list[tuple[int, FrozenObjects[list[int]], Model]] = []
        self.reading: list[tuple[FrozenObjects[list[int]], Iterator[tuple[Any, list[int]]], Model, Model]] = []
        self.checkpoint_id = RESTORED
        self.completed: tuple[int, Model] = (RESTORED, {})
        self.table.track(restored=True)

    @abstractmethod
    def make(self) -> KeyedObjects[list[int]]: ...

    @rule(key=KEYS, value=VALUES)
    def put(self, key: tuple[int, ...], value: int) -> None:
        self.table.put(key, [value])
        self.model[key] = [value]

    @rule(values=st.dictionaries(KEYS, VALUES))
    def put_many(self, values: dict[tuple[int, ...], int]) -> None:
        self.table.put_many(values, [[value] for value in values.values()])
        self.model |= {key: [value] for key, value in values.items()}

    @rule(key=KEYS, value=VALUES)
    def change_in_place(self, key: tuple[int, ...], value: int) -> None:
        owned = self.table.own(key)
        assert owned == self.model.get(key)
        if owned is not None:
            owned.append(value)
            self.model[key].append(value)

    @rule(key=KEYS)
    def remove(self, key: tuple[int, ...]) -> None:
        self.table.remove(key)
        self.model.pop(key, None)

    @rule()
    def freeze(self) -> None:
        self.checkpoint_id += 1
        frozen = self.table.freeze(self.checkpoint_id)
        self.frozen.append((self.checkpoint_id, frozen, copy.deepcopy(self.model)))

    @rule(which=st.integers(0, 3))
    def release(self, which: int) -> None:
        if which < len(self.frozen):
            released = self.frozen.pop(which)[1]
            self.reading = [reading for reading in self.reading if reading[0] is not released]
            released.release()

    @rule(which=st.integers(0, 3), keys=st.integers(1, 3))
    def begin_to_read(self, which: int, keys: int) -> None:
        """Somebody has seen some keys, and goes on later."""
        if which < len(self.frozen):
            _, frozen, expected = self.frozen[which]
            items = iter(frozen.items())
            self.reading.append((frozen, items, dict(islice(items, keys)), expected))

    @rule()
    def read_to_the_end(self) -> None:
        for _, items, found, expected in self.reading:
            assert {**found, **dict(items)} == expected
        self.reading = []

    @rule(which=st.integers(0, 3))
    def complete(self, which: int) -> None:
        """What changed since the last completed checkpoint makes this one of it."""
        if which < len(self.frozen) and self.frozen[which][0] > self.completed[0]:
            checkpoint_id, frozen, expected = self.frozen[which]
            since, found = self.completed
            changed = frozen.changed(since)
            if changed is not None:
                made = {**found, **changed}
                assert {key: value for key, value in made.items() if value is not None} == expected
            self.completed = checkpoint_id, expected

    @invariant()
    def the_table_is_the_dict(self) -> None:
        assert {key: self.table.get(key) for key in self.model} == self.model
        assert all(self.table.get((n,)) is None for n in range(6) if (n,) not in self.model)
        everything = [(n,) for n in range(6)]
        assert self.table.get_many(everything) == [self.model.get(key) for key in everything]
        assert len(self.table) == len(self.model)

    @invariant()
    def what_was_frozen_stays(self) -> None:
        for _, frozen, expected in self.frozen:
            assert dict(frozen.items()) == expected


class MemoryTables(Tables):
    def make(self) -> KeyedObjects[list[int]]:
        return ObjectTable(list)


class MemoryColumns(Tables):
    """The second state of three, whose keys come bare; the others are written and frozen in between."""

    def make(self) -> KeyedObjects[list[int]]:
        self.before, column, self.behind = MemoryRecords([None, list, None], single=True).columns
        return column.objects

    @rule(key=KEYS, value=VALUES)
    def another_state(self, key: tuple[int, ...], value: int) -> None:
        self.before.objects.put(key, value)

    @rule(key=KEYS)
    def another_state_goes(self, key: tuple[int, ...]) -> None:
        self.before.objects.remove(key)

    @rule()
    def another_freeze(self) -> None:
        self.behind.objects.freeze().release()


def test_where_freezes_overlap_for_ever_nothing_piles_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_records, "_VACATED_KEYS", 16)
    monkeypatch.setattr(memory_records, "_MOST_LAYERS", 2)
    records = MemoryRecords([None, list], single=True)
    column = records.columns[1].objects
    model: dict[tuple[int, ...], list[int]] = {}
    frozen: list[tuple[FrozenObjects[list[int]], dict[tuple[int, ...], list[int]]]] = []
    for epoch in range(300):
        records.begin()
        for number in range(10):
            column.put((10 * epoch + number,), model.setdefault((10 * epoch + number,), [epoch]))
            if epoch >= 3:
                column.remove((10 * (epoch - 3) + number,))
                del model[(10 * (epoch - 3) + number,)]
        column.put((-1,), [epoch])
        model[(-1,)] = [epoch]
        frozen.append((column.freeze(epoch), copy.deepcopy(model)))
        if len(frozen) > 2:
            oldest, expected = frozen.pop(0)
            assert dict(oldest.items()) == expected
            oldest.release()
        assert {key: column.get(key) for key in model} == model
    saved = [part for _, part in records.columns[1]._saved_earlier]
    assert sum(map(len, records.layers())) < 150
    assert sum(map(len, saved)) < 150
    depth, before = 0, records.find(-1).next.before
    while hasattr(before, "before"):
        depth, before = depth + 1, before.before
    assert depth < 5
    for epoch in range(300, 330):
        column.put((10 * epoch,), [epoch])
        frozen.append((column.freeze(epoch), {}))
        frozen.pop(0)[0].release()
    assert len(records.layers()) < 6


def test_what_was_read_of_a_freeze_does_not_grow_afterwards() -> None:
    column = MemoryRecords([None, list], single=True).columns[1].objects
    column.track(restored=True)
    column.put_many([(1,), (2,)], [[10], [20]])
    frozen, expected = column.freeze(1), {(1,): [10], (2,): [20]}
    items = iter(frozen.items())
    first, changed = next(items), frozen.changed(RESTORED)
    for key in expected:
        owned = column.own(key)
        assert owned is not None
        owned.append(99)
    assert dict([first, *items]) == expected
    assert changed == frozen.changed(RESTORED) == expected


@cache
def store(name: str) -> OrderedStore:
    """One for all tables: each has its own range of keys."""
    return STORES[name](1 << 20)


def rocks_table(where: OrderedStore, kind: pa.DataType, memory_bytes: int) -> RocksObjects[Any]:
    return RocksObjects(where, RocksTable([pa.int64()], ObjectLayout(kind, lambda v: v, lambda v: v), 16, memory_bytes))


class StoredTables(Tables):
    """With a budget of three keys, so that most are in the store only."""

    name = "rocksdb"

    def make(self) -> KeyedObjects[list[int]]:
        return rocks_table(store(self.name), pa.list_(pa.int64()), 2_000)


class SortedTables(StoredTables):
    name = "sorted lists"


TestMemoryTables = MemoryTables.TestCase
TestMemoryColumns = MemoryColumns.TestCase
TestRocksTables = needs_rocksdb(StoredTables.TestCase)
TestSortedTables = SortedTables.TestCase
for stored in (TestRocksTables, TestSortedTables):
    stored.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where stores make their private folders in this test."""
    return tmp_path / f"cutwater-state-{os.getuid()}"


@needs_rocksdb
def test_many_more_bytes_than_the_budget_stay_on_disk(tmp_path: Path) -> None:
    where = RocksStore(1 << 20, str(tmp_path))
    table = rocks_table(where, pa.string(), 1 << 20)
    most = 0
    for number in range(20_000):
        table.put((number,), f"{number}-" * 60)
        most = max(most, table._young_bytes + table._old_bytes)
    for number in range(0, 20_000, 7):
        assert table.get((number,)) == f"{number}-" * 60
        most = max(most, table._young_bytes + table._old_bytes)
    assert table.get_many([(number,) for number in range(500)]) == [f"{n}-" * 60 for n in range(500)]
    assert 0 < most <= 1 << 20
    assert len(table._young) + len(table._old) + len(table._written) < 2_000
    assert len(table) == 20_000
    where.close()


@needs_rocksdb
def test_what_is_used_stays_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = RocksStore(1 << 20, str(tmp_path))
    table = rocks_table(where, pa.int64(), 100_000)
    table.put_many([(n,) for n in range(5_000)], range(5_000))
    looked: list[int] = []
    get_many = where.get_many
    monkeypatch.setattr(where, "get_many", lambda keys: (looked.append(len(keys)), get_many(keys))[1])
    for number in range(4_000):
        assert table.get((number,)) == number
        assert table.get((4_999,)) == 4_999
    assert sum(looked) <= 4_001
    where.close()


@needs_rocksdb
def test_many_changes_between_two_freezes_are_told_as_a_whole(tmp_path: Path) -> None:
    where = RocksStore(1 << 20, str(tmp_path))
    table = rocks_table(where, pa.int64(), 1 << 20)
    table.track(restored=True)
    table.put_many([(n,) for n in range(10_000)], range(10_000))
    assert table.freeze(1).changed(RESTORED) is None
    table.put((3,), 33)
    table.remove((4,))
    assert table.freeze(2).changed(1) == {(3,): 33, (4,): None}
    where.close()


@needs_rocksdb
def test_the_folder_is_private_and_goes_with_the_store(tmp_path: Path, folder: Path) -> None:
    where = RocksStore(1 << 20, str(tmp_path))
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert [os.stat(f).st_mode & 0o777 for f in folder.iterdir()] == [0o700]
    where.close()
    where.close()
    assert list(folder.iterdir()) == []


@needs_rocksdb
def test_a_folder_that_others_may_read_is_refused(tmp_path: Path, folder: Path) -> None:
    folder.mkdir(mode=0o755)
    with pytest.raises(StorageError, match="others may read it"):
        RocksStore(1 << 20, str(tmp_path))


_HOLDS = """
import sys, time
from cutwater.state.disk.rocks import RocksStore
store = RocksStore(1 << 20, sys.argv[1])
store.write([(b"key", b"value")])
print("open", flush=True)
sys.stdin.read()
"""


@needs_rocksdb
def test_the_next_store_removes_what_a_killed_process_left(tmp_path: Path, folder: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", _HOLDS, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "open\n"
    held = set(folder.iterdir())
    second = RocksStore(1 << 20, str(tmp_path))
    assert held < set(folder.iterdir()), "a folder in use stays"
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    third = RocksStore(1 << 20, str(tmp_path))
    assert held.isdisjoint(folder.iterdir())
    assert len(list(folder.iterdir())) == 2
    second.close()
    third.close()


@needs_rocksdb
def test_a_disk_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    place = tmp_path / "file"
    place.write_text("no folder")
    with pytest.raises(StorageError, match=str(place)):
        RocksStore(1 << 20, str(place))


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    with pytest.raises(ConfigError) as e:
        require_rocksdb()
    assert "cutwater[rocksdb]" in str(e.value.hint)

"""Checkpoints that follow one another quickly share a file: what is in it, who may go on with it, and that it stays."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from itertools import chain
from typing import Any

import pyarrow as pa
import pytest
from storage_world import JOB, manifest_of, segment

from cutwater.errors import StorageError
from cutwater.storage.job_log import JobLog
from cutwater.storage.snapshot import data_file
from cutwater.storage.snapshot.data_file import Continued, DataFile
from cutwater.storage.snapshot.manifest import Entry
from cutwater.storage.snapshot.publish import publish
from cutwater.storage.snapshot.retention import Retention, list_shared, older_entries
from cutwater.storage.snapshot.segment_files import SnapshotWriter, read_segment
from cutwater.storage.store.base import Store
from cutwater.storage.store.local import LocalStore
from memory_store import Fault, MemoryStore


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Any) -> Store:
    return LocalStore.open(tmp_path) if request.param == "local" else MemoryStore()


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_file, "_CONTINUED_S", 1e9)


def write(
    store: Store, continued: Continued, checkpoint_id: int, rows: int = 50, *, complete: bool = True
) -> list[Entry]:
    writer = SnapshotWriter(store, JOB, checkpoint_id, 1, 0, 0, continued.take(checkpoint_id))
    entries = writer.add("count", 0, [segment(checkpoint_id, 0, rows)], shared=True)
    file = writer.close(go_on=True)
    assert file is not None
    continued.leave(checkpoint_id, file)
    if complete:
        continued.completed(checkpoint_id)
    return entries


def assert_whole(store: Store, checkpoint_id: int, entries: list[Entry], rows: int = 50) -> None:
    (entry,) = entries
    assert read_segment(store, JOB, entry).batch.equals(segment(checkpoint_id, 0, rows).batch)


def test_each_goes_on_where_the_one_before_ended(store: Store) -> None:
    continued = Continued(1)
    written = {n: write(store, continued, n) for n in range(1, 6)}
    continued.close()
    assert [e.file for (e,) in written.values()] == ["shared/1-1-0.data"] * 5
    assert [e.offset for (e,) in written.values()] == [4_096 * n for n in range(5)]
    assert [e.written for (e,) in written.values()] == [0, 2, 3, 4, 5]
    for n, entries in written.items():
        assert_whole(store, n, entries)


def test_large_and_small_parts_in_turns(store: Store) -> None:
    continued, sizes = Continued(1), {1: 200_000, 2: 3, 3: 70_001, 4: 200_001}
    written = {n: write(store, continued, n, rows) for n, rows in sizes.items()}
    continued.close()
    for n, entries in written.items():
        assert_whole(store, n, entries, sizes[n])


def began_meanwhile(continued: Continued, store: Store) -> None:
    continued.take(2)


def is_too_large(continued: Continued, store: Store) -> None:
    data_file._CONTINUED_BYTES = 4_096  # put back by the fixture


def is_too_old(continued: Continued, store: Store) -> None:
    data_file._CONTINUED_S = 0.0


def failed(continued: Continued, store: Store) -> None:
    SnapshotWriter(store, JOB, 2, 1, 0, 0, continued.take(2)).abort()


def wrote_nothing(continued: Continued, store: Store) -> None:
    assert SnapshotWriter(store, JOB, 2, 1, 0, 0, continued.take(2)).close(go_on=True) is None


@pytest.mark.parametrize("what", [began_meanwhile, is_too_large, is_too_old, failed, wrote_nothing])
def test_a_new_file_begins_where_the_last_one(
    store: Store, monkeypatch: pytest.MonkeyPatch, what: Callable[[Continued, Store], None]
) -> None:
    monkeypatch.setattr(data_file, "_CONTINUED_BYTES", data_file._CONTINUED_BYTES)
    continued = Continued(1)
    first = write(store, continued, 1)
    what(continued, store)
    third = write(store, continued, 3)
    assert ([e.file for e in third], [e.written for e in third]) == (["shared/3-1-0.data"], [0])
    assert_whole(store, 1, first)
    assert_whole(store, 3, third)


def test_what_builds_upon_older_segments_lies_in_a_file_of_its_own(store: Store) -> None:
    continued = Continued(1)
    write(store, continued, 1)
    writer = SnapshotWriter(store, JOB, 2, 1, 0, 0, continued.take(2))
    (whole,) = writer.add("count", 0, [segment(2, 0, 50)], shared=True)
    (delta,) = writer.add("sum", 0, [segment(2, 0, 60)], shared=True, extends=True)
    file = writer.close(go_on=True)
    assert file is not None
    continued.leave(2, file)
    continued.completed(2)
    assert (whole.file, whole.written, delta.file, delta.written) == ("shared/1-1-0.data", 2, "shared/2-1-0.data", 0)
    assert_whole(store, 2, [whole])
    assert_whole(store, 2, [delta], 60)
    assert [e.file for e in write(store, continued, 3)] == ["shared/1-1-0.data"]


def test_its_file_is_not_continued(store: Store) -> None:
    writer = SnapshotWriter(store, JOB, 1, 1, 0, 0)
    (delta,) = writer.add("sum", 0, [segment(1, 0, 60)], shared=True, extends=True)
    (whole,) = writer.add("count", 0, [segment(1, 0, 50)], shared=True)
    assert writer.close(go_on=True) is None
    assert delta.file == whole.file
    assert_whole(store, 1, [whole])


def test_small_changes_that_need_no_file_end_none() -> None:
    store = MemoryStore()
    writer = SnapshotWriter(store, JOB, 1, 1, 0, 2_000)
    (small,) = writer.add("sum", 0, [segment(1, 0, 3)], shared=True, extends=True)
    writer.add("count", 0, [segment(1, 0, 1_000)], shared=True)
    assert small.inline is not None
    assert writer.close(go_on=True) is not None


def test_a_new_file_begins_as_long_as_the_last_checkpoint_may_fail(store: Store) -> None:
    continued = Continued(1)
    write(store, continued, 1, complete=False)
    assert [e.file for e in write(store, continued, 2)] == ["shared/2-1-0.data"]


def test_one_that_ends_after_a_later_one_began_is_not_continued(store: Store) -> None:
    continued = Continued(1)
    slow = SnapshotWriter(store, JOB, 1, 1, 0, 0, continued.take(1))
    slow.add("count", 0, [segment(1, 0, 5)], shared=True)
    second = write(store, continued, 2)
    file = slow.close(go_on=True)
    assert file is not None
    continued.leave(1, file)
    continued.completed(1)
    assert [e.file for e in second + write(store, continued, 3)] == ["shared/2-1-0.data"] * 2


@pytest.mark.parametrize("kind", ["full", "torn", "error", "doubt"])
def test_a_failure_leaves_what_earlier_checkpoints_wrote(kind: Any) -> None:
    operation: Any = "append" if kind == "torn" else "sync"
    store, continued = MemoryStore(), Continued(1)
    first = write(store, continued, 1)
    store._faults, store._counts = [Fault(1, kind, operation)], [0]
    writer = SnapshotWriter(store, JOB, 2, 1, 0, 0, continued.take(2))
    with pytest.raises(StorageError):
        writer.add("count", 0, [segment(2, 0, 50)], shared=True)
        writer.close(go_on=True)
    writer.abort()
    assert_whole(store, 1, first)
    assert [e.file for e in write(store, continued, 3)] == ["shared/3-1-0.data"]


def test_a_file_that_nobody_can_name_is_removed() -> None:
    store = MemoryStore()
    writer = SnapshotWriter(store, JOB, 1, 1, 0, 0)
    writer.add("count", 0, [segment(1, 0, 50)], shared=True)
    writer.abort()
    assert store.files == {}


@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_a_crash_takes_only_what_was_not_synced(keep: float) -> None:
    store, continued = MemoryStore(), Continued(1)
    written = {n: write(store, continued, n) for n in (1, 2)}
    writer = SnapshotWriter(store, JOB, 3, 1, 0, 0, continued.take(3))
    writer.add("count", 0, [segment(3, 0, 50)], shared=True)
    after = store.after_crash(keep=keep)
    for n, entries in written.items():
        assert_whole(after, n, entries)


def test_going_on_costs_one_sync(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    store, continued, synced, real = LocalStore.open(tmp_path), Continued(1), list[str](), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), real(fd)))
    write(store, continued, 1)
    synced.clear()
    write(store, continued, 2)
    assert synced == [str(tmp_path / JOB / "shared/1-1-0.data")]


def test_what_is_new_is_told_by_who_wrote_it() -> None:
    store, continued = MemoryStore(), Continued(1)
    log = JobLog(store, JOB)
    log.begin_attempt("driver")
    first, second = write(store, continued, 1), write(store, continued, 2)
    assert older_entries(manifest_of(log, 2, second)) == []
    assert older_entries(manifest_of(log, 2, first + second)) == first
    assert older_entries(manifest_of(log, 3, first + second)) == first + second


class World:
    """One worker's checkpoints, one or two at a time, a driver that keeps one or two, and collections at any moment."""

    def __init__(self, seed: int) -> None:
        self.random, self.store = random.Random(seed), MemoryStore()
        self.concurrent, self.kept = 1 + seed % 2, 1 + seed // 2 % 2
        self.continued = Continued(self.kept)
        self.log = JobLog(self.store, JOB, num_retained=self.kept)
        self.log.begin_attempt("driver")
        self.retention = Retention(self.store, self.log)
        self.last = 0
        self.open: dict[int, tuple[SnapshotWriter, list[Entry]]] = {}
        self.acknowledged: dict[int, list[Entry]] = {}
        self.retained: list[list[Entry]] = []
        """Of each retained checkpoint; the newest is the last."""
        self.notices: list[int] = []
        """That checkpoints are published; the worker hears of it later."""
        self.shared = 0
        """How often a checkpoint went on with a file."""

    def begin(self) -> None:
        if len(self.open) + len(self.acknowledged) < self.concurrent:
            self.last += 1
            file = self.continued.take(self.last)
            self.shared += file is not None
            writer = SnapshotWriter(self.store, JOB, self.last, 1, 0, 0, file)
            wanted = [segment(self.last, 0, self.random.randrange(1, 9))] if self.random.random() < 0.8 else []
            self.open[self.last] = writer, writer.add("count", 0, wanted, shared=True)

    def end(self) -> None:
        if self.open:
            id = self.random.choice(list(self.open))
            writer, self.acknowledged[id] = self.open.pop(id)
            if (file := writer.close(go_on=True)) is not None:
                self.continued.leave(id, file)

    def give_up(self) -> None:
        if self.open and self.random.random() < 0.3:
            self.open.pop(self.random.choice(list(self.open)))[0].abort()
        elif self.acknowledged and self.random.random() < 0.3:
            del self.acknowledged[self.random.choice(list(self.acknowledged))]

    def publish(self) -> None:
        if self.acknowledged:
            id = self.random.choice(list(self.acknowledged))
            manifest = manifest_of(self.log, id, self.acknowledged[id])
            self.retention.shared.check(manifest)
            self.retention.shared.published(publish(self.store, self.log, manifest), manifest)
            self.retained = [*self.retained, self.acknowledged[id]][-self.kept :]
            self.notices.append(id)
            self.acknowledged = {n: entries for n, entries in self.acknowledged.items() if n > id}
            for older in [n for n in self.open if n < id]:
                self.open.pop(older)[0].abort()

    def hear(self) -> None:
        if self.notices:
            self.continued.completed(self.notices.pop(0))

    def collect(self) -> None:
        assert self.retention.collect() == []

    def run(self, steps: int) -> None:
        for _ in range(steps):
            often = [self.begin, self.end, self.publish, self.hear]
            self.random.choice([*often, *often, *often, self.give_up, self.collect])()
            for entry in chain(*self.retained):
                read_segment(self.store, JOB, entry)
            if self.kept > 1 and len(self.retained) > 1:
                older, newest = ({entry.file for entry in entries} for entries in self.retained)
                assert not older & newest, "neighbours share a file"

    def settle(self) -> None:
        """One more checkpoint, and nothing else is under way."""
        for writer, _ in self.open.values():
            writer.abort()
        self.open, self.acknowledged = {}, {}
        self.begin()
        self.end()
        self.publish()
        self.collect()
        self.collect()


def test_no_collection_takes_a_file_that_is_wanted() -> None:
    shared = 0
    for seed in range(300):
        world = World(seed)
        world.run(200)
        shared += world.shared
        world.settle()
        named = {entry.file for entries in world.retained for entry in entries}
        assert {file for file, _ in list_shared(world.store, JOB)} == named
    assert shared > 500


def left_for_anybody(self: Continued, checkpoint_id: int, file: DataFile) -> None:
    self._turns[0].file = file


def always_complete(self: Continued, checkpoint_id: int, file: DataFile) -> None:
    if (turn := self._turn_of(checkpoint_id)) is not None:
        turn.file, turn.complete = file, True


@pytest.mark.parametrize("bug", [left_for_anybody, always_complete])
def test_the_world_finds_a_file_that_is_continued_by_the_wrong_one(
    monkeypatch: pytest.MonkeyPatch, bug: Callable[[Continued, int, DataFile], None]
) -> None:
    monkeypatch.setattr(Continued, "leave", bug)
    with pytest.raises((StorageError, AssertionError)):
        for seed in range(300):
            World(seed).run(200)


def test_the_world_finds_more_files_than_checkpoints_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Continued.__init__
    monkeypatch.setattr(Continued, "__init__", lambda self, files: real(self, 2))
    with pytest.raises((StorageError, AssertionError)):
        for seed in range(300):
            World(seed).run(200)


def test_a_stream_with_zeros_behind_it_is_read_like_one_without() -> None:
    batch = pa.record_batch({"n": range(10)})
    for name, multiple in (("plain", 1), ("blocks", 4_096)):
        store = MemoryStore()
        file = store.write(name)
        length, _ = data_file.encode(batch, file, store.seal.hasher("segment"), multiple)
        assert (len(store.files[name]), length % multiple) == (length, 0)
        assert pa.ipc.open_stream(store.files[name]).read_next_batch().equals(batch)

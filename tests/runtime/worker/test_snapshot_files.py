"""Which files the thread that writes snapshots makes."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cutwater.runtime.worker.snapshots import FrozenSubtask, SnapshotService, WorkerCheckpoint, Written
from cutwater.state.segments import FrozenSegments, Segment
from cutwater.storage.snapshot import data_file
from cutwater.storage.snapshot.manifest import SubtaskRecord
from cutwater.storage.snapshot.segment_files import read_segment
from cutwater.storage.store.local import LocalStore


class _Table(FrozenSegments):
    """All of it changes between any two checkpoints."""

    incremental: Any = True

    def __init__(self, checkpoint_id: int, broken: bool) -> None:
        def make() -> Iterator[Segment]:
            yield Segment("t", "base", pa.record_batch({"n": [checkpoint_id] * 1_000}))
            assert not broken

        super().__init__(make)


class _Worker:
    def __init__(self, folder: Path, *, continued: int = 1) -> None:
        self.store, self.done = LocalStore.open(folder), queue.SimpleQueue[Written]()
        settings: Any = {"attempt": 1, "writer": 0, "writers": 1, "subtasks": 1, "inline_threshold_bytes": 100}
        self.service = SnapshotService(
            self.store, "job", **settings, incremental=True, continued=continued, restored={}, done=self.done.put
        )

    def checkpoint(self, id: int, *, broken: bool = False, whole: bool = True) -> Written:
        frozen = FrozenSubtask(id, SubtaskRecord(0, 0, 1, "aligned"), [("s", _Table(id, broken))], [], 0.0, range(1))
        frozen.checkpoint = whole
        checkpoint = WorkerCheckpoint(id)
        if not whole:
            frozen.savepoint = True
            self.service.savepoint(checkpoint, str(self.store.root / f"savepoint-{id}"))
        self.service.submit(checkpoint, frozen)
        written = self.done.get(timeout=20)
        if written.error is None:
            self.service.completed(id)
        return written


@pytest.fixture(autouse=True)
def _time_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_file, "_CONTINUED_S", 1e9)


def files(*written: Written) -> list[str]:
    return [entry.file for part in written for entry in part.entries]


def test_checkpoints_share_a_file_and_each_reads_its_own(tmp_path: Path) -> None:
    worker = _Worker(tmp_path)
    written = [worker.checkpoint(id) for id in range(1, 5)]
    worker.service.close([])
    assert files(*written) == ["shared/1-1-0.data"] * 4
    for id, part in enumerate(written, 1):
        assert read_segment(worker.store, "job", part.entries[0]).batch["n"].to_pylist() == [id] * 1_000


def test_neighbours_do_not_share_where_two_files_take_turns(tmp_path: Path) -> None:
    worker = _Worker(tmp_path, continued=2)
    written = [worker.checkpoint(id) for id in range(1, 7)]
    worker.service.close([])
    assert files(*written) == ["shared/1-1-0.data", "shared/2-1-0.data"] * 3
    assert read_segment(worker.store, "job", written[4].entries[0]).batch["n"].to_pylist() == [5] * 1_000


def test_where_whole_files_are_copied_each_has_its_own(tmp_path: Path) -> None:
    worker = _Worker(tmp_path, continued=0)
    assert files(*map(worker.checkpoint, (1, 2))) == ["shared/1-1-0.data", "shared/2-1-0.data"]
    worker.service.close([])


def test_after_a_failure_a_new_file_begins_and_the_old_one_is_whole(tmp_path: Path) -> None:
    worker = _Worker(tmp_path)
    first, failed, third = worker.checkpoint(1), worker.checkpoint(2, broken=True), worker.checkpoint(3)
    worker.service.close([])
    assert failed.error is not None
    assert files(first, third) == ["shared/1-1-0.data", "shared/3-1-0.data"]
    assert worker.store.list("job") == ["job/shared/1-1-0.data", "job/shared/3-1-0.data"]
    assert read_segment(worker.store, "job", first.entries[0]).batch["n"].to_pylist() == [1] * 1_000


def test_a_savepoint_in_between_has_files_of_its_own(tmp_path: Path) -> None:
    worker = _Worker(tmp_path)
    first, between, third = worker.checkpoint(1), worker.checkpoint(2, whole=False), worker.checkpoint(3)
    worker.service.close([])
    assert between.error is None
    assert between.files
    assert files(first, between, third) == ["shared/1-1-0.data"] * 2

"""Sinks of users' stream writers, driven by hand: one write between two barriers, one commit for all subtasks."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import cutwater as cw
from cutwater.connectors.base import PreCommit, SinkSnapshot
from cutwater.connectors.data_source import committer as committing
from cutwater.connectors.data_source import sink as writing
from cutwater.connectors.staging import Guard
from cutwater.errors import FencedError, SealError, UserCodeError
from cutwater.storage.store.seal import Seal
from data_source_world import Files, FilesWriter, logged, visible

SCHEMA = pa.schema({"id": pa.int64()})


@dataclass(frozen=True)
class Identity:
    subtask: int = 0
    parallelism: int = 2
    incarnation: int = 1
    job_uid: str = "c0ffee"
    step: str = "out"


def batch(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64())})


class World:
    """A sink with its folders."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.log = folder / "out", folder / "log"
        self.folder.mkdir()
        self.messages = folder / "chk/c0ffee"
        options = {"path": self.folder, "log": self.log, **options}
        self.sink = cw.data_source(Files, options=options).as_sink().bind(str(folder / "chk"))

    def writer(self, **identity: Any) -> Any:
        return self.sink.writer(SCHEMA, Identity(**identity), [])

    def driver(self, incarnation: int, restored: SinkSnapshot | None = None) -> Any:
        made = self.sink.committer(SCHEMA, "c0ffee", "out")
        made.settle(restored, [restored] if restored else [], incarnation)
        return made

    @property
    def ids(self) -> list[int]:
        return sorted(row["id"] for row in visible(self.folder))

    @property
    def calls(self) -> list[str]:
        return [" ".join(line.split()[:2]) for line in logged(self.log)]

    @property
    def kept(self) -> list[str]:
        return sorted(p.name for p in self.messages.iterdir()) if self.messages.exists() else []


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def cut(writer: Any, checkpoint_id: int, *ids: int) -> Callable[[], PreCommit]:
    if ids:
        writer.write(batch(*ids))
    return writer.pre_commit(checkpoint_id, False)


@pytest.mark.parametrize("arrow", [False, True])
def test_one_commit_for_all_subtasks(tmp_path: Path, arrow: bool) -> None:
    world = World(tmp_path, arrow=arrow)
    driver = world.driver(1)
    one, two = world.writer(subtask=0), world.writer(subtask=1)
    handles = cut(one, 5, 1, 2)().handles + cut(two, 5, 3)().handles
    assert world.ids == []
    driver.commit(5, handles)
    assert world.ids == [1, 2, 3]
    driver.commit(6, handles)  # they come again until the subtasks know
    assert cut(one, 6)().handles == cut(two, 6)().handles == []  # no rows: nothing to commit
    assert world.calls == ["commit 5"]
    assert world.kept == ["committed-0000000000000000005", "fence-0000000001"]
    driver.finish(1)
    assert not world.messages.exists()


def test_a_commit_of_several_checkpoints_is_one_call_for_each_in_order(world: World) -> None:
    driver, one, two = world.driver(1), world.writer(subtask=0), world.writer(subtask=1)
    parts = [cut(two, 4, 9)(), cut(one, 4, 1)(), cut(one, 5, 2)(), cut(two, 6, 3)()]
    driver.commit(6, [handle for part in reversed(parts) for handle in part.handles])
    assert world.calls == ["commit 4", "commit 5", "commit 6"]
    assert world.ids == [1, 2, 3, 9]


def test_rows_of_a_checkpoint_that_was_aborted_come_with_the_next(world: World) -> None:
    """Whether or not its snapshot was ever made; the snapshots of two may be made in any order."""
    driver, writer = world.driver(1), world.writer()
    cut(writer, 4, 1)
    fifth = cut(writer, 5, 2)
    sixth = cut(writer, 6, 3)
    handles = sixth().handles
    assert {h["checkpoint_id"] for h in fifth().handles} == {4, 5}
    driver.commit(6, handles)
    assert world.ids == [1, 2, 3]
    assert world.calls == ["commit 4", "commit 5", "commit 6"]
    assert cut(writer, 7, 4)().handles[0]["checkpoint_id"] == 7


def test_a_crash_between_commit_and_its_record(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, writer = world.driver(1), world.writer()
    handles = cut(writer, 5, 1, 2)().handles
    with monkeypatch.context() as patch:
        patch.setattr(committing.Messages, "note_committed", lambda self, id: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            driver.commit(5, handles)
    world.driver(2, SinkSnapshot(5, handles))
    world.driver(3, SinkSnapshot(5, handles))
    assert world.ids == [1, 2]
    lines = logged(world.log)
    assert lines == [lines[0]] * 2, "the same batch id with the same messages, once more and not again"


def test_what_is_given_up_is_aborted(world: World) -> None:
    world.driver(1)
    one, two = world.writer(subtask=0), world.writer(subtask=1)
    fifth = cut(one, 5, 1)().handles + cut(two, 5, 2)().handles
    cut(one, 6, 3)()  # checkpoint 6 never completes
    cut(two, 6, 4)()
    cut(one, 7, 5)()
    driver = world.driver(2, SinkSnapshot(5, fifth))
    assert world.calls == ["commit 5", "abort 6", "abort 7"]
    assert world.ids == [1, 2]
    assert not [p for p in world.folder.iterdir() if p.name.startswith("_")]
    cut(one, 8, 6)()  # a lost worker that lives on
    assert cut(world.writer(incarnation=2), 9, 7)().handles
    world.driver(3, None)
    assert world.calls[3:] == ["abort 8", "abort 9"]
    driver = world.driver(4, SinkSnapshot(10, cut(world.writer(incarnation=3), 10, 8)().handles))
    cut(one, 11, 9)()
    driver.finish(4)
    assert world.calls[5:] == ["commit 10", "abort 11"]
    assert world.ids == [1, 2, 8]


def test_an_abort_that_fails_is_a_warning(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cut(world.writer(), 5, 1)()
    monkeypatch.setattr(FilesWriter, "abort", lambda self, messages, id: 1 / 0)
    world.driver(2)
    assert r"abort() failed for batch 5" in caplog.text
    assert world.kept == ["fence-0000000002"]


def test_an_older_driver_commits_nothing_more(world: World) -> None:
    old, writer = world.driver(1), world.writer()
    handles = cut(writer, 5, 1)().handles
    new = world.driver(2, SinkSnapshot(5, handles))
    later = cut(writer, 6, 2)().handles
    with pytest.raises(FencedError, match="attempt 2 of the job commits to Files already, this is 1"):
        old.commit(6, later)
    with pytest.raises(FencedError):
        old.settle(SinkSnapshot(6, later), [], 1)
    new.commit(7, cut(world.writer(incarnation=2), 7, 3)().handles)
    assert world.ids == [1, 3]


def test_planted_no_fence(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committing.GlobalCommitter, "_check_fence", lambda self, incarnation: None)
    with pytest.raises(pytest.fail.Exception):
        test_an_older_driver_commits_nothing_more(world)


def test_planted_a_writer_that_forgets_what_was_not_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = writing.DataSourceWriter.pre_commit

    def pre_commit(self: Any, checkpoint_id: int, final: bool) -> Any:
        self._told = []
        return real(self, checkpoint_id, final)

    monkeypatch.setattr(writing.DataSourceWriter, "pre_commit", pre_commit)
    with pytest.raises(AssertionError):
        test_rows_of_a_checkpoint_that_was_aborted_come_with_the_next(world)


def test_planted_commits_are_not_remembered(world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(committing.Messages, "committed", property(lambda self: 0))
    with pytest.raises(AssertionError):
        test_a_crash_between_commit_and_its_record(world, monkeypatch)


def test_handles_of_another_job_are_left_alone(world: World) -> None:
    driver = world.driver(1)
    other = cut(world.writer(job_uid="beef"), 5, 1)().handles
    driver.commit(5, other)
    world.driver(9)
    assert world.calls == []
    assert world.ids == []


def test_a_write_that_fails_is_told_at_the_next_row_or_barrier(tmp_path: Path) -> None:
    world = World(tmp_path, fail=7)
    writer = world.writer()
    snapshot = cut(writer, 5, 6, 7)
    with pytest.raises(UserCodeError, match=r"(?s)Files: write\(\) failed on the rows of subtask 0.*is cursed"):
        snapshot()
    with pytest.raises(UserCodeError, match="is cursed"):  # the next checkpoint must not leave these rows out
        cut(writer, 6, 8)()
    writer = world.writer()
    writer.write(batch(7))
    deadline = time.monotonic() + 10
    with pytest.raises(UserCodeError, match="is cursed"):
        while time.monotonic() < deadline:
            writer.write(batch(8))


def test_planted_a_failed_write_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    test_planted_a_writer_that_forgets_what_was_not_told(World(tmp_path), monkeypatch)
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(pytest.fail.Exception):
        test_a_write_that_fails_is_told_at_the_next_row_or_barrier(other)


def test_memory_holds_a_few_batches(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that is slower than its rows holds the subtask up."""
    import threading

    go, blocked = threading.Event(), threading.Event()
    real = FilesWriter.write
    monkeypatch.setattr(FilesWriter, "write", lambda self, rows: (go.wait(20), real(self, rows))[1])
    writer, written = world.writer(), [0]

    def write_all() -> None:
        for n in range(50):
            if n == 4:
                blocked.set()
            writer.write(batch(n))
            written[0] += 1

    thread = threading.Thread(target=write_all)
    thread.start()
    blocked.wait(10)
    time.sleep(0.1)
    assert written[0] == 4
    go.set()
    thread.join(20)
    handles = cut(writer, 5)().handles
    assert handles[0]["rows"] == 50
    world.driver(1).commit(5, handles)
    assert world.ids == list(range(50))


class Ignores(FilesWriter):
    def write(self, iterator: Any) -> Any:
        return super().write(iter([next(iterator)]))


class WrongMessage(FilesWriter):
    def write(self, iterator: Any) -> Any:
        return list(iterator)


def test_a_writer_that_wants_no_more_rows_and_one_that_returns_no_message(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Files, "streamWriter", lambda self, schema, overwrite: Ignores(self.options, schema))
    writer = world.writer()
    for n in range(20):
        writer.write(batch(n))
    assert len(cut(writer, 5)().handles) == 1
    monkeypatch.setattr(Files, "streamWriter", lambda self, schema, overwrite: WrongMessage(self.options, schema))
    with pytest.raises(UserCodeError, match=r"write\(\) returned a list, no WriterCommitMessage"):
        cut(world.writer(), 5, 1)()


def test_a_subtask_that_ends_lets_its_write_fail(world: World) -> None:
    writer = world.writer()
    writer.write(batch(1))
    thread = writer._writing._thread
    writer.close()
    thread.join(10)
    assert not thread.is_alive()
    assert world.kept == []


def test_with_a_key_messages_are_sealed(tmp_path: Path) -> None:
    world = World(tmp_path)
    plain, world.sink = world.sink, world.sink.guarded(Guard(Seal([b"a key of this test"])))
    cut(world.writer(), 5, 1)()
    world.sink = plain
    with pytest.raises(SealError, match="no key was given"):
        world.driver(2)

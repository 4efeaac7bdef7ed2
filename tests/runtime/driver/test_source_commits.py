"""Sources that are told which checkpoints are retained: when, by whom, and what becomes of their errors."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

import cutwater as cw
from cutwater.connectors.base import SourceSnapshot
from cutwater.connectors.generate import RateSource
from cutwater.errors import StorageError
from cutwater.plan.planner import make_plan
from cutwater.runtime.driver import source_commits
from cutwater.runtime.driver.source_commits import SourceCommits
from cutwater.storage.snapshot.manifest import Manifest, SplitRecord, SubtaskRecord


class Queue:
    """Keeps rows until it is told; ``let`` lets it hear of it."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.entered, self.let = threading.Semaphore(0), threading.Semaphore(0)
        self.error: Exception | None = None

    def settle(self, retained: Sequence[SourceSnapshot], incarnation: int) -> None:
        self._hear("settle", [each.checkpoint_id for each in retained], incarnation)

    def retain(self, retained: Sequence[SourceSnapshot]) -> None:
        self.entered.release()
        assert self.let.acquire(timeout=10)
        self._hear("retain", [(each.checkpoint_id, each.positions["0"]) for each in retained])

    def finish(self, final: SourceSnapshot | None, incarnation: int) -> None:
        self._hear("finish", None if final is None else (final.checkpoint_id, final.positions["0"]), incarnation)

    def close(self) -> None:
        self._hear("close")

    def _hear(self, *what: Any) -> None:
        if self.error is not None:
            raise self.error
        self.told.append(what)


class Source(RateSource):
    """Of which only the committer matters."""

    queue: ClassVar[Queue]

    def committer(self, job_uid: str, step: str) -> Queue:
        assert (job_uid, step) == ("uid", "in")
        return self.queue


@pytest.fixture
def queue() -> Queue:
    return Queue()


@pytest.fixture
def commits(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(Source, "queue", queue, raising=False)
    flow = cw.Dataflow("job")
    flow.read("in", Source()).collect("out")
    made = SourceCommits(make_plan(flow, 1, 128), "uid")
    yield made
    queue.let.release(20)
    made.close()


def manifest(checkpoint_id: int) -> Manifest:
    record = SubtaskRecord(0, 0, 1, "aligned", splits={"in": [SplitRecord("0", position=10 * checkpoint_id)]})
    return Manifest("job", "uid", checkpoint_id, 1, "aligned", 128, 1, 0, 0, [], [record], [])


def retain(commits: SourceCommits, *ids: int) -> list[str]:
    commits.published(manifest(ids[-1]))
    return commits.retain(ids)


def test_the_newest_state_takes_the_place_of_what_waits(commits: SourceCommits, queue: Queue) -> None:
    assert commits.settle([manifest(1), manifest(2)], 7) == []
    assert retain(commits, 1, 2, 3) == []
    assert queue.entered.acquire(timeout=10)
    retain(commits, 2, 3, 4)
    retain(commits, 3, 4, 5)
    queue.let.release(2)
    assert queue.entered.acquire(timeout=10)
    assert commits.close() == []
    assert queue.told == [
        ("settle", [1, 2], 7),
        ("retain", [(1, 10), (2, 20), (3, 30)]),
        ("retain", [(3, 30), (4, 40), (5, 50)]),
        ("close",),
    ]


def test_what_is_due_is_said_before_the_driver_ends(commits: SourceCommits, queue: Queue) -> None:
    retain(commits, 1)
    queue.let.release(2)
    commits.close()
    commits.close()
    assert queue.told == [("retain", [(1, 10)]), ("close",)]


def test_a_finished_job_names_its_last_checkpoint_and_says_nothing_behind_it(
    commits: SourceCommits, queue: Queue
) -> None:
    retain(commits, 1)
    assert queue.entered.acquire(timeout=10)
    retain(commits, 1, 2)
    commits.published(manifest(3))
    queue.let.release(10)
    assert commits.finish(4) == []
    retain(commits, 2, 3)
    commits.close()
    assert queue.told == [("retain", [(1, 10)]), ("finish", (3, 30), 4), ("close",)]


def test_no_checkpoint_to_be_had(commits: SourceCommits, queue: Queue) -> None:
    commits.finish(4)
    assert queue.told == [("finish", None, 4)]


def test_errors_are_warnings_and_the_next_state_is_told(commits: SourceCommits, queue: Queue) -> None:
    queue.error = StorageError("it is away")
    assert commits.settle([manifest(1)], 1) == ["what older attempts left for step 'in' stays for now: it is away"]
    retain(commits, 1, 2)
    queue.let.release()
    deadline, warnings = time.monotonic() + 10, commits.retain([1, 2])
    while not warnings:
        assert time.monotonic() < deadline
        warnings = commits.retain([1, 2])
    assert warnings == ["step 'in': it is away"]
    queue.error = None
    retain(commits, 1, 2, 3)
    queue.let.release()
    commits.close()
    assert queue.told == [("retain", [(1, 10), (2, 20), (3, 30)]), ("close",)]


def test_a_system_that_does_not_answer_does_not_hold_the_end_up(
    commits: SourceCommits, queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_commits, "_END_S", 0.05)
    retain(commits, 1)
    commits.close()
    assert queue.told == [("close",)]

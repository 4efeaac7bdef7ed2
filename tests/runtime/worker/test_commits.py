"""Commits in the background: in order, one at a time, none after an end, and nothing lost while one takes long."""

from __future__ import annotations

import threading
from typing import Any

import pyarrow as pa
import pytest

from cutwater.connectors.base import Json, PreCommit
from cutwater.errors import FencedError, StorageError
from cutwater.runtime.chains.chain import SinkIdentity, SinkOperator
from cutwater.runtime.worker.commits import CommitEnded, CommitService

WAIT_S = 20.0
SCHEMA = pa.schema([("n", pa.int64())])


class Slow:
    """A sink, its writer and its committer: a commit lasts until it is let go, or fails."""

    guarantee, parallelism = "exactly-once", None
    commits_in_background = True

    def __init__(self) -> None:
        self.done: list[tuple[int, list[Json]]] = []
        self.threads: set[str] = set()
        self.began, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.fails: Exception | None = None

    def check(self, schema: pa.Schema) -> None: ...

    def writer(self, schema: pa.Schema, ctx: object, restored: list[Json]) -> Any:
        return self

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> Any:
        return self

    def pre_commit(self, checkpoint_id: int, final: bool) -> Any:
        return lambda: PreCommit([checkpoint_id])

    def commit(self, checkpoint_id: int, handles: list[Json]) -> None:
        self.threads.add(threading.current_thread().name)
        self.began.release()
        assert self.may_end.acquire(timeout=WAIT_S)
        if self.fails is not None:
            raise self.fails
        self.done.append((checkpoint_id, handles))


class World:
    """A service with one sink, whose outcomes are gathered."""

    def __init__(self) -> None:
        self.slow = Slow()
        self.sink = SinkOperator("out", self.slow, SCHEMA, SinkIdentity("uid", "out", 0, 1, 1), [])  # type: ignore[arg-type]
        self.ended: list[CommitEnded] = []
        self._told, self._heard = threading.Semaphore(0), 0
        self.service = CommitService(self._end)

    def _end(self, ended: CommitEnded) -> None:
        self.ended.append(ended)
        self._told.release()

    def snapshot(self, checkpoint_id: int) -> list[Json]:
        made = self.sink.pre_commit(checkpoint_id, False, False)()
        return self.sink.pre_committed(checkpoint_id, made.handles)

    def submit(self, checkpoint_id: int) -> None:
        self.service.submit((1, 0), checkpoint_id, [self.sink])

    def under_way(self) -> None:
        """Returns when a commit has begun."""
        assert self.slow.began.acquire(timeout=WAIT_S)

    def hear(self, count: int = 1) -> None:
        """Let so many commits end, and hear of them as the loop does."""
        for _ in range(count):
            self.slow.may_end.release()
            assert self._told.acquire(timeout=WAIT_S)
            self.service.heard(self.ended[self._heard])
            self._heard += 1


def test_a_checkpoint_holds_what_is_being_committed_until_it_is():
    """If the worker dies in the middle, that checkpoint is what the job goes back to."""
    world = World()
    assert world.snapshot(1) == [1]
    world.submit(1)
    world.under_way()
    assert world.snapshot(2) == [1, 2]
    world.hear()
    assert world.snapshot(3) == [2, 3]
    world.submit(3)
    world.slow.may_end.release()  # the second was aborted, or its notice overtaken: it is committed with the third
    world.hear()
    assert world.slow.done == [(1, [1]), (2, [2]), (3, [3])]
    world.service.close()


def test_commits_are_done_in_order_and_by_one_thread_and_an_answer_waits_behind_them():
    world = World()
    for checkpoint_id in (1, 2, 3):
        world.snapshot(checkpoint_id)
        world.submit(checkpoint_id)
    world.service.answer(3)
    assert world.service.busy
    world.hear(3)
    assert world._told.acquire(timeout=WAIT_S)
    assert [(e.key, e.checkpoint_id) for e in world.ended] == [((1, 0), 1), ((1, 0), 2), ((1, 0), 3), (None, 3)]
    assert [id for id, _ in world.slow.done] == [1, 2, 3]
    assert len(world.slow.threads) == 1
    assert not world.service.busy
    world.service.close()


def test_an_end_waits_for_the_commit_under_way_and_does_no_other():
    world = World()
    for checkpoint_id in (1, 2):
        world.snapshot(checkpoint_id)
        world.submit(checkpoint_id)
    world.under_way()
    closing = threading.Thread(target=world.service.close)
    closing.start()
    assert closing.is_alive()
    world.slow.may_end.release(2)
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert world.slow.done == [(1, [1])]


def test_a_stop_does_what_was_handed_over_before_it():
    world = World()
    for checkpoint_id in (1, 2):
        world.snapshot(checkpoint_id)
        world.submit(checkpoint_id)
    world.slow.may_end.release(2)
    world.service.finish()
    world.service.close()
    assert world.slow.done == [(1, [1]), (2, [2])]


@pytest.mark.parametrize(
    ("fails", "kind", "told"),
    [
        (StorageError("no answer", hint="wait"), StorageError, "step 'out': no answer"),
        (FencedError("another one"), FencedError, "step 'out': another one"),
        (ConnectionResetError("gone"), StorageError, "checkpoint 1: the sink could not commit: ConnectionResetError"),
    ],
    ids=["storage", "fenced", "of a library"],
)
def test_after_a_commit_that_failed_there_is_none_and_the_step_is_named(
    fails: Exception, kind: type[Exception], told: str
) -> None:
    world = World()
    world.slow.fails = fails
    for checkpoint_id in (1, 2):
        world.snapshot(checkpoint_id)
        world.submit(checkpoint_id)
    world.service.answer(2)
    world.under_way()
    with pytest.raises(kind, match="step 'out'") as raised:
        world.hear()
    assert told in str(raised.value)
    assert type(raised.value) is kind
    world.slow.may_end.release(9)
    world.service.close()
    assert (world.slow.done, len(world.ended)) == ([], 1), "the second was committed, or answered"
    assert world.snapshot(3) == [1, 2, 3]


def test_commits_that_take_longer_than_checkpoints_hold_the_rows_up():
    world = World()
    behind: list[bool] = []
    for checkpoint_id in range(1, 7):
        world.snapshot(checkpoint_id)
        world.submit(checkpoint_id)
        behind.append(world.service.behind)
    assert behind == [False] * 4 + [True] * 2
    world.hear(2)
    assert not world.service.behind
    world.slow.may_end.release(9)
    world.service.close()

"""The thread that commits for all subtasks: in order, one at a time, the newest of what waits."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from cutwater.errors import CutwaterError, StorageError, UserCodeError
from cutwater.runtime.driver import global_commits
from cutwater.runtime.driver.global_commits import GlobalCommits


class Table:
    """Commits when it is let; ``entered`` is released by each that begins."""

    takes_back = True

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[Any]]] = []
        self.entered, self.let = threading.Semaphore(0), threading.Semaphore(0)
        self.error: Exception | None = None

    def commit(self, checkpoint_id: int, handles: list[Any]) -> None:
        self.entered.release()
        assert self.let.acquire(timeout=10)
        if self.error is not None:
            raise self.error
        self.seen.append((checkpoint_id, handles))


class World:
    def __init__(self) -> None:
        self.errors: list[CutwaterError] = []
        self.done: list[int] = []
        self.table: Any = Table()
        self.commits = GlobalCommits(self.errors.append)

    def submit(self, checkpoint_id: int) -> None:
        work = {"out": (self.table, [checkpoint_id])}
        self.commits.submit(checkpoint_id, work, lambda: self.done.append(checkpoint_id))

    def let(self, commits: int = 1) -> None:
        for _ in range(commits):
            self.table.let.release()


@pytest.fixture
def world() -> Any:
    made = World()
    yield made
    made.let(10)
    made.commits.close(perform=False)


def test_the_newest_takes_the_place_of_what_waits_and_all_hear_of_it(world: World) -> None:
    world.submit(1)
    assert world.table.entered.acquire(timeout=10)
    world.submit(2)
    world.submit(3)
    assert world.done == []
    world.let(2)
    world.commits.close()
    assert world.table.seen == [(1, [1]), (3, [3])]
    assert world.done == [1, 2, 3]


def test_halt_forgets_what_waits_and_waits_for_what_is_under_way(world: World) -> None:
    world.submit(1)
    assert world.table.entered.acquire(timeout=10)
    world.submit(2)
    threading.Timer(0.1, world.let).start()
    world.commits.halt()
    assert world.table.seen == [(1, [1])]
    world.submit(5)  # it goes on
    world.let()
    world.commits.close()
    assert [checkpoint_id for checkpoint_id, _ in world.table.seen] == [1, 5]


def test_halt_does_not_wait_for_ever(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_commits, "_PATIENCE_S", 0.05)
    world.submit(1)
    assert world.table.entered.acquire(timeout=10)
    with pytest.raises(StorageError, match="a commit has not ended"):
        world.commits.halt()


@pytest.mark.parametrize(
    ("error", "kind"), [(StorageError("full"), StorageError), (ValueError("bad\nworse"), UserCodeError)], ids=str
)
def test_a_failure_is_told_once_with_its_step_and_nobody_is_told_that_it_is_done(
    world: World, error: Exception, kind: type[CutwaterError]
) -> None:
    world.table.error = error
    world.submit(1)
    assert world.table.entered.acquire(timeout=10)
    world.submit(2)
    world.let(2)
    world.commits.close()
    (told,) = world.errors
    assert isinstance(told, kind)
    assert told.step == "out"
    assert world.done == []


def test_close_performs_what_is_due_unless_told_otherwise(world: World) -> None:
    world.submit(1)
    assert world.table.entered.acquire(timeout=10)
    world.submit(2)
    threading.Timer(0.1, world.let).start()
    world.commits.close(perform=False)
    assert world.done == [1]


def test_close_without_work_is_nothing(world: World) -> None:
    world.commits.close()

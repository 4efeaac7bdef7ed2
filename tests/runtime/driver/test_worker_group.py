"""What the driver knows of the workers of its group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cutwater.runtime.control import messages as c
from cutwater.runtime.control.links import WorkerLink
from cutwater.runtime.driver.worker_group import WorkerGroup


class Link:
    """A worker's connection that goes nowhere."""

    where = WorkerLink.where

    def send(self, message: object) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def group() -> WorkerGroup:
    nobody: Any = SimpleNamespace(joined=lambda hello: None, left=lambda slot: None)
    return WorkerGroup(2, nobody, nobody, nobody, nobody)


def join(group: WorkerGroup, slot: int, pid: int, host: str) -> tuple[Any, Any]:
    link: Any = Link()
    return link, group.joined(link, c.Hello(slot, pid, host, (host, 5000)))


def test_whoever_is_replaced_or_lost_is_told_with_host_and_process(group: WorkerGroup) -> None:
    old, joined = join(group, 1, 41, "node7")
    assert joined.replaced == ""
    new, joined = join(group, 1, 42, "node8")
    assert joined.replaced == "on host node7 (pid 41)"
    assert group.lost(old, "late news") is None
    lost = group.lost(new, "the connection was closed")
    assert lost is not None
    assert (lost.slot, lost.where) == (1, "on host node8 (pid 42)")


def test_a_worker_that_leaves_with_a_smaller_group_is_told_with_host_and_process(group: WorkerGroup) -> None:
    group._submitted[1] = 1
    join(group, 1, 42, "node8")
    assert [left.where for left in group.resize(1, "the job goes on without it")] == ["on host node8 (pid 42)"]

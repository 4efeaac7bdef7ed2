"""W2: the processing time of a job never falls, neither by a clock that is set back nor over a restore."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from cutwater.operators.base import Operator, Outputs
from cutwater.plan.graph import PhysicalPlan
from cutwater.runtime.chains import chain as clock_module
from cutwater.runtime.chains.chain import Chain, Node, ProcessingClock
from cutwater.runtime.worker.restore import Restore
from cutwater.storage.snapshot.manifest import Manifest, SubtaskRecord


def test_w2_a_clock_that_is_set_back_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    wall_ms = iter([1_000, 1_001, 500, 1_001, 1_002])
    monkeypatch.setattr(clock_module, "time", SimpleNamespace(time_ns=lambda: next(wall_ms) * 1_000_000))
    clock = ProcessingClock()
    assert [clock.now_ms() for _ in range(5)] == [1_000, 1_001, 1_001, 1_001, 1_002]


def test_w2_after_a_restore_the_clock_goes_on_where_the_latest_subtask_was() -> None:
    subtasks = [SubtaskRecord(0, i, 1, "aligned", processing_time_ms=ms) for i, ms in enumerate((5, 2**60, 7))]
    manifest = Manifest("job", "uid", 1, 1, "aligned", 128, 3, 0, 0, [], subtasks, [])
    store, plan = cast(Any, None), cast(PhysicalPlan, None)
    for same_shape in (True, False):
        floor_ms = Restore(store, "job", manifest, same_shape, plan).processing_time_ms
        assert ProcessingClock(floor_ms).now_ms() == 2**60
    assert Restore(store, "job", None, True, plan).processing_time_ms == 0


class Waits(Operator):
    """Is due at some times, and notes when it was called."""

    def __init__(self, name: str, *due_ms: int) -> None:
        self.name, self.due_ms = name, list(due_ms)
        self.called: list[tuple[str, int]] = []

    @property
    def next_processing_time_ms(self) -> int | None:
        return min(self.due_ms, default=None)

    def on_processing_time(self, now_ms: int) -> Outputs:
        self.due_ms.remove(min(self.due_ms))
        self.called.append((self.name, now_ms))
        return []


def test_in_a_chain_the_operator_that_waited_longest_is_called_first() -> None:
    calls: list[tuple[str, int]] = []
    operators = [Operator(), Waits("a", 20, 40), Waits("b", 30, 10)]
    for operator in operators[1:]:
        cast(Waits, operator).called = calls
    chain = Chain([Node((str(i),), operator, [[]]) for i, operator in enumerate(operators)], [])
    due: list[int | None] = []
    for _ in range(4):
        due.append(chain.next_processing_time_ms)
        chain.on_processing_time(35)
    assert due == [10, 20, 30, 40]
    assert calls == [("b", 35), ("a", 35), ("b", 35)], "what is not due is not called"
    assert Chain([Node(("0",), Operator(), [[]])], []).next_processing_time_ms is None

"""What a driver restores while a part of its job runs on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cutwater as cw
from cutwater.config import JobConfig
from cutwater.connectors.staging import piece_name
from cutwater.errors import FencedError
from cutwater.plan.planner import make_plan, replan
from cutwater.runtime.driver.publisher import Publisher
from cutwater.storage.store.local import LocalStore


def test_a_driver_that_is_replaced_while_it_takes_a_part_back_restores_nothing_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped behind its log entry: the newest checkpoint is no cut with what still runs in its workers."""
    flow = cw.Dataflow("part")
    flow.read("in", cw.memory(schema="row long")).write("out", cw.files(str(tmp_path / "out")))
    plan, config, store = make_plan(flow, 2, 128), JobConfig(parallelism=2), LocalStore.open(tmp_path / "chk")
    stopped, other = Publisher(store, plan, config), Publisher(store, plan, config)
    stopped.begin_attempt(1)
    begin = stopped.begin_attempt

    def begin_and_stop(attempt: int, **options: Any) -> None:
        begin(attempt, **options)
        other.begin_attempt(attempt + 1)

    monkeypatch.setattr(stopped, "begin_attempt", begin_and_stop)
    with pytest.raises(FencedError, match="attempt 2 of job 'part' was superseded by attempt 3"):
        stopped.restore_subtasks(2, frozenset({(0, 0)}))


@pytest.mark.parametrize(
    ("before", "now", "members", "left"),
    [(1, 3, {1}, {0, 2}), (2, 3, {0, 1}, {2}), (3, 1, {0}, set())],
    ids=str,
)
def test_r2_after_a_rescale_rows_of_subtasks_that_run_on_stay_theirs(
    tmp_path: Path, before: int, now: int, members: set[int], left: set[int]
) -> None:
    """Whether those that go back are all of a sink's subtasks depends on the parallelism of today."""
    flow = cw.Dataflow("part")
    flow.read("in", cw.memory(schema="row long")).write("out", cw.files(str(tmp_path / "out")))
    plan = make_plan(flow, before, 128)
    publisher = Publisher(LocalStore.open(tmp_path / "chk"), plan, JobConfig(parallelism=before))
    publisher.begin_attempt(1)
    publisher.settle_sinks(None)
    publisher.plan = replan(plan, now)
    publisher.begin_attempt(2)
    publisher.settle_sinks(None)
    staging = tmp_path / "out" / "_cutwater" / publisher.uid / "out"
    staging.mkdir(parents=True)
    rows = {piece_name(subtask, 2, 0, ".arrows"): subtask for subtask in range(3)}
    for name in rows:
        (staging / name).touch()
    publisher.restore_subtasks(3, frozenset((0, subtask) for subtask in members))
    assert {rows[path.name] for path in staging.iterdir()} == left

"""``recovery="task"``: only the dead worker goes back; the others keep process, state and connections."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from fake_host import FakeSpark
from runtime_world import assert_running_counts, wait_until
from scope_world import (
    ROWS,
    StartJob,
    after_checkpoints,
    end,
    kill,
    one_reader,
    weather,
)


@pytest.mark.parametrize("slot", [1, pytest.param(0, marks=pytest.mark.full)])
def test_r4_the_survivor_keeps_its_process_and_what_it_counted(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark, slot: int
) -> None:
    job = start(one_reader("chain", tmp_path), recovery="task", parallelism=2)
    after_checkpoints(job, 2)
    survivor = job.status.workers[1 - slot].pid
    kill(job, slot)
    after_checkpoints(job, 2)
    assert job.status.workers[1 - slot].pid == survivor
    end(job, tmp_path)
    assert ["1 of 2 workers go back" in f.reason for f in job.status.failures] == [True]
    assert_running_counts(tmp_path / "out", ROWS)


def test_r4_who_survived_goes_on_while_nobody_is_there_for_the_lost_one(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark
) -> None:
    """The reader sends to both counters: a channel that leads nowhere does not keep the other from its rows."""
    few = {"batch_rows": 200, "channel_frames": 2}
    job = start(one_reader("goes-on", tmp_path, rate=2_500), recovery="task", parallelism=2, **few)
    after_checkpoints(job, 1)
    come = tmp_path / "come"

    def held_back(args: Any) -> None:
        while not come.exists():
            time.sleep(0.01)

    fake_spark.prepare = held_back
    kill(job, 1)
    read, counted = (job.status.steps[step].rows_out for step in ("in", "count"))
    assert read < ROWS // 2, "there is enough to go on with"
    wait_until(lambda: job.status.steps["in"].rows_out > read + 5_000, "rows that go on", job=job)
    wait_until(lambda: job.status.steps["count"].rows_out > counted + 2_000, "results that go on", job=job)
    assert job.status.checkpoints.waits_for == [1]
    come.touch()
    after_checkpoints(job, 2)
    end(job, tmp_path)
    assert ["1 of 2 workers go back" in f.reason for f in job.status.failures] == [True]
    assert_running_counts(tmp_path / "out", ROWS)


def never_there(args: Any) -> None:
    """Planted: a replacement does not see the end of what it has to do once more."""
    from cutwater.runtime.worker.attempt import Attempt

    Attempt.following = property(lambda self: True)  # type: ignore[method-assign, assignment]


def test_r4_a_replacement_that_never_catches_up_makes_everything_go_back(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark
) -> None:
    """No checkpoint can begin meanwhile, and the user can see whom they wait for."""
    fake_spark.prepare = never_there
    job = start(one_reader("late", tmp_path), recovery="task", parallelism=2, catch_up_timeout="1500ms")
    after_checkpoints(job, 2)
    kill(job, 1)
    wait_until(lambda: job.status.checkpoints.waits_for == [1], "a status that says so", job=job)
    known = job.status.checkpoints.completed
    wait_until(lambda: job.status.restarts > 1 or not job.is_active, "the end of patience", job=job)
    assert "worker 1 did not catch up with the others within 1.5 s" in job.status.failures[1].reason
    after_checkpoints(job, 2)
    assert job.status.checkpoints.completed > known
    assert job.status.checkpoints.waits_for == []
    end(job, tmp_path)
    assert job.status.restarts == 2
    assert_running_counts(tmp_path / "out", ROWS)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 6))])
@pytest.mark.parametrize(
    "protocol",
    [
        "aligned",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("unaligned", "chandy_lamport", "synchronous")),
    ],
)
def test_r4_what_depends_on_an_order_comes_out_in_one(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark, protocol: str, seed: int
) -> None:
    kills = 4 if seed > 1 else 2
    weather(tmp_path / "run", start, fake_spark, "task", protocol, seed, kills)

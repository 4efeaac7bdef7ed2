"""``recovery="upstream"``: what failed goes back with all that it gets its rows from; what stands behind runs on."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from fake_host import FakeSpark
from runtime_world import assert_running_counts, query, wait_until
from scope_world import (
    ROWS,
    StartJob,
    after_checkpoints,
    end,
    kill,
    one_reader,
    weather,
)

from cutwater.api.jobs.job import Job

HELD = ROWS * 9 // 10 // 64 * 64
"""So many rows come before the gate."""


def all_but_the_last(job: Job) -> None:
    """Everything before the gate was counted, and is in a checkpoint."""

    def there() -> bool:
        counted = job.status.steps.get("count")
        return counted is not None and counted.rows_in == HELD

    wait_until(there, "the rows before the gate", job=job)
    after_checkpoints(job, 2)


def written_by(out: Path, subtask: int) -> int:
    """Rows that a subtask wrote: it counted them."""
    return int(query(f"SELECT count(*) FROM '{out}/*-out-{subtask:05}-*.parquet'")[0][0])


@pytest.mark.parametrize("slot", [1, pytest.param(0, marks=pytest.mark.full)])
def test_r3_what_stands_behind_keeps_its_state_also_in_a_worker_that_goes_back_in_part(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark, slot: int
) -> None:
    """The reader lives in slot 0: with slot 1 it goes back there, beside a counter that does not."""
    job = start(one_reader("chain", tmp_path, rate=None), recovery="upstream", parallelism=2)
    all_but_the_last(job)
    survivor = job.status.workers[1 - slot].pid
    kill(job, slot)
    after_checkpoints(job, 2)
    assert job.status.workers[1 - slot].pid == survivor
    end(job, tmp_path)
    status = job.status
    assert ["2 of 3 subtasks go back" in f.reason for f in status.failures] == [True]
    assert status.checkpoints.restored_id == status.failures[0].restored_id > 0
    assert_running_counts(tmp_path / "out", ROWS)
    counted = status.steps["count"].rows_in  # of one that goes back, only what comes after the checkpoint
    assert written_by(tmp_path / "out", 1 - slot) <= counted < ROWS
    assert status.steps["in"].rows_out == ROWS - HELD


def failing_reader(folder: Path) -> Callable[[Any], None]:
    """Planted: reading raises, once and when it is told to."""

    def prepare(args: Any) -> None:
        from cutwater.connectors.generate import RateSource
        from cutwater.runtime.chains.source_runner import SourceRunner

        read = SourceRunner.read

        def failing(self: SourceRunner, max_rows: int, now_s: float) -> Any:
            if isinstance(self.source, RateSource) and os.path.exists(folder / "fail"):
                os.remove(folder / "fail")
                raise ValueError("planted")
            return read(self, max_rows, now_s)

        SourceRunner.read = failing

    return prepare


def test_r3_an_error_takes_down_what_stands_before_and_no_worker(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark
) -> None:
    fake_spark.prepare = failing_reader(tmp_path)
    job = start(one_reader("chain", tmp_path, rate=None), recovery="upstream", parallelism=2)
    all_but_the_last(job)
    pids = [w.pid for w in job.status.workers]
    (tmp_path / "fail").touch()
    wait_until(lambda: job.status.restarts, "a restart", job=job)
    after_checkpoints(job, 2)
    assert [w.pid for w in job.status.workers] == pids
    end(job, tmp_path)
    assert ["planted" in f.reason and "1 of 3 subtasks go back" in f.reason for f in job.status.failures] == [True]
    assert_running_counts(tmp_path / "out", ROWS)
    assert job.status.steps["count"].rows_in == ROWS  # each row was taken once


def late(folder: Path) -> Callable[[Any], None]:
    """A worker begins only when it may."""

    def prepare(args: Any) -> None:
        from runtime_world import wait_until

        wait_until(lambda: not os.path.exists(folder / "late"), "that it may begin")

    return prepare


def test_what_is_asked_for_while_a_part_goes_back_is_taken_when_it_is_there_again(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark
) -> None:
    fake_spark.prepare = late(tmp_path)
    job = start(one_reader("asked", tmp_path), recovery="upstream", parallelism=2)
    after_checkpoints(job, 1)
    (tmp_path / "late").touch()
    kill(job, 1)
    with ThreadPoolExecutor(2) as users:
        checkpoint, savepoint = users.submit(job.checkpoint), users.submit(job.savepoint, tmp_path / "save")
        checkpoints = job._coordinator.driver.core.checkpoints
        wait_until(lambda: checkpoints is not None and len(checkpoints._held) == 2, "the requests", job=job)
        newest = job.status.checkpoints.last_completed_id
        (tmp_path / "late").unlink()
        assert checkpoint.result(60) > newest
        assert os.path.isdir(savepoint.result(60))
    end(job, tmp_path)
    assert ["2 of 3 subtasks go back" in f.reason for f in job.status.failures] == [True]
    assert_running_counts(tmp_path / "out", ROWS)


@pytest.mark.parametrize(
    ("protocol", "seed"),
    [
        ("unaligned", 1),
        *(
            pytest.param(protocol, seed, marks=pytest.mark.full)
            for protocol in ("aligned", "unaligned", "chandy_lamport", "synchronous")
            for seed in range(2, 6)
        ),
    ],
)
def test_r3_what_depends_on_an_order_comes_out_in_one(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark, protocol: str, seed: int
) -> None:
    kills = 4 if seed > 1 else 2
    weather(tmp_path / "run", start, fake_spark, "upstream", protocol, seed, kills)


@pytest.mark.full
def test_r3_what_goes_back_is_another_part_after_a_rescale(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark
) -> None:
    job = start(one_reader("wider", tmp_path), recovery="upstream", parallelism=2)
    after_checkpoints(job, 1)
    job.rescale(3)
    after_checkpoints(job, 1)
    survivors = [w.pid for w in job.status.workers][:2]
    kill(job, 2)
    after_checkpoints(job, 2)
    assert [w.pid for w in job.status.workers][:2] == survivors
    end(job, tmp_path)
    assert ["2 of 4 subtasks go back" in f.reason for f in job.status.failures] == [True]
    assert_running_counts(tmp_path / "out", ROWS)

"""``recovery="region"``: what is not connected with a failure runs on with its state; nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import polars as pl
import pyarrow as pa
import pytest
from fake_host import FakeSpark
from runtime_world import assert_ids, assert_running_counts, gated, open_gate, wait_until

import cutwater as cw
from cutwater.api.jobs.job import Job

ROWS = 20_000
StartJob = Callable[..., Job]


def failing_once(folder: Path) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A user's function that raises once, when the file ``fail`` is there."""

    def check(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        if os.path.exists(folder / "fail") and not os.path.exists(folder / "failed"):
            (folder / "failed").touch()
            raise ValueError("planted")
        yield from batches

    return check


def two_pipelines(name: str, folder: Path) -> cw.Dataflow:
    """One that fails and one that knows nothing of it; the other one writes into ``well``."""
    flow = cw.Dataflow(name)
    for part in ("ill", "well"):
        rows = flow.read(f"{part}-in", gated(folder, ROWS)).with_columns(f"{part}-key", key=pl.col("value") % 97)
        if part == "ill":
            rows = rows.map_batches("fail", failing_once(folder), rows.schema)
        counts = rows.key_by("key").aggregate(
            f"{part}-count", n=cw.count(), total=cw.sum("value"), eid=cw.last("value")
        )
        counts.write(f"{part}-out", cw.files(str(folder / part), roll_rows=1_000))
    return flow


def after_checkpoints(job: Job, more: int) -> None:
    known = job.status.checkpoints.completed

    def there() -> bool:
        return job.status.checkpoints.completed >= known + more or not job.is_active

    wait_until(there, "checkpoints", 60.0, job=job)  # the first ones may wait for a compiler


def end(job: Job, folder: Path) -> None:
    open_gate(folder)
    assert job.await_termination(120), f"the job has not ended: {job.status}"
    assert job.exception() is None


@pytest.mark.parametrize("protocol", ["aligned", pytest.param("unaligned", marks=pytest.mark.full)])
def test_r2_a_pipeline_that_has_nothing_to_do_with_the_failure_runs_on(
    tmp_path: Path, start: StartJob, protocol: str
) -> None:
    job = start(two_pipelines("apart", tmp_path), recovery="region", protocol=protocol)
    after_checkpoints(job, 2)
    pids = {w.pid for w in job.status.workers}
    wait_until(lambda: "well-in" in job.status.steps and job.status.steps["well-in"].rows_out > 0, "rows", job=job)
    well = job.status.steps["well-in"].rows_out
    (tmp_path / "fail").touch()
    wait_until(lambda: job.status.restarts, "a restart", job=job)
    after_checkpoints(job, 2)
    end(job, tmp_path)
    status = job.status
    assert {w.pid for w in status.workers} <= pids
    assert "1 of 2 regions go back" in status.failures[0].reason
    assert status.restarts == 1
    assert status.steps["well-in"].rows_out == ROWS  # it would have counted anew from the checkpoint
    assert well > 0
    for part in ("ill", "well"):
        assert_running_counts(tmp_path / part, ROWS)


def test_r2_a_dead_worker_takes_only_what_it_held_along(tmp_path: Path, start: StartJob, fake_spark: FakeSpark) -> None:
    """Forward edges only: every slot is a region, and its worker's death is nothing to the others."""
    flow = cw.Dataflow("side")
    rows = flow.read("in", gated(tmp_path, ROWS)).with_columns("twice", twice=pl.col("value") * 2, eid=pl.col("value"))
    rows.write("out", cw.files(str(tmp_path / "out"), roll_rows=1_000))
    job = start(flow, recovery="region")
    after_checkpoints(job, 2)
    victim, survivor = job.status.workers[0], job.status.workers[1]
    os.kill(victim.pid, signal.SIGKILL)
    wait_until(lambda: job.status.restarts, "a restart", job=job)
    after_checkpoints(job, 2)
    assert job.status.workers[1].pid == survivor.pid
    os.kill(survivor.pid, signal.SIGKILL)
    after_checkpoints(job, 2)
    end(job, tmp_path)
    assert ["1 of 2 regions go back" in f.reason for f in job.status.failures] == [True, True]
    assert_ids(tmp_path / "out", ROWS)


@pytest.mark.full
def test_a_worker_that_held_a_part_of_all_takes_all_down(tmp_path: Path, start: StartJob) -> None:
    job = start(two_pipelines("together", tmp_path), recovery="region")
    after_checkpoints(job, 1)
    os.kill(job.status.workers[0].pid, signal.SIGKILL)
    after_checkpoints(job, 2)
    end(job, tmp_path)
    assert "regions" not in job.status.failures[0].reason
    for part in ("ill", "well"):
        assert_running_counts(tmp_path / part, ROWS)

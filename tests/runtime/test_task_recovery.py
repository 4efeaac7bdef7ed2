"""``recovery="task"``: only the dead worker goes back; the others keep process, state and connections."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from fake_host import FakeSpark
from runtime_world import assert_running_counts, gated, open_gate, wait_until

import cutwater as cw
from cutwater.runtime import job as job_module
from cutwater.runtime.job import Job

ROWS = 20_000
StartJob = Callable[..., Job]


@pytest.fixture(autouse=True)
def allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_module, "check_recovery", lambda recovery: None)


def one_reader(name: str, folder: Path) -> cw.Dataflow:
    """Each counting subtask has one input: what it takes comes in one order only."""
    flow = cw.Dataflow(name)
    source = gated(folder, ROWS, partitions=1)
    rows = flow.read("in", source, parallelism=1).with_columns("key", key=pl.col("value") % 97, parallelism=1)
    counts = rows.key_by("key").aggregate("count", n=cw.count(), total=cw.sum("value"), eid=cw.last("value"))
    counts.write("out", cw.files(str(folder / "out"), roll_rows=1_000))
    return flow


def after_checkpoints(job: Job, more: int) -> None:
    known = job.status.checkpoints.completed

    def there() -> bool:
        return job.status.checkpoints.completed >= known + more or not job.is_active

    wait_until(there, "checkpoints", 60.0, job=job)


def end(job: Job, folder: Path) -> None:
    open_gate(folder)
    job.await_termination(60)
    assert job.exception() is None


def kill(job: Job, slot: int) -> None:
    before = job.status.restarts
    os.kill(next(w.pid for w in job.status.workers if w.slot == slot), signal.SIGKILL)
    wait_until(lambda: job.status.restarts > before or not job.is_active, "a restart", job=job)


@pytest.mark.parametrize("slot", [0, 1])
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

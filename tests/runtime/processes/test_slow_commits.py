"""Sinks whose commits take long: rows flow meanwhile, and every promise holds as if they were short.

The function that commits waits for a file.  DuckDB reads what it wrote.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_host import FakeSpark
from runtime_world import gated, open_gate, query, wait_until

import cutwater as cw
from cutwater.errors import CutwaterError

ROWS = 20_000


class Writes:
    """Writes each epoch to a file of its own, once it may; says when it has begun."""

    def __init__(self, folder: Path) -> None:
        self.out, self.began, self.may_go_on = folder / "batches", folder / "began", folder / "go-on"
        self.broken = folder / "broken"
        self.out.mkdir()

    def __call__(self, rows: pa.Table, checkpoint_id: int) -> None:
        self.began.touch()
        while not self.may_go_on.exists():
            time.sleep(0.002)
        if self.broken.exists():
            self.broken.unlink()
            raise ValueError("this commit is broken")
        fresh = self.out / f".{checkpoint_id}-{os.getpid()}-{threading.get_ident()}"
        pq.write_table(rows, fresh)
        fresh.replace(self.out / f"{checkpoint_id}.parquet")

    def assert_all(self) -> None:
        counts = query("SELECT count(*), count(DISTINCT value), max(value) FROM {out}", out=self.out)
        assert counts == [(ROWS, ROWS, ROWS - 1)]


def flow_of(folder: Path, writes: Callable[..., None]) -> cw.Dataflow:
    flow = cw.Dataflow("slow")
    flow.read("in", gated(folder, ROWS)).foreach_batch("each", writes)
    return flow


def test_rows_flow_while_a_commit_takes_long(start: Any, tmp_path: Path) -> None:
    writes = Writes(tmp_path)
    job = start(flow_of(tmp_path, writes), interval="500ms")
    wait_until(writes.began.exists, "a commit", job=job)
    before, checkpoints = job.status.rows_read, job.status.checkpoints.completed
    wait_until(lambda: job.status.rows_read > before + 2_000, "more rows", job=job)
    wait_until(lambda: job.status.checkpoints.completed > checkpoints, "another checkpoint", job=job)
    assert list(writes.out.iterdir()) == []
    writes.may_go_on.touch()
    open_gate(tmp_path)
    assert job.await_termination(60)
    writes.assert_all()


def test_commits_that_take_too_long_hold_the_job_up_instead_of_piling_rows_up(start: Any, tmp_path: Path) -> None:
    writes = Writes(tmp_path)
    job = start(flow_of(tmp_path, writes), interval="50ms")
    wait_until(writes.began.exists, "a commit", job=job)
    wait_until(lambda: job.status.checkpoints.completed >= 5, "checkpoints", job=job)
    time.sleep(1.0)
    assert job.status.checkpoints.completed < 12
    writes.may_go_on.touch()
    open_gate(tmp_path)
    assert job.await_termination(60)
    writes.assert_all()


def test_a_worker_that_dies_behind_on_commits_loses_none_of_them(
    start: Any, fake_spark: FakeSpark, tmp_path: Path
) -> None:
    writes = Writes(tmp_path)
    job = start(flow_of(tmp_path, writes), interval="100ms")
    wait_until(writes.began.exists, "a commit", job=job)
    wait_until(lambda: job.status.checkpoints.completed >= 3, "checkpoints", job=job)
    for worker in job.status.workers:
        os.kill(worker.pid, signal.SIGKILL)
    writes.may_go_on.touch()
    wait_until(lambda: job.status.restarts, "a restart", job=job)
    open_gate(tmp_path)
    assert job.await_termination(60)
    writes.assert_all()


def test_a_stop_answers_when_the_last_commit_is_done(start: Any, tmp_path: Path) -> None:
    writes = Writes(tmp_path)
    job = start(flow_of(tmp_path, writes), interval="300ms")
    wait_until(writes.began.exists, "a commit", job=job)
    stopping = threading.Thread(target=job.stop)
    stopping.start()
    time.sleep(1.0)
    assert stopping.is_alive(), "it answered before its rows were committed"
    writes.may_go_on.touch()
    stopping.join(60)
    assert not stopping.is_alive()
    ((rows, different, highest),) = query(
        "SELECT count(*), count(DISTINCT value), max(value) FROM {out}", out=writes.out
    )
    assert 0 < rows == different
    assert not list((tmp_path / "chk").rglob("*.arrows")), "rows of the last checkpoint are still staged"
    open_gate(tmp_path)
    job = start(flow_of(tmp_path, writes))
    assert job.await_termination(60)
    writes.assert_all()
    assert rows < ROWS, "void: the job had ended before it was stopped"
    assert highest < ROWS


def test_a_commit_that_fails_fails_the_attempt_and_is_done_again(start: Any, tmp_path: Path) -> None:
    writes = Writes(tmp_path)
    writes.broken.touch()
    writes.may_go_on.touch()
    job = start(flow_of(tmp_path, writes))
    wait_until(lambda: job.status.restarts, "a restart", job=job)
    assert "this commit is broken" in "\n".join(event.reason for event in job.status.failures)
    assert "each" in "\n".join(event.reason for event in job.status.failures)
    open_gate(tmp_path)
    assert job.await_termination(60)
    writes.assert_all()


def always_broken(rows: pa.Table, checkpoint_id: int) -> None:
    raise ValueError("this commit is always broken")


def test_the_last_commit_fails_the_job_if_it_cannot_be_done(start: Any, tmp_path: Path) -> None:
    open_gate(tmp_path)
    restart = {"strategy": "fixed_delay", "delay_ms": 0.0, "attempts": 2}
    job = start(flow_of(tmp_path, always_broken), interval="1m", restart=restart)
    with pytest.raises(CutwaterError, match="this commit is always broken") as raised:
        job.await_termination(60)
    assert raised.value.step == "each"

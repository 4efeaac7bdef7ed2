"""A running job changes its parallelism: nothing is lost or doubled, whatever fails on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime_world import assert_running_counts, counting, gated, open_gate, wait_until

import cutwater as cw

ROWS = 24_000


def test_it_goes_on_with_more_workers_and_with_fewer_and_every_row_counts_once(start, tmp_path: Path) -> None:
    job = start(counting("wide", gated(tmp_path, ROWS, rate=20_000), tmp_path / "out"))
    wait_until(lambda: job.status.rows_read > 1_000, "rows", job=job)
    job.rescale(4)
    assert (job.status.parallelism, len(job.status.workers), job.status.restarts) == (4, 4, 0)
    before = job.status.checkpoints.completed
    wait_until(lambda: job.status.checkpoints.completed > before, "a checkpoint at the new parallelism", job=job)
    job.rescale(1)
    assert (job.status.parallelism, job.status.rescales, job.status.restarts) == (1, 2, 0)
    open_gate(tmp_path)
    assert job.await_termination(30)
    assert_running_counts(tmp_path / "out", ROWS)


def test_too_few_cores_leave_it_as_it_was(start, fake_spark, tmp_path: Path) -> None:
    for _ in range(13):
        fake_spark.cores.acquire()
    job = start(counting("narrow", gated(tmp_path, ROWS), tmp_path / "out"), group_deadline="500ms")
    wait_until(lambda: job.status.rows_read > 1_000, "rows", job=job)
    with pytest.raises(cw.CutwaterError, match=r"of 4 workers got a core.*; the job goes on at parallelism 2"):
        job.rescale(4)
    attempt = job.status.attempt
    open_gate(tmp_path)
    assert job.await_termination(30)
    assert job.status.attempt == attempt
    assert_running_counts(tmp_path / "out", ROWS)


def test_a_later_driver_goes_on_at_the_last_parallelism_until_the_program_asks_for_another(
    start, tmp_path: Path
) -> None:
    def flow() -> cw.Dataflow:
        return counting("kept", gated(tmp_path, ROWS), tmp_path / "out")

    first = start(flow(), parallelism=2)
    first.rescale(3)
    first.stop()
    again = start(flow(), parallelism=2)
    assert again.status.parallelism == 3
    assert "goes on at parallelism 3, to which the job was rescaled" in again.status.warnings[0]
    wait_until(lambda: again.status.phase == "running", "the job", job=again)
    again.stop()
    changed = start(flow(), parallelism=1)
    assert changed.status.parallelism == 1
    open_gate(tmp_path)
    assert changed.await_termination(30)
    assert_running_counts(tmp_path / "out", ROWS)

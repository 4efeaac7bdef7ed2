"""A running job changes its parallelism: nothing is lost or doubled, whatever fails on the way."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import polars as pl
import pytest
from fake_host import Cores
from runtime_world import assert_ids, assert_running_counts, counting, gated, open_gate, wait_until

import cutwater as cw
from cutwater.protocol.job import rescale as r
from cutwater.protocol.job.core import JobCore

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


def test_a_rescale_right_after_another_knows_who_is_there(
    start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that had just been sent away still counted: the snapshot was taken, and its successor missed."""
    there: list[set[int]] = []
    real = JobCore._perform_rescale

    def watched(core: JobCore, effect: r.RescaleEffect) -> None:
        if isinstance(effect, r.TakeSnapshot):
            there.append(set(job._coordinator.driver.group.links))
        real(core, effect)

    monkeypatch.setattr(JobCore, "_perform_rescale", watched)
    job = start(counting("wider", gated(tmp_path, 2_000), tmp_path / "out"))
    wait_until(lambda: job.status.rows_read > 0, "rows", job=job)
    for parallelism in (3, 1, 2, 1, 3):
        job.rescale(parallelism)
    assert there == [{0, 1, 2}, {0, 1, 2}, {0, 1}, {0, 1}, {0, 1, 2}]
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert_running_counts(tmp_path / "out", 2_000)


def test_too_few_cores_leave_it_as_it_was(start, fake_spark, tmp_path: Path) -> None:
    for _ in range(13):
        fake_spark.cores.acquire()
    job = start(counting("narrow", gated(tmp_path, ROWS), tmp_path / "out"), rescale_timeout="500ms")
    wait_until(lambda: job.status.rows_read > 1_000, "rows", job=job)
    with pytest.raises(cw.CutwaterError, match=r"of 4 workers got a core.*; the job goes on at parallelism 2"):
        job.rescale(4)
    with pytest.raises(cw.CutwaterError, match=r"parallelism 129 is above max_parallelism 128"):
        job.rescale(129)
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


def test_a_later_driver_of_an_adaptive_job_asks_for_what_its_user_asked_for(start, fake_spark, tmp_path: Path) -> None:
    """Not for what the program says, and not for what there happened to be."""
    fake_spark.cores = Cores(4)
    flow = counting("asked", gated(tmp_path, ROWS), tmp_path / "out")
    adaptive = {"scheduler": "adaptive", "resource_stabilization_timeout": "300ms"}
    first = start(flow, parallelism=2, **adaptive)
    first.rescale(4)
    fake_spark.cores.lose()
    os.kill(first.status.workers[0].pid, signal.SIGKILL)
    wait_until(lambda: first.status.parallelism == 3 and first.status.phase == "running", "three workers", job=first)
    first.stop()
    fake_spark.cores.release()
    open_gate(tmp_path)
    again = start(flow, parallelism=2, **adaptive)
    assert again.status.parallelism == 4
    assert again.await_termination(60)
    assert_running_counts(tmp_path / "out", ROWS)


@pytest.mark.parametrize("protocol", [pytest.param("aligned", marks=pytest.mark.full), "unaligned"])
def test_under_load_and_with_a_kill_in_between_every_row_counts_once(
    start, fake_spark, tmp_path: Path, protocol: str
) -> None:
    source = gated(tmp_path, ROWS, rate=20_000)
    job = start(counting("load", source, tmp_path / "out"), protocol=protocol, channel_frames=1)
    wait_until(lambda: job.status.rows_read > 1_000, "rows", job=job)
    job.rescale(4)
    os.kill(next(w.pid for w in job.status.workers if w.slot == 3), signal.SIGKILL)
    wait_until(lambda: job.status.restarts == 1 and job.status.phase == "running", "the restart", job=job)
    assert len(job.status.workers) == 4
    job.rescale(2)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert_running_counts(tmp_path / "out", ROWS)


@pytest.mark.full
def test_a_worker_lost_while_others_are_recruited_ends_the_rescale_and_not_the_job(
    start, fake_spark, tmp_path: Path
) -> None:
    for _ in range(14):
        fake_spark.cores.acquire()
    job = start(counting("loss", gated(tmp_path, ROWS), tmp_path / "out"))
    wait_until(lambda: job.status.rows_read > 1_000, "rows", job=job)
    failed: list[str] = []

    def ask() -> None:
        try:
            job.rescale(3)
        except cw.CutwaterError as e:
            failed.append(str(e))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_until(lambda: fake_spark.hosts[0].launches == 3, "the recruit's launch")
    os.kill(job.status.workers[0].pid, signal.SIGKILL)
    asking.join(30)
    assert len(failed) == 1
    assert "the job had to restart" in failed[0]
    fake_spark.cores.release(14)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert job.status.parallelism == 2
    assert_running_counts(tmp_path / "out", ROWS)


def test_an_adaptive_job_goes_on_with_fewer_cores_and_with_more_when_they_come_back(
    start, fake_spark, tmp_path: Path
) -> None:
    for _ in range(13):
        fake_spark.cores.acquire()
    adaptive = {"scheduler": "adaptive", "resource_stabilization_timeout": "500ms"}
    job = start(counting("elastic", gated(tmp_path, ROWS), tmp_path / "out"), parallelism=3, **adaptive)
    wait_until(lambda: job.status.rows_read > 1_000, "rows", job=job)
    assert job.status.parallelism == 3
    fake_spark.cores.lose()
    os.kill(next(w.pid for w in job.status.workers if w.slot == 1), signal.SIGKILL)
    wait_until(lambda: job.status.parallelism == 2 and job.status.phase == "running", "two workers", 60, job=job)
    assert any("goes on at parallelism 2" in w for w in job.status.warnings)
    fake_spark.cores.release()
    wait_until(lambda: job.status.parallelism == 3 and job.status.phase == "running", "three workers", 60, job=job)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert_running_counts(tmp_path / "out", ROWS)


def test_subtasks_without_a_split_do_not_hold_event_time_back(start, tmp_path: Path) -> None:
    flow = cw.Dataflow("few")
    rows = flow.read("in", cw.rate(2_000, partitions=1), event_time="timestamp")
    windows = rows.with_columns("k", k=pl.col("value") % 3).key_by("k").window("w", cw.tumbling("50ms"))
    windows.aggregate("n", n=cw.count()).write("out", cw.discard())
    job = start(flow, parallelism=1)

    def results() -> int:
        status = job.status
        return status.steps["n"].rows_out if "n" in status.steps else 0

    wait_until(lambda: results() > 0, "windows", job=job)
    job.rescale(3)
    wait_until(lambda: results() > 0, "windows at the new parallelism", job=job)
    job.cancel()


def test_rows_in_a_loop_move_with_their_keys(start, tmp_path: Path) -> None:
    flow = cw.Dataflow("round")
    rows = flow.read("in", gated(tmp_path, ROWS // 4, rate=8_000)).with_columns("start", left=pl.col("value") % 5)
    loop = flow.loop("loop", rows.key_by("value"))
    turned = loop.with_columns("turn", left=pl.col("left") - 1)
    loop.feed_back(turned.filter("more", pl.col("left") >= 0).key_by("value"))
    turned.filter("done", pl.col("left") < 0).with_columns("eid", eid=pl.col("value")).write(
        "out", cw.files(str(tmp_path / "out"), roll_rows=1_000)
    )
    job = start(flow)
    wait_until(lambda: job.status.rows_read > 500, "rows", job=job)
    job.rescale(3)
    job.rescale(2)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert_ids(tmp_path / "out", ROWS // 4)


@pytest.mark.full
def test_a_traced_job_stays_at_its_parallelism(start, tmp_path: Path) -> None:
    flow = counting("traced", gated(tmp_path, ROWS), tmp_path / "out")
    with pytest.raises(cw.ConfigError, match="a trace tells of one parallelism"):
        start(flow, trace_dir=tmp_path / "trace", scheduler="adaptive")
    job = start(flow, trace_dir=tmp_path / "trace")
    with pytest.raises(cw.CutwaterError, match="a trace tells of one parallelism"):
        job.rescale(3)
    job.cancel()

"""Starting, stopping, resuming: what is left behind, and what comes back."""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import psutil
import pytest
from fake_host import FakeSpark
from faults import reporting_at_the_end
from runtime_world import (
    assert_running_counts,
    counting,
    gated,
    kill_some,
    open_gate,
    query,
    wait_until,
)

import cutwater as cw

ROWS = 12_000


class Traces:
    """Threads, listening ports and processes of this process, before and after."""

    def __init__(self, spark: FakeSpark) -> None:
        self._spark = spark
        self.threads, self.ports, self.files = self._now()

    def _now(self) -> tuple[set[str], set[int], int]:
        me = psutil.Process()
        ports = {c.laddr.port for c in me.net_connections("tcp") if c.status in ("LISTEN", "ESTABLISHED")}
        return {t.name for t in threading.enumerate()}, ports, me.num_fds()

    def assert_gone(self) -> None:
        assert self._spark.pids == [], "worker processes are left"
        deadline = time.monotonic() + 2.0
        while True:
            threads, ports, files = self._now()
            left = (threads - self.threads, ports - self.ports, max(0, files - self.files))
            if left == (set(), set(), 0):
                return
            assert time.monotonic() < deadline, f"left behind: threads {left[0]}, ports {left[1]}, {left[2]} files"
            time.sleep(0.02)


@pytest.mark.parametrize("how", ["cancel", "stop", "finish", "fail"])
def test_the_end_leaves_no_process_port_thread_or_file(
    start, fake_spark: FakeSpark, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    counting("warm", cw.memory([{"value": 1}]), tmp_path / "warm")  # loads what loads lazily
    traces = Traces(fake_spark)
    out = tmp_path / "out"
    settings = {"checkpoint": None, "restart": "none"}
    job = start(counting("traces", gated(tmp_path, ROWS), out), **settings)
    wait_until(lambda: job.status.checkpoints.completed >= 2, "two checkpoints")
    if how == "cancel":
        job.cancel()
    elif how == "stop":
        job.stop()
    elif how == "finish":
        open_gate(tmp_path)
        assert job.await_termination(30)
    else:
        kill_some(job, fake_spark, 1, seed=1)
        with pytest.raises(cw.CutwaterError):
            job.await_termination(30)
    assert job.status.outcome == {"cancel": "cancelled", "stop": "stopped", "finish": "finished"}.get(how, "failed")
    traces.assert_gone()
    assert list(temporary.iterdir()) == [], "temporary files are left"
    if how == "finish":
        staged = [p for p in out.rglob("*") if p.is_file() and p.suffix != ".parquet"]
        assert not staged, f"staged files are left: {staged}"


@pytest.mark.parametrize("phase", ["forming", "restarting"])
def test_cancel_while_nothing_runs(start, fake_spark: FakeSpark, tmp_path: Path, phase: str) -> None:
    if phase == "forming":
        fake_spark.cores = threading.Semaphore(1)
    traces = Traces(fake_spark)
    job = start(
        counting("early", gated(tmp_path, ROWS), tmp_path / "out"),
        restart={"strategy": "fixed_delay", "delay_ms": 60_000},
    )
    if phase == "restarting":
        wait_until(lambda: job.status.checkpoints.completed >= 1, "a checkpoint")
        kill_some(job, fake_spark, 1, seed=0)
    wait_until(lambda: job.status.phase == phase, phase)
    job.cancel()
    assert job.status.outcome == "cancelled"
    traces.assert_gone()


def test_stop_and_start_again_goes_on_where_it_was(start, tmp_path: Path) -> None:
    flow = counting("resume", gated(tmp_path, ROWS, rate=None), tmp_path / "out")
    job = start(flow)
    hold = gated(tmp_path, ROWS).hold
    wait_until(lambda: job.status.rows_read == hold, "all rows before the gate")
    job.stop()
    uid = job.id
    open_gate(tmp_path)
    again = start(counting("resume", gated(tmp_path, ROWS, rate=None), tmp_path / "out"))
    assert again.await_termination(30)
    assert again.id == uid
    assert again.status.checkpoints.restored_id > 0
    assert_running_counts(tmp_path / "out", ROWS)
    assert again.status.rows_read == ROWS - hold, "rows before the stop are not read again"


def test_the_last_report_of_a_worker_counts_although_its_peer_left_first(
    start, fake_spark: FakeSpark, tmp_path: Path
) -> None:
    """Stopping workers close their connections one after the other: that is no failure, and no report is lost."""
    fake_spark.prepare = reporting_at_the_end
    open_gate(tmp_path)
    job = start(counting("last", gated(tmp_path, ROWS, rate=None), tmp_path / "out"))
    assert job.await_termination(30)
    assert (job.status.rows_read, job.status.steps["out"].rows_in) == (ROWS, ROWS)
    assert job.status.restarts == 0
    assert not [line for line in job.status.log if "failed" in line]


def test_cancel_and_start_again_loses_and_doubles_nothing(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    for _ in range(3):
        job = start(counting("again", gated(tmp_path, ROWS), tmp_path / "out"))
        done = job.status.checkpoints.last_completed_id
        wait_until(lambda job=job, done=done: job.status.checkpoints.last_completed_id > done + 1, "checkpoints")
        job.cancel()
    open_gate(tmp_path)
    job = start(counting("again", gated(tmp_path, ROWS), tmp_path / "out"))
    assert job.await_termination(30)
    assert_running_counts(tmp_path / "out", ROWS)


def test_a_finished_job_started_again_does_nothing(start, tmp_path: Path) -> None:
    open_gate(tmp_path)
    assert start(counting("twice", gated(tmp_path, ROWS, rate=None), tmp_path / "out")).await_termination(30)
    again = start(counting("twice", gated(tmp_path, ROWS, rate=None), tmp_path / "out"))
    assert again.await_termination(30)
    assert again.status.outcome == "finished"
    assert again.status.rows_read == 0
    assert_running_counts(tmp_path / "out", ROWS)


def test_jobs_side_by_side_do_not_disturb_each_other(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    jobs = []
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        jobs.append(start(counting(f"job{number}", gated(folder, ROWS), folder / "out", keys=7 + number)))
    kill_some(jobs[1], fake_spark, 1, seed=5)  # any job's worker
    for number in range(3):
        open_gate(tmp_path / str(number))
    for number, job in enumerate(jobs):
        assert job.await_termination(30)
        assert_running_counts(tmp_path / str(number) / "out", ROWS, keys=7 + number)


def test_a_checkpoint_on_demand_makes_its_rows_visible(start, tmp_path: Path) -> None:
    job = start(counting("demand", gated(tmp_path, ROWS, rate=None), tmp_path / "out"), interval="1h")
    hold = gated(tmp_path, ROWS).hold
    wait_until(lambda: job.status.rows_read == hold, "all rows before the gate")
    assert not list((tmp_path / "out").glob("*.parquet"))
    first = job.checkpoint()
    second = job.checkpoint()
    assert second > first > 0
    files = tmp_path / "out"
    wait_until(lambda: list(files.glob("*.parquet")), "committed files")
    unrolled = 2 * 1_000  # each of the two sinks may hold less than one file of rows back
    wait_until(lambda: query("SELECT count(*) FROM {out}", out=files)[0][0] > hold - unrolled, "committed rows")
    job.cancel()


def test_a_growing_directory_is_read_once_across_kills_and_restarts(
    start, fake_spark: FakeSpark, tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    total = 0

    def add(lines: int) -> None:
        nonlocal total
        text = "value\n" + "\n".join(str(i) for i in range(total, total + lines)) + "\n"
        total += lines
        (folder / f".part{total}").write_text(text)
        (folder / f".part{total}").rename(folder / f"part{total:06}.csv")

    def flow() -> cw.Dataflow:
        source = cw.files(
            str(folder),
            format="csv",
            schema="value long",
            watch=True,
            discover_interval_ms=50,
            settle_ms=50,
            end_marker=str(tmp_path / "complete"),
        )
        return counting("growing", source, tmp_path / "out")

    add(1_000)
    job = start(flow())
    for round_ in range(3):
        add(700)
        wait_until(lambda: job.status.phase == "running", "running")
        if round_ < 2:
            kill_some(job, fake_spark, 1, seed=round_)
    job.stop()
    add(500)
    job = start(flow())
    add(300)
    time.sleep(0.2)
    (tmp_path / "complete").touch()
    assert job.await_termination(30)
    assert_running_counts(tmp_path / "out", total)

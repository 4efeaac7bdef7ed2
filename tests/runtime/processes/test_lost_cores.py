"""A lost core is no dead job: cores that come back late, or never, and processes that are slow to start."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from fake_host import Cores, FakeSpark
from faults import happens
from runtime_world import assert_running_counts, counting, gated, open_gate, wait_until

import cutwater as cw
from cutwater.api.jobs import job as job_module
from cutwater.api.jobs.job import Job
from cutwater.protocol.job import machine
from cutwater.runtime.settings import make_config

ROWS = 12_000


@pytest.fixture(autouse=True)
def told_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_TELL_CORES_MS", 200.0)


def lose(job: Job, spark: FakeSpark, slot: int) -> None:
    """A worker is killed, and its core is gone with it."""
    spark.cores.lose()
    os.kill(next(w.pid for w in job.status.workers if w.slot == slot), signal.SIGKILL)
    wait_until(lambda: job.status.waiting is not None and "waiting for cores" in job.status.waiting.text, "the wait")


def runs(job: Job) -> bool:
    return job.status.phase == "running" and job.status.waiting is None


@pytest.mark.parametrize("recovery", ["job", "task"])
def test_a_core_that_comes_back_is_used_and_no_row_is_lost(
    start, fake_spark: FakeSpark, tmp_path: Path, recovery: str
) -> None:
    fake_spark.cores = Cores(3)
    job = start(counting("back", gated(tmp_path, ROWS), tmp_path / "out"), parallelism=3, recovery=recovery)
    wait_until(lambda: job.status.checkpoints.completed >= 1, "a checkpoint", job=job)
    lose(job, fake_spark, 1)
    found = job.status.waiting
    assert found is not None
    assert (found.wanted, found.present, found.cores, found.starting) == (3, 2, 2, [])
    assert found.text.startswith("waiting for cores, 2 of 3 since ")
    wait_until(lambda: any("waiting for cores, 2 of 3" in w for w in job.status.warnings), "that it is told", job=job)
    time.sleep(0.5)
    assert job.status.waiting.waiting_ms > 500
    fake_spark.cores.release()
    wait_until(lambda: runs(job), "three workers", job=job)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert (job.status.restarts, job.status.parallelism) == (1, 3)
    assert sum("waiting for cores" in w for w in job.status.warnings) == 1
    assert_running_counts(tmp_path / "out", ROWS)


def test_a_first_start_that_cannot_be_met_is_told_and_goes_on_waiting(
    start, fake_spark: FakeSpark, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake_spark.cores = Cores(1)
    open_gate(tmp_path)
    job = start(counting("first", gated(tmp_path, ROWS), tmp_path / "out"), parallelism=3)
    text = "waiting for cores, 1 of 3"
    wait_until(lambda: any(text in w for w in job.status.warnings), "that it is told", job=job)
    assert any(text in r.message and "ask for parallelism 1" in r.message for r in caplog.records)
    assert job.status.phase == "forming"
    assert job.is_active
    fake_spark.cores.release(2)
    assert job.await_termination(60)
    assert_running_counts(tmp_path / "out", ROWS)


def test_a_process_that_is_slow_to_start_is_told_apart_from_a_missing_core(
    start, fake_spark: FakeSpark, tmp_path: Path
) -> None:
    def slow(args: Any) -> None:
        while args.slot == 1 and not (tmp_path / "booted").exists():
            time.sleep(0.05)

    fake_spark.prepare = slow
    open_gate(tmp_path)
    job = start(counting("slow", gated(tmp_path, ROWS), tmp_path / "out"), resource_timeout="100ms")

    def starting() -> list[tuple[int, str]]:
        waits = job.status.waiting
        return [(s.slot, s.host) for s in waits.starting] if waits is not None else []

    wait_until(lambda: starting() == [(1, "here")], "the state", job=job)
    found = job.status.waiting
    assert found is not None
    assert (found.present, found.cores, found.wanted) == (1, 2, 2)
    assert re.fullmatch(r"worker 1 has a core, Python is starting since \d s on host here", found.text), found.text
    time.sleep(1.0)
    assert job.is_active, "resource_timeout is about cores"
    (tmp_path / "booted").touch()
    assert job.await_termination(60)
    assert_running_counts(tmp_path / "out", ROWS)


def test_a_process_that_never_comes_is_started_anew(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    def hangs_once(args: Any) -> None:
        if args.slot == 1 and happens(tmp_path / "hung", 1):
            time.sleep(3_600)

    fake_spark.prepare = hangs_once
    open_gate(tmp_path)
    job = start(counting("hangs", gated(tmp_path, ROWS), tmp_path / "out"), boot_timeout="1s")
    assert job.await_termination(60)
    text = "worker 1 is started anew: it had a core on host here for 1 s, and its Python did not come (boot_timeout)"
    assert text in job.status.warnings
    assert fake_spark.hosts[0].launches == 3
    assert_running_counts(tmp_path / "out", ROWS)


def test_processes_that_never_come_again_and_again_end_the_job_with_the_truth(
    start, fake_spark: FakeSpark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutwater.runtime.driver.worker_group._REPLACEMENT_LIMIT", 1)
    fake_spark.prepare = lambda args: time.sleep(3_600)
    job = start(counting("never", gated(tmp_path, ROWS), tmp_path / "out"), boot_timeout="500ms", parallelism=1)
    with pytest.raises(cw.CutwaterError, match=r"worker of slot 0 does not start: it had a core on host here for 0 s"):
        job.await_termination(60)


def test_a_job_that_waits_can_be_stopped_and_goes_on_later(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    fake_spark.cores = Cores(2)
    settings = {"recovery": "task"}
    job = start(counting("stopped", gated(tmp_path, ROWS), tmp_path / "out"), **settings)
    wait_until(lambda: job.status.checkpoints.completed >= 1, "a checkpoint", job=job)
    lose(job, fake_spark, 0)
    job.stop()
    assert any(
        w.startswith("stopped without a last checkpoint: waiting for cores, 1 of 2") for w in job.status.warnings
    )
    fake_spark.cores.release()
    open_gate(tmp_path)
    again = start(counting("stopped", gated(tmp_path, ROWS), tmp_path / "out"), **settings)
    assert again.await_termination(60)
    assert_running_counts(tmp_path / "out", ROWS)


def test_a_job_that_waits_goes_on_with_fewer_when_it_is_told_to(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    fake_spark.cores = Cores(3)
    job = start(counting("fewer", gated(tmp_path, ROWS), tmp_path / "out"), parallelism=3)
    wait_until(lambda: job.status.checkpoints.completed >= 1, "a checkpoint", job=job)
    lose(job, fake_spark, 1)
    job.rescale(2)
    wait_until(lambda: runs(job), "two workers", job=job)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert job.status.parallelism == 2
    assert_running_counts(tmp_path / "out", ROWS)


def test_on_a_cluster_a_job_goes_on_with_the_cores_that_are_left(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    fake_spark.sparkContext.master = "spark://localhost:7077"
    fake_spark.cores = Cores(3)
    stable = {"resource_stabilization_timeout": "500ms"}
    job = start(counting("left", gated(tmp_path, ROWS), tmp_path / "out"), parallelism=3, **stable)
    wait_until(lambda: job.status.checkpoints.completed >= 1, "a checkpoint", job=job)
    lose(job, fake_spark, 1)
    wait_until(lambda: job.status.parallelism == 2 and runs(job), "two workers", 60, job=job)
    fake_spark.cores.release()
    wait_until(lambda: job.status.parallelism == 3 and runs(job), "three workers", 60, job=job)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert_running_counts(tmp_path / "out", ROWS)


@pytest.mark.parametrize(
    ("master", "settings", "scheduler"),
    [
        ("local[4]", {}, "default"),
        ("local-cluster[2,2,1024]", {}, "default"),
        ("spark://host:7077", {}, "adaptive"),
        ("spark://host:7077", {"scheduler": "default"}, "default"),
        ("spark://host:7077", {"protocol": "none"}, "default"),
        ("local[4]", {"scheduler": "adaptive"}, "adaptive"),
    ],
)
def test_the_scheduler_is_adaptive_unless_the_master_is_local(
    master: str, settings: dict[str, Any], scheduler: str
) -> None:
    assert make_config(settings).on_master(job_module.is_local(master)).scheduler == scheduler


@pytest.mark.parametrize("name", ["group_deadline", "group_deadline_ms"])
def test_the_old_name_of_a_setting_counts_and_says_what_to_write_instead(name: str) -> None:
    now = name.replace("group_deadline", "resource_timeout")
    with pytest.warns(FutureWarning, match=f"'{name}' is called '{now}'"):
        config = make_config({name: 10_000 if name.endswith("_ms") else "10s"})
    assert config.resource_timeout_ms == 10_000
    with pytest.raises(cw.ConfigError, match="given twice"), pytest.warns(FutureWarning):
        make_config({name: 10_000, now: 10_000})

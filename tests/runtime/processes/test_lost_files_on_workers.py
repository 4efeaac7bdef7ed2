"""Files of a job's folder disappear while it runs, or while it rests: it goes on, or says at once why not."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from fake_host import FakeSpark
from runtime_world import assert_running_counts, counting, gated, open_gate, wait_until

import cutwater as cw
from cutwater.api.jobs.job import Job
from cutwater.errors import CutwaterError, FencedError
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import CheckpointCompleted
from cutwater.storage.store.local import LocalStore

ROWS = 20_000
SLOW, FAST = 1_000.0, 60_000.0


def flow_of(folder: Path, rate: float = SLOW) -> cw.Dataflow:
    return counting("lost", gated(folder, ROWS, rate=rate), folder / "out", roll_rows=12)


def retained(folder: Path) -> tuple[CheckpointCompleted, ...]:
    """Newest first."""
    return JobLog(LocalStore(str(folder / "chk")), "lost").read().completed


def stored(folder: Path) -> list[Path]:
    """Log, manifests and data: what a checkpoint directory holds of the job, but for its output."""
    return sorted(p for part in ("log", "chk-*", "shared") for p in (folder / "chk" / "lost").glob(f"{part}/*"))


def checkpointed(job: Job, more: int) -> None:
    """That many more checkpoints."""
    wanted = job.status.checkpoints.completed + more
    wait_until(lambda: job.status.checkpoints.completed >= wanted, "checkpoints", 90.0, job=job)


def finished(start: Any, folder: Path, **settings: Any) -> Job:
    open_gate(folder)
    job = start(flow_of(folder, FAST), **settings)
    assert job.await_termination(60)
    assert_running_counts(folder / "out", ROWS)
    return job


@pytest.mark.parametrize("large", [False, True], ids=["in the log", "by itself"])
def test_a_missing_manifest_of_an_old_checkpoint_stops_nobody(
    start, tmp_path: Path, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest one restores; new ones complete, and the damaged one is named."""
    if large:
        monkeypatch.setattr("cutwater.storage.snapshot.publish.ATTACHED_BYTES", 0)
    job = start(flow_of(tmp_path), inline_threshold_bytes=0)
    checkpointed(job, 6)
    job.cancel()
    newest, *_, oldest = retained(tmp_path)
    (tmp_path / "chk" / "lost" / oldest.path).unlink()
    job = start(flow_of(tmp_path), inline_threshold_bytes=0)
    checkpointed(job, 5)
    assert job.status.checkpoints.restored_id == newest.checkpoint_id
    assert job.status.checkpoints.failed == 0
    assert not any("checkpoint failed" in f.reason for f in job.status.failures), job.status.failures
    named = [w for w in job.status.warnings if f"checkpoint {oldest.checkpoint_id} cannot be restored any more" in w]
    assert len(named) == 1, job.status.warnings
    assert Path(oldest.path).name in named[0]
    job.cancel()
    finished(start, tmp_path, inline_threshold_bytes=0)


def test_without_its_own_newest_entries_a_running_job_stops_at_once_and_the_next_start_goes_on(
    start, tmp_path: Path
) -> None:
    """Whoever owned the job in what is lost: it is not guessed, and no failure is counted."""
    job = start(flow_of(tmp_path), interval="1h")
    wait_until(lambda: job.status.phase == "running", "the start", job=job)
    for _ in range(5):
        job.checkpoint()
    for path in sorted((tmp_path / "chk" / "lost" / "log").glob("*.json"))[-2:]:
        path.unlink()
    with contextlib.suppress(CutwaterError):
        job.checkpoint()
    wait_until(lambda: not job.is_active, "the end", job=job)
    with pytest.raises(FencedError, match=r"nobody can say any more who owns the job\. .* start it again"):
        job.await_termination(1)
    assert job.status.outcome == "failed"
    assert not any("checkpoint failed" in f.reason for f in job.status.failures), job.status.failures
    job = finished(start, tmp_path)
    assert any("log entry" in w and "is missing" in w for w in job.status.warnings), job.status.warnings


@pytest.mark.parametrize(
    "seed", [1, 2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)]
)
def test_whatever_is_lost_each_row_comes_once_or_the_job_says_what_is_lost(
    start, fake_spark: FakeSpark, tmp_path: Path, seed: int
) -> None:
    """One or two files at random, three times: under the running job, and a worker dies; or before it starts again."""
    rng = random.Random(seed)
    job = start(flow_of(tmp_path), inline_threshold_bytes=0)
    for turn in range(3):
        checkpointed(job, 4)
        resting = rng.random() < 0.5
        if resting:
            job.cancel()
        for path in rng.sample(stored(tmp_path), rng.choice([1, 2])):
            path.unlink(missing_ok=True)
        if not resting:
            os.kill(rng.choice([w.pid for w in job.status.workers if w.pid in fake_spark.pids]), signal.SIGKILL)
            wait_until(lambda job=job: job.status.restarts > 0 or not job.is_active, "a restart", job=job)
            wait_until(lambda job=job: job.status.phase == "running" or not job.is_active, "what follows", job=job)
        try:
            if not job.is_active:
                assert not any("checkpoint failed" in f.reason for f in job.status.failures), job.status.failures
                job = start(flow_of(tmp_path, SLOW * (turn + 2)), inline_threshold_bytes=0)
                wait_until(lambda job=job: job.status.phase == "running" or not job.is_active, "a start", job=job)
            if not job.is_active:
                raise job.exception() or AssertionError(job.status)
        except CutwaterError as error:
            if "no completed checkpoint" not in str(error) and "is missing" not in str(error):
                raise
            return  # every retained checkpoint needs what is lost: it is named
        checkpointed(job, 1)
        job.cancel()
        job = start(flow_of(tmp_path, SLOW * (turn + 2)), inline_threshold_bytes=0)
    job.cancel()
    finished(start, tmp_path, inline_threshold_bytes=0)

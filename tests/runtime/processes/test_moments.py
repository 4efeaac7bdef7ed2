"""Kills at the moments at which a two-phase commit is delicate, instead of at random ones."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_host import FakeSpark
from faults import after_sending, after_taking, before_taking, cut_connections, failing_writes
from runtime_world import assert_running_counts, counting, gated, kill_some, open_gate, wait_until

from cutwater.runtime.control import messages as c

ROWS = 12_000


def _final(message: Any) -> bool:
    return bool(message.final)


def _later_attempt(message: Any) -> bool:
    return message.attempt > 1


def _answered(message: Any) -> bool:
    return bool(message.answer)


def _third(message: Any) -> bool:
    return message.checkpoint_id >= 3


# name -> (fault, message, condition, times)
MOMENTS: dict[str, tuple[Callable[..., Any], type, Callable[[Any], bool], int]] = {
    "when the barrier should start": (before_taking, c.Trigger, _third, 2),
    "pre-committed and acknowledged": (after_sending, c.Ack, _third, 2),
    "published, before its sinks commit": (before_taking, c.CompleteNotice, _third, 2),
    "after its sinks committed": (after_taking, c.CompleteNotice, _third, 2),
    "when the final barrier should start": (before_taking, c.Trigger, _final, 2),
    "final checkpoint published, before its sinks commit": (before_taking, c.CompleteNotice, _answered, 1),
    "after it saw the end of its data": (after_sending, c.Finished, lambda m: True, 2),
    "when it should be built": (before_taking, c.Deploy, lambda m: True, 2),
    "when it should start": (before_taking, c.Start, lambda m: True, 2),
    "ready": (after_sending, c.Ready, lambda m: True, 2),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_worker_dies(start, fake_spark: FakeSpark, tmp_path: Path, moment: str) -> None:
    fault, message, where, times = MOMENTS[moment]
    fake_spark.prepare = fault(message, tmp_path / "died", where=where, times=times)
    open_gate(tmp_path)
    job = start(counting("moment", gated(tmp_path, ROWS), tmp_path / "out"))
    assert job.await_termination(30)
    assert len(list(tmp_path.glob("died-*"))) == times, "void: the worker never came to that moment"
    assert job.status.outcome == "finished"
    assert_running_counts(tmp_path / "out", ROWS)


def test_workers_die_again_and_again_while_the_job_recovers(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    """Three failures deep: each recovery is hit by the next failure."""
    fake_spark.prepare = before_taking(c.Deploy, tmp_path / "died", where=_later_attempt, times=3)
    job = start(counting("deep", gated(tmp_path, ROWS), tmp_path / "out"), parallelism=3)
    kill_some(job, fake_spark, 1, seed=3)
    open_gate(tmp_path)
    assert job.await_termination(30)
    assert len(list(tmp_path.glob("died-*"))) == 3
    assert_running_counts(tmp_path / "out", ROWS)


def test_rows_of_a_declined_checkpoint_are_in_the_manifest_of_the_next(
    start, fake_spark: FakeSpark, tmp_path: Path
) -> None:
    """The next one completes, and the worker dies before it commits: only the manifest still knows those rows."""
    decline = failing_writes(3, tmp_path / "declined", slots=(0, 1))
    die = before_taking(c.CompleteNotice, tmp_path / "died", times=2)
    fake_spark.prepare = lambda args: (decline(args), die(args))[0]
    job = start(counting("declined", gated(tmp_path, ROWS), tmp_path / "out", roll_rows=1), tolerable_failed=6)
    wait_until((tmp_path / "died-1").exists, "both deaths")
    assert (tmp_path / "declined-2").exists()
    open_gate(tmp_path)
    assert job.await_termination(30)
    assert_running_counts(tmp_path / "out", ROWS)


@pytest.mark.parametrize("seed", range(2))
def test_a_zombie_commits_nothing(start, fake_spark: FakeSpark, tmp_path: Path, seed: int) -> None:
    """A worker is paused past the heartbeat, is replaced, wakes, and finds that it is not wanted."""
    fake_spark.zombies = True
    flow = counting("zombie", gated(tmp_path, ROWS), tmp_path / "out")
    job = start(flow, heartbeat_interval="100ms", heartbeat_timeout="500ms")
    wait_until(lambda: job.status.checkpoints.completed >= 2, "two checkpoints")
    zombie = job.status.workers[seed].pid
    os.kill(zombie, signal.SIGSTOP)
    try:
        wait_until(lambda: job.status.restarts == 1 and job.status.phase == "running", "a replacement")
        completed = job.status.checkpoints.completed
        wait_until(lambda: job.status.checkpoints.completed >= completed + 2, "checkpoints without the zombie")
    finally:
        os.kill(zombie, signal.SIGCONT)
    wait_until(lambda: not _alive(zombie), "the zombie's end")
    time.sleep(0.1)
    open_gate(tmp_path)
    assert job.await_termination(30)
    assert job.status.restarts == 1, job.status.failures
    assert_running_counts(tmp_path / "out", ROWS)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("silent", [False, True], ids=["lost", "silent"])
def test_a_connection_between_workers_is_cut(start, fake_spark: FakeSpark, tmp_path: Path, silent: bool) -> None:
    """Broken, it is noticed at once; half-open (alive, and nothing comes through), when a checkpoint takes too long."""
    cut = tmp_path / "cut"
    fake_spark.prepare = cut_connections(cut, silent=silent)
    job = start(counting("cut", gated(tmp_path, ROWS), tmp_path / "out"), timeout="700ms")
    wait_until(lambda: job.status.checkpoints.completed >= 2, "two checkpoints")
    workers = {w.pid for w in job.status.workers}
    cut.touch()
    wait_until(lambda: job.status.failures and job.status.failures[-1].running_ms, "a restart")
    completed = job.status.checkpoints.completed
    wait_until(lambda: job.status.checkpoints.completed > completed, "a checkpoint behind it")
    open_gate(tmp_path)
    assert job.await_termination(30)
    assert len(list(tmp_path.glob("cut-*"))) == 1, "void"
    assert {w.pid for w in job.status.workers} <= workers, "the processes live on"
    assert_running_counts(tmp_path / "out", ROWS)


def test_a_pause_shorter_than_the_heartbeat_is_no_failure(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    job = start(counting("pause", gated(tmp_path, ROWS), tmp_path / "out"))
    wait_until(lambda: job.status.checkpoints.completed >= 1, "a checkpoint")
    victim = fake_spark.pids[0]
    os.kill(victim, signal.SIGSTOP)
    time.sleep(0.4)
    os.kill(victim, signal.SIGCONT)
    open_gate(tmp_path)
    assert job.await_termination(30)
    assert job.status.restarts == 0
    assert_running_counts(tmp_path / "out", ROWS)

"""Workers that do not come, strangers that do, and what the protocols promise."""

from __future__ import annotations

import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from fake_host import Cores, FakeSpark
from faults import before_taking, failing_writes, happens
from runtime_world import (
    assert_ids,
    assert_running_counts,
    counting,
    gated,
    kill_some,
    open_gate,
    query,
    wait_until,
)

from cutwater.errors import CutwaterError, JobFailedError, ResourceError, StorageError, WireError
from cutwater.protocol.wire import ClientHandshake, Peer
from cutwater.runtime.control import messages as c
from cutwater.runtime.driver import worker_group
from cutwater.runtime.transport.secret import new_secret, shake

ROWS = 12_000


def test_too_few_cores_end_a_job_only_where_its_user_wants_that(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    fake_spark.cores = Cores(1)
    job = start(counting("cores", gated(tmp_path, ROWS), tmp_path / "out"), parallelism=3, resource_timeout="700ms")
    with pytest.raises(ResourceError, match=r"1 of 3 workers.*free 2 cores or ask for parallelism 1"):
        job.await_termination(30)
    assert fake_spark.pids == []


def test_cores_that_come_late_are_waited_for(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    fake_spark.cores = Cores(1)
    open_gate(tmp_path)
    job = start(counting("late", gated(tmp_path, ROWS), tmp_path / "out"), parallelism=3)
    wait_until(lambda: len(job.status.workers) == 1, "the first worker")
    fake_spark.cores.release(2)
    assert job.await_termination(30)
    assert_running_counts(tmp_path / "out", ROWS)


def test_a_worker_that_never_starts_is_given_up(
    start, fake_spark: FakeSpark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(args: Any) -> None:
        os._exit(3)

    monkeypatch.setattr(worker_group, "_REPLACEMENT_LIMIT", 2)
    fake_spark.prepare = broken
    job = start(counting("never", gated(tmp_path, ROWS), tmp_path / "out"))
    with pytest.raises(CutwaterError, match="does not start"):
        job.await_termination(30)


def test_spark_retries_replace_a_worker_without_the_coordinator(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    fake_spark.retries = 100
    job = start(counting("retries", gated(tmp_path, ROWS), tmp_path / "out"))
    kill_some(job, fake_spark, 3, seed=2)
    open_gate(tmp_path)
    assert job.await_termination(30)
    assert fake_spark.hosts[0].launches == 2
    assert_running_counts(tmp_path / "out", ROWS)


@pytest.mark.parametrize("strategy", ["none", "fixed_delay", "failure_rate"])
def test_restart_strategies_end_the_job_when_their_budget_is_used_up(
    start, fake_spark: FakeSpark, tmp_path: Path, strategy: str
) -> None:
    restart = {"strategy": strategy, "attempts": 1, "rate_failures": 1}
    allowed = 0 if strategy == "none" else 1
    verdict = {
        "none": "restart strategy 'none'",
        "fixed_delay": "restarted 1 times",
        "failure_rate": "2 failures within",
    }
    job = start(counting("budget", gated(tmp_path, ROWS), tmp_path / "out"), restart=restart)
    kill_some(job, fake_spark, allowed + 1, seed=1)
    with pytest.raises(JobFailedError, match=rf"worker . on host .* was lost: .*{verdict[strategy]}"):
        job.await_termination(30)
    assert job.status.restarts == allowed
    assert fake_spark.pids == []


def test_a_lost_worker_is_told_with_its_host_and_process(
    start, fake_spark: FakeSpark, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = start(counting("where", gated(tmp_path, ROWS), tmp_path / "out"))
    wait_until(lambda: job.status.phase == "running", "the job")
    worker = job.status.workers[1]
    os.kill(worker.pid, signal.SIGKILL)
    wait_until(lambda: bool(job.status.failures), "the failure")
    where = f"on host {socket.gethostname()} (pid {worker.pid})"
    assert (worker.host, worker.slot) == (socket.gethostname(), 1)
    assert job.status.failures[0].reason.startswith(f"worker 1 {where} was lost: ")
    assert f"worker 1 {where} was lost" in caplog.text
    open_gate(tmp_path)
    assert job.await_termination(30)


# --------------------------------------------------------------------------------------------- failing checkpoints


def test_tolerable_failed_checkpoints_do_not_fail_the_job(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    """Rows of a declined checkpoint are committed by the next one: sinks forget no handle."""
    fake_spark.prepare = failing_writes(3, tmp_path / "failed")
    job = start(counting("tolerant", gated(tmp_path, ROWS), tmp_path / "out"), tolerable_failed=3)
    wait_until(lambda: job.status.checkpoints.completed >= 2 or not job.is_active, "checkpoints after the failed ones")
    open_gate(tmp_path)
    assert job.await_termination(30)
    assert job.status.restarts == 0
    assert job.status.checkpoints.failed >= 3
    assert any("No space left" in w for w in job.status.warnings), job.status.warnings
    assert_running_counts(tmp_path / "out", ROWS)


def test_more_failed_checkpoints_than_tolerated_restart_the_job_and_then_end_it(
    start, fake_spark: FakeSpark, tmp_path: Path
) -> None:
    fake_spark.prepare = failing_writes(1_000, tmp_path / "failed")
    restart = {"strategy": "fixed_delay", "attempts": 1}
    job = start(counting("full", gated(tmp_path, ROWS), tmp_path / "out"), tolerable_failed=1, restart=restart)
    with pytest.raises(StorageError, match="No space left"):
        job.await_termination(30)
    assert job.status.restarts == 1
    assert not list((tmp_path / "out").glob("*.parquet")), "nothing may be visible without a checkpoint"


def test_a_full_store_for_a_while_costs_no_row(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    fake_spark.prepare = failing_writes(3, tmp_path / "failed")
    open_gate(tmp_path)
    job = start(counting("while", gated(tmp_path, ROWS), tmp_path / "out"))
    assert job.await_termination(30)
    assert_running_counts(tmp_path / "out", ROWS)


def test_a_checkpoint_that_times_out_is_aborted_and_the_job_goes_on(
    start, fake_spark: FakeSpark, tmp_path: Path
) -> None:
    def prepare(args: Any) -> None:
        from cutwater.storage.snapshot.segment_files import SnapshotWriter

        close = SnapshotWriter.close

        def slow(self: SnapshotWriter, **how: Any) -> Any:
            if args.slot == 0 and happens(tmp_path / "slow", 2):
                time.sleep(0.5)
            return close(self, **how)

        SnapshotWriter.close = slow

    fake_spark.prepare = prepare
    job = start(counting("slow", gated(tmp_path, ROWS), tmp_path / "out"), timeout="200ms", tolerable_failed=50)
    wait_until(lambda: job.status.checkpoints.completed >= 2, "checkpoints after the slow ones")
    open_gate(tmp_path)
    assert job.await_termination(30)
    assert job.status.checkpoints.failed >= 1
    assert job.status.restarts == 0
    assert_running_counts(tmp_path / "out", ROWS)


# --------------------------------------------------------------------------------------------------------- protocols


def test_at_least_once_never_loses(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    job = start(counting("twice", gated(tmp_path, ROWS), tmp_path / "out"), protocol="at_least_once", parallelism=3)
    kill_some(job, fake_spark, 3, seed=4)
    open_gate(tmp_path)
    assert job.await_termination(30)
    assert query("SELECT count(DISTINCT eid) FROM {out}", out=tmp_path / "out") == [(ROWS,)]


def test_none_without_failure_gives_every_row_once(start, tmp_path: Path) -> None:
    open_gate(tmp_path)
    job = start(counting("none", gated(tmp_path, ROWS), tmp_path / "out"), protocol="none")
    assert job.await_termination(30)
    assert job.status.checkpoints.completed <= 1, "only the end is recorded"
    assert_running_counts(tmp_path / "out", ROWS)


def test_none_never_doubles(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    job = start(counting("none", gated(tmp_path, ROWS), tmp_path / "out"), protocol="none")
    wait_until(lambda: job.status.rows_read > 1_000, "rows")
    kill_some(job, fake_spark, 1, seed=4)
    open_gate(tmp_path)
    assert job.await_termination(30)
    rows, distinct = query("SELECT count(*), count(DISTINCT eid) FROM {out}", out=tmp_path / "out")[0]
    assert rows == distinct


# --------------------------------------------------------------------------------------------------------- strangers


def test_strangers_are_refused_and_disturb_nobody(start, tmp_path: Path) -> None:
    job = start(counting("strangers", gated(tmp_path, ROWS), tmp_path / "out"))
    wait_until(lambda: job.status.checkpoints.completed >= 1, "a checkpoint")
    coordinator: Any = job._coordinator
    control = coordinator.driver._server.address
    data = [tuple(link.hello.data_address) for link in coordinator.driver.group.links.values()]
    held: list[socket.socket] = []
    for address in [control, *data]:
        for rubbish in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, b"\xff" * 4):
            stranger = socket.create_connection(address, timeout=5)
            stranger.sendall(rubbish)
            held.append(stranger)
        for role in ("control", "data"):
            with socket.create_connection(address, timeout=5) as liar, pytest.raises(WireError):
                peer = Peer(role, coordinator.publisher.uid if role == "data" else job.name, 0, 1, 1)
                shake(liar, ClientHandshake(new_secret().reveal(), peer), 5)
    completed = job.status.checkpoints.completed
    wait_until(lambda: job.status.checkpoints.completed > completed + 2, "checkpoints meanwhile")
    open_gate(tmp_path)
    assert job.await_termination(30)
    for stranger in held:
        stranger.close()
    assert job.status.restarts == 0
    assert_running_counts(tmp_path / "out", ROWS)


def test_a_worker_can_be_replaced_while_strangers_hold_their_connections(
    start, fake_spark: FakeSpark, tmp_path: Path
) -> None:
    job = start(counting("crowd", gated(tmp_path, ROWS), tmp_path / "out"))
    wait_until(lambda: job.status.checkpoints.completed >= 1, "a checkpoint")
    coordinator: Any = job._coordinator
    crowd = [socket.create_connection(coordinator.driver._server.address, timeout=5) for _ in range(30)]
    kill_some(job, fake_spark, 1, seed=0)
    open_gate(tmp_path)
    assert job.await_termination(30)
    for stranger in crowd:
        stranger.close()
    assert_running_counts(tmp_path / "out", ROWS)


def test_a_worker_of_an_older_attempt_is_not_believed(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    """Messages carry the attempt: a late acknowledgement of the attempt before completes nothing."""
    fake_spark.prepare = before_taking(c.Trigger, tmp_path / "died", where=lambda m: m.checkpoint_id == 3)
    job = start(counting("older", gated(tmp_path, ROWS), tmp_path / "out"))
    wait_until(lambda: job.status.restarts == 1 and job.status.phase == "running", "the restart")
    coordinator: Any = job._coordinator
    link = next(iter(coordinator.driver.group.links.values()))
    before = job.status.checkpoints.last_completed_id
    stale = [c.Ack(1, before + i, [], [], 0.0, 0.0) for i in range(1, 4)]
    for message in [*stale, c.Failure(1, "DataError", "stale", "in", -1, 0, "", False), c.Finished(1, 0, 0)]:
        coordinator.driver.later(lambda message=message: coordinator.driver._received(link, message))
    open_gate(tmp_path)
    assert job.await_termination(30)
    assert job.status.restarts == 1
    assert_ids(tmp_path / "out", ROWS)

"""Jobs whose ports strangers crowd: a worker is replaced all the same, over the control port and between workers."""

from __future__ import annotations

import os
import random
import signal
import socket
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_host import FakeSpark
from flood import flood
from runtime_world import assert_running_counts, counting, gated, open_gate, wait_until

from cutwater.api.jobs.job import Job

ROWS = 12_000


def ports(job: Job) -> tuple[tuple[str, int], list[tuple[str, int]]]:
    """The address of the coordinator, and of each worker."""
    coordinator: Any = job._coordinator
    return coordinator.driver.address, [
        tuple(link.hello.data_address) for link in coordinator.driver.group.links.values()
    ]


def replace_one(job: Job, slot: int) -> float:
    """Kill a worker; milliseconds until the job runs again."""
    before = job.status.restarts
    os.kill(next(w.pid for w in job.status.workers if w.slot == slot), signal.SIGKILL)
    wait_until(lambda: job.status.restarts > before, "the loss", job=job)
    wait_until(lambda: job.status.failures[-1].running_ms is not None, "the replacement", 60, job=job)
    failure = job.status.failures[-1]
    assert failure.running_ms is not None
    return failure.running_ms - failure.failed_ms


def test_every_port_of_a_local_job_is_bound_to_loopback(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    """As the system tells it: of the driver, and of each worker."""
    job = start(counting("local", gated(tmp_path, 100), tmp_path / "out"), parallelism=2)
    wait_until(lambda: job.status.checkpoints.completed >= 1, "a checkpoint", job=job)
    control, data = ports(job)
    processes = [psutil.Process(), *map(psutil.Process, fake_spark.pids)]
    found = [c.laddr for p in processes for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    listening = {(str(address.ip), int(address.port)) for address in found}
    assert {control, *data} <= listening
    assert {address for address, _ in listening} == {"127.0.0.1"}
    open_gate(tmp_path)
    assert job.await_termination(60)


@pytest.mark.parametrize("recovery", ["job", "task"])
def test_two_hundred_silent_connections_keep_no_replacement_out(start, tmp_path: Path, recovery: str) -> None:
    """More than were heard at a time, on every port of the job, and nobody of them ever goes."""
    job = start(counting("silent", gated(tmp_path, ROWS), tmp_path / "out"), recovery=recovery)
    wait_until(lambda: job.status.checkpoints.completed >= 1, "a checkpoint", job=job)
    control, data = ports(job)
    crowd = [socket.create_connection(address, timeout=20) for address in [control, *data] for _ in range(200)]
    replace_one(job, 1)
    told = f"strangers crowd port {control[1]} of {control[0]} (control)"
    assert any(w.startswith(told) for w in job.status.warnings), job.status.warnings
    wait_until(lambda: any("strangers crowd port" in line for line in job.status.log), "a worker's word", job=job)
    open_gate(tmp_path)
    assert job.await_termination(60)
    for stranger in crowd:
        stranger.close()
    assert job.status.restarts == 1
    assert_running_counts(tmp_path / "out", ROWS)


@pytest.mark.parametrize(
    ("silent_per_s", "rubbish_per_s", "kills"),
    [(100, 100, 1), pytest.param(1_000, 1_000, 10, marks=pytest.mark.full)],
)
def test_a_worker_is_replaced_while_strangers_come(
    start, fake_spark: FakeSpark, tmp_path: Path, silent_per_s: int, rubbish_per_s: int, kills: int
) -> None:
    at_once = {"strategy": "fixed_delay", "attempts": 100}
    job = start(counting("flood", gated(tmp_path, ROWS), tmp_path / "out"), parallelism=3, restart=at_once)
    wait_until(lambda: job.status.checkpoints.completed >= 1, "a checkpoint", job=job)
    dice = random.Random(kills)
    took_ms: list[float] = []
    for _ in range(kills):
        control, data = ports(job)
        with flood([control, control, *data], silent_per_s=silent_per_s, rubbish_per_s=rubbish_per_s) as strangers:
            time.sleep(1.0)  # a crowd gathers
            took_ms.append(replace_one(job, dice.randrange(3)))
            completed = job.status.checkpoints.completed
            wait_until(lambda before=completed: job.status.checkpoints.completed > before, "a checkpoint", job=job)
        print(strangers)
    print(f"replaced within {sorted(round(ms) for ms in took_ms)} ms")
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert job.status.restarts == kills, "a stranger is no failure"
    assert_running_counts(tmp_path / "out", ROWS)

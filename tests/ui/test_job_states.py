"""The state of a job as the list tells it, from what its driver says of itself."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
from ui_world import run_main

from cutwater.runtime.driver import lease as lease_module
from cutwater.runtime.driver.lease import Lease, Sign, Turn
from cutwater.runtime.status.status import JobStatus
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import JobEnded
from cutwater.storage.store.local import LocalStore
from cutwater.ui.inspect import driver_runs, job_infos


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore.open(tmp_path)


def states(store: LocalStore, **options: Any) -> dict[str, str]:
    return {i["job"]: i["state"] for i in job_infos(store, driver_runs, **options)}


def put(store: LocalStore, job: str, **changes: Any) -> None:
    found = lease_module._process(changes.get("pid", os.getpid()))
    made = Sign(
        driver="d",
        generation=1,
        beat=1,
        host=socket.gethostname(),
        space=lease_module._process_space(),
        pid=os.getpid(),
        started=found[1] if found else 0,
        since_ms=0,
        phase="running",
        attempt=1,
    )
    store.overwrite(
        f"{job}/control/driver.json", msgspec.json.encode(msgspec.structs.replace(made, **changes)).ljust(1024)
    )


def test_a_job_that_forms_is_told_so_and_then_its_phases(store: LocalStore) -> None:
    """No attempt is in its log yet: it once passed for ended."""
    JobLog(store, "job").create()
    lease, ended = Lease(store, "job", Turn(1)), threading.Event()
    assert states(store) == {"job": "forming"}
    for phase in ("deploying", "running", "draining", "restarting", "ending"):
        put(store, "job", phase=phase)
        assert states(store) == {"job": phase}
    lease.follow(lambda: JobStatus(name="job", uid="", phase="running"), ended)
    ended.set()
    lease.close()


def test_a_stopped_job_that_is_started_again_forms_and_is_no_longer_stopped(store: LocalStore) -> None:
    log = JobLog(store, "job")
    log.begin_attempt("afar.example:1")
    log.append(JobEnded(1, "stopped", "by the user", 1_010))
    assert states(store) == {"job": "stopped"}
    put(store, "job", phase="forming")
    assert states(store) == {"job": "forming"}


def test_a_dead_driver_is_told_and_one_that_ended_before_it_went(store: LocalStore) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    pid = process.pid
    put_of = {"pid": pid, "started": 1}
    process.wait()
    for job in ("died", "died-before-it-began", "failed-first"):
        JobLog(store, job).create()
        put(store, job, **put_of)
    JobLog(store, "died").begin_attempt(f"{socket.gethostname()}:{pid}")
    log = JobLog(store, "failed-first")
    log.begin_attempt(f"{socket.gethostname()}:{pid}")
    log.append(JobEnded(1, "failed", "no space", 1_010))
    assert states(store) == {"died": "dead", "died-before-it-began": "dead", "failed-first": "failed"}


def test_a_paused_driver_is_told(store: LocalStore) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        JobLog(store, "job").create()
        put(store, "job", pid=process.pid)
        assert states(store) == {"job": "running"}
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 30
        while states(store) != {"job": "paused"}:
            assert time.monotonic() < deadline
    finally:
        process.kill()
        process.wait()


def test_a_driver_on_another_host_is_watched_for_a_beat(store: LocalStore) -> None:
    for job in ("beats", "stands-still", "ends"):
        JobLog(store, job).create()
        put(store, job, host="afar.example", since_ms=2**62)
    over = threading.Event()

    def beat() -> None:
        number = 1
        while not over.wait(0.01):
            number += 1
            put(store, "beats", host="afar.example", beat=number)
            store.delete("ends/control/driver.json")

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        assert states(store, watch_s=1.0) == {"beats": "running", "stands-still": "silent", "ends": "dead"}
        assert states(store, watch_s=1.0, only=["beats"]) == {"beats": "running"}
    finally:
        over.set()
        thread.join()


def test_a_request_to_a_job_whose_driver_died_is_answered_at_once(
    store: LocalStore, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    JobLog(store, "job").begin_attempt(f"{socket.gethostname()}:{2**22 + 1}")
    code, _, err = run_main(capfd, "stop", tmp_path, "job", "--timeout", "1h")
    assert (code, err) == (1, "error: job 'job' does not run: its driver died\nhint: Nothing was done.\n")

"""Who drives a job: what a start does with the sign of another driver.  No job is started here."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cutwater.errors import FencedError
from cutwater.runtime.driver import lease as lease_module
from cutwater.runtime.driver.lease import Lease, Sign, Turn, await_turn, process_state, read_sign
from cutwater.runtime.status.status import JobStatus
from cutwater.storage.job_log import JobLog
from cutwater.storage.store.base import Store
from cutwater.storage.store.local import LocalStore
from memory_store import MemoryStore

FILE = "job/control/driver.json"


@pytest.fixture(params=["local", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    made: Any = LocalStore.open(tmp_path) if request.param == "local" else MemoryStore()
    JobLog(made, "job").create()
    return made


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "BEAT_S", 0.02)
    monkeypatch.setattr(lease_module, "_LOOK_S", 0.01)
    monkeypatch.setattr(lease_module, "_POLL_S", 0.005)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Another process of this host."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


def sign(**changes: Any) -> Sign:
    """Of a driver on another host."""
    made = Sign(
        driver="d1",
        generation=4,
        beat=9,
        host="afar.example",
        space="there",
        pid=77,
        started=5,
        since_ms=1_000,
        phase="running",
        attempt=3,
    )
    return msgspec.structs.replace(made, **changes)


def here(pid: int) -> dict[str, Any]:
    """Fields of a process of this host."""
    found = lease_module._process(pid)
    assert found is not None
    return {"host": socket.gethostname(), "space": lease_module._process_space(), "pid": pid, "started": found[1]}


def put(store: Store, said: Sign) -> None:
    store.overwrite(FILE, msgspec.json.encode(said).ljust(lease_module._BYTES))


class Beating:
    """Another driver that beats, as seen in the folder."""

    def __init__(self, store: Store, said: Sign) -> None:
        self._store, self._said, self._over = store, said, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        beat = self._said.beat
        while not self._over.wait(0.01):
            beat += 1
            put(self._store, msgspec.structs.replace(self._said, beat=beat))

    def __enter__(self) -> None:
        put(self._store, self._said)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def test_a_job_that_nobody_drives_is_started_at_once(store: Store) -> None:
    assert await_turn(store, "job") == Turn(1)


@pytest.mark.parametrize("where", ["here", "afar"])
def test_a_driver_that_beats_is_named_and_the_start_refused(
    store: Store, where: str, sleeper: subprocess.Popen[bytes]
) -> None:
    other = sign(**(here(sleeper.pid) if where == "here" else {}))
    with Beating(store, other), pytest.raises(FencedError) as refused:
        await_turn(store, "job", lease_s=60)
    text = str(refused.value)
    assert f"process {other.pid} on host {other.host}, since 1970-01-01 00:00:01 UTC, running, no checkpoint" in text
    assert "takeover=True" in refused.value.hint
    assert "cutwater stop" in refused.value.hint


def test_takeover_asks_nobody_and_says_whose_job_it_takes(store: Store) -> None:
    with Beating(store, sign()):
        assert await_turn(store, "job", takeover=True) == Turn(
            5, "takes over from the driver afar.example:77, as it was asked to"
        )


@pytest.mark.parametrize("how", ["killed", "killed and not reaped", "another process has its number"])
def test_a_dead_process_of_this_host_is_not_waited_for(
    store: Store, sleeper: subprocess.Popen[bytes], how: str
) -> None:
    other = sign(**here(sleeper.pid))
    if how == "another process has its number":
        other = msgspec.structs.replace(other, started=other.started + 1)
    else:
        sleeper.kill()
        if how == "killed":
            sleeper.wait()
        wait_for(lambda: process_state(other) == "dead")
    put(store, other)
    assert await_turn(store, "job", lease_s=30) == Turn(5), "waiting would have left a note"


@pytest.mark.parametrize("where", ["here", "afar"])
def test_a_driver_that_gives_no_sign_is_replaced_when_its_lease_has_run_out(
    store: Store, where: str, sleeper: subprocess.Popen[bytes], caplog: pytest.LogCaptureFixture, monkeypatch: Any
) -> None:
    """Paused, cut off, or its host is dead: nobody can tell; and no clock of another host is looked at."""
    monkeypatch.setattr(lease_module, "_SILENT_S", 0.05)
    other = sign(**(here(sleeper.pid) if where == "here" else {}), since_ms=2**60)
    sleeper.send_signal(signal.SIGSTOP)
    put(store, other)
    turn = await_turn(store, "job", lease_s=0.3)
    assert turn.generation == 5
    assert turn.note == f"takes over from the driver {other.host}:{other.pid}: no sign of life for 0 s"
    assert [r.getMessage() for r in caplog.records] == [
        f"job 'job': its driver {other.host}:{other.pid} gives no sign of life; taken over in 0 s if it stays so"
    ]


def test_a_driver_that_comes_to_its_end_meanwhile_gives_way(store: Store) -> None:
    put(store, sign())
    threading.Timer(0.1, lambda: store.delete(FILE)).start()
    assert await_turn(store, "job", lease_s=60) == Turn(5)


@pytest.mark.parametrize(
    "data",
    [b"", b"{}", b"\xff" * 1024, b"x" * 5000, msgspec.json.encode(sign(host="a\x1b[2Jb")).ljust(1024)],
    ids=["empty", "another object", "no text", "long", "what a terminal would obey"],
)
def test_what_is_no_sign_keeps_nobody_off_for_longer_than_a_lease(store: Store, data: bytes) -> None:
    store.create(FILE, data)
    assert read_sign(store, "job") is None
    assert await_turn(store, "job", lease_s=0.05).generation == 1


# ---------------------------------------------------------------------------------------------------- the own sign


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_lease_beats_tells_the_phase_and_goes_with_the_job(store: Store) -> None:
    ended = threading.Event()
    lease = Lease(store, "job", Turn(3))
    first = read_sign(store, "job")
    assert first is not None
    assert (first.pid, first.phase, first.generation, process_state(first)) == (os.getpid(), "forming", 3, "alive")
    lease.follow(lambda: JobStatus(name="job", uid="", phase="running", attempt=2), ended)
    wait_for(
        lambda: (s := read_sign(store, "job")) and (s.phase, s.attempt, s.beat > first.beat) == ("running", 2, True)
    )
    with pytest.raises(FencedError):
        await_turn(store, "job", lease_s=60)
    ended.set()
    wait_for(lambda: read_sign(store, "job") is None)
    lease.close()
    assert await_turn(store, "job") == Turn(1)


def test_a_driver_that_was_taken_over_does_not_write_over_its_successor(store: Store) -> None:
    """It slept, and wakes up: neither a beat nor its end touches what the successor says."""
    old = Lease(store, "job", Turn(1))
    put(store, sign(generation=2))
    time.sleep(0.2)
    assert read_sign(store, "job") == sign(generation=2)
    old.close()
    assert read_sign(store, "job") == sign(generation=2)


def test_a_late_beat_of_a_predecessor_is_written_over(store: Store) -> None:
    new = Lease(store, "job", Turn(2))
    put(store, sign(generation=1))
    wait_for(lambda: (s := read_sign(store, "job")) and s.generation == 2)
    new.close()


def test_a_beat_that_cannot_be_written_ends_nothing(tmp_path: Path) -> None:
    store = LocalStore.open(tmp_path / "chk")
    JobLog(store, "job").create()
    lease = Lease(store, "job", Turn(1))
    (tmp_path / "chk").rename(tmp_path / "gone")
    time.sleep(0.1)
    (tmp_path / "gone").rename(tmp_path / "chk")
    before = read_sign(store, "job")
    assert before is not None
    wait_for(lambda: (s := read_sign(store, "job")) and s.beat > before.beat)
    lease.close()


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    store = LocalStore.open(tmp_path / "chk")
    JobLog(store, "job").create()
    outside = tmp_path / "mine"
    outside.write_text("mine")
    (tmp_path / "chk" / "job" / "control").mkdir()
    (tmp_path / "chk" / FILE).symlink_to(outside)
    lease = Lease(store, "job", Turn(1))
    lease.close()
    assert outside.read_text() == "mine"

"""The driver dies, is doubled, or finds its directory in disorder (R6, the log as fence)."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from fake_host import FakeHost, FakeSpark, adopt, context, server_address
from runtime_world import (
    assert_ids,
    assert_running_counts,
    counting,
    flip,
    gated,
    open_gate,
    query,
    wait_until,
    written_for,
)

import cutwater as cw
from cutwater.api.jobs import job as job_module
from cutwater.errors import CorruptSnapshotError, CutwaterError, FencedError
from cutwater.runtime.driver.publisher import Publisher
from cutwater.storage.job_log import JobLog
from cutwater.storage.snapshot.manifest import Manifest
from cutwater.storage.store.local import LocalStore

ROWS = 12_000


def drive(folder: str, server: str, die: str = "") -> None:
    """A whole driver in a process of its own, as a user's script would be; ``die``: when it kills itself."""
    adopt(server)
    job_module.SparkHost = FakeHost  # type: ignore[misc]
    path = Path(folder)
    publish = Publisher.publish

    def dying(self: Publisher, manifest: Manifest) -> Any:
        if die == "before publishing" and manifest.checkpoint_id >= 4:
            os.kill(os.getpid(), signal.SIGKILL)
        result = publish(self, manifest)
        if die == "after publishing" and manifest.checkpoint_id >= 4:
            os.kill(os.getpid(), signal.SIGKILL)
        if die == "after publishing the final checkpoint" and manifest.final:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    Publisher.publish = dying  # type: ignore[method-assign]
    flow = counting("driver", gated(path, ROWS), path / "out")
    flow.start(FakeSpark(), checkpoint=path / "chk", interval="50ms").await_termination()  # type: ignore[arg-type]


def run_driver(folder: Path, die: str = "") -> Any:
    process = context().Process(target=drive, args=(str(folder), server_address(), die))
    process.start()
    return process


def workers_of(folder: Path) -> list[int]:
    """Nothing of a dead driver may stay: workers are children of the fork server, so they are found by their files."""
    return [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and str(folder) in _environment(p)]


def _environment(process: Path) -> str:
    try:
        return " ".join(os.readlink(f) for f in (process / "fd").iterdir())
    except OSError:
        return ""


def finish(folder: Path) -> None:
    process = run_driver(folder)
    process.join(40)
    assert process.exitcode == 0
    assert_running_counts(folder / "out", ROWS)


def test_the_driver_is_killed_at_random_moments(tmp_path: Path) -> None:
    rng = random.Random(11)
    log = tmp_path / "chk" / "driver" / "log"
    for _ in range(3):
        known = len(list(log.glob("*"))) if log.exists() else 0
        process = run_driver(tmp_path)
        wait_until(lambda known=known: log.exists() and len(list(log.glob("*"))) > known, "a sign of life in the log")
        time.sleep(rng.uniform(0.05, 0.6))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "void: the driver ended by itself"
    open_gate(tmp_path)
    finish(tmp_path)


@pytest.mark.parametrize("moment", ["before publishing", "after publishing", "after publishing the final checkpoint"])
def test_the_driver_dies_around_the_log_entry(tmp_path: Path, moment: str) -> None:
    if moment == "after publishing the final checkpoint":
        open_gate(tmp_path)  # else it goes on until its moment comes
    process = run_driver(tmp_path, moment)
    process.join(30)
    assert process.exitcode == -signal.SIGKILL, "void: the driver never came to that moment"
    open_gate(tmp_path)
    finish(tmp_path)


def test_workers_of_a_dead_driver_go_away(tmp_path: Path) -> None:
    process = run_driver(tmp_path)
    log = tmp_path / "chk" / "driver" / "log"
    wait_until(lambda: len(list(log.glob("*"))) > 4 if log.exists() else False, "checkpoints")
    process.kill()
    process.join()
    wait_until(lambda: not workers_of(tmp_path), "the end of the workers", 15)


def test_a_second_driver_takes_over_and_the_first_commits_nothing_more(start, tmp_path: Path) -> None:
    def flow() -> cw.Dataflow:
        return counting("two", gated(tmp_path, ROWS), tmp_path / "out")

    first = start(flow())
    wait_until(lambda: first.status.checkpoints.completed >= 2, "checkpoints of the first")
    second = start(flow(), takeover=True)
    assert any("takes over from the driver" in warning for warning in second.status.warnings)
    with pytest.raises(FencedError, match="superseded by attempt 2"):
        first.await_termination(30)
    wait_until(lambda: second.status.checkpoints.completed >= 2, "checkpoints of the second")
    open_gate(tmp_path)
    assert second.await_termination(30)
    assert_running_counts(tmp_path / "out", ROWS)


def test_a_second_start_by_mistake_is_refused_and_the_first_job_goes_on(start, tmp_path: Path) -> None:
    def flow() -> cw.Dataflow:
        return counting("twice", gated(tmp_path, ROWS), tmp_path / "out")

    first = start(flow())
    wait_until(lambda: first.status.checkpoints.completed >= 2, "checkpoints of the first")
    with pytest.raises(
        FencedError, match=rf"process {os.getpid()} on host .*, since 20.* UTC, running, newest checkpoint \d+ of 20"
    ):
        start(flow())
    assert first.status.restarts == 0
    open_gate(tmp_path)
    assert first.await_termination(30)
    assert_running_counts(tmp_path / "out", ROWS)
    again = start(flow())  # has finished: nobody is in the way
    assert again.await_termination(30)
    assert not (tmp_path / "chk" / "twice" / "control" / "driver.json").exists()


@pytest.mark.full
def test_a_paused_driver_is_replaced_and_finds_its_job_gone_when_it_wakes_up(tmp_path: Path) -> None:
    log = tmp_path / "chk" / "driver" / "log"
    first = run_driver(tmp_path)
    wait_until(lambda: log.exists() and len(list(log.glob("*"))) > 4, "checkpoints")
    os.kill(first.pid, signal.SIGSTOP)
    second = run_driver(tmp_path)
    known = JobLog(LocalStore(str(tmp_path / "chk")), "driver").read().attempt
    wait_until(
        lambda: JobLog(LocalStore(str(tmp_path / "chk")), "driver").read().attempt > known, "the second driver", 60
    )
    os.kill(first.pid, signal.SIGCONT)
    first.join(40)
    assert first.exitcode == 1, "it ended with FencedError"
    open_gate(tmp_path)
    second.join(60)
    assert second.exitcode == 0
    assert_running_counts(tmp_path / "out", ROWS)


def test_many_drivers_at_once_leave_one_result(start, tmp_path: Path) -> None:
    """Whoever loses ends with ``FencedError``; the rows come out once."""
    open_gate(tmp_path)
    jobs = [start(counting("many", gated(tmp_path, ROWS), tmp_path / "out"), takeover=True) for _ in range(3)]
    ends: list[str] = []
    for job in jobs:
        try:
            job.await_termination(30)
            ends.append("finished")
        except FencedError:
            ends.append("fenced")
    assert ends.count("finished") >= 1, ends
    assert_running_counts(tmp_path / "out", ROWS)


# --------------------------------------------------------------------------------------------------- the directory


def stopped_job(start: Any, folder: Path, *, roll_rows: int = 10**9) -> list[Path]:
    """A stopped job; its checkpoints by what their folders are called, oldest first."""
    flow = counting("disorder", gated(folder, ROWS, rate=8_000), folder / "out", keys=5_000, roll_rows=roll_rows)
    job = start(flow, inline_threshold_bytes=100)
    wait_until(lambda: job.status.checkpoints.completed >= 4, "checkpoints")
    job.stop()
    completed = JobLog(LocalStore(str(folder / "chk")), "disorder").read().completed
    return [folder / "chk" / "disorder" / f"chk-{c.checkpoint_id}" for c in reversed(completed)]


def again(start: Any, folder: Path, *, roll_rows: int = 10**9) -> Any:
    flow = counting("disorder", gated(folder, ROWS, rate=8_000), folder / "out", keys=5_000, roll_rows=roll_rows)
    return start(flow, inline_threshold_bytes=100)


@pytest.mark.parametrize("damage", ["flipped", "torn", "missing"])
def test_a_damaged_newest_checkpoint_is_passed_over_with_a_warning(start, tmp_path: Path, damage: str) -> None:
    newest = stopped_job(start, tmp_path)[-1]
    entry = written_for(newest.parent, int(newest.name.split("-")[1]))[0]
    victim = newest.parent / entry.file
    if damage == "flipped":
        flip(newest.parent, entry)
    elif damage == "torn":
        victim.write_bytes(victim.read_bytes()[:-1])
    else:
        victim.unlink()
    open_gate(tmp_path)
    job = again(start, tmp_path)
    assert job.await_termination(30)
    assert job.status.checkpoints.restored_id < int(newest.name.split("-")[1])
    assert job.status.checkpoints.restored_id > 0
    assert any(
        victim.name in warning and f"Checkpoint {newest.name.split('-')[1]} " in warning
        for warning in job.status.warnings
    ), job.status.warnings
    assert_ids(tmp_path / "out", ROWS)


def test_when_every_checkpoint_is_damaged_the_job_refuses_to_start_over(start, tmp_path: Path) -> None:
    stopped_job(start, tmp_path)
    for file in (tmp_path / "chk" / "disorder" / "shared").iterdir():
        file.write_bytes(b"")
    job = again(start, tmp_path)
    with pytest.raises(CorruptSnapshotError, match=r"no completed checkpoint of job .* is usable: .*shared/"):
        job.await_termination(30)


def test_a_program_that_does_not_fit_its_checkpoint_is_refused(start, tmp_path: Path) -> None:
    stopped_job(start, tmp_path)
    flow = cw.Dataflow("disorder")
    rows = flow.read("in", gated(tmp_path, ROWS))
    rows.key_by("value").aggregate("count", n=cw.sum("value")).write("out", cw.files(str(tmp_path / "out")))
    with pytest.raises(CutwaterError, match="count"):
        start(flow).await_termination(30)


@pytest.mark.parametrize("what", ["file", "foreign", "below a file"])
def test_a_directory_that_cannot_serve_is_refused_at_once(start, tmp_path: Path, what: str) -> None:
    target = tmp_path / "chk"
    if what == "file":
        target.write_text("not a directory")
    elif what == "foreign":
        (target / "strange" / "data").mkdir(parents=True)
        (target / "strange" / "data" / "important.txt").write_text("not ours")
    else:
        (tmp_path / "file").write_text("")
        target = tmp_path / "file" / "chk"
    with pytest.raises(CutwaterError, match="strange" if what == "foreign" else "chk"):
        start(counting("strange", gated(tmp_path, ROWS), tmp_path / "out"), checkpoint=target).await_termination(30)
    if what == "foreign":
        assert (target / "strange" / "data" / "important.txt").read_text() == "not ours"


def test_a_checkpoint_directory_that_vanishes_ends_the_job_with_a_clear_error(start, tmp_path: Path) -> None:
    job = start(
        counting("vanish", gated(tmp_path, ROWS), tmp_path / "out"),
        restart={"strategy": "fixed_delay", "attempts": 2},
    )
    wait_until(lambda: job.status.checkpoints.completed >= 2, "checkpoints")
    (tmp_path / "chk").rename(tmp_path / "gone")
    (tmp_path / "chk").write_text("in the way")
    with pytest.raises(CutwaterError, match="chk"):
        job.await_termination(30)
    assert_no_more(tmp_path / "out")


def assert_no_more(out: Path) -> None:
    """What is committed is right, even if it is not all."""
    rows, distinct = query("SELECT count(*), count(DISTINCT eid) FROM {out}", out=out)[0]
    assert rows == distinct > 0


def test_a_savepoint_of_disorder_keeps_ids_unique(start, tmp_path: Path) -> None:
    """Checkpoint ids grow over drivers, also past what a dead driver left on disk."""
    folders = stopped_job(start, tmp_path)
    last = int(folders[-1].name.split("-")[1])
    left = tmp_path / "chk" / "disorder" / f"chk-{last + 1}"
    left.mkdir(exist_ok=True)  # an aborted checkpoint may have left that folder
    (left / "leftover").write_text("half a checkpoint")
    open_gate(tmp_path)
    job = again(start, tmp_path)
    assert job.await_termination(30)
    assert job.status.checkpoints.last_completed_id > last + 1
    assert_ids(tmp_path / "out", ROWS)

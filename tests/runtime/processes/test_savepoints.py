"""Savepoints of running jobs: taken, restored anywhere by anybody, stopped with, drained to; against DuckDB."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from fake_host import FakeSpark
from runtime_world import assert_running_counts, counting, gated, open_gate, query, wait_until

import cutwater as cw
from cutwater.api.jobs.job import Job
from cutwater.runtime.driver.savepoints import SavepointRequest
from cutwater.storage.job_log import JobLog
from cutwater.storage.reading import open_snapshot
from cutwater.storage.snapshot.channel_log import CHANNEL_KIND
from cutwater.storage.store.local import LocalStore

ROWS, KEYS = 8_000, 20


def flow_of(folder: Path, name: str = "first", rate: float | None = 20_000, out: str = "out") -> cw.Dataflow:
    return counting(name, gated(folder, ROWS, rate=rate), folder / out, keys=KEYS, roll_rows=500)


def seen(job: Job, checkpoints: int = 2) -> Job:
    wait_until(lambda: job.status.checkpoints.completed >= checkpoints, "checkpoints", job=job)
    return job


def finish(job: Job, folder: Path) -> None:
    open_gate(folder)
    assert job.await_termination(40)


def assert_goes_on(out: Path) -> None:
    """Per key the counts of the rows that came last, of all the rows that there are."""
    wrong = query(
        f"""WITH every AS (
          SELECT range % {KEYS} AS key, count(*) AS n, sum(range) AS total FROM range({ROWS}) GROUP BY 1
        ), last AS (SELECT key, count(*) AS rows, count(DISTINCT eid) AS ids, min(n) AS low, max(n) AS high,
                 max_by(total, n) AS total FROM {{out}} GROUP BY 1)
        SELECT * FROM last JOIN every USING (key)
        WHERE high <> n OR rows <> ids OR low <> n - rows + 1 OR last.total <> every.total""",
        out=out,
    )
    assert not wrong, f"counts that do not go on from the savepoint: {wrong[:3]}"
    assert 0 < query("SELECT count(*) FROM {out}", out=out)[0][0] < ROWS, "void: everything, or nothing, came behind it"


@pytest.mark.parametrize(
    ("protocol", "parallelism", "settings"),
    [
        ("aligned", 3, {}),
        pytest.param("unaligned", 2, {"aligned_timeout": "0ms"}, marks=pytest.mark.full),
        pytest.param("chandy_lamport", 1, {}, marks=pytest.mark.full),
        pytest.param("synchronous", 2, {}, marks=pytest.mark.full),
        pytest.param("at_least_once", 2, {}, marks=pytest.mark.full),
    ],
)
def test_58_another_job_begins_from_a_savepoint_that_was_moved(
    start, tmp_path: Path, protocol: str, parallelism: int, settings: dict[str, Any]
) -> None:
    job = seen(start(flow_of(tmp_path), protocol=protocol, **settings))
    path = Path(job.savepoint(tmp_path / "kept"))
    assert path.parent == tmp_path / "kept"
    manifest = open_snapshot(str(path)).manifest
    assert {s.protocol for s in manifest.subtasks} == {"aligned"}
    assert not [e for e in manifest.entries if e.kind == CHANNEL_KIND], "54: nothing was on its way"
    finish(job, tmp_path)
    if protocol != "at_least_once":
        assert_running_counts(tmp_path / "out", ROWS, keys=KEYS)
    moved = tmp_path / "moved"
    shutil.move(path, moved)
    shutil.rmtree(tmp_path / "chk")
    second = flow_of(tmp_path, "second", None, "second")
    second = start(second, checkpoint=tmp_path / "chk2", restore=str(moved), parallelism=parallelism)
    assert second.await_termination(40)
    assert_goes_on(tmp_path / "second")


def test_58_the_job_itself_goes_back_to_a_savepoint(start, tmp_path: Path) -> None:
    job = seen(start(flow_of(tmp_path, rate=4_000)))
    path = job.savepoint(tmp_path / "kept")
    seen(job, job.status.checkpoints.completed + 4)
    job.stop()
    job = start(flow_of(tmp_path, rate=None), restore=path)
    finish(job, tmp_path)
    assert job.status.checkpoints.restored_id == open_snapshot(path).manifest.checkpoint_id
    assert_running_counts(tmp_path / "out", ROWS, keys=KEYS)


def test_58_stopped_with_a_savepoint_it_goes_on_from_there_and_from_its_own_checkpoints(start, tmp_path: Path) -> None:
    job = seen(start(flow_of(tmp_path)))
    path = job.stop(savepoint=tmp_path / "kept")
    assert path is not None
    assert job.status.outcome == "stopped"
    snapshot = open_snapshot(path)
    log = JobLog(LocalStore(tmp_path / "chk"), "first").read()
    assert log.completed[0].checkpoint_id == snapshot.manifest.checkpoint_id
    assert not snapshot.manifest.final
    second = start(flow_of(tmp_path, "second", None, "second"), checkpoint=tmp_path / "chk2", restore=path)
    before = query("SELECT count(*) FROM {out}", out=tmp_path / "out")[0][0]
    finish(second, tmp_path)
    assert_goes_on(tmp_path / "second")
    after = query("SELECT count(*) FROM {out}", out=tmp_path / "second")[0][0]
    assert before + after == ROWS, "every row up to the savepoint was committed by the job that stopped with it"
    finish(start(flow_of(tmp_path, rate=None)), tmp_path)
    assert_running_counts(tmp_path / "out", ROWS, keys=KEYS)


def windows(folder: Path) -> cw.Dataflow:
    flow = cw.Dataflow("windows")
    rows = flow.read("in", gated(folder, ROWS, rate=40_000), event_time="timestamp")
    counted = rows.key_by("value").window("all", cw.tumbling("1000d")).aggregate("count", n=cw.count())
    counted.write("out", cw.files(str(folder / "out")))
    return flow


def test_58_draining_fires_the_last_windows_and_stopping_does_not(start, tmp_path: Path) -> None:
    job = seen(start(windows(tmp_path)))
    job.stop(savepoint=tmp_path / "kept")
    assert not list((tmp_path / "out").glob("*.parquet"))
    job = seen(start(windows(tmp_path)), 1)
    path = job.stop(savepoint=tmp_path / "kept", drain=True)
    assert job.status.outcome == "finished"
    total, distinct = query("SELECT sum(n), count(*) FROM {out}", out=tmp_path / "out")[0]
    assert 0 < total == distinct < ROWS, "the rows behind the gate were never read"
    assert open_snapshot(str(path)).manifest.final
    again = start(windows(tmp_path))
    assert again.await_termination(20), "it has finished"
    renamed = windows(tmp_path)
    with pytest.raises(cw.ConfigError, match="had been drained"):
        start(renamed, checkpoint=tmp_path / "chk2", restore=path).await_termination(20)


def test_58_a_stop_that_fails_is_told_and_the_job_goes_on(
    start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = SavepointRequest.prepare

    def gone(*args: Any) -> SavepointRequest:
        request = prepare(*args)
        shutil.rmtree(tmp_path / "kept")
        return request

    job = seen(start(flow_of(tmp_path, rate=4_000)))
    monkeypatch.setattr(SavepointRequest, "prepare", gone)
    with pytest.raises(cw.CutwaterError, match="the savepoint failed: a subtask could not write its snapshot"):
        job.stop(savepoint=tmp_path / "kept")
    finish(job, tmp_path)
    assert job.status.restarts == 1
    assert_running_counts(tmp_path / "out", ROWS, keys=KEYS)


def test_the_fence_a_driver_that_lost_the_job_hands_out_no_savepoint(start, tmp_path: Path) -> None:
    job = seen(start(flow_of(tmp_path, rate=4_000), interval="1h"), 0)
    wait_until(lambda: job.status.phase == "running", "the job", job=job)
    log = JobLog(LocalStore(tmp_path / "chk"), "first")
    log.begin_attempt("somebody else", after=log.read().attempt)
    with pytest.raises(cw.CutwaterError):
        job.savepoint(tmp_path / "kept")
    with pytest.raises(cw.CutwaterError):
        job.await_termination(20)
    assert list((tmp_path / "kept").iterdir()) == []


@pytest.mark.full
def test_no_claim_nothing_of_the_savepoint_is_needed_behind_the_first_checkpoint(
    start, tmp_path: Path, fake_spark: FakeSpark
) -> None:
    job = seen(start(flow_of(tmp_path), inline_threshold_bytes=0))
    path = job.stop(savepoint=tmp_path / "kept")
    assert path is not None
    second = flow_of(tmp_path, "second", 4_000, "second")
    second = seen(start(second, checkpoint=tmp_path / "chk2", restore=path, inline_threshold_bytes=0), 1)
    shutil.rmtree(path)
    os.kill(fake_spark.pids[0], signal.SIGKILL)
    wait_until(lambda: second.status.restarts == 1, "the restart", job=second)
    finish(second, tmp_path)
    assert_goes_on(tmp_path / "second")


def test_58_a_claimed_savepoint_goes_when_the_job_has_checkpoints_of_its_own(start, tmp_path: Path) -> None:
    job = seen(start(flow_of(tmp_path)))
    path = job.stop(savepoint=tmp_path / "kept")
    with pytest.raises(cw.ConfigError, match="only a savepoint can be claimed"):
        start(flow_of(tmp_path, "none"), checkpoint=tmp_path / "chk3", claim="claim")
    second = flow_of(tmp_path, "second", 4_000, "second")
    second = seen(start(second, checkpoint=tmp_path / "chk2", restore=path, claim="claim", num_retained=2), 1)
    wait_until(lambda: not (tmp_path / "kept").exists() or not list((tmp_path / "kept").iterdir()), "its removal")
    assert second.status.checkpoints.completed >= 2, "one damaged checkpoint must not be the end"
    finish(second, tmp_path)
    assert_goes_on(tmp_path / "second")


def test_a_savepoint_of_a_job_that_has_ended_or_keeps_nothing_is_refused(start, tmp_path: Path) -> None:
    open_gate(tmp_path)
    job = start(flow_of(tmp_path, rate=None))
    assert job.await_termination(30)
    with pytest.raises(cw.CutwaterError, match="ended"):
        job.savepoint(tmp_path / "kept")
    with pytest.raises(cw.ConfigError, match="drained with a savepoint"):
        job.stop(drain=True)
    assert list((tmp_path / "kept").iterdir()) == []

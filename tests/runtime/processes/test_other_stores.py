"""A whole job in a store that is no file system: nothing in the engine reaches around the store.

One store registers its scheme and is one file of the tests (``elsewhere``); what lies in its bucket cannot be found by
name.  So checkpoints, log, staged rows, signs of life, requests, savepoints and restores all went through it.  The
other one is a real server's.
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from fake_host import FakeSpark
from runtime_world import assert_running_counts, gated, kill_some, open_gate, wait_until

import cutwater as cw
from cutwater.errors import ConfigError
from cutwater.runtime.driver.requests import send
from cutwater.storage.job_log import JobLog
from cutwater.storage.reading import open_snapshot, verify_checkpoint
from cutwater.storage.store.opening import joined, open_existing, store_at
from elsewhere import elsewhere
from object_world import in_environment

ROWS, KEYS = 12_000, 20


def _flow(folder: Path, name: str = "job") -> cw.Dataflow:
    """Running counts, into files and into a table whose rows are staged beside the job."""
    flow = cw.Dataflow(name)
    rows = flow.read("in", gated(folder, ROWS)).with_columns("key", key=pl.col("value") % KEYS)
    counts = rows.key_by("key").aggregate("count", n=cw.count(), total=cw.sum("value"), eid=cw.last("value"))
    counts.write("out", cw.files(str(folder / f"out-{name}"), roll_rows=500))
    counts.write("table", cw.table(f"sqlite:///{folder / f'{name}.db'}", "counts", parallelism=2))
    return flow


def _table(folder: Path, name: str = "job") -> tuple[Any, ...]:
    with sqlite3.connect(folder / f"{name}.db") as connection:
        return connection.execute("SELECT count(*), count(DISTINCT eid), min(eid), max(eid) FROM counts").fetchone()


Place = Callable[[str], str]


@pytest.fixture(params=["elsewhere", "s3"])
def place(request: Any, fake_spark: FakeSpark, tmp_path: Path) -> Place:
    """``place(name)``: a URI."""
    if request.param == "elsewhere":
        return lambda name: elsewhere(tmp_path / "bucket", name)
    above = request.getfixturevalue("bucket")
    fake_spark.prepare = in_environment(request.getfixturevalue("object_server").environment)
    return lambda name: f"{above}/{name}"


def _assert_nothing_beside(folder: Path) -> None:
    """Only objects without a name, and nowhere a folder that somebody took the URI for."""
    if (folder / "bucket").exists():
        assert all(re.fullmatch(r"[0-9a-f]{64}", name) for name in os.listdir(folder / "bucket"))
    made = {"bucket", "gate", "job.db", "out-job", "second.db", "out-second"}
    assert {path.name for path in folder.iterdir()} <= made
    assert not [name for name in os.listdir() if "elsewhere" in name or "s3:" in name]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"protocol": "unaligned", "aligned_timeout": "0ms", "incremental": True},
        pytest.param({"state_replicas": 1}, marks=pytest.mark.full),
        pytest.param({"recovery": "task"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_job_with_deaths_a_savepoint_and_a_restore(
    start: Any, fake_spark: FakeSpark, tmp_path: Path, place: Place, settings: dict[str, Any]
) -> None:
    checkpoints, kept = place("chk"), place("kept")
    job = start(_flow(tmp_path), checkpoint=checkpoints, **settings)
    assert job.checkpoint_dir == joined(checkpoints, "job")
    wait_until(lambda: job.status.checkpoints.completed >= 2, "checkpoints", job=job)
    kill_some(job, fake_spark, 2, seed=1)
    wait_until(lambda: job.status.phase == "running", "a restart", job=job)
    saved = job.savepoint(kept)
    assert saved.startswith(f"{kept}/savepoint-job-")
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert job.status.restarts >= 1
    assert_running_counts(tmp_path / "out-job", ROWS, keys=KEYS)
    assert _table(tmp_path) == (ROWS, ROWS, 0, ROWS - 1)
    second = start(_flow(tmp_path, "second"), checkpoint=checkpoints, restore=saved, claim="claim", **settings)
    assert second.await_termination(60)
    rows, ids, _, last = _table(tmp_path, "second")
    assert (rows, last) == (ids, ROWS - 1)
    assert 0 < rows < ROWS, "void: everything, or nothing, came behind the savepoint"
    assert not store_at(kept).list(), "it was the second job's to remove"
    _assert_nothing_beside(tmp_path)


def test_the_next_driver_goes_on_and_requests_reach_it(start: Any, tmp_path: Path, place: Place) -> None:
    checkpoints = place("chk")
    job = start(_flow(tmp_path), checkpoint=checkpoints)
    wait_until(lambda: job.status.checkpoints.completed >= 2, "checkpoints", job=job)
    answer = send(open_existing(checkpoints), "job", "stop", savepoint=place("kept"))
    assert answer is not None
    assert answer.ok
    assert job.status.outcome == "stopped"
    snapshot = open_snapshot(answer.savepoint)
    assert snapshot.is_savepoint
    store = open_existing(checkpoints)
    log = JobLog(store, "job").read()
    assert log.latest is not None
    assert verify_checkpoint(store, "job", log.latest).problems == ()
    assert open_snapshot(f"{checkpoints}/job@{log.latest.checkpoint_id}").manifest.uid == log.uid
    assert open_snapshot(f"{checkpoints}/job/chk-{log.latest.checkpoint_id}").completed == log.latest
    assert sorted(cw.Snapshot(f"{checkpoints}/job").table("count")["key"].to_pylist()) == list(range(KEYS))
    open_gate(tmp_path)
    assert start(_flow(tmp_path), checkpoint=checkpoints).await_termination(60)
    assert_running_counts(tmp_path / "out-job", ROWS, keys=KEYS)
    assert _table(tmp_path) == (ROWS, ROWS, 0, ROWS - 1)
    _assert_nothing_beside(tmp_path)


def test_output_that_is_read_from_a_folder_is_refused_at_the_start(start: Any, tmp_path: Path, place: Place) -> None:
    flow = cw.Dataflow("job")
    flow.read("in", gated(tmp_path, ROWS)).collect("rows")
    with pytest.raises(ConfigError, match="is no folder of a file system"):
        start(flow, checkpoint=place("chk"))

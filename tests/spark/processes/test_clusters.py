"""Sessions that are not ours: a user's plain local one, local-cluster, a standalone cluster."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession
from spark_world import Killer, assert_exact, counting, executor_of, held, release, wait_until

import cutwater as cw
from cutwater.spark.session import ensure_java

pytestmark = pytest.mark.spark
ROWS = 100_000

ON_LOOPBACK = {"spark_executor_cores": "2", "spark_executor_memory": "1g", "spark_driver_host": "127.0.0.1"}

MakeSession = Callable[..., Any]
"""See the fixture of that name."""


def kill_and_check(spark: SparkSession, folder: Path, *, workers: int, of_executors: int, name: str) -> None:
    flow = counting(name, held(folder, ROWS, rate=50_000), folder / "out")
    job = flow.start(spark, checkpoint=folder / "chk", interval="200ms", parallelism=2)
    killer = Killer(job, random.Random(3))
    for _ in range(workers):
        killer.kill()
    for _ in range(of_executors):
        killer.kill(executor=True)
    release(folder)
    assert job.await_termination(120)
    assert_exact(folder / "out", ROWS)


@pytest.mark.full
def test_a_plain_local_session_where_spark_retries_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One failure of a task ends its Spark job there: the coordinator submits it again."""
    ensure_java()
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.master("local[4]").config("spark.ui.enabled", "false")
    spark = builder.config("spark.driver.host", "127.0.0.1").config("spark.log.level", "OFF").getOrCreate()
    try:
        kill_and_check(spark, tmp_path, workers=3, of_executors=0, name="plain")
    finally:
        spark.stop()


def test_local_cluster_survives_a_lost_executor(make_session: MakeSession, tmp_path: Path) -> None:
    spark = make_session("local-cluster[2,2,1024]")
    try:
        kill_and_check(spark, tmp_path, workers=1, of_executors=1, name="local-cluster")
    finally:
        spark.stop()


@pytest.mark.full
def test_a_standalone_cluster_survives_a_lost_executor(
    make_session: MakeSession, standalone: str, tmp_path: Path
) -> None:
    spark = make_session(standalone, **ON_LOOPBACK)
    kill_and_check(spark, tmp_path, workers=1, of_executors=1, name="standalone")
    again = counting("after", cw.rate(None, rows=20_000), tmp_path / "after")
    assert again.run(spark, checkpoint=tmp_path / "chk").status.outcome == "finished"
    assert_exact(tmp_path / "after", 20_000)


@pytest.mark.full
def test_a_standalone_cluster_that_lost_a_host_is_waited_for(
    make_session: MakeSession, standalone: str, tmp_path: Path
) -> None:
    """A worker daemon is killed, its executor ends with it, and no core is free until another daemon is started."""
    spark = make_session(standalone, parallelism=4, **ON_LOOPBACK)
    flow = counting("host", held(tmp_path, ROWS, rate=50_000), tmp_path / "out")
    job = flow.start(spark, checkpoint=tmp_path / "chk", interval="200ms", parallelism=4, scheduler="default")
    wait_until(lambda: job.status.checkpoints.completed >= 1, "a checkpoint", 120)
    daemon = daemon_above(executor_of(job.status.workers[0].pid))
    command, environment = daemon.cmdline(), daemon.environ()
    daemon.kill()
    wait_until(lambda: any("waiting for cores, 2 of 4" in w for w in job.status.warnings), "that it is told", 120)
    assert job.is_active
    waiting = job.status.waiting
    assert waiting is not None
    assert (waiting.cores, waiting.wanted) == (2, 4)
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as another:
        try:
            wait_until(lambda: job.status.phase == "running" and job.status.waiting is None, "four workers", 120)
            release(tmp_path)
            assert job.await_termination(120)
        finally:
            spark.stop()
            another.kill()
    assert job.status.parallelism == 4
    assert_exact(tmp_path / "out", ROWS)


def daemon_above(executor: int) -> psutil.Process:
    """Spark's worker daemon that an executor's JVM belongs to."""
    for parent in psutil.Process(executor).parents():
        if any("deploy.worker.Worker" in part for part in parent.cmdline()):
            return parent
    raise AssertionError(f"process {executor} is no child of a worker daemon")


@pytest.mark.full
def test_foreach_batch_with_an_idempotent_function_sees_every_row_once(
    make_session: MakeSession, standalone: str, tmp_path: Path
) -> None:
    """A worker and an executor are killed; a call that comes again overwrites what it wrote before."""
    out = tmp_path / "batches"
    out.mkdir()

    def write(rows: pa.Table, checkpoint_id: int, subtask: int) -> None:
        fresh = out / f".{checkpoint_id}-{subtask}-{os.getpid()}"
        pq.write_table(rows, fresh)
        fresh.replace(out / f"{checkpoint_id}-{subtask}.parquet")

    flow = cw.Dataflow("batches")
    flow.read("in", held(tmp_path, ROWS, rate=50_000)).foreach_batch("each", write, parallelism=2)
    spark = make_session(standalone, **ON_LOOPBACK)
    job = flow.start(spark, checkpoint=tmp_path / "chk", interval="100ms", parallelism=2)
    killer = Killer(job, random.Random(5))
    wait_until(lambda: list(out.glob("*.parquet")), "a first batch")
    killer.kill()
    killer.kill(executor=True)
    release(tmp_path)
    assert job.await_termination(120)
    with duckdb.connect() as db:
        sql = f"SELECT count(*), count(DISTINCT value), min(value), max(value) FROM '{out}/*.parquet'"
        assert db.execute(sql).fetchall() == [(ROWS, ROWS, 0, ROWS - 1)]

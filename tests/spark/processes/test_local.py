"""A local session of ours: real Python workers of Spark, killed."""

from __future__ import annotations

import importlib
import random
import threading
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from pyspark.sql import DataFrame, SparkSession
from spark_world import Killer, assert_exact, counting, held, lost_and_doubled, release, wait_until

import cutwater as cw
from cutwater.errors import BuildError, ConfigError, CutwaterError, ResourceError, UserCodeError

pytestmark = pytest.mark.spark


def test_three_kills_over_a_million_unique_ids(spark: SparkSession, tmp_path: Path) -> None:
    rows = 1_000_000
    flow = counting("million", held(tmp_path, rows, rate=500_000), tmp_path / "out")
    job = flow.start(spark, checkpoint=tmp_path / "chk", interval="200ms")
    killer = Killer(job, random.Random(1))
    for _ in range(3):
        killer.kill()
    release(tmp_path)
    assert job.await_termination(120)
    assert job.status.restarts >= 3
    assert_exact(tmp_path / "out", rows)


@pytest.mark.full
def test_r2_a_dead_worker_of_spark_takes_only_its_region_along(spark: SparkSession, tmp_path: Path) -> None:
    rows = 400_000
    flow = cw.Dataflow("regions")
    read = flow.read("in", held(tmp_path, rows, rate=200_000)).with_columns("eid", eid=pl.col("value"))
    read.write("out", cw.files(str(tmp_path / "out")))
    job = flow.start(spark, checkpoint=tmp_path / "chk", interval="200ms", parallelism=2, recovery="region")
    killer = Killer(job, random.Random(3))
    for _ in range(2):
        killer.kill()
        wait_until(lambda: job.status.failures[-1].running_ms is not None, "the region to be back")
    release(tmp_path)
    assert job.await_termination(120)
    assert all("1 of 2 regions go back" in failure.reason for failure in job.status.failures)
    assert lost_and_doubled(tmp_path / "out", rows) == (0, 0)


@pytest.mark.full
def test_r4_a_dead_worker_of_spark_comes_back_beside_the_others(spark: SparkSession, tmp_path: Path) -> None:
    """Every row goes from any reader to any counter, and still nobody else goes back."""
    rows = 300_000
    flow = counting("alone", held(tmp_path, rows, rate=150_000), tmp_path / "out")
    job = flow.start(spark, checkpoint=tmp_path / "chk", interval="200ms", parallelism=3, recovery="task")
    wait_until(lambda: job.status.checkpoints.completed > 0, "a checkpoint")
    killer = Killer(job, random.Random(4))
    for _ in range(2):
        before = {w.pid for w in job.status.workers}
        killer.kill()
        wait_until(lambda: job.status.failures[-1].running_ms is not None, "the worker to be back")
        assert len(before & {w.pid for w in job.status.workers}) == 2
    release(tmp_path)
    assert job.await_termination(120)
    assert all("1 of 3 workers go back" in failure.reason for failure in job.status.failures)
    assert_exact(tmp_path / "out", rows)


@pytest.mark.full
def test_a_dead_worker_of_spark_gets_its_state_from_the_memory_of_another_one(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The job stands still behind a checkpoint that others have copies of: nothing is read from its directory."""
    rows = 100_000
    settings = {"recovery": "task", "interval": "1h", "state_replicas": 1, "inline_threshold_bytes": 0}
    flow = counting("copied", held(tmp_path, rows), tmp_path / "out")
    job = flow.start(spark, checkpoint=tmp_path / "chk", parallelism=2, **settings)
    wait_until(lambda: job.status.rows_read == rows, "all rows")
    taken = job.checkpoint()
    wait_until(lambda: (c := job.status.copies) is not None and c.checkpoint_id >= taken, "copies")
    Killer(job, random.Random(5)).kill()
    wait_until(lambda: (c := job.status.copies) is not None and c.restored_replica_bytes > 0, "the state")
    assert job.status.copies is not None
    assert job.status.copies.restored_storage_bytes == 0
    release(tmp_path)
    assert job.await_termination(120)
    assert ["1 of 2 workers go back" in failure.reason for failure in job.status.failures] == [True]
    assert_exact(tmp_path / "out", rows)


def test_jobs_side_by_side_and_one_after_the_other(spark: SparkSession, tmp_path: Path) -> None:
    jobs = [
        counting(f"side{i}", held(tmp_path, 50_000), tmp_path / f"out{i}").start(
            spark, checkpoint=tmp_path / "chk", interval="100ms", parallelism=2
        )
        for i in range(2)
    ]
    for job in jobs:
        wait_until(lambda job=job: job.status.checkpoints.completed > 0, "checkpoints of both")
    Killer(jobs[0], random.Random(2)).kill()
    assert jobs[1].status.restarts == 0, "a neighbour's failure is no business of this job"
    release(tmp_path)
    for i, job in enumerate(jobs):
        assert job.await_termination(60)
        assert_exact(tmp_path / f"out{i}", 50_000)
    again = counting("after", cw.rate(None, rows=20_000), tmp_path / "out2").run(spark, checkpoint=tmp_path / "chk")
    assert again.status.outcome == "finished"
    assert_exact(tmp_path / "out2", 20_000)


def test_too_few_cores_are_told_in_time(spark: SparkSession, tmp_path: Path) -> None:
    flow = counting("wide", cw.rate(None, rows=100), tmp_path / "out")
    job = flow.start(spark, checkpoint=tmp_path / "chk", parallelism=7, resource_timeout="12s")
    wait_until(lambda: job.status.waiting is not None and job.status.waiting.cores == 4, "four of seven")
    waiting = job.status.waiting
    assert waiting is not None
    assert waiting.text.startswith("waiting for cores, 4 of 7 since ")
    host: Any = job._coordinator.driver.group._host
    tasks = host.activity(range(8))
    assert sorted(tasks) == list(range(7))
    assert sorted(task.host for task in tasks.values() if task is not None) == ["localhost"] * 4
    assert all(0 <= task.age_ms < 120_000 for task in tasks.values() if task is not None)
    with pytest.raises(ResourceError, match=r"4 of 7 workers.*free 3 cores or ask for parallelism 4"):
        job.await_termination(60)
    tracker = spark.sparkContext.statusTracker()
    wait_until(lambda: not tracker.getActiveJobsIds(), "no Spark job left")


def test_a_batch_dataframe_comes_back_as_a_dataframe(spark: SparkSession, tmp_path: Path) -> None:
    """Spark SQL's own aggregate is the oracle."""
    frame = spark.range(30_000).selectExpr("id", "id % 17 AS key", "cast(id AS double) / 3 AS x")
    flow = cw.Dataflow("frame")
    counts = flow.read("in", frame).key_by("key").aggregate("count", n=cw.count(), top=cw.max("x"))
    counts.collect("result")
    job = flow.run(spark, checkpoint=tmp_path / "chk", interval="100ms")
    result = job.result("result")
    for wrong in (job.result, job.result_table):
        with pytest.raises(ConfigError, match=r"step 'reslut' collects nothing\. Steps that do: result"):
            wrong("reslut")
    assert isinstance(result, DataFrame)
    last = result.groupBy("key").agg({"n": "max", "top": "max"}).orderBy("key").collect()
    expected = frame.groupBy("key").agg({"id": "count", "x": "max"}).orderBy("key").collect()
    assert [tuple(r) for r in last] == [tuple(r) for r in expected]


def test_a_streaming_dataframe_is_a_source(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    spark.range(5_000).repartition(4).write.parquet(str(folder))
    stream = spark.readStream.schema("id long").option("maxFilesPerTrigger", "1").parquet(str(folder))
    flow = cw.Dataflow("stream")
    flow.read("in", stream).key_by("id").aggregate("count", n=cw.count()).collect("result")
    job = flow.start(spark, checkpoint=tmp_path / "chk", interval="100ms")
    wait_until(lambda: job.status.rows_read == 5_000 or not job.is_active, "all rows of the stream")
    assert job.is_active, job.exception()
    job.stop()
    assert job.status.outcome == "stopped"


def test_a_failing_function_shows_its_own_traceback(spark: SparkSession, tmp_path: Path) -> None:
    def share(row: dict[str, int]) -> dict[str, float]:
        return {"share": 1 / (row["value"] - 77)}

    flow = cw.Dataflow("user")
    shares = flow.read("in", cw.rate(None, rows=100)).map("share", share, "share double")
    shares.write("out", cw.files(str(tmp_path / "out")))
    with pytest.raises(UserCodeError, match=r"(?s)step 'share'.*in share.*ZeroDivisionError"):
        flow.run(spark, checkpoint=tmp_path / "chk")


def test_a_module_that_the_workers_do_not_have_is_named(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def double(row): return {'v': 2 * row['value']}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    double = importlib.import_module("only_here").double
    flow = cw.Dataflow("absent")
    flow.read("in", cw.rate(None, rows=10)).map("double", double, "v long").write(
        "out", cw.files(str(tmp_path / "out"))
    )
    with pytest.raises(CutwaterError, match="No module named 'only_here'"):
        flow.run(spark, checkpoint=tmp_path / "chk")


def test_a_function_that_cannot_be_sent_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    lock = threading.Lock()

    def locked(row: dict[str, int]) -> dict[str, int]:
        with lock:
            return row

    flow = cw.Dataflow("lock")
    rows = flow.read("in", cw.rate(None, rows=10)).select("ids", "value")
    rows.map("locked", locked, "value long").write("out", cw.files(str(tmp_path / "out")))
    with pytest.raises(
        BuildError, match=r"^step 'locked': the program cannot be sent .*lock.*open such things inside them.$"
    ):
        flow.run(spark, checkpoint=tmp_path / "chk")

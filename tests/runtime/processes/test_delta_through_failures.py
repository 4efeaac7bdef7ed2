"""From a Delta table through windows to Delta tables, with kills, a rescale and new starts; DuckDB is the oracle."""

from __future__ import annotations

import os
import signal
from collections import Counter
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import deltalake
import duckdb
import polars as pl
import pyarrow as pa
import pytest
from fake_host import FakeHost, FakeSpark, adopt, context, server_address
from runtime_world import kill_some, wait_until

import cutwater as cw
from cutwater.api.jobs import job as job_module

PAGES, PER_MINUTE = 5, 2_000
SCHEMA = pa.schema({"id": pa.int64(), "at": pa.timestamp("us"), "page": pa.string(), "cents": pa.int64()})


def events(first: int, count: int) -> pa.Table:
    """Unique ids, in event time a minute for so many, up to a second out of order."""
    ids = range(first, first + count)
    begin = datetime(2026, 1, 1, 0, 1)
    at = [begin + timedelta(milliseconds=id * 60_000 // PER_MINUTE - id * 7919 % 1000) for id in ids]
    columns = [list(ids), at, [f"p{id * 7919 % PAGES}" for id in ids], [id % 997 for id in ids]]
    return pa.Table.from_arrays([pa.array(c, t) for c, t in zip(columns, SCHEMA.types, strict=True)], schema=SCHEMA)


def append(folder: Path, rows: pa.Table, at_once: int = 1_000) -> None:
    for first in range(0, rows.num_rows, at_once):
        deltalake.write_deltalake(folder / "events", rows.slice(first, at_once), mode="append")


def flow_of(folder: Path) -> cw.Dataflow:
    flow = cw.Dataflow("delta")
    table = cw.delta(folder / "events", discover_interval_ms=20)
    rows = flow.read("events", table, event_time="at", out_of_order="2s")
    raw = cw.delta(folder / "raw", partition_by="page", roll_interval_ms="300ms", log_checkpoint_commits=10)
    rows.filter("odd", pl.col("id") % 2 == 1).write("raw", raw)
    by_page = rows.key_by("page")
    minutes = by_page.window("minute", cw.tumbling("1m"))
    sums = minutes.aggregate("sums", n=cw.count(), ids=cw.sum("id"), cents=cw.sum("cents"))
    sums.write("out", cw.delta(folder / "out", roll_interval_ms=0))
    totals = by_page.aggregate("totals", n=cw.count(), cents=cw.sum("cents"))
    totals.write("upserts", cw.delta(folder / "totals", mode="upsert", key="page"))
    return flow


def rows_of(folder: Path, name: str) -> int:
    """By the log alone."""
    try:
        added = pa.table(deltalake.DeltaTable(folder / name).get_add_actions(flatten=True))
    except deltalake.exceptions.TableNotFoundError:
        return 0
    return sum(added["num_records"].to_pylist())


def drive(folder: str, server: str) -> None:
    """A whole driver in a process of its own, as a user's script would be."""
    adopt(server)
    job_module.SparkHost = FakeHost  # type: ignore[misc]
    flow = flow_of(Path(folder))
    flow.start(FakeSpark(), checkpoint=Path(folder, "chk"), interval="200ms").await_termination()  # type: ignore[arg-type]


def seen(folder: Path, name: str) -> pa.Table:
    return deltalake.DeltaTable(folder / name).to_pyarrow_table()


def check(folder: Path) -> None:
    doubled = [id for id, times in Counter(seen(folder, "raw")["id"].to_pylist()).items() if times > 1]
    assert doubled == []


@pytest.mark.full
@pytest.mark.parametrize(
    ("recovery", "shapes"),
    [
        ("job", (2, 3, 1)),
        ("task", (1, 2, 3)),
        ("region", (3, 1, 2)),
    ],
    ids=str,
)
def test_each_row_counts_once(
    start: Any, fake_spark: FakeSpark, tmp_path: Path, recovery: str, shapes: tuple[int, int, int]
) -> None:
    """``shapes``: parallelisms at first, after the rescale, and when the job is started again."""
    first, then, last = shapes
    count, sent = 12_000, 0

    def more(rows: int) -> None:
        nonlocal sent
        append(tmp_path, events(sent, rows))
        sent += rows

    def started(parallelism: int) -> Any:
        job = start(flow_of(tmp_path), parallelism=parallelism, interval="200ms", recovery=recovery)
        wait_until(lambda: job.status.phase == "running", "the start", job=job)
        return job

    more(count // 4)
    driver = context().Process(target=drive, args=(str(tmp_path), server_address()))
    driver.start()
    wait_until(lambda: rows_of(tmp_path, "raw") > 100, "rows of the first driver")
    more(count // 4)
    os.kill(driver.pid or 0, signal.SIGKILL)
    driver.join()
    check(tmp_path)
    job = started(first)
    kill_some(job, fake_spark, 1, seed=first)
    more(count // 8)
    job.rescale(then)
    more(count // 8)
    kill_some(job, fake_spark, 1, seed=then)
    wait_until(lambda: job.status.phase == "running", "the recovery", job=job)
    check(tmp_path)
    job.stop()
    more(count // 4)
    job = started(last)
    kill_some(job, fake_spark, 1, seed=last)
    assert sent == count
    end = pa.Table.from_arrays([[-2], [datetime(2026, 1, 9)], ["end"], [0]], schema=SCHEMA)
    deltalake.write_deltalake(tmp_path / "events", end, mode="append")  # closes all windows
    wanted = events(0, count)  # noqa: F841
    expected = duckdb.sql(
        "SELECT date_trunc('minute', \"at\") AS w, page, count(*)::bigint, sum(id)::bigint, sum(cents)::bigint "
        "FROM wanted GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    totals = duckdb.sql(
        "SELECT page, count(*)::bigint, sum(cents)::bigint FROM wanted GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    wait_until(lambda: rows_of(tmp_path, "out") >= len(expected), "all windows", job=job)
    wait_until(lambda: rows_of(tmp_path, "raw") >= count // 2, "all rows", job=job)
    wait_until(lambda: "end" in seen(tmp_path, "totals")["page"].to_pylist(), "all totals", job=job)
    job.stop()
    out = seen(tmp_path, "out")  # noqa: F841
    columns = "window_start, page, n::bigint, ids::bigint, cents::bigint"
    assert duckdb.sql(f"SELECT {columns} FROM out ORDER BY ALL").fetchall() == expected
    assert sorted(seen(tmp_path, "raw")["id"].to_pylist()) == list(range(1, count, 2))
    upserted = seen(tmp_path, "totals")  # noqa: F841
    found = duckdb.sql(
        "SELECT page, n::bigint, cents::bigint FROM upserted WHERE page <> 'end' ORDER BY ALL"
    ).fetchall()
    assert found == totals


def test_a_bounded_job_ends_with_all_rows_in_the_table(start: Any, fake_spark: FakeSpark, tmp_path: Path) -> None:
    append(tmp_path, events(0, 6_000))
    flow = cw.Dataflow("copy")
    rows = flow.read("events", cw.delta(tmp_path / "events", until="latest", rate=6_000))
    rows.filter("odd", pl.col("id") % 2 == 1).write("out", cw.delta(tmp_path / "out"))
    job = start(flow)
    wait_until(lambda: job.status.checkpoints.completed > 2, "checkpoints", job=job)
    kill_some(job, fake_spark, 1, seed=1)
    assert job.await_termination(60)
    assert sorted(seen(tmp_path, "out")["id"].to_pylist()) == list(range(1, 6_000, 2))
    assert not (tmp_path / "out" / "_cutwater").exists()

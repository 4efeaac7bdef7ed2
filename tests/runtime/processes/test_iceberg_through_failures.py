"""From an Iceberg table through windows into two, with kills, a rescale and a new start; DuckDB is the oracle."""

from __future__ import annotations

from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from fake_host import FakeSpark
from runtime_world import kill_some, wait_until

import cutwater as cw
from iceberg_world import Warehouse, warehouse

__all__ = ["warehouse"]
PAGES, PER_MINUTE = 20, 2_000
PATIENCE_S = 120.0
"""Each worker loads the library when it begins, which takes a busy machine its time."""
EVENTS = pa.schema({"n": pa.int64(), "at": pa.timestamp("us", "UTC"), "page": pa.string(), "cents": pa.int64()})


def events(first: int, count: int) -> pa.Table:
    """Unique ids, in event time a minute for so many, up to a second out of order."""
    ids = range(first, first + count)
    at = [60_000_000 + id * 60_000_000 // PER_MINUTE - id * 7919 % 1000 * 1000 for id in ids]
    columns = [
        pa.array(ids, pa.int64()),
        pa.array(at, pa.timestamp("us", "UTC")),
        pa.array([f"p{id * 7919 % PAGES}" for id in ids]),
        pa.array([id % 997 for id in ids], pa.int64()),
    ]
    return pa.table(columns, schema=EVENTS)


def flow_of(warehouse: Warehouse) -> cw.Dataflow:
    flow = cw.Dataflow("iceberg")
    source = warehouse.named("db.events", discover_interval_ms=200)
    rows = flow.read("events", source, event_time="at", out_of_order="2s")
    rows.filter("odd", pl.col("n") % 2 == 1).write("raw", warehouse.named("db.raw", partition_by=["page"]))
    minutes = rows.key_by("page").window("minute", cw.tumbling("1m"))
    sums = minutes.aggregate("sums", n=cw.count(), ids=cw.sum("n"), cents=cw.sum("cents"))
    sums.write("out", warehouse.named("db.sums"))
    return flow


@pytest.mark.parametrize(
    ("recovery", "shapes"),
    [
        ("job", (2, 3, 1)),
        pytest.param("task", (1, 2, 3), marks=pytest.mark.full),
        pytest.param("region", (3, 1, 2), marks=pytest.mark.full),
    ],
    ids=str,
)
def test_each_row_counts_once(
    start: Any, fake_spark: FakeSpark, warehouse: Warehouse, recovery: str, shapes: tuple[int, int, int]
) -> None:
    """``shapes``: parallelisms at first, after the rescale, and when the job is started again."""
    first, then, last = shapes
    count, sent = 36_000, 0
    warehouse.make("db.events", EVENTS)

    def more(rows: int) -> None:
        nonlocal sent
        for _ in range(3):
            warehouse.table("db.events").append(events(sent, rows // 3))
            sent += rows // 3

    def started(parallelism: int) -> Any:
        job = start(flow_of(warehouse), parallelism=parallelism, interval="300ms", recovery=recovery)
        wait_until(lambda: job.status.phase == "running", "the start", PATIENCE_S, job=job)
        return job

    def raw() -> list[int]:
        found = warehouse.numbers("db.raw") if warehouse.catalog.table_exists("db.raw") else []
        assert len(set(found)) == len(found)
        return found

    more(count // 3)
    job = started(first)
    wait_until(lambda: len(raw()) > 100, "rows", PATIENCE_S, job=job)
    kill_some(job, fake_spark, 1, seed=first)
    more(count // 6)
    job.rescale(then)
    warehouse.table("db.raw").append(pa.table({"n": [-1], "page": ["of others"]}))
    more(count // 6)
    kill_some(job, fake_spark, 1, seed=then)
    wait_until(lambda: job.status.phase == "running", "the recovery", PATIENCE_S, job=job)
    raw()
    job.stop()
    more(count // 3)
    job = started(last)
    kill_some(job, fake_spark, 1, seed=last)
    end = pa.table([[-2], pa.array([10**15], pa.timestamp("us", "UTC")), ["end"], [0]], schema=EVENTS)
    warehouse.table("db.events").append(end)  # closes all windows
    wait_until(lambda: len(raw()) > count // 2, "all rows", PATIENCE_S, job=job)
    wanted = events(0, count)
    expected = duckdb.sql(
        'SELECT epoch_us(time_bucket(INTERVAL 1 MINUTE, "at")) AS w, page, count(*)::bigint, sum(n)::bigint, '
        "sum(cents)::bigint FROM wanted GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    assert wanted.num_rows == sent == count
    query = "SELECT epoch_us(window_start), page, n, ids, cents FROM files ORDER BY ALL"
    wait_until(lambda: len(warehouse.by_duckdb(query, "db.sums")) >= len(expected), "all windows", PATIENCE_S, job=job)
    job.stop()
    assert warehouse.by_duckdb(query, "db.sums") == expected
    assert raw() == [-1, *range(1, count, 2)]

"""The table sink on worker processes that are killed: each row's effect once, in SQLite's own words."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from runtime_world import gated, kill_some, open_gate

import cutwater as cw

ROWS = 20_000
KEYS = 97


def query(path: Path, sql: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(path)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def counting(folder: Path, **sink: Any) -> cw.Dataflow:
    flow = cw.Dataflow("table")
    rows = flow.read("in", gated(folder, ROWS)).with_columns("key", key=pl.col("value") % KEYS)
    counts = rows.key_by("key").aggregate("count", n=cw.count(), total=cw.sum("value"), eid=cw.last("value"))
    counts.write("out", cw.table(f"sqlite:///{folder / 'out.db'}", "counts", **sink))
    return flow


@pytest.mark.parametrize("parallelism", [pytest.param(1, marks=pytest.mark.full), 2])
def test_appended_rows_are_there_once_after_kills(start, fake_spark, tmp_path: Path, parallelism: int) -> None:
    job = start(counting(tmp_path, parallelism=parallelism))
    kill_some(job, fake_spark, 4, seed=parallelism)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert job.status.restarts >= 1
    out = tmp_path / "out.db"
    counts = "SELECT count(*), count(DISTINCT eid), min(eid), max(eid) FROM counts"
    assert query(out, counts) == [(ROWS, ROWS, 0, ROWS - 1)]
    wrong = f"""SELECT * FROM (SELECT key, n, total, eid,
        row_number() OVER w AS rank, sum(eid) OVER w AS sum FROM counts
        WINDOW w AS (PARTITION BY key ORDER BY n ROWS UNBOUNDED PRECEDING))
        WHERE n <> rank OR total <> sum OR key <> eid % {KEYS} LIMIT 3"""
    assert query(out, wrong) == []
    rows_of_epochs = (
        "SELECT e.rows, count(c.eid) FROM cutwater_epochs e LEFT JOIN counts c ON c.cutwater_epoch = e.epoch"
    )
    assert all(a == b for a, b in query(out, f"{rows_of_epochs} WHERE e.subtask >= 0 GROUP BY e.epoch"))


@pytest.mark.full
def test_upserted_rows_are_the_last_of_their_keys_after_kills(start, fake_spark, tmp_path: Path) -> None:
    job = start(counting(tmp_path, mode="upsert", key=["key"]))
    kill_some(job, fake_spark, 3, seed=7)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert job.status.restarts >= 1
    found = query(tmp_path / "out.db", "SELECT key, n, total FROM counts ORDER BY key")
    values = {key: range(key, ROWS, KEYS) for key in range(KEYS)}
    assert found == [(key, len(ids), sum(ids)) for key, ids in values.items()]


@pytest.mark.full
def test_rows_that_leave_an_updating_stream_are_deleted_after_kills(start, fake_spark, tmp_path: Path) -> None:
    flow = cw.Dataflow("best")
    rows = flow.read("in", gated(tmp_path, ROWS)).with_columns("key", key=pl.col("value") % KEYS)
    best = rows.key_by("key").top("best", 3, by="value").with_changes("value")
    best.write("out", cw.table(f"sqlite:///{tmp_path / 'out.db'}", "best", mode="upsert", key=["value"]))
    job = start(flow)
    kill_some(job, fake_spark, 3, seed=8)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert job.status.restarts >= 1
    found = query(tmp_path / "out.db", "SELECT value FROM best ORDER BY value")
    assert [value for (value,) in found] == list(range(ROWS - 3 * KEYS, ROWS))

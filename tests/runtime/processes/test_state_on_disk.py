"""A job whose states lie on its workers' disks, killed in the midst: each row counts once, no file is left behind."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
from fake_host import FakeSpark
from runtime_world import gated, kill_some, open_gate, wait_until

import cutwater as cw

pytest.importorskip("rocksdict")

ROWS, KEYS = 12_000, 3_000


class Counts(cw.ProcessFunction):
    count = cw.ValueState("long")
    seen = cw.ListState("long")

    def process(self, row: dict[str, Any], ctx: Any) -> Iterator[dict[str, Any]]:
        self.count.value = self.count.get(0) + 1
        self.seen.append(row["value"])
        yield {"key": ctx.key, "n": self.count.value, "sum": sum(self.seen)}


def abandoned() -> set[Path]:
    """Folders for state whose process is gone."""
    found = set[Path]()
    for lock in Path(tempfile.gettempdir(), f"cutwater-state-{os.getuid()}").glob("*/owner.lock"):
        try:
            with open(lock) as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found.add(lock.parent)
        except OSError:  # it is in use, or has gone meanwhile
            pass
    return found


def processed(keyed: Any) -> Any:
    return keyed.process("counts", Counts(), "key long, n long, sum long")


def aggregated(keyed: Any) -> Any:
    return keyed.aggregate("counts", n=cw.count(), sum=cw.sum("value"), text=cw.last("text")).drop("rest", "text")


def run(start: Any, spark: FakeSpark, folder: Path, step: Callable[[Any], Any]) -> pl.DataFrame:
    """What a keyed step makes of the rows, in a job of which a worker is killed."""
    before = abandoned()
    flow = cw.Dataflow("on-disk")
    rows = flow.read("in", gated(folder, ROWS, rate=6_000), event_time="timestamp", out_of_order="5ms")
    text = pl.col("value").cast(pl.String) + "-" * 500
    keyed = rows.with_columns("keyed", key=pl.col("value") % KEYS, text=text).key_by("key")
    step(keyed).write("out", cw.files(folder / "out"))
    job = start(flow, state_backend="rocksdb", state_memory_bytes=1 << 20)
    wait_until(lambda: job.status.checkpoints.last_completed_id > 1, "a checkpoint")
    kill_some(job, spark, 1, seed=1)
    wait_until(lambda: job.status.checkpoints.restored_id > 0, "the restore")
    open_gate(folder)
    assert job.await_termination(60)
    assert abandoned() <= before
    return pl.read_parquet(folder / "out" / "**" / "*.parquet")


@pytest.mark.parametrize("counted", [processed, aggregated])
def test_a_killed_job_counts_each_row_once_and_leaves_no_file(
    start: Any, fake_spark: FakeSpark, tmp_path: Path, counted: Callable[[Any], Any]
) -> None:
    made = run(start, fake_spark, tmp_path, counted).select("key", "n", "sum").sort("key", "n")
    assert (made["n"] == made.select(pl.int_range(1, pl.len() + 1).over("key")).to_series()).all()
    values = made.select("key", value=pl.col("sum").diff().over("key").fill_null(pl.col("sum")))
    expected = pl.DataFrame({"value": range(ROWS)}).select(key=pl.col("value") % KEYS, value="value")
    assert sorted(values.rows()) == sorted(expected.rows()), "each row once, in the order in which it came"


def sessions(keyed: Any) -> Any:
    """A key comes every half second, but at times it does not: then its session ends."""
    thin = keyed.filter("thin", pl.col("value") * pl.col("value") % 11 < 5).key_by("key")
    window = thin.window("sessions", cw.session("700ms"))
    return window.aggregate("counts", n=cw.count(), sum=cw.sum("value"), text=cw.last("text"))


@pytest.mark.full
def test_sessions_of_a_killed_job_equal_those_of_duckdb(start: Any, fake_spark: FakeSpark, tmp_path: Path) -> None:
    made = run(start, fake_spark, tmp_path, sessions)
    expected = duckdb.sql(
        f"""WITH rows AS (SELECT v, v % {KEYS} AS key FROM range({ROWS}) AS r(v) WHERE v * v % 11 < 5),
            marked AS (SELECT *, coalesce(v - lag(v) OVER w > {KEYS}, true) AS fresh FROM rows
                WINDOW w AS (PARTITION BY key ORDER BY v)),
            numbered AS (SELECT *, sum(fresh::INT) OVER (PARTITION BY key ORDER BY v) AS session FROM marked)
            SELECT key, count(*), sum(v)::BIGINT, max(v) || repeat('-', 500) FROM numbered GROUP BY key, session"""
    ).fetchall()
    assert max(row[1] for row in expected) > 2
    assert len(expected) > KEYS
    assert sorted(made.select("key", "n", "sum", "text").rows()) == sorted(expected)

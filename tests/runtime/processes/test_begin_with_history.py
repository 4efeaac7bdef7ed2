"""A job that begins with state made of tables: history and stream together are what an oracle makes of both."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
from fake_host import FakeSpark
from runtime_world import gated, kill_some, open_gate, wait_until

import cutwater as cw

HISTORY, ROWS, KEYS = 5_000, 8_000, 97


class Remembering(cw.ProcessFunction):
    rows = cw.ValueState("long")
    by_digit = cw.MapState("long", "long")

    def process(self, row: Any, ctx: Any) -> Iterator[dict[str, Any]]:
        self.rows.value = self.rows.get(0) + 1
        digit = row["value"] % 10
        self.by_digit[digit] = self.by_digit.get(digit, 0) + 1
        return iter(())


def flow(folder: Path) -> cw.Dataflow:
    made = cw.Dataflow("going-on")
    rows = made.read("in", gated(folder, ROWS, rate=4_000, start=HISTORY)).with_columns(
        "key", key=pl.col("value") % KEYS
    )
    keyed = rows.key_by("key")
    counts = keyed.aggregate("counts", n=cw.count(), total=cw.sum("value"), mean=cw.mean("value"), eid=cw.last("value"))
    counts.write("out", cw.files(str(folder / "out"), roll_rows=1_000))
    keyed.process("logic", Remembering(), "value long").write("none", cw.discard())
    return made


def test_history_and_stream_are_one_also_after_a_kill(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    past = pl.DataFrame({"value": range(HISTORY)}).with_columns(key=pl.col("value") % KEYS)
    total = pl.col("value").sum()
    counts = past.group_by("key").agg(n=pl.len(), total=total, eid=pl.col("value").last())
    states = {
        "counts": counts.with_columns(pl.col("total").alias("mean.sum"), pl.col("n").alias("mean.count")),
        "logic.rows": past.group_by("key").agg(value=pl.len()),
        "logic.by_digit": digits(past),
    }
    program = flow(tmp_path)
    cw.write_savepoint(tmp_path / "begin", states, flow=program)
    job = start(program, restore=str(tmp_path / "begin"), parallelism=2)
    wait_until(lambda: job.status.checkpoints.completed > 1 or not job.is_active, "checkpoints", 120, job=job)
    kill_some(job, fake_spark, 1, seed=1)
    wait_until(lambda: job.status.restarts > 0 or not job.is_active, "the restart", 60, job=job)
    open_gate(tmp_path)
    assert job.await_termination(100)
    everything = f"SELECT range AS value, range % {KEYS} AS key FROM range({HISTORY + ROWS})"
    oracle = f"SELECT key, count(*), sum(value), avg(value) FROM ({everything}) GROUP BY key"
    columns = ["key", "n", "total", "mean"]
    snapshot = cw.Snapshot(f"{tmp_path}/chk/going-on")
    with duckdb.connect() as connection:
        expected = set(connection.execute(oracle).fetchall())
        out = f"SELECT count(*), count(DISTINCT eid), min(eid) FROM '{tmp_path}/out/*.parquet'"
        assert connection.execute(out).fetchall() == [(ROWS, ROWS, HISTORY)]
        first = f"SELECT min(n) FROM '{tmp_path}/out/*.parquet'"
        assert connection.execute(first).fetchall() == [(HISTORY // KEYS + 1,)]
    assert {tuple(row.values()) for row in snapshot.table("counts", columns=columns).to_pylist()} == expected
    found = {row["key"]: row["value"] for row in snapshot.table("logic.rows").to_pylist()}
    assert found == {key: n for key, n, *_ in expected}
    every = pl.DataFrame({"value": range(HISTORY + ROWS)}).with_columns(key=pl.col("value") % KEYS)
    by_digit = snapshot.table("logic.by_digit", columns=["key", "value"]).to_pylist()
    wanted = {row["key"]: {e["key"]: e["value"] for e in row["value"]} for row in digits(every).to_dicts()}
    assert {row["key"]: dict(row["value"]) for row in by_digit} == wanted


def digits(rows: pl.DataFrame) -> pl.DataFrame:
    """By key how many rows end with each digit, as a map."""
    counted = rows.group_by("key", pl.col("value").mod(10).alias("digit")).len()
    return counted.group_by("key").agg(value=pl.struct(key="digit", value=pl.col("len").cast(pl.Int64)))

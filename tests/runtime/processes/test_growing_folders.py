"""Folders that grow while workers die: files that follow each other in time have no late row; DuckDB is the oracle."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import duckdb
import polars as pl
import pytest
from fake_host import FakeSpark
from runtime_world import wait_until

import cutwater as cw
from cutwater.api.jobs.job import Job

FILES, ROWS_PER_FILE, START = 12, 250, 1_600_000_000


def put(folder: Path, number: int, columns: dict[str, list[int]]) -> None:
    """A file that is there as a whole; ``at`` is in milliseconds."""
    frame = pl.DataFrame(columns).with_columns(at=(pl.col("at") * 1_000).cast(pl.Datetime("us")))
    hidden = folder / f"_{number:04}"
    frame.write_parquet(hidden)
    hidden.rename(folder / f"{number:04}.parquet")


def orders_and_payments(number: int, chance: random.Random) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """File ``number`` of both: a second of event time, in disorder by up to 200 ms."""
    ids = [number * ROWS_PER_FILE + i for i in range(ROWS_PER_FILE)]
    begin = START * 1_000 + number * 1_000
    at = [begin + 4 * i for i in range(ROWS_PER_FILE)]
    shuffled = [at[i] for block in range(0, ROWS_PER_FILE, 50) for i in chance.sample(range(block, block + 50), 50)]
    paid = [i for i in range(ROWS_PER_FILE) if i % 3]
    return {"oid": ids, "at": shuffled}, {"pid": [ids[i] for i in paid], "at": [at[i] for i in paid]}


def flow_over(folder: Path) -> cw.Dataflow:
    flow = cw.Dataflow("growing")
    sides = {}
    for name, schema in (("orders", "oid long, at timestamp_ntz"), ("pays", "pid long, at timestamp_ntz")):
        files = cw.files(
            str(folder / name),
            schema=schema,
            watch=True,
            settle_ms=0,
            discover_interval_ms=20,
            end_marker=str(folder / "end"),
        )
        sides[name] = flow.read(name, files, event_time="at", out_of_order="400ms")
    pays = sides["pays"].rename("same", {"pid": "oid"})
    pairs = sides["orders"].key_by("oid").join("pairs", pays.key_by("oid"), within=("-2s", "2s"))
    pairs.write("pairs-out", cw.files(str(folder / "pairs"), roll_rows=300))
    grouped = sides["orders"].with_columns("g", g=pl.col("oid") % 7).key_by("g")
    windows = grouped.window("second", cw.tumbling("500ms")).aggregate("n", n=cw.count(), ids=cw.sum("oid"))
    windows.write("windows-out", cw.files(str(folder / "windows"), roll_rows=50))
    for name, late in (("l", pairs.late_left), ("r", pairs.late_right), ("w", windows.late)):
        late.write(f"late-{name}", cw.files(str(folder / f"late-{name}")))
    return flow


def kill(job: Job, spark: FakeSpark, chance: random.Random) -> None:
    """One worker; the job has another in its place when this returns."""
    wait_until(lambda: job.status.phase == "running" and len(job.status.workers) == 3, "running", 60, job=job)
    victim = chance.choice([worker.pid for worker in job.status.workers if worker.pid in spark.pids])
    os.kill(victim, signal.SIGKILL)
    wait_until(lambda: victim not in [worker.pid for worker in job.status.workers], "a replacement", 60, job=job)


def check(start, spark: FakeSpark, folder: Path, recovery: str, protocol: str, seed: int) -> None:  # type: ignore[no-untyped-def]
    chance = random.Random(seed)
    for name in ("orders", "pays"):
        (folder / name).mkdir()
    settings = {"aligned_timeout": "0ms"} if protocol == "unaligned" else {}
    job = start(flow_over(folder), parallelism=3, recovery=recovery, protocol=protocol, interval="100ms", **settings)
    for number in range(FILES):
        orders, pays = orders_and_payments(number, chance)
        put(folder / "orders", number, orders)
        if chance.random() < 0.5:
            wait_until(lambda: job.status.phase == "running", "running", 60, job=job)
        put(folder / "pays", number, pays)
        if number % 3 == 1:
            kill(job, spark, chance)
    (folder / "end").touch()
    assert job.await_termination(90)
    for name in "lrw":
        late = duckdb.sql(f"SELECT * FROM '{folder}/late-{name}/*.parquet'").fetchall()
        assert late == [], f"seed {seed}: rows came out as late"
    pairs = duckdb.sql(f"SELECT count(*), count(DISTINCT oid), sum(oid) FROM '{folder}/pairs/*.parquet'").fetchone()
    paid = duckdb.sql(f"SELECT count(*), count(*), sum(pid) FROM '{folder}/pays/*.parquet'").fetchone()
    assert pairs == paid
    windows = duckdb.sql(f"SELECT sum(n), sum(ids) FROM '{folder}/windows/*.parquet'").fetchone()
    assert windows == duckdb.sql(f"SELECT count(*), sum(oid) FROM '{folder}/orders/*.parquet'").fetchone()


def test_w4_what_a_dead_reader_had_not_read_holds_time_back(start, fake_spark, tmp_path: Path) -> None:
    check(start, fake_spark, tmp_path, "task", "unaligned", 1)


@pytest.mark.full
@pytest.mark.parametrize("recovery", ["job", "region", "upstream", "task"])
@pytest.mark.parametrize("protocol", ["aligned", "unaligned", "chandy_lamport"])
def test_w4_no_row_is_late_in_any_scope_of_recovery(
    start, fake_spark, tmp_path: Path, recovery: str, protocol: str
) -> None:
    check(start, fake_spark, tmp_path, recovery, protocol, 2)


def test_w4_a_reader_whose_files_are_finished_does_not_hold_the_others_back(start, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for name, seconds in (("a", 100), ("b", 1_000)):
        frame = pl.DataFrame({"k": [1] * seconds, "at": [(START + s) * 1_000_000 for s in range(seconds)]})
        frame.with_columns(pl.col("at").cast(pl.Datetime("us"))).write_parquet(tmp_path / "in" / f"{name}.parquet")
    flow = cw.Dataflow("idle")
    files = cw.files(tmp_path / "in", watch=True, settle_ms=0)
    rows = flow.read("r", files, event_time="at", out_of_order="1s")
    windows = rows.key_by("k").window("w", cw.tumbling("10s")).aggregate("n", n=cw.count())
    windows.write("out", cw.files(tmp_path / "out", roll_interval_ms=50))
    job = start(flow)

    def count() -> int:
        there = list((tmp_path / "out").glob("*.parquet"))
        return pl.read_parquet(there).height if there else 0

    wait_until(lambda: count() == 99, "all windows up to the newest row less the bound", job=job)
    job.stop()

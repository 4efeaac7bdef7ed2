"""Lines appended to files that are followed come through the workers as they are written, once, also past a kill."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import duckdb
from fake_host import FakeSpark
from runtime_world import wait_until

import cutwater as cw


def test_an_appended_line_waits_for_nothing_else_and_comes_once(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("a.csv", "b.csv"):
        (folder / name).write_text("k,v\n")
    flow = cw.Dataflow("lines")
    files = cw.files(folder, schema="k long, v long", watch=True, follow=True, end_marker="_END")
    counted = flow.read("rows", files).key_by("k").aggregate("sum", n=cw.count(), s=cw.sum("v"))
    counted.write("out", cw.files(tmp_path / "out", roll_interval_ms=0))
    job = start(flow, parallelism=2, interval="50ms", recovery="job")

    def seen() -> int:
        parts = list((tmp_path / "out").glob("*.parquet"))
        return duckdb.sql(f"SELECT count(*) FROM '{tmp_path}/out/*.parquet'").fetchall()[0][0] if parts else 0

    for number in range(6):
        if number == 3:
            wait_until(lambda: job.status.phase == "running" and len(job.status.workers) == 2, "running", 60, job=job)
            os.kill(next(w.pid for w in job.status.workers if w.pid in fake_spark.pids), signal.SIGKILL)
        if number == 4:  # a file that comes later is followed, too
            (folder / "c.csv").write_text("k,v\n")
        with (folder / ("a.csv", "b.csv", "a.csv", "b.csv", "c.csv", "a.csv")[number]).open("a") as out:
            out.write(f"{number % 2},{number}\n")
        wait_until(lambda n=number: seen() > n, f"line {number}", 60, job=job)
    with (folder / "a.csv").open("a") as out:
        out.write("0,6")  # not ended: a row as soon as the marker says that there is no more
    (folder / "_END").touch()
    assert job.await_termination(60)
    found = duckdb.sql(f"SELECT k, n, s FROM '{tmp_path}/out/*.parquet' ORDER BY k, n").fetchall()
    assert found == [(0, 1, 0), (0, 2, 2), (0, 3, 6), (0, 4, 12), (1, 1, 1), (1, 2, 4), (1, 3, 9)]

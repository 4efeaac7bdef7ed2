"""One job into files of every format and compression, through kills, a rescale and a new start, while readers look on.

DuckDB is the oracle: whatever is visible at a moment can be read and has no row twice, and at the end each is there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
from fake_host import FakeSpark
from runtime_world import gated, kill_some, open_gate, wait_until

import cutwater as cw

SINKS: dict[str, dict[str, Any]] = {
    "parquet-zstd": {"row_group_rows": 5_000},
    "parquet-snappy": {},
    "parquet-gzip": {"row_group_rows": 777},
    "parquet-lz4": {"row_group_rows": 20_000},
    "parquet-none": {"row_group_rows": 100},
    **{f"{format}-{compression}": {} for format in ("json", "csv") for compression in ("none", "gzip", "zstd")},
}
COLUMNS = "{'value': 'BIGINT', 'moment': 'TIMESTAMP', 'day': 'DATE', 'text': 'VARCHAR'}"
WRONG = (
    "epoch_us(moment) <> value * 1000003 % 1000000000000000 OR day <> DATE '1970-01-01' + (value % 40000)::int "
    "OR text <> 't \"' || value % 1000 || '\", x'"
)


def flow_into(out: Path, source: object) -> cw.Dataflow:
    flow, value = cw.Dataflow("sinks"), pl.col("value")
    rows = flow.read("rows", source).with_columns(
        "more",
        moment=(value * 1_000_003 % 10**15).cast(pl.Datetime("us")),
        day=(value % 40_000).cast(pl.Int32).cast(pl.Date),
        text=pl.format('t "{}", x', value % 1_000),
    )
    rows = rows.select("chosen", "value", "moment", "day", "text")
    for name, options in SINKS.items():
        format, compression = name.split("-")
        files = cw.files(out / name, format=format, compression=compression, roll_interval_ms="200ms", **options)
        rows.write(name, files)
    return flow


def visible(folder: Path) -> list[str]:
    return [str(path) for path in folder.glob("*") if path.is_file() and not path.name.startswith(("_", "."))]


def rows_of(name: str, files: list[str]) -> str:
    """Of DuckDB's SQL."""
    if name.startswith("parquet"):
        return f"read_parquet({files})"
    if name.startswith("json"):
        return f"read_json({files}, format='newline_delimited', columns={COLUMNS})"
    return f"read_csv({files}, header=true, columns={COLUMNS})"


@contextmanager
def looked_at(out: Path) -> Iterator[list[str]]:
    """Somebody reads the visible files again and again; what is wrong with them goes to the list."""
    found: list[str] = []
    ended = threading.Event()

    def look(connection: duckdb.DuckDBPyConnection) -> None:
        while not ended.wait(0.1):
            for name in SINKS:
                files = visible(out / name)
                if not files:
                    continue
                try:
                    sql = f"SELECT count(*) - count(DISTINCT value) FROM {rows_of(name, files)}"
                    ((doubled,),) = connection.execute(sql).fetchall()
                except duckdb.IOException:
                    if all(map(Path.exists, map(Path, files))):  # else it was taken back by a failure
                        raise
                else:
                    found.extend([f"{name}: {doubled} rows twice"] if doubled else [])

    def told() -> None:
        try:
            with duckdb.connect() as connection:
                look(connection)
        except duckdb.Error as error:
            found.append(repr(error))

    thread = threading.Thread(target=told)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()


@pytest.mark.full
@pytest.mark.parametrize(
    ("rows", "rate", "shapes"),
    [
        (100_000, 30_000, (2, 4, 1)),
        (60_000, 15_000, (1, 3, 2)),
        (100_000, 20_000, (3, 2, 4)),
        (400_000, None, (2, 3, 2)),
    ],
    ids=str,
)
def test_files_of_every_format_hold_each_row_once_at_any_time(
    start: Any, fake_spark: FakeSpark, tmp_path: Path, rows: int, rate: int | None, shapes: tuple[int, int, int]
) -> None:
    """``shapes``: parallelisms at first, after the rescale, and when the job is started again."""
    out = tmp_path / "out"
    first, then, last = shapes

    def started(parallelism: int) -> Any:
        source = gated(tmp_path, rows, rate=rate)
        recovery = "task" if then == 3 else "job"
        job = start(flow_into(out, source), parallelism=parallelism, interval="100ms", recovery=recovery)
        wait_until(lambda: job.status.phase == "running", "the start", job=job)
        return job

    with looked_at(out) as problems:
        job = started(first)
        wait_until(lambda: all(visible(out / name) for name in SINKS), "files", job=job)
        kill_some(job, fake_spark, 1, seed=first)
        job.rescale(then)
        kill_some(job, fake_spark, 1, seed=then)
        wait_until(lambda: job.status.phase == "running", "the recovery", job=job)
        job.stop()
        job = started(last)
        kill_some(job, fake_spark, 1, seed=last)
        open_gate(tmp_path)
        assert job.await_termination(120)
    assert problems == []
    for name in SINKS:
        files = visible(out / name)
        sums = f"count(*), count(DISTINCT value), sum(value), count(*) FILTER (WHERE {WRONG})"
        found = duckdb.sql(f"SELECT {sums} FROM {rows_of(name, files)}").fetchall()
        assert found == [(rows, rows, rows * (rows - 1) // 2, 0)], name
        assert {str(path) for path in (out / name).rglob("*")} == set(files), f"{name}: something is left"

"""A first job: events in eight files, a filter, counts and sums by page and minute, Parquet out, exactly-once.

    python -m benchmarks.real_input [--rounds 5] [--quick] [--only json|csv|parquet] [--files 10000]

Cutwater takes a checkpoint each second; Spark's micro-batches run with ``availableNow`` and their default batch, which
is all files.  DuckDB computes the same from the same files with as many threads and keeps nothing: it stands for what
the libraries can do.  A run is a whole call, from a warm session on, first row to last commit; the first of each
warms it up and does not count.  Every window of every run is compared with DuckDB's.  With ``--files`` there are so
many, of 1,000 rows each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from benchmarks import report
from benchmarks.machine import busy_cpus, facts
from benchmarks.workload import PARALLELISM, WrongResultError

ROWS = {"json": 60_000_000, "csv": 75_000_000, "parquet": 190_000_000}
"""Enough for five checkpoints on the machine of the documents."""
FILES = 8
FEW_ROWS = 1_000
"""Of a file, where they are many."""
Windows = Callable[[], pl.DataFrame]
"""Reads what a run wrote, which is no part of the run."""
SCHEMA = "ts timestamp, user long, page string, kind string, cents long"
_DUCKDB = "{ts:'TIMESTAMPTZ',user:'BIGINT',page:'VARCHAR',kind:'VARCHAR',cents:'BIGINT'}"


def make_files(folder: Path, kind: str, rows: int, files: int = FILES) -> None:
    """Events in the order of their times, a thousand pages, one kind in five counts."""
    rng = np.random.default_rng(1)
    folder.mkdir(parents=True)
    share = rows // files
    for number in range(files):
        micros = (np.arange(share) + number * share) * 1_000
        frame = pl.DataFrame(
            {
                "ts": np.datetime64("2026-01-01T00:00:00") + micros.astype("timedelta64[us]"),
                "user": rng.integers(0, 100_000, share),
                "page": np.array([f"p{p}" for p in range(1_000)])[rng.integers(0, 1_000, share)],
                "kind": np.array(["view", "click", "buy"])[rng.choice(3, share, p=[0.8, 0.15, 0.05])],
                "cents": rng.integers(1, 10_000, share),
            }
        )
        path = folder / f"{number:05}.{kind}"
        if kind == "parquet":
            frame.with_columns(pl.col("ts").dt.replace_time_zone("UTC")).write_parquet(path, row_group_size=250_000)
        else:
            texts = frame.with_columns(pl.col("ts").dt.strftime("%Y-%m-%dT%H:%M:%S%.6fZ"))
            (texts.write_ndjson if kind == "json" else texts.write_csv)(path)


def windows(folder: Path) -> pl.DataFrame:
    """Counts and sums by minute and page, of all files that a run wrote."""
    frame = pl.read_parquet(folder / "*.parquet")
    start = pl.col("window").struct.field("start") if "window" in frame.columns else pl.col("window_start")
    return frame.select(start.dt.epoch("us").alias("start"), "page", "n", "cents").sort("start", "page")


def with_cutwater(
    spark: Any, files: Path, kind: str, scratch: Path, parallelism: int = PARALLELISM
) -> tuple[Windows, int]:
    """One job; how to read its windows, and its checkpoints."""
    import cutwater as cw

    flow = cw.Dataflow("real")
    source = cw.files(str(files / f"*.{kind}"), schema=None if kind == "parquet" else SCHEMA)
    events = flow.read("events", source, event_time="ts", out_of_order="10s")
    paid = events.filter("paid", pl.col("kind") != "view").key_by("page").window("minute", cw.tumbling("1m"))
    paid.aggregate("revenue", n=cw.count(), cents=cw.sum("cents")).write("out", cw.files(str(scratch / "out")))
    job = flow.run(spark, checkpoint=str(scratch / "checkpoints"), parallelism=parallelism, interval="1s")
    return lambda: windows(scratch / "out"), job.status.checkpoints.completed


def with_spark(spark: Any, files: Path, kind: str, scratch: Path) -> tuple[Windows, int]:
    """One query; how to read its windows, and its batches."""
    from pyspark.sql import functions as fn

    reader = spark.readStream.schema(SCHEMA).option("maxFilesPerTrigger", sum(1 for _ in files.iterdir()))
    if kind == "csv":
        reader = reader.option("header", "true")
    events = reader.format(kind).load(str(files)).withWatermark("ts", "10 seconds").where("kind <> 'view'")
    counted = events.groupBy(fn.window("ts", "1 minute"), "page").agg(
        fn.count("*").alias("n"), fn.sum("cents").alias("cents")
    )
    out = str(scratch / "out")
    query = counted.writeStream.outputMode("update").foreachBatch(
        lambda frame, _: frame.write.mode("append").parquet(out)
    )
    running = query.option("checkpointLocation", str(scratch / "checkpoints")).trigger(availableNow=True).start()
    running.awaitTermination()
    return lambda: windows(scratch / "out"), 1


def with_duckdb(spark: Any, files: Path, kind: str, scratch: Path, threads: int = PARALLELISM) -> tuple[Windows, int]:
    """The same by SQL."""
    import duckdb

    path = files / f"*.{kind}"
    table = {
        "json": f"read_json('{path}',format='newline_delimited',columns={_DUCKDB})",
        "csv": f"read_csv('{path}',columns={_DUCKDB})",
        "parquet": f"'{path}'",
    }[kind]
    duckdb.sql(f"set threads={threads}")
    found = duckdb.sql(
        "select epoch_us(time_bucket(interval 1 minute, ts)) as start, page, count(*) as n, "
        f"sum(cents)::bigint as cents from {table} where kind <> 'view' group by 1, 2"
    ).pl()
    return lambda: found.sort("start", "page"), 0


ENGINES: dict[str, Callable[[Any, Path, str, Path], tuple[Windows, int]]] = {
    "cutwater": with_cutwater,
    "spark": with_spark,
    "duckdb": with_duckdb,
}


def measure(
    spark: Any, kind: str, rows: int, rounds: int, folder: Path, number_of_files: int = FILES
) -> list[dict[str, Any]]:
    """All runs over one format, the engines in turns.

    Raises:
        WrongResultError: a run has other windows.
    """
    files = folder / kind
    make_files(files, kind, rows, number_of_files)
    expected = with_duckdb(spark, files, kind, folder)[0]()
    runs: list[dict[str, Any]] = []
    for number in range(rounds + 1):
        for engine, run in ENGINES.items():
            scratch = folder / f"{engine}-{kind}-{number}"
            others, begin = busy_cpus(), time.monotonic()
            read, checkpoints = run(spark, files, kind, scratch)
            seconds = time.monotonic() - begin
            found = read()
            shutil.rmtree(scratch, ignore_errors=True)
            if not found.cast(dict(expected.schema)).equals(expected):
                raise WrongResultError(f"{engine}, {kind}: other windows than DuckDB's")
            if number:
                rate = rows / seconds
                print(f"round {number}  {kind:<8} {engine:<9} {rate / 1e6:7.2f} M rows/s", flush=True)
                runs.append(
                    {"engine": engine, "kind": kind, "rate": rate, "checkpoints": checkpoints, "others_cpus": others}
                )
    shutil.rmtree(files)
    return runs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round over a twentieth of the rows")
    parser.add_argument("--only", choices=list(ROWS))
    parser.add_argument("--files", type=int, default=FILES, help="more than eight have 1,000 rows each")
    arguments = parser.parse_args()
    from cutwater.spark.session import session

    spark = session(PARALLELISM, conf={"spark.driver.memory": "6g"})  # which one micro-batch of all files takes
    spark.conf.set("spark.sql.shuffle.partitions", str(PARALLELISM))
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    rounds, share = (1, 0.05) if arguments.quick else (arguments.rounds, 1.0)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as scratch:
        for kind in [arguments.only] if arguments.only else ROWS:
            rows = int(ROWS[kind] * share) if arguments.files == FILES else FEW_ROWS * arguments.files
            runs += measure(spark, kind, rows, rounds, Path(scratch), arguments.files)
    data = {"machine": facts(), "rounds": rounds, "share": share, "runs": runs}
    report.OUT.mkdir(parents=True, exist_ok=True)
    name = "real_input" if arguments.files == FILES else "real_input_many_files"
    (report.OUT / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    print(report.real_input_table(data))


if __name__ == "__main__":
    main()

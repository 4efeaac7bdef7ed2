"""A twentieth of the events in Parquet files: with row groups left out by their statistics, and with all of them read.

    python -m benchmarks.row_groups [--rounds 5] [--quick]

The same job twice, from a warm session on: its filter compares the time with constants, or a value computed from the
time, of which statistics say nothing.  Windows of both are compared with those of DuckDB.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import polars as pl

from benchmarks.machine import facts
from benchmarks.real_input import make_files, windows
from benchmarks.workload import PARALLELISM, WrongResultError

ROWS = 60_000_000
"""A millisecond apart."""
_ZERO_US = 1_767_225_600_000_000
"""The first one's time, since the epoch."""


def run(spark: Any, files: Path, scratch: Path, wanted: pl.Expr) -> tuple[float, pl.DataFrame, int]:
    """Seconds of one job, its windows, and the rows that it did not read."""
    import cutwater as cw

    flow = cw.Dataflow("part")
    events = flow.read("events", cw.files(str(files / "*.parquet")), event_time="ts", out_of_order="10s")
    keyed = events.filter("wanted", wanted).key_by("page").window("minute", cw.tumbling("1m"))
    keyed.aggregate("revenue", n=cw.count(), cents=cw.sum("cents")).write("out", cw.files(str(scratch / "out")))
    begin = time.monotonic()
    job = flow.run(spark, checkpoint=str(scratch / "checkpoints"), parallelism=PARALLELISM, interval="1s")
    seconds = time.monotonic() - begin
    passed = job.status.steps["events"].counters.get("rows_passed_over", 0)
    return seconds, windows(scratch / "out"), passed


def expected(files: Path, first_us: int, last_us: int) -> pl.DataFrame:
    """The windows by DuckDB."""
    import duckdb

    return duckdb.sql(
        "select epoch_us(time_bucket(interval 1 minute, ts)) as start, page, count(*) as n, "
        f"sum(cents)::bigint as cents from '{files}/*.parquet' "
        f"where epoch_us(ts) between {first_us} and {last_us} group by 1, 2 order by 1, 2"
    ).pl()


def main() -> None:
    parser = argparse.ArgumentParser(description="Row groups that are left out, and not.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="one round over a tenth of the rows")
    arguments = parser.parse_args()
    from cutwater.spark.session import session

    spark = session(PARALLELISM)
    rounds, rows = (1, ROWS // 10) if arguments.quick else (arguments.rounds, ROWS)
    first_us, last_us = (_ZERO_US + share * rows * 50 for share in (8, 9))
    ends = [pl.lit(us).cast(pl.Datetime("us", "UTC")) for us in (first_us, last_us)]
    filters = {
        "left out": pl.col("ts").is_between(ends[0], ends[1]),
        "all read": pl.col("ts").dt.epoch("us").is_between(first_us, last_us),
    }
    times: dict[str, list[float]] = {name: [] for name in filters}
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as scratch:
        files = Path(scratch) / "in"
        make_files(files, "parquet", rows)
        right = expected(files, first_us, last_us)
        for number in range(rounds + 1):
            for name, wanted in filters.items():
                seconds, found, passed = run(spark, files, Path(scratch) / f"{name}-{number}", wanted)
                if not found.cast(right.schema).equals(right):
                    raise WrongResultError(f"{name}: other windows than DuckDB's")
                if number:
                    times[name].append(seconds)
                    print(f"round {number}  {name}  {seconds:6.2f} s  {passed:,} rows not read", flush=True)
    one, other = (statistics.median(found) for found in times.values())
    print(f"medians of {rounds}: {one:.2f} and {other:.2f} s for {rows:,} rows, {other / one:.1f} times; {facts()}")


if __name__ == "__main__":
    main()

"""How long a running job with much state takes to go on at another parallelism.

    python -m benchmarks.rescale [--keys 10000000] [--rounds 3] [--quick]

A running count and sum over ``keys`` int64 keys at two million events a second, on a local session of four cores.  When
every key is in the state, the job is rescaled from 2 to 4 and back to 2.  Measured is the call: start of the new
workers, checkpoint, restore, until the job runs at the new parallelism.  Each key comes equally often, so that at the
end each must have that count and the closed form's sum: nothing lost, nothing doubled (DuckDB over the files written).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa

import cutwater as cw
from benchmarks.machine import busy_cpus, facts
from benchmarks.turns import OUT
from cutwater.api.jobs.job import Job
from cutwater.spark.session import session

__all__ = ["main"]

KEYS = 10_000_000
ROUNDS = 3
RATE = 2_000_000
STEPS = (4, 2)
_PASSES = 8
"""How often each key comes: long enough for both steps, also where they take three times what is asked for."""
_SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])


class WrongResultError(Exception):
    """Something was lost or doubled."""


@dataclass(frozen=True)
class InTurn:
    """``fn(start, count)`` of ``cw.generate``: every key once, then every key again."""

    keys: int

    def __call__(self, start: int, count: int) -> pa.RecordBatch:
        values = np.arange(start, start + count)
        return pa.record_batch([values % self.keys, values], schema=_SCHEMA)


def start(folder: Path, keys: int, passes: int, spark: Any) -> Job:
    """The job; only the last row of each key is written."""
    flow = cw.Dataflow("rescale")
    source = cw.generate(InTurn(keys), schema=_SCHEMA, rows=keys * passes, partitions=4, rate=RATE)
    counted = flow.read("gen", source).key_by("k").aggregate("agg", n=cw.count(), s=cw.sum("v"))
    counted.filter("last", pl.col("n") == passes).write("out", cw.files(str(folder / "out")))
    return flow.start(spark, checkpoint=folder / "checkpoints", parallelism=2, interval="10s")


def verify(folder: Path, keys: int, passes: int) -> None:
    """Each key has its count and its sum.

    Raises:
        WrongResultError: one has not.
    """
    found = duckdb.sql(
        f"""SELECT count(*), count(DISTINCT k), count_if(s <> {passes} * k + {keys * passes * (passes - 1) // 2})
        FROM read_parquet('{folder}/out/*.parquet')"""
    ).fetchall()
    if found != [(keys, keys, 0)]:
        raise WrongResultError(f"rows, keys and wrong sums are {found[0]}, for {keys} keys")


def run_once(folder: Path, keys: int, passes: int, spark: Any) -> dict[str, float]:
    """One verified job; seconds by new parallelism."""
    job = start(folder, keys, passes, spark)
    while job.status.rows_read < keys and job.is_active:
        time.sleep(0.05)
    seconds: dict[str, float] = {}
    for parallelism in STEPS:
        before = time.perf_counter()
        job.rescale(parallelism)
        seconds[f"to {parallelism}"] = time.perf_counter() - before
    job.await_termination()
    verify(folder, keys, passes)
    return seconds


def table(data: dict[str, Any]) -> str:
    """Medians and ranges.

    >>> print(table({"keys": 1000, "runs": [{"to 4": 1.5, "to 2": 1.0}]}).splitlines()[2])
    | 1,000 | 2 to 4 | 1.50 | 1.50 - 1.50 |
    """
    lines = ["| keys | parallelism | seconds, median | min - max |", "|---:|---|---:|---:|"]
    for name, spoken in (("to 4", "2 to 4"), ("to 2", "4 to 2")):
        values = [run[name] for run in data["runs"]]
        lines.append(f"| {data['keys']:,} | {spoken} | {median(values):.2f} | {min(values):.2f} - {max(values):.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keys", type=int, default=KEYS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="one round with a tenth of the keys: does it all work?")
    arguments = parser.parse_args()
    keys, rounds = (arguments.keys // 10, 1) if arguments.quick else (arguments.keys, arguments.rounds)
    passes = max(_PASSES, 20_000_000 // keys)
    runs: list[dict[str, float]] = []
    others = busy_cpus()
    spark = session(4)
    for number in range(rounds + 1):  # the first one loads kernels
        with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as scratch:
            try:
                found = run_once(Path(scratch), keys, passes, spark)
            except WrongResultError as e:
                sys.exit(f"after the rescales the result is wrong: {e}")
        print(f"round {number}  " + "  ".join(f"{name}: {s:.2f} s" for name, s in found.items()), flush=True)
        runs += [found] if number else []
    data = {"machine": facts(), "keys": keys, "rounds": rounds, "others_cpus": others, "runs": runs}
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "rescale.json").write_text(json.dumps(data, indent=1) + "\n")
    print(table(data))


if __name__ == "__main__":
    main()

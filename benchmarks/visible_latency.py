"""Time from a row to its being in a file that readers see, with an exactly-once file sink and short intervals.

    python -m benchmarks.visible_latency [--seconds 6]

1,000 rows a second, parallelism 2, ``roll_interval_ms=0``: every checkpoint makes its rows visible.  Rows carry the
machine's monotonic clock, and the folder is listed every 2 ms: what a file holds is visible when its name is.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from benchmarks.machine import facts
from benchmarks.row_times import SKIP_S, late_ms, told
from cutwater.connectors.files.source import FileFormat

__all__ = ["main"]

RATE = 1_000
LOOK_S = 0.002
LOOKS = 50
"""Looks into the folder for each at the job's status."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=6.0, help="that count, in each run")
    arguments = parser.parse_args()
    print(facts())
    formats: tuple[FileFormat, ...] = "parquet", "json"
    for format in formats:
        for interval in ("100ms", "50ms"):
            with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as scratch:
                run(Path(scratch), format, interval, arguments.seconds)


def run(scratch: Path, format: FileFormat, interval: str, seconds: float) -> None:
    """One job; prints the percentiles."""
    import cutwater as cw
    from cutwater.spark.session import session

    out = scratch / "out"
    out.mkdir()
    flow = cw.Dataflow("visible")
    rows = flow.read("rows", cw.rate(RATE, rows=int(RATE * (seconds + SKIP_S))))
    stamped = rows.map_batches("stamp", stamp, schema="t long")
    stamped.write("out", cw.files(out, format=format, roll_interval_ms=0))
    job = flow.start(session(2), checkpoint=scratch / "checkpoints", parallelism=2, interval=interval)
    seen: dict[str, int] = {}
    while not job.status.outcome:
        for _ in range(LOOKS):
            names = os.listdir(out)
            now_ns = time.monotonic_ns()
            seen |= {name: now_ns for name in names if name not in seen and not name.startswith("_")}
            time.sleep(LOOK_S)
    job.await_termination(60)
    read = pl.read_parquet if format == "parquet" else pl.read_ndjson
    made = {name: read(out / name)["t"].to_numpy() for name in seen}
    began = np.concatenate(list(made.values()))
    came = np.repeat([seen[name] for name in made], [len(times) for times in made.values()])
    print(f"{format}, interval {interval}: {told(late_ms(began, came))}, {len(seen)} files", flush=True)


def stamp(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """``map_batches`` function: the time at which each row came."""
    for batch in batches:
        yield pa.record_batch({"t": np.full(batch.num_rows, time.monotonic_ns())})


if __name__ == "__main__":
    main()

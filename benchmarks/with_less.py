"""The job of ``benchmarks.real_input`` on one core: what it makes there, and the memory that a worker takes.

    python -m benchmarks.with_less [--quick] [--only json|csv|parquet]

Each engine runs in a process of its own that may use one core, and all that it starts inherits that: the driver, its
JVM and the workers of Cutwater at parallelism 1 and 2; DuckDB and Polars with one thread.  A process runs its job
twice, and the second run counts.  Every window is compared with DuckDB's.  Memory is the largest resident set that a
worker had, by the kernel's own mark (``VmHWM``); it holds Python and all libraries, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from benchmarks import real_input
from benchmarks.machine import facts
from benchmarks.turns import OUT
from benchmarks.workload import WrongResultError

SHARE = 0.25
"""Of the rows of ``real_input``."""
_LOOK_S = 0.25
RUNS = (("duckdb", 1), ("polars", 1), ("cutwater", 1), ("cutwater", 2))
"""Engines, and their threads or parallelism."""


def with_polars(files: Path, kind: str) -> pl.DataFrame:
    """The same windows."""
    pattern = files / f"*.{kind}"
    if kind == "parquet":
        events = pl.scan_parquet(pattern)
    elif kind == "csv":
        events = pl.scan_csv(pattern, try_parse_dates=True)
    else:
        events = pl.scan_ndjson(pattern).with_columns(pl.col("ts").str.to_datetime(time_zone="UTC"))
    start = pl.col("ts").dt.truncate("1m").dt.epoch("us").alias("start")
    found = events.filter(pl.col("kind") != "view").group_by(start, "page")
    return found.agg(n=pl.len(), cents=pl.col("cents").sum()).collect(engine="streaming").sort("start", "page")


def run(engine: str, threads: int, kind: str, files: Path, out: Path) -> None:
    """Run a job twice on one core; its windows go to a file, what the second run took to standard output."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    spark: Any = None
    if engine == "cutwater":
        from cutwater.spark.session import session

        spark = session(threads)
    most, ended = 0, threading.Event()

    def look() -> None:
        nonlocal most
        while not ended.wait(_LOOK_S):
            most = max([most, *(peak_kib(pid) for pid in workers(os.getpid()))])

    looks = threading.Thread(target=look, daemon=True)
    looks.start()
    for number in range(2):
        scratch = out.parent / f"{out.stem}-{number}"
        begin = time.monotonic()
        if engine == "polars":
            found = with_polars(files, kind)
            seconds = time.monotonic() - begin
        elif engine == "duckdb":
            read, _ = real_input.with_duckdb(None, files, kind, scratch, threads)
            seconds = time.monotonic() - begin
            found = read()
        else:
            read, _ = real_input.with_cutwater(spark, files, kind, scratch, threads)
            seconds = time.monotonic() - begin
            found = read()
    ended.set()
    looks.join()
    found.write_parquet(out)
    print(json.dumps({"seconds": seconds, "worker_mib": most >> 10}))


def workers(pid: int) -> Iterator[int]:
    """The Python processes below a JVM that a process has started."""
    for child in children(pid):
        is_java = "java" in name_of(child)
        yield from (below for below in descendants(child) if is_java and "python" in name_of(below))


def descendants(pid: int) -> Iterator[int]:
    """All processes below one."""
    for child in children(pid):
        yield child
        yield from descendants(child)


def children(pid: int) -> list[int]:
    """The processes that a process has started, and that are alive."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except OSError:
            continue
    return found


def name_of(pid: int) -> str:
    """A process's name; nothing if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def peak_kib(pid: int) -> int:
    """The largest resident set that a process had; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def measure(kind: str, rows: int, folder: Path) -> list[dict[str, Any]]:
    """All engines over one format.

    Raises:
        WrongResultError: one has other windows than DuckDB.
    """
    files = folder / kind
    real_input.make_files(files, kind, rows)
    found: list[dict[str, Any]] = []
    expected: pl.DataFrame | None = None
    for engine, threads in RUNS:
        out = folder / f"{engine}-{threads}-{kind}.parquet"
        command = [
            sys.executable,
            "-m",
            "benchmarks.with_less",
            "--run",
            engine,
            str(threads),
            kind,
            str(files),
            str(out),
        ]
        environment = {**os.environ, "POLARS_MAX_THREADS": "1"}
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
        windows = pl.read_parquet(out)
        expected = windows if expected is None else expected
        if not windows.cast(dict(expected.schema)).equals(expected):
            raise WrongResultError(f"{engine}, {kind}: other windows than DuckDB's")
        told = json.loads(done.stdout.splitlines()[-1])
        found.append({"engine": engine, "threads": threads, "kind": kind, "rate": rows / told["seconds"], **told})
        print(f"{kind:<8} {engine:<9} {threads}  {rows / told['seconds'] / 1e6:6.2f} M rows/s", told, flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a twentieth of the rows")
    parser.add_argument("--only", choices=list(real_input.ROWS))
    parser.add_argument("--run", nargs=5, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        engine, threads, kind, files, out = arguments.run
        run(engine, int(threads), kind, Path(files), Path(out))
        return
    share = SHARE / 20 if arguments.quick else SHARE
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as scratch:
        for kind in [arguments.only] if arguments.only else real_input.ROWS:
            runs += measure(kind, int(real_input.ROWS[kind] * share), Path(scratch))
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "with_less.json").write_text(json.dumps({"machine": facts(), "share": share, "runs": runs}, indent=1) + "\n")
    if arguments.quick:
        print("short runs: checked, but their rates mean nothing")


if __name__ == "__main__":
    main()

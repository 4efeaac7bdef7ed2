"""What the file sink writes in a second, beside the library that writes its format, on one core.

``python -m benchmarks.file_sinks``: the same batches go through one subtask's writer of a file sink, with a checkpoint
and its commit every second, and through the library's own writer into one file.  In turns; medians of ``--rounds``.
A second table has the cost of one checkpoint with many parts.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

__all__ = ["SCHEMA", "Identity", "main"]

SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("amount", pa.float64()),
        ("at", pa.timestamp("us")),
        ("word", pa.string()),
        ("note", pa.string()),
    ]
)
BATCH_ROWS = 1 << 16
WORDS = 1_000
CASES: dict[str, dict[str, Any]] = {
    "parquet": {},
    "parquet snappy": {"compression": "snappy"},
    "json": {},
    "json gzip": {"compression": "gzip"},
    "csv": {},
}


@dataclass(frozen=True)
class Identity:
    """Who writes."""

    job_uid: str = "uid"
    step: str = "out"
    subtask: int = 0
    parallelism: int = 1
    incarnation: int = 1


def batches(rows: int) -> list[pa.RecordBatch]:
    """Numbers, times, words that come again and texts that do not."""
    import numpy as np

    random = np.random.default_rng(7)
    made: list[pa.RecordBatch] = []
    words = pa.array([f"word-{n}" for n in range(WORDS)])
    for first in range(0, rows, BATCH_ROWS):
        ids = np.arange(first, min(first + BATCH_ROWS, rows))
        columns = [
            pa.array(ids),
            pa.array(np.round(random.random(len(ids)) * 1e4, 2)),
            pa.array(1_700_000_000_000_000 + ids * 1_234, pa.timestamp("us")),
            words.take(pa.array(random.integers(0, WORDS, len(ids)))),
            pa.array(random.integers(0, 10**12, len(ids))).cast(pa.string()),
        ]
        made.append(pa.RecordBatch.from_arrays(columns, schema=SCHEMA))
    return made


def cutwater(folder: Path, case: str, rows: list[pa.RecordBatch], interval_s: float) -> None:
    """One subtask's writer, with a checkpoint and its commit every so often."""
    from cutwater import files

    sink = files(folder, format=case.split()[0], **CASES[case]).as_sink()
    writer, committer = sink.writer(SCHEMA, Identity(), []), sink.committer(SCHEMA, "uid", "out")
    checkpoint_id, due = 1, time.perf_counter() + interval_s
    for batch in rows:
        writer.write(batch)
        if time.perf_counter() > due:
            committer.commit(checkpoint_id, writer.pre_commit(checkpoint_id, False)().handles)
            checkpoint_id, due = checkpoint_id + 1, time.perf_counter() + interval_s
    committer.commit(checkpoint_id, writer.pre_commit(checkpoint_id, True)().handles)
    committer.finish(1)


def library(folder: Path, case: str, rows: list[pa.RecordBatch]) -> None:
    """The library's own writer, one file, made durable at its end."""
    folder.mkdir()
    name, *rest = case.split()
    path = folder / "all"
    if name == "parquet":
        import pyarrow.parquet as pq

        with pq.ParquetWriter(path, SCHEMA, compression=rest[0] if rest else "zstd") as writer:
            for table in _groups(rows, 1 << 20):
                writer.write_table(table)
    elif name == "json":
        import polars as pl

        if rest:
            with pa.output_stream(str(path), compression="gzip") as file:
                for batch in rows:
                    file.write(pl.from_arrow(batch).write_ndjson().encode())
        else:
            with path.open("wb") as file:
                for batch in rows:
                    pl.from_arrow(batch).write_ndjson(file)
    else:
        import pyarrow.csv

        with pyarrow.csv.CSVWriter(str(path), SCHEMA) as writer:
            for batch in rows:
                writer.write_batch(batch)
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def _groups(rows: list[pa.RecordBatch], size: int) -> Iterator[pa.Table]:
    step = size // BATCH_ROWS
    for first in range(0, len(rows), step):
        yield pa.Table.from_batches(rows[first : first + step])


def _written() -> int:
    with open("/proc/self/io") as file:
        return int(next(line for line in file if line.startswith("wchar")).split()[1])


def compare(case: str, rows: list[pa.RecordBatch], rounds: int, interval_s: float) -> dict[str, Any]:
    """Medians of both, in turns, after one round that does not count."""
    number = sum(batch.num_rows for batch in rows)
    seconds: dict[str, list[float]] = {"cutwater": [], "library": []}
    moved: dict[str, int] = {}
    size: dict[str, int] = {}
    for round in range(rounds + 1):
        for who in seconds:
            folder = Path(tempfile.mkdtemp(prefix="cutwater-bench-")) / "out"
            before, started = _written(), time.perf_counter()
            if who == "cutwater":
                cutwater(folder, case, rows, interval_s)
            else:
                library(folder, case, rows)
            if round:
                seconds[who].append(time.perf_counter() - started)
            moved[who] = _written() - before
            size[who] = sum(file.stat().st_size for file in folder.iterdir())
            shutil.rmtree(folder.parent)
    ratios = [b / a for a, b in zip(seconds["cutwater"], seconds["library"], strict=True)]
    return {
        "case": case,
        "cutwater M rows/s": round_(number / statistics.median(seconds["cutwater"]) / 1e6),
        "library M rows/s": round_(number / statistics.median(seconds["library"]) / 1e6),
        "ratio": round_(statistics.median(ratios)),
        "bytes moved for each that is kept": round_(moved["cutwater"] / size["cutwater"]),
        "size beside the library's": round_(size["cutwater"] / size["library"]),
    }


def round_(value: float) -> float:
    """To what can be told apart."""
    return float(f"{value:.3g}")


def many_parts(parts: int, rounds: int) -> dict[str, Any]:
    """One checkpoint at which each of many subtasks has a part: cut, made durable, committed."""
    from cutwater.connectors.files.sink import FileSink

    cut: list[float] = []
    committed: list[float] = []
    batch = batches(100)[0]
    for _ in range(rounds):
        folder = Path(tempfile.mkdtemp(prefix="cutwater-bench-")) / "out"
        sink = FileSink(str(folder), roll_rows=100, roll_interval_ms="1h")
        writer, committer = sink.writer(SCHEMA, Identity(), []), sink.committer(SCHEMA, "uid", "out")
        for _ in range(parts):
            writer.write(batch)
        started = time.perf_counter()
        handles = writer.pre_commit(1, False)().handles
        between = time.perf_counter()
        committer.commit(1, handles)
        cut.append(between - started)
        committed.append(time.perf_counter() - between)
        if len(list(folder.glob("*.parquet"))) != parts:
            raise RuntimeError("parts are missing")
        shutil.rmtree(folder.parent)
    return {
        "parts": parts,
        "pre-commit ms": round_(statistics.median(cut) * 1e3),
        "commit ms": round_(statistics.median(committed) * 1e3),
    }


def main() -> None:
    """Print a line of JSON for each case."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between checkpoints")
    parser.add_argument("--only", default=",".join([*CASES, "parts"]))
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    rows = batches(arguments.rows)
    for case in CASES:
        if case in chosen:
            print(json.dumps(compare(case, rows, arguments.rounds, arguments.interval)), flush=True)
    if "parts" in chosen:
        for parts in (1, 64, 1000):
            print(json.dumps(many_parts(parts, arguments.rounds)), flush=True)


if __name__ == "__main__":
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    sys.exit(main())

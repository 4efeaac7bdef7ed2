"""From nothing to the first row, beside an empty query of PySpark, and a small job in a session that is warm.

    python -m benchmarks.first_row [--rounds 5]

Each start is a process of its own, in turns, timed from before Python starts.  The query is
``spark.range(1).collect()``; the job's first row is when a function of its own gets one.  Warm: ``flow.run`` of ten
rows from call to return, twenty times in one process after three that do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

EMPTY_QUERY = """
import os, time
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[2]").config("spark.ui.enabled", "false").getOrCreate()
spark.range(1).collect()
print("RESULT", time.time(), flush=True)
os._exit(0)
"""

JOB = """
import os, sys, time
from pathlib import Path
import cutwater as cw

folder, runs = Path(sys.argv[1]), int(sys.argv[2])

def seen(batches):
    for batch in batches:
        (folder / "first").write_text(repr(time.time()))
        yield batch

def run(number):
    flow = cw.Dataflow(f"job-{number}")
    rows = flow.read("in", cw.files(folder / "in.json", schema="k long"))
    rows.map_batches("seen", seen, schema="k long").write("out", cw.files(folder / f"out-{number}"))
    begin = time.monotonic()
    flow.run(checkpoint=folder / "checkpoints", parallelism=2, interval="1s", progress=False)
    return time.monotonic() - begin

seconds = [run(number) for number in range(runs)]
first = (folder / "first").read_text() if runs == 1 else sorted(seconds[3:])[(runs - 3) // 2]
print("RESULT", first, flush=True)
os._exit(0)
"""

WARM_UPS, WARM_RUNS = 3, 20


def result(program: str, *arguments: str) -> float:
    """The number that a program prints.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=dict(os.environ))
    return float(done.stdout.rpartition("RESULT ")[2])


def job(runs: int) -> float:
    """When the first row of a job came, seconds since the epoch; of several runs, the median of their seconds."""
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as folder:
        Path(folder, "in.json").write_text("".join(json.dumps({"k": k}) + "\n" for k in range(10)))
        return result(JOB, folder, str(runs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    queries: list[float] = []
    rows: list[float] = []
    for number in range(rounds):
        begin = time.time()
        queries.append(result(EMPTY_QUERY) - begin)
        begin = time.time()
        rows.append(job(1) - begin)
        print(f"round {number + 1}  empty query {queries[-1]:.2f} s  first row {rows[-1]:.2f} s", flush=True)
    ratio = median(row / query for row, query in zip(rows, queries, strict=True))
    print(f"empty query {median(queries):.2f} s, first row {median(rows):.2f} s, median of the ratios {ratio:.2f}")
    print(f"a job of ten rows in a warm session: {job(WARM_UPS + WARM_RUNS):.2f} s, median of {WARM_RUNS}")


if __name__ == "__main__":
    main()

"""How long a job with a gigabyte of state is away after a worker is killed.

    python -m benchmarks.large_state [--keys 11000000] [--kills 5] [--scope job] [--quick]

Eleven million keys of two int64 columns with seven aggregates each, about 100 bytes a key in a checkpoint.  When all
keys are in the state, 100,000 rows a second touch keys at random; again and again a random worker gets SIGKILL.
Measured outside the engine: from the signal to the first batch of a subtask run that began after it (see ``probe``).
At the end every row must have come out once, and the counts of all keys must be those of the closed form.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa

import cutwater as cw
from benchmarks.machine import busy_cpus, facts
from benchmarks.probe import Probe, read_reports
from benchmarks.recovery import kill_one, wait_for
from benchmarks.turns import OUT
from benchmarks.workload import PARALLELISM, WrongResultError
from cutwater.api.jobs.job import Job
from cutwater.config import RecoveryName
from cutwater.spark.session import session

__all__ = ["main"]

KEYS = 11_000_000
KILLS = 5
RATE = 100_000
SECONDS_A_KILL = 8
_SCHEMA = pa.schema([("k", pa.int64()), ("j", pa.int64()), ("v", pa.int64())])
_NEVER = 1 << 62
"""The probe only counts the rows."""


@dataclass(frozen=True)
class Touched:
    """``fn(start, count)`` of ``cw.generate``: first every key once, then keys that jump about.

    >>> Touched(4)(2, 4).column("k").to_pylist()
    [2, 3, 0, 3]
    """

    keys: int

    def __call__(self, start: int, count: int) -> pa.RecordBatch:
        numbers = np.arange(start, start + count)
        keys = np.where(numbers < self.keys, numbers, numbers * 7_368_787 % self.keys)
        return pa.record_batch([keys, keys ^ 0x5DEECE66D, numbers % 1000], schema=_SCHEMA)


def start(folder: Path, keys: int, rows: int, spark: Any, scope: RecoveryName) -> Job:
    """The job; its rows after the first ``keys`` come slowly."""
    folder.mkdir(parents=True)
    (folder / "first-0-0").touch()  # the probe's reports are read without a first emission
    flow = cw.Dataflow("large")
    fill = cw.generate(Touched(keys), schema=_SCHEMA, rows=keys, partitions=PARALLELISM)
    touch = cw.generate(Touched(keys), schema=_SCHEMA, rows=rows, start=keys, partitions=PARALLELISM, rate=RATE)
    both = flow.read("fill", fill).union("both", flow.read("touch", touch))
    of = {"n": cw.count(), "s": cw.sum("v"), "low": cw.min("v"), "high": cw.max("v"), "mean": cw.mean("v")}
    counted = both.key_by("k", "j").aggregate("agg", **of, last=cw.last("v"), spread=cw.variance("v"))
    counted.write("out", Probe(str(folder), watch_after=_NEVER))
    at_once = cw.RestartConfig(strategy="fixed_delay", delay_ms=0.0, attempts=10_000)
    checkpoints = folder / "checkpoints"
    return flow.start(
        spark, checkpoint=checkpoints, parallelism=PARALLELISM, interval="1s", restart=at_once, recovery=scope
    )


def measure(folder: Path, keys: int, kills: int, scope: RecoveryName) -> dict[str, Any]:
    """Kill so often, and see what was lost.

    Raises:
        WrongResultError: something was lost or doubled.
        RuntimeError: the job ended, or does not come back.
    """
    dice, others = random.Random(scope), busy_cpus()
    rows = RATE * SECONDS_A_KILL * (kills + 1)
    job = start(folder, keys, rows, session(PARALLELISM), scope)

    def filled() -> bool:
        step = job.status.steps.get("fill")
        return step is not None and step.rows_out >= keys

    wait_for("all keys", job, filled)
    restarted = 1 if scope == "task" else PARALLELISM
    times = [kill_one(job, folder, dice, restarted) for _ in range(kills)]
    stored = job.status.checkpoints.last_size_bytes
    job.await_termination()
    sunk = read_reports(folder).rows
    if sunk != keys + rows:
        raise WrongResultError(f"{sunk:,} rows came out of {keys + rows:,}")
    check_counts(folder, keys, rows)
    first = [first for first, _, _ in times]
    return {"keys": keys, "scope": scope, "state_bytes": stored, "first": first, "all": [last for _, last, _ in times],
            "median": median(first), "others_cpus": others, "machine": facts()}  # fmt: skip


def check_counts(folder: Path, keys: int, rows: int) -> None:
    """The counts in the last checkpoint, against how often the closed form touches each key."""
    expected = np.ones(keys, np.int64)
    for begin in range(keys, keys + rows, 1 << 22):
        touched = np.arange(begin, min(begin + (1 << 22), keys + rows)) * 7_368_787 % keys
        expected += np.bincount(touched, minlength=keys)
    found = np.zeros(keys, np.int64)
    state = cw.Snapshot(folder / "checkpoints" / "large").table("agg", columns=["k", "n"])
    found[state.column("k").to_numpy()] = state.column("n").to_numpy()
    if not np.array_equal(found, expected):
        raise WrongResultError(f"the counts of {np.count_nonzero(found != expected):,} keys are wrong")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keys", type=int, default=KEYS)
    parser.add_argument("--kills", type=int, default=KILLS)
    parser.add_argument("--scope", choices=["job", "task"], default="job")
    parser.add_argument("--quick", action="store_true", help="one kill with a hundredth of the keys: does it all work?")
    arguments = parser.parse_args()
    keys, kills = (arguments.keys // 100, 1) if arguments.quick else (arguments.keys, arguments.kills)
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as scratch:
        try:
            result = measure(Path(scratch, "run"), keys, kills, arguments.scope)
        except WrongResultError as e:
            sys.exit(f"after the kills the result is wrong: {e}")
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"large_state-{arguments.scope}.json").write_text(json.dumps(result, indent=1) + "\n")
    first = f"{result['median']:.2f} s ({min(result['first']):.2f} - {max(result['first']):.2f})"
    what = f"{result['state_bytes'] / 1e9:.2f} GB of state, recovery={arguments.scope!r}, {kills} kills"
    print(f"{what}: first output after {first}, of every subtask {median(result['all']):.2f} s")


if __name__ == "__main__":
    main()

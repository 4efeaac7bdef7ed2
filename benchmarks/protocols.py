"""The protocols beside each other, as the papers compare them: cost by interval and by workers, size, loops.

    python -m benchmarks.protocols [--rounds 3] [--quick] [--only interval,workers,backpressure,loop]

Every case is one job; the cases of a round run in turns in one Spark session, and a figure is a median over the rounds.
Throughput is told as its ratio to protocol ``none`` of the same round, so that a slow minute of the machine hurts all.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa

from benchmarks import report
from benchmarks.machine import busy_cpus, facts
from benchmarks.probe import SCHEMA, Probe, Rows, read_reports
from benchmarks.processes import RunError, run_json
from benchmarks.workload import verify

if TYPE_CHECKING:
    from cutwater.api.jobs.job import Job

__all__ = ["CASES", "Case", "main"]

_CHILD = "--run-case"
_TIMEOUT_S = 240.0
ROWS = 120_000_000
LOOP_ROWS = 15_000_000
HOPS = 10
"""How often a row of the cyclic job goes round."""
WATCH_S = 12.0
"""How long a job under backpressure is watched ..."""
FIRST_S = 90.0
"""... if its first snapshot has completed; else so long."""


@dataclass(frozen=True)
class Case:
    """One job of one experiment.

    Attributes:
        interval_ms: 0 with protocol ``none``.
        slow_us: microseconds that the sink's step takes for each row (experiment ``backpressure``).
        skew: share of the rows that have one and the same key.
    """

    experiment: str
    protocol: str
    interval_ms: int
    parallelism: int = 2
    slow_us: int = 0
    skew: float = 0.0

    @property
    def name(self) -> str:
        parts = [self.experiment, self.protocol]
        parts += [f"{self.interval_ms} ms"] if self.interval_ms else []
        parts += [f"x{self.parallelism}"] if self.experiment == "workers" else []
        parts += [f"{self.slow_us} us a row"] if self.slow_us else []
        parts += [f"{self.skew:.0%} one key"] if self.skew else []
        return ", ".join(parts)


_STORING = ("aligned", "unaligned", "chandy_lamport", "synchronous")
CASES: tuple[Case, ...] = (
    Case("interval", "none", 0),
    *(Case("interval", protocol, ms) for ms in (1000, 300, 100) for protocol in _STORING),
    *(case for n in (1, 2, 4, 8) for case in (Case("workers", "none", 0, n), Case("workers", "aligned", 100, n))),
    *(Case("backpressure", protocol, 200, slow_us=20) for protocol in _STORING),
    *(Case("backpressure", protocol, 200, slow_us=20, skew=0.9) for protocol in _STORING),
    *(Case("backpressure", protocol, 200, slow_us=100) for protocol in ("aligned", "unaligned")),
    Case("backpressure", "unaligned", 200, slow_us=1000),
    Case("loop", "none", 0),
    *(Case("loop", protocol, 100) for protocol in _STORING),
)


# ------------------------------------------------------------------------------------------------------------ the jobs


@dataclass
class Skewed:
    """Rows of which a share has the key 0."""

    share: float

    def __call__(self, start: int, count: int) -> pa.RecordBatch:
        rows = np.arange(start, start + count, dtype=np.int64)
        keys = np.where((rows * 2654435761 & 0xFFFF) < self.share * 0x10000, 0, rows % 1000)
        return pa.record_batch([keys, rows], schema=SCHEMA)


@dataclass
class Slow:
    """Passes batches on, after a time for each row."""

    us: int

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(batch.num_rows * self.us / 1e6)
            yield batch


def start(case: Case, folder: Path, spark: Any, share: float) -> Job:
    """The job of a case, running."""
    import cutwater as cw

    flow = cw.Dataflow("keyed_count")
    rows = int((LOOP_ROWS if case.experiment == "loop" else ROWS) * share)
    source: Any = Rows(str(folder)) if not case.slow_us else Skewed(case.skew)
    numbers = flow.read("gen", cw.generate(source, schema=SCHEMA, rows=rows, partitions=case.parallelism))
    if case.experiment == "loop":
        entered = numbers.with_columns("begin", hop=pl.lit(0))
        around = flow.loop("around", entered)
        counted = around.key_by("k").aggregate("agg", n=cw.count(), v=cw.last("v"), hop=cw.last("hop"))
        moved = counted.select("move", "v", k=(pl.col("k") * 31 + 7) % 100_000, hop=pl.col("hop") + 1)
        around.feed_back(moved.filter("again", pl.col("hop") < HOPS).select("next", "k", "v", "hop"))
        moved.filter("done", pl.col("hop") >= HOPS).write("out", Probe(str(folder), watch_after=rows))
    else:
        keyed = numbers.key_by("k").aggregate("agg", n=cw.count(), s=cw.sum("v"))
        if case.slow_us:
            keyed = keyed.map_batches("slow", Slow(case.slow_us), keyed.schema)
        unwatched = int(rows / case.parallelism * 0.9) - 2_000_000
        keyed.write("out", Probe(str(folder), watch_after=max(0, unwatched)))
    folder.mkdir(parents=True)
    settings: dict[str, Any] = {"protocol": case.protocol}
    if case.interval_ms:
        settings["interval"] = f"{case.interval_ms}ms"
    if case.protocol == "unaligned":
        settings["aligned_timeout"] = "100ms"
    return flow.start(spark, checkpoint=folder / "checkpoints", parallelism=case.parallelism, **settings)


def run_case(case: Case, folder: Path, spark: Any, share: float) -> dict[str, Any]:
    """One job from start to end (or watched for a while), with the checkpoints it took."""
    job = start(case, folder, spark, share)
    seen: dict[int, tuple[float, int]] = {}
    begun = time.monotonic()
    while job.is_active:
        elapsed_s = time.monotonic() - begun
        if case.slow_us and elapsed_s > (WATCH_S if seen else FIRST_S):
            break
        checkpoints = job.status.checkpoints
        if checkpoints.last_completed_id:
            seen[checkpoints.last_completed_id] = (checkpoints.last_duration_ms, checkpoints.last_size_bytes)
        time.sleep(0.01)
    result: dict[str, Any] = {**asdict(case), "name": case.name, "checkpoints": len(seen)}
    if seen:
        durations, sizes = zip(*seen.values(), strict=True)
        result |= {"duration_ms": float(np.median(durations)), "size": float(np.median(sizes))}
    if case.slow_us:
        job.cancel()
        return result
    job.await_termination()
    reports = read_reports(folder)
    rows = int((LOOP_ROWS if case.experiment == "loop" else ROWS) * share)
    if case.experiment == "loop":
        if reports.rows != rows:
            raise RunError(f"{case.name}: {reports.rows:,} rows came out of the loop, {rows:,} went in")
        rows *= HOPS
    elif case.parallelism == 2:
        verify(rows, reports.rows, folder)
    return {**result, "rate": rows / ((reports.last_ns - reports.first_ns) / 1e9)}


def run_cases(cases: list[Case], folder: Path, share: float) -> None:
    """In this process, in one session; prints the results."""
    from cutwater.spark.session import session

    spark = session(max(case.parallelism for case in cases))
    run_case(Case(cases[0].experiment, "none", 0), folder / "warm-up", spark, share / 10)
    results = [run_case(case, folder / str(number), spark, share) for number, case in enumerate(cases)]
    print("RESULT", json.dumps({"runs": results}), flush=True)


# ----------------------------------------------------------------------------------------------------- all in turns


def measure(cases: list[Case], rounds: int, share: float) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as scratch:
        for round in range(1, rounds + 1):
            for experiment in dict.fromkeys(case.experiment for case in cases):
                mine = [case for case in cases if case.experiment == experiment]
                folder = Path(scratch, f"{experiment}-{round}")
                arguments = json.dumps([asdict(case) for case in mine])
                command = [sys.executable, "-m", "benchmarks.protocols", _CHILD, str(folder), str(share), arguments]
                others = busy_cpus()
                for run in run_json(command, _TIMEOUT_S * len(mine))["runs"]:
                    runs.append({**run, "round": round, "others_cpus": others})
                    print(f"round {round}  {_line(run)}", flush=True)
    return runs


def _line(run: dict[str, Any]) -> str:
    rate = f"{run['rate'] / 1e6:6.1f} M rows/s" if "rate" in run else " " * 15
    snapshot = f"{run['duration_ms']:8.1f} ms, {run['size'] / 1e6:7.3f} MB" if "size" in run else ""
    return f"{run['name']:<52} {rate}  {run['checkpoints']:>3} checkpoints {snapshot}"


def main() -> None:
    if sys.argv[1:2] == [_CHILD]:
        run_cases([Case(**each) for each in json.loads(sys.argv[4])], Path(sys.argv[2]), float(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round with a tenth of the rows: does it all work?")
    parser.add_argument("--only", help="experiments, comma-separated: interval,workers,backpressure,loop")
    arguments = parser.parse_args()
    wanted: Callable[[Case], bool] = lambda case: arguments.only is None or case.experiment in arguments.only.split(",")  # noqa: E731
    cases = [case for case in CASES if wanted(case)]
    rounds, share = (1, 0.1) if arguments.quick else (arguments.rounds, 1.0)
    try:
        runs = measure(cases, rounds, share)
    except RunError as e:
        sys.exit(str(e))
    data = {"machine": facts(), "rounds": rounds, "share": share, "runs": runs}
    report.OUT.mkdir(parents=True, exist_ok=True)
    (report.OUT / "protocols.json").write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()

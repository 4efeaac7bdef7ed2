"""How long it takes to be back after a worker is killed, to start another dataflow, and to import the package.

    python -m benchmarks.recovery [--kills 10] [--quick]

A job like the keyed count at 300,000 events a second with checkpoints every second; again and again a random worker
process gets SIGKILL. Measured outside the engine: the sink of every subtask run leaves a file at its first batch, named
by ``time.monotonic_ns``. "First output" is the first batch of any subtask run that began after the kill, "every
subtask" the moment when the last subtask has given one as well; both are rows since the last checkpoint, read again.
The job then runs to its end, and its counts and sums must be those of the closed form: nothing lost, nothing doubled.

With ``recovery="task"`` it is also measured whether the survivor stands still: one worker is killed again and again,
and the sink of the other keeps the time of every batch. The figure is the longest time without one in the second after
a kill, beside that in the second before it; for the keyed count, whose survivor sends half of its rows to the dead
worker, and for the same rows without an exchange.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

import cutwater as cw
from benchmarks import report
from benchmarks.machine import busy_cpus, facts
from benchmarks.probe import SCHEMA, Probe, Rows, read_reports
from benchmarks.processes import RunError, run_json
from benchmarks.workload import PARALLELISM, WrongResultError, verify
from cutwater.api.jobs.job import Job
from cutwater.config import RecoveryName

__all__ = ["main"]

RATE = 300_000
STARTS = 5
KILLS = 10
"""Per session; a run with fewer is a short one."""
SESSIONS = {
    "ours": "session made by Cutwater",
    "task": 'session made by Cutwater, `recovery="task"`',
    "plain": "plain local[4] session",
}
FLOWS = {"shuffle": "keyed count", "chain": "no exchange"}
"""Of which survivors are watched."""
SPAN_S = 1.0
"""Before and after a kill."""
_DEADLINE_S = 60.0
_CHILD, _WATCH = "--run", "--watch"


def start(folder: Path, rows: int, spark: Any, rate: float | None, recovery: RecoveryName = "job") -> Job:
    """A job of the keyed count that is to be killed or timed."""
    folder.mkdir(parents=True)
    flow = cw.Dataflow("recovery")
    source = cw.generate(Rows(str(folder)), schema=SCHEMA, rows=rows, partitions=PARALLELISM, rate=rate)
    counted = flow.read("gen", source).key_by("k").aggregate("agg", n=cw.count(), s=cw.sum("v"))
    counted.write("out", Probe(str(folder)))
    at_once = cw.RestartConfig(strategy="fixed_delay", delay_ms=0.0, attempts=10_000)
    checkpoints = folder / "checkpoints"
    return flow.start(
        spark, checkpoint=checkpoints, parallelism=PARALLELISM, interval="1s", restart=at_once, recovery=recovery
    )


def start_watched(flow_kind: str, folder: Path, rows: int, spark: Any) -> Job:
    """A job with ``recovery="task"`` whose sinks keep the time of each batch; the last tenth of its rows is checked."""
    folder.mkdir(parents=True)
    flow = cw.Dataflow("survivors")
    source = cw.generate(Rows(str(folder)), schema=SCHEMA, rows=rows, partitions=PARALLELISM, rate=RATE)
    read = flow.read("gen", source)
    if flow_kind == "shuffle":
        made = read.key_by("k").aggregate("agg", n=cw.count(), s=cw.sum("v"))
    else:
        made = read.select("agg", "k", n=pl.col("v"), s=pl.col("v"))
    made.write("out", Probe(str(folder), times=True))
    at_once = cw.RestartConfig(strategy="fixed_delay", delay_ms=0.0, attempts=10_000)
    checkpoints = folder / "checkpoints"
    return flow.start(
        spark, checkpoint=checkpoints, parallelism=PARALLELISM, interval="1s", restart=at_once, recovery="task"
    )


def longest_gap_s(times_ns: npt.NDArray[np.int64], begin_ns: int, end_ns: int) -> float:
    """The longest time without a batch between two moments.

    >>> longest_gap_s(np.array([1, 4, 9, 11]) * 10**9, 2 * 10**9, 10 * 10**9)
    5.0
    """
    inside = times_ns[(times_ns > begin_ns) & (times_ns < end_ns)]
    return float(np.diff(np.concatenate([[begin_ns], inside, [end_ns]])).max()) / 1e9


def watch_survivor(flow_kind: str, folder: Path, kills: int) -> None:
    """Kill worker 1 again and again, and watch worker 0; prints the longest times without output."""
    dice = random.Random(flow_kind)
    spark = make_session("task")
    rows = RATE * (kills * 4 + 10)
    job = start_watched(flow_kind, folder, rows, spark)
    wait_for("the first output", job, lambda: len(first_outputs(folder)) == PARALLELISM)
    wait_for("checkpoints", job, lambda: job.status.checkpoints.completed >= 3)  # the start is over
    killed_ns = [kill_one(job, folder, dice, 1, slot=1)[2] for _ in range(kills)]
    job.await_termination()
    sunk = read_reports(folder).rows
    if flow_kind == "shuffle":
        verify(rows, sunk, folder)
    elif sunk != rows:
        raise WrongResultError(f"{sunk:,} rows came out of {rows:,}")
    (kept,) = folder.glob("times-0-*.bin")  # it was never replaced
    times_ns = np.fromfile(kept, "<i8").reshape(-1, 2)[:, 0]
    span_ns = int(SPAN_S * 1e9)
    result = {
        "kills": kills,
        "before": [longest_gap_s(times_ns, at - span_ns, at) for at in killed_ns],
        "after": [longest_gap_s(times_ns, at, at + span_ns) for at in killed_ns],
    }
    print("RESULT", json.dumps(result), flush=True)


def make_session(kind: str) -> Any:
    if kind != "plain":
        from cutwater.spark.session import session

        return session(PARALLELISM)
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false", "spark.log.level": "OFF"}
    builder: Any = SparkSession.builder
    return builder.master("local[4]").config(map=settings).getOrCreate()


def wait_for(what: str, job: Job, ready: Callable[[], bool]) -> None:
    """Poll until ``ready``.

    Raises:
        RuntimeError: the job ended first, or it took too long; holds the job's last log lines.
    """
    deadline = time.monotonic() + _DEADLINE_S
    while not ready():
        if not job.is_active or time.monotonic() > deadline:
            story = "\n".join(job.status.log[-5:])
            raise RuntimeError(f"waited for {what}; the job is {job.status.phase}: {job.exception()}\n{story}")
        time.sleep(0.005)


def first_outputs(folder: Path) -> dict[tuple[str, str], int]:
    """When each subtask run gave its first batch, by (subtask, incarnation)."""
    parts = [path.name.split("-") for path in folder.glob("output-*")]
    return {(subtask, incarnation): int(ns) for _, subtask, incarnation, ns in parts}


def kill_one(
    job: Job, folder: Path, dice: random.Random, restarted: int, slot: int | None = None
) -> tuple[float, float, int]:
    """Kill a worker, a random one if no slot is given.

    Returns seconds until the first output, and until every subtask that went back gave output; and when it was.
    """
    completed = job.status.checkpoints.completed
    wait_for("a checkpoint", job, lambda: job.status.checkpoints.completed > completed)
    time.sleep(dice.random())
    before = first_outputs(folder)
    workers = [w for w in job.status.workers if slot in (None, w.slot)]
    victim = dice.choice(workers).pid
    killed_ns = time.monotonic_ns()
    os.kill(victim, signal.SIGKILL)
    back: dict[str, int] = {}

    def all_back() -> bool:
        for run, ns in first_outputs(folder).items():
            if run not in before:
                back[run[0]] = min(ns, back.get(run[0], ns))
        return len(back) == restarted

    wait_for("output after a kill", job, all_back)
    return (min(back.values()) - killed_ns) / 1e9, (max(back.values()) - killed_ns) / 1e9, killed_ns


def time_start(folder: Path, spark: Any) -> float:
    """Seconds from ``start`` of a further dataflow in the session to its first output."""
    begun_ns = time.monotonic_ns()
    job = start(folder, 1_000_000, spark, None)
    job.await_termination()
    return (min(first_outputs(folder).values()) - begun_ns) / 1e9


def run(kind: str, folder: Path, kills: int) -> None:
    """All measurements in one session; prints the result."""
    dice = random.Random(kind)
    begun_ns = time.monotonic_ns()
    spark = make_session(kind)
    rows = RATE * (kills * 4 + 10)
    victim = folder / "killed"
    job = start(victim, rows, spark, RATE, "task" if kind == "task" else "job")
    wait_for("the first output", job, lambda: len(first_outputs(victim)) == PARALLELISM)
    cold = (min(first_outputs(victim).values()) - begun_ns) / 1e9
    restarted = 1 if kind == "task" else PARALLELISM
    recoveries = [kill_one(job, victim, dice, restarted) for _ in range(kills)]
    job.await_termination()
    sunk = read_reports(victim).rows
    verify(rows, sunk, victim)
    events = [event for event in job.status.failures if event.running_ms is not None]
    result = {
        "kills": kills,
        "first": [first for first, _, _ in recoveries],
        "all": [last for _, last, _ in recoveries],
        "noticed_to_running": [(event.running_ms or 0.0) / 1e3 - event.failed_ms / 1e3 for event in events],
        "restarts": job.status.restarts,
        "cold": cold,
        "starts": [time_start(folder / f"start-{i}", spark) for i in range(STARTS)],
    }
    print("RESULT", json.dumps(result), flush=True)


def import_seconds() -> float:
    """``import cutwater`` in a fresh interpreter."""
    program = "import time; t = time.perf_counter(); import cutwater; print(time.perf_counter() - t)"
    return float(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout)


def measure(kills: int) -> dict[str, Any]:
    """Both sessions and the imports.

    Raises:
        RunError: a measurement failed.
    """
    times: dict[str, list[float]] = {}
    runs: list[dict[str, Any]] = []
    for kind, spoken in SESSIONS.items():
        with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as scratch:
            others = busy_cpus()
            command = [sys.executable, "-m", "benchmarks.recovery", _CHILD, kind, f"{scratch}/run", str(kills)]
            run = run_json(command, 120 + kills * _DEADLINE_S)
        runs.append({"session": kind, "others_cpus": others, **run})
        times[f"SIGKILL of a worker to first output, {spoken}"] = run["first"]
        if kind == "task":  # one subtask goes back, and starts cost the same
            continue
        times[f"SIGKILL of a worker to output of every subtask, {spoken}"] = run["all"]
        times[f"`flow.start()` of a further dataflow to first output, {spoken}"] = run["starts"]
        times[f"nothing to first output (new JVM and session), {spoken}"] = [run["cold"]]
    for kind, spoken in FLOWS.items():
        with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as scratch:
            others = busy_cpus()
            command = [sys.executable, "-m", "benchmarks.recovery", _WATCH, kind, f"{scratch}/run", str(kills)]
            run = run_json(command, 120 + kills * _DEADLINE_S)
        runs.append({"session": f"survivors, {kind}", "others_cpus": others, **run})
        for when in ("before", "after"):
            name = f"longest time without output of the survivor in the second {when} a SIGKILL"
            times[f'{name}, `recovery="task"`, {spoken}'] = run[when]
    times["`import cutwater`"] = [import_seconds() for _ in range(10)]
    return {"machine": facts(), "rounds": 1, "share": min(1.0, kills / KILLS), "runs": runs, "times": times}


def main() -> None:
    if sys.argv[1:2] in ([_CHILD], [_WATCH]):
        try:
            (run if sys.argv[1] == _CHILD else watch_survivor)(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
        except WrongResultError as e:
            sys.exit(f"after the kills the result is wrong: {e}")
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=KILLS, help="per session")
    parser.add_argument("--quick", action="store_true", help="two kills per session")
    arguments = parser.parse_args()
    try:
        data = measure(2 if arguments.quick else arguments.kills)
    except RunError as e:
        sys.exit(str(e))
    report.OUT.mkdir(parents=True, exist_ok=True)
    (report.OUT / "recovery.json").write_text(json.dumps(data, indent=1) + "\n")
    print(report.recovery_table(data))


if __name__ == "__main__":
    main()

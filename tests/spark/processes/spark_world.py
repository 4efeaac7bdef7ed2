"""Jobs on Spark that are killed, and the oracle over what they wrote."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import duckdb
import polars as pl
import psutil
from pyspark import cloudpickle

import cutwater as cw
from cutwater.api.jobs.job import Job
from cutwater.chaos.storm import recovery_ms
from cutwater.connectors.base import Json, SourceContext, Split, SplitReader
from cutwater.connectors.generate import RateSource

__all__ = ["Killer", "assert_exact", "counting", "executor_of", "held", "lost_and_doubled", "release", "wait_until"]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not have this module


@dataclass(frozen=True)
class Held(RateSource):
    """Unique ids; each split's end is announced only once the file ``gate`` is there, so no kill comes too late."""

    gate: str = ""

    def open(self, split: Split, position: Json | None, ctx: SourceContext) -> SplitReader:
        return _HeldReader(super().open(split, position, ctx), self.gate)


class _HeldReader:
    def __init__(self, inner: object, gate: str) -> None:
        self._inner, self._gate = inner, gate

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    @property
    def exhausted(self) -> bool:
        return bool(self._inner.exhausted) and os.path.exists(self._gate)  # type: ignore[attr-defined]


def held(folder: Path, rows: int, *, rate: float | None = None) -> Held:
    return Held(rows=rows, rate=rate, stripe_rows=4_096, gate=str(folder / "gate"))


def release(folder: Path) -> None:
    (folder / "gate").touch()


def counting(name: str, source: object, out: Path, *, keys: int = 1_000) -> cw.Dataflow:
    """Per key ``value % keys``: running count and sum, with the id of the row that made them."""
    flow = cw.Dataflow(name)
    rows = flow.read("in", source).with_columns("key", key=pl.col("value") % keys)
    counts = rows.key_by("key").aggregate("count", n=cw.count(), total=cw.sum("value"), eid=cw.last("value"))
    counts.write("out", cw.files(str(out), roll_rows=100_000))
    return flow


def lost_and_doubled(out: Path, rows: int) -> tuple[int, int]:
    with duckdb.connect() as db:
        distinct, total = db.execute(
            f"SELECT count(DISTINCT eid), count(*) FROM '{out}/*.parquet' WHERE eid BETWEEN 0 AND {rows - 1}"
        ).fetchall()[0]
        everything = db.execute(f"SELECT count(*) FROM '{out}/*.parquet'").fetchall()[0][0]
    return rows - distinct, everything - distinct if total == everything else -1


def assert_exact(out: Path, rows: int, *, keys: int = 1_000) -> None:
    """Each id once; each key's counts are 1..n; each total is that of the rows counted so far."""
    assert lost_and_doubled(out, rows) == (0, 0), "rows (lost, doubled)"
    with duckdb.connect() as db:
        wrong = db.execute(
            f"""SELECT key, n, row_number() OVER w AS rank, total, sum(eid) OVER w AS sum FROM '{out}/*.parquet'
            WINDOW w AS (PARTITION BY key ORDER BY n ROWS UNBOUNDED PRECEDING)
            QUALIFY n <> rank OR total <> sum OR key <> eid % {keys} LIMIT 3"""
        ).fetchall()
    assert not wrong, f"running counts differ from DuckDB's (key, n, rank, total, sum): {wrong}"


def wait_until(condition: object, what: str, timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():  # type: ignore[operator]
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:.0f} s in vain for {what}")
        time.sleep(0.01)


def executor_of(pid: int) -> int:
    """The executor JVM above a worker's process."""
    for parent in psutil.Process(pid).parents():
        if any("CoarseGrainedExecutorBackend" in part for part in parent.cmdline()):
            return parent.pid
    raise AssertionError(f"process {pid} is no child of an executor")


@dataclass
class Killer:
    """SIGKILLs at random moments, one after the other; counts only those that hit a running job."""

    job: Job
    rng: random.Random
    kills: int = 0
    recoveries_ms: list[float] = field(default_factory=list)

    def kill(self, *, executor: bool = False, max_delay_s: float = 0.4) -> None:
        """Kill a worker (or the executor above it) and wait until the job runs again.

        Raises:
            AssertionError: the job ended, or does not come back.
        """
        job = self.job
        wait_until(lambda: job.status.phase == "running" or not job.is_active, "running")
        time.sleep(self.rng.uniform(0.0, max_delay_s))
        wait_until(lambda: job.status.phase == "running" or not job.is_active, "running")
        assert job.is_active, f"void: the job ended before the kill: {job.exception()}"
        before = job.status.restarts
        victim = self.rng.choice(job.status.workers).pid
        os.kill(executor_of(victim) if executor else victim, signal.SIGKILL)
        took_ms = recovery_ms(job, time.monotonic(), before, {victim})
        assert took_ms is not None, f"the job did not survive: {job.status.phase}, {job.exception()}"
        self.recoveries_ms.append(took_ms)
        self.kills += 1

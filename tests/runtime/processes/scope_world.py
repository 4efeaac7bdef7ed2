"""Dataflows whose output depends on an order, and kills, for recoveries of a part of a job (R3, R4)."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
from fake_host import FakeSpark
from runtime_world import assert_ids, gated, open_gate, query, wait_until

import cutwater as cw
from cutwater.api.jobs.job import Job
from cutwater.config import RecoveryName

__all__ = [
    "ROWS",
    "UNITS",
    "StartJob",
    "after_checkpoints",
    "assert_numbered",
    "assert_one_order",
    "end",
    "kill",
    "numbered_twice",
    "one_reader",
    "ride_out",
    "weather",
]

ROWS = 20_000
StartJob = Callable[..., Job]
UNITS = {"upstream": "subtasks", "task": "workers"}
"""What a failure says that goes back."""


def one_reader(name: str, folder: Path, rate: float | None = 40_000) -> cw.Dataflow:
    """Each counting subtask has one input: what it takes comes in one order only."""
    flow = cw.Dataflow(name)
    source = gated(folder, ROWS, partitions=1, rate=rate)
    rows = flow.read("in", source, parallelism=1).with_columns("key", key=pl.col("value") % 97, parallelism=1)
    counts = rows.key_by("key").aggregate("count", n=cw.count(), total=cw.sum("value"), eid=cw.last("value"))
    counts.write("out", cw.files(str(folder / "out"), roll_rows=1_000))
    return flow


def numbered_twice(name: str, folder: Path, rows: int, rate: float) -> cw.Dataflow:
    """Two streams meet; their rows are numbered per ``k``, dealt out in turns, and numbered once more per ``j``.

    What number a row gets depends on the order in which it comes, and where it goes next on its number.
    """
    flow = cw.Dataflow(name)
    left = flow.read("left", gated(folder, rows, rate=rate))
    right = flow.read("right", gated(folder, rows, rate=rate, start=rows))
    met = left.union("both", right).select("ids", eid=pl.col("value"), k=pl.col("value") % 11)
    first = met.key_by("k").aggregate("first", n=cw.count(), eid=cw.last("eid"))
    dealt = first.rebalance().with_columns("turn", j=pl.col("n") % 7)
    last = {"eid": cw.last("eid"), "k": cw.last("k"), "n": cw.last("n")}
    second = dealt.key_by("j").aggregate("second", m=cw.count(), **last)
    second.write("out", cw.files(str(folder / "out"), roll_rows=1_000))
    return flow


def assert_numbered(out: Path) -> None:
    """The numbers that each of two steps gave, ``n`` per ``k`` and ``m`` per ``j``, are 1..n, each once."""
    for key, number in (("k", "n"), ("j", "m")):
        sql = f"SELECT {key}, {number}, row_number() OVER (PARTITION BY {key} ORDER BY {number}) AS rank FROM {{out}} "
        assert not query(f"{sql} QUALIFY {number} <> rank LIMIT 3", out=out), f"{number} has gaps, or doubles"


def assert_one_order(out: Path, rows: int) -> None:
    """Each id is there once; the numbers that each step gave are 1..n, without gap and without a double."""
    assert_ids(out, rows)
    assert_numbered(out)
    assert not query("SELECT * FROM {out} WHERE j <> n % 7 OR k <> eid % 11 LIMIT 3", out=out)


def after_checkpoints(job: Job, more: int) -> None:
    known = job.status.checkpoints.completed

    def there() -> bool:
        return job.status.checkpoints.completed >= known + more or not job.is_active

    wait_until(there, "checkpoints", 60.0, job=job)


def end(job: Job, folder: Path) -> None:
    open_gate(folder)
    assert job.await_termination(120), f"the job has not ended: {job.status}"
    assert job.exception() is None


def kill(job: Job, slot: int) -> None:
    before = job.status.restarts
    os.kill(next(w.pid for w in job.status.workers if w.slot == slot), signal.SIGKILL)
    wait_until(lambda: job.status.restarts > before or not job.is_active, "a restart", job=job)


def storm(job: Job, spark: FakeSpark, rng: random.Random, kills: int) -> None:
    """SIGKILL workers at random moments: alone, two at once, and while others come back; never all of them."""
    for _ in range(kills):
        time.sleep(rng.uniform(0.0, 0.4))
        victims = [w.pid for w in job.status.workers if w.pid in spark.pids]
        for victim in rng.sample(victims, max(0, min(len(victims) - 1, rng.choice((1, 1, 2))))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
        if rng.random() < 0.6:
            after_checkpoints(job, 1)


def ride_out(
    start: StartJob,
    flow: cw.Dataflow,
    folder: Path,
    spark: FakeSpark,
    scope: str,
    protocol: str,
    rng: random.Random,
    kills: int = 3,
    **settings: Any,
) -> Job:
    """A job from start to end, with kills between its checkpoints."""
    job = start(
        flow,
        recovery=scope,
        parallelism=3,
        protocol=protocol,
        restart={"strategy": "fixed_delay", "attempts": 1_000},
        replay_memory_bytes=1 << 16,  # most of what is kept lies in files
        **settings,
    )
    after_checkpoints(job, 1)
    storm(job, spark, rng, kills)
    after_checkpoints(job, 1)
    end(job, folder)
    return job


def weather(
    folder: Path, start: StartJob, spark: FakeSpark, scope: RecoveryName, protocol: str, seed: int, kills: int = 4
) -> None:
    """A job that is sensitive to order, and kills; then what came out is judged."""
    folder.mkdir()
    rows = 10_000 * kills
    flow = numbered_twice(f"order{seed}", folder, rows, 12_000)
    job = ride_out(start, flow, folder, spark, scope, protocol, random.Random(seed), kills)
    assert any(f"{UNITS[scope]} go back" in f.reason for f in job.status.failures)
    assert_one_order(folder / "out", 2 * rows)

"""``recovery="task"``: only the dead worker goes back; the others keep process, state and connections."""

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
import pytest
from fake_host import FakeSpark
from faults import cut_connections
from runtime_world import assert_ids, assert_running_counts, gated, open_gate, query, wait_until

import cutwater as cw
from cutwater.errors import CutwaterError
from cutwater.runtime.job import Job

ROWS = 20_000
StartJob = Callable[..., Job]


def one_reader(name: str, folder: Path) -> cw.Dataflow:
    """Each counting subtask has one input: what it takes comes in one order only."""
    flow = cw.Dataflow(name)
    source = gated(folder, ROWS, partitions=1)
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


def assert_one_order(out: Path, rows: int) -> None:
    """Each id is there once; the numbers that each step gave are 1..n, without gap and without a double."""
    assert_ids(out, rows)
    for key, number in (("k", "n"), ("j", "m")):
        sql = f"SELECT {key}, {number}, row_number() OVER (PARTITION BY {key} ORDER BY {number}) AS rank FROM {{out}} "
        assert not query(f"{sql} QUALIFY {number} <> rank LIMIT 3", out=out), f"{number} has gaps, or doubles"
    assert not query("SELECT * FROM {out} WHERE j <> n % 7 OR k <> eid % 11 LIMIT 3", out=out)


def after_checkpoints(job: Job, more: int) -> None:
    known = job.status.checkpoints.completed

    def there() -> bool:
        return job.status.checkpoints.completed >= known + more or not job.is_active

    wait_until(there, "checkpoints", 60.0, job=job)


def end(job: Job, folder: Path) -> None:
    open_gate(folder)
    job.await_termination(60)
    assert job.exception() is None


def kill(job: Job, slot: int) -> None:
    before = job.status.restarts
    os.kill(next(w.pid for w in job.status.workers if w.slot == slot), signal.SIGKILL)
    wait_until(lambda: job.status.restarts > before or not job.is_active, "a restart", job=job)


@pytest.mark.parametrize("slot", [0, 1])
def test_r4_the_survivor_keeps_its_process_and_what_it_counted(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark, slot: int
) -> None:
    job = start(one_reader("chain", tmp_path), recovery="task", parallelism=2)
    after_checkpoints(job, 2)
    survivor = job.status.workers[1 - slot].pid
    kill(job, slot)
    after_checkpoints(job, 2)
    assert job.status.workers[1 - slot].pid == survivor
    end(job, tmp_path)
    assert ["1 of 2 workers go back" in f.reason for f in job.status.failures] == [True]
    assert_running_counts(tmp_path / "out", ROWS)


def test_r4_of_two_that_lost_each_other_one_goes_back(tmp_path: Path, start: StartJob, fake_spark: FakeSpark) -> None:
    """A connection breaks, and both its workers live."""
    cut = tmp_path / "cut"
    fake_spark.prepare = cut_connections(cut, silent=False)
    job = start(numbered_twice("cut", tmp_path, 10_000, 10_000), recovery="task", parallelism=3)
    after_checkpoints(job, 1)
    pids = {w.pid for w in job.status.workers}
    cut.touch()
    wait_until(lambda: job.status.restarts, "a restart", job=job)
    after_checkpoints(job, 2)
    assert {w.pid for w in job.status.workers} == pids
    end(job, tmp_path)
    assert ["1 of 3 workers go back" in f.reason for f in job.status.failures] == [True]
    assert_one_order(tmp_path / "out", 20_000)


def never_there(args: Any) -> None:
    """Planted: a replacement does not see the end of what it has to do once more."""
    from cutwater.runtime.attempt import Attempt

    Attempt.following = property(lambda self: True)  # type: ignore[method-assign, assignment]


def test_r4_a_replacement_that_never_catches_up_makes_everything_go_back(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark
) -> None:
    """No checkpoint can begin meanwhile, and the user can see whom they wait for."""
    fake_spark.prepare = never_there
    job = start(one_reader("late", tmp_path), recovery="task", parallelism=2, catch_up_timeout="1500ms")
    after_checkpoints(job, 2)
    kill(job, 1)
    wait_until(lambda: job.status.checkpoints.waits_for == [1], "a status that says so", job=job)
    known = job.status.checkpoints.completed
    wait_until(lambda: job.status.restarts > 1 or not job.is_active, "the end of patience", job=job)
    assert "worker 1 did not catch up with the others within 1.5 s" in job.status.failures[1].reason
    after_checkpoints(job, 2)
    assert job.status.checkpoints.completed > known
    assert job.status.checkpoints.waits_for == []
    end(job, tmp_path)
    assert job.status.restarts == 2
    assert_running_counts(tmp_path / "out", ROWS)


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


def weather(folder: Path, start: StartJob, spark: FakeSpark, protocol: str, seed: int) -> None:
    """A job that is sensitive to order, and kills; then what came out is judged."""
    folder.mkdir()
    rows = 40_000
    job = start(
        numbered_twice(f"order{seed}", folder, rows, 12_000),
        recovery="task",
        parallelism=3,
        protocol=protocol,
        restart={"strategy": "fixed_delay", "attempts": 1_000},
        replay_memory_bytes=1 << 16,  # most of what is kept lies in files
    )
    after_checkpoints(job, 1)
    storm(job, spark, random.Random(seed), 4)
    after_checkpoints(job, 1)
    end(job, folder)
    assert any("workers go back" in f.reason for f in job.status.failures)
    assert_one_order(folder / "out", 2 * rows)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 6))])
@pytest.mark.parametrize(
    "protocol",
    [
        "aligned",
        "unaligned",
        *(pytest.param(name, marks=pytest.mark.full) for name in ("chandy_lamport", "synchronous")),
    ],
)
def test_r4_what_depends_on_an_order_comes_out_in_one(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark, protocol: str, seed: int
) -> None:
    weather(tmp_path / "run", start, fake_spark, protocol, seed)


def forgetful(args: Any) -> None:
    """Planted: a replacement asks nobody for the order, and everything else is as it should be."""
    from cutwater.runtime.order_news import OrderNews

    begin = OrderNews.begin
    OrderNews.begin = lambda self, own, id: dict.fromkeys(begin(self, own, id), b"")  # type: ignore[method-assign]


@pytest.mark.full
def test_dropping_by_number_alone_is_wrong_where_the_order_matters(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark
) -> None:
    fake_spark.prepare = forgetful
    for seed in range(1, 6):
        try:
            weather(tmp_path / str(seed), start, fake_spark, "aligned", seed)
        except (AssertionError, CutwaterError):
            return
    pytest.fail("nobody noticed")

"""``recovery="upstream"`` and a loop that does not lie in all workers: as a whole it goes back, or it stays."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from fake_host import FakeSpark
from loop_world import KEYS, TURNS, assert_circulated, assert_counts, expected_visits
from runtime_world import assert_running_counts, gated, query
from scope_world import StartJob, after_checkpoints, end, kill

import cutwater as cw
from cutwater.api.streams.stream import Stream

ROWS = 6_000
LAST = 2
"""The slot in which there is no part of the loop."""


def looped(flow: cw.Dataflow, rows: Stream) -> Stream:
    """Every row goes round ``value % TURNS`` times, in two workers, and is numbered by key each time."""
    begun = rows.select(
        "start",
        row=pl.col("value"),
        left=pl.col("value") % TURNS,
        outer=pl.lit(0, pl.Int64),
        at=pl.col("value") % KEYS,
        parallelism=2,
    )
    turn = flow.loop("turn", begun, parallelism=2)
    last = {name: cw.last(name) for name in ("row", "left", "outer")}
    counted = turn.key_by("at").aggregate("round", n=cw.count(), **last, parallelism=2)
    again = counted.filter("again", pl.col("left") > 0, parallelism=2)
    less = (pl.col("left") - 1, "outer", ((pl.col("at") * 7 + 1) % KEYS).alias("at"))
    turn.feed_back(again.select("less", "row", *less, parallelism=2))
    return counted


def write_visits(counted: Stream, folder: Path) -> None:
    counted.write("visits", cw.files(str(folder / "visits"), roll_rows=1_000), parallelism=2)


def count(rows: Stream, folder: Path) -> None:
    keyed = rows.with_columns("keyed", key=pl.col("value") % 97, parallelism=1).key_by("key")
    counts = keyed.aggregate("count", n=cw.count(), total=cw.sum("value"), eid=cw.last("value"))
    counts.write("out", cw.files(str(folder / "out"), roll_rows=1_000))


def behind(flow: cw.Dataflow, folder: Path) -> None:
    """What comes out of the loop is counted by all workers."""
    counted = looped(flow, flow.read("in", gated(folder, ROWS, rate=4_000, partitions=1), parallelism=1))
    write_visits(counted, folder)
    seen = counted.key_by("row").aggregate("seen", times=cw.count(), left=cw.last("left"), outer=cw.last("outer"))
    seen.write("out", cw.files(str(folder / "out"), roll_rows=1_000))


def beside(flow: cw.Dataflow, folder: Path) -> None:
    """Two pipelines: one with the loop in two workers, the other in all of them."""
    write_visits(looped(flow, flow.read("in", gated(folder, ROWS, rate=4_000, partitions=1), parallelism=1)), folder)
    count(flow.read("other", gated(folder, ROWS, rate=4_000, partitions=1), parallelism=1), folder)


def shared(flow: cw.Dataflow, folder: Path) -> None:
    """What the loop reads is also counted by all workers: it is made again, and the loop drops it."""
    rows = flow.read("in", gated(folder, ROWS, rate=4_000, partitions=1), parallelism=1)
    write_visits(looped(flow, rows), folder)
    count(rows, folder)


def assert_right(folder: Path, build: Callable[[cw.Dataflow, Path], None]) -> None:
    assert_circulated(folder / "visits", ROWS)
    assert_counts(folder / "visits")
    if build is not behind:
        assert_running_counts(folder / "out", ROWS)
        return
    assert_circulated(folder / "out", ROWS)
    number = 'row_number() OVER (PARTITION BY "row" ORDER BY times)'
    assert not query(f"SELECT * FROM {{out}} QUALIFY times <> {number} LIMIT 3", out=folder / "out")


@pytest.mark.parametrize(
    ("build", "protocol"),
    [
        (shared, "unaligned"),
        *(
            pytest.param(build, protocol, marks=pytest.mark.full)
            for build in (behind, beside, shared)
            for protocol in ("aligned", "unaligned")
            if (build, protocol) != (shared, "unaligned")
        ),
    ],
)
def test_r3_a_loop_goes_back_as_a_whole_or_stays(
    tmp_path: Path,
    start: StartJob,
    fake_spark: FakeSpark,
    build: Callable[[cw.Dataflow, Path], None],
    protocol: str,
) -> None:
    flow = cw.Dataflow(f"loop-{build.__name__}")
    build(flow, tmp_path)
    settings: dict[str, Any] = {"recovery": "upstream", "parallelism": 3, "protocol": protocol}
    job = start(flow, restart={"strategy": "fixed_delay", "attempts": 1_000}, **settings)
    after_checkpoints(job, 1)
    pids = [w.pid for w in job.status.workers]
    for _ in range(2):
        kill(job, LAST)
        after_checkpoints(job, 1)
    assert [w.pid for w in job.status.workers][:LAST] == pids[:LAST]
    if build is behind:  # what reads the loop takes it along
        kill(job, 0)
        after_checkpoints(job, 1)
    end(job, tmp_path)
    status = job.status
    assert all("subtasks go back" in f.reason for f in status.failures), [f.reason for f in status.failures]
    assert_right(tmp_path, build)
    rounds = expected_visits(ROWS, nest=False).total()
    if build is behind:
        assert status.steps["round"].rows_in < rounds, "the loop went back, and counts from the checkpoint on"
        assert status.steps["seen"].rows_in < rounds
    else:
        assert status.steps["round"].rows_in == rounds, "the loop did not go back: each row was taken once"
        assert status.steps["count"].rows_in < ROWS

"""Only a part goes back of a job with a loop: every row goes round as often as it should, and is numbered once."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from fake_host import FakeSpark
from loop_world import assert_circulated, assert_counts, counted_loop
from order_world import Generation, Hub
from runtime_world import gated
from scope_world import ride_out

import cutwater as cw
from cutwater.api.jobs.job import Job
from cutwater.connectors.generate import RateSource
from cutwater.runtime.control import messages as c
from cutwater.runtime.control.determinant_logs import DeterminantLogs

StartJob = Callable[..., Job]
ROWS = 12_000


def circulate(folder: Path, start: StartJob, spark: FakeSpark, protocol: str, recovery: str, seed: int) -> None:
    folder.mkdir()
    source = gated(folder, ROWS, rate=5_000)
    flow = counted_loop(f"loop{seed}", source, folder / "out")
    job = ride_out(start, flow, folder, spark, recovery, protocol, random.Random(seed))
    # With "upstream" a loop that all workers have a part of goes back whole, and so does what it reads.
    assert recovery == "upstream" or any("workers go back" in failure.reason for failure in job.status.failures)
    assert_circulated(folder / "out", ROWS)
    assert_counts(folder / "out")


@pytest.mark.parametrize(
    ("protocol", "recovery", "seed"),
    [
        ("aligned", "task", 1),
        *(
            pytest.param(protocol, recovery, seed, marks=pytest.mark.full)
            for protocol in ("unaligned", "aligned", "chandy_lamport", "synchronous")
            for recovery in ("task", "upstream")
            for seed in (2, 3)
        ),
    ],
)
def test_r4_rows_go_round_a_loop_as_often_as_they_should(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark, protocol: str, recovery: str, seed: int
) -> None:
    circulate(tmp_path / "run", start, fake_spark, protocol, recovery, seed)


def timed_loop() -> cw.Dataflow:
    """Windows behind a loop: what they give out, and when, hangs on which watermarks were let pass."""
    flow = cw.Dataflow("timed")
    rows = flow.read("in", RateSource(rows=60_000, partitions=5, stripe_rows=7), event_time="timestamp")
    turn = flow.loop("turn", rows.with_columns("start", left=pl.col("value") % 3))
    moved = turn.key_by("left").aggregate("count", n=cw.count(), value=cw.last("value"))
    turn.feed_back(
        moved.filter("again", pl.col("left") > 0).select("less", "value", "timestamp", left=pl.col("left") - 1)
    )
    windows = moved.key_by("left").window("short", cw.tumbling("10ms")).aggregate("many", n=cw.count(), m=cw.last("n"))
    windows.rebalance().key_by("n").aggregate("seen", k=cw.count()).write("out", cw.discard())
    windows.late.write("late", cw.discard())
    return flow


def let_pass(run: Generation) -> None:
    """A wave, and the verdict that the loop was quiet; whether it was makes no difference to who follows."""
    wave = run.hub.next_id
    run.hub.next_id += 1
    for attempt in run.attempts:
        attempt.take(c.Trigger(run.number, wave, False, True))
    run.run_until(lambda: len(acks(run, wave)) == len(run.workers))
    for attempt in run.attempts:
        attempt.take(c.LoopVerdict(run.number, wave, sorted(run.hub.plan.loops[0]), False, 2**62))


def acks(run: Generation, wave: int) -> list[c.Ack]:
    found = [m for worker in run.workers for m in worker.messages if isinstance(m, c.Ack)]
    return [ack for ack in found if ack.checkpoint_id == wave]


def watermarks(run: Generation) -> list[int]:
    return [subtask.chain.watermark for attempt in run.attempts for subtask in attempt._subtasks]


def test_r4_a_verdict_on_a_loop_is_followed(tmp_path: Path) -> None:
    """What acknowledgements tell the coordinator is enough to come to the same rows, and the same watermarks."""
    hub = Hub(timed_loop(), tmp_path, 2, recovery="task", batch_rows=60, channel_frames=4)
    first = Generation(hub, 1)
    first.run(10)
    first.take_checkpoint()
    for _ in range(3):
        first.run(12)
        let_pass(first)
    first.run(20)
    sent, reached = {key: dict(rows) for key, rows in first.sent.items()}, watermarks(first)
    let_pass(first)  # its acknowledgements tell of all that was chosen so far, what the verdicts changed among it
    coordinator = DeterminantLogs(hub.checkpoint.checkpoint_id)
    for worker in first.workers:
        for ack in (m for m in worker.messages if isinstance(m, c.Ack)):
            coordinator.peer("worker").hear(ack.news)
    first.end()
    again = Generation(hub, 9, heard=coordinator.peer("worker").news(), batch_rows=23)
    begun = watermarks(again)
    assert again.following
    again.run_until(lambda: not again.following)
    came_again = watermarks(again)
    again.end()
    for key, rows in sent.items():
        other = again.sent[key]
        assert not [number for number in rows.keys() & other.keys() if rows[number] != other[number]][:3], key
    assert sum(len(rows.keys() & again.sent[key].keys()) for key, rows in sent.items()) > 1_000
    heads = [place for place, (before, after) in enumerate(zip(begun, reached, strict=True)) if before < after]
    assert heads, "no verdict let anything pass"
    assert all(came_again[place] >= reached[place] for place in heads)

"""Timers on real worker processes: none is lost, none fires twice, whoever is killed while they are pending."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from fake_host import FakeSpark
from runtime_world import assert_ids, gated, kill_some, open_gate, query, wait_until

import cutwater as cw

ROWS, RATE, KEYS = 12_000, 30_000, 97
BUCKET_US = 5_000
DELAY_MS = 40
END_US = 2**60


class Collects(cw.ProcessFunction):
    """The ids of a key come out by event time, bucket by bucket, and again by the clock, a while after they came."""

    buckets = cw.MapState("long", "array<long>")
    waiting = cw.MapState("long", "array<long>")

    def process(self, row: dict[str, Any], ctx: cw.ProcessContext) -> None:
        bucket = row["us"] // BUCKET_US * BUCKET_US
        self.buckets[bucket] = [*self.buckets.get(bucket, []), row["value"]]
        due_ms = ctx.processing_time_ms() + DELAY_MS
        self.waiting[due_ms] = [*self.waiting.get(due_ms, []), row["value"]]
        ctx.timers.register_event(bucket + BUCKET_US - 1)
        ctx.timers.register_event(END_US)
        ctx.timers.register_processing(due_ms)

    def on_timer(self, time: int, domain: str, ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        if domain == "processing":
            assert ctx.processing_time_ms() >= time
            self.tell(ctx, self.waiting.pop(time), "clock")
        elif time == END_US:  # what the clock did not reach
            for due_ms in list(self.waiting):
                self.tell(ctx, self.waiting.pop(due_ms), "end")
        else:
            bucket = time + 1 - BUCKET_US
            yield {"key": ctx.key, "bucket": bucket, "ids": sorted(self.buckets.pop(bucket))}

    def tell(self, ctx: cw.ProcessContext, ids: list[int], why: str) -> None:
        for id in ids:
            ctx.emit("waited", {"eid": id, "why": why})


def collecting(folder: Path) -> cw.Dataflow:
    flow = cw.Dataflow("collects")
    rows = flow.read("in", gated(folder, ROWS, rate=RATE), event_time="timestamp", out_of_order="5ms")
    keyed = rows.with_columns("key", key=pl.col("value") % KEYS, us=pl.col("timestamp").cast(pl.Int64)).key_by("key")
    made = keyed.process(
        "collect", Collects(), "key long, bucket long, ids array<long>", side={"waited": "eid long, why string"}
    )
    made.write("out", cw.files(str(folder / "out"), roll_rows=500))
    made.side("waited").write("waited", cw.files(str(folder / "waited"), roll_rows=500))
    rows.write("raw", cw.files(str(folder / "raw")))
    return flow


def assert_collected(folder: Path) -> None:
    """Each id waited once, and each bucket of each key came out once, as DuckDB has it."""
    folders = {name: folder / name for name in ("raw", "out", "waited")}
    assert_ids(folders["waited"], ROWS)
    differ = query(
        f"""WITH expected AS (
          SELECT value % {KEYS} AS key, epoch_us(timestamp) // {BUCKET_US} * {BUCKET_US} AS bucket,
            list_sort(list(value)) AS ids
          FROM {{raw}} GROUP BY ALL
        )
        (SELECT * FROM expected EXCEPT ALL SELECT key, bucket, ids FROM {{out}})
        UNION ALL (SELECT key, bucket, ids FROM {{out}} EXCEPT ALL SELECT * FROM expected)""",
        **folders,
    )
    assert not differ, f"buckets that differ from DuckDB's: {differ[:3]} of {len(differ)}"


def test_timers_pending_at_a_kill_fire_once(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    job = start(collecting(tmp_path), parallelism=3)
    kill_some(job, fake_spark, 3, seed=5)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert job.status.restarts == 3
    assert_collected(tmp_path)
    fired = query("SELECT count(*) FROM {waited} WHERE why = 'clock'", waited=tmp_path / "waited")
    assert fired[0][0] > ROWS // 2


@pytest.mark.full
def test_timers_pending_at_a_stop_go_on_at_another_parallelism(start, tmp_path: Path) -> None:
    for parallelism in (3, 1, 2):
        job = start(collecting(tmp_path), parallelism=parallelism)
        seen = job.status.checkpoints.completed
        wait_until(lambda job=job, seen=seen: job.status.checkpoints.completed > seen + 2, "some checkpoints")
        job.stop()
        assert job.await_termination(30)
    open_gate(tmp_path)
    assert start(collecting(tmp_path), parallelism=3).await_termination(60)
    assert_collected(tmp_path)


class Delays(cw.ProcessFunction):
    """Each row waits a while in the loop before it goes on."""

    held = cw.ListState("long")

    def process(self, row: dict[str, Any], ctx: cw.ProcessContext) -> None:
        self.held.append(row["left"])
        ctx.timers.register_processing(ctx.processing_time_ms() + 150)

    def on_timer(self, time: int, domain: str, ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        held = list(self.held)
        self.held.clear()
        for left in held:
            yield {"value": ctx.key, "left": left - 1}


def test_a_loop_has_not_ended_while_a_timer_is_pending_in_it(start, tmp_path: Path) -> None:
    """C6: nothing moves in the loop but the clock; all rows come out all the same."""
    flow = cw.Dataflow("delays")
    rows = flow.read("in", cw.memory([{"value": i, "left": 3} for i in range(20)], schema="value long, left long"))
    turn = flow.loop("turn", rows)
    delayed = turn.key_by("value").process("delay", Delays(), "value long, left long")
    turn.feed_back(delayed.filter("again", pl.col("left") > 0))
    delayed.write("out", cw.files(str(tmp_path / "out")))
    job = start(flow)
    assert job.await_termination(60)
    found = query('SELECT value, "left" FROM {out} ORDER BY ALL', out=tmp_path / "out")
    assert found == [(value, left) for value in range(20) for left in range(3)]


class Remembers(cw.ProcessFunction):
    """A timer far away, and what the clock says."""

    seen_ms = cw.ValueState("long")

    def process(self, row: dict[str, Any], ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        now_ms = ctx.processing_time_ms()
        ctx.timers.register_processing(now_ms + 3_600_000)
        yield {"ahead": now_ms - self.seen_ms.get(now_ms), "timers": len(ctx.timers.registered("processing"))}
        self.seen_ms.value = now_ms

    def on_timer(self, time: int, domain: str, ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        yield {"ahead": -1, "timers": 0}


def test_a_timer_that_is_not_due_at_the_end_does_not_fire_and_holds_up_nothing(start, tmp_path: Path) -> None:
    flow = cw.Dataflow("remembers")
    rows = flow.read("in", cw.memory([{"k": i % 3} for i in range(300)], schema="k long"))
    rows.key_by("k").process("remember", Remembers(), "ahead long, timers long").write(
        "out", cw.files(str(tmp_path / "out"))
    )
    job = start(flow)
    assert job.await_termination(30)
    found = query("SELECT count(*), min(ahead) >= 0, min(timers) FROM {out}", out=tmp_path / "out")
    assert found == [(300, True, 1)]

"""Async enrichment on worker processes: exactly-once through kills, at another parallelism, and in a loop."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from runtime_world import assert_ids, gated, kill_some, open_gate, query, wait_until

import cutwater as cw

ROWS = 6_000
SCHEMA = "value long, square long"


async def square(row: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(0.002 * (row["value"] % 3))
    return {"value": row["value"], "square": row["value"] ** 2}


def squares(folder: Path, fn: Any = square, **settings: Any) -> cw.Dataflow:
    flow = cw.Dataflow("squares")
    rows = flow.read("in", gated(folder, ROWS, rate=8_000))
    found = rows.map_async("square", fn, SCHEMA, **{"capacity": 64, **settings})
    found.write("out", cw.files(str(folder / "out"), roll_rows=300))
    return flow


def assert_squares(folder: Path) -> None:
    assert_ids(folder / "out", ROWS, column="value")
    assert query("SELECT count(*) FROM {out} WHERE square <> value * value", out=folder / "out") == [(0,)]


@pytest.mark.parametrize(
    ("ordered", "protocol", "batch_rows"),
    [
        pytest.param(True, "aligned", None, marks=pytest.mark.full),
        (False, "unaligned", None),
        pytest.param(True, "chandy_lamport", 8, marks=pytest.mark.full),
    ],
)
def test_results_come_out_once_after_kills(
    start, fake_spark, tmp_path: Path, ordered: bool, protocol: str, batch_rows: int | None
) -> None:
    async def squares_of(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [await square(row) for row in rows]

    fn = square if batch_rows is None else squares_of
    job = start(squares(tmp_path, fn, ordered=ordered, batch_rows=batch_rows), protocol=protocol)
    kill_some(job, fake_spark, 3, seed=int(ordered) + bool(batch_rows))
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert job.status.restarts >= 1
    assert_squares(tmp_path)


def test_rows_under_way_go_to_other_subtasks(start, tmp_path: Path) -> None:
    """All of them are under way when the job stops: no call has been answered yet."""
    answered = tmp_path / "answer"

    async def late(row: dict[str, Any]) -> dict[str, Any]:
        while not os.path.exists(answered):
            await asyncio.sleep(0.01)
        return await square(row)

    job = start(squares(tmp_path, late, timeout="2m"), parallelism=3)
    wait_until(lambda: job.status.checkpoints.completed >= 3, "checkpoints with rows under way")
    job.stop()
    assert not list((tmp_path / "out").glob("*.parquet"))
    answered.touch()
    open_gate(tmp_path)
    job = start(squares(tmp_path, late), parallelism=2)
    assert job.await_termination(60)
    assert_squares(tmp_path)


def test_windows_behind_it_see_no_late_row(start, tmp_path: Path) -> None:
    flow = cw.Dataflow("windows")
    rows = flow.read("in", cw.rate(None, rows=4_000), event_time="timestamp", out_of_order="0s")
    found = rows.map_async("id", square_at, "timestamp timestamp_ntz, value long", ordered=False, capacity=50)
    timed = found.with_columns("k", k=pl.lit(0)).key_by("k").window("w", cw.tumbling("1ms"))
    timed.aggregate("n", n=cw.count()).write("out", cw.files(str(tmp_path / "out")))
    job = start(flow)
    assert job.await_termination(60)
    assert query("SELECT sum(n)::int FROM {out}", out=tmp_path / "out") == [(4_000,)]


async def square_at(row: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(0.001 * (row["value"] % 4))
    return {"timestamp": row["timestamp"], "value": row["value"]}


def test_a_loop_with_requests_under_way_has_not_ended(start, tmp_path: Path) -> None:
    """Each row goes round as often as its number says; only the rows under way know that there is more to come."""

    async def decrement(row: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(0.02)
        return {"id": row["id"], "left": row["left"] - 1, "rounds": row["rounds"] + 1}

    flow = cw.Dataflow("rounds")
    rows = flow.read("in", cw.memory([{"id": i, "left": i % 7, "rounds": 0} for i in range(60)]))
    loop = flow.loop("loop", rows)
    done = loop.filter("done", pl.col("left") <= 0)
    again = loop.filter("again", pl.col("left") > 0)
    loop.feed_back(again.map_async("decrement", decrement, "id long, left long, rounds long", ordered=False))
    done.write("out", cw.files(str(tmp_path / "out")))
    job = start(flow)
    assert job.await_termination(60)
    found = query("SELECT id, rounds FROM {out} ORDER BY id", out=tmp_path / "out")
    assert found == [(i, i % 7) for i in range(60)]


def test_what_gets_no_answer_is_diverted(start, tmp_path: Path) -> None:
    async def sometimes(row: dict[str, Any]) -> dict[str, Any]:
        if row["value"] % 100 == 0:
            await asyncio.sleep(60)
        return {"value": row["value"], "square": row["value"] ** 2}

    flow = cw.Dataflow("diverted")
    rows = flow.read("in", cw.rate(None, rows=500))
    found = rows.map_async("square", sometimes, SCHEMA, timeout="200ms", on_timeout="dead_letter")
    found.write("out", cw.files(str(tmp_path / "out")))
    found.dead_letters.write("late", cw.files(str(tmp_path / "late")))
    job = start(flow)
    assert job.await_termination(60)
    assert query("SELECT count(*) FROM {out}", out=tmp_path / "out") == [(495,)]
    late = query("SELECT value FROM {late} ORDER BY value", late=tmp_path / "late")
    assert late == [(0,), (100,), (200,), (300,), (400,)]


def test_a_failing_call_ends_the_job_with_its_step_and_row(start, tmp_path: Path) -> None:
    async def lookup(row: dict[str, Any]) -> dict[str, Any]:
        raise LookupError("no such customer")

    flow = cw.Dataflow("failing")
    rows = flow.read("in", cw.memory([{"value": 1}], schema=pa.schema({"value": pa.int64()})))
    rows.map_async("ask", lookup, SCHEMA).write("out", cw.discard())
    job = start(flow, restart="none")
    with pytest.raises(cw.CutwaterError) as caught:
        job.await_termination(30)
    told = str(caught.value)
    for part in ("step 'ask'", "LookupError", "{value: 1}", "subtask", "row 0 since it started", "no such customer"):
        assert part in told, told

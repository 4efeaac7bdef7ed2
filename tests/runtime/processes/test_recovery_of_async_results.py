"""Answers that differ each time, and results by the clock, in jobs of which a part goes back (R3, R4)."""

from __future__ import annotations

import asyncio
import random
import secrets
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from fake_host import FakeSpark
from faults import forgetful
from runtime_world import assert_ids, gated, query
from scope_world import UNITS, StartJob, ride_out

import cutwater as cw
from cutwater.config import RecoveryName
from cutwater.errors import CutwaterError

ROWS = 8_000


async def token(row: dict[str, Any]) -> dict[str, Any]:
    """Never the same, and after a while that is never the same."""
    chance = random.random()
    if chance < 0.5:
        await asyncio.sleep(0.02 * chance)
    if chance > 0.998:
        await asyncio.sleep(60)
    return {"eid": row["eid"], "token": secrets.randbits(40)}


async def tokens(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return list(await asyncio.gather(*map(token, rows)))


def told(name: str, folder: Path, rows: int, batch_rows: int | None) -> cw.Dataflow:
    """Rows get a token.  It goes into a sink, says who counts the row for another one, and is added up by the clock."""
    flow = cw.Dataflow(name)
    read = flow.read("in", gated(folder, rows, rate=6_000)).select("ids", eid=pl.col("value"))
    given = read.map_async(
        "ask", tokens if batch_rows else token, "eid long, token long",
        ordered=False, capacity=200, timeout="200ms", on_timeout="dead_letter", batch_rows=batch_rows,
    )  # fmt: skip
    late = given.dead_letters.with_columns("late", token=pl.lit(-1, pl.Int64))
    all_rows = given.union("all", late).with_columns("key", j=pl.col("token") % 7)
    all_rows.write("out", cw.files(str(folder / "out"), roll_rows=1_000))
    keyed = all_rows.key_by("j")
    counted = keyed.aggregate("count", n=cw.count(), eid=cw.last("eid"), token=cw.last("token"))
    counted.write("counted", cw.files(str(folder / "counted"), roll_rows=1_000))
    window = keyed.window(
        "day", cw.session("1h", time="processing"), early=cw.every(processing_time="30ms"), discarding=True
    )
    sums = window.aggregate("sum", n=cw.count(), sum=cw.sum("token"))
    sums.write("sums", cw.files(str(folder / "sums"), roll_rows=1_000))
    return flow


def assert_told_once(folder: Path, rows: int) -> None:
    """All who have seen a row have seen it with one token."""
    places = {name: folder / name for name in ("out", "counted", "sums")}
    assert_ids(places["out"], rows)
    assert_ids(places["counted"], rows)
    differ = "SELECT * FROM {out} o JOIN {counted} c USING (eid) WHERE o.token <> c.token OR o.j <> c.j LIMIT 3"
    assert not query(differ, **places)
    gaps = "SELECT j, n, row_number() OVER (PARTITION BY j ORDER BY n) AS rank FROM {counted} QUALIFY n <> rank LIMIT 3"
    assert not query(gaps, **places)
    added = "SELECT j, sum(n)::bigint, sum(sum)::bigint FROM {sums} GROUP BY j ORDER BY j"
    expected = "SELECT j, count(*), sum(token)::bigint FROM {out} GROUP BY j ORDER BY j"
    assert query(added, **places) == query(expected, **places)


def weather(
    folder: Path, start: StartJob, spark: FakeSpark, scope: RecoveryName, protocol: str, seed: int, kills: int
) -> None:
    folder.mkdir()
    rows = ROWS * kills
    flow = told(f"told{seed}", folder, rows, batch_rows=5 if seed % 2 else None)
    job = ride_out(start, flow, folder, spark, scope, protocol, random.Random(seed), kills)
    assert any(f"{UNITS[scope]} go back" in f.reason for f in job.status.failures)
    assert_told_once(folder, rows)


@pytest.mark.full
@pytest.mark.parametrize(("protocol", "seed"), [("aligned", 1), ("aligned", 2), ("unaligned", 3), ("unaligned", 4)])
@pytest.mark.parametrize("scope", UNITS)
def test_whoever_saw_a_row_saw_the_same_answer(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark, scope: RecoveryName, protocol: str, seed: int
) -> None:
    weather(tmp_path / "run", start, fake_spark, scope, protocol, seed, 3)


async def add(row: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(0.01 * random.random())
    number = secrets.randbits(30)
    return {"eid": row["eid"], "left": row["left"] - 1, "given": number, "total": row["total"] + number}


def added_up(name: str, folder: Path, rows: int) -> cw.Dataflow:
    """Each round a row is given a number by somebody outside; the last round knows the sum of all."""
    flow = cw.Dataflow(name)
    read = flow.read("in", gated(folder, rows, rate=3_000)).select(
        "begin", eid=pl.col("value"), left=pl.col("value") % 4 + 1, given=pl.lit(0, pl.Int64), total=pl.lit(0, pl.Int64)
    )
    turn = flow.loop("turn", read)
    moved = turn.key_by("left").aggregate(
        "last", eid=cw.last("eid"), given=cw.last("given"), total=cw.last("total"), n=cw.count()
    )
    again = moved.filter("again", pl.col("left") > 0).select("asks", "eid", "left", "total")
    given = again.map_async("add", add, "eid long, left long, given long, total long", ordered=False, capacity=200)
    given.write("rounds", cw.files(str(folder / "rounds"), roll_rows=1_000))
    turn.feed_back(given)
    moved.filter("done", pl.col("left") == 0).write("out", cw.files(str(folder / "out"), roll_rows=1_000))
    return flow


@pytest.mark.full
@pytest.mark.parametrize("protocol", ["aligned", "unaligned"])
@pytest.mark.parametrize("scope", UNITS)
def test_answers_that_go_round_a_loop_add_up(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark, scope: RecoveryName, protocol: str
) -> None:
    rows = 6_000
    ride_out(start, added_up("sums", tmp_path, rows), tmp_path, fake_spark, scope, protocol, random.Random(protocol))
    places = {name: tmp_path / name for name in ("out", "rounds")}
    assert_ids(places["out"], rows)
    rounds = "SELECT eid, count(*) AS n, sum(given)::bigint AS sum FROM {rounds} GROUP BY eid"
    wrong = (
        f"SELECT * FROM {{out}} o JOIN ({rounds}) r USING (eid) WHERE o.total <> r.sum OR r.n <> eid % 4 + 1 LIMIT 3"
    )
    assert not query(wrong, **places)
    assert query("SELECT count(*)::int FROM {rounds}", **places) == [(sum(n % 4 + 1 for n in range(rows)),)]


@pytest.mark.full
@pytest.mark.parametrize("scope", UNITS)
def test_without_the_log_somebody_has_another_answer(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark, scope: RecoveryName
) -> None:
    """Planted: a replacement asks nobody what it was told."""
    fake_spark.prepare = forgetful
    for seed in range(1, 6):
        try:
            weather(tmp_path / str(seed), start, fake_spark, scope, "aligned", seed, 3)
        except (AssertionError, CutwaterError):
            return
    pytest.fail("nobody noticed")

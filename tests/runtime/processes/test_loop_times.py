"""Watermarks and loops (W3, C6): nothing in a loop is ever late, and the last watermark may start it again."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from fake_host import FakeSpark
from loop_world import TURNS
from runtime_world import gated, kill_some, open_gate

import cutwater as cw
from cutwater.api.streams.stream import Stream

ROWS, RATE = 12_000, 40_000
WINDOW_MS = 20
PROTOCOLS: dict[str, dict[str, Any]] = {
    "aligned": {},
    "chandy_lamport": {},
    "unaligned": {"aligned_timeout": "0ms"},
    "synchronous": {},
}


def read(flow: cw.Dataflow, tmp_path: Path) -> Stream:
    rows = flow.read("in", gated(tmp_path, ROWS, rate=RATE), event_time="timestamp", out_of_order="10ms")
    return rows.select(
        "start",
        row=pl.col("value"),
        left=pl.col("value") % TURNS,
        at=pl.col("value") % 7,
        kind=pl.lit(0, pl.Int64),
        timestamp=pl.col("timestamp"),
    )


def windows_after(tmp_path: Path) -> cw.Dataflow:
    """Each pass through the loop is counted in a window behind it."""
    flow = cw.Dataflow("after")
    turn = flow.loop("turn", read(flow, tmp_path))
    moved = turn.with_columns("move", at=(pl.col("at") + 1) % 7)
    turn.feed_back(moved.filter("again", pl.col("left") > 0).with_columns("less", left=pl.col("left") - 1).key_by("at"))
    windows = moved.key_by("at").window("short", cw.tumbling(f"{WINDOW_MS}ms")).aggregate("count", n=cw.count())
    windows.write("out", cw.files(str(tmp_path / "out"), roll_rows=100))
    windows.late.write("late", cw.files(str(tmp_path / "late")))
    return flow


def window_of(row: int) -> int:
    """Number of the window that a row's time lies in."""
    return (row * 1_000_000 // RATE) // (WINDOW_MS * 1000)


def expected_after() -> Counter[tuple[int, int]]:
    return Counter(((row % 7 + turn + 1) % 7, window_of(row)) for row in range(ROWS) for turn in range(row % TURNS + 1))


def window_inside(tmp_path: Path) -> cw.Dataflow:
    """Rows that are done go into a window in the loop, whose results go round three times more.

    A window behind the loop counts what leaves it, that of the last watermark, too.
    """
    flow = cw.Dataflow("inside")
    turn = flow.loop("turn", read(flow, tmp_path))
    moved = turn.with_columns("move", at=(pl.col("at") + 1) % 7)
    again = moved.filter("again", pl.col("left") > 0).with_columns("less", left=pl.col("left") - 1)
    turn.feed_back(again.key_by("at"))
    done = moved.filter("done", (pl.col("left") == 0) & (pl.col("kind") == 0))
    windows = done.key_by("at").window("short", cw.tumbling(f"{WINDOW_MS}ms")).aggregate("count", row=cw.count())
    results = windows.select(
        "results",
        row=pl.col("row"),
        left=pl.lit(3, pl.Int64),
        at=pl.col("at"),
        kind=pl.lit(1, pl.Int64),
        timestamp=pl.col("window_start"),
    )
    turn.feed_back(results.with_event_time("timestamp"))
    left = moved.filter("out-of-it", (pl.col("left") == 0) & (pl.col("kind") == 1))
    left.write("out", cw.files(str(tmp_path / "out"), roll_rows=100))
    windows.late.write("late", cw.files(str(tmp_path / "late")))
    behind = left.key_by("at").window("behind", cw.tumbling("10s")).aggregate("sum", n=cw.count(), rows=cw.sum("row"))
    behind.write("sums", cw.files(str(tmp_path / "sums")))
    behind.late.write("missed", cw.files(str(tmp_path / "missed")))
    return flow


def expected_inside() -> Counter[tuple[int, int]]:
    """(key, rows) of each window's result, four moves after it."""
    windows = Counter(((row % 7 + row % TURNS + 1) % 7, window_of(row)) for row in range(ROWS))
    return Counter(((at + 4) % 7, n) for (at, _), n in windows.items())


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("kills", [pytest.param(0, marks=pytest.mark.full), 2])
def test_w3_no_row_of_a_loop_is_late_behind_it(
    start, fake_spark: FakeSpark, tmp_path: Path, protocol: str, kills: int
) -> None:
    job = start(windows_after(tmp_path), protocol=protocol, **PROTOCOLS[protocol])
    kill_some(job, fake_spark, kills, seed=4)
    open_gate(tmp_path)
    assert job.await_termination(40)
    late = pl.read_parquet(f"{tmp_path}/late/*.parquet")
    assert late.is_empty(), late
    frame = pl.read_parquet(f"{tmp_path}/out/*.parquet")
    number = (pl.col("window_start").dt.epoch("us") - 1_577_836_800_000_000) // (WINDOW_MS * 1000)
    found = {(at, window): n for at, window, n in frame.select("at", number, "n").iter_rows()}
    assert len(found) == len(frame), "a window came out twice"
    assert found == expected_after()


@pytest.mark.parametrize("protocol", ["none", *PROTOCOLS])
@pytest.mark.parametrize("kills", [pytest.param(0, marks=pytest.mark.full), 2])
def test_c6_the_last_watermark_starts_the_loop_again_before_it_ends(
    start, fake_spark: FakeSpark, tmp_path: Path, protocol: str, kills: int
) -> None:
    job = start(window_inside(tmp_path), protocol=protocol, **PROTOCOLS.get(protocol, {}))
    kill_some(job, fake_spark, kills, seed=5)
    open_gate(tmp_path)
    assert job.await_termination(40)
    late = pl.read_parquet(f"{tmp_path}/late/*.parquet")
    assert late.is_empty(), late
    frame = pl.read_parquet(f"{tmp_path}/out/*.parquet")
    assert Counter(frame.select("at", "row").iter_rows()) == expected_inside()
    missed = pl.read_parquet(f"{tmp_path}/missed/*.parquet")
    assert missed.is_empty(), f"W5: late behind the loop: {missed}"
    sums = pl.read_parquet(f"{tmp_path}/sums/*.parquet")
    behind = Counter[int]()
    for (at, rows), results in expected_inside().items():
        behind[at] += rows * results
    assert dict(sums.select("at", "rows").iter_rows()) == behind


def clock_inside(tmp_path: Path) -> cw.Dataflow:
    """Rows wait in a window by the clock on each way round, and go on together."""
    flow = cw.Dataflow("clocked")
    rows = flow.read("in", gated(tmp_path, ROWS, rate=RATE))
    value = pl.col("value")
    turn = flow.loop("turn", rows.select("start", n=pl.lit(1, pl.Int64), left=value % TURNS, at=value % 7))
    turn.filter("done", pl.col("left") == 0).write("out", cw.files(str(tmp_path / "out"), roll_rows=100))
    again = turn.filter("again", pl.col("left") > 0).key_by("at", "left")
    windows = again.window("short", cw.tumbling(f"{WINDOW_MS}ms", time="processing")).aggregate("sum", n=cw.sum("n"))
    turn.feed_back(windows.select("less", "n", left=pl.col("left") - 1, at=pl.col("at")))
    return flow


@pytest.mark.parametrize(("protocol", "kills"), [("none", 0), ("aligned", 2), ("unaligned", 2)])
def test_c6_a_loop_ends_once_the_clock_has_let_all_its_windows_out(
    start, fake_spark: FakeSpark, tmp_path: Path, protocol: str, kills: int
) -> None:
    job = start(clock_inside(tmp_path), protocol=protocol, **PROTOCOLS.get(protocol, {}))
    kill_some(job, fake_spark, kills, seed=6)
    open_gate(tmp_path)
    assert job.await_termination(40)
    frame = pl.read_parquet(f"{tmp_path}/out/*.parquet")
    found = dict(frame.group_by("at").agg(pl.sum("n")).iter_rows())
    assert found == Counter(row % 7 for row in range(ROWS))

"""Dataflows with loops, and how often each row must go round: counted without the engine."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import polars as pl

import cutwater as cw

__all__ = ["assert_circulated", "circulating", "counted_loop", "expected_visits", "nested", "visits"]

TURNS = 5
KEYS = 13


def circulating(name: str, source: object, out: Path) -> cw.Dataflow:
    """Every row goes round ``value % TURNS`` times, each time to another subtask: a step that feeds itself by key."""
    flow = cw.Dataflow(name)
    rows = flow.read("in", source).select(
        "start", row=pl.col("value"), left=pl.col("value") % TURNS, outer=pl.lit(0, pl.Int64), at=pl.col("value") % KEYS
    )
    turn = flow.loop("turn", rows)
    moved = turn.with_columns("move", at=(pl.col("at") * 7 + 1) % KEYS)
    again = moved.filter("again", pl.col("left") > 0).with_columns("less", left=pl.col("left") - 1)
    turn.feed_back(again.key_by("at"))
    moved.write("out", cw.files(str(out), roll_rows=1_000))
    return flow


def counted_loop(name: str, source: object, out: Path) -> cw.Dataflow:
    """The same, through a shuffle to a keyed count in the loop, which numbers the visits of each key."""
    flow = cw.Dataflow(name)
    rows = flow.read("in", source).select(
        "start", row=pl.col("value"), left=pl.col("value") % TURNS, outer=pl.lit(0, pl.Int64), at=pl.col("value") % KEYS
    )
    turn = flow.loop("turn", rows)
    counted = turn.key_by("at").aggregate(
        "count", n=cw.count(), row=cw.last("row"), left=cw.last("left"), outer=cw.last("outer")
    )
    again = counted.filter("again", pl.col("left") > 0).select(
        "less", row=pl.col("row"), left=pl.col("left") - 1, outer=pl.col("outer"), at=(pl.col("at") * 7 + 1) % KEYS
    )
    turn.feed_back(again)
    counted.write("out", cw.files(str(out), roll_rows=1_000))
    return flow


def nested(name: str, source: object, out: Path) -> cw.Dataflow:
    """A loop in a loop, both through shuffles: ``outer`` rounds of ``left`` rounds each, as expected_visits counts."""
    flow = cw.Dataflow(name)
    rows = flow.read("in", source).select(
        "start",
        row=pl.col("value"),
        left=pl.col("value") % TURNS,
        outer=pl.col("value") % 3,
        at=pl.col("value") % KEYS,
    )
    wide = flow.loop("wide", rows)
    near = flow.loop("near", wide.key_by("at"))
    moved = near.with_columns("move", at=(pl.col("at") * 7 + 1) % KEYS)
    near.feed_back(moved.filter("again", pl.col("left") > 0).with_columns("less", left=pl.col("left") - 1).key_by("at"))
    through = moved.filter("through", (pl.col("left") == 0) & (pl.col("outer") > 0))
    wide.feed_back(through.with_columns("next", outer=pl.col("outer") - 1, left=pl.col("row") % TURNS))
    moved.write("out", cw.files(str(out), roll_rows=1_000))
    return flow


def expected_visits(rows: int, *, nest: bool) -> Counter[tuple[int, int, int]]:
    """(row, left, outer) of every row that comes out, in plain Python."""
    return Counter(
        (id, left, outer)
        for id in range(rows)
        for outer in range(id % 3 if nest else 0, -1, -1)
        for left in range(id % TURNS, -1, -1)
    )


def visits(out: Path) -> Counter[tuple[int, int, int]]:
    """The same of what was written."""
    frame = pl.read_parquet(f"{out}/*.parquet").select("row", "left", "outer")
    return Counter(frame.iter_rows())


def assert_circulated(out: Path, rows: int, *, nest: bool = False, exactly: bool = True) -> None:
    """Every row went round as often as it should: none lost, none doubled (only where ``exactly``)."""
    wanted, found = expected_visits(rows, nest=nest), visits(out)
    lost, doubled = wanted - found, found - wanted
    assert not lost, f"{lost.total()} lost, such as {list(lost)[:3]}"
    assert found.keys() == wanted.keys()
    assert not (exactly and doubled), f"{doubled.total()} too many, such as {list(doubled)[:3]}"


def assert_counts(out: Path) -> None:
    """Each key's visits are numbered 1..n without gap or repetition."""
    frame = pl.read_parquet(f"{out}/*.parquet").group_by("at").agg(pl.col("n").sort())
    for at, numbers in frame.iter_rows():
        assert numbers == list(range(1, len(numbers) + 1)), f"key {at}"

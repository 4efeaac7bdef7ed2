"""One dataflow with every kind of step that waits for event time, and what DuckDB says must come out of each.

A rebalanced step stands before them all, whose first subtask is quick and whose others are slow: what went through it
first is far ahead of the rest.  One split waits for a gate while the others end, so that one reader is left alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
from runtime_world import Gated, gated

import cutwater as cw
from cutwater.api.streams.stream import Stream
from cutwater.connectors.base import Json, SourceContext, Split, SplitReader
from cutwater.connectors.generate import RateSource

__all__ = ["KINDS", "ROWS", "found", "timed", "wanted"]

ROWS, RATE, KEYS = 2_400, 2_000, 23
FIRST_US = 1_577_836_800_000_000


@dataclass(frozen=True)
class OneHeld(Gated):
    """Only the first split waits for the gate."""

    def open(self, split: Split, position: Json | None, ctx: SourceContext) -> SplitReader:
        return super().open(split, position, ctx) if split.data == 0 else RateSource.open(self, split, position, ctx)


class Uneven(cw.ProcessFunction):
    """Passes rows on, slowly in all subtasks but the first."""

    def process(self, row: dict[str, Any], ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        if ctx.subtask:
            time.sleep(0.0005)
        yield row


class Counted(cw.ProcessFunction):
    """At every tenth of a second in which a key has rows: how many it had by then."""

    times = cw.ListState("long")

    def process(self, row: dict[str, Any], ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        at = round(row["timestamp"].timestamp() * 1_000_000)
        self.times.append(at)
        ctx.timers.register_event(-(-at // 100_000) * 100_000)
        return iter(())

    def on_timer(self, time: int, domain: str, ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        yield {"k": ctx.key, "due": time, "n": sum(t <= time for t in self.times)}


def timed(folder: Path, out_of_order: str) -> cw.Dataflow:
    """The dataflow; its results lie in folders named as in ``KINDS``, late rows of all steps in ``late``."""
    plain = gated(folder, ROWS, rate=RATE)
    source = OneHeld(**{f.name: getattr(plain, f.name) for f in fields(plain)} | {"hold": ROWS // 2 // 64 * 64})
    flow = cw.Dataflow("timed")
    read = flow.read("in", source, event_time="timestamp", out_of_order=out_of_order)
    keyed = read.with_columns("key", k=pl.col("value") * pl.col("value") % KEYS)
    rows = keyed.rebalance().process("uneven", Uneven(), keyed.schema)
    by_key, by_value = rows.key_by("k"), rows.key_by("value")
    odd, even = pl.col("value") % 2 == 1, pl.col("value") % 2 == 0
    left, right = rows.filter("left", odd).key_by("k"), rows.filter("right", even).key_by("k")
    near = left.join("near", right, within=("-10ms", "10ms"))
    together = left.join("together", right, window=cw.tumbling("50ms"), how="left")
    version = left.join_as_of("version", right, how="left")
    made = {
        "tumbling": by_key.window("t", cw.tumbling("100ms")).aggregate("tumbling", n=cw.count()),
        "sliding": by_key.window("s", cw.sliding("60ms", every="20ms")).aggregate("sliding", n=cw.count()),
        "session": by_key.window("g", cw.session("3ms")).aggregate("session", n=cw.count()),
        "hundreds": by_key.window("a", cw.global_window(), early=cw.every(rows=100), discarding=True).aggregate(
            "hundreds", n=cw.count()
        ),
        "best": by_key.window("b", cw.tumbling("100ms")).top("best", 2, by="value", rank="place"),
        "timers": by_key.process("timers", Counted(), "k long, due long, n long"),
        "near": near,
        "together": together,
        "version": version,
        "once": by_value.deduplicate("once", within="1s"),
    }
    for kind, stream in made.items():
        stream.write(f"{kind}-out", cw.files(str(folder / kind)))
    late = [made[kind].late for kind in ("tumbling", "sliding", "session", "best", "once")]
    late += [side for joined in (near, together, version) for side in (joined.late_left, joined.late_right)]
    told = [_told(number, stream) for number, stream in enumerate(late)]
    told[0].union("all-late", *told[1:]).write("late-out", cw.files(str(folder / "late")))
    return flow


def _told(number: int, late: Stream) -> Stream:
    return late.select(f"late-{number}", "value")


_ROWS = f"""rows AS (SELECT range AS value, range * range % {KEYS} AS k,
    {FIRST_US} + range * {1_000_000 // RATE} AS ts FROM range({ROWS}))"""
_SIDES = "l AS (SELECT * FROM rows WHERE value % 2 = 1), r AS (SELECT * FROM rows WHERE value % 2 = 0)"
KINDS = {
    "tumbling": ("k, epoch_us(window_start), n", """SELECT k, ts // 100000 * 100000 AS s, count(*) FROM rows
        GROUP BY k, s"""),
    "sliding": ("k, epoch_us(window_start), n", """SELECT k, (ts // 20000 - back) * 20000 AS s, count(*)
        FROM rows, range(3) AS b(back) GROUP BY k, s"""),
    "session": ("k, epoch_us(window_start), n", """SELECT k, min(ts), count(*) FROM (SELECT k, ts, sum(fresh::INT)
        OVER (PARTITION BY k ORDER BY ts) AS s FROM (SELECT k, ts,
        coalesce(ts - lag(ts) OVER (PARTITION BY k ORDER BY ts) > 3000, true) AS fresh FROM rows)) GROUP BY k, s"""),
    "hundreds": ("k, sum(n), count(*) GROUP BY k", "SELECT k, count(*), ceil(count(*) / 100) FROM rows GROUP BY k"),
    "best": ("k, epoch_us(window_start), value, place", """SELECT k, ts // 100000 * 100000 AS s, value, row_number()
        OVER (PARTITION BY k, s ORDER BY value DESC) AS place FROM rows QUALIFY place <= 2"""),
    "timers": ("k, due, n", """SELECT DISTINCT o.k, ceil(o.ts / 100000)::BIGINT * 100000 AS time,
        (SELECT count(*) FROM rows i WHERE i.k = o.k AND i.ts <= ceil(o.ts / 100000)::BIGINT * 100000) FROM rows o"""),
    "near": ("value, value_right", "SELECT l.value, r.value FROM l JOIN r ON l.k = r.k AND abs(l.ts - r.ts) <= 10000"),
    "together": ("value, value_right", """SELECT l.value, r.value FROM l LEFT JOIN r
        ON l.k = r.k AND l.ts // 50000 = r.ts // 50000"""),
    "version": ("value, value_right", "SELECT l.value, r.value FROM l ASOF LEFT JOIN r ON l.k = r.k AND l.ts >= r.ts"),
    "once": ("value", "SELECT value FROM rows"),
    "late": ("value", "SELECT value FROM rows WHERE false"),
}  # fmt: skip
"""By kind of step: the columns that its rows are compared by, and the same by DuckDB."""


def wanted(kind: str) -> list[tuple[Any, ...]]:
    """What must come out of a kind of step, whatever the job went through."""
    return duckdb.sql(f"WITH {_ROWS}, {_SIDES} SELECT * FROM ({KINDS[kind][1]}) ORDER BY ALL").fetchall()


def found(folder: Path, kind: str) -> list[tuple[Any, ...]]:
    """What came out of it."""
    columns, _, grouping = KINDS[kind][0].partition(" GROUP BY ")
    ending = f" GROUP BY {grouping}" if grouping else ""
    return duckdb.sql(
        f"SELECT * FROM (SELECT {columns} FROM read_parquet('{folder}/{kind}/*.parquet'){ending}) ORDER BY ALL"
    ).fetchall()

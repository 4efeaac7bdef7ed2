"""Process functions without key, over two streams and with broadcast rows, on real worker processes that are killed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
from fake_host import FakeSpark
from runtime_world import assert_ids, gated, kill_some, open_gate, query

import cutwater as cw

ROWS, RATE = 12_000, 30_000
RULES = 40


class Numbers(cw.BroadcastProcessFunction):
    """Numbers the rows of its subtask, and says how many rules it has."""

    counted = cw.OperatorListState("long")
    rules = cw.BroadcastState("long", "long")

    def process(self, row: dict[str, Any], ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        n = sum(self.counted) + 1
        self.counted.set([n])
        yield {"eid": row["value"], "subtask": ctx.subtask, "n": n, "rules": len(self.rules)}

    def process_broadcast(self, row: dict[str, Any], ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        assert row["value"] not in self.rules, "a rule came twice to one subtask"
        self.rules[row["value"]] = ctx.subtask
        yield {"eid": -1 - row["value"], "subtask": ctx.subtask, "n": 0, "rules": len(self.rules)}


def test_state_without_key_and_broadcast_rows_survive_kills(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    flow = cw.Dataflow("numbers")
    rows = flow.read("in", gated(tmp_path, ROWS, rate=RATE))
    rules = flow.read("rules", cw.rate(RULES * 2, rows=RULES), parallelism=1)
    made = rows.connect(rules.broadcast()).process("number", Numbers(), "eid long, subtask int, n long, rules long")
    rules_told = made.filter("told", pl.col("eid") < 0)
    made.filter("main", pl.col("eid") >= 0).write("out", cw.files(str(tmp_path / "out"), roll_rows=500))
    rules_told.write("rules-out", cw.files(str(tmp_path / "rules")))
    job = start(flow, parallelism=3)
    kill_some(job, fake_spark, 3, seed=11)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert job.status.restarts == 3
    assert_ids(tmp_path / "out", ROWS)
    wrong = query(
        """SELECT subtask, n, row_number() OVER (PARTITION BY subtask ORDER BY n) AS rank FROM {out}
        QUALIFY n <> rank LIMIT 3""",
        out=tmp_path / "out",
    )
    assert not wrong, f"numbers of a subtask with gaps or doubles (subtask, n, rank): {wrong}"
    copies = query("SELECT subtask, count(*), max(rules) FROM {rules} GROUP BY 1 ORDER BY 1", rules=tmp_path / "rules")
    assert copies == [(subtask, RULES, RULES) for subtask in range(3)]


class Pairs(cw.CoProcessFunction):
    """Each id comes once from each side; whoever is second makes the pair."""

    first = cw.ValueState("string")

    def process_left(self, row: dict[str, Any], ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        yield from self.meet(ctx, "left")

    def process_right(self, row: dict[str, Any], ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        yield from self.meet(ctx, "right")

    def meet(self, ctx: cw.ProcessContext, side: str) -> Iterator[dict[str, Any]]:
        if self.first.value is None:
            self.first.value = side
        else:
            assert self.first.value != side
            self.first.clear()
            yield {"eid": ctx.key}


def test_two_streams_meet_exactly_once_under_kills(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    flow = cw.Dataflow("pairs")
    left = flow.read("left", gated(tmp_path, ROWS, rate=RATE)).key_by("value")
    right = flow.read("right", gated(tmp_path, ROWS, rate=RATE // 2)).rename("names", value="id").key_by("id")
    pairs = left.connect(right).process("pair", Pairs(), "eid long")
    pairs.write("out", cw.files(str(tmp_path / "out"), roll_rows=500))
    job = start(flow, parallelism=2, protocol="unaligned", aligned_timeout="0ms")
    kill_some(job, fake_spark, 2, seed=3)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert_ids(tmp_path / "out", ROWS)

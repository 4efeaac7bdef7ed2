"""Answers of somebody outside are choices: who goes back gives out those of then, and asks nobody for them (R0)."""

from __future__ import annotations

import asyncio
import random
import secrets
import threading
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from order_world import Generation, Hub, Numbered, differences

import cutwater as cw
from cutwater.connectors.generate import RateSource

ROWS = 60_000
TOKENS = "eid long, k long, token long"


class Exchange:
    """Gives a token to each row, never the same, after a while or never; notes who asked."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    async def fn(self, row: dict[str, Any]) -> dict[str, Any] | None:
        self.asked.append(row["eid"])
        chance = random.random()
        if chance < 0.3:
            await asyncio.sleep(0.004 * chance)
        if chance > 0.995:
            await asyncio.sleep(60)
        return None if chance < 0.05 else {"eid": row["eid"], "k": row["k"], "token": secrets.randbits(62)}

    async def several(self, rows: list[dict[str, Any]]) -> list[dict[str, Any] | None]:
        return [await self.fn(row) for row in rows]


def asking(exchange: Exchange) -> cw.Dataflow:
    """Rows get a token as they are read, and another one where two streams meet; what it is decides where they go."""
    flow = cw.Dataflow("asking")
    ask = {"timeout": "30ms", "on_timeout": "dead_letter"}
    left, right = (
        flow.read(name, RateSource(rows=ROWS, partitions=3, stripe_rows=7, start=start)).select(
            f"{name}-rows", eid=pl.col("value"), k=pl.col("value") % 11
        )
        for name, start in (("left", 0), ("right", 1_000_000))
    )
    first = left.map_async("first", exchange.fn, TOKENS, ordered=False, capacity=40, **ask)
    met = first.union("both", right.with_columns("none", token=pl.lit(0, pl.Int64)))
    counted = met.key_by("k").process("count", Numbered(), "k long, n long").with_columns("narrow", eid=pl.col("n"))
    second = counted.map_async("second", exchange.several, TOKENS, batch_rows=5, capacity=30, **ask)
    dealt = second.rebalance().with_columns("turn", j=pl.col("token") % 7)
    dealt.key_by("j").process("again", Numbered(), "k long, n long").write("out", cw.discard())
    for number, late in enumerate((first.dead_letters, second.dead_letters)):
        late.key_by("k").process(f"late-{number}", Numbered(), "k long, n long").write(f"out-{number}", cw.discard())
    return flow


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_r0_what_was_answered_comes_again_and_nobody_is_asked_for_it(tmp_path: Path, seed: int) -> None:
    exchange = Exchange()
    hub = Hub(asking(exchange), tmp_path, 3, recovery="task", batch_rows=60, channel_frames=4)
    first = Generation(hub, seed)
    try:
        run(first, 200)
        first.take_checkpoint()
        run(first, 200)
        first.take_checkpoint(complete=False)
        run(first, 300)
        known = first.known_to(2)
    finally:
        first.end()
    asked = set(exchange.asked)
    again = Generation(hub, seed + 100, heard=known, batch_rows=23, channel_frames=2)
    try:
        assert again.following
        again.run_until(lambda: not again.following)
        run(again, 200)
    finally:
        again.end()
    came = [key for key, rows in first.arrived.items() if key.target == 2 and rows.keys() & again.sent[key].keys()]
    assert len(came) >= 8, "too little came again to judge by"
    assert asked
    assert not differences(first.arrived, again.sent, lambda key: key.target == 2)[:3]
    assert not differences(first.sent, again.sent, lambda key: key.source == 2)[:3]


def run(generation: Generation, rows: int) -> None:
    """Until so many more rows have left."""

    def left() -> int:
        return sum(map(len, generation.sent.values()))

    enough = left() + rows
    generation.run_until(lambda: left() >= enough)


def test_no_thread_is_left() -> None:
    assert not [t for t in threading.enumerate() if t.name.startswith("cutwater-async")]

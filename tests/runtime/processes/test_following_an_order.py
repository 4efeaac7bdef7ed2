"""A subtask that goes back follows its determinant log: the same rows under the same numbers, whatever came
meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from order_world import Generation, Hub, Numbered, differences

import cutwater as cw
from cutwater.connectors.generate import RateSource

ROWS = 60_000


class Numbers(cw.ProcessFunction):
    """Numbers the rows of a key in the order in which they come, and says now and then what the clock shows."""

    seen = cw.ValueState("long")

    def process(self, row: dict[str, Any], ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        self.seen.value = (self.seen.value or 0) + 1
        clock = 0
        if self.seen.value % 5 == 0:
            clock = ctx.processing_time_ms()
            ctx.timers.register_processing(clock + 1)
        yield {"eid": row["eid"], "n": self.seen.value, "clock": clock}

    def on_timer(self, time: int, domain: Any, ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        yield {"eid": -ctx.key - 1, "n": self.seen.value, "clock": ctx.processing_time_ms()}


def ordered() -> cw.Dataflow:
    """Two streams meet, are numbered by key, dealt out in turns, numbered once more by another key, and windowed."""
    flow = cw.Dataflow("ordered")
    sides = [
        flow.read(name, RateSource(rows=ROWS, partitions=5, stripe_rows=7, start=start), event_time="timestamp")
        for name, start in (("left", 0), ("right", 1_000_000))
    ]
    rows = sides[0].union("both", sides[1]).with_columns("narrow", eid=pl.col("value"), k=pl.col("value") % 11)
    made = "eid long, n long, clock long"
    first = rows.key_by("k").process("first", Numbers(), made)
    turns = first.rebalance().with_columns("turn", j=pl.col("n") % 7)
    second = turns.key_by("j").process("second", Numbers(), made)
    second.with_columns("again", i=pl.col("eid") % 3).key_by("i").process("third", Numbers(), made).write(
        "out", cw.discard()
    )
    counts = (
        rows.key_by("k").window("windows", cw.tumbling("100ms")).aggregate("count", n=cw.count(), last=cw.last("eid"))
    )
    counts.key_by("n").process("fourth", Numbered(), "k long, n long").write("out2", cw.discard())
    early = rows.key_by("k").window("early", cw.session("1h"), early=cw.every(processing_time="2ms"))
    soon = early.aggregate("soon", n=cw.count(), last=cw.last("eid"))
    soon.key_by("n").process("fifth", Numbered(), "k long, n long").write("out3", cw.discard())
    return flow


def survivor(hub: Hub, seed: int) -> Generation:
    """A run over a checkpoint that completes and one that does not."""
    first = Generation(hub, seed)
    first.run(12)
    first.take_checkpoint()
    first.run(9)
    first.take_checkpoint(complete=False)
    first.run(15)
    return first


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)])
def test_r0_rows_come_again_as_they_were(tmp_path: Path, seed: int) -> None:
    """All go back, and follow what slot 2 knows: that is all of its own, and of others what it has rows of."""
    hub = Hub(ordered(), tmp_path, 3, recovery="task", batch_rows=60, channel_frames=4)
    first = survivor(hub, seed)
    known = first.known_to(2)
    first.end()
    again = Generation(hub, seed + 100, heard=known, batch_rows=23, channel_frames=2)
    assert again.following
    again.run_until(lambda: not again.following)
    again.run(10)
    again.end()
    taken = [key for key, rows in first.arrived.items() if key.target == 2 and rows.keys() & again.sent[key].keys()]
    assert len(taken) >= 12, "too little came again to judge by"
    assert not differences(first.arrived, again.sent, lambda key: key.target == 2)[:3]
    assert not differences(first.sent, again.sent, lambda key: key.source == 2)[:3]


@pytest.mark.full
def test_without_the_log_other_rows_come_under_these_numbers(tmp_path: Path) -> None:
    """Or the test above could not fail."""
    hub = Hub(ordered(), tmp_path, 3, recovery="task", batch_rows=60, channel_frames=4)
    first = survivor(hub, 0)
    first.end()
    again = Generation(hub, 100, batch_rows=23, channel_frames=2)
    assert not again.following
    again.run(40)
    again.end()
    assert differences(first.arrived, again.sent, lambda key: key.target == 2)


@pytest.mark.full
def test_a_subtask_that_followed_can_be_followed(tmp_path: Path) -> None:
    """The second time it goes back to a checkpoint that was taken after it had become free."""
    hub = Hub(ordered(), tmp_path, 2, recovery="task", batch_rows=60)
    first = survivor(hub, 3)
    known = first.known_to(1)
    first.end()
    second = Generation(hub, 4, heard=known, batch_rows=30)
    second.run_until(lambda: not second.following)
    second.run(10)
    known = second.known_to(0)
    second.end()
    third = Generation(hub, 5, heard=known, batch_rows=40)  # goes back to where the second one did
    third.run_until(lambda: not third.following)
    third.take_checkpoint()
    third.run(12)
    known = third.known_to(0)
    third.end()
    fourth = Generation(hub, 6, heard=known, batch_rows=25)
    fourth.run_until(lambda: not fourth.following)
    fourth.end()
    for before, after in ((first, second), (second, third), (third, fourth)):
        slot = 1 if before is first else 0
        assert not differences(before.arrived, after.sent, lambda key, slot=slot: key.target == slot)[:3]
        assert not differences(before.sent, after.sent, lambda key, slot=slot: key.source == slot)[:3]

"""A call that is made once more after a restore gives out the same rows in the same order (R0).

Whoever reads them drops by number what it has, so that the order in which they come out is part of what must be the
same; so is where a batch ends, because turns are taken by batches.  The oracle is the operator itself, had it not gone
back.
"""

from __future__ import annotations

import datetime as dt
import random
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from subtask_context import Subtask

import cutwater as cw
from cutwater.connectors.generate import RateSource
from cutwater.dataflow.plan import make_plan

SCHEMA = pa.schema([("k", pa.string()), ("n", pa.int64()), ("time", pa.timestamp("us"))])
MS = 1_000


class Alarms(cw.ProcessFunction):
    """Many timers of many keys at the same instant."""

    seen = cw.ValueState("long")
    recent = cw.ListState("long")

    def process(self, row: dict[str, Any], ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        self.seen.value = (self.seen.value or 0) + 1
        self.recent.append(row["n"])
        ctx.timers.register_event(ctx.watermark + 5 * MS if ctx.watermark > 0 else 5 * MS)
        ctx.timers.register_processing(ctx.processing_time_ms() + 3)
        yield {"k": ctx.key, "n": self.seen.value}

    def on_timer(self, time: int, domain: Any, ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        yield {"k": ctx.key, "n": sum(self.recent)}


Steps = Callable[[Any], Any]
STEPS: dict[str, Steps] = {
    "aggregate": lambda keyed: keyed.aggregate("step", n=cw.count(), total=cw.sum("n"), last=cw.last("n")),
    "deduplicate": lambda keyed: keyed.deduplicate("step"),
    "top": lambda keyed: keyed.top("step", 3, by="n"),
    "tumbling": lambda keyed: keyed.window("w", cw.tumbling("10ms")).aggregate("step", n=cw.count(), last=cw.last("n")),
    "sliding": lambda keyed: keyed.window("w", cw.sliding("20ms", every="5ms")).aggregate("step", n=cw.sum("n")),
    "sessions": lambda keyed: keyed.window("w", cw.session("3ms")).aggregate(
        "step", n=cw.sum("n"), first=cw.first("n")
    ),
    "timers": lambda keyed: keyed.process("step", Alarms(), "k string, n long"),
}


def spec_of(make: Steps) -> Any:
    flow = cw.Dataflow("one")
    source = RateSource(fn=lambda numbers: {}, schema=SCHEMA, rows=1)
    make(flow.read("in", source, event_time="time").key_by("k")).write("out", cw.discard())
    return make_plan(flow, 1, 16).steps["step"].spec


class Calls:
    """What a subtask would ask of its operator: rows, watermarks and slices of timers, as chance will have it."""

    def __init__(self, seed: int) -> None:
        chance = random.Random(seed)
        self.calls: list[tuple[str, Any]] = []
        watermark, now_ms = 0, 1_000
        for _ in range(120):
            what = chance.random()
            if what < 0.7:
                rows = chance.randint(1, 40)
                keys = [f"key {chance.randrange(300)}" for _ in range(rows)]
                times = [
                    dt.datetime(1970, 1, 1) + dt.timedelta(microseconds=watermark + chance.randrange(30 * MS))
                    for _ in keys
                ]
                self.calls.append(("rows", pa.record_batch([keys, range(rows), times], schema=SCHEMA)))
            elif what < 0.9:
                watermark += chance.randrange(12 * MS)
                self.calls.append(("watermark", watermark))
            else:
                now_ms += chance.randrange(5)
                self.calls.append(("clock", now_ms))


def perform(operator: Any, context: Subtask, calls: list[tuple[str, Any]]) -> list[tuple[int, Any]]:
    made: list[tuple[int, Any]] = []

    def take(outputs: Any) -> None:
        made.extend((output, batch.to_pylist()) for output, batch in outputs)

    for kind, what in calls:
        if kind == "clock":
            context.now_ms = what
            due = operator.next_processing_time_ms
            while due is not None and due <= what:
                take(operator.on_processing_time(what))
                due = operator.next_processing_time_ms
        else:
            take(operator.process(0, what) if kind == "rows" else operator.on_watermark(what))
        while operator.pending:
            take(operator.resume())
    return made


@pytest.mark.parametrize("name", list(STEPS))
def test_a_restored_operator_repeats_itself(name: str) -> None:
    spec, repeated = spec_of(STEPS[name]), 0
    for seed in range(4):
        calls = Calls(seed).calls
        cut = len(calls) // 2
        context = Subtask(now_ms=1_000, repeatable=True)
        operator = spec.build()
        operator.open(context)
        perform(operator, context, calls[:cut])
        frozen = operator.freeze(1)
        segments = list(frozen.segments())
        now_ms = context.now_ms
        first = perform(operator, context, calls[cut:])
        again = spec.build()
        context = Subtask(now_ms=now_ms, repeatable=True)
        again.open(context)
        again.restore(segments)
        assert perform(again, context, calls[cut:]) == first
        repeated += sum(len(rows) for _, rows in first)
    assert repeated > 50

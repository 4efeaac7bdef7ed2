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
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import cutwater as cw
from cutwater.connectors.generate import RateSource
from cutwater.data import rows
from cutwater.operators.deterministic_batches import DeterministicBatches
from cutwater.operators.join import two_sided
from cutwater.plan.planner import make_plan
from cutwater.state.disk import tables
from cutwater.state.rows import rows as rows_by_key
from cutwater.state.table import keyed_segments, multi_row_keys, spill, timed_table
from subtask_context import Subtask

SCHEMA = pa.schema(
    [
        ("k", pa.string()),
        ("n", pa.int64()),
        ("time", pa.timestamp("us")),
        ("s", pa.string()),
        ("fraction", pa.float64()),
    ]
)
MS = 1_000
PROCESSING = ("Append", "ProcessingTime")


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


class Processor(StatefulProcessor):
    """Timers by the clock, all of one instant, and a map whose order shows."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.last = handle.getMapState("last", "m long", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[Row]:
        for row in rows:
            self.last.updateValue((row.n % 5,), (row.n,))
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 3)
        yield Row(k=key[0], n=int("".join(str(m) for (m,), _ in self.last.iterator())))

    def handleInitialState(self, key: Any, initial: Any, timerValues: Any) -> None:
        self.last.updateValue((9,), (initial.n,))
        self.handle.registerTimer(timerValues.getCurrentProcessingTimeInMs() + 5)

    def handleExpiredTimer(self, key: Any, timerValues: Any, expired: Any) -> Iterator[Row]:
        yield Row(k=key[0], n=expired.getExpiryTimeInMs() + sum(n for (n,) in self.last.values()))

    def close(self) -> None: ...


Steps = Callable[..., Any]
TABLE = pa.table({"k": [f"key {i % 200}" for i in range(400)], "s": ["wide" * (i % 90) for i in range(400)]})
STEPS: dict[str, Steps] = {
    "aggregate": lambda keyed: keyed.aggregate("step", n=cw.count(), total=cw.sum("n"), last=cw.last("n")),
    "deduplicate": lambda keyed: keyed.deduplicate("step"),
    "top": lambda keyed: keyed.top("step", 3, by="n"),
    "tumbling": lambda keyed: keyed.window("w", cw.tumbling("10ms")).aggregate("step", n=cw.count(), last=cw.last("n")),
    "sliding": lambda keyed: keyed.window("w", cw.sliding("20ms", every="5ms")).aggregate(
        "step", n=cw.sum("n"), share=cw.sum("fraction")
    ),
    "sessions": lambda keyed: keyed.window("w", cw.session("3ms")).aggregate(
        "step", n=cw.sum("n"), first=cw.first("n")
    ),
    **{
        f"{name} early by {when}": lambda keyed, window=window, early=early: keyed.window(
            "w", window, early=cw.every(**early)
        ).aggregate("step", n=cw.count(), last=cw.last("n"))
        for name, window in {
            "tumbling": cw.tumbling("20ms"),
            "sliding": cw.sliding("20ms", every="5ms"),
            "sessions": cw.session("3ms"),
            "tumbling by the clock": cw.tumbling("9ms", time="processing"),
        }.items()
        for when, early in {
            "rows": {"rows": 3},
            "event time": {"event_time": "4ms"},
            "the clock": {"processing_time": "3ms"},
        }.items()
        if (name, when) != ("tumbling by the clock", "event time")
    },
    "early": lambda keyed: keyed.window(
        "w", cw.tumbling("20ms"), allowed_lateness="9ms", early=cw.every(event_time="4ms")
    ).aggregate("step", n=cw.sum("n")),
    "early sessions": lambda keyed: keyed.window(
        "w", cw.session("4ms"), allowed_lateness="9ms", early=cw.every(event_time="4ms"), discarding=True
    ).aggregate("step", n=cw.sum("n")),
    "late": lambda keyed: keyed.window("w", cw.sliding("12ms", every="5ms"), allowed_lateness="9ms").aggregate(
        "step", n=cw.sum("n"), mean=cw.mean("fraction")
    ),
    "timers": lambda keyed: keyed.process("step", Alarms(), "k string, n long"),
    "processor": lambda keyed: keyed.transform_with_state("step", Processor(), "k string, n long", *PROCESSING),
    "initial": lambda keyed: keyed.transform_with_state(
        "step",
        Processor(),
        "k string, n long",
        *PROCESSING,
        initial_state=pa.table({"k": [f"key {i}" for i in range(40)], "n": range(40)}),
    ),
    "enrich": lambda keyed: keyed.enrich("step", cw.EnrichmentTable(TABLE, duplicates="all"), on="k"),
}
KEPT = [name for name in STEPS if name not in ("enrich", "processor", "initial")]
"""Steps whose state may lie on disk."""
JOINS: dict[str, Steps] = {
    "interval": lambda left, right: left.join("step", right, within=("-9ms", "7ms")),
    "windows": lambda left, right: left.join("step", right, window=cw.tumbling("10ms")),
    **{
        how: lambda left, right, how=how: left.join("step", right, window=cw.sliding("12ms", every="4ms"), how=how)
        for how in ("left", "right", "full", "semi", "anti")
    },
    "as of": lambda left, right: left.join_as_of("step", right),
    "as of, left": lambda left, right: left.join_as_of("step", right, how="left"),
    "tables": lambda left, right: left.join_tables("step", right, how="full", keep="last"),
}


def spec_of(make: Steps) -> Any:
    flow = cw.Dataflow("one")
    source = RateSource(fn=lambda numbers: {}, schema=SCHEMA, rows=1)
    names = ["left", "right"][: 2 if make in JOINS.values() else 1]
    streams = [flow.read(name, source, event_time="time") for name in names]
    keyed = streams[0] if make is STEPS["enrich"] else [stream.key_by("k", nulls="key") for stream in streams]
    made = make(keyed) if make is STEPS["enrich"] else make(*keyed)
    made.write("out", cw.discard())
    return make_plan(flow, 1, 16).steps["step"].spec


class Calls:
    """What a subtask would ask of its operator: rows, watermarks and slices of timers, as chance will have it."""

    def __init__(self, seed: int, inputs: int = 1) -> None:
        chance = random.Random(seed)
        self.calls: list[tuple[str, Any]] = []
        watermark, now_ms = 0, 1_000
        for _ in range(120):
            what = chance.random()
            if what < 0.7:
                rows = chance.randint(1, 40)
                keys = [f"key {chance.randrange(300)}" for _ in range(rows)]
                times = [
                    dt.datetime(1970, 1, 1) + dt.timedelta(microseconds=watermark + chance.randrange(30) * MS + 1)
                    for _ in keys
                ]
                texts = ["x" * chance.choice((0, 3, 3, 90)) for _ in keys]
                if inputs > 1:
                    keys = [key if chance.random() < 0.97 else None for key in keys]
                fractions = [chance.random() * 10 ** chance.randrange(9) for _ in keys]
                batch = pa.record_batch([keys, range(rows), times, texts, fractions], schema=SCHEMA)
                self.calls.append((f"rows {chance.randrange(inputs)}", batch))
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
            rows = kind.startswith("rows")
            take(operator.process(int(kind[-1]), what) if rows else operator.on_watermark(what))
        while operator.pending:
            take(operator.resume())
    return made


def assert_repeats_itself(make: Steps, inputs: int, *memories: tuple[int | None, int | None]) -> None:
    """With so much memory at first, and so much after the restore."""
    spec, repeated = spec_of(make), 0
    for seed in range(4 // inputs):
        calls = Calls(seed, inputs).calls
        cut = len(calls) // 2
        before, after = memories[seed % len(memories)] if memories else (None, None)
        context = Subtask(now_ms=1_000, repeatable=True, state_memory_bytes=before)
        operator = spec.build()
        operator.open(context)
        perform(operator, context, calls[:cut])
        frozen = operator.freeze(1)
        segments = list(frozen.segments())
        frozen.release()
        now_ms = context.now_ms
        first = perform(operator, context, calls[cut:])
        operator.close()
        again = spec.build()
        # the clock has gone on when it is restored
        context = Subtask(now_ms=now_ms + 2, repeatable=True, state_memory_bytes=after)
        again.open(context)
        again.restore(segments)
        context.now_ms = now_ms
        assert perform(again, context, calls[cut:]) == first
        again.close()
        repeated += sum(len(rows) for _, rows in first)
    assert repeated > 50


QUICK = ("tumbling early by the clock", "sessions early by the clock")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.full] * (" early by " in n and n not in QUICK)) for n in STEPS]
)
def test_a_restored_operator_repeats_itself(name: str) -> None:
    assert_repeats_itself(STEPS[name], 1)


WIDE = [(rows, "_MAX_BATCH_BYTES", 4_000), (two_sided, "_MAX_STEPS", 40)]
WIDE += [(rows_by_key, "_SLACK_ROWS", 100)]


@pytest.mark.parametrize("name", list(JOINS))
def test_a_restored_join_repeats_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its rows are so wide, and those it looks at so many, that they leave in several batches."""
    for module, limit, value in WIDE:
        monkeypatch.setattr(module, limit, value)
    assert_repeats_itself(JOINS[name], 2)


LITTLE, PLENTY = 4_000, 1 << 22
PARTS = [(spill, "_PART_ROWS"), (timed_table, "PART_ROWS")]
PARTS += [(multi_row_keys, "PART_KEYS"), (rows_by_key, "PART_KEYS"), (keyed_segments, "_FEW_ROWS")]


@pytest.mark.parametrize(
    ("name", "held_bytes"),
    [
        ("sessions", 2_000),
        ("left", 1 << 24),
        *(pytest.param(name, 2_000, marks=pytest.mark.full) for name in (*KEPT, *JOINS) if name != "sessions"),
    ],
)
def test_what_lies_on_disk_is_repeated_in_the_same_order(
    name: str, held_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever part of it lies in memory: before and after the restore there is not the same room."""
    pytest.importorskip("rocksdict")
    for module, limit in PARTS:
        monkeypatch.setattr(module, limit, 7)
    for module, limit, value in WIDE:
        monkeypatch.setattr(module, limit, value)
    monkeypatch.setattr(tables, "_HELD_BYTES", held_bytes)
    inputs = 2 if name in JOINS else 1
    make = JOINS[name] if name in JOINS else STEPS[name]
    assert_repeats_itself(make, inputs, (LITTLE, PLENTY), (PLENTY, LITTLE), (LITTLE, LITTLE))


@given(sizes=st.lists(st.integers(0, 9), max_size=12), limit=st.integers(1, 7), wide=st.integers(1, 90))
def test_batches_end_where_their_rows_say(sizes: list[int], limit: int, wide: int) -> None:
    """However many rows come at once, the same batches leave."""
    texts = ["x" * (i * 7 % 31) for i in range(sum(sizes))]
    whole = pa.record_batch({"s": texts, "l": [[i] * (i % 3) for i in range(len(texts))]})

    def left(parts: list[int]) -> list[int]:
        portions, made, at = DeterministicBatches(limit, wide), [], 0
        for number, size in enumerate(parts):
            made += portions.cut([(0, whole.slice(at, size))], last=number == len(parts) - 1)
            at += size
        assert not made or pa.concat_batches([b for _, b in made]).to_pylist() == whole.to_pylist()
        return [batch.num_rows for _, batch in made]

    assert left(sizes) == (left([len(texts)]) if sizes else [])
    assert all(rows <= limit for rows in left(sizes))

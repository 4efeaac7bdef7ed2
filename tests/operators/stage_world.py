"""Steps of every kind with columnar keyed state, and a subtask of one that gets random rows."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from cutwater.data.changes import marked_schema
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.base import Operator, OperatorSpec
from cutwater.operators.join.spec import AsOfJoinSpec, IntervalJoinSpec, TableJoinSpec, WindowJoinSpec
from cutwater.operators.ranking.deduplicate_spec import DeduplicateSpec
from cutwater.operators.ranking.top_spec import ROWS, TopRows, TopSpec
from cutwater.operators.window.kinds import Early, GlobalWindow, SessionWindow, SlidingWindow, TumblingWindow, Window
from cutwater.operators.window.spec import WindowAggregateSpec
from cutwater.state.segments import Frozen, Segment
from incremental_world import Content
from keyed_world import opened

SCHEMA = pa.schema([("k", pa.string()), ("t", pa.timestamp("us")), ("v", pa.int64())])
MARKED = marked_schema(SCHEMA)
FAR_US = 150


def windows(window: Window, lateness: int = 0, early: Early | None = None) -> WindowAggregateSpec:
    aggregates = (Aggregate("n", "count"), Aggregate("most", "max", "v"), Aggregate("latest", "last", "v"))
    return WindowAggregateSpec(SCHEMA, ("k",), "t", window, aggregates, lateness, early)


def top(*, updating: bool) -> TopSpec:
    rows = TopRows(ROWS, "top", by=("v",), descending=(True,), n=3, removing=updating)
    return TopSpec(MARKED if updating else SCHEMA, ("k",), rows, updating=updating)


SPECS: dict[str, OperatorSpec] = {
    "tumbling": windows(TumblingWindow(10), 7),
    "global": windows(GlobalWindow(), early=Early(rows=3)),
    "slices": windows(SlidingWindow(20, 10), 5),
    "cut slices": windows(SlidingWindow(15, 10)),
    "sliding": windows(SlidingWindow(20, 10), early=Early(event_time_us=5)),
    "sessions": windows(SessionWindow(4), 6),
    "early sessions": windows(SessionWindow(9), early=Early(rows=4)),
    "interval join": IntervalJoinSpec(SCHEMA, SCHEMA, ("k",), ("k",), "t", "t", -10, 20),
    "window join": WindowJoinSpec(SCHEMA, SCHEMA, ("k",), ("k",), "t", "t", SlidingWindow(20, 10), "full"),
    "as-of join": AsOfJoinSpec(SCHEMA, SCHEMA, ("k",), ("k",), "t", "t"),
    "table join": TableJoinSpec(MARKED, SCHEMA, ("k",), ("k",), "full", updating=(True, False)),
    "first": DeduplicateSpec(SCHEMA, ("k",), "first", "t", 15),
    "last": DeduplicateSpec(SCHEMA, ("k",), "last"),
    "top": top(updating=False),
    "updating top": top(updating=True),
}


@dataclass
class Stage:
    """One subtask of an operator, which gets random rows."""

    spec: OperatorSpec
    subtask: int
    parallelism: int
    now: int = 0
    rows: list[dict[str, Any]] = field(default_factory=list)
    """That can be taken back."""

    def __post_init__(self) -> None:
        self.operator: Operator = opened(self.spec, self.subtask, self.parallelism)
        self.inputs = 2 if hasattr(self.spec, "left_schema") else 1

    def change(self, dice: random.Random) -> None:
        if self.rows and dice.random() < 0.3:
            self.now += dice.randint(0, 9)
            self.drain(self.operator.on_watermark(self.now))
            return
        few = len(self.rows) > 0 and dice.random() < 0.93
        batch: list[dict[str, Any]] = []
        for _ in range(dice.randint(*(1, 4) if few else (30, 60))):
            if self.rows and dice.random() < 0.4:
                batch.append({**self.rows.pop(dice.randrange(len(self.rows))), "op": "-D"})
                continue
            time = max(0, self.now + dice.randint(-8, 12 if few else FAR_US))
            row = {"k": f"key {dice.randint(0, 2 if few else 60)}", "t": time, "v": dice.randint(0, 99), "op": "+I"}
            self.rows.append(row)
            batch.append(row)
        self.feed(batch, dice.randrange(self.inputs))

    def feed(self, rows: list[dict[str, Any]], input: int = 0) -> None:
        schema = self.schema(input)
        if "op" not in schema.names:
            rows = [row for row in rows if row["op"] == "+I"]
        self.drain(self.operator.process(input, pa.RecordBatch.from_pylist(rows, schema=schema)))

    def schema(self, input: int) -> pa.Schema:
        spec: Any = self.spec
        return spec.input_schema if self.inputs == 1 else (spec.left_schema, spec.right_schema)[input]

    def drain(self, outputs: object) -> None:
        while self.operator.pending:
            self.operator.resume()

    def freeze(self, checkpoint_id: int) -> Frozen:
        return self.operator.freeze(checkpoint_id)

    def expected(self, frozen: Frozen) -> Content:
        return sorted(content_of(frozen.segments()))

    def restore(self, segments: Iterable[Segment], expected: Content | None = None) -> None:
        self.rows = []
        self.operator.restore(segments)

    def content(self) -> Content:
        return content_of(self.operator.freeze(10**9).segments())


def content_of(segments: Iterable[Segment]) -> Content:
    """Rows of the states and the watermarks."""
    return [f"{s.name} {sorted(row.items())}" for s in segments for row in s.batch.to_pylist()]

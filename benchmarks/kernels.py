"""Rows per second of processor time of the keyed kernels: ``python benchmarks/kernels.py [rows per batch]``.

Processor time, so that a busy machine does not change the picture much; one core does all the work.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.aggregate.running_spec import RunningAggregateSpec
from cutwater.operators.window.kinds import TumblingWindow
from cutwater.operators.window.spec import WindowAggregateSpec
from cutwater.runtime.channels.partitioner import HashPartitioner
from cutwater.state.key_index import make_index
from cutwater.state.keys import key_group_range

KEYS = 100_000
BATCHES = 64
ROUNDS = 5
GROUPS = 128


@dataclass
class Subtask:
    """A context for one subtask that owns everything."""

    step: str = "bench"
    subtask: int = 0
    parallelism: int = 1
    max_parallelism: int = GROUPS
    key_groups: range = key_group_range(0, 1, GROUPS)
    incremental: bool = False
    state_memory_bytes: int | None = None
    repeatable: bool = False
    repeating: bool = False

    def wake(self) -> None:
        return None

    def processing_time_ms(self) -> int:
        return 0

    def count(self, metric: str, amount: int = 1) -> None:
        return None


def batches(rows: int, text: bool) -> list[pa.RecordBatch]:
    random = np.random.default_rng(1)
    names = pa.array([f"customer-{i:08}" for i in range(KEYS)])
    made: list[pa.RecordBatch] = []
    for number in range(BATCHES):
        keys = pa.array(random.integers(0, KEYS, rows))
        first = number * rows * 1000
        time_us = pa.array(np.arange(first, first + rows * 1000, 1000), pa.timestamp("us"))
        made.append(pa.record_batch({"k": names.take(keys) if text else keys, "v": np.arange(rows), "t": time_us}))
    return made


def measure(name: str, work: Callable[[pa.RecordBatch], object], data: list[pa.RecordBatch], rounds: int) -> None:
    for batch in data:
        work(batch)
    best = float("inf")
    for _ in range(rounds):
        begin = time.process_time()
        for batch in data:
            work(batch)
        best = min(best, time.process_time() - begin)
    rows = sum(batch.num_rows for batch in data)
    print(f"{name:<44} {rows / best / 1e6:8.1f} M rows/s")


def keyed(data: list[pa.RecordBatch], kind: str) -> None:
    schema = data[0].schema
    narrow = [batch.select(["k", "v"]) for batch in data]
    split = HashPartitioner(narrow[0].schema, ["k"], 2, GROUPS).split
    measure(f"partition to 2, {kind}", split, narrow, ROUNDS)
    index = make_index([schema.field("k").type])
    measure(f"index, {kind}", lambda batch: index.upsert([batch.column("k")]), data, ROUNDS)
    aggregates = (Aggregate("n", "count"), Aggregate("total", "sum", "v"))
    running = RunningAggregateSpec(narrow[0].schema, ("k",), aggregates).build()
    running.open(Subtask())
    measure(f"running count and sum, {kind}", lambda batch: running.process(0, batch), narrow, ROUNDS)
    both = RunningAggregateSpec(narrow[0].schema, ("k",), aggregates).build()
    both.open(Subtask())
    measure(f"partition, then running, {kind}", lambda b: [both.process(0, p) for _, p in split(b)], narrow, ROUNDS)


def windows(rows: int, text: bool, size_us: int, kind: str) -> None:
    """Rows come in time order, 1 ms apart; windows fire as the watermark follows."""
    data = batches(rows, text)
    aggregates = (Aggregate("n", "count"), Aggregate("total", "sum", "v"))
    spec = WindowAggregateSpec(data[0].schema, ("k",), "t", TumblingWindow(size_us), aggregates)
    ends = [batch.column("t")[-1].value for batch in data]
    best = float("inf")
    for _ in range(ROUNDS):
        operator = spec.build()
        operator.open(Subtask())
        begin = time.process_time()
        for batch, end in zip(data, ends, strict=True):
            operator.process(0, batch)
            operator.on_watermark(end)
            while operator.pending:
                operator.resume()
        best = min(best, time.process_time() - begin)
    print(f"{kind:<44} {rows * BATCHES / best / 1e6:8.1f} M rows/s")


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 65_536
    keyed(batches(rows, text=False), "int64 key")
    keyed(batches(rows, text=True), "string key")
    windows(rows, False, rows * 10_000, "windows of 10 batches, int64 key")
    windows(rows, False, rows * 10, "100 windows per batch, int64 key")
    windows(rows, True, rows * 10_000, "windows of 10 batches, string key")


if __name__ == "__main__":
    main()

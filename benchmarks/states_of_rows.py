"""What states of process functions cost that see one row at a time: rows per second of one core, without a job.

    python -m benchmarks.states_of_rows [--only value,count]

Each function gets batches of 4,096 rows, over 1,000 keys and over 100,000, with a freeze each 16 batches that somebody
reads until the next one.  Only the operator is timed, by the time of its thread, the quickest and slowest batches left
out.  To compare with an older tree, copy this file into it, and run both in turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

import cutwater as cw
from benchmarks.kernels import Subtask
from benchmarks.process import Row
from cutwater.operators.process.spec import ProcessSpec

SCHEMA = pa.schema({"k": pa.int64(), "v": pa.int64()})
RESULT = pa.schema({"k": pa.int64(), "n": pa.int64(), "s": pa.int64()})
ROWS = 4096
BATCHES = 16
"""Between two freezes."""
ROUNDS = 3
KEYS = (1_000, 100_000)


class Value(cw.ProcessFunction):
    """One state, read through ``value``, and rows returned in a list."""

    n = cw.ValueState("long")

    def process(self, row: dict[str, Any], ctx: cw.ProcessContext) -> list[dict[str, Any]]:
        self.n.value = n = (self.n.value or 0) + 1
        return [{"k": ctx.key, "n": n, "s": row["v"]}]


class Kinds(cw.ProcessFunction):
    """A state of each kind, all read and written with each row."""

    n = cw.ValueState("long")
    seen = cw.ListState("long")
    by = cw.MapState("long", "long")

    def process(self, row: dict[str, Any], ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        self.n.value = n = self.n.get(0) + 1
        v = row["v"]
        if len(self.seen) > 8:
            self.seen.clear()
        self.seen.append(v)
        self.by[v % 4] = self.by.get(v % 4, 0) + 1
        yield {"k": ctx.key, "n": n, "s": v}


FUNCTIONS: dict[str, tuple[str, type[cw.ProcessFunction]]] = {
    "count": ("count and sum", Row),
    "value": ("one value", Value),
    "kinds": ("value, list and map", Kinds),
}


def rate(function: cw.ProcessFunction, keys: int) -> float:
    """Rows per second of the processor's time."""
    random = np.random.default_rng(1)
    batches = [
        pa.record_batch([random.integers(0, keys, ROWS), random.integers(0, 100, ROWS)], schema=SCHEMA)
        for _ in range(BATCHES)
    ]
    operator = ProcessSpec(SCHEMA, keys=("k",), function=function, output_schema=RESULT).build()
    operator.open(Subtask())
    for batch in batches * 2:
        operator.process(0, batch)
    times: list[float] = []
    for checkpoint in range(ROUNDS):
        frozen = operator.freeze(checkpoint)
        for batch in batches:
            begin = time.thread_time()
            operator.process(0, batch)
            times.append(time.thread_time() - begin)
        frozen.release()
    times.sort()
    return ROWS / statistics.mean(times[2:-6])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(FUNCTIONS))
    options = parser.parse_args()
    print("| states | rows/s and core |\n|---|---:|")
    for name in options.only.split(","):
        title, function = FUNCTIONS[name]
        for keys in KEYS:
            print(f"| {title}, {keys:,} keys | {rate(function(), keys):,.0f} |", flush=True)


if __name__ == "__main__":
    main()

"""What a row costs in each form that a function may have, without a job around it: rows per second of one core.

    python -m benchmarks.functions [--rows 4096] [--rounds 7] [--only map,row]

Two pieces of work: ``twice`` doubles a number; the keyed count gives one row for each row, its key's count and sum so
far, over 100,000 keys.  Each is written in every form that can say it, and given the same batches; the rows that a form
makes are compared with those of the first one.  The forms take turns, and the time is that of the processor.  The last
line is the user's own code of the pandas form, called with DataFrames that were made before: what no engine could take
away.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.kernels import Subtask
from benchmarks.process import RESULT, Batch, Row, Ttl
from benchmarks.tws import Counts, CountsInPandas
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.aggregate.running_spec import RunningAggregateSpec
from cutwater.operators.base import OperatorSpec
from cutwater.operators.process.spec import ProcessSpec
from cutwater.operators.stateful_processor.spec import ProcessorSpec
from cutwater.operators.stateless.expressions import ExpressionSpec, Select
from cutwater.operators.stateless.functions import FlatMapSpec, MapBatchesSpec, MapRowSpec

SCHEMA = pa.schema({"k": pa.int64(), "v": pa.int64()})
KEYS = 100_000
BATCHES = 8
PANDAS_ROWS = 500
"""Of a batch for the pandas form, which takes a second for some 5,000."""


def doubled(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield batch.set_column(1, "v", pc.call_function("multiply", [batch.column("v"), pa.scalar(2, pa.int64())]))


def doubled_row(row: dict[str, Any]) -> dict[str, Any]:
    return {"k": row["k"], "v": 2 * row["v"]}


def doubled_rows(row: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield {"k": row["k"], "v": 2 * row["v"]}


def counting(function: Any) -> OperatorSpec:
    return ProcessSpec(SCHEMA, keys=("k",), function=function, output_schema=RESULT)  # type: ignore[arg-type]


FORMS: dict[str, tuple[str, Callable[[], OperatorSpec]]] = {
    "expression": (
        "twice: expression, `with_columns`",
        lambda: ExpressionSpec(SCHEMA, (Select([pl.col("k"), pl.col("v") * 2]),)),
    ),
    "batches": ("twice: function of batches, `map_batches`", lambda: MapBatchesSpec(SCHEMA, doubled, SCHEMA)),
    "map": ("twice: function of a row, `map`", lambda: MapRowSpec(SCHEMA, doubled_row, SCHEMA)),
    "flat-map": ("twice: generator, `flat_map`", lambda: FlatMapSpec(SCHEMA, doubled_rows, SCHEMA)),
    "aggregate": (
        "count: `aggregate`",
        lambda: RunningAggregateSpec(SCHEMA, ("k",), (Aggregate("n", "count"), Aggregate("s", "sum", "v"))),
    ),
    "batch": ("count: `BatchProcessFunction`", lambda: counting(Batch())),
    "row": ("count: `ProcessFunction`", lambda: counting(Row())),
    "ttl": ("count: `ProcessFunction`, states with `ttl`", lambda: counting(Ttl())),
    "processor": (
        "count: `StatefulProcessor` of rows",
        lambda: ProcessorSpec(SCHEMA, ("k",), Counts(), RESULT, form="rows"),  # type: ignore[arg-type]
    ),
    "pandas": (
        "count: `StatefulProcessor` of pandas DataFrames",
        lambda: ProcessorSpec(SCHEMA, ("k",), CountsInPandas(), RESULT, form="pandas"),  # type: ignore[arg-type]
    ),
}


class _Kept:
    """A state that costs nothing."""

    def exists(self) -> bool:
        return False

    def update(self, value: Any) -> None:
        return None


def batches(rows: int) -> list[pa.RecordBatch]:
    random = np.random.default_rng(1)
    return [
        pa.record_batch([random.integers(0, KEYS, rows), random.integers(0, 100, rows)], schema=SCHEMA)
        for _ in range(BATCHES)
    ]


class Form:
    """One form, and what it has been measured at."""

    def __init__(self, name: str, rows: int) -> None:
        self.title, make = FORMS[name]
        self.data = batches(PANDAS_ROWS if name == "pandas" else rows)
        self.operator = make().build()
        self.operator.open(Subtask())
        self.made = pa.Table.from_batches([out for batch in self.data for _, out in self.operator.process(0, batch)])
        self.rates: list[float] = []

    def measure(self) -> None:
        begin = time.thread_time()
        for batch in self.data:
            self.operator.process(0, batch)
        self.rates.append(sum(batch.num_rows for batch in self.data) / (time.thread_time() - begin))


def pandas_alone(rounds: int) -> list[float]:
    """Rates of the pandas form's own code, a row in each DataFrame as nearly always above."""
    processor: Any = CountsInPandas()
    processor.total = _Kept()
    rates: list[float] = []
    for _ in range(rounds):
        frames = [pd.DataFrame({"k": np.array([i]), "v": np.array([3])}) for i in range(PANDAS_ROWS)]
        begin = time.thread_time()
        for key, frame in enumerate(frames):
            for _ in processor.handleInputRows((key,), iter((frame,)), None):
                pass
        rates.append(PANDAS_ROWS / (time.thread_time() - begin))
    return rates


def same(made: pa.Table, first: pa.Table) -> bool:
    """Whether the same rows came, whatever the order of the keys of a batch."""
    names = made.schema.names
    order = [(name, "ascending") for name in names]
    return made.sort_by(order).equals(first.select(names).sort_by(order).cast(made.schema))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=4096, help="of a batch")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--only", default=",".join(FORMS))
    options = parser.parse_args()
    forms = {name: Form(name, options.rows) for name in options.only.split(",")}
    firsts: dict[tuple[str, int], pa.Table] = {}
    for form in forms.values():
        first = firsts.setdefault((form.title.partition(":")[0], form.made.num_rows), form.made)
        if not same(form.made, first):
            raise SystemExit(f"{form.title} makes other rows")
    for _ in range(options.rounds):
        for form in forms.values():
            form.measure()
    print("| form | rows/s and core (min - max) |\n|---|---:|")
    found = {form.title: form.rates for form in forms.values()}
    if "pandas" in forms:
        found["the last one's own code alone"] = pandas_alone(options.rounds)
    for title, rates in found.items():
        print(f"| {title} | {statistics.median(rates):,.0f} ({min(rates):,.0f} - {max(rates):,.0f}) |")


if __name__ == "__main__":
    main()

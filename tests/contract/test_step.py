"""Promises of every stateless step: its types, the same rows however they are cut, a journey to workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from pyspark import cloudpickle

from cutwater.operators.base import OperatorSpec
from cutwater.operators.enrich.lookup import EnrichSpec
from cutwater.operators.enrich.table import EnrichmentTable
from cutwater.operators.stateless.expressions import ExpressionSpec, Filter, WithColumns
from cutwater.operators.stateless.functions import FlatMapSpec, MapBatchesSpec, MapRowSpec
from cutwater.operators.stateless.rows import KeyCheckSpec, UnionSpec, UnnestSpec


class Context:
    """A subtask alone in the world."""

    step, subtask, parallelism, max_parallelism, key_groups = "step", 0, 1, 16, range(16)
    incremental, state_memory_bytes, repeatable, repeating = False, None, True, False

    def processing_time_ms(self) -> int:
        return 0

    def count(self, metric: str, amount: int = 1) -> None:
        return None

    def wake(self) -> None:
        return None


LISTS = pa.list_(pa.struct({"place": pa.int64()}))
ROWS = pa.record_batch(
    {
        "k": pa.array([None if n % 7 == 3 else n % 4 for n in range(40)], pa.int64()),
        "v": pa.array([n * n for n in range(40)], pa.int64()),
        "lists": pa.array([[{"place": i} for i in range(n % 3)] for n in range(40)], LISTS),
    }
)
SCHEMA = ROWS.schema
NAMES = EnrichmentTable(pa.table({"k": [0, 1, 2], "name": ["zero", "one", "two"]}))


def doubled(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        yield pa.record_batch({"n": pa.array([2 * v for v in batch["v"].to_pylist()], pa.int64())})


STEPS: dict[str, Callable[[], OperatorSpec]] = {
    "expressions": lambda: ExpressionSpec(
        SCHEMA, (Filter(pl.col("v") > 9), WithColumns([(pl.col("v") + 1).alias("w")]))
    ),
    "map_batches": lambda: MapBatchesSpec(SCHEMA, doubled, pa.schema({"n": pa.int64()})),
    "map": lambda: MapRowSpec(SCHEMA, lambda row: {"n": row["v"]} if row["k"] else None, pa.schema({"n": pa.int64()})),
    "flat_map": lambda: FlatMapSpec(SCHEMA, lambda row: [{"n": 1}] * (row["v"] % 3), pa.schema({"n": pa.int64()})),
    "key_check": lambda: KeyCheckSpec(SCHEMA, ("k",)),
    "union": lambda: UnionSpec(SCHEMA, 2),
    "unnest": lambda: UnnestSpec(SCHEMA, "lists", ("k", "v"), "rank"),
    "enrich": lambda: EnrichSpec(SCHEMA, NAMES, (("k", "k"),)),
}
each_step = pytest.mark.parametrize("make", STEPS.values(), ids=STEPS.keys())


def rows_of(spec: OperatorSpec, size: int) -> list[list[dict[str, Any]]]:
    """The rows of each output, the input being cut into batches of this size."""
    operator = spec.build()
    operator.open(Context())
    found: list[list[dict[str, Any]]] = [[] for _ in spec.outputs]
    for first in range(0, ROWS.num_rows, size):
        outputs = operator.process(0, ROWS.slice(first, size))
        while operator.pending:
            outputs += operator.resume()
        for output, batch in outputs:
            batch.validate(full=True)
            assert batch.schema == spec.outputs[output], "rows are of the promised schema"
            found[output] += batch.to_pylist()
    operator.close()
    return found


@each_step
def test_its_rows_do_not_depend_on_how_they_are_cut(make: Callable[[], OperatorSpec]) -> None:
    whole = rows_of(make(), ROWS.num_rows)
    assert whole[0]
    for size in (1, 3, 16):
        assert rows_of(make(), size) == whole
    if make().keeps_every_row:
        assert len(whole[0]) >= ROWS.num_rows


@each_step
def test_it_travels_to_workers_and_makes_the_same_rows_there(make: Callable[[], OperatorSpec]) -> None:
    assert rows_of(cloudpickle.loads(cloudpickle.dumps(make())), 7) == rows_of(make(), 7)


@each_step
def test_it_describes_itself(make: Callable[[], OperatorSpec]) -> None:
    spec = make()
    assert spec.repeatable, "the suite shows it"
    assert set(spec.input_schemas) == {SCHEMA}
    assert all(isinstance(part, str) for part in spec.explanation())
    assert spec.state_schema is None
    assert spec.state_tables == ()
    assert not spec.settings

"""Columnar steps with far less memory than state: against DuckDB, and across backends and parallelisms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from keyed_world import cuts, feed, same, snapshot
from subtask_context import Subtask

from cutwater.operators import spill
from cutwater.operators.accumulators import Aggregate
from cutwater.operators.aggregate import RunningAggregateSpec
from cutwater.operators.base import Operator, OperatorSpec

pytest.importorskip("rocksdict")

BUDGET_BYTES = 1 << 16
"""Of which the table gets half."""

BACKENDS = [(BUDGET_BYTES, BUDGET_BYTES), (BUDGET_BYTES, None), (None, BUDGET_BYTES)]
"""Memory before and after a restore; ``None``: all of it."""

Opened = Callable[[OperatorSpec, int, int | None], list[Operator]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Opens the subtasks of a step, and closes them after the test."""
    monkeypatch.setattr(spill, "_PORTION_ROWS", 256)
    with ExitStack() as stack:

        def subtasks(spec: OperatorSpec, parallelism: int, memory_bytes: int | None) -> list[Operator]:
            made: list[Operator] = []
            for subtask in range(parallelism):
                operator = spec.build()
                operator.open(Subtask(subtask, parallelism, state_memory_bytes=memory_bytes))
                stack.callback(operator.close)
                made.append(operator)
            return made

        yield subtasks


def rows(n: int, keys: int) -> pa.RecordBatch:
    """With keys that come again after long, and columns of every kind of state."""
    random = np.random.default_rng(7)
    return pa.record_batch(
        {
            "a": random.permutation(np.arange(n) % keys),
            "b": pa.array([f"key {i % 7}" for i in range(n)]),
            "v": pa.array(random.integers(-1000, 1000, n), mask=random.random(n) < 0.2),
            "s": pa.array([f"t{i}" for i in random.integers(0, 300, n)], mask=random.random(n) < 0.2),
            "row": np.arange(n),
        }
    )


AGGREGATES = (
    Aggregate("n", "count"),
    *(Aggregate(f"{kind}_v", kind, "v") for kind in ("count", "sum", "mean", "min", "max", "stddev_pop")),
    *(Aggregate(f"{kind}_s", kind, "s") for kind in ("min", "max", "first", "last", "count_distinct")),
)
SQL = {"mean": "avg", "first": "first_value", "last": "last_value"}


def expected(batch: pa.RecordBatch) -> list[tuple[Any, ...]]:
    def call(w: Aggregate) -> str:
        if w.kind == "count_distinct":
            return f"count(distinct {w.column})"
        return f"{SQL.get(w.kind, w.kind)}({w.column or '*'}{' ignore nulls' if w.kind in ('first', 'last') else ''})"

    window = "partition by a, b order by row rows between unbounded preceding and current row"
    columns = ", ".join(f"{call(w)} over w as {w.name}" for w in AGGREGATES)
    query = f"select a, b, row, {columns} from t window w as ({window}) order by row"
    return duckdb.from_arrow(pa.Table.from_batches([batch])).query("t", query).fetchall()


def outputs(operators: list[Operator], batches: Iterable[pa.RecordBatch]) -> list[tuple[Any, ...]]:
    made = [out for batch in batches for part in feed(operators, batch, ("a", "b")) for _, out in part]
    return [tuple(row.values()) for out in made for row in out.to_pylist()]


def agree(found: list[tuple[Any, ...]], wanted: list[tuple[Any, ...]]) -> None:
    found = sorted(found, key=lambda row: row[2])
    assert len(found) == len(wanted)
    for left, right in zip(found, wanted, strict=True):
        assert all(map(same, left, right)), (left, right)


@pytest.mark.parametrize(
    ("before", "after"), [(BUDGET_BYTES, BUDGET_BYTES), (BUDGET_BYTES, None), (None, BUDGET_BYTES)]
)
def test_running_aggregates_agree_with_duckdb_over_a_restore_with_another_parallelism(
    opened: Opened, before: int | None, after: int | None
) -> None:
    batch = rows(16_000, 6_000)
    spec = RunningAggregateSpec(batch.schema, ("a", "b"), AGGREGATES, "row")
    parts = cuts(batch, range(0, batch.num_rows, 500))
    operators = opened(spec, 1, before)
    found = outputs(operators, parts[:20])
    segments = [segment for operator in operators for segment in snapshot(operator)]
    restored = opened(spec, 2, after)
    for operator in restored:
        operator.restore(iter(segments))
    found += outputs(restored, parts[20:])
    agree(found, expected(batch))
    for operator, memory_bytes in ((operators[0], before), *((r, after) for r in restored)):
        table: Any = operator._table  # type: ignore[attr-defined]
        if memory_bytes is not None:
            assert table.spill.rows.used
            assert len(table) < 1_200, "most keys are on disk only"


def test_the_budget_bounds_the_table(opened: Opened) -> None:
    """Also while many more keys come than leave in one portion."""
    schema = pa.schema([("k", pa.int64()), ("v", pa.int64())])
    spec = RunningAggregateSpec(schema, ("k",), (Aggregate("total", "sum", "v"),))
    (operator,) = opened(spec, 1, BUDGET_BYTES)
    table: Any = operator._table  # type: ignore[attr-defined]
    most = 0
    for begin in range(0, 60_000, 1_000):
        keys = np.arange(begin, begin + 1_000)
        operator.process(0, pa.record_batch([keys, keys], schema=schema))
        most = max(most, len(table))
    assert most < 4_000
    for begin in range(0, 60_000, 1_000):
        keys = np.arange(begin, begin + 1_000)
        ((_, out),) = operator.process(0, pa.record_batch([keys, keys], schema=schema))
        assert out.column("total").to_pylist() == (2 * keys).tolist()

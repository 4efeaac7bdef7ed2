"""Columnar steps with far less memory than state: against DuckDB, and across backends and parallelisms."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.aggregate.running_spec import RunningAggregateSpec
from cutwater.operators.base import Operator, OperatorSpec
from cutwater.operators.group_watermarks import WATERMARK
from cutwater.operators.join.spec import IntervalJoinSpec
from cutwater.state.disk.rocks import RocksStore
from cutwater.state.table import spill
from keyed_world import cuts, feed, owner, same, snapshot
from subtask_context import Subtask

pytest.importorskip("rocksdict")

BUDGET_BYTES = 1 << 16
"""Of which the table gets half."""

BACKENDS = [(BUDGET_BYTES, BUDGET_BYTES), (BUDGET_BYTES, None), (None, BUDGET_BYTES)]
"""Memory before and after a restore; ``None``: all of it."""

Opened = Callable[[OperatorSpec, int, int | None], list[Operator]]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[Opened]:
    """Opens the subtasks of a step, and closes them after the test."""
    monkeypatch.setattr(spill, "_PART_ROWS", 256)
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


JOINED = pa.schema([("k", pa.string()), ("t", pa.timestamp("us")), ("v", pa.int64())])
JOIN = IntervalJoinSpec(JOINED, JOINED, ("k",), ("k",), "t", "t", -4_000, 1_000)
WHOLE_JOIN = (
    "select l.k, l.v, r.v from t l join t r on l.k = r.k and l.side = 0 and r.side = 1 "
    "and r.t between l.t - interval 4 milliseconds and l.t + interval 1 millisecond order by all"
)


def sides(n: int, keys: int) -> list[tuple[int, pa.RecordBatch]]:
    """Batches of either side in turn, of far more keys than memory holds, in the order of time."""
    random = np.random.default_rng(3)
    made: list[tuple[int, pa.RecordBatch]] = []
    for number, begin in enumerate(range(0, n, 100)):
        columns = [
            pa.array([f"key {k}" for k in random.integers(0, keys, 100)]),
            pa.array(np.arange(begin, begin + 100)).cast(pa.timestamp("us")),
            pa.array(np.arange(begin, begin + 100)),
        ]
        made.append((number % 2, pa.RecordBatch.from_arrays(columns, schema=JOINED)))
    return made


def joined(operators: list[Operator], batches: Iterable[tuple[int, pa.RecordBatch]]) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    for side, batch in batches:
        owners = owner(batch, ("k",), len(operators))
        for number, operator in enumerate(operators):
            mine = batch.filter(pa.array([o == number for o in owners], pa.bool_()))
            out = operator.process(side, mine)
            while operator.pending:
                out += operator.resume()
            out += operator.on_watermark(max(0, batch.column("v")[0].as_py() - 1))
            found += [(row["k"], row["v"], row["v_right"]) for _, part in out for row in part.to_pylist()]
    return found


@pytest.mark.parametrize(
    ("before", "after"), [BACKENDS[0], *(pytest.param(*sizes, marks=pytest.mark.full) for sizes in BACKENDS[1:])]
)
def test_interval_joins_agree_with_duckdb_over_a_restore_with_another_parallelism(
    opened: Opened, before: int | None, after: int | None
) -> None:
    batches = sides(12_000, 1_500)
    tables = [pa.Table.from_batches([b]).append_column("side", pa.array([s] * b.num_rows)) for s, b in batches]
    wanted = duckdb.from_arrow(pa.concat_tables(tables)).query("t", WHOLE_JOIN).fetchall()
    operators = opened(JOIN, 1, before)
    found = joined(operators, batches[:70])
    segments = [segment for operator in operators for segment in snapshot(operator)]
    restored = opened(JOIN, 2, after)
    for operator in restored:
        operator.restore(iter(segments))
    found += joined(restored, batches[70:])
    assert sorted(found) == wanted
    assert len(wanted) > 3_000
    for operator, memory_bytes in ((operators[0], before), *((r, after) for r in restored)):
        kept: Any = operator._rows._rows  # type: ignore[attr-defined]
        if memory_bytes is not None:
            assert kept.spill.rows.used
            assert kept.memory_bytes < memory_bytes, "most rows are on disk only"


def test_an_increment_of_a_join_on_disk_is_the_rows_that_came(opened: Opened) -> None:
    (operator,) = opened(JOIN, 1, BUDGET_BYTES)
    batches = sides(9_000, 3_000)
    joined([operator], batches[:80])
    for checkpoint_id in (1, 2):
        frozen = operator.freeze(checkpoint_id)
        assert sum(s.batch.num_rows for s in frozen.segments() if s.name != WATERMARK) > 2_000
        frozen.release()
    joined([operator], batches[80:85])
    frozen = operator.freeze(3)
    changes = frozen.changes(2)
    assert changes is not None
    came = [row["v"] for s in changes if s.name != WATERMARK for row in s.batch.to_pylist()]
    assert sorted(came) == [*range(8_000, 8_500)]
    frozen.release()


def test_keys_that_every_batch_asks_for_are_not_moved_for_every_batch(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few keys with many wide rows: the bytes that are written do not grow with the square of what waits."""
    wide = pa.schema([("k", pa.int64()), ("t", pa.timestamp("us")), ("text", pa.string())])
    written, write = [0], RocksStore.write

    def counted(store: RocksStore, writes: Sequence[tuple[bytes, bytes | None]]) -> None:
        written[0] += sum(len(value or b"") for _, value in writes)
        write(store, writes)

    monkeypatch.setattr(RocksStore, "write", counted)
    (operator,) = opened(IntervalJoinSpec(wide, wide, ("k",), ("k",), "t", "t", -5, 5), 1, BUDGET_BYTES)

    def give(begin: int, end: int, keys: int) -> None:
        for first in range(begin, end, 100):
            numbers = range(first, first + 100)
            columns = [[n % keys for n in numbers], list(numbers), ["x" * 1_000] * 100]
            arrays = [pa.array(column, kind) for column, kind in zip(columns, wide.types, strict=True)]
            operator.process(first // 100 % 2, pa.RecordBatch.from_arrays(arrays, schema=wide))
            operator.on_watermark(first - 2_000)

    kept: Any = operator._rows._rows  # type: ignore[attr-defined]
    give(0, 6_000, 7)
    assert kept.spill.full
    assert written[0] < 6_000 * 1_000
    give(6_000, 8_000, 10_000)
    assert kept.spill.rows.used
    assert kept.memory_bytes < 1_000 * 1_000, "those that nobody asks for any more have left"

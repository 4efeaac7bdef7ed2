"""Tumbling windows: their instants, slices, sweeping and errors, and DuckDB."""

from __future__ import annotations

import datetime

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from windows_world import TIME, advance, batch_of, plain, spec_of

from cutwater.data.time import MAX_WATERMARK
from cutwater.errors import BuildError, DataError
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.base import Outputs
from cutwater.operators.window.kinds import TumblingWindow
from cutwater.operators.window.spec import WindowAggregateSpec
from keyed_world import opened, rows_of, snapshot
from subtask_context import Subtask


def test_it_agrees_with_duckdb_on_out_of_order_rows_over_many_windows() -> None:
    random = np.random.default_rng(3)
    n, size = 30_000, 1_000_000
    times = np.arange(n, dtype=np.int64) * 3000 - 40_000_000 + random.integers(0, 2_000_000, n)
    batch = pa.record_batch(
        {"t": pa.array(times, pa.timestamp("us")), "k": random.integers(0, 40, n), "v": random.normal(size=n)}
    )
    aggregates = (Aggregate("n", "count"), Aggregate("low", "min", "v"), Aggregate("total", "sum", "v"))
    operator = opened(WindowAggregateSpec(batch.schema, ("k",), "t", TumblingWindow(size), aggregates))
    outputs: Outputs = []
    for start in range(0, n, 1000):
        outputs += operator.process(0, batch.slice(start, 1000))
        outputs += advance(operator, int(times[start : start + 1000].max()) - 2_000_000)
    outputs += advance(operator, MAX_WATERMARK)
    assert {number for number, _ in outputs} == {0}
    table = pa.Table.from_batches([batch])
    expected = (
        duckdb.from_arrow(table)
        .query(
            "rows",
            """select k, time_bucket(interval 1 second, t, timestamp '1970-01-01') s, count(*), min(v), sum(v)
            from rows group by all order by s, k""",
        )
        .fetchall()
    )
    got = [tuple(row.values()) for row in rows_of(outputs)]
    got.sort(key=lambda row: (row[1], row[0]))
    assert len(got) == len(expected) > 3000
    for ours, theirs in zip(got, expected, strict=True):
        assert (*ours[:2], *ours[3:5]) == theirs[:4]
        assert ours[2] - ours[1] == datetime.timedelta(seconds=1)
        assert ours[5] == pytest.approx(theirs[4])


def test_a_window_fires_at_its_last_instant_and_not_before() -> None:
    operator = opened(spec_of(TumblingWindow(10)))
    operator.process(0, batch_of([(5, "a", 1)]))
    assert operator.on_watermark(8) == []
    assert [row["count_v"] for row in rows_of(operator.on_watermark(9))] == [1]
    assert operator.on_watermark(MAX_WATERMARK) == []


def test_a_row_is_late_from_the_instant_its_window_is_forgotten() -> None:
    operator = opened(spec_of(TumblingWindow(10), lateness=5))
    operator.on_watermark(12)
    assert [number for number, _ in operator.process(0, batch_of([(5, "a", 1)]))] == [0]
    operator.on_watermark(13)
    assert [s.batch.num_rows for s in snapshot(operator)] == [16, 1]
    operator.on_watermark(14)
    assert [s.batch.num_rows for s in snapshot(operator)] == [16], "16 key groups have a watermark, no window is open"
    late = operator.process(0, batch_of([(5, "a", 1), (10, "a", 2)]))
    assert [(number, part.num_rows) for number, part in late] == [(1, 1)]
    assert late[0][1].schema == batch_of([]).schema


def test_each_late_row_within_lateness_sends_its_key_again() -> None:
    operator = opened(spec_of(TumblingWindow(10), lateness=100))
    operator.process(0, batch_of([(5, "a", 1), (6, "b", 2), (25, "a", 7)]))
    operator.on_watermark(12)
    again = plain(operator.process(0, batch_of([(7, "b", 3), (8, "c", 4), (9, "b", 5), (26, "a", 1)])))
    assert [(row["k"], row["sum_v"]) for row in again] == [("b", 5), ("c", 4), ("b", 10)]
    assert [(row["k"], row["sum_v"]) for row in plain(operator.on_watermark(40))] == [("a", 8)]


@pytest.mark.parametrize("rows", [70_000, 200_000])
def test_firing_is_cut_into_bounded_slices_that_lose_nothing(rows: int) -> None:
    keys = np.arange(rows)
    batch = pa.record_batch({"t": pa.array(keys % 30, pa.timestamp("us")), "k": keys, "v": keys})
    spec = WindowAggregateSpec(batch.schema, ("k",), "t", TumblingWindow(10), (Aggregate("n", "sum", "v"),))
    operator = opened(spec)
    operator.process(0, batch)
    parts = [operator.on_watermark(MAX_WATERMARK)]
    while operator.pending:
        parts.append(operator.resume())
    assert len(parts) == -(-rows // 65536)
    fired = pa.Table.from_batches([part for outputs in parts for _, part in outputs])
    assert all(part.num_rows <= 65536 for outputs in parts for _, part in outputs)
    np.testing.assert_array_equal(fired["k"].to_numpy(), keys[np.argsort(keys % 30 // 10, kind="stable")])
    np.testing.assert_array_equal(fired["n"].to_numpy(), fired["k"].to_numpy())


def test_rows_that_come_while_windows_are_firing_do_not_disturb_them() -> None:
    rows = 100_000
    batch = pa.record_batch({"t": pa.array([0] * rows, pa.timestamp("us")), "k": np.arange(rows), "v": np.arange(rows)})
    spec = WindowAggregateSpec(batch.schema, ("k",), "t", TumblingWindow(10), (Aggregate("n", "count"),), 50)
    operator = opened(spec)
    operator.process(0, batch)
    first = operator.on_watermark(9)
    assert operator.pending
    rest = operator.process(0, batch.slice(0, 2))
    assert not operator.pending
    got = [row["n"] for row in rows_of(first + rest)]
    assert got == [1] * rows + [2, 2]


def test_state_of_forgotten_windows_is_swept_out() -> None:
    operator = opened(spec_of(TumblingWindow(10)))
    for number in range(300):
        operator.process(0, batch_of([(10 * number + i % 20, f"k{i}", i) for i in range(100)]))
        advance(operator, 10 * number)
    assert len(operator._windows.table) < 3 * 4096  # type: ignore[attr-defined]
    assert sum(s.batch.num_rows for s in snapshot(operator) if s.name == "window") <= 200
    last = plain(advance(operator, MAX_WATERMARK))
    assert sum(int(row["count_v"]) for row in last) == 150  # type: ignore[call-overload]


def test_what_comes_after_the_freeze_is_not_in_the_segments() -> None:
    operator = opened(spec_of(TumblingWindow(10), lateness=10))
    operator.process(0, batch_of([(i, f"k{i % 7}", i) for i in range(50)]))
    advance(operator, 20)
    at_once = snapshot(operator)
    frozen = operator.freeze(2)
    advance(operator, 45)
    operator.process(0, batch_of([(i + 10, f"n{i % 9}", i) for i in range(60)]))
    advance(operator, MAX_WATERMARK)
    assert [s.batch.to_pylist() for s in frozen.segments()] == [s.batch.to_pylist() for s in at_once]


def test_a_null_event_time_is_refused_with_its_row() -> None:
    rows = pa.record_batch({"t": pa.array([1, None], TIME), "k": ["a", "b"], "v": pa.array([1, 2], pa.int32())})
    with pytest.raises(DataError, match=r"event time 't' is null in row 1 of the batch: .*k: 'b'"):
        opened(spec_of(TumblingWindow(10))).process(0, rows)


def test_an_event_time_that_would_overflow_is_refused() -> None:
    for time in (2**63 - 1, -(2**63)):
        rows = batch_of([(0, "a", 1)])
        rows = rows.set_column(0, "t", pa.array([time], TIME))
        with pytest.raises(DataError, match="in row 0 of the batch"):
            opened(spec_of(TumblingWindow(10))).process(0, rows)


def test_what_cannot_work_is_refused_when_built() -> None:
    schema = pa.schema([("t", pa.timestamp("ms")), ("u", pa.timestamp("us")), ("k", pa.int8())])
    count = (Aggregate("n", "count"),)
    hour = TumblingWindow(3_600_000_000)
    refused = {
        "'t' is timestamp.ms., not timestamp.us.": (("k",), "t", hour, count, 0),
        "no such event-time column 'w'": (("k",), "w", hour, count, 0),
        "named 'window_end'": (("k",), "u", hour, (Aggregate("window_end", "count"),), 0),
        "named 'window_fired'": (("k",), "u", hour, (Aggregate("window_fired", "count"),), 0),
        "allowed lateness -1": (("k",), "u", hour, count, -1),
        "no aggregate": (("k",), "u", hour, (), 0),
    }
    for message, arguments in refused.items():
        with pytest.raises(BuildError, match=message):
            WindowAggregateSpec(schema, *arguments)
    for size, offset in ((0, 0), (-5, 0), (10, 10), (2**61, 0)):
        with pytest.raises(BuildError):
            TumblingWindow(size, offset)


def test_the_context_counts_late_rows() -> None:
    operator = opened(spec_of(TumblingWindow(10)))
    context = operator.ctx  # type: ignore[attr-defined]
    assert isinstance(context, Subtask)
    operator.on_watermark(100)
    operator.process(0, batch_of([(1, "a", 1), (2, "a", 1), (200, "a", 1)]))
    assert context.counters["rows_late"] == 2

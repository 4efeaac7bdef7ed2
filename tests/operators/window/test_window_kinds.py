"""Sliding windows, sessions and early results: large streams against DuckDB, the clock, what a freeze holds, errors."""

from __future__ import annotations

import re
from dataclasses import dataclass

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from windows_world import advance, batch_of, plain, spec_of

from cutwater.data.time import MAX_WATERMARK
from cutwater.errors import BuildError
from cutwater.operators.aggregate import kernels as aggregate_kernels
from cutwater.operators.aggregate import value_accumulators
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.base import Operator, Outputs
from cutwater.operators.window import session_operator
from cutwater.operators.window import sliced_operator as window_slices
from cutwater.operators.window.kinds import Early, GlobalWindow, SessionWindow, SlidingWindow, TumblingWindow, Window
from cutwater.operators.window.spec import WindowAggregateSpec
from keyed_world import opened, rescaled, rows_of, snapshot
from subtask_context import Subtask

ROWS = 20_000
SECOND = 1_000_000


def stream(seed: int = 3) -> pa.RecordBatch:
    """Rows out of order by up to two seconds; each key is silent now and then."""
    random = np.random.default_rng(seed)
    times = np.arange(ROWS, dtype=np.int64) * 3000 - 20 * SECOND + random.integers(0, 2 * SECOND, ROWS)
    values = pa.array(random.normal(size=ROWS), mask=random.random(ROWS) < 0.1)
    keys = [f"key {k}" for k in random.integers(0, 40, ROWS)]
    return pa.record_batch({"t": pa.array(times, pa.timestamp("us")), "k": keys, "v": values, "i": np.arange(ROWS)})


def run(window: Window, batch: pa.RecordBatch, aggregates: tuple[Aggregate, ...], rescale: bool = True) -> Outputs:
    """The whole stream, restored in its midst by two subtasks that both take every row of their own keys."""
    spec = WindowAggregateSpec(batch.schema, ("k",), "t", window, aggregates)
    operator: Operator = opened(spec)
    outputs: Outputs = []
    times = batch.column("t").cast(pa.int64()).to_numpy()
    for start in range(0, ROWS, 1000):
        outputs += operator.process(0, batch.slice(start, 1000))
        outputs += advance(operator, int(times[start : start + 1000].max()) - 2 * SECOND)
        if rescale and start == ROWS // 2:
            halves = [segment for half in rescaled(spec, snapshot(operator), 2) for segment in snapshot(half)]
            (operator,) = rescaled(spec, halves, 1)
    outputs += advance(operator, MAX_WATERMARK)
    assert {number for number, _ in outputs} == {0}
    return outputs


AGGREGATES = (
    Aggregate("n", "count"),
    Aggregate("values", "count", "v"),
    Aggregate("low", "min", "v"),
    Aggregate("total", "sum", "v"),
    Aggregate("first", "first", "i"),
    Aggregate("last", "last", "i"),
)
SELECTED = "count(*) n, count(v), min(v), sum(v), min(i), max(i)"


def compare(outputs: Outputs, batch: pa.RecordBatch, query: str) -> None:
    rows = pa.Table.from_batches([batch])
    expected = duckdb.from_arrow(rows).query("rows", query).fetchall()
    got = sorted(tuple(row.values()) for row in rows_of(outputs))
    assert len(got) == len(expected) > 500
    for ours, theirs in zip(got, sorted(expected), strict=True):
        assert (*ours[:6], *ours[7:]) == (*theirs[:6], *theirs[7:])
        assert ours[6] == pytest.approx(theirs[6])


@pytest.mark.parametrize(("size", "every"), [(10, 2), (7, 3), (3, 5)])
def test_sliding_windows_agree_with_duckdb(size: int, every: int) -> None:
    batch = stream()
    outputs = run(SlidingWindow(size * SECOND, every * SECOND, SECOND), batch, AGGREGATES)
    first = 1 - every * (60 // every)  # a start of a window, before all rows
    query = f"""select k, s, s + interval {size} second, {SELECTED} from rows,
        (select timestamp '1970-01-01' + interval 1 second * s from range({first}, 60, {every}) r(s)) w(s)
        where t >= s and t < s + interval {size} second group by all"""
    compare(outputs, batch, query)


def test_sessions_agree_with_duckdb() -> None:
    batch = stream()
    gap = 150_000
    outputs = run(SessionWindow(gap), batch, AGGREGATES)
    query = f"""with marked as (select *, coalesce(t - lag(t) over w > interval {gap} microsecond, true) fresh
            from rows window w as (partition by k order by t)),
        numbered as (select *, sum(fresh::int) over (partition by k order by t rows unbounded preceding) s from marked)
        select k, min(t), max(t) + interval {gap} microsecond, {SELECTED} from numbered group by k, s"""
    compare(outputs, batch, query)


def test_a_row_of_a_sliding_window_is_taken_once() -> None:
    """The point of slices: 60 windows over a row, one update."""
    spec = spec_of(SlidingWindow(60, 1))
    operator = opened(spec)
    updates: list[int] = []
    table = operator._slices.table  # type: ignore[attr-defined]
    count = table.accumulators[0]
    inner = count.update
    count.update = lambda gids, batch: (updates.append(len(gids)), inner(gids, batch))
    operator.process(0, batch_of([(t, "a", t) for t in range(100)]))
    assert sum(updates) == 100
    assert len(table) == 100
    results = plain(advance(operator, MAX_WATERMARK))
    assert len(results) == 159
    assert max(int(r["count_v"]) for r in results) == 60  # type: ignore[call-overload]


@pytest.mark.parametrize("window", [SlidingWindow(10, 4), SessionWindow(4), GlobalWindow()], ids=str)
@pytest.mark.parametrize("discarding", [False, True])
def test_what_comes_after_the_freeze_is_not_in_the_segments(window: Window, discarding: bool) -> None:
    lateness, early = (0, Early(rows=3)) if isinstance(window, GlobalWindow) else (10, None)
    operator = opened(spec_of(window, lateness, early, discarding=discarding))
    operator.process(0, batch_of((i * 2, f"k{i % 7}", i) for i in range(50)))
    advance(operator, 20)
    at_once = snapshot(operator)
    assert sum(s.batch.num_rows for s in at_once) > 20
    frozen = operator.freeze(2)
    operator.process(0, batch_of((i + 14, f"k{i % 9}", i) for i in range(60)))
    advance(operator, 45)
    operator.process(0, batch_of((i + 46, f"n{i % 9}", i) for i in range(60)))
    advance(operator, MAX_WATERMARK)
    assert [s.batch.to_pylist() for s in frozen.segments()] == [s.batch.to_pylist() for s in at_once]


@pytest.mark.parametrize("window", [SlidingWindow(20, 10), SessionWindow(7)], ids=str)
def test_state_of_forgotten_windows_is_swept_out(window: Window) -> None:
    operator = opened(spec_of(window))
    for number in range(250):
        operator.process(0, batch_of((10 * number + i % 20, f"k{number % 3}-{i}", i) for i in range(100)))
        advance(operator, 10 * number)
    assert len(operator._windows.table) < 10_000  # type: ignore[attr-defined]
    assert sum(s.batch.num_rows for s in snapshot(operator) if s.name != "watermark") <= 600


def test_a_session_that_came_out_and_goes_on_comes_out_again() -> None:
    operator = opened(spec_of(SessionWindow(5), lateness=100))
    operator.process(0, batch_of([(0, "a", 1), (20, "a", 2)]))
    short = ("window_start", "window_end", "sum_v")
    got = lambda outputs: [tuple(row[name] for name in short) for row in plain(outputs)]  # noqa: E731
    assert got(advance(operator, 10)) == [(0, 5, 1)]
    assert got(operator.process(0, batch_of([(3, "a", 4)]))) == [(0, 8, 5)], "at once: its end is behind the watermark"
    bridge = operator.process(0, batch_of([(8, "a", 8), (13, "a", 16), (17, "a", 32)]))
    assert got(bridge) == [], "they carry it beyond the watermark, and to the session at 20"
    assert got(advance(operator, 23)) == []
    assert got(advance(operator, 24)) == [(0, 25, 63)]


def test_results_of_one_row_each_are_merged_before_and_not_after() -> None:
    """A row that connects two sessions which came out in the same batch."""
    operator = opened(spec_of(SessionWindow(5), lateness=100))
    operator.on_watermark(50)
    rows = [(0, "a", 1), (8, "a", 2), (4, "a", 4), (0, "a", 8)]
    assert [row["sum_v"] for row in plain(operator.process(0, batch_of(rows)))] == [1, 2, 7, 15]


@dataclass
class Clocked(Subtask):
    """A context with a clock that the test sets."""

    now_ms: int = 1_000_500

    def processing_time_ms(self) -> int:
        return self.now_ms


@pytest.mark.parametrize("window", [TumblingWindow(100), SlidingWindow(100, 50), SessionWindow(100), GlobalWindow()])
@pytest.mark.parametrize("discarding", [False, True])
def test_early_results_by_the_clock(window: Window, discarding: bool) -> None:
    spec = spec_of(window, early=Early(processing_time_us=1_000_000), discarding=discarding)
    operator = spec.build()
    clock = Clocked()
    operator.open(clock)
    assert (operator.next_processing_time_ms, operator.timers_pending) == (None, False)
    operator.process(0, batch_of([(75, "a", 1), (80, "b", 2)]))
    assert (operator.next_processing_time_ms, operator.timers_pending) == (1_001_000, True)
    segments = snapshot(operator)
    windows = 2 if isinstance(window, SlidingWindow) else 1
    for it in (operator, *(restored(spec, segments, clock),)):
        assert it.next_processing_time_ms == 1_001_000, "what waits, waits after a restore too"
        clock.now_ms = 1_001_000
        early = plain(it.on_processing_time(1_001_000))
        assert sorted((r["k"], r["sum_v"]) for r in early) == [("a", 1)] * windows + [("b", 2)] * windows
        assert it.next_processing_time_ms is None, "nothing has come since"
        it.process(0, batch_of([(76, "b", 4)]))
        assert it.next_processing_time_ms == 1_002_000
        later = plain(it.on_processing_time(1_002_000))
        assert [(r["k"], r["sum_v"]) for r in later] == [("b", 4 if discarding else 6)] * windows
        assert len(plain(advance(it, MAX_WATERMARK))) == (0 if discarding else 2 * windows)
        clock.now_ms = 1_000_500


def restored(spec: WindowAggregateSpec, segments: list, clock: Clocked) -> Operator:
    operator = spec.build()
    operator.open(clock)
    operator.restore(segments)
    return operator


def test_early_results_by_the_clock_come_in_bounded_slices() -> None:
    rows = 100_000
    batch = pa.record_batch({"t": pa.array([0] * rows, pa.timestamp("us")), "k": np.arange(rows), "v": np.arange(rows)})
    early = Early(processing_time_us=1000)
    spec = WindowAggregateSpec(batch.schema, ("k",), None, GlobalWindow(), (Aggregate("n", "count"),), 0, early)
    operator = spec.build()
    operator.open(Clocked())
    operator.process(0, batch)
    due = operator.next_processing_time_ms
    assert due is not None
    parts = [operator.on_processing_time(due)[0][1].num_rows]
    while operator.next_processing_time_ms is not None:
        assert operator.next_processing_time_ms == due
        parts.append(operator.on_processing_time(due)[0][1].num_rows)
    assert parts == [65536, rows - 65536]
    assert advance(operator, MAX_WATERMARK)[0][1].column_names == ["k", "n"]


def test_what_cannot_work_is_refused_when_built() -> None:
    for make, message in (
        (lambda: SlidingWindow(0, 1), "window size 0 us"),
        (lambda: SlidingWindow(1, 0), "distance of windows 0 us"),
        (lambda: SlidingWindow(10, 5, 5), "offset 5 us is not below the distance of windows, 5 us"),
        (lambda: SessionWindow(0), "session gap 0 us"),
        (lambda: SessionWindow(2**61), "session gap"),
        (Early, "not 0 of them"),
        (lambda: Early(rows=1, event_time_us=1), "not 2 of them"),
        (lambda: Early(rows=0), "every 0 rows"),
        (lambda: Early(event_time_us=0), "distance of early results 0 us"),
        (lambda: spec_of(GlobalWindow(), 5), "the global window has no late rows"),
        (lambda: spec_of(SessionWindow(5), aggregates=(Aggregate("window_end", "count"),)), "named 'window_end'"),
        (lambda: spec_of(TumblingWindow(5), early=Early(rows=1), aggregates=(Aggregate("window_pending", "count"),)),
         "named 'window_pending'"),
    ):  # fmt: skip
        with pytest.raises(BuildError, match=re.escape(message)):
            make()


class TestPlantedBugs:
    """What the comparison with DuckDB must see."""

    def test_a_slice_put_into_a_window_twice(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def twice(self, due):
            for begin, gids in whole(self, due):
                yield begin, np.concatenate([gids, gids[:1]])

        whole = window_slices.SlicedWindowAggregate._to_put_together
        monkeypatch.setattr(window_slices.SlicedWindowAggregate, "_to_put_together", twice)
        with pytest.raises(AssertionError):
            test_sliding_windows_agree_with_duckdb(10, 2)

    def test_a_merge_that_forgets_one_side(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(session_operator.SessionTable, "_swallow", lambda self, gone: None)
        with pytest.raises(AssertionError):
            test_sessions_agree_with_duckdb()

    @pytest.mark.parametrize("owner", [value_accumulators.Count, value_accumulators.Pick], ids=["count", "min"])
    def test_a_merge_that_overwrites(self, owner: type, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(owner, "merge", owner.restore)
        with pytest.raises(AssertionError):
            test_sessions_agree_with_duckdb()

    def test_a_late_row_in_a_forgotten_window(self, monkeypatch: pytest.MonkeyPatch) -> None:
        operator = opened(spec_of(SlidingWindow(10, 5)))
        operator.on_watermark(30)
        reached = type(operator)._reached
        monkeypatch.setattr(type(operator), "_reached", lambda self, batch: reached(self, batch) - 100)
        outputs = operator.process(0, batch_of([(1, "a", 1)]))
        assert [number for number, _ in outputs] != [1], "what test_windows_all demands of late rows"

    def test_first_and_last_without_their_order(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            aggregate_kernels, "take_orders", lambda gids, orders, first, held: held.put(gids, orders + 1)
        )
        with pytest.raises(AssertionError):
            test_sliding_windows_agree_with_duckdb(7, 3)

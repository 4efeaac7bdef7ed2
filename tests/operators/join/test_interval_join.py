"""Interval joins against a brute-force oracle and DuckDB: pairs, order, late rows, snapshots, rescale."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest

from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.errors import BuildError, DataError, StorageError
from cutwater.operators.join import two_sided
from cutwater.operators.join.spec import IntervalJoinSpec
from cutwater.operators.join.two_sided import IntervalJoin
from cutwater.state.keys import hash_keys, key_group_owner, key_groups
from cutwater.state.rows import rows as rows_by_key
from cutwater.state.segments import GROUP_COLUMN, Segment

LEFT = pa.schema({"k": pa.int64(), "t": pa.timestamp("us"), "id": pa.int64(), "note": pa.string()})
RIGHT = pa.schema({"k": pa.int64(), "t": pa.timestamp("us"), "id": pa.int64(), "tags": pa.list_(pa.string())})
NAMES = ["k", "t", "id", "note", "t_right", "id_right", "tags"]


def spec(lower: int = -50, upper: int = 30, **changes: Any) -> IntervalJoinSpec:
    given: dict[str, Any] = {
        "left_schema": LEFT,
        "right_schema": RIGHT,
        "left_keys": ("k",),
        "right_keys": ("k",),
        "left_time": "t",
        "right_time": "t",
        "lower_us": lower,
        "upper_us": upper,
    }
    return IntervalJoinSpec(**(given | changes))


@dataclass
class Event:
    """What reaches the operator: rows of one side, or a watermark."""

    side: int = 0
    rows: pa.RecordBatch | None = None
    watermark: int = MIN_WATERMARK


def history(seed: int, events: int = 40, rows: int = 30, keys: int = 6, start: int = 0) -> list[Event]:
    """Rows around an advancing time, some of them late, and watermarks in between."""
    rng = np.random.default_rng(seed)
    made: list[Event] = []
    now, number = start, 0
    for _ in range(events):
        if rng.random() < 0.3:
            made.append(Event(watermark=now - int(rng.integers(0, 40))))
            continue
        n, side = int(rng.integers(0, rows)), int(rng.integers(0, 2))
        columns = [
            pa.array(rng.integers(0, keys, n)),
            pa.array(now + rng.integers(-60, 60, n), pa.timestamp("us")),
            pa.array(np.arange(number, number + n)),
            pa.array([None if i % 5 == 0 else f"n{i}" for i in range(n)], pa.string())
            if side == 0
            else pa.array([None if i % 4 == 0 else ["a"] * (i % 3) for i in range(n)], pa.list_(pa.string())),
        ]
        made.append(Event(side, pa.RecordBatch.from_arrays(columns, schema=(LEFT, RIGHT)[side])))
        number, now = number + n, now + int(rng.integers(0, 30))
    return made


def cut(events: list[Event], rows: int) -> list[Event]:
    """The same rows in batches of at most ``rows``."""
    parts: list[Event] = []
    for event in events:
        if event.rows is None:
            parts.append(event)
        else:
            parts += [Event(event.side, event.rows.slice(i, rows)) for i in range(0, event.rows.num_rows, rows)]
    return parts


class Driver:
    """Feeds events to one subtask and collects what comes out of each output."""

    def __init__(self, join: IntervalJoinSpec, ctx: Any) -> None:
        self.operator: Any = join.build()
        assert isinstance(self.operator, IntervalJoin)
        self.operator.open(ctx)
        self.join = join
        self.ctx = ctx
        self.out: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
        self.sizes: list[int] = []

    def feed(self, events: list[Event]) -> Driver:
        for event in events:
            if event.rows is None:
                self.collect(self.operator.on_watermark(event.watermark))
            else:
                self.collect(self.operator.process(event.side, event.rows))
            while self.operator.pending:
                self.collect(self.operator.resume())
        return self

    def collect(self, outputs: list[tuple[int, pa.RecordBatch]]) -> None:
        for number, batch in outputs:
            assert batch.schema == self.join.outputs[number]
            assert batch.num_rows > 0
            self.sizes.append(batch.num_rows)
            self.out[number].extend(tuple(row.values()) for row in batch.to_pylist())

    def snapshot(self) -> list[Segment]:
        frozen = self.operator.freeze(1)
        segments = list(frozen.segments())
        frozen.release()
        return segments


def brute_force(events: list[Event], lower: int, upper: int) -> tuple[list[Any], list[Any], list[Any]]:
    """Row by row in arrival order, by the definition alone."""
    watermark = MIN_WATERMARK
    seen: tuple[list[Any], list[Any]] = ([], [])
    out: tuple[list[Any], list[Any], list[Any]] = ([], [], [])
    for event in events:
        if event.rows is None:
            watermark = max(watermark, event.watermark)
            continue
        micros = event.rows.column("t").cast(pa.int64()).to_pylist()
        for time, row in zip(micros, event.rows.to_pylist(), strict=True):
            values = tuple(row.values())
            if time <= watermark:
                out[1 + event.side].append(values)
                continue
            seen[event.side].append((time, values))
            for other_time, other in seen[1 - event.side]:
                left, right = (values, other) if event.side == 0 else (other, values)
                apart = other_time - time if event.side == 0 else time - other_time
                if left[0] == right[0] and lower <= apart <= upper:
                    out[0].append(left + right[1:])
    return out


BOUNDS = [(-50, 30), (0, 0), (-100, -20), (10, 60), (-1000, 1000), (0, 0)]


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("seed", range(3))
def test_pairs_and_late_rows_are_those_of_the_definition_in_order(
    make_context: Callable[..., Any], bounds: tuple[int, int], seed: int
) -> None:
    events = history(seed)
    driver = Driver(spec(*bounds), make_context()).feed(events)
    expected = brute_force(events, *bounds)
    assert driver.out == expected
    assert driver.ctx.counters["rows_late"] == len(expected[1]) + len(expected[2]) > 0


@pytest.mark.parametrize("rows", [1, 3, 7])
def test_result_does_not_depend_on_how_rows_are_cut_into_batches(make_context: Callable[..., Any], rows: int) -> None:
    events = history(11)
    whole = Driver(spec(), make_context()).feed(events)
    parts = Driver(spec(), make_context()).feed(cut(events, rows))
    assert parts.out == whole.out
    assert len(whole.out[0]) > 100


def test_large_join_equals_the_database(make_context: Callable[..., Any]) -> None:
    rng = np.random.default_rng(3)
    n = 4000
    sides = [
        pa.record_batch(
            {
                "k": pa.array(rng.integers(0, 100, n)),
                "t": pa.array(rng.integers(-(10**6), 10**6, n), pa.timestamp("us")),
                "id": pa.array(np.arange(n)),
            }
        )
        for _ in range(2)
    ]
    database = duckdb.connect()
    for name, side in zip(("lefts", "rights"), sides, strict=True):
        database.register(name, pa.Table.from_batches([side]))
    expected = database.sql(
        "select l.id, r.id from lefts as l join rights as r on l.k = r.k "
        "and epoch_us(r.t) - epoch_us(l.t) between -50000 and 30000"
    ).fetchall()
    join = spec(-50_000, 30_000, left_schema=sides[0].schema, right_schema=sides[1].schema)
    driver = Driver(join, make_context())
    for at in range(0, n, 500):
        driver.feed([Event(s, sides[s].slice(at, 500)) for s in (0, 1)])
    assert sorted((row[2], row[4]) for row in driver.out[0]) == sorted(expected)
    assert len(expected) > 1000


@pytest.mark.parametrize("stop", [0, 1, 9, 25, 40])
def test_restore_in_the_middle_equals_never_having_stopped(make_context: Callable[..., Any], stop: int) -> None:
    events = history(21)
    never = Driver(spec(), make_context()).feed(events)
    first = Driver(spec(), make_context()).feed(events[:stop])
    second = Driver(spec(), make_context())
    second.operator.restore(first.snapshot())
    second.feed(events[stop:])
    assert tuple(a + b for a, b in zip(first.out, second.out, strict=True)) == never.out


def test_snapshot_is_not_touched_by_what_comes_after_the_freeze(make_context: Callable[..., Any]) -> None:
    events = history(22)
    driver = Driver(spec(), make_context()).feed(events[:20])
    at_once = driver.snapshot()
    frozen = driver.operator.freeze(2)
    driver.feed(events[20:])
    driver.feed([Event(watermark=MAX_WATERMARK)])
    later = list(frozen.segments())
    assert [(s.name, s.kind, s.key_groups, s.batch.to_pydict()) for s in later] == [
        (s.name, s.kind, s.key_groups, s.batch.to_pydict()) for s in at_once
    ]
    assert sum(s.batch.num_rows for s in later if s.name != "watermark") > 10


def owned_by(events: list[Event], subtask: int, parallelism: int) -> list[Event]:
    parts: list[Event] = []
    for event in events:
        if event.rows is not None:
            groups = key_groups(hash_keys([event.rows.column("k")]), 16)
            mask = [key_group_owner(int(g), parallelism, 16) == subtask for g in groups]
            event = Event(event.side, event.rows.filter(pa.array(mask, pa.bool_())))
        parts.append(event)
    return parts


@pytest.mark.parametrize("before", [1, 2, 5])
@pytest.mark.parametrize("after", [1, 3, 4])
def test_snapshot_restores_at_another_parallelism(make_context: Callable[..., Any], before: int, after: int) -> None:
    events, stop = history(31, keys=40, events=60), 30
    never = Driver(spec(), make_context(0, 1, 16)).feed(events)
    first = [
        Driver(spec(), make_context(i, before, 16)).feed(owned_by(events[:stop], i, before)) for i in range(before)
    ]
    segments = [segment for driver in first for segment in driver.snapshot()]
    second = [Driver(spec(), make_context(i, after, 16)) for i in range(after)]
    for i, driver in enumerate(second):
        driver.operator.restore(segments)
        driver.feed(owned_by(events[stop:], i, after))
    for output in range(3):
        together = [row for driver in (*first, *second) for row in driver.out[output]]
        assert sorted(map(repr, together)) == sorted(map(repr, never.out[output]))


def test_rows_that_were_late_stay_late_after_subtasks_of_different_watermarks_merge(
    make_context: Callable[..., Any],
) -> None:
    keys = {owner: next(k for k in range(99) if group(k) // 8 == owner) for owner in (0, 1)}
    first = [Driver(spec(), make_context(i, 2, 16)).feed([Event(watermark=w)]) for i, w in enumerate((100, 500))]
    merged = Driver(spec(), make_context(0, 1, 16))
    merged.operator.restore([s for driver in first for s in driver.snapshot()])
    merged.feed([Event(0, left([keys[0], keys[1]], [200, 200]))])
    assert [row[0] for row in merged.out[1]] == [keys[1]]
    again = Driver(spec(), make_context(0, 1, 16))
    again.operator.restore(merged.snapshot())
    again.feed([Event(0, left([keys[1]], [499])), Event(watermark=600), Event(0, left([keys[0]], [599]))])
    assert [row[0] for row in again.out[1]] == [keys[1], keys[0]]


def group(key: int) -> int:
    return int(key_groups(hash_keys([pa.array([key])]), 16)[0])


def left(keys: list[int], times: list[int], note: str = "x") -> pa.RecordBatch:
    n = len(keys)
    columns = [
        pa.array(keys),
        pa.array(times, pa.timestamp("us")),
        pa.array(range(n), pa.int64()),
        pa.array([note] * n),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=LEFT)


def right(keys: list[int], times: list[int]) -> pa.RecordBatch:
    n = len(keys)
    columns = [
        pa.array(keys),
        pa.array(times, pa.timestamp("us")),
        pa.array(range(n), pa.int64()),
        pa.nulls(n, RIGHT.field("tags").type),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=RIGHT)


def test_bounds_are_inclusive(make_context: Callable[..., Any]) -> None:
    driver = Driver(spec(-50, 30), make_context())
    driver.feed([Event(0, left([1], [1000])), Event(1, right([1] * 4, [949, 950, 1030, 1031]))])
    assert [row[5] for row in driver.out[0]] == [1, 2]


def test_w1_a_row_at_the_watermark_is_late_and_the_next_one_finds_its_partners(
    make_context: Callable[..., Any],
) -> None:
    driver = Driver(spec(-50, 30), make_context())
    driver.feed([Event(0, left([1], [100])), Event(watermark=129), Event(1, right([1, 1], [129, 130]))])
    assert [row[4] for row in driver.out[0]] == [dt.datetime(1970, 1, 1, microsecond=130)]
    assert len(driver.out[2]) == 1


def test_rows_that_can_match_nothing_any_more_are_not_in_the_snapshot(make_context: Callable[..., Any]) -> None:
    driver = Driver(spec(-50, 30), make_context())
    driver.feed([Event(0, left([1, 2], [100, 101])), Event(1, right([1, 2], [180, 181])), Event(watermark=130)])
    rows = {s.name: s.batch.column("k").to_pylist() for s in driver.snapshot() if s.name != "watermark"}
    assert rows == {"left": [2], "right": [1, 2]} or rows == {"left": [2], "right": [2, 1]}
    driver.feed([Event(watermark=MAX_WATERMARK)])
    assert [s.name for s in driver.snapshot()] == ["watermark"]


def test_memory_is_given_back_while_the_watermark_moves(
    make_context: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_by_key, "_SLACK_ROWS", 64)
    events: list[Event] = []
    for step in range(200):
        events += [Event(0, left([step % 7] * 10, list(range(step * 10, step * 10 + 10))))]
        events += [Event(1, right([step % 7 + 1000 * step], [step * 10])), Event(watermark=step * 10)]
    driver = Driver(spec(), make_context()).feed(events)
    assert driver.out == brute_force(events, -50, 30)
    assert sum(side.rows for side in driver.operator._sides) < 500
    assert len(driver.operator._index) < 300


def test_sweeping_at_every_step_changes_no_result(
    make_context: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_by_key, "_SLACK_ROWS", 0)
    events = history(41, events=120)
    assert Driver(spec(), make_context()).feed(events).out == brute_force(events, -50, 30)


def test_sweep_spares_the_row_that_can_just_be_matched(
    make_context: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_by_key, "_SLACK_ROWS", 0)
    driver = Driver(spec(-50, 30), make_context())
    driver.feed([Event(0, left([1] * 11, [0] * 10 + [100])), Event(watermark=129), Event(1, right([1], [130]))])
    assert driver.operator._sides[0].rows == 1
    assert [row[2] for row in driver.out[0]] == [10]


def test_many_pairs_come_in_bounded_batches_in_order(make_context: Callable[..., Any]) -> None:
    n = 300
    events = [Event(0, left([7] * n, [0] * n)), Event(1, right([7] * n, [0] * n))]
    driver = Driver(spec(), make_context()).feed(events)
    assert driver.sizes == [65_536, 90_000 - 65_536]
    assert [(row[5], row[2]) for row in driver.out[0]] == [(r, x) for r in range(n) for x in range(n)]


def test_long_chain_without_matches_is_walked_in_bounded_calls(
    make_context: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(two_sided, "_MAX_STEPS", 1000)
    driver = Driver(spec(0, 0), make_context())
    driver.feed([Event(0, left([1] * 3000, list(range(3000))))])
    calls = 1
    driver.collect(driver.operator.process(1, right([1, 1], [2999, 5])))
    while driver.operator.pending:
        driver.collect(driver.operator.resume())
        calls += 1
    assert [row[2] for row in driver.out[0]] == [2999, 5]
    assert calls >= 6


def test_ten_megabyte_texts_are_joined_stored_and_restored(make_context: Callable[..., Any]) -> None:
    big = "x" * 10_000_000
    driver = Driver(spec(), make_context())
    driver.operator.process(0, left([1] * 3, [0] * 3, note=big))
    segments = driver.snapshot()
    again = Driver(spec(), make_context())
    again.operator.restore(segments)
    outputs = again.operator.process(1, right([1] * 12, [0] * 12))
    assert outputs[0][1].num_rows == 26  # 256 MiB of them
    assert again.operator.pending
    assert outputs[0][1].column("note")[0].as_py() == big
    while again.operator.pending:
        outputs += again.operator.resume()
    assert sum(batch.num_rows for _, batch in outputs) == 36


def test_snapshot_of_wide_rows_of_one_key_is_cut_into_base_and_deltas(
    make_context: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cutwater.state.rows.keyed_rows.rows_per_batch", lambda _: 4)
    driver = Driver(spec(), make_context()).feed([Event(0, left([1] * 10 + [2] * 3, list(range(13))))])
    segments = driver.snapshot()
    assert [s.batch.num_rows for s in segments[1:]] == [4, 4, 4, 1]
    assert [s.kind for s in segments[1:]].count("delta") >= 2
    again = Driver(spec(), make_context())
    again.operator.restore(segments)
    again.feed([Event(1, right([1], [5]))])
    assert [row[2] for row in again.out[0]] == list(range(10))


def test_segments_are_sorted_by_key_group(make_context: Callable[..., Any]) -> None:
    driver = Driver(spec(), make_context(0, 1, 16)).feed(history(51, keys=50)[:10])
    named = [s for s in driver.snapshot() if s.name != "watermark"]
    assert named
    for segment in named:
        groups = segment.batch.column(GROUP_COLUMN).to_pylist()
        assert groups == sorted(groups)
        assert groups == [group(k) for k in segment.batch.column("k").to_pylist()]
        assert segment.key_groups == (groups[0], groups[-1] + 1)


def test_several_keys_of_other_types_and_names(make_context: Callable[..., Any]) -> None:
    a = pa.record_batch(
        {"s": ["x", "x", ""], "n": pa.array([1, 2, 1], pa.int32()), "t": pa.array([0, 0, 0], pa.timestamp("us", "UTC"))}
    )
    b = pa.record_batch(
        {
            "m": pa.array([1, 1], pa.int64()),
            "s": pa.array(["x", ""], pa.large_string()),
            "u": pa.array([0, 1], pa.timestamp("us", "Asia/Tokyo")),
        }
    )
    join = IntervalJoinSpec(a.schema, b.schema, ("s", "n"), ("s", "m"), "t", "u", 0, 1)
    assert join.outputs[0].names == ["s", "n", "t", "m", "u"]
    driver = Driver(join, make_context()).feed([Event(1, b), Event(0, a)])
    assert [row[:2] for row in driver.out[0]] == [("x", 1), ("", 1)]


def test_times_before_1970(make_context: Callable[..., Any]) -> None:
    events = history(61, start=-(10**15))
    assert Driver(spec(), make_context()).feed(events).out == brute_force(events, -50, 30)


def test_empty_batches_make_nothing(make_context: Callable[..., Any]) -> None:
    driver = Driver(spec(), make_context())
    assert driver.operator.process(0, left([], [])) == []
    assert not driver.operator.pending


@pytest.mark.parametrize(("column", "message"), [("k", "key column 'k' is null in row 1"), ("t", "is null in row 1")])
def test_null_key_or_time_is_a_data_error_with_its_row(
    make_context: Callable[..., Any], column: str, message: str
) -> None:
    batch = left([1, 2], [0, 0])
    index = LEFT.get_field_index(column)
    nulled = pa.array([batch.column(index)[0].as_py(), None], LEFT.field(index).type)
    with pytest.raises(DataError, match=message):
        Driver(spec(), make_context()).operator.process(0, batch.set_column(index, LEFT.field(index), nulled))


def test_absurd_time_is_a_data_error(make_context: Callable[..., Any]) -> None:
    with pytest.raises(DataError, match="in row 0") as caught:
        Driver(spec(), make_context()).operator.process(0, left([1], [2**62 + 1]))
    assert caught.value.row == 0


def test_foreign_segment_is_refused(make_context: Callable[..., Any]) -> None:
    with pytest.raises(StorageError, match="'agg'"):
        Driver(spec(), make_context()).operator.restore([Segment("agg", "base", left([], []), (0, 1))])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lower_us": 5, "upper_us": 4}, "interval is empty"),
        ({"upper_us": 2**62}, "at most"),
        ({"left_keys": ("k", "id")}, "2 key columns"),
        ({"left_keys": ("kk",)}, "no such key column 'kk'"),
        ({"left_keys": ("note",)}, "different types"),
        ({"left_time": "tt"}, "no such column 'tt'"),
        ({"left_time": "id"}, r"needs timestamp\[us\]"),
        ({"suffix": ""}, "two columns"),
        ({"right_schema": RIGHT.set(1, pa.field("t", pa.timestamp("us", "UTC")))}, "time zone"),
        ({"right_schema": RIGHT.set(1, pa.field("t", pa.timestamp("ms")))}, r"needs timestamp\[us\]"),
    ],
)
def test_wrong_join_is_refused_when_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        spec(**changes)


def test_output_names() -> None:
    assert spec().outputs[0].names == NAMES
    assert spec().outputs[1:] == (LEFT, RIGHT)

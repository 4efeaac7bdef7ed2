"""Window joins against DuckDB's joins and against a model in plain Python: late rows, order, restores."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_world import Change, Running, pieces, values

from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.errors import BuildError
from cutwater.operators.join import window_operator as window_join_operator
from cutwater.operators.join.spec import WindowJoinSpec, WindowJoinType
from cutwater.operators.window.kinds import SlidingWindow, TumblingWindow
from cutwater.state.rows import rows as rows_by_key
from keyed_world import cuts, opened, owner, rescaled, snapshot

LEFT = pa.schema({"k": pa.int32(), "t": pa.timestamp("us"), "n": pa.int64()})
RIGHT = pa.schema({"k": pa.int64(), "u": pa.timestamp("us"), "text": pa.string()})
KEYS = (("k",), ("k",))
HOWS = get_args(WindowJoinType)
Windows = TumblingWindow | SlidingWindow
WINDOWS = (TumblingWindow(10), TumblingWindow(7, 3), SlidingWindow(10, 4, 1), SlidingWindow(3, 5))
Row = tuple[int, int]  # key, time


def spec_of(windows: Windows, how: WindowJoinType) -> WindowJoinSpec:
    return WindowJoinSpec(LEFT, RIGHT, ("k",), ("k",), "t", "u", windows, how)


def batch_of(side: int, rows: list[Row], first: int) -> pa.RecordBatch:
    numbers = range(first, first + len(rows))
    content = pa.array(numbers) if side == 0 else pa.array([f"r{i}" for i in numbers], pa.string())
    keys, times = pa.array([r[0] for r in rows], pa.int64()), pa.array([r[1] for r in rows], pa.timestamp("us"))
    schema = (LEFT, RIGHT)[side]
    return pa.RecordBatch.from_arrays([keys.cast(schema.types[0]), times, content.cast(schema.types[2])], schema=schema)


class Model:
    """By definition: all rows are kept, and each window looks at them when the watermark reaches its last instant."""

    def __init__(self, windows: Windows, how: str) -> None:
        self.windows, self.how = windows, how
        self.watermark = MIN_WATERMARK
        self.rows: tuple[list[Any], list[Any]] = ([], [])
        self.late: tuple[list[Any], list[Any]] = ([], [])
        self.outside = 0

    def starts(self, time: int) -> list[int]:
        w = self.windows
        return [s for s in range(time - w.size_us + 1, time + 1) if (s - w.period.offset_us) % w.period.every_us == 0]

    def take(self, side: int, rows: list[Row], first: int) -> None:
        for number, (key, time) in enumerate(rows, first):
            row = (key, time, number if side == 0 else f"r{number}")
            ends = [s + self.windows.size_us for s in self.starts(time)]
            if not ends:
                self.outside += 1
            elif max(ends) - 1 <= self.watermark:
                self.late[side].append(row)
            else:
                self.rows[side].append(row)

    def advance(self, watermark: int) -> list[Change]:
        before, self.watermark = self.watermark, max(self.watermark, watermark)
        out: list[Change] = []
        starts = {s for side in self.rows for row in side for s in self.starts(row[1])}
        for start in sorted(starts):
            end = start + self.windows.size_us
            if before < end - 1 <= self.watermark:
                lefts, rights = ([r for r in side if start <= r[1] < end] for side in self.rows)
                out += [(start, end, *row) for row in self.join(lefts, rights)]
        return out

    def join(self, lefts: list[Any], rights: list[Any]) -> list[Change]:
        out: list[Change] = []
        for left in lefts:
            met = [r for r in rights if r[0] == left[0]]
            if self.how in ("semi", "anti"):
                out += [left] if bool(met) == (self.how == "semi") else []
                continue
            out += [(*left, *r[1:]) for r in met]
            if not met and self.how in ("left", "full"):
                out.append((*left, None, None))
        if self.how in ("right", "full"):
            keys = {left[0] for left in lefts}
            out += [(r[0], None, None, *r[1:]) for r in rights if r[0] not in keys]
        return out


def plain(rows: list[Change], *times: int) -> list[Change]:
    micros = pa.timestamp("us")
    return [
        tuple(pa.scalar(v, micros).value if i in times and v is not None else v for i, v in enumerate(row))
        for row in rows
    ]


ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(-20, 50)), max_size=12)
EVENTS = st.lists(st.tuples(st.integers(0, 1), ROWS) | st.integers(-22, 55), min_size=1, max_size=14)


@pytest.mark.parametrize("slack", [1 << 16, 4])
@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@given(events=EVENTS, how=st.sampled_from(HOWS), portion=st.sampled_from([1, 5, 1000]), data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_history_cut_anywhere_and_restored_anywhere_equals_the_model(
    windows: Windows, slack: int, events: list[Any], how: WindowJoinType, portion: int, data: st.DataObject
) -> None:
    """With little slack rows are swept all the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_by_key, "_SLACK_ROWS", slack)
        patch.setattr(window_join_operator, "rows_per_batch", lambda _: portion)
        model, running = Model(windows, how), Running(spec_of(windows, how), KEYS)
        late: tuple[list[Any], list[Any]] = ([], [])
        count = 0
        for event in [*events, MAX_WATERMARK]:
            if isinstance(event, int):
                ours, theirs = plain(values(running.watermark(event)), 0, 1, 3, 5), model.advance(event)
                for key in range(3):
                    assert [r for r in ours if r[2] == key] == [r for r in theirs if r[2] == key]
            else:
                side, rows = event
                for part in cuts(batch_of(side, rows, count), data.draw(pieces(len(rows)))):
                    outputs = running.rows(part, side)
                    late[side].extend(plain(values(outputs, 1 + side), 1))
                    assert {number for number, _ in outputs} <= {1 + side}
                model.take(side, rows, count)
                count += len(rows)
            if data.draw(st.integers(0, 3)) == 0:
                running = running.restored(data.draw(st.integers(1, 3)), lambda s: data.draw(st.permutations(s)))
        assert [Counter(rows) for rows in late] == [Counter(rows) for rows in model.late]
        counters = running.count()
        assert counters["rows_late"] == len(late[0]) + len(late[1])
        assert counters["rows_outside_windows"] == model.outside


SQL = {
    "semi": "select s, s + {size}, l.* from lw l where exists (from rw r where r.k = l.k and r.s = l.s)",
    "anti": "select s, s + {size}, l.* from lw l where not exists (from rw r where r.k = l.k and r.s = l.s)",
}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("windows", [TumblingWindow(1000, 300), SlidingWindow(1000, 400)], ids=str)
def test_it_agrees_with_duckdb(windows: Windows, how: WindowJoinType) -> None:
    """Out of order by up to 500; restored at another parallelism after every step."""
    random = np.random.default_rng(4)
    rows: list[list[Row]] = []
    for n in (6_000, 4_000):
        made = zip(random.integers(0, 60, n).tolist(), np.sort(random.integers(0, 30_000, n)).tolist(), strict=True)
        rows.append(sorted(made, key=lambda r: r[1] + int(random.integers(0, 500))))
    running = Running(spec_of(windows, how), KEYS, 2)
    got: list[Change] = []
    for step in range(10):
        for side, size in ((0, 600), (1, 400)):
            assert running.rows(batch_of(side, rows[side][step * size : (step + 1) * size], step * size), side) == []
        ahead = [rows[side][(step + 1) * size :] for side, size in ((0, 600), (1, 400))]
        got += values(running.watermark(min((r[1] for part in ahead for r in part), default=MAX_WATERMARK) - 1))
        running = running.restored(1 + step % 3)
    connection = duckdb.connect()
    for side, name in enumerate("lr"):
        connection.register(name, pa.Table.from_batches([batch_of(side, rows[side], 0)]))
        size_us, every_us, offset_us = windows.period
        time, first = ("t", "u")[side], offset_us - 10 * every_us
        connection.execute(
            f"""create view {name}w as select {name}.*, make_timestamp(s) as s from {name}, range({first}, 31000,
            {every_us}) starts(s) where epoch_us({time}) >= s and epoch_us({time}) < s + {size_us}"""
        )
    size = f"interval {windows.period.size_us} microseconds"
    query = f"""select coalesce(l.s, r.s), coalesce(l.s, r.s) + {size}, coalesce(l.k, r.k), t, n, u, text
        from lw l {how if how != "inner" else ""} join rw r on l.k = r.k and l.s = r.s"""
    if how in SQL:
        query = SQL[how].format(size=size).replace("l.*", "k, t, n")
    expected = Counter(connection.execute(query).fetchall())
    assert expected.total() > 100
    assert Counter(got) == expected
    assert running.count()["rows_late"] == 0


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_a_window_comes_out_at_its_last_instant(windows: Windows) -> None:
    """The watermark takes every value."""
    rows = [(t % 3, t) for t in range(-15, 40)]
    model, running = Model(windows, "full"), Running(spec_of(windows, "full"), KEYS)
    for side in (0, 1):
        model.take(side, rows, 0)
        running.rows(batch_of(side, rows, 0), side)
    for watermark in range(-20, 60):
        ours, theirs = plain(values(running.watermark(watermark)), 0, 1, 3, 5), model.advance(watermark)
        assert sorted(ours) == sorted(theirs)


def test_a_row_in_some_closed_windows_meets_only_those_of_the_others() -> None:
    running = Running(spec_of(SlidingWindow(10, 5), "inner"), KEYS)
    running.rows(batch_of(0, [(1, 7)], 0), 0)
    assert running.watermark(9) == []
    running.rows(batch_of(1, [(1, 6)], 0), 1)
    assert plain(values(running.watermark(MAX_WATERMARK)), 0, 1, 3, 5) == [(5, 15, 1, 7, 0, 6, "r0")]


def test_subtasks_of_different_watermarks_merge_and_no_window_comes_out_twice() -> None:
    spec = spec_of(SlidingWindow(10, 5), "left")
    probe = batch_of(0, [(key, 7) for key in range(40)], 0)
    owners = owner(probe, ["k"], 2)
    halves = [opened(spec, subtask, 2) for subtask in (0, 1)]
    for subtask, operator in enumerate(halves):
        operator.process(0, probe.filter(pa.array([o == subtask for o in owners])))
    came = [values(halves[0].on_watermark(9)), values(halves[1].on_watermark(4))]
    assert [len(rows) for rows in came] == [owners.count(0), 0]
    (merged,) = rescaled(spec, [s for half in halves for s in snapshot(half)], 1)
    late = merged.process(0, batch_of(0, [(key, 4) for key in range(40)], 100))
    assert sorted(row[0] for row in values(late, 1)) == [k for k in range(40) if owners[k] == 0]
    (again,) = rescaled(spec, snapshot(merged), 1)
    first, second = (plain(values(again.on_watermark(w)), 0, 3) for w in (9, 14))
    theirs = [k for k in range(40) if owners[k] == 1]
    assert sorted((row[0], row[2], row[3]) for row in first) == sorted((0, k, t) for k in theirs for t in (4, 7))
    assert sorted((row[0], row[2]) for row in second) == [(5, k) for k in range(40)]


def test_the_rows_of_a_large_window_come_in_bounded_batches() -> None:
    rows = [(1, 1)] * 400
    operator = opened(spec_of(TumblingWindow(10), "full"))
    for side in (0, 1):
        operator.process(side, batch_of(side, rows, 0))
    batches = operator.on_watermark(9)
    while operator.pending:
        batches += operator.resume()
    assert [batch.num_rows for _, batch in batches] == [65_536, 65_536, 160_000 - 2 * 65_536]


def test_rows_of_closed_windows_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_by_key, "_SLACK_ROWS", 100)
    running = Running(spec_of(SlidingWindow(20, 10), "left"), KEYS)
    for step in range(100):
        times = range(100 * step, 100 * step + 100)
        for side in (0, 1):
            running.rows(batch_of(side, [(t % 5, t) for t in times], 0), side)
        running.watermark(times[-1] - 1)
    (operator,) = running._operators
    assert sum(side.rows for side in operator._sides) < 1_000  # type: ignore[attr-defined]
    assert sum(s.batch.num_rows for s in snapshot(operator) if s.name != "watermark") <= 40
    running.watermark(MAX_WATERMARK)
    assert sum(side.rows for side in operator._sides) == 0  # type: ignore[attr-defined]


def test_what_comes_after_the_freeze_is_not_in_the_segments() -> None:
    operator = opened(spec_of(TumblingWindow(10), "full"))
    for side in (0, 1):
        operator.process(side, batch_of(side, [(i % 7, i) for i in range(60)], 0))
    operator.on_watermark(20)
    at_once = snapshot(operator)
    frozen = operator.freeze(2)
    operator.process(0, batch_of(0, [(i % 9, 30 + i) for i in range(60)], 100))
    operator.on_watermark(MAX_WATERMARK)
    assert [s.batch.to_pylist() for s in frozen.segments()] == [s.batch.to_pylist() for s in at_once]


def test_names_and_types() -> None:
    full = spec_of(TumblingWindow(10), "full").outputs[0]
    assert full.names == ["window_start", "window_end", "k", "t", "n", "u", "text"]
    assert full.field("k").type == pa.int64(), "wide enough for the keys of both sides"
    assert spec_of(TumblingWindow(10), "anti").outputs[0].types[2:] == LEFT.types
    renamed = LEFT.set(0, pa.field("kk", pa.int32()))
    other = WindowJoinSpec(LEFT, renamed, ("k",), ("kk",), "t", "t", WINDOWS[0], "right")
    assert other.outputs[0].names == ["window_start", "window_end", "k", "t", "n", "kk", "t_right", "n_right"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"how": "outer"}, "how is one of 'inner', 'left', 'right', 'full', 'semi', 'anti', not 'outer'"),
        ({"windows": TumblingWindow(10, processing_time=True)}, "goes by event time"),
        ({"left_time": "n"}, r"a join needs timestamp\[us\]"),
        ({"left_keys": ("k", "n")}, "2 key columns, the right side 1"),
        ({"left_schema": LEFT.append(pa.field("window_end", pa.int64()))}, "named 'window_end'"),
    ],
)
def test_mistakes(changes: dict[str, Any], message: str) -> None:
    given: dict[str, Any] = {
        "left_schema": LEFT,
        "right_schema": RIGHT,
        "left_keys": ("k",),
        "right_keys": ("k",),
        "left_time": "t",
        "right_time": "u",
        "windows": TumblingWindow(10),
    }
    with pytest.raises(BuildError, match=message):
        WindowJoinSpec(**(given | changes))

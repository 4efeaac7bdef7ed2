"""As-of joins against DuckDB's and against a model in plain Python: order of rows, late rows and versions, restores."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_world import Change, Running, pieces, values

from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.errors import BuildError, DataError
from cutwater.operators.join.spec import AsOfJoinSpec
from cutwater.state.rows import rows as rows_by_key
from keyed_world import cuts

LEFT = pa.schema({"k": pa.int32(), "t": pa.timestamp("us"), "n": pa.int64()})
RIGHT = pa.schema({"k": pa.int64(), "since": pa.timestamp("us"), "rate": pa.string()})
KEYS = (("k",), ("k",))
Row = tuple[int, int]  # key, time


def spec_of(how: Literal["inner", "left"]) -> AsOfJoinSpec:
    return AsOfJoinSpec(LEFT, RIGHT, ("k",), ("k",), "t", "since", how)


def batch_of(side: int, rows: list[Row], first: int) -> pa.RecordBatch:
    numbers = range(first, first + len(rows))
    content = pa.array(numbers) if side == 0 else pa.array([f"r{i}" for i in numbers], pa.string())
    keys, times = pa.array([r[0] for r in rows], pa.int64()), pa.array([r[1] for r in rows], pa.timestamp("us"))
    schema = (LEFT, RIGHT)[side]
    return pa.RecordBatch.from_arrays([keys.cast(schema.types[0]), times, content.cast(schema.types[2])], schema=schema)


class Model:
    """By definition: all versions are kept, and each row looks at them when the watermark passes it."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.watermark = MIN_WATERMARK
        self.versions: list[tuple[int, int, str]] = []
        self.waiting: list[tuple[int, int, int]] = []
        self.late: tuple[list[Any], list[Any]] = ([], [])

    def rows(self, side: int, rows: list[Row], first: int) -> None:
        for number, (key, time) in enumerate(rows, first):
            late = time <= self.watermark
            if late:
                self.late[side].append((key, time, number if side == 0 else f"r{number}"))
            if side == 1:
                self.versions.append((key, time, f"r{number}"))
            elif not late:
                self.waiting.append((key, time, number))

    def advance(self, watermark: int) -> list[Any]:
        self.watermark = max(self.watermark, watermark)
        due = sorted((r for r in self.waiting if r[1] <= self.watermark), key=lambda r: r[1])
        self.waiting = [r for r in self.waiting if r[1] > self.watermark]
        out: list[Any] = []
        for key, time, number in due:
            valid = [v for v in self.versions if v[0] == key and v[1] <= time]
            best = max(enumerate(valid), key=lambda v: (v[1][1], v[0]))[1] if valid else (None, None, None)
            if valid or self.how == "left":
                out.append((key, time, number, *best[1:]))
        return out


def plain(rows: list[Change], *times: int) -> list[Change]:
    micros = pa.timestamp("us")
    return [
        tuple(pa.scalar(v, micros).value if i in times and v is not None else v for i, v in enumerate(row))
        for row in rows
    ]


ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 50)), max_size=12)
EVENTS = st.lists(st.tuples(st.integers(0, 1), ROWS) | st.integers(-2, 55), min_size=1, max_size=14)


@pytest.mark.parametrize("slack", [1 << 16, 4])
@given(events=EVENTS, how=st.sampled_from(["inner", "left"]), data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_history_cut_anywhere_and_restored_anywhere_equals_the_model(
    slack: int, events: list[Any], how: Literal["inner", "left"], data: st.DataObject
) -> None:
    """With little slack rows are swept all the time."""
    before = rows_by_key._SLACK_ROWS
    rows_by_key._SLACK_ROWS = slack
    try:
        model, running = Model(how), Running(spec_of(how), KEYS)
        late: tuple[list[Any], list[Any]] = ([], [])
        count = 0
        for event in [*events, MAX_WATERMARK]:
            if isinstance(event, int):
                ours, theirs = plain(values(running.watermark(event)), 1, 3), model.advance(event)
                for key in range(3):
                    assert [r for r in ours if r[0] == key] == [r for r in theirs if r[0] == key]
            else:
                side, rows = event
                for part in cuts(batch_of(side, rows, count), data.draw(pieces(len(rows)))):
                    outputs = running.rows(part, side)
                    late[side].extend(plain(values(outputs, 1 + side), 1))
                    assert {number for number, _ in outputs} <= {1 + side}
                model.rows(side, rows, count)
                count += len(rows)
            if data.draw(st.integers(0, 3)) == 0:
                running = running.restored(data.draw(st.integers(1, 3)), lambda s: data.draw(st.permutations(s)))
        assert [Counter(rows) for rows in late] == [Counter(rows) for rows in model.late]
        assert running.count()["rows_late"] == len(late[0]) + len(late[1])
    finally:
        rows_by_key._SLACK_ROWS = before


@pytest.mark.parametrize("how", ["inner", "left"])
def test_it_agrees_with_duckdb(how: Literal["inner", "left"]) -> None:
    random = np.random.default_rng(2)
    rows = [
        [(int(k), int(t)) for k, t in zip(random.integers(0, 80, n), random.permutation(50_000)[:n], strict=True)]
        for n in (6_000, 2_000)
    ]
    rows = [sorted(side, key=lambda r: r[1] + int(random.integers(0, 500))) for side in rows]
    running = Running(spec_of(how), KEYS, 2)
    got: list[Change] = []
    for step in range(10):
        for side, size in ((0, 600), (1, 200)):
            assert running.rows(batch_of(side, rows[side][step * size : (step + 1) * size], step * size), side) == []
        ahead = [rows[side][(step + 1) * size :] for side, size in ((0, 600), (1, 200))]
        got += values(running.watermark(min((r[1] for part in ahead for r in part), default=MAX_WATERMARK) - 1))
        running = running.restored(1 + step % 3)
    connection = duckdb.connect()
    for side, name in enumerate("lr"):
        connection.register(name, pa.Table.from_batches([batch_of(side, rows[side], 0)]))
    kind = "" if how == "inner" else "left"
    query = f"select l.k, t, n, since, rate from l asof {kind} join r on l.k = r.k and t >= since"
    assert Counter(got) == Counter(connection.execute(query).fetchall())


def test_versions_that_nobody_can_see_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_by_key, "_SLACK_ROWS", 100)
    running = Running(spec_of("left"), KEYS)
    for step in range(100):
        times = range(100 * step, 100 * step + 100)
        running.rows(batch_of(1, [(t % 5, t) for t in times], 0), 1)
        running.rows(batch_of(0, [(t % 5, t) for t in times], 0), 0)
        running.watermark(times[-1])
    operator: Any = running._operators[0]
    assert sum(side.rows for side in operator._sides) < 1_000


def test_mistakes() -> None:
    with pytest.raises(BuildError, match="how is 'inner' or 'left'"):
        spec_of("full")  # type: ignore[arg-type]
    with pytest.raises(BuildError, match="event time 'rate' is string"):
        AsOfJoinSpec(LEFT, RIGHT, ("k",), ("k",), "t", "rate")
    with pytest.raises(BuildError, match="1 key columns, the right side 2"):
        AsOfJoinSpec(LEFT, RIGHT, ("k",), ("k", "rate"), "t", "since")
    running = Running(spec_of("left"), KEYS)
    with pytest.raises(DataError, match="event time 'since' of the right side is null"):
        running.rows(pa.RecordBatch.from_pylist([{"k": 1, "rate": "x"}], schema=RIGHT), 1)

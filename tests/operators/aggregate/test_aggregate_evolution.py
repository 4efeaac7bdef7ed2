"""Aggregates and windows whose next version has other aggregates: what is kept, what begins empty, what is refused.

The oracle is plain Python: an aggregate that goes on has seen all rows, one that is new those since the upgrade.
"""

from __future__ import annotations

import datetime as dt
import statistics
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from table_world import Running

import cutwater as cw
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.aggregate.running_spec import RunningAggregateSpec
from cutwater.operators.evolution import Evolution, Former
from cutwater.operators.window.spec import WindowAggregateSpec
from cutwater.state.segments import Segment
from keyed_world import opened, rescaled, snapshot

END = 2**63 - 1
HOUR_US = 3_600_000_000
COLUMNS = {"k": pa.string(), "t": pa.timestamp("us"), "v": pa.int32(), "x": pa.float64()}
SCHEMA = pa.schema(COLUMNS)


def rows_of(begin: int, end: int, schema: pa.Schema = SCHEMA) -> pa.RecordBatch:
    """Rows of five keys, some minutes apart; a few values are null."""
    made = [
        {
            "k": f"key {i % 5}",
            "t": i * 7 * 60_000_000,
            "v": None if i % 11 == 0 else i * 37 % 23,
            "x": i * 31 % 17 / 4,
        }
        for i in range(begin, end)
    ]
    return pa.RecordBatch.from_pylist(made, schema=schema)


FUNCTIONS: dict[str, Callable[[list[Any]], Any]] = {
    "count": len,
    "sum": lambda v: sum(v) if v else None,
    "mean": lambda v: pytest.approx(sum(v) / len(v)) if v else None,
    "min": lambda v: min(v, default=None),
    "max": lambda v: max(v, default=None),
    "first": lambda v: v[0] if v else None,
    "last": lambda v: v[-1] if v else None,
    "stddev_pop": lambda v: pytest.approx(statistics.pstdev(v), abs=1e-6) if v else None,
    "count_distinct": lambda v: len(set(v)),
    "approx_count_distinct": lambda v: len(set(v)),
}
KINDS = tuple(FUNCTIONS)


def result(aggregate: Aggregate, rows: list[dict[str, Any]]) -> Any:
    """What an aggregate of these rows is, in plain Python."""
    if aggregate.column is None:
        return len(rows)
    return FUNCTIONS[aggregate.kind]([r[aggregate.column] for r in rows if r[aggregate.column] is not None])


def evolution(old: Any, new: Any, renames: dict[tuple[str, ...], str] | None = None) -> Evolution:
    return new.evolve(Former(old.state_schema, old.state_parts), renames or {}, drop=False)


def upgraded(running: Running, new: Any, parallelism: int, renames: Any = None) -> Running:
    """The new version goes on from a snapshot of the old one, at another parallelism."""
    found = evolution(running.spec, new, renames)
    assert found.refusals == ()
    convert = found.convert or (lambda segment: segment)
    segments: list[Segment] = [s for operator in running._operators for s in snapshot(operator)]
    after = Running(new, [("k",)], 0)
    after._operators = rescaled(new, [convert(s) for s in segments], parallelism)  # type: ignore[misc]
    return after


def named(*kinds: str) -> tuple[Aggregate, ...]:
    return tuple(Aggregate(f"a {kind}", kind, "v") for kind in kinds)


def running(*aggregates: Aggregate, schema: pa.Schema = SCHEMA) -> RunningAggregateSpec:
    return RunningAggregateSpec(schema, ("k",), aggregates)


def follow(spec: Any, since: dict[str, int], rows: list[dict[str, Any]], begin: int) -> list[dict[str, Any]]:
    """Each row from ``begin`` on with its aggregates; ``since``: the first row that an aggregate has seen."""
    return [
        {
            "k": row["k"],
            **{
                a.name: result(a, [r for r in rows[since.get(a.name, 0) : n + 1] if r["k"] == row["k"]])
                for a in spec.aggregates
            },
        }
        for n, row in enumerate(rows)
        if n >= begin
    ]


def ordered(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    return {key: [r for r in rows if r["k"] == key] for key in sorted({r["k"] for r in rows})}


@pytest.mark.parametrize("kind", KINDS)
def test_a_further_aggregate_begins_empty_and_those_there_were_go_on(kind: str) -> None:
    others = [k for k in KINDS if k != kind]
    old, new = running(*named(*others)), running(*named(*KINDS))
    before = Running(old, [("k",)], 2)
    before.rows(rows_of(0, 60))
    after = upgraded(before, new, 3)
    made = [row for _, batch in after.rows(rows_of(60, 120)) for row in batch.to_pylist()]
    expected = follow(new, {f"a {kind}": 60}, rows_of(0, 120).to_pylist(), 60)
    assert ordered(made) == ordered(expected)


def test_aggregates_go_change_places_and_get_other_names_all_at_once() -> None:
    old = running(*named("sum", "max", "count", "first"), Aggregate("n", "count"))
    new = running(Aggregate("rows", "count"), Aggregate("most", "max", "v"), *named("first", "min", "sum"))
    found = evolution(old, new)
    assert sorted(map(str, found.changes)) == [
        "a count: dropped (count(v))",
        "a max: renamed to most",
        "a min: added (min(v)), empty for keys that are known",
        "n: renamed to rows",
    ]
    before = Running(old, [("k",)], 3)
    before.rows(rows_of(0, 50))
    after = upgraded(before, new, 2)
    made = [row for _, batch in after.rows(rows_of(50, 80)) for row in batch.to_pylist()]
    expected = follow(new, {"a min": 50}, rows_of(0, 80).to_pylist(), 50)
    assert ordered(made) == ordered(expected)


WIDER: dict[str, tuple[pa.DataType, pa.DataType, list[Any], Callable[[Any], Any]]] = {
    "int32 to int64": (pa.int32(), pa.int64(), [3, -(2**31), 2**31 - 1, None, 3], lambda v: v),
    "uint8 to int64": (pa.uint8(), pa.int64(), [3, 255, 0, None, 3], lambda v: v),
    "int32 to double": (pa.int32(), pa.float64(), [3, -7, 8, None, 3], float),
    "float32 to float64": (pa.float32(), pa.float64(), [0.5, -1.25, 8.0, None, 0.5], lambda v: v),
    "decimal": (
        pa.decimal128(5, 2),
        pa.decimal128(12, 2),
        [Decimal("1.50"), Decimal("-9.25"), None, Decimal("1.50"), Decimal("2.00")],
        lambda v: v,
    ),
    "date to timestamp": (
        pa.date32(),
        pa.timestamp("us"),
        [dt.date(2024, 2, 29), dt.date(1969, 7, 20), None, dt.date(2024, 2, 29), dt.date(2020, 1, 1)],
        lambda v: dt.datetime(v.year, v.month, v.day),
    ),
}


@pytest.mark.parametrize("change", WIDER)
def test_values_of_a_wider_type_are_the_same_values(change: str) -> None:
    was, now, values, widened = WIDER[change]
    numbers = not (pa.types.is_decimal(was) or pa.types.is_date(was))
    kinds = ["min", "max", "first", "last", "count_distinct", *(["sum", "mean"] if numbers else [])]
    old = running(*named(*kinds), schema=pa.schema({"k": pa.string(), "v": was}))
    new = running(*named(*kinds), schema=pa.schema({"k": pa.string(), "v": now}))
    before = Running(old, [("k",)], 2)
    keys = ["a", "b", "a", "b", "a"]
    before.rows(pa.record_batch([pa.array(keys), pa.array(values, was)], names=["k", "v"]))
    after = upgraded(before, new, 3)
    more = [None if v is None else widened(v) for v in values]
    made = [
        row
        for _, batch in after.rows(pa.record_batch([pa.array(keys), pa.array(more, now)], names=["k", "v"]))
        for row in batch.to_pylist()
    ]
    told = [{"k": k, "v": v} for k, v in zip(keys * 2, more * 2, strict=True)]
    assert ordered(made) == ordered(follow(new, {}, told, 5))


def test_a_mapping_says_that_a_column_has_another_name() -> None:
    other = pa.schema({"k": pa.string(), "delay": pa.int32()})
    old = running(Aggregate("worst", "max", "v"))
    new = running(Aggregate("worst", "max", "delay"), schema=other)
    assert "worst=max(v), is worst=max(delay)" in evolution(old, new).refusals[0]
    found = evolution(old, new, {("worst",): "worst"})
    assert found.refusals == ()
    assert [str(c) for c in found.changes] == ["worst: changed from max(v) to max(delay), as you say"]


REFUSED: dict[str, tuple[Any, Any, dict[tuple[str, ...], str], str]] = {
    "another function": (running(*named("max")), running(Aggregate("a max", "min", "v")), {}, "another name"),
    "another function by a mapping": (
        running(*named("max")),
        running(Aggregate("low", "min", "v")),
        {("a max",): "low"},
        "cannot become low=min",
    ),
    "two become one": (
        running(*named("max"), Aggregate("top", "max", "x")),
        running(Aggregate("high", "max", "v")),
        {("a max",): "high", ("top",): "high"},
        "two aggregates would be called 'high'",
    ),
    "narrower": (
        running(*named("max"), schema=pa.schema({"k": pa.string(), "v": pa.int64()})),
        running(*named("max")),
        {},
        "was int64 and is int32, which is not wider",
    ),
    "another type": (
        running(*named("last"), schema=pa.schema({"k": pa.string(), "v": pa.string()})),
        running(*named("last")),
        {},
        "was string and is int32",
    ),
    "a wider key": (
        running(*named("max"), schema=pa.schema({"k": pa.int32(), "v": pa.int32()})),
        running(*named("max"), schema=pa.schema({"k": pa.int64(), "v": pa.int32()})),
        {},
        "column 'k' was int32 and is int64",
    ),
    "a sketch of other values": (
        running(*named("approx_count_distinct")),
        running(*named("approx_count_distinct"), schema=pa.schema({"k": pa.string(), "v": pa.string()})),
        {},
        "another name",
    ),
    "another precision": (
        running(Aggregate("u", "approx_count_distinct", "v", 10)),
        running(Aggregate("u", "approx_count_distinct", "v", 12)),
        {},
        "another name",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_all_else_is_refused(case: str) -> None:
    old, new, renames, why = REFUSED[case]
    refusals = evolution(old, new, renames).refusals
    assert any(why in reason for reason in refusals), refusals


# ------------------------------------------------------------------------------------------------------------ windows


def fixed(size: int, every: int) -> Callable[[list[int]], list[tuple[int, list[int]]]]:
    """Windows of a key: start and its rows."""

    def windows(times: list[int]) -> list[tuple[int, list[int]]]:
        starts = {s for t in times for s in range((t - size) // every * every + every, t + 1, every)}
        return [(s, [i for i, t in enumerate(times) if s <= t < s + size]) for s in sorted(starts)]

    return windows


def sessions(times: list[int]) -> list[tuple[int, list[int]]]:
    found: list[tuple[int, list[int]]] = []
    for i, t in enumerate(times):
        if found and t - times[found[-1][1][-1]] < HOUR_US:
            found[-1][1].append(i)
        else:
            found.append((t, [i]))
    return found


WINDOWS: dict[str, tuple[Any, Callable[[list[int]], list[tuple[int, list[int]]]]]] = {
    "tumbling": (cw.tumbling("4h"), fixed(4 * HOUR_US, 4 * HOUR_US)),
    "sliding": (cw.sliding("4h", "1h"), fixed(4 * HOUR_US, HOUR_US)),
    "session": (cw.session("1h"), sessions),
    "global": (cw.global_window(), lambda times: [(0, list(range(len(times))))]),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("parallelism", [1, 3])
def test_open_windows_take_the_new_aggregates_along(name: str, parallelism: int) -> None:
    window, oracle = WINDOWS[name]
    old = WindowAggregateSpec(SCHEMA, ("k",), "t", window, named("sum", "first", "max", "count_distinct"))
    kept = (Aggregate("begin", "first", "v"), *named("count_distinct", "sum"))
    new = WindowAggregateSpec(SCHEMA, ("k",), "t", window, (*named("last", "mean"), *kept))
    before = Running(old, [("k",)], 2)
    fired = [row for _, batch in before.rows(rows_of(0, 60)) for row in batch.to_pylist()]
    fired += [row for _, b in before.watermark(rows_of(59, 60).column("t")[0].value - 1) for row in b.to_pylist()]
    after = upgraded(before, new, parallelism)
    after.rows(rows_of(60, 100))
    made = [row for _, batch in after.watermark(END) for row in batch.to_pylist()]
    expected: list[dict[str, Any]] = []
    rows = [{**r, "n": n, "us": r["t"]} for n, r in enumerate(rows_of(0, 100).to_pylist())]
    for key in sorted({r["k"] for r in rows}):
        mine = [r for r in rows if r["k"] == key]
        times = [int((r["t"] - dt.datetime(1970, 1, 1)) / dt.timedelta(microseconds=1)) for r in mine]
        for start, inside in oracle(times):
            seen = [mine[i] for i in inside]
            since = [r for r in seen if r["n"] >= 60]
            expected.append(
                {"k": key, "start": start}
                | {a.name: result(a, since if a.name in ("a last", "a mean") else seen) for a in new.aggregates}
            )
    epoch = dt.datetime(1970, 1, 1)

    def told(row: dict[str, Any]) -> dict[str, Any]:
        start = row.pop("window_start", epoch)
        row.pop("window_end", None)
        return {"k": row["k"], "start": int((start - epoch) / dt.timedelta(microseconds=1)), **row}

    closed = {(row["k"], told(dict(row))["start"]) for row in fired}
    expected = [row for row in expected if (row["k"], row["start"]) not in closed]

    def by_window(row: dict[str, Any]) -> Any:
        return row["k"], row["start"]

    assert expected
    assert sorted(map(told, made), key=by_window) == sorted(expected, key=by_window)


def test_other_windows_are_not_taken_and_a_key_of_the_window_stays() -> None:
    spec = WindowAggregateSpec(SCHEMA, ("k",), "t", cw.tumbling("1h"), named("sum"))
    session = WindowAggregateSpec(SCHEMA, ("k",), "t", cw.session("1h"), named("sum"))
    assert "column 'window_end' is new" in evolution(spec, session).refusals
    assert opened(spec) is not None

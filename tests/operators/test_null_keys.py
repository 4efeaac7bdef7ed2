"""Null as a key: what each keyed step makes of it is what SQL's GROUP BY, and its joins, make of it (DuckDB)."""

from __future__ import annotations

from collections import Counter
from decimal import Decimal
from typing import Any, get_args

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from process_world import Clock, Group
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from table_world import Change, Running, table_after, values

import cutwater as cw
from cutwater.data.time import MAX_WATERMARK
from cutwater.errors import BuildError, DataError
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.aggregate.running_spec import RunningAggregateSpec
from cutwater.operators.join.spec import (
    AsOfJoinSpec,
    IntervalJoinSpec,
    JoinType,
    TableJoinSpec,
    WindowJoinSpec,
    WindowJoinType,
)
from cutwater.operators.process.functions import group_rows
from cutwater.operators.process.spec import ProcessSpec
from cutwater.operators.ranking.deduplicate_spec import DeduplicateSpec
from cutwater.operators.ranking.top_spec import TopRows, TopSpec
from cutwater.operators.stateful_processor.spec import ProcessorSpec
from cutwater.operators.stateless.rows import KeyCheckSpec
from cutwater.operators.window.kinds import SessionWindow, SlidingWindow, TumblingWindow, Window
from cutwater.operators.window.spec import WindowAggregateSpec
from cutwater.runtime.channels.partitioner import HashPartitioner
from cutwater.state.keys import NullableKeys
from keyed_world import feed, opened, owner, rescaled, rows_of, snapshot

TYPES = {
    "int64": (pa.int64(), lambda i: i),
    "uint8": (pa.uint8(), lambda i: i),
    "bool": (pa.bool_(), lambda i: i % 2 == 0),
    "float64": (pa.float64(), float),
    "date": (pa.date32(), lambda i: np.datetime64(i, "D").item()),
    "timestamp": (pa.timestamp("us"), lambda i: np.datetime64(i, "us").item()),
    "string": (pa.string(), lambda i: "" if i == 0 else f"k{i}"),
    "binary": (pa.binary(), lambda i: bytes([i])),
    "decimal": (pa.decimal128(9, 2), Decimal),
}
"""Types of keys, and a value of the type for a small number; 0 stands for what nulls might be mistaken for."""
KEYS = NullableKeys(["a", "b"])


def made(rows: int, seed: int, first: str = "int64", second: str = "string") -> pa.RecordBatch:
    """Keys of two columns with nulls in either, event times that ascend by and by, and the number of the row."""
    random = np.random.default_rng(seed)
    columns: dict[str, pa.Array] = {}
    for name, (kind, make) in (("a", TYPES[first]), ("b", TYPES[second])):
        drawn = [
            None if null else make(int(i))
            for null, i in zip(random.random(rows) < 0.3, random.integers(0, 4, rows), strict=True)
        ]
        columns[name] = pa.array(drawn, kind)
    columns["t"] = pa.array(np.cumsum(random.integers(0, 40, rows)), pa.timestamp("us"))
    columns["n"] = pa.array(np.arange(rows))
    return pa.record_batch(columns)


def sql(query: str, **tables: pa.RecordBatch) -> list[tuple[Any, ...]]:
    with duckdb.connect() as connection:
        for name, batch in tables.items():
            connection.register(name, pa.Table.from_batches([batch]))
        return connection.execute(query).fetchall()


def restored_on_the_way(spec: Any, batch: pa.RecordBatch, keys: Any = KEYS, watermarks: bool = False) -> list[Change]:
    """What comes out of a batch in five pieces, with a restore at another parallelism after each."""
    running, found = Running(spec, [keys]), list[Change]()
    for number, begin in enumerate(range(0, batch.num_rows, 200)):
        piece = batch.slice(begin, 200)
        outputs = running.rows(piece)
        if watermarks:
            outputs += running.watermark(piece.column("t")[-1].value - 1)
        found += values(outputs)
        running = running.restored(1 + number % 3)
    return found + values(running.watermark(MAX_WATERMARK) if watermarks else [])


@pytest.mark.parametrize("first", TYPES)
@pytest.mark.parametrize("second", ["int64", "string", "decimal"])
def test_running_aggregates_group_nulls_as_duckdb_does(first: str, second: str) -> None:
    batch = made(1000, 1, first, second)
    spec = RunningAggregateSpec(batch.schema, KEYS, (Aggregate("c", "count"), Aggregate("s", "sum", "n")), None)
    window = "over (partition by a, b order by n rows unbounded preceding)"
    assert Counter(restored_on_the_way(spec, batch)) == Counter(
        sql(f"select a, b, count(*) {window}, sum(n) {window} from t", t=batch)
    )


@pytest.mark.parametrize("kind", TYPES)
def test_one_key_column_of_any_type(kind: str) -> None:
    batch = made(1000, 2, kind)
    spec = RunningAggregateSpec(batch.schema, NullableKeys(["a"]), (Aggregate("c", "count"),), None)
    expected = sql("select a, count(*) over (partition by a order by n rows unbounded preceding) from t", t=batch)
    assert Counter(restored_on_the_way(spec, batch, ["a"])) == Counter(expected)


def test_the_first_null_may_come_late_and_a_delta_may_hold_it() -> None:
    keys = NullableKeys(["k"])
    schema = pa.schema({"k": pa.int64()})
    spec = RunningAggregateSpec(schema, keys, (Aggregate("c", "count"),), None)
    operator = opened(spec)
    operator.process(0, pa.record_batch({"k": pa.array(range(1000))}))
    frozen = operator.freeze(1)
    whole = list(frozen.segments())
    frozen.release()
    operator.process(0, pa.record_batch({"k": pa.array([None, 0], pa.int64())}))
    frozen = operator.freeze(2)
    changes = frozen.changes(1)
    assert changes is not None
    delta = list(changes)
    frozen.release()
    assert sum(segment.batch.num_rows for segment in delta) == 2
    operators = rescaled(spec, [*whole, *delta], 3)
    outputs = [
        o for part in feed(operators, pa.record_batch({"k": pa.array([None, 0, 7], pa.int64())}), keys) for o in part
    ]
    assert sorted(map(str, rows_of(outputs))) == ["{'k': 0, 'c': 3}", "{'k': 7, 'c': 2}", "{'k': None, 'c': 2}"]


WINDOWS: dict[str, tuple[Window, str]] = {
    "tumbling": (
        TumblingWindow(1000),
        "select a, b, min(epoch_us(t)) // 1000 * 1000, count(*), sum(n) from t group by a, b, epoch_us(t) // 1000",
    ),
    "sliding": (
        SlidingWindow(1000, 500),
        """select a, b, w, count(*), sum(n) from (select *, unnest([epoch_us(t) // 500 * 500 - 500,
        epoch_us(t) // 500 * 500]) w from t) group by a, b, w""",
    ),
    "sessions": (
        SessionWindow(900),
        """select a, b, min(epoch_us(t)), count(*), sum(n) from (select *, count(*) filter (gap) over (partition by a, b
        order by t, n rows unbounded preceding) s from (select *, epoch_us(t) - lag(epoch_us(t)) over
        (partition by a, b order by t, n) >= 900 gap from t)) group by a, b, s""",
    ),
}


@pytest.mark.parametrize("window", WINDOWS)
def test_windows_group_nulls_as_duckdb_does(window: str) -> None:
    batch = made(1000, 3)
    aggregates = (Aggregate("c", "count"), Aggregate("s", "sum", "n"))
    spec = WindowAggregateSpec(batch.schema, KEYS, "t", WINDOWS[window][0], aggregates)
    found = restored_on_the_way(spec, batch, watermarks=True)
    us = pa.timestamp("us")
    assert Counter((a, b, pa.scalar(start, us).value, c, s) for a, b, start, _, c, s in found) == Counter(
        sql(WINDOWS[window][1], t=batch)
    )


def test_the_first_row_of_each_key() -> None:
    batch = made(1000, 4)
    found = restored_on_the_way(DeduplicateSpec(batch.schema, KEYS), batch)
    assert Counter(found) == Counter(sql("select distinct on (a, b) * from t order by n", t=batch))


def test_the_latest_row_and_the_top_rows_of_each_key() -> None:
    batch = made(1000, 5)
    latest = table_of(restored_on_the_way(DeduplicateSpec(batch.schema, KEYS, "last"), batch))
    ranked = "select * from t qualify row_number() over (partition by a, b order by {}) <= {}"
    assert latest == Counter(sql(ranked.format("n desc", 1), t=batch))
    spec = TopSpec(batch.schema, KEYS, TopRows("rows", "top", by=("n",), descending=(True,), n=3))
    assert table_of(restored_on_the_way(spec, batch)) == Counter(sql(ranked.format("n desc", 3), t=batch))


def table_of(changes: list[Change]) -> Counter[Change]:
    """The table that changes leave; those of different keys may come in any order."""
    table: Counter[Change] = Counter()
    for key in {change[1:3] for change in changes}:
        table += table_after([change for change in changes if change[1:3] == key])
    return table


# ------------------------------------------------------------------------------------------------------------- joins


def both_sides(spec: Any, left: pa.RecordBatch, right: pa.RecordBatch, watermarks: bool = True) -> list[Change]:
    running, found = Running(spec, [KEYS, KEYS]), list[Change]()
    for number, begin in enumerate(range(0, left.num_rows, 100)):
        for side, batch in enumerate((left, right)):
            found += values(running.rows(batch.slice(begin, 100), side))
        if watermarks:
            times = [batch.column("t")[min(begin + 100, batch.num_rows) - 1].value for batch in (left, right)]
            found += values(running.watermark(min(times) - 1))
        running = running.restored(1 + number % 3)
    return found + values(running.watermark(MAX_WATERMARK))


def test_an_interval_join_pairs_no_nulls() -> None:
    left, right = made(300, 6), made(300, 7)
    spec = IntervalJoinSpec(left.schema, right.schema, KEYS, KEYS, "t", "t", -500, 500)
    expected = sql(
        """select a, b, l.t, l.n, r.t, r.n from l join r using (a, b)
        where epoch_us(r.t) between epoch_us(l.t) - 500 and epoch_us(l.t) + 500""",
        l=left,
        r=right,
    )
    assert len(expected) > 100
    assert Counter(both_sides(spec, left, right)) == Counter(expected)


@pytest.mark.parametrize("how", get_args(WindowJoinType))
def test_a_window_join_pairs_no_nulls(how: WindowJoinType) -> None:
    left, right = made(300, 16), made(300, 17)
    spec = WindowJoinSpec(left.schema, right.schema, KEYS, KEYS, "t", "t", TumblingWindow(2_000), how)
    window = "epoch_us({0}) // 2000 * 2000 as s, make_timestamp(s), make_timestamp(s + 2000)"
    on = "l.a = r.a and l.b = r.b and epoch_us(l.t) // 2000 = epoch_us(r.t) // 2000"
    if how in ("semi", "anti"):
        query = f"select l.a, l.b, l.t, l.n, {window.format('l.t')} from l {how} join r on {on}"
    else:
        both = "coalesce(l.a, r.a), coalesce(l.b, r.b), l.t, l.n, r.t, r.n"
        query = f"select {both}, {window.format('coalesce(l.t, r.t)')} from l {how} join r on {on}"
    expected = Counter((*row[-2:], *row[:-3]) for row in sql(query, l=left, r=right))
    assert expected.total() > 50
    assert any(row[2] is None for row in expected) == (how not in ("inner", "semi"))
    assert Counter(both_sides(spec, left, right)) == expected


@pytest.mark.parametrize("how", ["inner", "left"])
def test_an_as_of_join_finds_no_version_for_a_null(how: Any) -> None:
    left, right = made(300, 8), made(300, 9)
    _, times = np.unique(right.column("t").to_numpy(), return_index=True)
    right = right.take(pa.array(times))  # of versions of one time DuckDB takes any
    spec = AsOfJoinSpec(left.schema, right.schema, KEYS, KEYS, "t", "t", how)
    query = f"""select l.a, l.b, l.t, l.n, r.t, r.n from l asof {how} join r
        on l.a = r.a and l.b = r.b and l.t >= r.t"""
    assert Counter(both_sides(spec, left, right)) == Counter(sql(query, l=left, r=right))


@pytest.mark.parametrize("how", ["inner", "left", "right", "full"])
def test_a_join_of_tables_pairs_no_nulls(how: JoinType) -> None:
    left, right = made(300, 10), made(300, 11)
    spec = TableJoinSpec(left.schema, right.schema, KEYS, KEYS, how)
    latest = "(select * from {} qualify row_number() over (partition by a, b order by n desc) = 1)"
    query = f"""select coalesce(l.a, r.a), coalesce(l.b, r.b), l.t, l.n, r.t, r.n from {latest.format("l")} l
        {how if how == "inner" else how + " outer"} join {latest.format("r")} r on l.a = r.a and l.b = r.b"""
    assert table_of(both_sides(spec, left, right, watermarks=False)) == Counter(sql(query, l=left, r=right))


def test_rows_of_a_full_join_with_null_keys_are_not_told_apart_by_them() -> None:
    flow = cw.Dataflow("joined")
    rows = flow.read("rows", cw.memory([], schema="k long, v long"))
    table = rows.key_by("k", nulls="key").deduplicate("latest", keep="last").key_by("k", nulls="key")
    joined = table.join_tables("full", table, how="full", keep="last")
    with pytest.raises(BuildError, match="no known key"):
        joined.key_by("k").join_tables("again", table)


# ------------------------------------------------------------------------------------------------------ user's logic


class Counting(cw.ProcessFunction):
    n = cw.ValueState("long")

    def process(self, row: dict[str, Any], ctx: Any) -> Any:
        self.n.value = self.n.get(0) + 1
        ctx.timers.register_event(row["t"])
        yield {"a": row["a"], "b": row["b"], "n": self.n.value}

    def on_timer(self, time: int, domain: Any, ctx: Any) -> Any:
        return ()


class CountingProcessor(StatefulProcessor):
    def init(self, handle: Any) -> None:
        self.n = handle.getValueState("n", "n long")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for row in rows:
            assert key == (row.a, row.b)
            n = self.n.get()[0] + 1 if self.n.exists() else 1
            self.n.update((n,))
            yield Row(a=row.a, b=row.b, n=n)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("hosted", [False, True])
def test_user_logic_is_called_with_none_in_the_key(hosted: bool) -> None:
    batch, out = made(600, 12), pa.schema({"a": pa.int64(), "b": pa.string(), "n": pa.int64()})
    made_spec: Any = ProcessorSpec(batch.schema, KEYS, CountingProcessor(), out) if hosted else None
    group = Group(made_spec or ProcessSpec(batch.schema, KEYS, Counting(), out), Clock(), ["a", "b"])
    for number, begin in enumerate(range(0, 600, 200)):
        group.rows(batch.slice(begin, 200))
        rows, group.made = group.made, []
        group = group.restored(group.freeze()(), 1 + number)
        group.made = rows + group.made
    query = "select a, b, count(*) over (partition by a, b order by n rows unbounded preceding) from t"
    assert Counter(tuple(row.values()) for row in group.made) == Counter(sql(query, t=batch))


def test_batches_are_grouped_with_nulls() -> None:
    batch = made(500, 13)
    grouped = group_rows(batch, KEYS)
    counts = np.bincount(grouped.codes)
    assert Counter(dict(zip(grouped.keys, counts.tolist(), strict=True))) == Counter(
        {(a, b): n for a, b, n in sql("select a, b, count(*) from t group by a, b", t=batch)}
    )


# ----------------------------------------------------------------------------------------------------- who is refused


def test_without_it_a_null_is_refused_and_the_hint_says_how_to_ask() -> None:
    batch = pa.record_batch({"a": pa.array([1.0, None])})
    with pytest.raises(DataError, match=r"'a' is null in row 1") as raised:
        HashPartitioner(batch.schema, ["a"], 2, 16).split(batch)
    assert "nulls='key'" in str(raised.value.hint)
    parts = HashPartitioner(batch.schema, NullableKeys(["a"]), 2, 16).split(batch)
    assert sum(part.num_rows for _, part in parts) == 2


@pytest.mark.parametrize("keys", [["a"], ["b"], ["a", "b"]])
def test_rows_go_where_their_key_group_is_whatever_lies_under_a_null(keys: list[str]) -> None:
    mask = np.random.default_rng(15).random(1000) < 0.5
    under = pa.record_batch({"a": pa.array(np.arange(1000), mask=mask), "b": made(1000, 15)["b"]})
    expected = owner(under, keys, 3)
    for target, part in HashPartitioner(under.schema, NullableKeys(keys), 3, 16).split(under):
        rows = [row for row, to in zip(under.to_pylist(), expected, strict=True) if to == target]
        assert part.to_pylist() == rows
    assert len({to for to, null in zip(expected, mask, strict=True) if null and keys == ["a"]}) <= 1


def test_nan_is_still_no_key() -> None:
    nan = pa.array(np.array([1.0, np.nan, np.nan]), mask=np.array([False, True, False]))
    batch = pa.record_batch({"a": nan})
    with pytest.raises(DataError, match=r"'a' is NaN in row 2"):
        HashPartitioner(batch.schema, NullableKeys(["a"]), 2, 16).split(batch)
    check = opened(KeyCheckSpec(batch.schema, NullableKeys(["a"])))
    assert [(n, b.num_rows) for n, b in check.process(0, batch)] == [(0, 2), (1, 1)]


@pytest.mark.parametrize("nulls", ["drop", None, True])
def test_another_word_is_refused_when_the_flow_is_written(nulls: Any) -> None:
    rows = cw.Dataflow("f").read("rows", cw.memory([], schema="k long"))
    with pytest.raises(BuildError, match="nulls is 'error' or 'key'"):
        rows.key_by("k", nulls=nulls)


def test_snapshots_hold_nulls_as_nulls() -> None:
    batch = made(200, 14)
    operator = opened(RunningAggregateSpec(batch.schema, KEYS, (Aggregate("c", "count"),), None))
    operator.process(0, batch)
    stored = [(row["a"], row["b"]) for segment in snapshot(operator) for row in segment.batch.to_pylist()]
    assert sorted(map(repr, stored)) == sorted(map(repr, sql("select distinct a, b from t", t=batch)))

"""Joins of tables against a model in plain Python and against DuckDB, over restores and with rows that are removed."""

from __future__ import annotations

from collections import Counter
from typing import Any, get_args
from unittest import mock

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_world import Change, Running, pieces, table_after, values

from cutwater.errors import BuildError, DataError
from cutwater.operators.aggregate import keyed_operator
from cutwater.operators.join.spec import JoinType, TableJoinSpec
from keyed_world import cuts

LEFT = pa.schema([("k", pa.int32()), ("v", pa.string()), pa.field("n", pa.int64(), nullable=False)])
RIGHT = pa.schema({"k": pa.int64(), "v": pa.float64(), "tags": pa.list_(pa.string())})
MARK = pa.field("op", pa.string())
HOWS = get_args(JoinType)


def marked(schema: pa.Schema) -> pa.Schema:
    return pa.schema([*schema, MARK])


def spec_of(how: JoinType, updating: bool = False) -> TableJoinSpec:
    left, right = (marked(LEFT), marked(RIGHT)) if updating else (LEFT, RIGHT)
    return TableJoinSpec(left, right, ("k",), ("k",), how, updating=(updating, updating))


def joined(tables: list[dict[int, tuple[Any, ...]]], how: str) -> Counter[Change]:
    """The join by definition."""
    left, right = tables
    found: Counter[Change] = Counter()
    for key in left.keys() | right.keys():
        if (key in left or how in ("right", "full")) and (key in right or how in ("left", "full")):
            found[(key, *left.get(key, (None, None)), *right.get(key, (None, None)))] += 1
    return found


def rows_of(side: int, keys: list[tuple[int, str]], first: int, updating: bool) -> pa.RecordBatch:
    schema = (LEFT, RIGHT)[side]
    rows = []
    for i, (key, op) in enumerate(keys, first):
        row: dict[str, Any] = {"k": key}
        row |= {"v": f"v{i}", "n": i} if side == 0 else {"v": i / 2, "tags": None if i % 3 == 0 else ["a"] * (i % 3)}
        rows.append(row | ({"op": op} if updating else {}))
    return pa.RecordBatch.from_pylist(rows, schema=marked(schema) if updating else schema)


STEPS = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.lists(st.tuples(st.integers(-2, 3), st.sampled_from(["+I", "+U", "-U", "-D"])), max_size=9),
    ),
    max_size=9,
)


@mock.patch.object(keyed_operator, "_SLACK_KEYS", 2)  # keys are swept all the time
@given(steps=STEPS, how=st.sampled_from(HOWS), updating=st.booleans(), data=st.data())
@settings(max_examples=100, deadline=None)
def test_any_history_cut_anywhere_and_restored_anywhere_leaves_the_join_of_the_tables(
    steps: list[tuple[int, list[tuple[int, str]]]], how: JoinType, updating: bool, data: st.DataObject
) -> None:
    tables: list[dict[int, tuple[Any, ...]]] = [{}, {}]
    running = Running(spec_of(how, updating), [("k",), ("k",)])
    table: Counter[Change] = Counter()
    unmatched = count = 0
    for side, keys in steps:
        batch = rows_of(side, keys, count, updating)
        count += len(keys)
        for row in batch.to_pylist():
            content = (row["v"], row["n"] if side == 0 else repr(row["tags"]))
            if not updating or row["op"] in ("+I", "+U"):
                tables[side][row["k"]] = content
            elif tables[side].pop(row["k"], None) is None:
                unmatched += 1
        # Both inputs compare keys as 64-bit integers, also for the choice of the subtask.
        outputs = [o for part in cuts(batch, data.draw(pieces(len(keys)))) for o in running.rows(part, side)]
        changes = [(*c[:-1], None if c[-2] is None else repr(c[-1])) for c in values(outputs)]
        for key in range(-2, 4):
            part = Counter({row: n for row, n in table.items() if row[0] == key})
            table = (table - part) + table_after([c for c in changes if c[1] == key], part)
        assert table == joined(tables, how)
        if data.draw(st.integers(0, 3)) == 0:
            running = running.restored(data.draw(st.integers(1, 3)), lambda s: data.draw(st.permutations(s)))
    assert running.count()["rows_unmatched"] == unmatched


@pytest.mark.parametrize("how", HOWS)
def test_it_agrees_with_duckdb(how: JoinType) -> None:
    sides = [
        rows_of(side, [((i * 7919 + side * 31) % (500 + 300 * side), "+I") for i in range(2000)], 5000 * side, False)
        for side in (0, 1)
    ]
    running = Running(spec_of(how), [("k",), ("k",)], 2)
    changes: list[Change] = []
    for begin in range(0, 2000, 400):
        for side in (0, 1):
            changes += values(running.rows(sides[side].slice(begin, 400), side))
        running = running.restored(1 + begin % 3)
    connection = duckdb.connect()
    latest = "select * from {} qualify row_number() over (partition by k order by {} desc) = 1"
    connection.register("l", pa.Table.from_batches([sides[0]]))
    connection.register("r", pa.Table.from_batches([sides[1]]))
    query = f"""select k, a.v, a.n, b.v from ({latest.format("l", "n")}) a
        {how if how == "inner" else how + " outer"} join ({latest.format("r", "v")}) b using (k)"""
    got = Counter(c[:4] for c in table_after((*c[:5], repr(c[5])) for c in changes))
    assert got == Counter(connection.execute(query).fetchall())


def test_a_key_whose_rows_are_all_removed_is_forgotten() -> None:
    running = Running(spec_of("full", True), [("k",), ("k",)])
    for begin in range(0, 40_000, 2_000):
        keys = range(begin, begin + 2_000)
        running.rows(rows_of(0, [(k, "+I") for k in keys], 0, True))
        running.rows(rows_of(0, [(k, "-D") for k in keys], 0, True))
    operator: Any = running._operators[0]
    assert len(operator._table) < 10_000


def test_names_and_types_of_the_columns() -> None:
    spec = spec_of("full")
    fields = {f.name: (f.type, f.nullable) for f in spec.outputs[0]}
    assert list(fields) == ["op", "k", "v", "n", "v_right", "tags"]
    assert fields["k"] == (pa.int64(), True)  # a key of either side fits
    assert fields["n"] == (pa.int64(), True)
    assert not spec_of("inner").outputs[0].field("n").nullable
    two = TableJoinSpec(LEFT, RIGHT.set(0, pa.field("key", pa.int64())), ("k",), ("key",), "left")
    assert two.outputs[0].names == ["op", "k", "v", "n", "key", "v_right", "tags"]


def test_mistakes() -> None:
    with pytest.raises(BuildError, match="how is one of 'inner'"):
        TableJoinSpec(LEFT, RIGHT, ("k",), ("k",), "outer")  # type: ignore[arg-type]
    with pytest.raises(BuildError, match="of different types"):
        TableJoinSpec(LEFT, RIGHT, ("v",), ("k",))
    with pytest.raises(BuildError, match="a column is named 'op' already"):
        TableJoinSpec(marked(LEFT), RIGHT, ("k",), ("k",))
    running = Running(spec_of("inner", True), [("k",), ("k",)])
    with pytest.raises(DataError, match="'op' is none of"):
        running.rows(rows_of(0, [(1, "insert")], 0, True))

"""Top-n against a sorted list in plain Python and against DuckDB: changes row by row, removed rows, restores."""

from __future__ import annotations

from collections import Counter
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_world import Change, Running, pieces, table_after, values

from cutwater.errors import BuildError
from cutwater.operators.ranking import top_operator
from cutwater.operators.ranking.top_spec import ROWS, TopRows, TopSpec
from keyed_world import cuts

PLAIN = {"k": pa.string(), "a": pa.float64(), "b": pa.int16(), "row": pa.int64()}
SCHEMA = pa.schema({**PLAIN, "tags": pa.list_(pa.int8())})
FLAT = pa.schema({**PLAIN, "op": pa.string()})
Row = tuple[str, float | None, int | None]


def spec_of(n: int, *, rank: bool = False, updating: bool = False, down: tuple[bool, ...] = (True, False)) -> TopSpec:
    rows = TopRows(ROWS, "top", by=("a", "b")[: len(down)], descending=down, n=n, removing=updating, ranked=rank)
    return TopSpec(FLAT if updating else SCHEMA, ("k",), rows, "rank" if rank else None, updating)


def order(row: tuple[Any, ...], down: tuple[bool, ...]) -> tuple[Any, ...]:
    """Nulls last, NaN the largest of all."""
    parts: list[Any] = []
    for value, descending in zip(row[1:], down, strict=False):
        number = (0, 0) if value is None else (1, 0) if value != value else (0, value)
        parts += [value is None, tuple(-p for p in number) if descending else number]
    return tuple(parts)


class Model:
    """A sorted list for each key; the changes that one row makes, by definition of the table."""

    def __init__(self, n: int, rank: bool, down: tuple[bool, ...]) -> None:
        self.n, self.rank, self.down = n, rank, down
        self.rows: dict[str, list[tuple[Any, ...]]] = {}
        self.missing = 0

    def table(self, key: str) -> list[tuple[Any, ...]]:
        return self.rows.get(key, [])[: self.n]

    def change(self, row: tuple[Any, ...], added: bool) -> list[Change]:
        held = self.rows.setdefault(row[0], [])
        before = self.table(row[0])
        if added:
            held.append(row)
            held.sort(key=lambda r: order(r, self.down))  # stable: equal rows stay in the order in which they came
        elif row not in held:
            self.missing += 1
            return []
        moved = [number for number, other in enumerate(held) if other == row][-1]  # the latest of equal rows
        if not added:
            del held[moved]
        after = self.table(row[0])
        if not self.rank:
            gone, come = Counter(before) - Counter(after), Counter(after) - Counter(before)
            return [("-D", *r) for r in gone] + [("+I", *r) for r in come]
        changes: list[Change] = []
        for place in range(moved, max(len(before), len(after))):  # all behind it move, be they equal or not
            old = (*before[place], place + 1) if place < len(before) else None
            new = (*after[place], place + 1) if place < len(after) else None
            changes += [("-U", *old), ("+U", *new)] if old and new else [("-D", *old)] if old else []
            changes += [("+I", *new)] if new and not old else []
        return changes


VALUES = st.tuples(
    st.sampled_from(["", "a", "b"]),
    st.none() | st.sampled_from([-1.5, 0.0, 2.0, float("inf")]),
    st.none() | st.integers(-2, 2),
)


def batch_of(rows: list[tuple[Any, ...]]) -> pa.RecordBatch:
    columns: list[Any] = [[r[c] for r in rows] for c in range(4)]
    tags = [None if r[3] % 3 == 0 else [r[3] % 100] for r in rows]
    return pa.RecordBatch.from_arrays(
        [pa.array(v, t) for v, t in zip([*columns, tags], SCHEMA.types, strict=True)], schema=SCHEMA
    )


@given(
    rows=st.lists(VALUES, max_size=40),
    n=st.integers(1, 4),
    rank=st.booleans(),
    down=st.sampled_from([(True, False), (False, True), (True,), (False,)]),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_rows_that_come_change_the_table_row_by_row(
    rows: list[Row], n: int, rank: bool, down: tuple[bool, ...], data: st.DataObject
) -> None:
    numbered = [(*row, i) for i, row in enumerate(rows)]
    model, running = Model(n, rank, down), Running(spec_of(n, rank=rank, down=down), [("k",)])
    got: list[Change] = []
    for part in cuts(batch_of(numbered), data.draw(pieces(len(rows)))):
        got += [c[:5] + c[6:] for c in values(running.rows(part))]
        if data.draw(st.booleans()):
            running = running.restored(data.draw(st.integers(1, 3)), lambda s: data.draw(st.permutations(s)))
    expected = [change for row in numbered for change in model.change(row, True)]
    for key in ("", "a", "b"):
        assert [c for c in got if c[1] == key] == [c for c in expected if c[1] == key]


@given(
    steps=st.lists(st.tuples(VALUES, st.integers(0, 2), st.none() | st.integers(0, 20)), max_size=50),
    n=st.integers(1, 3),
    rank=st.booleans(),
    data=st.data(),
)
@settings(max_examples=100, deadline=None)
def test_rows_that_are_removed_let_the_next_ones_move_up(
    steps: list[tuple[Row, int, int | None]], n: int, rank: bool, data: st.DataObject
) -> None:
    """Removed are rows that are there, first or not, equal to others or not; and some that are not there."""
    present: list[tuple[Any, ...]] = []
    rows: list[dict[str, Any]] = []
    for number, (content, extra, chosen) in enumerate(steps):
        row = (*content, extra)
        if chosen is None:
            present.append(row)
        elif chosen > 0 and present:
            row = present.pop(chosen % len(present))
        op = ("+I", "+U")[number % 2] if chosen is None else ("-U", "-D")[number % 2]
        rows.append(dict(zip(PLAIN, row, strict=True)) | {"op": op})
    spec = spec_of(n, rank=rank, updating=True)
    model, running = Model(n, rank, (True, False)), Running(spec, [("k",)])
    got: list[Change] = []
    for part in cuts(pa.RecordBatch.from_pylist(rows, schema=FLAT), data.draw(pieces(len(steps)))):
        got += values(running.rows(part))
        if data.draw(st.booleans()):
            running = running.restored(data.draw(st.integers(1, 3)), lambda s: data.draw(st.permutations(s)))
    expected = [c for *row, op in map(dict.values, rows) for c in model.change(tuple(row), op in ("+I", "+U"))]
    for key in ("", "a", "b"):
        ours, theirs = ([c for c in changes if c[1] == key] for changes in (got, expected))
        assert ours == theirs
        table_after(ours)
    assert running.count()["rows_unmatched"] == model.missing


@pytest.mark.parametrize("rank", [False, True])
def test_it_agrees_with_duckdb_over_many_keys_and_portions(rank: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top_operator, "_OUTPUT_ROWS", 100)  # many portions for one batch
    monkeypatch.setattr(top_operator, "_GARBAGE_ROWS", 50)
    random = np.random.default_rng(7)
    keys = [f"k{k}" for k in random.integers(0, 120, 12_000)]
    prices = random.integers(0, 5_000, 12_000) / 4
    ties = random.integers(0, 9, 12_000).tolist()
    rows = list(zip(keys, prices.tolist(), ties, range(12_000), strict=True))
    batch = batch_of(rows)
    running = Running(spec_of(5, rank=rank), [("k",)], 2)
    changes: list[Change] = []
    for number, begin in enumerate(range(0, 12_000, 1_500)):
        changes += [c[:5] + c[6:] for c in values(running.rows(batch.slice(begin, 1_500)))]
        if number % 3 == 2:
            running = running.restored(1 + number % 2)
    place = "row_number() over (partition by k order by a desc, b, row)"
    query = f"select k, a, b, row{f', {place}' if rank else ''} from t qualify {place} <= 5"
    expected = duckdb.from_arrow(pa.Table.from_batches([batch])).query("t", query).fetchall()
    assert table_after(changes) == Counter(expected)


def test_a_snapshot_is_of_its_instant_whatever_comes_after() -> None:
    """Lists grow, change and are packed while the snapshot waits to be written."""
    running = Running(spec_of(3), [("k",)])
    running.rows(batch_of([(f"k{i % 50}", float(i % 97), 0, i) for i in range(2_000)]))
    operator: Any = running._operators[0]
    at_once = operator.freeze(1)
    expected = [s.batch.to_pylist() for s in at_once.segments()]
    at_once.release()
    frozen = operator.freeze(2)
    for begin in range(2_000, 30_000, 2_000):
        running.rows(batch_of([(f"k{i % 300}", float(i % 997) + i, 0, i) for i in range(begin, begin + 2_000)]))
    assert [s.batch.to_pylist() for s in frozen.segments()] == expected
    frozen.release()
    assert len(operator._ranked._store) < 12_000  # rows that nobody refers to are swept out


def test_mistakes() -> None:
    def spec(schema: pa.Schema = SCHEMA, rank: str | None = None, updating: bool = False, **given: Any) -> TopSpec:
        rows = TopRows(ROWS, "top", **({"by": ("a",), "descending": (True,), "n": 3} | given))
        return TopSpec(schema, ("k",), rows, rank, updating)

    for wrong in (0, 10_001, 2.5, True):
        with pytest.raises(BuildError, match="n is a whole number from 1 to 10000"):
            spec(n=wrong)
    with pytest.raises(BuildError, match="'c'"):
        spec(by=("c",))
    with pytest.raises(BuildError, match="cannot be ordered by 'tags'"):
        spec(by=("tags",))
    with pytest.raises(BuildError, match="by names at least one column"):
        spec(by=("a", "b"))
    with pytest.raises(BuildError, match="two columns would be named 'row'"):
        spec(rank="row")
    with pytest.raises(BuildError, match="cannot be recognised by 'tags'"):
        spec(pa.schema([*SCHEMA, ("op", pa.string())]), updating=True)

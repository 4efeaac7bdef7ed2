"""Comparing two results, against ``collections.Counter``."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from cutwater.chaos.trial import compare

ROWS = st.lists(st.tuples(st.integers(0, 3) | st.none(), st.sampled_from(["a", "b", None])), max_size=12)
SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.string())])


def table(rows, schema=SCHEMA):
    return pa.Table.from_pylist([dict(zip(schema.names, row, strict=True)) for row in rows], schema)


def ordered(row):
    return [(x is not None, x if x is not None else 0) for x in row]


@settings(deadline=None)
@given(ROWS, ROWS)
def test_it_finds_the_first_row_that_a_counter_finds(calm, stormy):
    found = compare(table(calm), table(stormy))
    without, struck = Counter(calm), Counter(stormy)
    if without == struck:
        assert found is None
        return
    first = min((row for row in without | struck if without[row] != struck[row]), key=ordered)
    assert tuple(found.row.values()) == first
    assert (found.times_without, found.times_with) == (without[first], struck[first])
    assert found.row_number == 1 + sum(ordered(row) < ordered(first) for row in calm)
    assert (found.lost, found.extra) == ((without - struck).total(), (struck - without).total())


@settings(deadline=None)
@given(ROWS.flatmap(lambda rows: st.tuples(st.just(rows), st.permutations(rows))))
def test_order_does_not_matter(both):
    one, other = both
    assert compare(table(one), table(other)) is None


CHANGES = pa.schema([("op", pa.string()), *SCHEMA])


def test_updating_streams_are_compared_by_the_tables_they_lead_to():
    slow = [("+I", 1, "a"), ("-U", 1, "a"), ("+U", 1, "b")]
    assert compare(table(slow, CHANGES), table([("+I", 1, "b")], CHANGES), updating=True) is None
    found = compare(table(slow, CHANGES), table(slow[:1], CHANGES), updating=True)
    assert (found.row, found.times_without, found.times_with) == ({"k": 1, "v": "a"}, 0, 1)
    assert compare(table(slow, CHANGES), table([("+I", 1, "b")], CHANGES)) is not None


def test_floats_are_compared_to_so_many_digits():
    one, other = pa.table({"x": [0.1 + 0.2]}), pa.table({"x": [0.3]})
    assert compare(one, other) is not None
    assert compare(one, other, digits=12) is None
    assert compare(one, pa.table({"x": [0.31]}), digits=12) is not None


def test_an_ignored_column_does_not_count():
    one, other = table([(1, "a"), (2, "b")]), table([(1, "b"), (2, "a")])
    assert compare(one, other) is not None
    assert compare(one, other, ignore=["v"]) is None
    assert compare(one, other, ignore=["k", "v"]) is None


def test_rows_of_nested_types_are_compared():
    rows = pa.table({"l": [[1, 2], None], "s": [{"a": 1, "b": [1.0]}, None], "m": [b"x", None], "f": [float("nan"), 1]})
    assert compare(rows, rows.take([1, 0])) is None
    assert compare(rows, rows.take([0, 0])) is not None
    assert compare(rows, rows.slice(0, 0)).lost == 2

"""The step that diverts rows without a usable key."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cutwater.errors import BuildError
from cutwater.operators.stateless.rows import KeyCheckSpec

SCHEMA = pa.schema({"a": pa.float64(), "b": pa.string(), "n": pa.int64()})
FLOATS = st.one_of(st.none(), st.just(math.nan), st.floats(allow_nan=False))
ROWS = st.lists(st.tuples(FLOATS, st.one_of(st.none(), st.text(max_size=3))), max_size=20)


class CountingContext:
    def __init__(self):
        self.counts = {}

    def count(self, metric, amount=1):
        self.counts[metric] = self.counts.get(metric, 0) + amount


@given(rows=ROWS)
def test_every_row_leaves_by_the_output_it_belongs_to_in_order(rows):
    operator = KeyCheckSpec(SCHEMA, ("a", "b")).build()
    operator.open(context := CountingContext())
    table = [{"a": a, "b": b, "n": n} for n, (a, b) in enumerate(rows)]
    numbers = {0: [], 1: []}
    for output, batch in operator.process(0, pa.RecordBatch.from_pylist(table, schema=SCHEMA)):
        assert batch.schema == SCHEMA
        numbers[output] += batch.column("n").to_pylist()
    usable = [a is not None and not math.isnan(a) and b is not None for a, b in rows]
    assert numbers == {0: [n for n, ok in enumerate(usable) if ok], 1: [n for n, ok in enumerate(usable) if not ok]}
    assert context.counts.get("rows_dead_letter", 0) == len(numbers[1])


@pytest.mark.parametrize("keys", [(), ("x",), ("a", "a")])
def test_keys_are_checked(keys):
    with pytest.raises(BuildError):
        KeyCheckSpec(SCHEMA, keys)

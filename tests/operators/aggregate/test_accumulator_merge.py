"""Merging states: the parts' aggregates together are the aggregate of all values."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cutwater.operators.aggregate.accumulators import Aggregate
from keyed_world import AGGREGATES, VALUES, aggregate, fitting, same

CASES = [(kind, name) for kind in AGGREGATES for name in fitting(kind)]


@pytest.mark.parametrize(("kind", "name"), CASES)
@given(data=st.data())
@settings(max_examples=8, deadline=None)
def test_merged_parts_equal_the_whole(kind: str, name: str, data: st.DataObject) -> None:
    """Two group ids; each gets its values in parts, some of them held before the merge."""
    arrow, values = VALUES[name]
    rows = data.draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.none() | values), max_size=12))
    schema = pa.schema([("v", arrow)])
    call = Aggregate("x", kind, "v")
    into, parts = call.accumulator(schema), call.accumulator(schema)
    into.reserve(2)
    parts.reserve(8)
    for part, gids, target in ((0, 1, into), (1, 4, parts)):  # part 0 is held already, 1 .. 3 are merged in order
        taken = [r for r in rows if min(r[1], 1) == part]
        batch = pa.record_batch([pa.array([r[2] for r in taken], arrow)], schema=schema)
        target.update(np.array([r[0] * gids + r[1] for r in taken], np.int32), batch)
    sources = np.array([1, 2, 3, 5, 6, 7], np.int32)
    into.merge(np.array([0, 0, 0, 1, 1, 1], np.int32), parts.state(sources))
    results = into.result(np.arange(2, dtype=np.int32))
    results.validate(full=True)
    for key, got in enumerate(results.to_pylist()):
        ordered = sorted((r for r in rows if r[0] == key), key=lambda r: r[1])
        expected = aggregate(kind, pa.array([r[2] for r in ordered], arrow).to_pylist())
        assert same(got, expected), (got, expected)

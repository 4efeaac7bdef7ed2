"""Rows come out as they went in, also those of a view that was taken before others came."""

from __future__ import annotations

import datetime as dt

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from cutwater.state.table.row_store import RowStore

COLUMNS: dict[pa.DataType, st.SearchStrategy[object]] = {
    pa.int64(): st.integers(-(2**63), 2**63 - 1),
    pa.uint8(): st.integers(0, 255),
    pa.float64(): st.floats(allow_nan=False),
    pa.bool_(): st.booleans(),
    pa.timestamp("us", "UTC"): st.datetimes(timezones=st.just(dt.UTC)),
    pa.string(): st.text(max_size=5),
    pa.list_(pa.int32()): st.lists(st.integers(0, 9), max_size=3),
}
ROWS = st.lists(st.tuples(*(st.none() | values for values in COLUMNS.values())), max_size=12)


def arrays(rows: list[tuple[object, ...]], skipped: int) -> list[pa.Array]:
    """The columns of some rows, as parts of longer arrays."""
    padded = rows[:1] * skipped + rows
    return [pa.array([row[c] for row in padded], kind).slice(skipped) for c, kind in enumerate(COLUMNS)]


def rows_of(columns: list[pa.Array]) -> list[tuple[object, ...]]:
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


@given(batches=st.lists(ROWS, max_size=6), cut=st.integers(0, 6), data=st.data())
@settings(max_examples=60, deadline=None)
def test_rows_come_back_by_number_and_views_stay(
    batches: list[list[tuple[object, ...]]], cut: int, data: st.DataObject
) -> None:
    store, model = RowStore(list(COLUMNS)), list[tuple[object, ...]]()
    view, held = store.frozen(), 0
    for number, batch in enumerate(batches):
        if number == cut:
            view, held = store.frozen(), len(model)
        store.append(arrays(batch, data.draw(st.integers(0, 9)) if batch else 0))
        model += batch
    assert (len(store), len(view)) == (len(model), held)
    nothing = (None,) * len(COLUMNS)
    for of, rows in ((store, len(model)), (view, held)):
        wanted = data.draw(st.lists(st.integers(-1, rows - 1), max_size=20))
        found = of.take(np.array(wanted, np.int64))
        assert rows_of(found) == [model[i] if i >= 0 else nothing for i in wanted]


def test_growth_leaves_views_as_they_were() -> None:
    store = RowStore([pa.int64(), pa.string()])
    batch = [pa.array([1, None, 3] * 500), pa.array(["a", "b", None] * 500)]
    store.append(batch)
    view = store.frozen()
    for _ in range(5):
        store.append([pa.array([7] * 1500), pa.array(["x"] * 1500)])
    assert [c.to_pylist() for c in view.take(np.arange(1500))] == [c.to_pylist() for c in batch]
    assert [c.to_pylist() for c in store.take(np.array([1501, 1]))] == [[7, None], ["x", "b"]]

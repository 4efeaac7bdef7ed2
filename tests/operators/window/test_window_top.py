"""The first rows of each window: lists as an aggregate of windows, and the step that takes them apart."""

from __future__ import annotations

import datetime as dt

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from table_world import Running, values

from cutwater.data.time import MAX_WATERMARK
from cutwater.operators.base import Outputs
from cutwater.operators.ranking.top_spec import ROWS, TopRows
from cutwater.operators.stateless.rows import UnnestSpec
from cutwater.operators.window.kinds import SlidingWindow, TumblingWindow
from cutwater.operators.window.spec import WindowAggregateSpec

SCHEMA = pa.schema({"t": pa.timestamp("us"), "k": pa.string(), "price": pa.int64(), "row": pa.int64()})


@pytest.mark.parametrize("window", [TumblingWindow(1_000), SlidingWindow(1_000, 500)])
def test_it_agrees_with_duckdb(window: TumblingWindow | SlidingWindow) -> None:
    """Parts of sliding windows are merged: the first rows of the whole are among the first of the parts."""
    random = np.random.default_rng(6)
    n = 4_000
    times = np.sort(random.integers(0, 20_000, n))
    columns = [pa.array(times, pa.timestamp("us")), pa.array([f"k{k}" for k in random.integers(0, 9, n)])]
    batch = pa.RecordBatch.from_arrays(
        [*columns, pa.array(random.permutation(n)), pa.array(np.arange(n))], schema=SCHEMA
    )
    rows = TopRows(ROWS, "top", by=("price",), descending=(True,), n=3)
    running = Running(WindowAggregateSpec(SCHEMA, ("k",), "t", window, (rows,)), [("k",)], 2)
    outputs: Outputs = []
    for number, begin in enumerate(range(0, n, 500)):
        outputs += running.rows(batch.slice(begin, 500))
        outputs += running.watermark(int(times[begin + 499]) - 1)
        running = running.restored(1 + number % 3)
    outputs += running.watermark(MAX_WATERMARK)
    unnest = UnnestSpec(running.spec.outputs[0], ROWS, ("window_start",), "rank").build()
    got = sorted(values([o for _, lists in outputs for o in unnest.process(0, lists)]), key=repr)
    every = 1_000 if isinstance(window, TumblingWindow) else 500
    pane = f"epoch_us(t) // {every} * {every}"  # a row lies in windows that start in its pane, or one before it
    query = f"""with placed as (select t, k, price, row, {pane} - back as start
            from t, (select unnest(range(0, 1000, {every})) as back) where {pane} - back + 1000 > epoch_us(t))
        select start, k, price, row, row_number() over (partition by start, k order by price desc) as rank
        from placed qualify rank <= 3"""
    expected = duckdb.from_arrow(pa.Table.from_batches([batch])).query("t", query).fetchall()
    epoch = dt.datetime(1970, 1, 1)
    ours = sorted(((r[0] - epoch) // dt.timedelta(microseconds=1), *r[2:]) for r in got)  # type: ignore[operator]
    assert ours == sorted(expected)

"""A ``StatefulProcessor`` on real worker processes that are killed: each row counts once, each timer fires once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from fake_host import FakeSpark
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from runtime_world import gated, kill_some, open_gate, query

import cutwater as cw

ROWS, RATE, KEYS = 12_000, 30_000, 97
BUCKET_MS = 5


class Buckets(StatefulProcessor):
    """Counts the rows of a key and keeps their ids until the watermark has passed their bucket."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.count = handle.getValueState("count", "n long")
        self.buckets = handle.getMapState("buckets", "ms long", "ids array<long>")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        n = self.count.get()[0] if self.count.exists() else 0
        for row in rows:
            n += 1
            bucket = row.us // (BUCKET_MS * 1000) * BUCKET_MS
            ids = self.buckets.getValue((bucket,)) or ([],)
            self.buckets.updateValue((bucket,), ([*ids[0], row.value],))
            self.handle.registerTimer(bucket + BUCKET_MS)
            yield Row(key=key[0], kind="row", spot=row.value, n=n, ids=None)
        self.count.update((n,))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Iterator[Row]:
        bucket = expiredTimerInfo.getExpiryTimeInMs() - BUCKET_MS
        (ids,) = self.buckets.getValue((bucket,))
        self.buckets.removeKey((bucket,))
        yield Row(key=key[0], kind="bucket", spot=bucket, n=len(ids), ids=sorted(ids))

    def handleInitialState(self, key: Any, initialState: Row, timerValues: Any) -> None:
        self.count.update((initialState.n,))


class BucketsInPandas(Buckets):
    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for frame in rows:
            yield self.frame(list(super().handleInputRows(key, frame.itertuples(), timerValues)))

    def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
        return iter([self.frame(list(super().handleExpiredTimer(key, timerValues, expiredTimerInfo)))])

    def handleInitialState(self, key: Any, initialState: Any, timerValues: Any) -> None:
        self.count.update((initialState["n"].iloc[0],))

    def frame(self, made: list[Row]) -> Any:
        import pandas as pd

        return pd.DataFrame([row.asDict() for row in made])


SCHEMA = "key long, kind string, spot long, n long, ids array<long>"
INITIAL = pa.table(
    {"key": pa.array(range(0, KEYS, 2), pa.int64()), "n": pa.array([1000] * (KEYS // 2 + 1), pa.int64())}
)


@pytest.mark.parametrize("form", ["rows", pytest.param("pandas", marks=pytest.mark.full)])
def test_each_row_counts_once_and_each_timer_fires_once(
    start, fake_spark: FakeSpark, tmp_path: Path, form: str
) -> None:
    flow = cw.Dataflow("buckets")
    rows = flow.read("in", gated(tmp_path, ROWS, rate=RATE), event_time="timestamp", out_of_order="5ms")
    keyed = rows.with_columns("key", key=pl.col("value") % KEYS, us=pl.col("timestamp").cast(pl.Int64)).key_by("key")
    if form == "rows":
        made = keyed.transform_with_state(
            "p", Buckets(), SCHEMA, "Append", "EventTime", initial_state=INITIAL, parallelism=3
        )
    else:
        made = keyed.transform_with_state_in_pandas(
            "p", BucketsInPandas(), SCHEMA, "Append", "EventTime", initial_state=INITIAL, parallelism=3
        )
    made.write("out", cw.files(str(tmp_path / "out"), roll_rows=500))
    made.late.write("late", cw.files(str(tmp_path / "late")))
    rows.write("raw", cw.files(str(tmp_path / "raw")))
    job = start(flow, parallelism=3)
    kill_some(job, fake_spark, 3, seed=5)
    open_gate(tmp_path)
    assert job.await_termination(120)
    assert job.status.restarts == 3
    folders = {name: tmp_path / name for name in ("raw", "out")}
    counted = query(
        """SELECT key, count(*), count(DISTINCT spot), min(n), max(n), count(DISTINCT n) FROM {out}
        WHERE kind = 'row' GROUP BY key ORDER BY key""",
        **folders,
    )
    expected = []
    for key in range(KEYS):
        rows_of_key, before = len(range(key, ROWS, KEYS)), 1000 if key % 2 == 0 else 0
        expected.append((key, rows_of_key, rows_of_key, before + 1, before + rows_of_key, rows_of_key))
    assert counted == expected
    differ = query(
        f"""WITH expected AS (
          SELECT value % {KEYS} AS key, epoch_us(timestamp) // {BUCKET_MS * 1000} * {BUCKET_MS} AS spot,
            list_sort(list(value)) AS ids
          FROM {{raw}} GROUP BY ALL
        ), made AS (SELECT key, spot, ids FROM {{out}} WHERE kind = 'bucket')
        (SELECT * FROM expected EXCEPT ALL SELECT * FROM made)
        UNION ALL (SELECT * FROM made EXCEPT ALL SELECT * FROM expected)""",
        **folders,
    )
    assert not differ, f"buckets that differ from DuckDB's: {differ[:3]} of {len(differ)}"

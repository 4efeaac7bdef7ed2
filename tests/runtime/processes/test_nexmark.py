"""The queries of Nexmark on real processes, one of which is killed, against DuckDB over the same rows."""

from __future__ import annotations

import datetime as dt
import sys
from pathlib import Path

import duckdb
import polars as pl
import pytest
from fake_host import FakeSpark
from runtime_world import kill_some

import cutwater as cw

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

import nexmark_data as nx
from nexmark_queries import QUERIES, Query, Tables

EVENTS, PER_SECOND = 66_000, 3_000
"""22 seconds of event time: two whole windows and a part of one."""


@pytest.fixture(scope="module")
def house() -> duckdb.DuckDBPyConnection:
    """The same events as tables."""
    connection = duckdb.connect()
    tables: dict[str, nx.Table] = {
        "person": nx.People(PER_SECOND), "auction": nx.Auctions(PER_SECOND), "bid": nx.Bids(PER_SECOND),
    }  # fmt: skip
    for name, table in tables.items():
        connection.register("rows", without_zone(pl.DataFrame(table(0, nx.rows_of(table, EVENTS)))).to_arrow())
        connection.execute(f"CREATE TABLE {name} AS SELECT * FROM rows")
    return connection


def without_zone(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.with_columns(pl.col(pl.Datetime("us", "UTC")).dt.replace_time_zone(None))


def over_windows(found: pl.DataFrame, query: Query) -> pl.DataFrame:
    """The sums over the windows of each key, of which there is one for each ten seconds of the clock at most."""
    start, end = pl.col("window_start"), pl.col("window_end")
    assert found.select((end - start == dt.timedelta(seconds=10)).all()).item()
    assert found.select((start.dt.truncate("10s") == start).all()).item()
    assert not found.select(*query.key or (), "window_start").is_duplicated().any()
    return found.group_by(query.key).agg(pl.sum(*query.summed))


SLOW_OR_LIKE_ANOTHER = ("q0", "q1", "q2", "q6", "q7", "q10", "q14", "q15", "q16", "q17", "q18", "q20", "q21", "q22")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] * (name in SLOW_OR_LIKE_ANOTHER)) for name in QUERIES]
)
def test_a_query_gives_what_sql_gives(
    start, fake_spark: FakeSpark, house: duckdb.DuckDBPyConnection, tmp_path: Path, name: str
) -> None:
    query = QUERIES[name]
    flow = cw.Dataflow(name)
    result = query.build(Tables(flow, EVENTS, PER_SECOND, rate=100_000))
    result.write("out", cw.files(str(tmp_path / "out")))
    job = start(flow)
    kill_some(job, fake_spark, 1, seed=3)
    assert job.await_termination(60)
    assert job.status.restarts >= 1
    found = without_zone(pl.read_parquet(tmp_path / "out" / "*.parquet"))
    expected = house.execute(query.sql).pl()
    if "op" in found.columns:
        rows = [c for c in found.columns if c != "op"]
        sign = pl.when(pl.col("op").is_in(["+I", "+U"])).then(1).otherwise(-1)
        found = found.with_columns(n=sign).group_by(rows).agg(pl.sum("n")).filter(pl.col("n") != 0)
        assert found["n"].unique().to_list() == [1]
    if query.summed:
        found = over_windows(found, query)
    elif query.key is not None:
        newest = {c: pl.col(c).sort_by(query.order).last() for c in found.columns if c not in query.key}
        found = found.group_by(query.key).agg(**newest)
    assert found.height > 0
    assert found.height == expected.height
    columns = expected.columns
    found, expected = found.select(columns).sort(columns), expected.sort(columns)
    exact = [c for c in columns if not expected[c].dtype.is_float()]
    assert found.select(exact).equals(expected.select(exact).cast(found.select(exact).schema))
    for column in set(columns) - set(exact):
        assert (found[column] - expected[column]).abs().max() < 1e-6

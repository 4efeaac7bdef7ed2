"""Windows of all kinds on real worker processes that are killed: the results are DuckDB's, each once."""

from __future__ import annotations

from pathlib import Path

import polars as pl
from fake_host import FakeSpark
from runtime_world import gated, kill_some, open_gate, query

import cutwater as cw

ROWS, RATE, KEYS = 12_000, 30_000, 97
SIZE_US, EVERY_US, GAP_US, TENS = 50_000, 20_000, 7_000, 10


def windowed(folder: Path) -> cw.Dataflow:
    flow = cw.Dataflow("windowed")
    rows = flow.read("in", gated(folder, ROWS, rate=RATE), event_time="timestamp", out_of_order="5ms")
    thin = rows.filter("thin", pl.col("value") * pl.col("value") % 11 < 5)
    keyed = thin.with_columns("key", key=pl.col("value") % KEYS).key_by("key")
    aggregates = {"n": cw.count(), "low": cw.min("value"), "high": cw.max("value"), "total": cw.sum("value")}
    kinds = {
        "sliding": keyed.window("s", cw.sliding("50ms", every="20ms")),
        "session": keyed.window("g", cw.session("7ms")),
        "tens": keyed.window("a", cw.global_window(), early=cw.every(rows=TENS), discarding=True),
        "clock": keyed.window("c", cw.tumbling("20ms", time="processing")),
        "slid_clock": keyed.window("cs", cw.sliding("60ms", every="20ms", time="processing")),
        "session_clock": keyed.window("cg", cw.session("20ms", time="processing")),
    }
    for name, kind in kinds.items():
        kind.aggregate(name, **aggregates).write(f"{name}-out", cw.files(str(folder / name)))
    thin.write("raw", cw.files(str(folder / "raw")))
    return flow


def test_windows_of_killed_workers_equal_those_of_duckdb(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    job = start(windowed(tmp_path), parallelism=3)
    kill_some(job, fake_spark, 3, seed=11)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert job.status.restarts == 3
    rows = f"rows AS (SELECT value % {KEYS} AS key, value, epoch_us(timestamp) AS t FROM {{raw}})"
    found = "count(*), min(value), max(value), sum(value)"
    expected = {
        "sliding": f"""WITH {rows}, windows AS (SELECT DISTINCT (t // {EVERY_US} - back) * {EVERY_US} AS s
            FROM rows, range({SIZE_US // EVERY_US + 1}) AS r(back))
            SELECT key, s, s + {SIZE_US}, {found} FROM rows, windows
            WHERE t >= s AND t < s + {SIZE_US} GROUP BY key, s""",
        "session": f"""WITH {rows}, marked AS (SELECT *, coalesce(t - lag(t) OVER w > {GAP_US}, true) AS fresh
            FROM rows WINDOW w AS (PARTITION BY key ORDER BY t)),
            numbered AS (SELECT *, sum(fresh::INT) OVER (PARTITION BY key ORDER BY t) AS s FROM marked)
            SELECT key, min(t), max(t) + {GAP_US}, {found} FROM numbered GROUP BY key, s""",
        "tens": f"""WITH {rows} SELECT key, count(*), sum(value), ceil(count(*) / {TENS}) FROM rows GROUP BY key""",
    }
    columns = "key, epoch_us(window_start), epoch_us(window_end), n, low, high, total"
    ours = {
        "sliding": f"SELECT {columns} FROM {{sliding}}",
        "session": f"SELECT {columns} FROM {{session}}",
        "tens": "SELECT key, sum(n), sum(total), count(*) FROM {tens} GROUP BY key",
    }
    for name in ours:
        folders = {"raw": tmp_path / "raw", name: tmp_path / name}
        wanted, got = query(expected[name], **folders), query(ours[name], **folders)
        assert len(wanted) >= KEYS
        assert sorted(got) == sorted(wanted)
    for name, overlap in {"clock": 1, "slid_clock": 3, "session_clock": 1}.items():
        assert_by_the_clock(tmp_path, name, overlap)


def assert_by_the_clock(folder: Path, name: str, overlap: int) -> None:
    """Where the windows lie, the clock alone knows: but each row is in ``overlap`` of them, and each comes out once."""
    folders = {"raw": folder / "raw", name: folder / name}
    windows = f"SELECT *, epoch_us(window_start) AS s, epoch_us(window_end) AS e FROM {{{name}}}"
    sums = f"""SELECT key, sum(n), min(low), max(high), sum(total) FROM ({windows}) GROUP BY key"""
    rows = f"""SELECT value % {KEYS} AS key, {overlap} * count(*), min(value), max(value), {overlap} * sum(value)
        FROM {{raw}} GROUP BY key"""
    assert sorted(query(sums, **folders)) == sorted(query(rows, **folders))
    if name == "session_clock":
        wrong = (
            f"SELECT 1 FROM (SELECT s < lag(e) OVER (PARTITION BY key ORDER BY s) AS meet FROM ({windows})) WHERE meet"
        )
    else:
        wrong = f"""SELECT 1 FROM ({windows}) GROUP BY key, s
            HAVING count(*) > 1 OR any_value(s % 20000) <> 0 OR any_value(e - s) <> {overlap} * 20000"""
    assert query(wrong, **folders) == []

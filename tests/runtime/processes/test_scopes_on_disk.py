"""Only a part goes back, and what waits for the watermark lies on disk: it comes out in one order, under kills."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_host import FakeSpark
from runtime_world import assert_ids, gated, query
from scope_world import UNITS, after_checkpoints, assert_numbered, end, kill, ride_out

import cutwater as cw
from cutwater.api.jobs.job import Job

pytest.importorskip("rocksdict")

StartJob = Callable[..., Job]
ROWS, KEYS, RATE = 24_000, 1_500, 10_000.0
"""A row every 100 microseconds of event time; a key every 150 milliseconds."""

WINDOWS: dict[str, Callable[[Any], Any]] = {
    "tumbling": lambda keyed: keyed.window("w", cw.tumbling("300ms")),
    "sliding": lambda keyed: keyed.window("w", cw.sliding("400ms", every="200ms"), allowed_lateness="50ms"),
    "sessions": lambda keyed: keyed.window("w", cw.session("200ms")),
    "early": lambda keyed: keyed.window("w", cw.tumbling("600ms"), early=cw.every(event_time="150ms")),
}
IN_WINDOWS = (
    "SELECT v % {keys} AS who, count(*) AS rows, sum(v)::BIGINT AS total, max(v) AS v FROM {of} GROUP BY who, {by}"
)
SESSIONS = """(SELECT v, sum(fresh) OVER (PARTITION BY v % 1500 ORDER BY v) AS w FROM
    (SELECT v, coalesce(v - lag(v) OVER (PARTITION BY v % 1500 ORDER BY v) > 2000, true)::INT AS fresh FROM rows))"""
OF_EACH = {
    "tumbling": ("rows", "v // 3000"),
    "sliding": ("(SELECT v, unnest([v // 2000, v // 2000 - 1]) AS w FROM rows)", "w"),
    "sessions": (SESSIONS, "w"),
    "early": ("rows", "v // 6000"),
}


def windowed(name: str, folder: Path, kind: str) -> cw.Dataflow:
    """The results are numbered per ``k``, dealt out in turns, and numbered once more per ``j``."""
    flow = cw.Dataflow(name)
    rows = flow.read("in", gated(folder, ROWS, rate=RATE), event_time="timestamp", out_of_order="20ms")
    thin = rows.filter("thin", pl.col("value") * pl.col("value") % 11 < 5)
    text = pl.col("value").cast(pl.String) + "-" * 3_000
    keyed = thin.with_columns("keyed", who=pl.col("value") % KEYS, v=pl.col("value"), text=text).key_by("who")
    totals = {"rows": cw.count(), "total": cw.sum("v"), "v": cw.max("v"), "text": cw.last("text")}
    results = WINDOWS[kind](keyed).aggregate("windows", **totals)
    came = results.select("came", "who", "rows", "total", "v", k=pl.col("who") % 11)
    facts = ("who", "rows", "total", "v")
    first = came.key_by("k").aggregate("first", n=cw.count(), **{c: cw.last(c) for c in facts})
    dealt = first.rebalance().with_columns("turn", j=pl.col("n") % 7)
    second = dealt.key_by("j").aggregate("second", m=cw.count(), **{c: cw.last(c) for c in (*facts, "k", "n")})
    second.write("out", cw.files(str(folder / "out"), roll_rows=1_000))
    return flow


def assert_windows(out: Path, kind: str) -> None:
    """The windows are those of DuckDB, each once; what numbered them went from 1 to n."""
    rows = f"WITH rows AS (SELECT range AS v FROM range({ROWS}) WHERE range * range % 11 < 5)"
    source, window = OF_EACH[kind]
    wanted = IN_WINDOWS.format(keys=KEYS, of=source, by=window)
    found = "SELECT who, rows, total, v FROM {out}"
    if kind == "early":  # the last result of a window is the whole one
        found = f"SELECT who, max(rows) AS rows, max(total) AS total, max(v) AS v FROM {{out}} GROUP BY who, {window}"
    wrong = f"(({wanted}) EXCEPT ALL ({found})) UNION ALL (({found}) EXCEPT ALL ({wanted}))"
    assert not query(f"{rows} {wrong} LIMIT 3", out=out)
    assert query("SELECT count(*) FROM {out}", out=out)[0][0] > KEYS
    assert_numbered(out)


@pytest.mark.parametrize(
    ("scope", "kind", "protocol"),
    [
        ("task", "tumbling", "aligned"),
        *(
            pytest.param(scope, kind, protocol, marks=pytest.mark.full)
            for scope in UNITS
            for kind in WINDOWS
            for protocol in ("aligned", "unaligned")
            if (scope, kind, protocol) != ("task", "tumbling", "aligned")
        ),
    ],
)
def test_r3_r4_windows_on_disk_come_out_in_one_order(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark, scope: str, kind: str, protocol: str
) -> None:
    flow = windowed(f"disk-{kind}", tmp_path, kind)
    chance = random.Random(kind + protocol)
    settings = {"state_backend": "rocksdb", "state_memory_bytes": 1 << 20}
    job = ride_out(start, flow, tmp_path, fake_spark, scope, protocol, chance, **settings)
    assert any(f"{UNITS[scope]} go back" in failure.reason for failure in job.status.failures)
    assert_windows(tmp_path / "out", kind)


@pytest.mark.full
@pytest.mark.parametrize("changed", [False, True])
def test_a_replacement_reads_the_same_table_or_the_job_ends(tmp_path: Path, start: StartJob, changed: bool) -> None:
    """Files that are others by now are not mixed with what was looked up before."""
    names, later = (pa.table({"k": range(97), "name": [f"{text} {k}" for k in range(97)]}) for text in ("a", "b"))
    pq.write_table(names, tmp_path / "names.parquet")
    flow = cw.Dataflow("named")
    rows = flow.read("in", gated(tmp_path, ROWS, rate=RATE)).with_columns("keyed", k=pl.col("value") % 97)
    named = rows.rebalance().enrich("names", cw.EnrichmentTable(tmp_path / "names.parquet"), on="k")
    counted = named.key_by("k").aggregate("count", n=cw.count(), name=cw.last("name"), v=cw.last("value"))
    counted.write("out", cw.files(str(tmp_path / "out"), roll_rows=1_000))
    job = start(flow, recovery="task")
    after_checkpoints(job, 1)
    if changed:
        pq.write_table(later, tmp_path / "names.parquet")
        os.kill(job.status.workers[0].pid, signal.SIGKILL)
        with pytest.raises(cw.CutwaterError, match="is not what it was when the job started") as caught:
            job.await_termination(60)
        assert caught.value.step == "names"
        return
    kill(job, 0)
    end(job, tmp_path)
    assert any("workers go back" in failure.reason for failure in job.status.failures)
    assert not query("SELECT * FROM {out} WHERE name <> 'a ' || k OR k <> v % 97 LIMIT 3", out=tmp_path / "out")
    assert_ids(tmp_path / "out", ROWS, column="v")

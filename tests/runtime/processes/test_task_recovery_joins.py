"""Only a part goes back, and two streams are joined: what comes out of the join is numbered, twice, under kills."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from fake_host import FakeSpark
from runtime_world import gated, query
from scope_world import UNITS, assert_numbered, ride_out

import cutwater as cw
from cutwater.api.jobs.job import Job

StartJob = Callable[..., Job]
ROWS = 30_000
RATE = 10_000.0
"""A row every 100 microseconds of event time."""

JOINS: dict[str, Callable[[Any, Any], Any]] = {
    "window": lambda left, right: left.join("pair", right, window=cw.tumbling("1ms"), how="left"),
    "interval": lambda left, right: left.join("pair", right, within=("-500us", "500us")),
    "as of": lambda left, right: left.join_as_of("pair", right, how="left"),
}
EXPECTED = {
    "window": "SELECT a, coalesce(b, -1) AS b FROM l LEFT JOIN r ON l.k = r.k AND a // 10 = b // 10",
    "interval": "SELECT a, b FROM l JOIN r ON l.k = r.k AND b BETWEEN a - 5 AND a + 5",
    "as of": "SELECT a, coalesce(max(b), -1) AS b FROM l LEFT JOIN r ON l.k = r.k AND b <= a GROUP BY a",
}


def joined(name: str, folder: Path, kind: str, wide: int = 0) -> cw.Dataflow:
    """The pairs are numbered per ``k``, dealt out in turns, and numbered once more per ``j``.

    Rows of the left side have a text that is so long.  Most of the keys that are joined rest most of the time, so that
    their rows leave memory.
    """
    flow = cw.Dataflow(name)
    left, right = (
        flow.read(name, gated(folder, ROWS, rate=RATE), event_time="timestamp") for name in ("left", "right")
    )
    text = pl.col("value").cast(pl.String) + "-" * wide
    turn = pl.col("value") // 100 % 31 * 11
    ours = left.with_columns("ours", a=pl.col("value"), k=pl.col("value") % 11 + turn, text=text)
    theirs = right.with_columns("theirs", b=pl.col("value"), k=pl.col("value") * 3 % 11 + turn)
    both = JOINS[kind](ours.key_by("k"), theirs.key_by("k"))
    pairs = both.select("met", "a", k=pl.col("k") % 11, b=pl.col("b").fill_null(-1))
    first = pairs.key_by("k").aggregate("first", n=cw.count(), a=cw.last("a"), b=cw.last("b"))
    dealt = first.rebalance().with_columns("turn", j=pl.col("n") % 7)
    second = dealt.key_by("j").aggregate("second", m=cw.count(), **{c: cw.last(c) for c in ("a", "b", "k", "n")})
    second.write("out", cw.files(str(folder / "out"), roll_rows=1_000))
    return flow


def assert_joined(out: Path, kind: str) -> None:
    """The pairs are those of DuckDB, each once; what numbered them went from 1 to n."""
    sides = (
        f"WITH l AS (SELECT range AS a, a % 11 + a // 100 % 31 * 11 AS k FROM range({ROWS})), "
        f"r AS (SELECT range AS b, b * 3 % 11 + b // 100 % 31 * 11 AS k FROM range({ROWS})) "
    )
    wrong = f"(({EXPECTED[kind]}) EXCEPT ALL {{found}}) UNION ALL ({{found}} EXCEPT ALL ({EXPECTED[kind]}))"
    assert not query(f"{sides}{wrong.format(found='SELECT a, b FROM {out}')} LIMIT 3", out=out)
    assert_numbered(out)


@pytest.mark.parametrize("backend", ["memory", pytest.param("rocksdb", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("scope", "kind", "protocol"),
    [
        ("task", "window", "aligned"),
        *(
            pytest.param(scope, kind, protocol, marks=pytest.mark.full)
            for scope in UNITS
            for kind in JOINS
            for protocol in ("aligned", "unaligned")
            if (scope, kind, protocol) != ("task", "window", "aligned")
        ),
    ],
)
def test_r3_r4_what_was_joined_comes_out_in_one_order(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark, scope: str, kind: str, protocol: str, backend: str
) -> None:
    """Also where the rows of some keys lie on disk."""
    flow = joined(f"join-{protocol}", tmp_path, kind, wide=0 if backend == "memory" else 3_000)
    settings = {"state_backend": backend, "state_memory_bytes": 1 << 20}
    chance = random.Random(kind + protocol)
    job = ride_out(start, flow, tmp_path, fake_spark, scope, protocol, chance, **settings)
    assert any(f"{UNITS[scope]} go back" in failure.reason for failure in job.status.failures)
    assert_joined(tmp_path / "out", kind)

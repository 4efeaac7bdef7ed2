"""Every protocol on real processes, on plans with and without loops, through kills at random moments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_host import FakeSpark
from loop_world import assert_circulated, assert_counts, circulating, counted_loop, nested
from runtime_world import assert_running_counts, counting, gated, kill_some, open_gate

PROTOCOLS: dict[str, dict[str, Any]] = {
    "none": {},
    "aligned": {},
    "at_least_once": {},
    "chandy_lamport": {},
    "unaligned": {"aligned_timeout": "0ms"},
    "unaligned after 5 ms": {"aligned_timeout": "5ms"},
    "synchronous": {},
}


QUICK = {(shape, 2, protocol) for shape in ("plain", "nested") for protocol in PROTOCOLS} | {("count", 2, "unaligned")}
"""Of the runs with a shape, a number of kills and a protocol; all of them are made with the full tests."""


def runs(*shapes: str) -> list[Any]:
    every = [(shape, kills, protocol) for shape in shapes for kills in (0, 2) for protocol in PROTOCOLS]
    return [run if run in QUICK else pytest.param(*run, marks=pytest.mark.full) for run in every]


def settings(name: str) -> dict[str, Any]:
    return {"protocol": name.split()[0], **PROTOCOLS[name]}


@pytest.mark.parametrize(("shape", "kills", "protocol"), runs("plain"))
def test_without_loops(start, fake_spark: FakeSpark, tmp_path: Path, shape: str, kills: int, protocol: str) -> None:
    rows = 20_000
    flow = counting(shape, gated(tmp_path, rows, rate=60_000), tmp_path / "out")
    job = start(flow, **settings(protocol))
    kill_some(job, fake_spark, kills, seed=1)
    open_gate(tmp_path)
    assert job.await_termination(40)
    assert job.status.restarts == kills
    if protocol == "at_least_once" and kills:
        assert_ids_at_least(tmp_path / "out", rows)
    else:
        assert_running_counts(tmp_path / "out", rows)


def assert_ids_at_least(out: Path, rows: int) -> None:
    import polars as pl

    assert pl.read_parquet(f"{out}/*.parquet")["eid"].unique().sort().to_list() == list(range(rows))


@pytest.mark.parametrize(("shape", "kills", "protocol"), runs("self", "count", "nested"))
def test_with_loops(start, fake_spark: FakeSpark, tmp_path: Path, shape: str, kills: int, protocol: str) -> None:
    rows = 12_000
    make = {"self": circulating, "count": counted_loop, "nested": nested}[shape]
    job = start(make("loop", gated(tmp_path, rows, rate=40_000), tmp_path / "out"), **settings(protocol))
    kill_some(job, fake_spark, kills, seed=2)
    open_gate(tmp_path)
    assert job.await_termination(40)
    assert job.status.restarts == kills
    exactly = protocol != "at_least_once" or not kills
    assert_circulated(tmp_path / "out", rows, nest=shape == "nested", exactly=exactly)
    if shape == "count" and exactly:
        assert_counts(tmp_path / "out")

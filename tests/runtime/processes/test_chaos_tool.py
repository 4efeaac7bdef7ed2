"""``cutwater chaos`` on workers without Spark: right jobs pass under every fault, wrong ones are found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from fake_host import FakeSpark

import cutwater as cw
from cutwater.chaos.storm import FAULTS
from cutwater.chaos.trial import Report

ROWS = 20_000


def totals(out: Path) -> cw.Dataflow:
    """Running counts, which are the same in whatever order rows meet, and running sums, which are not."""
    flow = cw.Dataflow("totals")
    numbers = flow.read("in", cw.rate(None, rows=ROWS)).with_columns("key", key=pl.col("value") % 97)
    counts = numbers.key_by("key").aggregate("count", n=cw.count(), s=cw.sum("value"))
    counts.write("out", cw.files(str(out)))
    return flow


def tried(flow: cw.Dataflow, spark: FakeSpark, folder: Path, **options: Any) -> Report:
    times = {"interval": "50ms", "heartbeat_interval": "100ms", "heartbeat_timeout": "500ms"}
    report = cw.fault_trial(flow, spark, folder=folder / "trial", told=print, **(times | options))  # type: ignore[arg-type]
    print(report)
    return report


@pytest.mark.full
@pytest.mark.parametrize("kind", FAULTS)
def test_each_kind_of_fault_hits_and_changes_nothing(fake_spark: FakeSpark, tmp_path: Path, kind: str) -> None:
    report = tried(totals(tmp_path / "out"), fake_spark, tmp_path, faults=[kind], kills=3, seed=1, ignore=["s"])
    assert report.verdict == "same"
    assert report.struck == {kind: 3}


def test_a_right_job_passes_and_nothing_of_the_users_is_touched(fake_spark: FakeSpark, tmp_path: Path) -> None:
    faults = ["kill", "exception", "disk-full", "slow-disk", "disconnect"]
    report = tried(totals(tmp_path / "out"), fake_spark, tmp_path, faults=faults, kills=5, seed=3, ignore=["s"])
    assert report.verdict == "same"
    assert sum(report.struck.values()) == 5
    assert len(report.struck) > 2
    assert report.recoveries_ms
    assert all(ms > 0 for ms in report.recoveries_ms)
    assert [(s.step, s.rows, s.rows_with_faults) for s in report.sinks] == [("out", ROWS, ROWS)]
    assert not (tmp_path / "out").exists()


class Numbered:
    """Numbers its rows, and keeps the number where no snapshot finds it."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            numbers = range(self.seen, self.seen + batch.num_rows)
            self.seen += batch.num_rows
            yield batch.append_column("number", pa.array(numbers, pa.int64()))


def test_a_job_that_remembers_outside_its_state_is_found(fake_spark: FakeSpark, tmp_path: Path) -> None:
    flow = cw.Dataflow("numbered")
    rows = flow.read("in", cw.rate(None, rows=ROWS, partitions=1))
    rows.map_batches("number", Numbered(), schema="timestamp timestamp, value long, number long").write(
        "out", cw.discard()
    )
    options = {"ignore": ["timestamp"], "parallelism": 1}
    report = tried(flow, fake_spark, tmp_path, faults=["kill"], kills=2, seed=5, **options)
    assert report.verdict == "different"
    (sink,) = report.sinks
    assert (sink.rows, sink.rows_with_faults, sink.steady) == (ROWS, ROWS, True)
    assert "row " in sink.difference
    assert "value=" in sink.difference


@pytest.mark.full
def test_a_job_whose_results_differ_by_themselves_is_told_apart(fake_spark: FakeSpark, tmp_path: Path) -> None:
    report = tried(totals(tmp_path / "out"), fake_spark, tmp_path, faults=["exception"], kills=1)
    assert report.verdict == "unsteady"
    assert not report.sinks[0].steady

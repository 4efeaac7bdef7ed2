"""R1: SIGKILL of workers at random moments: nothing is lost, nothing is doubled, the state is exact."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fake_host import FakeSpark
from runtime_world import assert_running_counts, counting, gated, kill_some, open_gate

import cutwater as cw
from cutwater.operators.aggregate.keyed_operator import RunningAggregate
from cutwater.runtime.status.board import StatusBoard


@pytest.mark.parametrize("parallelism", [1, 2, 3])
def test_random_kills_lose_and_double_nothing(start, fake_spark: FakeSpark, tmp_path: Path, parallelism: int) -> None:
    rows = 30_000
    job = start(counting("kills", gated(tmp_path, rows), tmp_path / "out"), parallelism=parallelism)
    kill_some(job, fake_spark, 3, seed=parallelism)
    open_gate(tmp_path)
    assert job.await_termination(30)
    assert job.status.restarts == 3
    assert_running_counts(tmp_path / "out", rows)


def test_kills_during_recovery(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    rows = 20_000
    job = start(counting("kills", gated(tmp_path, rows), tmp_path / "out"), parallelism=3)
    kill_some(job, fake_spark, 1, seed=0)
    kill_some(job, fake_spark, 5, seed=1, phases=("restarting", "forming", "deploying", "running"))
    open_gate(tmp_path)
    assert job.await_termination(30)
    assert_running_counts(tmp_path / "out", rows)


def test_whoever_sees_a_restart_does_not_see_a_job_that_runs(
    start, fake_spark: FakeSpark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two lay messages to all workers: who waited for both, one after the other, saw an old phase."""
    phases: list[str] = []
    real = StatusBoard.restarting

    def watched(board: StatusBoard, *arguments: Any) -> None:
        real(board, *arguments)
        phases.append(board.status.phase)

    monkeypatch.setattr(StatusBoard, "restarting", watched)
    job = start(counting("kills", gated(tmp_path, 20_000), tmp_path / "out"), parallelism=2)
    kill_some(job, fake_spark, 2, seed=3)
    job.cancel()
    assert len(phases) == 2
    assert "running" not in phases


@dataclass(frozen=True)
class CountsAggregates:
    """Leaves a file that says how many running aggregates there are in the process."""

    folder: Path

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = sum(type(thing) is RunningAggregate for thing in gc.get_objects())
        (self.folder / f"found-{os.getpid()}-{found}").touch()
        yield from batches


def test_survivors_free_the_state_that_they_had(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    rows = 20_000
    look = CountsAggregates(tmp_path)

    def wrap(rows: cw.Stream) -> cw.Stream:
        return rows.map_batches("look", look, rows.schema)

    job = start(counting("kills", gated(tmp_path, rows, rate=20_000), tmp_path / "out", wrap=wrap), parallelism=2)
    kill_some(job, fake_spark, 4, seed=5)
    open_gate(tmp_path)
    assert job.await_termination(30)
    assert job.status.restarts == 4
    found = {path.name.split("-")[2] for path in tmp_path.glob("found-*")}
    assert found == {"1"}, "the state of an attempt that is no more is still in memory"

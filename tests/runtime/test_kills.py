"""SIGKILL of workers at random moments: nothing is lost, nothing is doubled, the state is exact."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_host import FakeSpark
from runtime_world import assert_running_counts, counting, gated, kill_some, open_gate


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

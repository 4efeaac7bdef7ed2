"""What ``recovery="upstream"`` and ``"task"`` have in common: a broken connection, and why orders are logged."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_host import FakeSpark
from faults import cut_connections, forgetful
from runtime_world import wait_until
from scope_world import UNITS, StartJob, after_checkpoints, assert_one_order, end, numbered_twice, weather

from cutwater.config import RecoveryName
from cutwater.errors import CutwaterError


@pytest.mark.parametrize(
    ("scope", "gone"),
    [("task", "1 of 3 workers go back"), pytest.param("upstream", "subtasks go back", marks=pytest.mark.full)],
)
def test_r3_r4_of_two_that_lost_each_other_one_goes_back(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark, scope: RecoveryName, gone: str
) -> None:
    """A connection breaks, and both its workers live."""
    cut = tmp_path / "cut"
    fake_spark.prepare = cut_connections(cut, silent=False)
    job = start(numbered_twice("cut", tmp_path, 10_000, 10_000), recovery=scope, parallelism=3)
    after_checkpoints(job, 1)
    pids = {w.pid for w in job.status.workers}
    cut.touch()
    wait_until(lambda: job.status.restarts, "a restart", job=job)
    after_checkpoints(job, 2)
    assert {w.pid for w in job.status.workers} == pids
    end(job, tmp_path)
    assert [gone in f.reason for f in job.status.failures] == [True]
    assert_one_order(tmp_path / "out", 20_000)


@pytest.mark.full
@pytest.mark.parametrize("scope", UNITS)
def test_dropping_by_number_alone_is_wrong_where_the_order_matters(
    tmp_path: Path, start: StartJob, fake_spark: FakeSpark, scope: RecoveryName
) -> None:
    fake_spark.prepare = forgetful
    for seed in range(1, 6):
        try:
            weather(tmp_path / str(seed), start, fake_spark, scope, "aligned", seed)
        except (AssertionError, CutwaterError):
            return
    pytest.fail("nobody noticed")

"""A job on real Spark workers changes its parallelism under load, and loses a worker on the way."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from spark_world import Killer, assert_exact, counting, held, release, wait_until

pytestmark = [pytest.mark.spark, pytest.mark.full]


def test_from_two_to_three_and_back_with_a_kill_in_between(spark: SparkSession, tmp_path: Path) -> None:
    rows = 1_000_000
    flow = counting("wider", held(tmp_path, rows, rate=200_000), tmp_path / "out")
    job = flow.start(spark, checkpoint=tmp_path / "chk", interval="500ms", parallelism=2)
    wait_until(lambda: job.status.checkpoints.completed > 0, "a checkpoint")
    job.rescale(3)
    assert (job.status.parallelism, len(job.status.workers)) == (3, 3)
    Killer(job, random.Random(5)).kill()
    wait_until(lambda: job.status.phase == "running", "the restart")
    job.rescale(2)
    release(tmp_path)
    assert job.await_termination(120)
    assert (job.status.rescales, job.status.parallelism) == (2, 2)
    assert_exact(tmp_path / "out", rows)

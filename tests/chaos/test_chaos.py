"""Fifty SIGKILLs over jobs of a million unique ids: ``make chaos``.

Each job runs on local-cluster or on a standalone cluster and is killed at random moments, workers and whole executors.
A kill counts only if it hit a running job; a job that ended before all its kills is run again.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

sys.path.append(str(Path(__file__).parent.parent / "spark"))

from spark_world import Killer, assert_exact, counting, held, lost_and_doubled, release

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

ROWS = 1_000_000
KILLS_PER_JOB = 5
JOBS_PER_CLUSTER = 5
MakeSession = Callable[..., SparkSession]


@dataclass
class Table:
    """What happened, one line per job."""

    lines: list[tuple[str, int, float, int, int]] = field(default_factory=list)
    void: int = 0

    def show(self) -> str:
        head = f"{'job':<22}{'kills':>6}{'recovery, median':>19}{'lost':>6}{'doubled':>9}"
        rows = [f"{n:<22}{k:>6}{ms:>16.0f} ms{lost:>6}{doubled:>9}" for n, k, ms, lost, doubled in self.lines]
        kills, lost, doubled = (sum(line[i] for line in self.lines) for i in (1, 3, 4))
        total = f"{'all':<22}{kills:>6}{'':>19}{lost:>6}{doubled:>9}   ({self.void} void runs repeated)"
        return "\n".join(["", head, *rows, total])


@pytest.fixture(scope="module")
def table() -> Table:
    return Table()


def one_job(spark: SparkSession, folder: Path, name: str, seed: int, table: Table) -> None:
    folder.mkdir()
    rng = random.Random(seed)
    flow = counting(name, held(folder, ROWS, rate=rng.choice([200_000, 400_000])), folder / "out")
    interval = rng.choice(["100ms", "300ms", "1s"])
    job = flow.start(spark, checkpoint=folder / "chk", interval=interval, parallelism=2, group_deadline="60s")
    killer = Killer(job, rng)
    for number in range(KILLS_PER_JOB):
        killer.kill(executor=number == KILLS_PER_JOB - 1, max_delay_s=1.0)
    release(folder)
    assert job.await_termination(300)
    lost, doubled = lost_and_doubled(folder / "out", ROWS)
    table.lines.append((name, killer.kills, statistics.median(killer.recoveries_ms), lost, doubled))
    assert_exact(folder / "out", ROWS)


@pytest.mark.parametrize("cluster", ["local-cluster", "standalone"])
def test_kills_lose_and_double_nothing(
    cluster: str, make_session: MakeSession, tmp_path: Path, table: Table, request: pytest.FixtureRequest
) -> None:
    if cluster == "standalone":
        spark = make_session(
            request.getfixturevalue("standalone"), spark_executor_cores="2", spark_executor_memory="1g"
        )
    else:
        spark = make_session("local-cluster[2,2,1024]")
    try:
        done = tries = 0
        while done < JOBS_PER_CLUSTER:
            tries += 1
            assert tries <= 2 * JOBS_PER_CLUSTER, "too many void runs"
            try:
                one_job(spark, tmp_path / str(tries), f"{cluster}-{tries}", 100 * len(cluster) + tries, table)
            except AssertionError as e:
                if not str(e).startswith("void"):
                    raise
                table.void += 1
                continue
            done += 1
    finally:
        print(table.show())
        spark.stop()

"""SIGKILLs of real processes on Spark, over jobs of unique ids: ``make chaos``.

Every scope of recovery, with every protocol, on jobs with and without loops; then whole drivers; then workers and
executors of clusters. Kills count only where they hit a living process. What happened is a table at the end.
"""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import psutil
import pytest
from pyspark import cloudpickle
from pyspark.sql import SparkSession
from storm_world import (
    DO_EVERYTHING,
    NAME,
    SHAPES,
    Combination,
    Found,
    Line,
    Table,
    combinations,
    dropping_a_key,
    run_struck,
    shapes_of,
)

sys.path += [str(Path(__file__).parents[2] / room / "processes") for room in ("spark", "runtime")]

import faults
from spark_world import Killer, assert_exact, counting, held, lost_and_doubled, release, wait_until

from cutwater.config import RecoveryName
from cutwater.connectors.files.part_commit import PartCommitter
from cutwater.errors import BuildError, ConfigError

cloudpickle.register_pickle_by_value(faults)  # workers do not have that module

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800)]

KILLS, KILLS_WITHOUT_PROMISE = 10, 5
"""Of the workers of a job of the matrix; the second where the protocol is ``at_least_once``."""
KILLS_AT_LEAST = 200
DRIVER_KILLS = 2
ROWS = 1_000_000
"""Of a job on a cluster."""
KILLS_PER_JOB = 5
JOBS_PER_CLUSTER = 5
MakeSession = Callable[..., SparkSession]


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    made = Table()
    yield made
    print(made.show())


# -------------------------------------------------------------------------------------------------------- the matrix


@pytest.mark.parametrize("combination", combinations(), ids=str)
def test_kills_lose_and_double_nothing(
    spark: SparkSession, tmp_path: Path, table: Table, combination: Combination
) -> None:
    make, oracle = SHAPES[combination.shape]
    kills = KILLS if combination.exactly_once else KILLS_WITHOUT_PROMISE
    seed = combinations().index(combination)
    try:
        job, strikes = run_struck(spark, make(NAME), tmp_path, kills, seed, **combination.settings)
    except (BuildError, ConfigError) as error:  # of the start: this scope does not do it, and says so
        if combination.recovery in DO_EVERYTHING:
            raise
        table.refused.append(f"{combination}: {error.message}")
        pytest.skip(str(error))
    found = oracle(Path(job.checkpoint_dir, "output"))
    times = [s.recovery_ms for s in strikes if s.recovery_ms is not None]
    partial = sum("go back" in failure.reason for failure in job.status.failures)
    names = combination.recovery, combination.protocol, combination.shape, f"local, {combination.backend}"
    table.lines.append(Line(*names, len(strikes), found, times, partial))
    assert len(strikes) == kills
    assert partial or combination.recovery == "job", "void: the whole job went back every time"
    assert found.lost == 0
    if combination.exactly_once:
        assert (found.doubled, found.wrong) == (0, "")


# ------------------------------------------------------------------------------------------------------ planted bugs


def not_committing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a restored checkpoint has staged is not made visible."""
    commit = PartCommitter._commit

    def only_when_told(self: PartCommitter, handles: list[Any], *, verify: bool) -> None:
        if not verify:
            commit(self, handles, verify=verify)

    monkeypatch.setattr(PartCommitter, "_commit", only_when_told)


BUGS = {
    "a key is dropped": ("acyclic", dropping_a_key),
    "rows on their way are dropped": ("cyclic", faults.forgetting_the_log),
    "nothing restored is committed": ("acyclic", None),
    "an order is asked of nobody": ("united", faults.forgetful),
}
"""Name -> the shape that shows it, and what is planted in workers."""


@pytest.mark.parametrize(
    ("bug", "scope"),
    [
        *((bug, "job") for bug in BUGS if bug != "an order is asked of nobody"),  # under "job" nobody asks for one
        ("nothing restored is committed", "region"),
        ("a key is dropped", "task"),
        ("nothing restored is committed", "task"),
        ("a key is dropped", "upstream"),
        ("an order is asked of nobody", "upstream"),
    ],
)
def test_a_planted_bug_is_seen(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str, scope: str
) -> None:
    shape, plant = BUGS[bug]
    if plant is None:
        not_committing(monkeypatch)
    combination = Combination(scope, "unaligned", shape, "memory")
    make, oracle = SHAPES[shape]
    job, strikes = run_struck(spark, make(NAME, plant), tmp_path, KILLS, 1, **combination.settings)
    found = oracle(Path(job.checkpoint_dir, "output"))
    print(f"{bug}: {found}")
    assert len(strikes) == KILLS
    assert found.lost or found.doubled or found.wrong


# ----------------------------------------------------------------------------------------------------------- drivers


@pytest.mark.parametrize(
    ("scope", "shape"), [(scope, shape) for scope in get_args(RecoveryName) for shape in shapes_of(scope)]
)
def test_drivers_are_killed_and_others_resume(tmp_path: Path, table: Table, scope: str, shape: str) -> None:
    combination = Combination(scope, "aligned", shape, "memory")
    if any(line.startswith(f"{combination}:") for line in table.refused):
        pytest.skip("refused")
    dice = random.Random(f"{scope}{shape}")
    log = tmp_path / "chk" / NAME / "log"
    everybody: list[psutil.Process] = []
    times: list[float] = []
    driver, killed_s = run_driver(tmp_path, combination), 0.0
    for number in range(DRIVER_KILLS + 1):
        await_entries(log, driver)
        if killed_s:
            times.append((time.monotonic() - killed_s) * 1000)
        if number == DRIVER_KILLS:
            break
        time.sleep(dice.uniform(0.0, 1.0))
        assert driver.poll() is None, "void: the driver ended by itself"
        everybody += psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
        driver.wait()
        killed_s = time.monotonic()
        driver = run_driver(tmp_path, combination)
    (tmp_path / "gate").touch()
    assert driver.wait(200) == 0
    wait_until(lambda: not any(p.is_running() for p in everybody), "the end of what dead drivers had started")
    found = SHAPES[shape][1](tmp_path / "chk" / NAME / "output")
    table.lines.append(Line(scope, "aligned", shape, "driver", DRIVER_KILLS, found, times))
    assert (found.lost, found.doubled, found.wrong) == (0, 0, "")


def run_driver(folder: Path, combination: Combination) -> subprocess.Popen[bytes]:
    program = Path(__file__).with_name("storm_driver.py")
    return subprocess.Popen([sys.executable, str(program), str(folder), str(combination)])


def await_entries(log: Path, driver: subprocess.Popen[bytes]) -> None:
    """Wait until the driver has written of itself and of two checkpoints."""
    known = set(log.glob("*"))

    def there() -> bool:
        return len(set(log.glob("*")) - known) >= 3 or driver.poll() is not None

    wait_until(there, "three entries of a driver in the log", 100.0)


# ---------------------------------------------------------------------------------------------------------- clusters


def one_job(spark: SparkSession, folder: Path, cluster: str, seed: int, table: Table) -> None:
    folder.mkdir()
    dice = random.Random(seed)
    flow = counting(NAME, held(folder, ROWS, rate=dice.choice([200_000, 400_000])), folder / "out")
    interval = dice.choice(["100ms", "300ms", "1s"])
    job = flow.start(spark, checkpoint=folder / "chk", interval=interval, parallelism=2)
    killer = Killer(job, dice)
    for number in range(KILLS_PER_JOB):
        killer.kill(executor=number == KILLS_PER_JOB - 1, max_delay_s=1.0)
    release(folder)
    assert job.await_termination(300)
    found = Found(ROWS, *lost_and_doubled(folder / "out", ROWS))
    table.lines.append(Line("job", "aligned", "acyclic", cluster, killer.kills, found, killer.recoveries_ms))
    assert_exact(folder / "out", ROWS)


@pytest.mark.parametrize("cluster", ["local-cluster", "standalone"])
def test_kills_of_workers_and_executors_of_a_cluster(
    cluster: str, make_session: MakeSession, tmp_path: Path, table: Table, request: pytest.FixtureRequest
) -> None:
    if cluster == "standalone":
        spark = make_session(
            request.getfixturevalue("standalone"),
            spark_executor_cores="2",
            spark_executor_memory="1g",
            spark_driver_host="127.0.0.1",
        )
    else:
        spark = make_session("local-cluster[2,2,1024]")
    done = tries = 0
    while done < JOBS_PER_CLUSTER:
        tries += 1
        assert tries <= 2 * JOBS_PER_CLUSTER, "too many void runs"
        try:
            one_job(spark, tmp_path / str(tries), cluster, 100 * len(cluster) + tries, table)
        except AssertionError as e:
            if not str(e).startswith("void"):
                raise
            table.void += 1
            continue
        done += 1


# ------------------------------------------------------------------------------------------------------- all of it


def test_so_many_kills_hit(table: Table) -> None:
    """Of all the above together."""
    jobs = len(combinations()) + sum(len(shapes_of(scope)) for scope in get_args(RecoveryName)) + 2 * JOBS_PER_CLUSTER
    refused = sum(2 if "-aligned-" in line else 1 for line in table.refused)  # no driver is tried then
    if len(table.lines) + refused < jobs:
        pytest.skip("only a part was run")
    assert sum(line.kills for line in table.lines if line.group == "exactly-once") >= KILLS_AT_LEAST

"""Forks: begun from a running job's cut, behind it, promoted in its place; DuckDB and plain Python are the oracles."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from fake_host import FakeHost, FakeSpark, adopt, context, server_address
from runtime_world import assert_running_counts, gated, open_gate, query, wait_until

import cutwater as cw
from cutwater.api.jobs import forks
from cutwater.api.jobs import job as job_module
from cutwater.api.jobs.job import Job
from cutwater.errors import BuildError, ConfigError, CutwaterError
from cutwater.plan.planner import make_plan
from cutwater.runtime.driver.forks import ForkLog
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import LogState
from cutwater.storage.reading import open_snapshot
from cutwater.storage.store.local import LocalStore

ROWS, KEYS, STRIPE, SPLITS = 8_000, 20, 64, 4


def flow_of(folder: Path, version: int = 0, *, rate: float | None = 4_000, roll_rows: int = 300) -> cw.Dataflow:
    """Running counts; every row tells which version of the program made it."""
    flow = cw.Dataflow("a")
    rows = flow.read("in", gated(folder, ROWS, rate=rate)).with_columns("key", key=pl.col("value") % KEYS)
    counts = rows.key_by("key").aggregate("count", n=cw.count(), total=cw.sum("value"), eid=cw.last("value"))
    counts = counts.with_columns("version", version=pl.lit(version))
    counts.write("out", cw.files(str(folder / "out"), roll_rows=roll_rows))
    return flow


def fork_of(folder: Path, spark: Any, version: int = 1, *, name: str = "b", **settings: Any) -> Job:
    settings = {"interval": "50ms", "parallelism": 2, **settings}
    return flow_of(folder, version, rate=None).fork(f"{folder}/chk/a", spark, name=name, **settings)


def seen(job: Job, checkpoints: int = 2) -> Job:
    wait_until(lambda: job.status.checkpoints.completed >= checkpoints, "checkpoints", job=job)
    return job


def log_of(folder: Path, job: str) -> LogState:
    return JobLog(LocalStore(folder / "chk"), job).read()


def in_shadow(folder: Path, job: str = "b") -> int:
    files = folder / "chk" / job / "shadow" / "out"
    return query("SELECT count(*) FROM {out}", out=files)[0][0] if list(files.glob("part-*.parquet")) else 0


def ids_up_to_hand_over(folder: Path) -> set[int]:
    """What the first job had read: by split, all ids in its stripes before its position."""
    over = log_of(folder, "a").handed_over
    assert over is not None
    manifest = open_snapshot(f"{folder}/chk/a@{over.checkpoint_id}").manifest
    at = {s.data: s.position for r in manifest.subtasks for s in r.splits.get("in", [])}
    assert len(at) == SPLITS
    return {n for n in range(ROWS) if n < (at[n // STRIPE % SPLITS] or 0)}


def assert_handed_over(folder: Path) -> None:
    """Each id once, the counts as of one run; rows up to the hand-over by the old program, the others by the new."""
    assert_running_counts(folder / "out", ROWS, keys=KEYS)
    old = {eid for (eid,) in query("SELECT eid FROM {out} WHERE version = 0", out=folder / "out")}
    assert old == ids_up_to_hand_over(folder)
    assert 0 < len(old) < ROWS, "void: one of both wrote everything"


@pytest.mark.parametrize("parallelism", [3, pytest.param(2, marks=pytest.mark.full)])
def test_t3_a_fork_takes_over_without_a_gap_or_a_double(start, fake_spark, tmp_path: Path, parallelism: int) -> None:
    first = seen(start(flow_of(tmp_path)))
    fork = fork_of(tmp_path, fake_spark, parallelism=parallelism)
    wait_until(lambda: in_shadow(tmp_path), "rows in the shadow", job=fork)
    assert first.is_active
    assert not query("SELECT 1 FROM {out} WHERE version = 1", out=tmp_path / "out"), "only the first one serves"
    path = fork.promote()
    assert open_snapshot(path).manifest.uid == first.id
    assert first.status.outcome == "stopped"
    assert fork.promote() == path, "it can be repeated"
    assert not in_shadow(tmp_path), "what the shadow kept is dropped"
    with pytest.raises(ConfigError, match="handed over to job 'b'"):
        start(flow_of(tmp_path))
    open_gate(tmp_path)
    assert fork.await_termination(60)
    assert_handed_over(tmp_path)


@pytest.mark.full
def test_t3_a_fork_leaves_alone_what_its_leader_has_staged(start, fake_spark, tmp_path: Path) -> None:
    first = seen(start(flow_of(tmp_path, roll_rows=10**9)))
    fork = fork_of(tmp_path, fake_spark)
    wait_until(lambda: in_shadow(tmp_path), "rows in the shadow", job=fork)
    fork.stop()
    fork = fork_of(tmp_path, fake_spark)  # goes on, from its own checkpoint
    seen(fork)
    assert fork.status.checkpoints.restored_id
    open_gate(tmp_path)
    assert first.await_termination(60)
    assert_running_counts(tmp_path / "out", ROWS, keys=KEYS)
    assert not query("SELECT 1 FROM {out} WHERE version = 1", out=tmp_path / "out")
    assert fork.await_termination(60), "its leader has finished, and so does it"
    shadow = tmp_path / "chk" / "b" / "shadow" / "out"
    ids = query("SELECT count(*), count(DISTINCT eid), max(eid) FROM {out}", out=shadow)[0]
    assert ids[0] == ids[1] < ROWS, "each row behind the cut once"
    assert ids[2] == ROWS - 1
    with pytest.raises(CutwaterError, match="has finished"):
        fork.promote()


def windows_of(folder: Path) -> cw.Dataflow:
    flow = cw.Dataflow("a")
    source = gated(folder, ROWS, rate=4_000)
    rows = flow.read("in", source, event_time="timestamp", out_of_order="40ms")
    keyed = rows.with_columns("key", key=pl.col("value") % 3).key_by("key")
    counted = keyed.window("span", cw.tumbling("50ms")).aggregate("count", n=cw.count(), low=cw.min("value"))
    counted.write("out", cw.files(str(folder / "out"), roll_rows=20))
    return flow


@pytest.mark.full
@pytest.mark.parametrize("parallelism", [1, 2])
def test_t3_each_window_is_there_once_whoever_fired_it(start, fake_spark, tmp_path: Path, parallelism: int) -> None:
    """Also at another parallelism, where one subtask reads what several read: event time goes with the leader's."""
    seen(start(windows_of(tmp_path)))
    settings = {"interval": "50ms", "parallelism": parallelism}
    fork = windows_of(tmp_path).fork(f"{tmp_path}/chk/a", fake_spark, name="b", **settings)
    wait_until(lambda: in_shadow(tmp_path), "windows in the shadow", job=fork)
    fork.promote()
    before = query("SELECT count(*) FROM {out}", out=tmp_path / "out")[0][0]
    open_gate(tmp_path)
    assert fork.await_termination(60)
    found = query("SELECT key, low // 200, n FROM {out} ORDER BY ALL", out=tmp_path / "out")
    expected = query(
        f"SELECT range % 3, range // 200, count(*) FROM range({ROWS}) GROUP BY ALL ORDER BY ALL", out=tmp_path / "out"
    )
    assert found == expected
    assert 0 < before < len(found), "void: one of both fired all windows"


# --------------------------------------------------------------------------------------------- killed while promoting


def drive(folder: str, server: str, die: str = "") -> None:
    """The fork's driver in a process of its own: goes on with the fork, promotes it, waits; ``die``: kills itself."""
    adopt(server)
    job_module.SparkHost = FakeHost  # type: ignore[misc]

    def dying(when: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if die == f"before {when}":
                os.kill(os.getpid(), signal.SIGKILL)
            result = function(*args, **kwargs)
            if die == f"after {when}":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    forks.send = dying("asking", partial(forks.send, claim_s=2.0))
    ForkLog.hand_over = dying("the leader's entry", ForkLog.hand_over)  # type: ignore[method-assign]
    ForkLog.promote = dying("its entry", ForkLog.promote)  # type: ignore[method-assign]
    fork = fork_of(Path(folder), FakeSpark())
    seen(fork)
    fork.promote()
    Path(folder, "gate").touch()
    fork.await_termination()


def run_fork(folder: Path, die: str = "") -> Any:
    process = context().Process(target=drive, args=(str(folder), server_address(), die))
    process.start()
    return process


@pytest.mark.parametrize(
    "moment",
    [
        pytest.param("before asking", marks=pytest.mark.full),
        pytest.param("after asking", marks=pytest.mark.full),
        pytest.param("before its entry", marks=pytest.mark.full),
        pytest.param("after its entry", marks=pytest.mark.full),
    ],
)
def test_t3_the_driver_is_killed_while_it_takes_over(start, tmp_path: Path, moment: str) -> None:
    first = seen(start(flow_of(tmp_path)))
    process = run_fork(tmp_path, moment)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    over, fork = log_of(tmp_path, "a").handed_over, log_of(tmp_path, "b").fork
    assert fork is not None
    if moment == "before asking":
        assert over is None
        seen(first, first.status.checkpoints.completed + 2)
    else:
        assert over is not None
        assert first.await_termination(30), "its log says that it is over"
    if moment != "after asking":  # there the fork may have taken over while its driver waited for the answer
        assert bool(fork.promoted) == (moment == "after its entry")
    again = run_fork(tmp_path)
    again.join(60)
    assert again.exitcode == 0
    assert_handed_over(tmp_path)


def lead(folder: str, server: str) -> None:
    """The leader's driver in a process of its own, to be killed."""
    adopt(server)
    job_module.SparkHost = FakeHost  # type: ignore[misc]
    path = Path(folder)
    flow_of(path).start(FakeSpark(), checkpoint=path / "chk", interval="50ms", parallelism=2).await_termination()


def dead_leader(folder: Path) -> str:
    """A leader whose driver was killed after some checkpoints, with rows in progress; its uid."""
    (folder / "chk").mkdir()
    process = context().Process(target=lead, args=(str(folder), server_address()))
    process.start()
    wait_until(lambda: len(log_of(folder, "a").completed) >= 2, "checkpoints of the first job")
    process.kill()
    process.join()
    return log_of(folder, "a").uid


@pytest.mark.full
def test_t3_a_fork_takes_over_from_a_leader_whose_driver_is_dead(
    fake_spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the leader had in progress is committed up to its newest checkpoint, and each row behind it comes once."""
    monkeypatch.setattr(forks, "send", partial(forks.send, claim_s=0.1))
    uid = dead_leader(tmp_path)
    at = log_of(tmp_path, "a").newest_id
    fork = fork_of(tmp_path, fake_spark)
    path = fork.promote()
    over = log_of(tmp_path, "a").handed_over
    assert over is not None
    assert over.checkpoint_id > at
    assert open_snapshot(path).manifest.uid == uid
    assert fork.promote() == path, "it can be repeated"
    open_gate(tmp_path)
    assert fork.await_termination(60)
    assert_handed_over(tmp_path)


@pytest.mark.full
@pytest.mark.parametrize("moment", ["before the leader's entry", "after the leader's entry", "before its entry"])
def test_t3_both_drivers_are_killed_one_after_the_other(tmp_path: Path, moment: str) -> None:
    dead_leader(tmp_path)
    process = run_fork(tmp_path, moment)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    assert (log_of(tmp_path, "a").handed_over is None) == (moment == "before the leader's entry")
    again = run_fork(tmp_path)
    again.join(60)
    assert again.exitcode == 0
    assert_handed_over(tmp_path)


@pytest.mark.full
def test_t3_workers_are_killed_while_the_fork_takes_over(start, fake_spark, tmp_path: Path) -> None:
    first = seen(start(flow_of(tmp_path)))
    fork = fork_of(tmp_path, fake_spark)
    seen(fork)
    for _ in range(3):
        for job in (first, fork):
            if job.is_active and job.status.workers:
                os.kill(job.status.workers[0].pid, signal.SIGKILL)
        try:
            fork.promote()
            break
        except CutwaterError:
            assert first.is_active, "what failed left the first one serving"
            wait_until(lambda: first.status.phase == "running", "the first one runs again", job=first)
    else:
        fork.promote()
    open_gate(tmp_path)
    assert fork.await_termination(60)
    assert_handed_over(tmp_path)


# ------------------------------------------------------------------------------------------------------------ compare


@pytest.mark.full
def test_forks_are_compared_where_both_have_read_as_far(start, fake_spark, tmp_path: Path) -> None:
    first = seen(start(flow_of(tmp_path)))
    path = first.savepoint(tmp_path / "kept")
    forks = [
        flow_of(tmp_path, version, rate=None).fork(
            path, fake_spark, name=name, checkpoint=tmp_path / "chk", interval="50ms", parallelism=parallelism
        )
        for name, version, parallelism in (("old", 0, 2), ("same", 0, 1), ("new", 1, 2))
    ]
    open_gate(tmp_path)
    assert first.await_termination(60)
    for fork in forks:
        assert fork.await_termination(60)
    chk = tmp_path / "chk"
    in_any_order = ["n", "total"]  # running counts depend on the order in which rows of several splits meet
    same = cw.compare_forks(f"{chk}/old", f"{chk}/same", ignore=in_any_order)
    assert same.same, str(same)
    step = same.steps[0]
    assert step.rows_one == step.rows_other == in_shadow(tmp_path, "old") > 0
    other = cw.compare_forks(f"{chk}/old", f"{chk}/new", samples=2, ignore=in_any_order)
    assert not other.same
    assert (other.steps[0].only_one, other.steps[0].only_other) == (step.rows_one, step.rows_one)
    assert len(other.steps[0].samples) == 2
    assert cw.compare_forks(f"{chk}/old", f"{chk}/new", ignore=["version", *in_any_order]).same
    with pytest.raises(ConfigError, match="is no fork"):
        cw.compare_forks(f"{chk}/a", f"{chk}/new")


# ----------------------------------------------------------------------------------------------------------- refusals


def test_what_cannot_be_forked_or_promoted_is_refused_with_a_reason(start, fake_spark, tmp_path: Path) -> None:
    first = seen(start(flow_of(tmp_path)))
    with pytest.raises(ConfigError, match="is no fork"):
        first.promote()
    with pytest.raises(ConfigError, match="a name of its own"):
        flow_of(tmp_path).fork(f"{tmp_path}/chk/a", fake_spark, name="a")
    path = first.savepoint(tmp_path / "kept")
    with pytest.raises(ConfigError, match="where the fork's checkpoints are to go"):
        flow_of(tmp_path).fork(path, fake_spark, name="b")
    with pytest.raises(ConfigError, match="there is nobody to follow"):
        flow_of(tmp_path).fork(path, fake_spark, name="b", checkpoint=tmp_path / "elsewhere")
    free = flow_of(tmp_path, rate=None).fork(
        path, fake_spark, name="free", checkpoint=tmp_path / "elsewhere", follow=False, interval="50ms"
    )
    seen(free)
    with pytest.raises(ConfigError, match="does not follow"):
        free.promote()
    free.cancel()
    with pytest.raises(ConfigError, match="'lonely' is a fork, and recovery is 'task'"):
        fork_of(tmp_path, fake_spark, name="lonely", recovery="task")
    flow = cw.Dataflow("once")
    flow.read("in", _Once()).write("out", cw.discard())
    with pytest.raises(BuildError, match="can be read once only"):
        flow.fork(path, fake_spark, name="c", checkpoint=tmp_path / "chk")


class _Once(type(cw.memory([], schema="n long"))):  # type: ignore[misc]
    """Rows that are gone once they were read."""

    def __init__(self) -> None:
        super().__init__(cw.memory([], schema="n long").schema, ())

    @property
    def replayable(self) -> bool:
        return False


def test_a_loop_keeps_a_fork_from_taking_over() -> None:
    flow = cw.Dataflow("halving")
    numbers = flow.loop("numbers", flow.read("in", cw.memory([], schema="n long")))
    halves = numbers.with_columns("halve", n=pl.col("n") // 2)
    numbers.feed_back(halves.filter("more", pl.col("n") > 1))
    halves.filter("ones", pl.col("n") == 1).write("out", cw.discard())
    assert [r for r in forks.undecided_steps(make_plan(flow, 2)) if "closes a loop" in r]
    assert forks.undecided_steps(make_plan(flow_of(Path("out")), 2)) == []

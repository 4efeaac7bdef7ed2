"""Sinks with one commit for all subtasks: by the driver, once a checkpoint is complete, whatever dies when."""

from __future__ import annotations

import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from fake_host import FakeSpark
from runtime_world import counting, gated, kill_some, open_gate, wait_until

import cutwater as cw
from cutwater.errors import CutwaterError
from cutwater.runtime.driver import global_commits
from ledger_sink import LedgerCommitter, LedgerSink, entries, visible

ROWS = 30_000


def flow_of(folder: Path, sink: LedgerSink, rows: int = ROWS) -> cw.Dataflow:
    flow = cw.Dataflow("ledger")
    flow.read("in", gated(folder, rows, rate=15_000)).write("out", sink)
    return flow


@dataclass(frozen=True)
class FailingOnce(LedgerSink):
    """Its first commit of rows fails, behind the entry that it made."""

    def committer(self, schema: Any, job_uid: str, step: str) -> LedgerCommitter:
        return _FailingOnce(self, f"{job_uid}-{step}")


class _FailingOnce(LedgerCommitter):
    def commit(self, checkpoint_id: int, handles: Any) -> None:
        super().commit(checkpoint_id, handles)
        failed = Path(self._sink.folder, "failed")
        if handles and not failed.exists():
            failed.touch()
            raise ZeroDivisionError("after the commit")


@pytest.mark.parametrize("pause_s", [0.0, 0.3], ids=["quick", "slower than checkpoints"])
def test_each_row_once_through_kills_and_a_rescale(
    start: Any, fake_spark: FakeSpark, tmp_path: Path, pause_s: float
) -> None:
    out = tmp_path / "out"
    job = start(flow_of(tmp_path, LedgerSink(str(out), pause_s)))
    wait_until(lambda: visible(out), "a commit", job=job)
    kill_some(job, fake_spark, 1, seed=1)
    job.rescale(3)
    kill_some(job, fake_spark, 1, seed=2)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert sorted(visible(out)) == list(range(ROWS))


def test_a_job_is_done_when_its_last_commit_is(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(global_commits, "_END_S", 0.0)
    out = tmp_path / "out"
    open_gate(tmp_path)
    job = start(flow_of(tmp_path, LedgerSink(str(out), 0.5), 3_000))
    assert job.await_termination(60)
    assert sorted(visible(out)) == list(range(3_000))


def test_what_waits_for_a_slow_commit_goes_with_the_next(start: Any, tmp_path: Path) -> None:
    """The interval is 50 ms, a commit takes 300: several checkpoints lie between two entries."""
    out = tmp_path / "out"
    job = start(flow_of(tmp_path, LedgerSink(str(out), 0.3)))
    wait_until(lambda: len(list(entries(out))) > 4, "commits", job=job)
    open_gate(tmp_path)
    assert job.await_termination(60)
    checkpoints = [entry["checkpoint"] for entry in entries(out) if entry["adds"]]
    assert max(b - a for a, b in pairwise(checkpoints)) > 1
    assert sorted(visible(out)) == list(range(ROWS))


def test_a_handle_is_handed_in_until_it_is_committed_and_no_longer(start: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = start(flow_of(tmp_path, LedgerSink(str(out))))
    wait_until(lambda: len(list(entries(out))) > 15, "commits", job=job)
    open_gate(tmp_path)
    assert job.await_termination(60)
    made = list(entries(out))
    assert made[-1]["named"] < sum(len(entry["adds"]) for entry in made) / 2
    assert sorted(visible(out)) == list(range(ROWS))


def test_a_commit_that_fails_is_made_again_and_not_twice(start: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    job = start(flow_of(tmp_path, FailingOnce(str(out))))
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert (out / "failed").exists()
    assert job.status.restarts == 1
    assert sorted(visible(out)) == list(range(ROWS))


def test_its_error_names_the_step(start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(self: LedgerCommitter, checkpoint_id: int, handles: Any) -> None:
        raise ZeroDivisionError("no such table")

    monkeypatch.setattr(LedgerCommitter, "commit", refused)
    job = start(flow_of(tmp_path, LedgerSink(str(tmp_path / "out"))), restart="none")
    with pytest.raises(CutwaterError, match=r"step 'out': checkpoint \d+ cannot be committed: ZeroDivisionError: no"):
        job.await_termination(60)


def test_a_stop_with_a_savepoint_leaves_all_rows_before_it_visible(start: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    sink = LedgerSink(str(out), 0.2)
    job = start(flow_of(tmp_path, sink))
    wait_until(lambda: visible(out), "a commit", job=job)
    job.stop()
    before = visible(out)
    open_gate(tmp_path)
    job = start(flow_of(tmp_path, sink))
    assert job.await_termination(60)
    after = visible(out)
    assert sorted(after) == list(range(ROWS))
    assert set(before) <= set(after)


def test_a_driver_that_commits_late_is_refused_and_its_rows_are_there(
    start: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first driver sleeps in a commit; a second one takes over, and commits what the first had published."""
    out = tmp_path / "out"
    monkeypatch.setattr(global_commits, "_END_S", 0.1)
    job = start(flow_of(tmp_path, LedgerSink(str(out), 3.0)))
    wait_until(lambda: job.status.checkpoints.completed > 2, "checkpoints", job=job)
    job.cancel()
    made = len(list(entries(out)))
    open_gate(tmp_path)
    job = start(flow_of(tmp_path, LedgerSink(str(out))))
    assert job.await_termination(60)
    assert len(list(entries(out))) > made
    assert sorted(visible(out)) == list(range(ROWS))
    time.sleep(3.2)  # the first one's commit wakes up
    assert sorted(visible(out)) == list(range(ROWS))


@pytest.mark.parametrize(
    "recovery", ["region", *(pytest.param(r, marks=pytest.mark.full) for r in ("task", "upstream"))]
)
def test_beside_a_part_that_goes_back_alone(start: Any, fake_spark: FakeSpark, tmp_path: Path, recovery: str) -> None:
    out = tmp_path / "out"
    flow = counting("ledger", gated(tmp_path, ROWS, rate=15_000), tmp_path / "files")
    flow.read("more", gated(tmp_path, ROWS, rate=15_000)).filter("all", pl.col("value") >= 0).write(
        "ledger", LedgerSink(str(out), 0.1)
    )
    job = start(flow, recovery=recovery)
    wait_until(lambda: visible(out), "a commit", job=job)
    kill_some(job, fake_spark, 2, seed=3)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert sorted(visible(out)) == list(range(ROWS))


def test_workers_are_not_lost_while_sinks_are_settled(start: Any, fake_spark: FakeSpark, tmp_path: Path) -> None:
    """Settling takes three times as long as a worker may be silent, and nobody was."""
    out = tmp_path / "out"
    limits = {"heartbeat_interval": "100ms", "heartbeat_timeout": "500ms"}
    job = start(flow_of(tmp_path, LedgerSink(str(out), 1.5), 6_000), **limits)
    wait_until(lambda: job.status.checkpoints.completed > 2, "checkpoints", job=job)
    kill_some(job, fake_spark, 1, seed=5)
    open_gate(tmp_path)
    assert job.await_termination(60)
    assert job.status.restarts == 1
    assert sorted(visible(out)) == list(range(6_000))

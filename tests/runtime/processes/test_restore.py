"""Beginning from a chosen snapshot: another job's, an older one of the job itself, or one that is not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from runtime_world import counting, gated, open_gate, query, wait_until

import cutwater as cw
from cutwater.api.jobs.job import Job

ROWS, KEYS = 8_000, 20


def paused(start, tmp_path: Path, name: str = "first") -> Job:  # type: ignore[no-untyped-def]
    """A job that was stopped half way; its checkpoints lie in ``chk``."""
    job = start(counting(name, gated(tmp_path, ROWS, rate=8_000), tmp_path / name, keys=KEYS))
    wait_until(lambda: job.status.checkpoints.completed >= 3 and job.status.rows_read > 1_000, "some checkpoints")
    job.stop()
    return job


def test_a_second_job_goes_on_from_the_first_ones_snapshot_and_touches_nothing_of_it(start, tmp_path: Path) -> None:
    first = paused(start, tmp_path)
    open_gate(tmp_path)
    flow = counting("second", gated(tmp_path, ROWS), tmp_path / "second", keys=KEYS)
    second = start(flow, checkpoint=tmp_path / "other", restore=first.checkpoint_dir)
    assert second.await_termination(30)
    assert second.id != first.id
    (low,) = query("select min(n) from {second}", second=tmp_path / "second")[0]
    assert low > 1, "the counts began anew"
    counts = query(
        "select key, max(n), count(*), count(distinct n), max(n) - min(n) + 1 from {second} group by key",
        second=tmp_path / "second",
    )
    assert len(counts) == KEYS
    for _, last, rows, distinct, span in counts:
        assert last == ROWS // KEYS  # state of the snapshot, and every row after it, each once
        assert rows == distinct == span
    again = start(counting("first", gated(tmp_path, ROWS), tmp_path / "first", keys=KEYS))
    assert again.await_termination(30)
    assert query("select count(*), count(distinct eid) from {first}", first=tmp_path / "first") == [(ROWS, ROWS)]


def test_latest_goes_on_and_a_finished_job_does_not_run_again(start, tmp_path: Path) -> None:
    paused(start, tmp_path)
    open_gate(tmp_path)
    flow = counting("first", gated(tmp_path, ROWS), tmp_path / "first", keys=KEYS)
    assert start(flow, restore="latest").await_termination(30)
    job = start(counting("first", gated(tmp_path, ROWS), tmp_path / "first", keys=KEYS))
    assert job.await_termination(5)
    assert job.status.outcome == "finished"
    assert "finished already" in job.status.warnings[-1]
    assert query("select count(*), count(distinct eid) from {first}", first=tmp_path / "first") == [(ROWS, ROWS)]


def test_a_snapshot_that_is_not_there_is_named_with_those_that_are(start, tmp_path: Path) -> None:
    first = paused(start, tmp_path)
    flow = counting("second", gated(tmp_path, ROWS), tmp_path / "second", keys=KEYS)
    job = start(flow, checkpoint=tmp_path / "other", restore=f"{first.checkpoint_dir}@99999")
    with pytest.raises(cw.ConfigError, match=r"no completed checkpoint .*first@99999.*Retained there: \d+"):
        job.await_termination(20)


def test_a_job_with_checkpoints_of_its_own_refuses_another_ones(start, tmp_path: Path) -> None:
    first = paused(start, tmp_path)
    other = paused(start, tmp_path, "other")
    flow = counting("other", gated(tmp_path, ROWS), tmp_path / "other", keys=KEYS)
    with pytest.raises(cw.ConfigError, match="has checkpoints of its own"):
        start(flow, restore=first.checkpoint_dir)
    assert not other.is_active

"""What the job log says of the end, read as another process does: ``cutwater list``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from faults import happens
from runtime_world import assert_running_counts, counting, gated, open_gate, wait_until

import cutwater as cw
from cutwater.errors import CutwaterError, FencedError, StorageError
from cutwater.runtime.driver.publisher import Publisher
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import JobEnded
from cutwater.storage.store.local import LocalStore
from cutwater.ui.inspect import driver_runs, job_infos

ROWS = 3_000


def listed(tmp_path: Path) -> tuple[str, str]:
    """State and reason as ``cutwater list`` shows them."""
    info = job_infos(LocalStore(tmp_path / "chk"), driver_runs)[0]
    return info["state"], info["reason"]


def test_the_log_tells_each_end_and_a_new_start(start, tmp_path: Path) -> None:
    def flow() -> cw.Dataflow:
        def once(row: dict[str, Any]) -> dict[str, Any]:
            if (tmp_path / "fail").exists() and happens(tmp_path / "failed"):
                raise ZeroDivisionError("only once")
            return row

        return counting(
            "told", gated(tmp_path, ROWS), tmp_path / "out", wrap=lambda rows: rows.map("once", once, rows.schema)
        )

    def running(**settings: Any) -> Any:
        job = start(flow(), **settings)
        done = job.status.checkpoints.completed
        wait_until(lambda: job.status.checkpoints.completed > done, "a checkpoint")
        wait_until(lambda: listed(tmp_path) == ("running", ""), "its phase in the list")
        return job

    running().stop()
    assert listed(tmp_path) == ("stopped", "stopped by the user")
    running().cancel()
    assert listed(tmp_path) == ("cancelled", "cancelled by the user")
    job = running(restart="none")
    (tmp_path / "fail").touch()
    open_gate(tmp_path)
    with pytest.raises(CutwaterError, match="only once"):
        job.await_termination(30)
    state, reason = listed(tmp_path)
    assert (state, "\n" in reason) == ("failed", False)
    assert "ZeroDivisionError" in reason
    assert start(flow()).await_termination(30)
    assert listed(tmp_path) == ("finished", "")
    assert_running_counts(tmp_path / "out", ROWS)


def test_a_fenced_driver_does_not_tell_the_end_of_the_job_of_another(start, tmp_path: Path) -> None:
    job = start(counting("fenced", gated(tmp_path, ROWS), tmp_path / "out"))
    wait_until(lambda: job.status.checkpoints.completed >= 1, "a checkpoint")
    JobLog(LocalStore(tmp_path / "chk"), "fenced").begin_attempt("elsewhere:1")
    with pytest.raises(FencedError):
        job.await_termination(30)
    assert listed(tmp_path) == ("unknown", "")


def test_a_driver_fenced_after_the_last_commit_ends_all_the_same(
    start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are committed; saying so in the log is left to the new owner, who finds the final checkpoint."""
    end = Publisher.end

    def late(self: Publisher, *args: Any, **rest: Any) -> None:
        JobLog(LocalStore(tmp_path / "chk"), "late").begin_attempt("elsewhere:1")
        end(self, *args, **rest)

    monkeypatch.setattr(Publisher, "end", late)
    open_gate(tmp_path)
    job = start(counting("late", gated(tmp_path, ROWS, rate=None), tmp_path / "out"))
    assert job.await_termination(30)
    assert job.status.outcome == "finished"
    assert listed(tmp_path) == ("unknown", "")
    monkeypatch.undo()


def test_a_log_that_cannot_be_written_at_the_end_is_a_warning(
    start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = start(counting("full", gated(tmp_path, ROWS), tmp_path / "out"))
    wait_until(lambda: job.status.checkpoints.completed >= 1, "a checkpoint")

    append = JobLog.append

    def full(self: JobLog, event: Any) -> Any:
        if isinstance(event, JobEnded):
            raise StorageError("no space left")
        return append(self, event)

    monkeypatch.setattr(JobLog, "append", full)
    job.cancel()
    assert job.status.outcome == "cancelled"
    assert job.exception() is None
    assert "no space left" in job.status.warnings[-1]

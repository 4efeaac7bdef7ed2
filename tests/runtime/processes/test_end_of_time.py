"""W5: end of time overtakes no row, whatever parallelism a job goes on at, for every step that waits for time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_host import FakeSpark
from runtime_world import kill_some, open_gate, wait_until
from timed_world import KINDS, ROWS, found, timed, wanted

from cutwater.api.jobs.job import Job

UNALIGNED = {"protocol": "unaligned", "aligned_timeout": "0ms", "channel_frames": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "aligned": {},
    "unaligned": UNALIGNED,
    "chandy_lamport": {"protocol": "chandy_lamport", "channel_frames": 1},
    "task": {"recovery": "task"} | UNALIGNED,
}

MATRIX = [
    (old, new, "5ms" if (old + new) % 2 else "10s", [*SETTINGS][(old + new) % len(SETTINGS)])
    for old in range(1, 5)
    for new in range(1, 5)
]
"""From each parallelism to each, under settings that take turns."""


def some_rows(job: Job) -> None:
    wait_until(lambda: job.status.rows_read > ROWS // 4, "rows", 120, job=job)


def assert_nothing_lost(folder: Path) -> None:
    """Every step gave what DuckDB gives; no row was late."""
    lost = {
        kind: f"{len(wanted(kind))} rows wanted, {len(found(folder, kind))} found"
        for kind in KINDS
        if found(folder, kind) != wanted(kind)
    }
    assert lost == {}


@pytest.mark.parametrize(
    ("old", "new", "out_of_order", "settings"),
    [(2, 3, "10s", "aligned"), (1, 4, "5ms", "unaligned"), (3, 2, "5ms", "chandy_lamport")],
)
def test_w5_nothing_is_late_in_a_running_job_that_is_rescaled(
    start, tmp_path: Path, old: int, new: int, out_of_order: str, settings: str
) -> None:
    rescaled(start, tmp_path, old, new, out_of_order, settings)


@pytest.mark.full
@pytest.mark.parametrize(("old", "new", "out_of_order", "settings"), MATRIX)
def test_w5_nothing_is_late_from_any_parallelism_to_any_other(
    start, tmp_path: Path, old: int, new: int, out_of_order: str, settings: str
) -> None:
    rescaled(start, tmp_path, old, new, out_of_order, settings)


def rescaled(start: Any, folder: Path, old: int, new: int, out_of_order: str, settings: str) -> None:
    job = start(timed(folder, out_of_order), parallelism=old, **SETTINGS[settings])
    some_rows(job)
    job.rescale(new)
    open_gate(folder)
    assert job.await_termination(180)
    assert job.status.restarts == 0
    assert_nothing_lost(folder)


@pytest.mark.full
@pytest.mark.parametrize(("old", "new", "out_of_order", "settings"), MATRIX)
def test_w5_nothing_is_late_in_a_job_that_is_started_again_at_another_parallelism(
    start, fake_spark: FakeSpark, tmp_path: Path, old: int, new: int, out_of_order: str, settings: str
) -> None:
    """Stopped in the middle, with a savepoint or without; and, started again, a worker of it is killed."""
    job = start(timed(tmp_path, out_of_order), parallelism=old, **SETTINGS[settings])
    some_rows(job)
    if old > new:
        saved = job.stop(savepoint=tmp_path / "saved")
        job = start(timed(tmp_path, out_of_order), parallelism=new, restore=saved, **SETTINGS[settings])
    else:
        job.stop()
        job = start(timed(tmp_path, out_of_order), parallelism=new, **SETTINGS[settings])
    wait_until(lambda: job.status.checkpoints.completed > 0, "a checkpoint", 120, job=job)
    kill_some(job, fake_spark, 1, seed=old + new)
    open_gate(tmp_path)
    assert job.await_termination(180)
    assert_nothing_lost(tmp_path)

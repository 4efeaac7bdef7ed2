"""Rows that came too late are not lost in silence: the job's warnings tell of those that nobody reads."""

from __future__ import annotations

import logging
from datetime import datetime, timedelta

import pytest
from runtime_world import wait_until

import cutwater as cw
from cutwater.api.jobs.job import Job
from cutwater.api.streams.keyed import WindowedResult
from cutwater.connectors.memory import PAUSE

NOON = datetime(2024, 1, 1, 12)
SCHEMA = "k long, t timestamp"


def minutes(*which: int) -> list[dict[str, object]]:
    return [{"k": 0, "t": NOON + timedelta(minutes=m)} for m in which]


def late_warnings(job: Job) -> list[str]:
    return [w for w in job.status.warnings if "too late" in w]


def backwards(*more: object) -> object:
    """A hundred rows, the newest first: the first is on time, the others are not."""
    return cw.memory(minutes(*range(10_000, 0, -100)), *more, schema=SCHEMA)


def hourly(flow: cw.Dataflow, source: object) -> WindowedResult:
    rows = flow.read("in", source, event_time="t")
    return rows.key_by("k").window("hours", cw.tumbling("1h")).aggregate("n", n=cw.count())


def test_the_end_tells_how_many_rows_were_dropped_and_what_to_do(start, caplog: pytest.LogCaptureFixture) -> None:
    flow = cw.Dataflow("late")
    hourly(flow, backwards()).write("out", cw.discard())
    with caplog.at_level(logging.WARNING, "cutwater"):
        job = start(flow)
        assert job.await_termination(30)
    assert late_warnings(job)[-1] == (
        "step 'n': 99 of 100 rows came too late and were dropped. Read them as .late, "
        "or give read(...) a larger out_of_order=, or window(...) a larger allowed_lateness=."
    )
    assert sum("99 of 100 rows" in record.getMessage() for record in caplog.records) == 1


def test_while_the_job_runs_they_are_told_of_once(start) -> None:
    flow = cw.Dataflow("late")
    early = minutes(10_000, 1, 2)
    hourly(flow, cw.memory([*early, PAUSE(0.6), *minutes(3, 4), PAUSE(600)], schema=SCHEMA)).write("out", cw.discard())
    job = start(flow, parallelism=1)
    wait_until(lambda: late_warnings(job), "a warning")
    wait_until(lambda: job.status.steps["n"].counters.get("rows_late") == 4, "more late rows")
    (warning,) = late_warnings(job)
    assert warning.startswith("step 'n': rows come too late and are dropped (")
    job.cancel()
    assert "4 of 5 rows came too late" in late_warnings(job)[-1]


def test_rows_that_somebody_reads_are_no_warning(start) -> None:
    flow = cw.Dataflow("read")
    windows = hourly(flow, backwards())
    windows.write("out", cw.discard())
    windows.late.write("late", cw.discard())
    job = start(flow)
    assert job.await_termination(30)
    assert job.status.steps["n"].counters["rows_late"] == 99
    assert late_warnings(job) == []


def test_of_two_sides_the_one_that_nobody_reads_is_told(start) -> None:
    flow = cw.Dataflow("sides")
    sides = [flow.read(name, backwards(), event_time="t").key_by("k") for name in ("left", "right")]
    joined = sides[0].join("pairs", sides[1], within=("-1h", "1h"))
    joined.write("out", cw.discard())
    joined.late_left.write("late", cw.discard())
    job = start(flow, parallelism=1)
    assert job.await_termination(30)
    counted = job.status.steps["late"].rows_in
    dropped = job.status.steps["pairs"].counters["rows_late"] - counted
    assert dropped > 0
    assert late_warnings(job)[-1] == (
        f"step 'pairs': {dropped} of 200 rows came too late and were dropped. "
        "Read them as .late_right, or give read(...) a larger out_of_order=."
    )

"""A function that does not repeat itself, where only a part of the job goes back: said, and everything goes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from faults import happens
from runtime_world import assert_ids, gated, query, wait_until
from scope_world import StartJob, end, kill

import cutwater as cw
from cutwater.api.jobs.job import Job

ROWS = 4_000


class Fickle(cw.ProcessFunction):
    """In the first process of a subtask it does something that no later one does."""

    def __init__(self, folder: Path, way: str) -> None:
        self.folder, self.way = str(folder), way
        self.first: bool | None = None

    def process(self, row: dict[str, Any], ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        if self.first is None:
            self.first = happens(Path(self.folder) / f"began-{ctx.subtask}")
        if self.first and self.way == "clock":
            ctx.processing_time_ms()
        if self.way == "clock" or self.first == (self.way == "fewer"):
            yield {"eid": row["value"], "copy": 1}
        yield {"eid": row["value"], "copy": 0}


def assert_named(job: Job, said: str) -> None:
    """A part went back, contradicted itself, and everything went back."""
    first, second = job.status.failures
    assert "1 of 2 workers go back" in first.reason
    assert second.reason.startswith("step 'draw': subtask 1 ")
    assert said in second.reason
    assert second.reason.endswith("Make it deterministic, or choose recovery='region' or 'job'.")
    assert any("everything goes back" in warning for warning in job.status.warnings)


@pytest.mark.full
def test_r4_rows_beyond_the_end_that_was_there_already_are_said_of_the_step_that_made_them(
    tmp_path: Path, start: StartJob
) -> None:
    flow = cw.Dataflow("fickle")
    made = flow.read("short", cw.rate(None, rows=ROWS)).with_columns("keys", k=pl.col("value") % 97)
    drawn = made.key_by("k").process("draw", Fickle(tmp_path, "more"), "eid long, copy long")
    counts = drawn.key_by("eid").window("all", cw.global_window()).aggregate("count", n=cw.count())
    counts.write("out", cw.files(str(tmp_path / "out")))
    flow.read("long", gated(tmp_path, ROWS)).write("kept", cw.files(str(tmp_path / "kept")))
    job = start(flow, recovery="task", parallelism=2, interval="1h")

    def ended() -> bool:
        """Each counting subtask has heard the end from each that draws."""
        counted = job.status.steps.get("count")
        return counted is not None and counted.rows_out == ROWS

    wait_until(ended, "the counts", job=job)
    kill(job, 1)
    wait_until(lambda: job.status.restarts == 2 or not job.is_active, "that everything goes back", job=job)
    end(job, tmp_path)
    assert_named(job, "rows for subtask 0 once more, where it had made ")
    assert query("SELECT count(*), min(n), max(n) FROM {out}", out=tmp_path / "out") == [(ROWS, 2, 2)]
    assert_ids(tmp_path / "kept", ROWS, column="value")


@pytest.mark.parametrize(
    ("way", "said"),
    [
        pytest.param(
            "clock", "where with the same input it looked at the clock", id="another choice", marks=pytest.mark.full
        ),
        pytest.param("fewer", "rows for 'both' once more, where it had made ", id="fewer rows"),
    ],
)
def test_r4_a_function_that_does_not_repeat_itself_is_named_and_everything_goes_back(
    tmp_path: Path, start: StartJob, way: str, said: str
) -> None:
    flow = cw.Dataflow("fickle")
    short = flow.read("short", cw.rate(None, rows=ROWS))
    made = short.key_by("value").process("draw", Fickle(tmp_path, way), "eid long, copy long")
    long = flow.read("long", gated(tmp_path, ROWS, start=ROWS)).select(
        "like", eid=pl.col("value"), copy=pl.lit(0, pl.Int64)
    )
    rows = made.rebalance().union("both", long.rebalance())
    rows.write("out", cw.files(str(tmp_path / "out")))
    job = start(flow, recovery="task", parallelism=2, interval="1h")  # what is made is made again from the beginning
    both = 2 * ROWS + ROWS * 8 // 10  # all of the first, and what does not wait of the second
    wait_until(lambda: "both" in (steps := job.status.steps) and steps["both"].rows_in >= both, "rows", job=job)
    kill(job, 1)
    wait_until(lambda: job.status.restarts == 2 or not job.is_active, "that everything goes back", job=job)
    end(job, tmp_path)
    assert_named(job, said)
    assert query("SELECT count(*), count(DISTINCT eid) FROM {out} WHERE copy = 0", out=tmp_path / "out") == [
        (2 * ROWS, 2 * ROWS)
    ]
    assert not query("SELECT eid, copy FROM {out} GROUP BY ALL HAVING count(*) > 1 LIMIT 3", out=tmp_path / "out")

"""What the status says of each step: how busy it is, what holds it up, and what its calls cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from runtime_world import wait_until

import cutwater as cw
from cutwater.api.jobs.job import Job
from cutwater.connectors.generate import RateSource
from cutwater.runtime.status.status import StepStatus

FIXED_S = 0.03
ROWS = 50_000_000


def slow_rows(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """A row a millisecond."""
    for batch in batches:
        time.sleep(batch.num_rows / 1000)
        yield batch


def slow_calls(sizes: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Each call takes the same time, whatever its rows; notes how many it got."""

    def call(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            with Path(sizes).open("a") as file:
                file.write(f"{batch.num_rows}\n")
            time.sleep(FIXED_S)
            yield batch

    return call


def step(job: Job, name: str) -> StepStatus:
    return job.status.steps.get(name, StepStatus())


@pytest.mark.parametrize("parallelism", [1, 2])
def test_backpressure_is_seen_while_it_lasts_and_at_the_step_that_it_holds_up(start, parallelism: int) -> None:
    """A fast source before a slow sink: for minutes on end no row moves out of the source."""
    flow = cw.Dataflow("held")
    rows = flow.read("in", RateSource(rows=ROWS, rate=None, partitions=4))
    slowed = rows.rebalance().map_batches("slow", slow_rows, rows.schema)
    slowed.write("out", cw.discard())
    job = start(flow, parallelism=parallelism, interval="1h")

    def told() -> bool:
        source, sink = step(job, "in"), step(job, "slow")
        return (
            source.backpressured > 0.9
            and sink.busy > 0.9
            and sink.backpressured < 0.1
            and source.busy < 0.1
            and all(w.backpressured > 0.9 and w.busy > 0.9 for w in job.status.workers)
            and [x.subtask for x in source.subtasks] == list(range(parallelism))
            and all(x.backpressured > 0.9 for x in source.subtasks)
        )

    wait_until(told, "a source that is held up by a busy step", job=job)
    job.cancel()


def test_a_step_that_waits_for_rows_is_neither_busy_nor_backpressured(start) -> None:
    flow = cw.Dataflow("quiet")
    flow.read("in", RateSource(rows=ROWS, rate=20.0, partitions=2)).rebalance().write("out", cw.discard())
    job = start(flow, interval="1h")
    wait_until(lambda: step(job, "out").rows_in > 10 and step(job, "out").subtasks, "some rows", job=job)
    wait_until(lambda: max(step(job, s).busy for s in ("in", "out")) < 0.2, "a quiet job", job=job)
    assert step(job, "in").backpressured == 0.0
    job.cancel()


def test_a_fixed_cost_per_call_gets_large_calls_and_is_told(start, tmp_path: Path) -> None:
    """With a budget alone each call would get 32 rows, and these rows would take a day."""
    sizes = tmp_path / "sizes"
    flow = cw.Dataflow("calls")
    rows = flow.read("in", RateSource(rows=ROWS, rate=None, partitions=4))

    rows.map_batches("call", slow_calls(str(sizes)), rows.schema).write("out", cw.discard())
    job = start(flow, parallelism=1, interval="500ms")
    wait_until(lambda: job.status.warnings, "the warning", job=job)
    wait_until(lambda: job.status.checkpoints.completed >= 2, "checkpoints all the same", job=job)
    assert step(job, "call").call_fixed_ms == pytest.approx(FIXED_S * 1000, rel=0.5)
    assert step(job, "in").call_fixed_ms == step(job, "out").call_fixed_ms == 0.0
    (warning,) = (w for w in job.status.warnings if "a call costs" in w)
    assert warning.startswith("step 'call': a call costs ")
    assert "max_call_ms (1000)" in warning
    wait_until(lambda: max(map(int, sizes.read_text().split()[-50:])) > 50_000, "large calls", job=job)
    job.cancel()


def test_a_lower_max_call_ms_keeps_calls_short(start, tmp_path: Path) -> None:
    """Half a millisecond a row and 30 ms a call: at most 60 rows fit into 60 ms."""
    sizes = tmp_path / "sizes"

    def call(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            with sizes.open("a") as file:
                file.write(f"{batch.num_rows}\n")
            time.sleep(FIXED_S + batch.num_rows * 0.0005)
            yield batch

    flow = cw.Dataflow("short")
    rows = flow.read("in", RateSource(rows=ROWS, rate=None, partitions=4))
    rows.map_batches("call", call, rows.schema).write("out", cw.discard())
    job = start(flow, parallelism=1, interval="1h", max_call_ms=60)
    wait_until(lambda: sizes.exists() and len(sizes.read_text().split()) > 60, "some calls", job=job)
    job.cancel()
    assert max(map(int, sizes.read_text().split()[30:-1])) <= 64

"""Real runs as traces, judged by the checker that shares nothing with the engine."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import faults
import pytest
from fake_host import FakeSpark
from loop_world import circulating, counted_loop
from runtime_world import assert_running_counts, counting, gated, open_gate, wait_until

from cutwater.errors import ConfigError
from cutwater.trace import events as e
from cutwater.trace.checker import check
from cutwater.trace.parts import read_run
from cutwater.trace.result import Kind

ROWS = 3_000
PROTOCOLS: dict[str, dict[str, Any]] = {
    "none": {},
    "aligned": {},
    "at_least_once": {},
    "chandy_lamport": {},
    "unaligned": {"aligned_timeout": "0ms"},
    "synchronous": {},
}
SHAPES = {"plain": counting, "loop": counted_loop, "self": circulating}


def run(start, fake_spark: FakeSpark, tmp_path: Path, shape: str, *, kill: bool, **settings: Any) -> e.Trace:
    flow = SHAPES[shape]("traced", gated(tmp_path, ROWS, rate=20_000), tmp_path / "out")
    job = start(flow, trace_dir=tmp_path / "trace", interval="30ms", **settings)
    enough = 0 if settings["protocol"] == "none" else 2
    wait_until(lambda: job.status.phase == "running", "the job")
    wait_until(lambda: job.status.checkpoints.completed >= enough, "some checkpoints")
    if kill:
        os.kill(fake_spark.pids[0], signal.SIGKILL)
        wait_until(lambda: job.status.restarts == 1 and job.status.phase == "running", "the recovery")
        wait_until(lambda: job.status.checkpoints.completed >= 2 * enough, "more checkpoints")
    open_gate(tmp_path)
    assert job.await_termination(40)
    return read_run([tmp_path / "trace"])


QUICK = {("none", "self"), ("aligned", "plain"), ("aligned", "loop"), ("at_least_once", "plain"),
         ("chandy_lamport", "self"), ("unaligned", "loop"), ("synchronous", "plain")}  # fmt: skip
EACH = [
    pytest.param(protocol, shape, marks=() if (protocol, shape) in QUICK else pytest.mark.full)
    for protocol in PROTOCOLS
    for shape in SHAPES
]


@pytest.mark.parametrize(("protocol", "shape"), EACH)
def test_a_killed_and_recovered_run_is_a_history_of_consistent_cuts(
    start, fake_spark: FakeSpark, tmp_path: Path, protocol: str, shape: str
) -> None:
    trace = run(start, fake_spark, tmp_path, shape, kill=True, protocol=protocol, **PROTOCOLS[protocol])
    result = check(trace, at_least_once=protocol == "at_least_once", drained=True)
    assert result.ok, str(result)
    assert result.restores == 1
    seen = {type(event) for event in trace.events}
    assert {e.Step, e.Crashed, e.Restored} <= seen
    if protocol != "none":
        assert {e.Cut, e.MarkerSent, e.MarkerTaken, e.Completed, e.Committed} <= seen
        assert result.snapshots >= 3
        channels = len(trace.header.channels)
        assert len(result.counts) == channels * result.snapshots
        if protocol != "at_least_once":
            assert all(count.holds for count in result.counts)
            assert len(result.reorderings) == result.snapshots


def test_a_worker_killed_between_sending_and_writing_leaves_no_wrong_trace(
    start, fake_spark: FakeSpark, tmp_path: Path
) -> None:
    fake_spark.prepare = faults.sending_before_writing(tmp_path / "died")
    flow = counting("traced", gated(tmp_path, ROWS), tmp_path / "out")
    job = start(flow, trace_dir=tmp_path / "trace", batch_rows=2)  # every batch leaves at once
    wait_until(lambda: job.status.restarts == 1, "the recovery")
    open_gate(tmp_path)
    assert job.await_termination(40)
    result = check(read_run([tmp_path / "trace"]), drained=True)
    assert result.ok, str(result)


# --------------------------------------------------------------------------------------------------- the alarm works


@pytest.mark.parametrize(
    ("bug", "shape", "settings", "found"),
    [
        (faults.barriers_before_rows, "plain", {"buffer_timeout": "20ms"}, {Kind.MARKER, Kind.LOST}),
        (faults.forgetting_the_log, "loop", {"protocol": "chandy_lamport"}, {Kind.LOST}),
    ],
)
def test_a_planted_bug_of_the_runtime_is_found_in_its_trace(
    start, fake_spark: FakeSpark, tmp_path: Path, bug: Any, shape: str, settings: dict[str, Any], found: set[Kind]
) -> None:
    fake_spark.prepare = bug
    trace = run(start, fake_spark, tmp_path, shape, kill=False, **{"protocol": "aligned", **settings})
    assert found <= check(trace, quick=True).kinds()


# ------------------------------------------------------------------------------------------------- what is written


def test_the_files_are_the_owners_alone_and_hold_no_values(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    secret = 8_675_309  # the first id; it would be in any value that is written
    flow = counting("traced", gated(tmp_path, 500, start=secret), tmp_path / "out", keys=1_000_000_007)
    open_gate(tmp_path)
    assert start(flow, trace_dir=tmp_path / "made" / "trace").await_termination(40)
    folder = tmp_path / "made" / "trace"
    files = list(folder.iterdir())
    assert len(files) == 3, "two workers, one driver"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {f.stat().st_mode & 0o777 for f in files} == {0o600}
    assert not [f for f in files if b"8675" in f.read_bytes()]


def test_without_trace_dir_the_module_is_not_even_loaded(
    start, fake_spark: FakeSpark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unloadable(args: Any) -> None:
        sys.modules["cutwater.runtime.worker.tracing"] = None  # type: ignore[assignment]

    fake_spark.prepare = unloadable
    monkeypatch.setitem(sys.modules, "cutwater.runtime.worker.tracing", None)
    job = start(counting("plain", gated(tmp_path, ROWS), tmp_path / "out"))
    open_gate(tmp_path)
    assert job.await_termination(40)
    assert job.status.restarts == 0
    assert_running_counts(tmp_path / "out", ROWS)


def test_a_directory_that_cannot_be_is_refused_at_the_start(start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    flow = counting("traced", gated(tmp_path, 100), tmp_path / "out")
    with pytest.raises(ConfigError, match="cannot be written"):
        start(flow, trace_dir=tmp_path / "file" / "trace")


def test_a_job_that_is_traced_from_a_later_start_on(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    """What it goes on from is not in the trace: the positions that it tells are believed."""
    flow = counted_loop("late", gated(tmp_path, ROWS, rate=20_000), tmp_path / "out")
    job = start(flow, protocol="chandy_lamport")
    wait_until(lambda: job.status.checkpoints.completed >= 2, "some checkpoints")
    job.stop()
    flow = counted_loop("late", gated(tmp_path, ROWS, rate=20_000), tmp_path / "out")
    job = start(flow, protocol="chandy_lamport", trace_dir=tmp_path / "trace")
    wait_until(lambda: job.status.checkpoints.completed >= 2, "more checkpoints")
    open_gate(tmp_path)
    assert job.await_termination(40)
    trace = read_run([tmp_path / "trace"])
    restored = [event for event in trace.events if isinstance(event, e.Restored)]
    assert any(position > 0 for event in restored for position in event.sent.values())
    result = check(trace, drained=True)
    assert result.ok, str(result)
    assert len(result.reorderings) == result.snapshots >= 2


def test_two_drivers_of_a_job_write_one_run(start, fake_spark: FakeSpark, tmp_path: Path) -> None:
    for open_it in (False, True):
        flow = counting("twice", gated(tmp_path, ROWS, rate=20_000), tmp_path / "out")
        job = start(flow, trace_dir=tmp_path / "trace", protocol="unaligned", aligned_timeout="0ms")
        wait_until(lambda job=job: job.status.checkpoints.completed >= 2, "some checkpoints")
        if open_it:
            open_gate(tmp_path)
            assert job.await_termination(40)
        else:
            job.cancel()
    trace = read_run([tmp_path / "trace"])
    result = check(trace, drained=True)
    assert result.ok, str(result)
    assert result.restores == 1
    assert {event.snapshot for event in trace.events if isinstance(event, e.Restored)} != {None}

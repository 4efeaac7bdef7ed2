"""A user's mistake: what helps is tried again, what does not ends the job, and the message says where it was."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
from fake_host import FakeSpark
from faults import failing_states, happens
from runtime_world import assert_ids, assert_running_counts, counting, gated, open_gate, query, wait_until

import cutwater as cw
from cutwater.api.streams.stream import Stream
from cutwater.errors import DataError, InvariantError, StorageError, UserCodeError


def test_a_function_that_fails_once_costs_a_restart_and_no_row(start, tmp_path: Path) -> None:
    marker, rows = tmp_path / "failed", 10_000

    def once(row: dict[str, int]) -> dict[str, int]:
        if row["value"] == 5_000 and happens(marker):
            raise ZeroDivisionError("only once")
        return row

    def with_map(rows: Stream) -> Stream:
        return rows.map("once", once, rows.schema)

    open_gate(tmp_path)
    job = start(counting("once", gated(tmp_path, rows), tmp_path / "out", wrap=with_map))
    assert job.await_termination(30)
    assert job.status.restarts == 1
    assert "only once" in job.status.failures[0].reason
    assert_running_counts(tmp_path / "out", rows)


def test_a_function_that_always_fails_ends_the_job_with_its_own_traceback(start, tmp_path: Path) -> None:
    def share(row: dict[str, int]) -> dict[str, float]:
        return {"share": 1 / (row["value"] - 4_321)}

    flow = cw.Dataflow("always")
    rows = flow.read("in", gated(tmp_path, 10_000, rate=None), parallelism=1)
    rows.map("share", share, "share double").write("out", cw.files(str(tmp_path / "out")))
    job = start(flow)
    with pytest.raises(UserCodeError) as caught:
        job.await_termination(30)
    text = str(caught.value)
    assert "ZeroDivisionError: " in text
    assert "in share" in text, "the user's own line"
    assert "1 / (row[" in text
    assert "step 'share'" in text
    assert "subtask " in text
    assert "4321" in text, "the row"
    assert text.count("Traceback") == 1, "one story, not a chain of ours"
    assert job.status.outcome == "failed"
    assert 2 <= job.status.restarts < 10, "three times the same error without progress are enough"


def test_a_failure_of_all_workers_at_once_counts_once(start, tmp_path: Path) -> None:
    def never(row: dict[str, int]) -> dict[str, int]:
        raise ZeroDivisionError("never works")

    def with_map(rows: Stream) -> Stream:
        return rows.map("never", never, rows.schema)

    job = start(counting("all", gated(tmp_path, 4_000, rate=None), tmp_path / "out", wrap=with_map), parallelism=4)
    with pytest.raises(UserCodeError, match="never works") as caught:
        job.await_termination(30)
    assert job.status.restarts == 2, "it is tried three times, however many workers it happens to"
    assert [(f.again, f.counted, f.allowed) for f in job.status.failures] == [(False, 1, 2), (True, 2, 2)]
    assert str(caught.value).endswith("given up: 3 times the same failure, with no completed checkpoint in between")


@pytest.mark.parametrize(
    ("strategy", "verdict"), [("none", "restart strategy 'none'"), ("fixed_delay", "restarted 1 times")]
)
def test_the_error_has_its_cause_and_why_it_was_not_tried_again(
    start, tmp_path: Path, strategy: str, verdict: str
) -> None:
    def never(row: dict[str, int]) -> dict[str, int]:
        raise ZeroDivisionError("never works")

    flow = cw.Dataflow("given-up")
    rows = flow.read("in", gated(tmp_path, 4_000, rate=None))
    rows.map("never", never, rows.schema).write("out", cw.discard())
    job = start(flow, restart={"strategy": strategy, "attempts": 1, "delay_ms": 10})
    with pytest.raises(UserCodeError, match=rf"(?s)never works.*given up: {verdict}"):
        job.await_termination(30)


def test_a_bad_line_is_named_by_file_and_line_and_not_tried_again(start, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    lines = [f"{i},{i * 2}" for i in range(5_000)]
    lines[3_210] = "3210,many"
    (folder / "numbers.csv").write_text("id,n\n" + "\n".join(lines) + "\n")
    flow = cw.Dataflow("bad")
    flow.read("in", cw.files(str(folder / "*.csv"), schema="id long, n long")).write(
        "out", cw.files(str(tmp_path / "out"))
    )
    job = start(flow)
    with pytest.raises(DataError, match=r"numbers\.csv.*3212") as caught:  # one header, counted from 1
        job.await_termination(30)
    assert caught.value.step == "in"
    assert job.status.restarts == 0


def test_bad_lines_can_be_diverted(start, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    lines = [f"{i},{'many' if i % 100 == 99 else i}" for i in range(5_000)]
    (folder / "numbers.csv").write_text("id,n\n" + "\n".join(lines) + "\n")
    flow = cw.Dataflow("bad")
    source = cw.files(str(folder / "*.csv"), schema="id long, n long", bad_rows="dead_letter")
    rows = flow.read("in", source)
    rows.write("out", cw.files(str(tmp_path / "out")))
    rows.dead_letters.write("bad", cw.files(str(tmp_path / "bad")))
    assert start(flow).await_termination(30)
    good = [r[0] for r in query("SELECT id FROM {out} ORDER BY id", out=tmp_path / "out")]
    bad = [r[0] for r in query("SELECT position FROM {bad} ORDER BY position", bad=tmp_path / "bad")]
    assert good == [i for i in range(5_000) if i % 100 != 99]
    assert bad == [i + 2 for i in range(5_000) if i % 100 == 99]


def with_null_keys(tmp_path: Path) -> tuple[cw.Dataflow, Stream]:
    flow = cw.Dataflow("nulls")
    rows = flow.read("in", gated(tmp_path, 5_000, rate=None))
    return flow, rows.with_columns("key", key=pl.when(pl.col("value") % 1_000 != 999).then(pl.col("value") % 7))


def test_a_null_key_fails_the_job_and_says_what_to_do(start, tmp_path: Path) -> None:
    flow, rows = with_null_keys(tmp_path)
    rows.key_by("key").aggregate("count", n=cw.count()).write("out", cw.files(str(tmp_path / "out")))
    job = start(flow)
    with pytest.raises(DataError, match=r"(?s)key.*null.*Filter such rows out"):
        job.await_termination(30)
    assert job.status.restarts == 0


def test_null_keys_can_be_diverted(start, tmp_path: Path) -> None:
    open_gate(tmp_path)
    flow, rows = with_null_keys(tmp_path)
    keyed = rows.key_by("key", dead_letters="bad-keys")
    keyed.aggregate("count", n=cw.count(), eid=cw.last("value")).write("out", cw.files(str(tmp_path / "out")))
    keyed.dead_letters.write("bad", cw.files(str(tmp_path / "bad")))
    assert start(flow).await_termination(30)
    good = [r[0] for r in query("SELECT eid FROM {out} ORDER BY eid", out=tmp_path / "out")]
    assert good == [i for i in range(5_000) if i % 1_000 != 999]
    assert query("SELECT count(*) FROM {bad}", bad=tmp_path / "bad") == [(5,)]


def test_a_sink_that_cannot_write_ends_the_job(start, tmp_path: Path) -> None:
    """Rows that could not be made durable are nowhere else: the attempt fails, and in the end the job."""
    target = tmp_path / "out"
    flow = counting("sink", gated(tmp_path, 20_000), target)
    job = start(flow, restart={"strategy": "fixed_delay", "attempts": 2})
    wait_until(target.exists, "the first rows")
    while not target.is_file():  # the job may just be making the directory again
        shutil.rmtree(target, ignore_errors=True)
        with contextlib.suppress(IsADirectoryError):
            target.write_text("a file where the directory was")
    open_gate(tmp_path)
    with pytest.raises(cw.CutwaterError, match="out"):
        job.await_termination(30)
    assert job.status.outcome == "failed"


def test_a_sink_that_fails_again_and_again_is_told_in_full_once(
    start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    flow = counting("sink", gated(tmp_path, 1_000), tmp_path / "out")
    (tmp_path / "out").symlink_to("/proc/none/below")
    with caplog.at_level(logging.WARNING, "cutwater"):
        job = start(flow, restart={"strategy": "fixed_delay", "attempts": 3, "delay_ms": 2})
        with pytest.raises(StorageError, match="restarted 3 times"):
            job.await_termination(30)
    told = [text for record in caplog.records if " failed: " in (text := record.getMessage())]
    assert "cannot make the staging folder" in told[0]
    assert told[1:] == [f"job 'sink': attempt {n} failed: the same ({n} of 3), next in 2ms" for n in (2, 3)]
    assert all("cannot make the staging folder" in failure.reason for failure in job.status.failures)


def test_a_failure_after_a_completed_checkpoint_is_told_in_full(start, tmp_path: Path) -> None:
    source, marker = gated(tmp_path, 8_000, rate=8_000), tmp_path / "marker"
    shown = tmp_path / "shown"

    def fails_when_shown(row: dict[str, object]) -> dict[str, object]:
        if shown.exists() and happens(marker, 2):
            shown.unlink(missing_ok=True)
            raise RuntimeError("no way")
        return row

    def wrap(rows: Stream) -> Stream:
        return rows.map("f", fails_when_shown, rows.schema)

    job = start(counting("twice", source, tmp_path / "out", wrap=wrap), parallelism=1)
    for n in (1, 2):
        completed = job.status.checkpoints.completed
        wait_until(lambda completed=completed: job.status.checkpoints.completed > completed, "a checkpoint")
        shown.touch()
        wait_until(lambda n=n: len(job.status.failures) == n, "a failure")
    open_gate(tmp_path)
    assert job.await_termination(30)
    assert [failure.again for failure in job.status.failures] == [False, False]


def test_rows_are_exact_when_one_job_has_several_failing_functions(start, tmp_path: Path) -> None:
    rows = 8_000
    markers = [tmp_path / f"failed{i}" for i in range(3)]

    def failing(number: int, at: int) -> Callable[..., object]:
        def once(row: dict[str, int]) -> dict[str, int]:
            if row["value"] == at and happens(markers[number]):
                raise RuntimeError(f"failure {number}")
            return row

        return once

    open_gate(tmp_path)
    flow = cw.Dataflow("several")
    stream = flow.read("in", gated(tmp_path, rows))
    for number, at in enumerate((1_000, 3_000, 5_000)):
        stream = stream.rebalance().map(f"map{number}", failing(number, at), stream.schema)
    stream.write("out", cw.files(str(tmp_path / "out")))
    job = start(flow)
    assert job.await_termination(30)
    assert all(Path(f"{marker}-0").exists() for marker in markers)
    assert_ids(tmp_path / "out", rows, column="value")


@pytest.mark.parametrize("tolerable", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_state_that_no_snapshot_can_hold_ends_the_job_with_that_error(
    start, fake_spark: FakeSpark, tmp_path: Path, caplog: pytest.LogCaptureFixture, tolerable: int
) -> None:
    """Storage may be mended, so that it is tried for long; this is not."""
    fake_spark.prepare = failing_states("count")
    job = start(counting("unable", gated(tmp_path, 4_000), tmp_path / "out"), tolerable_failed=tolerable)
    with pytest.raises(InvariantError) as caught:
        job.await_termination(30)
    assert str(caught.value).startswith(
        "step 'count': the state could not be put into a snapshot: ArrowNotImplementedError: no way to write"
    )
    assert "Traceback" in str(caught.value)
    assert str(caught.value).endswith("given up: 3 times the same failure, with no completed checkpoint in between")
    assert job.status.restarts == 2
    failed = [line for line in job.status.warnings if line.startswith("checkpoint ")]
    assert len(failed) == 3 * (tolerable + 1)
    assert all("step 'count'" in line and "\n" not in line for line in failed)
    said = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert set(said) >= {f"job 'unable': {line}" for line in failed}, "whoever waits for the end sees it, too"

"""A consumer far slower than its source: checkpoints that overtake the backlog, and restores of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from fake_host import FakeSpark
from runtime_world import assert_running_counts, kill_some, open_gate, wait_until

import cutwater as cw
from cutwater.api.jobs.job import Job
from cutwater.connectors.generate import RateSource
from cutwater.storage.job_log import JobLog
from cutwater.storage.snapshot.channel_log import CHANNEL_KIND
from cutwater.storage.snapshot.manifest import Manifest
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.store.local import LocalStore

MS_PER_ROW = 1.0


def slow(gate: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """One row a millisecond, until the gate opens."""

    def pass_slowly(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for _ in range(batch.num_rows):
                if Path(gate).exists():
                    break
                time.sleep(MS_PER_ROW / 1000)
            yield batch

    return pass_slowly


def backlogged(tmp_path: Path, rows: int) -> cw.Dataflow:
    """Running counts behind a shuffle, and behind another one a consumer of a row a millisecond."""
    flow = cw.Dataflow("backlog")
    keyed = flow.read("in", RateSource(rows=rows, rate=None, partitions=4)).with_columns(
        "key", key=pl.col("value") % 97
    )
    counts = keyed.key_by("key").aggregate("count", n=cw.count(), total=cw.sum("value"), eid=cw.last("value"))
    slowed = counts.rebalance().map_batches("slow", slow(str(tmp_path / "gate")), schema=counts.schema)
    slowed.write("out", cw.files(str(tmp_path / "out"), roll_rows=10_000))
    return flow


SETTINGS: dict[str, Any] = {"interval": "1h", "batch_rows": 512, "aligned_timeout": "0ms"}
ROWS = 100_000


def latest(job: Job) -> Manifest:
    """The manifest of the newest checkpoint."""
    folder = Path(job.checkpoint_dir)
    store = LocalStore(str(folder.parent))
    completed = JobLog(store, folder.name).read().latest
    assert completed is not None
    return load_manifest(store, folder.name, completed)


def rows_on_their_way(manifest: Manifest) -> dict[str, int]:
    """Per side."""
    found = {"receiver": 0, "sender": 0}
    for entry in manifest.entries:
        if entry.kind == CHANNEL_KIND:
            found[entry.side] += entry.rows
    return found


def wait_for_backlog(job: Job) -> None:
    """The source has stopped because everything is full."""

    def stands() -> bool:
        read = job.status.rows_read
        time.sleep(0.5)
        return read > 20_000 and job.status.rows_read == read

    wait_until(stands, "a backlog")


@pytest.mark.parametrize("protocol", ["unaligned", "synchronous"])
def test_a_checkpoint_overtakes_the_backlog_and_a_restore_goes_on_from_it(
    start, fake_spark: FakeSpark, tmp_path: Path, protocol: str
) -> None:
    """Unaligned snapshots restore at once under backpressure, and the next checkpoint completes."""
    job = start(backlogged(tmp_path, ROWS), protocol=protocol, **SETTINGS)
    wait_for_backlog(job)
    job.checkpoint()
    first = rows_on_their_way(latest(job))
    assert first["receiver"] > 10_000, "void: it waited for the backlog"
    assert first["sender"] > 0
    kill_some(job, fake_spark, 1, seed=1)
    wait_until(lambda: job.status.phase == "running", "the restart")
    job.checkpoint()
    second = rows_on_their_way(latest(job))
    assert second["receiver"] > 10_000, "void: the restored backlog was worked off first"
    kill_some(job, fake_spark, 1, seed=2)
    open_gate(tmp_path)
    assert job.await_termination(40)
    assert job.status.restarts == 2
    assert_running_counts(tmp_path / "out", ROWS)


@pytest.mark.parametrize(
    ("parallelism", "protocol"),
    [(1, "unaligned"), (3, "aligned"), (2, "chandy_lamport"), (2, "synchronous"), (3, "at_least_once")],
)
def test_rows_on_their_way_go_to_their_new_owners(start, tmp_path: Path, parallelism: int, protocol: str) -> None:
    """Whatever protocol the snapshot is restored under."""
    job = start(backlogged(tmp_path, ROWS), protocol="unaligned", **SETTINGS)
    wait_for_backlog(job)
    job.checkpoint()
    assert rows_on_their_way(latest(job))["receiver"] > 10_000
    job.cancel()
    open_gate(tmp_path)
    job = start(backlogged(tmp_path, ROWS), protocol=protocol, **{**SETTINGS, "parallelism": parallelism})
    assert job.await_termination(40)
    assert_running_counts(tmp_path / "out", ROWS)


@pytest.mark.parametrize("spill", [True, False])
def test_with_spill_a_blocked_input_does_not_hold_its_sender_up(
    start, fake_spark: FakeSpark, tmp_path: Path, spill: bool
) -> None:
    """A barrier of the one source is stuck behind a slow step; what the other one reads meanwhile waits on disk."""
    quick_rows, slow_rows = 100_000, 20_000
    flow = cw.Dataflow("skew")
    quick = flow.read("quick", RateSource(rows=quick_rows, rate=None, partitions=2))
    late = flow.read("late", RateSource(rows=slow_rows, rate=None, partitions=2, start=quick_rows)).rebalance()
    slowed = late.map_batches("slow", slow(str(tmp_path / "gate")), schema=late.schema)
    both = quick.union("both", slowed).with_columns("key", key=pl.col("value") % 97)
    counts = both.key_by("key").aggregate("count", n=cw.count(), total=cw.sum("value"), eid=cw.last("value"))
    counts.write("out", cw.files(str(tmp_path / "out"), roll_rows=10_000))
    settings = {**SETTINGS, "interval": "20ms", "spill": spill, "spill_memory_bytes": 10_000, "batch_rows": 128}
    job = start(flow, **settings)
    read: dict[int, tuple[int, int]] = {}  # while so many checkpoints were complete: rows read, from and to

    def watch() -> bool:
        completed, rows = job.status.checkpoints.completed, job.status.rows_read
        read[completed] = (read.get(completed, (rows, rows))[0], rows)
        return rows > (quick_rows if spill else 8_000) and completed >= (0 if spill else 2)

    wait_until(watch, "many rows read")
    most = max(last - first for first, last in read.values())
    if spill:
        assert most > 40_000, "void: no checkpoint was under way for long"
    else:
        assert most < 30_000, "void: nothing held the sender up"
    open_gate(tmp_path)
    assert job.await_termination(40)
    assert_running_counts(tmp_path / "out", quick_rows + slow_rows)

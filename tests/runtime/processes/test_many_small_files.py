"""Hundreds of small files, read together and told in blocks of a snapshot, with a kill and a rescale on the way."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from runtime_world import disturb

import cutwater as cw
from cutwater.storage.job_log import JobLog
from cutwater.storage.snapshot.packed_splits import BLOCK_SPLITS
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.store.local import LocalStore

FILES, ROWS = 2 * BLOCK_SPLITS + 120, 6
SCHEMA = "id long, at timestamp, k long"


def write_files(folder: Path, kind: str, first: int, count: int) -> None:
    """Files that follow each other in time, one row a second."""
    for number in range(first, first + count):
        ids = range(number * ROWS, (number + 1) * ROWS)
        path, hidden = folder / f"{number:05}.{kind}", folder / f"_{number:05}.{kind}"
        if kind == "parquet":
            at = pa.array([(1_600_000_000 + id) * 1_000_000 for id in ids], pa.timestamp("us", "UTC"))
            pq.write_table(pa.table({"id": pa.array(ids, pa.int64()), "at": at, "k": [id % 3 for id in ids]}), hidden)
        else:
            texts = [time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(1_600_000_000 + id)) for id in ids]
            rows = zip(ids, texts, strict=True)
            if kind == "csv":
                lines = ["id,at,k", *(f"{id},{at},{id % 3}" for id, at in rows)]
            else:
                lines = [f'{{"id":{id},"at":"{at}","k":{id % 3}}}' for id, at in rows]
            hidden.write_text("\n".join(lines) + "\n")
        hidden.rename(path)


@dataclass(frozen=True)
class Slow:
    """``map_batches`` function that takes its time for each row, however many files are read together."""

    row_s: float

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            time.sleep(batch.num_rows * self.row_s)
            yield batch


def flow_over(folder: Path, kind: str, out: Path, row_s: float, **options: Any) -> cw.Dataflow:
    flow = cw.Dataflow("many")
    files = cw.files(folder, format=kind, schema=SCHEMA, **options)
    events = flow.read("events", files, event_time="at", out_of_order="10s")
    slow = events.map_batches("slow", Slow(row_s), schema=SCHEMA)
    windows = slow.key_by("k").window("w", cw.tumbling("20s"))
    windows.aggregate("sums", n=cw.count(), ids=cw.sum("id")).write("out", cw.files(str(out), roll_rows=50))
    return flow


def check_output(out: Path, story: str) -> None:
    found = duckdb.sql(f"SELECT epoch(window_start)::bigint, k, n, ids FROM '{out}/*.parquet' ORDER BY ALL").fetchall()
    expected = duckdb.sql(
        "SELECT (1600000000 + i) // 20 * 20 AS w, i % 3 AS k, count(*), sum(i)::bigint "
        f"FROM range({FILES * ROWS}) t(i) GROUP BY ALL ORDER BY ALL"
    ).fetchall()
    assert found == expected, story


def check(start: Any, folder: Path, kind: str, seed: int, parallelism: int, then: int, recovery: str) -> None:
    chance = random.Random(seed)
    (folder / "in").mkdir()
    write_files(folder / "in", kind, 0, FILES)
    checkpoints = folder / "checkpoints"
    row_s = 3.0 * max(parallelism, then) / (FILES * ROWS)  # three seconds at least, or it ends before it is rescaled
    flow = flow_over(folder / "in", kind, folder / "out", row_s)
    job = start(flow, parallelism=parallelism, checkpoint=str(checkpoints), recovery=recovery)
    disturb(job, chance, then, FILES * ROWS // 20)
    assert job.await_termination(90)
    check_output(folder / "out", f"{kind}, seed {seed}, parallelism {parallelism}, {recovery}")
    log = JobLog(LocalStore(checkpoints), "many").read()
    manifest = load_manifest(LocalStore(checkpoints), "many", log.completed[0])
    if then * BLOCK_SPLITS <= FILES:
        assert manifest.format_version == 5
    told = sorted(split.id for record in manifest.subtasks for split in record.splits.get("events", ()))
    assert told == [str(folder / "in" / f"{number:05}.{kind}") for number in range(FILES)]


def test_many_small_files_are_read_once_through_a_kill_and_a_rescale(start: Any, tmp_path: Path) -> None:
    check(start, tmp_path, "csv", 1, 1, 2, "task")


@pytest.mark.full
@pytest.mark.parametrize("seed", range(2, 6))
@pytest.mark.parametrize("kind", ["json", "csv", "parquet"])
@pytest.mark.parametrize("recovery", ["job", "task", "upstream"])
def test_many_small_files_are_read_once_in_any_scope_of_recovery(
    start: Any, tmp_path: Path, kind: str, seed: int, recovery: str
) -> None:
    chance = random.Random(seed)
    check(start, tmp_path, kind, seed, *chance.sample([1, 2, 3], 2), recovery)


@pytest.mark.full
def test_files_that_come_while_many_are_there_are_read_once_through_a_kill_and_a_rescale(
    start: Any, tmp_path: Path
) -> None:
    (tmp_path / "in").mkdir()
    first = FILES - 100
    write_files(tmp_path / "in", "csv", 0, first)
    flow = flow_over(tmp_path / "in", "csv", tmp_path / "out", 0.0005, watch=True, settle_ms=0, end_marker="_END")
    job = start(flow, parallelism=2, checkpoint=str(tmp_path / "checkpoints"))
    disturb(job, random.Random(5), 1, first * ROWS // 10)
    for number in range(first, FILES, 20):
        write_files(tmp_path / "in", "csv", number, 20)
        time.sleep(0.1)
    (tmp_path / "in" / "_END").touch()
    assert job.await_termination(90)
    check_output(tmp_path / "out", "watched")

"""A tiny job for storage tests: makes checkpoints whose content can be told apart, and reads them back."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pyarrow as pa

from cutwater.state.segments import GROUP_COLUMN, Segment
from cutwater.storage.job_log import JobLog
from cutwater.storage.reading import Restorable
from cutwater.storage.snapshot.increments import extended
from cutwater.storage.snapshot.manifest import Entry, Manifest, SplitRecord, StepRecord, SubtaskRecord
from cutwater.storage.snapshot.publish import publish
from cutwater.storage.snapshot.segment_files import SnapshotWriter, read_segment
from cutwater.storage.store.local import LocalStore
from cutwater.storage.store.seal import PLAIN, Seal

JOB = "delays"
WORKERS = 2
INLINE_BELOW = 700
BIG_ROWS = 40


def segment(checkpoint_id: int, worker: int, rows: int) -> Segment:
    """Rows that say which checkpoint and worker they belong to."""
    batch = pa.record_batch(
        {
            GROUP_COLUMN: pa.array([worker * 64] * rows, pa.uint16()),
            "value": pa.array([checkpoint_id * 1000 + worker * 100 + i for i in range(rows)], pa.int64()),
        }
    )
    return Segment("agg", "base", batch, (worker * 64, worker * 64 + 64))


def write_parts(store, checkpoint_id: int, attempt: int, *, incarnation: int = 0):
    """Every worker's part: one segment in a file, one inline."""
    entries = []
    for worker in range(WORKERS):
        writer = SnapshotWriter(store, JOB, checkpoint_id, attempt, incarnation + worker, INLINE_BELOW)
        try:
            entries += writer.add("count", worker, [segment(checkpoint_id, worker, BIG_ROWS)])
            entries += writer.add("small", worker, [segment(checkpoint_id, worker, 1)])
            writer.close()
        except Exception:
            writer.abort()
            raise
    return entries


def write_shared(store, checkpoint_id: int, attempt: int, older: list[Entry]) -> list[Entry]:
    """One segment in a file that later checkpoints may name: a base, or what changed since ``older``."""
    writer = SnapshotWriter(store, JOB, checkpoint_id, attempt, 0, 100)
    changes = [msgspec.structs.replace(e, kind="delta") for e in _written(writer, checkpoint_id)] if older else []
    entries = extended(older, changes) if older else _written(writer, checkpoint_id)
    writer.close()
    return entries


def _written(writer: SnapshotWriter, checkpoint_id: int) -> list[Entry]:
    return writer.add("count", 0, [segment(checkpoint_id, 0, 40)], shared=True)


def manifest_of(log: JobLog, checkpoint_id: int, entries) -> Manifest:
    subtasks = [
        SubtaskRecord(
            vertex=0,
            subtask=worker,
            incarnation=worker,
            protocol="aligned",
            splits={"read": [SplitRecord(f"split-{worker}", {"file": "a.csv"}, checkpoint_id * 10)]},
            handles={"out": [{"staged": f"{checkpoint_id}-{worker}"}]},
        )
        for worker in range(WORKERS)
    ]
    return Manifest(
        job=JOB,
        uid=log.state.uid,
        checkpoint_id=checkpoint_id,
        attempt=log.attempt,
        protocol="aligned",
        max_parallelism=128,
        parallelism=WORKERS,
        triggered_ms=1_000,
        completed_ms=1_010,
        steps=[StepRecord("count", "aggregate", WORKERS, ["origin"], [[("n", "int64")]], [("n", "int64")])],
        subtasks=subtasks,
        entries=entries,
    )


def take_checkpoint(store, log: JobLog, checkpoint_id: int):
    """A whole checkpoint, published."""
    return publish(store, log, manifest_of(log, checkpoint_id, write_parts(store, checkpoint_id, log.attempt)))


def restored_values(store, restorable: Restorable) -> list[int]:
    """What a restore of it gives."""
    values = []
    for entry in restorable.manifest.entries:
        values += read_segment(store, JOB, entry).batch.column("value").to_pylist()
    return values


def expected_values(checkpoint_id: int) -> list[int]:
    """What ``restored_values`` must be, computed without the storage code."""
    values = []
    for worker in range(WORKERS):
        start = checkpoint_id * 1000 + worker * 100
        values += [*range(start, start + BIG_ROWS), start]
    return values


def a_job(root: Path, seal: Seal = PLAIN, **options: object) -> tuple[LocalStore, JobLog]:
    """Two checkpoints, each with a segment in a file."""
    store = LocalStore.open(root, seal, **options)  # type: ignore[arg-type]
    log = JobLog(store, JOB)
    log.begin_attempt("driver")
    for n in (1, 2):
        writer = SnapshotWriter(store, JOB, n, log.attempt, 0, 100)
        entries = writer.add("count", 0, [segment(n, 0, 40)])
        writer.close()
        publish(store, log, manifest_of(log, n, entries))
    return store, log

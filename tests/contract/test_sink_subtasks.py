"""A sink of which only some subtasks go back (R2): they are brought to the checkpoint, the others keep their rows."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from sink_model import SCHEMA, Calls, Identity, Output, batch_of

from cutwater.connectors.base import Json, Sink, SinkSnapshot, SinkWriter, SubtaskCommitter
from cutwater.connectors.files.sink import FileSink
from cutwater.connectors.foreach_batch import ForeachBatchSink

SUBTASKS = range(3)
FAILED = 1
MAKE: dict[str, Callable[[str], Sink]] = {
    "parquet, a file per checkpoint": lambda path: FileSink(path, roll_interval_ms=0),
    "parquet, rolled by size": lambda path: FileSink(path, roll_rows=12, roll_interval_ms="1h"),
    "parquet, rolled at the end": lambda path: FileSink(path, roll_interval_ms="1h"),
    "foreach_batch of three": lambda path: ForeachBatchSink(Calls(), parallelism=3).bind(path),
}


class Run:
    """Three subtasks; each writes rows of its own and keeps the handles that no checkpoint has committed."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self.writers = [self.writer(subtask, 1, []) for subtask in SUBTASKS]
        self.handles: list[list[Json]] = [[] for _ in SUBTASKS]

    def writer(self, subtask: int, incarnation: int, states: list[Json]) -> SinkWriter:
        return self.sink.writer(SCHEMA, Identity(subtask, 3, incarnation), states)

    @property
    def committer(self) -> SubtaskCommitter:
        return cast(SubtaskCommitter, self.sink.committer(SCHEMA, "c0ffee", "out"))

    def write(self, subtasks: Any, part: int) -> None:
        for subtask in subtasks:
            self.writers[subtask].write(batch_of([subtask * 1_000 + part * 10 + n for n in range(7)]))

    def freeze(self, checkpoint_id: int, final: bool = False) -> list[SinkSnapshot]:
        """What the checkpoint says of each subtask."""
        made = [writer.pre_commit(checkpoint_id, final)() for writer in self.writers]
        for subtask in SUBTASKS:
            self.handles[subtask] += made[subtask].handles
        return [SinkSnapshot(checkpoint_id, list(self.handles[s]), [made[s].state]) for s in SUBTASKS]


def run(make: Callable[[str], Sink], out: Path, settle: Callable[[Run, SinkSnapshot, SinkSnapshot], None]) -> list[int]:
    """The failed subtask dies after a checkpoint that it has not committed, while another one is under way."""
    job = Run(make(str(out)))
    job.write(SUBTASKS, 0)
    first = job.freeze(1)
    whole = SinkSnapshot(1, [h for s in first for h in s.handles], [state for s in first for state in s.states])
    for subtask in set(SUBTASKS) - {FAILED}:
        job.committer.commit(1, job.handles[subtask])
        job.handles[subtask] = []
    job.write(SUBTASKS, 1)
    job.freeze(2)
    job.write(SUBTASKS, 2)
    job.writers[FAILED].close()
    settle(job, first[FAILED], whole)
    job.writers[FAILED], job.handles[FAILED] = job.writer(FAILED, 2, first[FAILED].states), []
    job.write([FAILED], 1)
    job.write([FAILED], 2)
    job.write(SUBTASKS, 3)
    last = job.freeze(3, final=True)
    for snapshot in last:
        job.committer.commit(3, snapshot.handles)
    job.committer.finish(2)
    assert not os.path.exists(out / "_cutwater")
    rows = job.sink.fn.rows() if isinstance(job.sink, ForeachBatchSink) else Output(str(out)).rows()  # type: ignore[attr-defined]
    return sorted(rows)


def the_failed_one(job: Run, restored: SinkSnapshot, whole: SinkSnapshot) -> None:
    job.committer.settle_subtasks(restored, [whole], 2, {FAILED})
    job.committer.settle_subtasks(restored, [whole], 2, {FAILED})  # after a crash half way


EXPECTED = sorted(s * 1_000 + part * 10 + n for s in SUBTASKS for part in range(4) for n in range(7))


@pytest.mark.parametrize("make", MAKE.values(), ids=MAKE.keys())
def test_r2_rows_of_subtasks_that_run_on_stay_theirs(make: Callable[[str], Sink], tmp_path: Path) -> None:
    assert run(make, tmp_path / "out", the_failed_one) == EXPECTED


@pytest.mark.parametrize(
    "name", ["parquet, a file per checkpoint", "parquet, rolled by size", "foreach_batch of three"]
)
def test_settling_all_of_them_instead_is_found(name: str, tmp_path: Path) -> None:
    def settle(job: Run, restored: SinkSnapshot, whole: SinkSnapshot) -> None:
        job.committer.settle(whole, [whole], 2)

    try:
        rows = run(MAKE[name], tmp_path / "out", settle)
    except Exception:
        return  # a writer misses what it staged
    assert rows != EXPECTED

"""The files of a snapshot are written from the memory of what was frozen: it may be used again only afterwards."""

from __future__ import annotations

import queue
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from cutwater.runtime.worker.snapshots import FrozenSubtask, SnapshotService, WorkerCheckpoint, Written
from cutwater.state.segments import FrozenSegments, Segment
from cutwater.storage.snapshot.manifest import SubtaskRecord
from cutwater.storage.snapshot.segment_files import read_segment
from cutwater.storage.store.local import LocalStore

SUBTASKS = 3


class _Shared(FrozenSegments):
    """Its segment refers to memory that is used again as soon as it is released."""

    def __init__(self, subtask: int) -> None:
        self.values = np.arange(10_000) + subtask
        super().__init__(lambda: [Segment("s", "base", pa.record_batch({"n": self.values}))])
        self.released = 0

    def release(self) -> None:
        super().release()
        self.released += 1
        self.values[:] = -1


def _written(store: LocalStore, frozen: list[_Shared], *, broken: bool = False) -> Written:
    done: queue.SimpleQueue[Written] = queue.SimpleQueue()
    settings: Any = {"attempt": 1, "writer": 0, "writers": 1, "subtasks": SUBTASKS, "inline_threshold_bytes": 100}
    service = SnapshotService(store, "job", **settings, incremental=False, continued=0, restored={}, done=done.put)
    checkpoint = WorkerCheckpoint(1)
    for subtask, state in enumerate(frozen):
        made: Any = FrozenSegments(lambda: 1 // 0) if broken and subtask else state
        record = SubtaskRecord(0, subtask, 1, "aligned")
        states = [("step", state), ("broken", made)] if broken else [("step", state)]
        service.submit(checkpoint, FrozenSubtask(1, record, states, [], 0.0, range(1)))
    written = done.get(timeout=20)
    service.close([checkpoint])
    return written


def test_memory_is_used_again_only_when_the_file_is_durable(tmp_path: Path) -> None:
    store, frozen = LocalStore.open(tmp_path), [_Shared(subtask) for subtask in range(SUBTASKS)]
    written = _written(store, frozen)
    assert written.error is None
    rows = [read_segment(store, "job", entry).batch["n"].to_numpy() for entry in written.entries]
    assert [(int(r[0]), int(r[-1])) for r in rows] == [(subtask, 9_999 + subtask) for subtask in range(SUBTASKS)]
    assert [state.released for state in frozen] == [1] * SUBTASKS


def test_it_is_given_back_after_a_failure_too(tmp_path: Path) -> None:
    frozen = [_Shared(subtask) for subtask in range(SUBTASKS)]
    assert _written(LocalStore.open(tmp_path), frozen, broken=True).error is not None
    assert frozen[0].released == 2, "once for each state of the subtask"
    assert [state.released for state in frozen[1:]] == [1] * (SUBTASKS - 1)


def test_it_is_given_back_when_the_checkpoint_is_given_up_half_way(tmp_path: Path) -> None:
    done: queue.SimpleQueue[Written] = queue.SimpleQueue()
    settings: Any = {"attempt": 1, "writer": 0, "writers": 1, "subtasks": 2, "inline_threshold_bytes": 100}
    service = SnapshotService(
        LocalStore.open(tmp_path), "job", **settings, incremental=False, continued=0, restored={}, done=done.put
    )
    state = _Shared(0)
    frozen = FrozenSubtask(1, SubtaskRecord(0, 0, 1, "aligned"), [("step", state)], [], 0.0, range(1))
    checkpoint = WorkerCheckpoint(1)
    service.submit(checkpoint, frozen)
    service.drop(checkpoint)
    service.close([])
    assert (state.released, done.empty()) == (1, True)

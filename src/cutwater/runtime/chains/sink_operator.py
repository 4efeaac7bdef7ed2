"""A sink's writer as the last operator of a chain.

Its part of a snapshot is not a segment but what ``pre_commit`` returns: handles to commit when the checkpoint
completes, and the writer's state.  Both go into the subtask's record.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from cutwater.connectors.base import Committer, Json, PreCommit, Sink, SinkWriter
from cutwater.operators.base import BaseOperator, Outputs


@dataclass(slots=True)
class SinkIdentity:
    """Who writes (SinkContext); a pre-commit handle is named by it (T1)."""

    job_uid: str
    step: str
    subtask: int
    parallelism: int
    incarnation: int


class SinkOperator(BaseOperator):
    """Hands rows to the writer; the subtask calls ``pre_commit`` at a freeze and ``commit`` at a notice."""

    def __init__(self, step: str, sink: Sink, schema: pa.Schema, identity: SinkIdentity, restored: list[Json]) -> None:
        self.step = step
        self._writer: SinkWriter = sink.writer(schema, identity, restored)
        self._committer: Committer = sink.committer(schema, identity.job_uid, step)
        self._handles: dict[int, list[Json]] = {}
        self._lock = threading.Lock()
        self.rows = 0

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        self.rows += batch.num_rows
        self._writer.write(batch)
        return []

    def pre_commit(self, checkpoint_id: int, final: bool, savepoint: bool) -> Callable[[], PreCommit]:
        """Cut at the barrier; the returned function runs in the snapshot thread.

        A savepoint leaves no row in progress: it must not depend on files that the writer goes on with.
        """
        if savepoint:
            self._writer.roll()
        return self._writer.pre_commit(checkpoint_id, final)

    def pre_committed(self, checkpoint_id: int, handles: list[Json]) -> list[Json]:
        """Note what the snapshot thread made durable; returns every handle that is not committed yet.

        They all belong to this checkpoint: if an older one was aborted, its rows were handed on before its barrier and
        come never again, so the next checkpoint that completes commits them.
        """
        with self._lock:
            self._handles[checkpoint_id] = handles
            return [h for i in sorted(self._handles) if i <= checkpoint_id for h in self._handles[i]]

    def commit(self, checkpoint_id: int) -> None:
        """Commit this checkpoint and all older ones that were not (a newer notice commits all older)."""
        with self._lock:
            due = {i: self._handles.pop(i) for i in sorted(self._handles) if i <= checkpoint_id}
        for known, handles in due.items():
            self._committer.commit(known, handles)

    def close(self) -> None:
        self._writer.close()

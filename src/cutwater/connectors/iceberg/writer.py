"""One subtask's writer: rows become data files, which a commit of the driver makes part of the table."""

from __future__ import annotations

import threading
from collections.abc import Callable

import msgspec
import pyarrow as pa

from cutwater.connectors.base import Json, PreCommit, SinkContext
from cutwater.connectors.iceberg.columns import Fitting
from cutwater.connectors.iceberg.data_files import DataFileDraft, OwnFiles, TableFiles, part_name
from cutwater.connectors.iceberg.partitions import Key

_WAITING_BYTES = 256 << 20
"""Arrow data of all partitions that waits for its row groups at most."""


class IcebergWriter:
    """Keeps a file in the making for each partition that has rows; a barrier ends them.

    Args:
        files: how they are made.
        name: of the table, for messages.
        ctx: who writes.
    """

    def __init__(self, files: TableFiles, name: str, ctx: SinkContext) -> None:
        self._files, self._ctx = files, ctx
        self._fitting = Fitting(files.schema, name)
        self._own = OwnFiles(ctx.job_uid, ctx.step)
        self._drafts: dict[Key, DataFileDraft] = {}
        self._full: list[DataFileDraft] = []
        self._cut: list[tuple[int, str, DataFileDraft]] = []
        """Checkpoint, name and file of what no handle tells of yet, oldest first."""
        self._lock = threading.Lock()
        """Of what is cut: two checkpoints may be written at once."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Take rows.

        Raises:
            DataError: a value that the table cannot hold.
        """
        if not batch.num_rows:
            return
        for key, rows in self._files.partitioning.split(self._fitting.fitted(batch)):
            draft = self._drafts.get(key)
            if draft is None:
                draft = self._drafts[key] = DataFileDraft(self._files, key)
            draft.add(rows)
            if draft.bytes >= self._files.target_bytes:
                self._full.append(self._drafts.pop(key))
        if len(self._drafts) > 1:
            self._bound_memory()

    def _bound_memory(self) -> None:
        waiting = sum(draft.waiting.bytes for draft in self._drafts.values())
        if waiting > _WAITING_BYTES:
            for draft in sorted(self._drafts.values(), key=lambda draft: -draft.waiting.bytes):
                waiting -= draft.waiting.bytes
                draft.encode_all()
                if waiting <= _WAITING_BYTES // 2:
                    break

    def roll(self) -> None:
        """Every ``pre_commit`` ends all files."""

    def pre_commit(self, checkpoint_id: int, final: bool) -> Callable[[], PreCommit]:
        """See ``SinkWriter.pre_commit``: the last row groups, and the way into the table's folder, are for later."""
        drafts = [*self._full, *self._drafts.values()]
        self._full, self._drafts = [], {}
        with self._lock:
            for number, draft in enumerate(drafts):
                name = part_name(self._own, self._ctx.subtask, checkpoint_id, self._ctx.incarnation, number)
                self._cut.append((checkpoint_id, name, draft))
        return lambda: PreCommit(self._handles(checkpoint_id))

    def _handles(self, until: int) -> list[Json]:
        """Of all files up to a checkpoint that no handle tells of yet: one that was aborted hands its rows on."""
        handles: list[Json] = []
        with self._lock:
            while self._cut and self._cut[0][0] <= until:
                checkpoint_id, name, draft = self._cut[0]
                handle = draft.finish(self._ctx.job_uid, checkpoint_id, self._ctx.incarnation, name)
                handles.append(msgspec.to_builtins(handle))
                self._cut.pop(0)
        return handles

    def close(self) -> None:
        """See ``SinkWriter.close``.  Files that handles tell of stay: a completed checkpoint may name them."""
        for draft in (*self._full, *self._drafts.values(), *(draft for _, _, draft in self._cut)):
            draft.close()

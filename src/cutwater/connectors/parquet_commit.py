"""Parquet parts from staged to visible: handles, their commit, and the clean-up after a restore and at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Literal

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from cutwater.connectors.base import Json
from cutwater.connectors.staging import EndHandle, PieceCut, StagingArea, fsync_path, storage_errors
from cutwater.errors import StorageError

__all__ = [
    "LogState",
    "PartCommitter",
    "PartHandle",
    "is_visible",
    "part_status",
    "part_suffix",
    "write_parquet",
]

ROW_GROUP_ROWS = 1 << 20


class PartHandle(msgspec.Struct, frozen=True, tag="part"):
    """A finished Parquet file in the staging folder that is to appear in the target.

    ``pieces`` are the staging files whose rows it holds; they go away once it is visible.
    """

    uid: str
    staged: str
    final: str
    rows: int
    bytes: int
    pieces: list[str]


class LogState(msgspec.Struct, frozen=True):
    """A writer's state in a snapshot: rows that lie in staging and in no part yet."""

    uid: str
    pieces: list[PieceCut]
    age_ms: float = 0.0


def part_suffix(subtask: int, checkpoint_id: int, incarnation: int, number: int) -> str:
    """End of a part's name; sorts by subtask, then by time.

    >>> part_suffix(1, 7, 12, 0)
    '00001-0000000007-0000000012-0000.parquet'
    """
    return f"{subtask:05}-{checkpoint_id:010}-{incarnation:010}-{number:04}.parquet"


def is_visible(name: str) -> bool:
    """Whether a reader such as ``spark.read.parquet`` takes the file for data.

    >>> is_visible("part-0.parquet"), is_visible("_SUCCESS"), is_visible(".part-0.parquet.crc")
    (True, False, False)
    """
    return name.endswith(".parquet") and not name.startswith(("_", "."))


def part_status(area: StagingArea, part: PartHandle) -> Literal["staged", "committed"]:
    """Where a part is in its life.  A committed part may have been moved on by whoever consumes the target.

    Raises:
        StorageError: it is in neither place although the job's staging folder, or the target, is gone: rows are lost.
    """
    if os.path.exists(area.path(part.staged)):
        return "staged"
    if os.path.exists(os.path.join(area.root, part.final)) or area.exists():
        return "committed"
    raise StorageError(
        f"output part {part.final!r} ({part.rows} rows) is lost: neither {area.directory!r} nor the part exists",
        hint="The target or its _cutwater folder was removed while the job needed it. Restore it, or start afresh "
        "with a new checkpoint directory.",
    )


def write_parquet(path: str, schema: pa.Schema, batches: Iterator[pa.RecordBatch], compression: str) -> int:
    """Write rows to ``path`` (replacing it), durably up to the directory entry; returns the number of bytes.

    Raises:
        StorageError: the disk is full, the folder is gone.
    """
    with storage_errors("cannot write", path):
        with pq.ParquetWriter(path, schema, compression=compression) as writer:
            group: list[pa.RecordBatch] = []
            rows = 0
            for batch in batches:
                group.append(batch)
                rows += batch.num_rows
                if rows >= ROW_GROUP_ROWS:
                    writer.write_table(pa.Table.from_batches(group, schema), row_group_size=ROW_GROUP_ROWS)
                    group, rows = [], 0
            if group:
                writer.write_table(pa.Table.from_batches(group, schema), row_group_size=ROW_GROUP_ROWS)
        fsync_path(path)
        return os.stat(path).st_size


class PartCommitter:
    """Commits the parts of one write step.

    Args:
        area: the step's staging; its root is the target.
        schema: of the Parquet files, for a dataset that got no rows.
        empty_name: name of the file that such a dataset gets; ``""`` for none.
    """

    def __init__(self, area: StagingArea, schema: pa.Schema, empty_name: str) -> None:
        self._area = area
        self._schema = schema
        self._empty_name = empty_name

    def commit(self, checkpoint_id: int, handles: list[Json]) -> None:
        """Make parts visible, each by one rename, then remove the staging that they replace.

        Handles of another job's uid are skipped (T3).  Calling it again, also after a crash half way, goes on.

        Raises:
            StorageError: the target is gone or cannot be written, or a foreign file bears a part's name.
        """
        parts: list[PartHandle] = []
        ends: list[EndHandle] = []
        for handle in handles:
            decoded = msgspec.convert(handle, PartHandle | EndHandle)
            if decoded.uid != self._area.job_uid:
                continue
            if isinstance(decoded, PartHandle):
                parts.append(decoded)
            else:
                ends.append(decoded)
        # A job that has ended took its staging away: this is the restore of its final checkpoint, all is visible.
        if parts and not (ends and not self._area.exists()):
            for part in parts:
                self._publish(part)
            fsync_path(self._area.root)
        # What is visible now stays so; the parts hold the rows of these pieces.
        self._area.remove(piece for part in parts for piece in part.pieces)
        if ends:
            self._finish(ends)

    def abort_others(self, keep: list[Json], states: list[Json]) -> None:
        """Remove all staged files of this job and step except those that ``keep`` and ``states`` name.

        To be called at a restore before new writers are opened: a file that no snapshot names yet is a leftover here.
        """
        named: set[str] = set()
        for handle in keep:
            decoded = msgspec.convert(handle, PartHandle | EndHandle)
            if isinstance(decoded, PartHandle):
                named.update(decoded.pieces, [decoded.staged])
        for state in states:
            if state is not None:
                named.update(cut.file for cut in msgspec.convert(state, LogState).pieces)
        self._area.remove(name for name in self._area.files() if name not in named)

    def _publish(self, part: PartHandle) -> None:
        if part_status(self._area, part) == "committed":
            return
        staged, final = self._area.path(part.staged), os.path.join(self._area.root, part.final)
        with storage_errors("cannot commit", final):
            if os.path.exists(final) and not _holds(final, part):
                raise StorageError(
                    f"cannot commit {final!r}: another file bears this name, not the {part.rows} rows staged for it",
                    hint="Move that file away; the job then goes on from its last checkpoint.",
                )
            try:
                os.rename(staged, final)
            except FileNotFoundError:
                # A second committer (the old worker, while the driver restores) was quicker, or all is gone.
                part_status(self._area, part)
                if not os.path.isdir(self._area.root):
                    raise

    def _finish(self, ends: list[EndHandle]) -> None:
        """Take away the staging of ended subtasks; with the last of it gone, see to it that the target is a dataset."""
        if not self._area.finish(ends) or not self._empty_name:
            return
        root = self._area.root
        with storage_errors("cannot complete", root):
            if any(is_visible(name) for name in os.listdir(root)):
                return
            hidden = os.path.join(root, f".{self._empty_name}.{os.getpid()}")
            write_parquet(hidden, self._schema, iter(()), "snappy")
            os.rename(hidden, os.path.join(root, self._empty_name))
        fsync_path(root)


def _holds(path: str, part: PartHandle) -> bool:
    if os.stat(path).st_size != part.bytes:
        return False
    try:
        return pq.read_metadata(path).num_rows == part.rows
    except pa.ArrowInvalid:
        return False

"""Parquet parts from staged to visible: handles, their commit, and the clean-up after a restore and at the end."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from cutwater.connectors.base import Json, SinkSnapshot
from cutwater.connectors.staging import EndHandle, PieceCut, StagingArea, fsync_path, storage_errors
from cutwater.errors import StorageError

__all__ = [
    "LogState",
    "PartCommitter",
    "PartHandle",
    "is_visible",
    "part_status",
    "part_stem",
    "part_suffix",
    "write_parquet",
]

ROW_GROUP_ROWS = 1 << 20


class PartHandle(msgspec.Struct, frozen=True, tag="part"):
    """A finished Parquet file in the staging folder that is to appear in the target.

    ``pieces`` and ``shared`` are the staging files whose rows it holds.  ``pieces`` go away once it is visible;
    ``shared`` are in the ``LogState`` of earlier checkpoints, and go away when none of these is retained any more.
    """

    uid: str
    staged: str
    final: str
    rows: int
    bytes: int
    pieces: list[str]
    shared: list[str] = []


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


_SUFFIX = re.compile(r"\d{5,}-(\d{10,})-(\d{10,})-\d{4,}\.parquet", re.ASCII)


def part_stem(job_uid: str, step: str) -> str:
    """Begin of a part's name: 16 characters that stand for the uid (uids of two jobs may begin alike), and the step."""
    return f"part-{xxhash.xxh3_64_hexdigest(job_uid.encode())}-{step}-"


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
        stem: how the names of this job's and step's parts begin (``part_stem``).
    """

    takes_back = True

    def __init__(self, area: StagingArea, schema: pa.Schema, stem: str) -> None:
        self._area = area
        self._schema = schema
        self._stem = stem

    def commit(self, checkpoint_id: int, handles: list[Json]) -> None:
        """Make parts visible, each by one rename, then remove the staging that only they needed.

        Handles of another job's uid are skipped (T3).  Calling it again, also after a crash half way, goes on.

        Raises:
            StorageError: the target is gone or cannot be written, or a foreign file bears a part's name.
        """
        decoded = [msgspec.convert(handle, PartHandle | EndHandle) for handle in handles]
        own = [handle for handle in decoded if handle.uid == self._area.job_uid]
        parts = [handle for handle in own if isinstance(handle, PartHandle)]
        # A job that has ended took its staging away: this is the restore of its final checkpoint, all is visible.
        if parts and (len(parts) == len(own) or self._area.exists()):
            for part in parts:
                self._publish(part)
            fsync_path(self._area.root)
        # What is visible now stays so; the parts hold the rows of these pieces.
        self._area.remove(piece for part in parts for piece in part.pieces)

    def settle(self, restored: SinkSnapshot | None, retained: Sequence[SinkSnapshot], incarnation: int) -> None:
        """See ``Committer.settle``.

        Raises:
            StorageError: as ``commit``.
        """
        if restored is not None:
            self.commit(restored.checkpoint_id, restored.handles)
        # Staged parts go before the target is listed: a worker of an earlier attempt that is about to commit one finds
        # nothing to rename, or has renamed it before the listing.
        self._area.sweep(incarnation, keep=set(_pieces(retained)))
        self._take_back(0 if restored is None else restored.checkpoint_id, incarnation)

    def retire(self, retired: SinkSnapshot, retained: Sequence[SinkSnapshot]) -> None:
        """See ``Committer.retire``."""
        parts = (msgspec.convert(handle, PartHandle | EndHandle) for handle in retired.handles)
        shared = {piece for part in parts if isinstance(part, PartHandle) for piece in part.shared}
        self._area.remove(shared.union(_pieces([retired])).difference(_pieces(retained)))

    def finish(self, incarnation: int) -> None:
        """See ``Committer.finish``; sees to it that the target is a dataset, if an empty one.

        Raises:
            StorageError: the target cannot be written.
        """
        if self._area.exists():
            self._make_dataset()
            self._area.finish(incarnation)

    def _take_back(self, checkpoint_id: int, incarnation: int) -> None:
        """Remove the parts that checkpoints after ``checkpoint_id`` made visible, durably.

        Their rows lie in pieces that the restored checkpoint names, or come from the sources again.  Durably, because a
        part that came back later could not be told from one of the checkpoints then restored.
        """
        root = self._area.root
        with storage_errors("cannot take back output in", root):
            names = os.listdir(root) if os.path.isdir(root) else []
            later = [name for name in names if self._is_later(name, checkpoint_id, incarnation)]
            for name in later:
                with contextlib.suppress(FileNotFoundError):  # a fenced driver does the same
                    os.unlink(os.path.join(root, name))
            if os.path.isdir(root):
                fsync_path(root)

    def _is_later(self, name: str, checkpoint_id: int, incarnation: int) -> bool:
        if not name.startswith(self._stem):
            return False
        match = _SUFFIX.fullmatch(name, len(self._stem))
        return match is not None and int(match[1]) > checkpoint_id and int(match[2]) < incarnation

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

    def _make_dataset(self) -> None:
        root = self._area.root
        with storage_errors("cannot complete", root):
            if any(is_visible(name) for name in os.listdir(root)):
                return
            name = self._stem + part_suffix(0, 0, 0, 0)
            hidden = os.path.join(root, f".{name}.{os.getpid()}")
            write_parquet(hidden, self._schema, iter(()), "snappy")
            os.rename(hidden, os.path.join(root, name))
        fsync_path(root)


def _pieces(snapshots: Iterable[SinkSnapshot]) -> Iterator[str]:
    """The staging files that writers restored from one of the snapshots would read."""
    for snapshot in snapshots:
        for state in snapshot.states:
            if state is not None:
                yield from (cut.file for cut in msgspec.convert(state, LogState).pieces)


def _holds(path: str, part: PartHandle) -> bool:
    if os.stat(path).st_size != part.bytes:
        return False
    try:
        return pq.read_metadata(path).num_rows == part.rows
    except pa.ArrowInvalid:
        return False

"""Parts, the files of a file sink, from staged to visible: handles, commit, clean-up after a restore and at the end."""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Any, BinaryIO, Generic, Literal, TypeVar, cast

import msgspec
import pyarrow as pa
import xxhash

from cutwater.connectors.base import Json, SinkSnapshot
from cutwater.connectors.files.part_formats import PartFormat
from cutwater.connectors.staging import TAMPERED, EndHandle, PieceCut, StagingArea, check_piece, converted
from cutwater.connectors.staging_folders import StagedFolder, TargetFolder, fsync_path, storage_errors
from cutwater.data.decoding import prepare
from cutwater.errors import CorruptSnapshotError, StorageError
from cutwater.storage.store.no_follow import open_to_read, opened_folder


class PartHandle(msgspec.Struct, frozen=True, tag="part"):
    """A finished file in the staging folder that is to appear in the target.

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
    digest: str = ""
    """Of the file: xxh3_128, hex, or a seal; empty in handles of releases that had none."""


class LogState(msgspec.Struct, frozen=True):
    """A writer's state in a snapshot: rows that lie in staging and in no part yet."""

    uid: str
    pieces: list[PieceCut]
    age_ms: float = 0.0


prepare(PartHandle | EndHandle, LogState)

_WRITE_BYTES = 1 << 20


def part_suffix(subtask: int, checkpoint_id: int, incarnation: int, number: int, extension: str) -> str:
    """End of a part's name; sorts by subtask, then by time.

    >>> part_suffix(1, 7, 12, 0, ".parquet")
    '00001-0000000007-0000000012-0000.parquet'
    """
    return f"{subtask:05}-{checkpoint_id:010}-{incarnation:010}-{number:04}{extension}"


_SUFFIX = re.compile(r"\d{5,19}-(\d{10,19})-(\d{10,19})-\d{4,19}(?:\.parquet|\.(?:jsonl|csv)(?:\.gz|\.zst)?)", re.ASCII)
"""Of any format: the program that goes on may write another than the one that is taken back."""


def checkpoint_of_part(name: str) -> int | None:
    """The checkpoint that a part's rows belong to at the latest; ``None`` if the file is no part.

    >>> checkpoint_of_part("part-0011223344556677-out-" + part_suffix(1, 7, 12, 0, ".parquet"))
    7
    """
    match = _SUFFIX.search(name)
    return int(match[1]) if match is not None and name.startswith("part-") else None


def part_stem(job_uid: str, step: str) -> str:
    """Begin of a part's name: 16 characters that stand for the uid (uids of two jobs may begin alike), and the step."""
    return f"part-{xxhash.xxh3_64_hexdigest(job_uid.encode())}-{step}-"


def is_visible(name: str, extension: str) -> bool:
    """True if a reader such as ``spark.read.parquet`` takes the file for data.

    >>> [is_visible(name, ".parquet") for name in ("part-0.parquet", "_SUCCESS", ".part-0.parquet.crc")]
    [True, False, False]
    """
    return name.endswith(extension) and not name.startswith(("_", "."))


def check_part(part: PartHandle, stem: str) -> PartHandle:
    """The handle back, if its names are such as this step of this job gives.

    Args:
        stem: how they begin.

    Raises:
        CorruptSnapshotError: one is another; nothing was read, renamed or removed.
    """
    for name in (part.staged, part.final):
        if name != part.final or not name.startswith(stem) or _SUFFIX.fullmatch(name, len(stem)) is None:
            raise CorruptSnapshotError(
                f"{name[:128]!r} is no file that this step writes",
                hint=TAMPERED,
            )
    for piece in (*part.pieces, *part.shared):
        check_piece(piece)
    return part


def part_status(area: StagingArea[TargetFolder], part: PartHandle) -> Literal["staged", "committed"]:
    """The stage of a part.  A committed part may have been moved on by whoever consumes the target.

    Raises:
        CorruptSnapshotError: something that is no file, such as a link, bears the name of the staged part.
        StorageError: it is in neither place although the job's staging folder, or the target, is gone: rows are lost.
    """
    return part_statuses(area, [part])[0]


def part_statuses(area: StagingArea[TargetFolder], parts: Sequence[PartHandle]) -> list[Literal["staged", "committed"]]:
    """As ``part_status``, for all with one look into the folder."""
    there = area.folder.there(part.staged for part in parts)
    exists = len(there) == len(parts) or area.folder.exists()
    return ["staged" if part.staged in there else _status_elsewhere(area, part, exists) for part in parts]


def _status_elsewhere(area: StagingArea[TargetFolder], part: PartHandle, exists: bool) -> Literal["committed"]:
    if exists or os.path.lexists(os.path.join(area.folder.root, part.final)):
        return "committed"
    raise StorageError(
        f"output part {part.final!r} ({part.rows} rows) is lost: neither {area.folder.path!r} nor the part exists",
        hint="The target or its _cutwater folder was removed while the job needed it. Restore it, or start afresh "
        "with a new checkpoint directory.",
    )


def verify_part(area: StagingArea[TargetFolder], part: PartHandle) -> None:
    """Compare a staged part with its digest: another process made it, perhaps long ago, and it becomes the user's data.

    Raises:
        CorruptSnapshotError: it differs.
        StorageError: it cannot be read.
    """
    if (not part.digest and not area.guard.seal.keyed) or part_status(area, part) == "committed":
        return
    path = area.path(part.staged)
    try:
        body = area.folder.mapped(part.staged)
    except OSError as error:
        if part_status(area, part) == "committed":  # a second committer was quicker
            return
        raise StorageError(f"cannot read {path!r}: {error.strerror}") from error
    if body.size != part.bytes or area.problem("part", body, part.digest, f"staged output {path!r}"):
        raise CorruptSnapshotError(
            f"staged output {path!r} differs from its digest",
            hint="Restore an older checkpoint: start the job with restore='DIR/JOB@ID'.",
        )


def write_part(
    file: BinaryIO, path: str, parts: PartFormat, schema: pa.Schema, batches: Iterator[pa.RecordBatch]
) -> int:
    """Write rows to a new file, durably, and close it; returns the number of bytes.

    Args:
        path: of the file, for messages.

    Raises:
        StorageError: the disk is full, the folder is gone.
        DataError: a value that the format cannot hold.
    """
    with storage_errors("cannot write", path), file:
        buffered = io.BufferedWriter(cast(Any, file), _WRITE_BYTES)
        encoder = parts.encoder(schema)
        buffered.write(encoder.begin())
        for block in parts.blocks.of(batches):
            for body in encoder.rows(block):
                buffered.write(body)
        buffered.write(encoder.end())
        buffered.flush()
        sync_part(file.fileno())
        return os.fstat(file.fileno()).st_size


def sync_part(fd: int) -> None:
    """Make the bytes of a part durable."""
    os.fsync(fd)


A_co = TypeVar("A_co", bound=StagedFolder, covariant=True)


class StagedPartCommitter(ABC, Generic[A_co]):
    """Commits the parts of one write step, wherever they lie.

    Args:
        area: the step's staging.
        parts: format of the files.
        schema: of the rows, for a dataset that got none.
        stem: how the names of this job's and step's parts begin (``part_stem``).
    """

    takes_back = True

    def __init__(self, area: StagingArea[A_co], parts: PartFormat, schema: pa.Schema, stem: str) -> None:
        self._area = area
        self._parts = parts
        self._schema = schema
        self._stem = stem

    def commit(self, checkpoint_id: int, handles: list[Json]) -> None:
        """Make parts visible, each at once, then remove the staging that only they needed.

        Handles of another job's uid are skipped (T3).  Calling it again, also after a crash half way, goes on.

        Raises:
            StorageError: the target is gone or cannot be written, or a foreign file bears a part's name.
        """
        self._commit(handles, verify=False)  # the worker that made them made them durable just now

    def _commit(self, handles: list[Json], *, verify: bool) -> None:
        own = self._own(handles)
        parts = [handle for handle in own if isinstance(handle, PartHandle)]
        # A job that has ended took its staging away: this is the restore of its final checkpoint, all is visible.
        if parts and (len(parts) == len(own) or self._area.folder.exists()):
            if verify or self._area.guard.seal.keyed:
                for part in parts:
                    self._verify(part)
            self._publish(parts)
        # What is visible now stays so; the parts hold the rows of these pieces.
        self._area.folder.remove([*self._left_over(parts), *(piece for part in parts for piece in part.pieces)])

    @abstractmethod
    def _verify(self, part: PartHandle) -> None:
        """Compare a staged part with its digest; one that is visible is the user's."""

    @abstractmethod
    def _publish(self, parts: Sequence[PartHandle]) -> None:
        """Make staged parts visible, durably; others are visible already."""

    def _left_over(self, parts: Sequence[PartHandle]) -> list[str]:
        """Staged files that remain when their parts are visible."""
        return []

    @abstractmethod
    def _take_back(self, checkpoint_id: int, incarnation: int) -> None:
        """Remove the parts that checkpoints after ``checkpoint_id`` made visible, durably."""

    @abstractmethod
    def _make_dataset(self) -> None:
        """See to it that readers find a dataset, if an empty one."""

    def _own(self, handles: list[Json]) -> list[PartHandle | EndHandle]:
        """Handles as they lie in a manifest, those of this job; what they name is checked here."""
        own: list[PartHandle | EndHandle] = []
        for handle in handles:
            decoded = converted(handle, PartHandle | EndHandle)
            if decoded.uid == self._area.job_uid:
                own.append(check_part(decoded, self._stem) if isinstance(decoded, PartHandle) else decoded)
        return own

    def settle(self, restored: SinkSnapshot | None, retained: Sequence[SinkSnapshot], incarnation: int) -> None:
        """See ``Committer.settle``.

        Raises:
            CorruptSnapshotError: a staged part differs from its digest; nothing was made visible.
            StorageError: as ``commit``.
        """
        # Staged parts go before the target is listed: a worker of an earlier attempt that is about to commit one finds
        # nothing to rename, or has renamed it before the listing.
        self.settle_subtasks(restored, retained, incarnation, None)
        self._take_back(0 if restored is None else restored.checkpoint_id, incarnation)

    def settle_subtasks(
        self,
        restored: SinkSnapshot | None,
        retained: Sequence[SinkSnapshot],
        incarnation: int,
        subtasks: Container[int] | None,
    ) -> None:
        """See ``SubtaskCommitter``; without ``subtasks``, all of them.

        Raises:
            CorruptSnapshotError: as ``settle``.
            StorageError: as ``commit``.
        """
        if restored is not None:
            self._commit(restored.handles, verify=True)
        self._area.sweep(incarnation, keep=set(staged_pieces(retained)), subtasks=subtasks)

    def retire(self, retired: SinkSnapshot, retained: Sequence[SinkSnapshot]) -> None:
        """See ``Committer.retire``."""
        parts = self._own(retired.handles)
        shared = {piece for part in parts if isinstance(part, PartHandle) for piece in part.shared}
        self._area.folder.remove(shared.union(staged_pieces([retired])).difference(staged_pieces(retained)))

    def finish(self, incarnation: int) -> None:
        """See ``Committer.finish``; sees to it that the target is a dataset, if an empty one.

        Raises:
            StorageError: the target cannot be written.
        """
        if self._area.folder.exists():
            self._make_dataset()
            self._area.finish(incarnation)

    def _is_later(self, name: str, checkpoint_id: int, incarnation: int) -> bool:
        if not name.startswith(self._stem):
            return False
        match = _SUFFIX.fullmatch(name, len(self._stem))
        return match is not None and int(match[1]) > checkpoint_id and int(match[2]) < incarnation


class PartCommitter(StagedPartCommitter[TargetFolder]):
    """Commits by renames, out of the staging below the target."""

    def _take_back(self, checkpoint_id: int, incarnation: int) -> None:
        """Remove the parts that checkpoints after ``checkpoint_id`` made visible, durably.

        Their rows lie in pieces that the restored checkpoint names, or come from the sources again.  Durably, because a
        part that came back later could not be told from one of the checkpoints then restored.
        """
        root = self._area.folder.root
        with storage_errors("cannot take back output in", root):
            names = os.listdir(root) if os.path.isdir(root) else []
            later = [name for name in names if self._is_later(name, checkpoint_id, incarnation)]
            for name in later:
                with contextlib.suppress(FileNotFoundError):  # a fenced driver does the same
                    os.unlink(os.path.join(root, name))
            if os.path.isdir(root):
                fsync_path(root)

    def _verify(self, part: PartHandle) -> None:
        verify_part(self._area, part)

    def _publish(self, parts: Sequence[PartHandle]) -> None:
        statuses = part_statuses(self._area, parts)
        staged = [part for part, status in zip(parts, statuses, strict=True) if status == "staged"]
        if staged:
            self._rename_all(staged)
        fsync_path(self._area.folder.root)

    def _rename_all(self, staged: Sequence[PartHandle]) -> None:
        root = self._area.folder.root
        with storage_errors("cannot commit into", root), opened_folder(root, []) as target:
            try:
                with self._area.folder.opened() as folder:
                    for part in staged:
                        self._rename(part, folder, target)
            except FileNotFoundError:
                if self._are_gone(staged):
                    raise

    def _are_gone(self, parts: Sequence[PartHandle]) -> bool:
        """True if the target is gone; else a second committer (the old worker, at a restore) was quicker."""
        part_statuses(self._area, parts)
        return not os.path.isdir(self._area.folder.root)

    def _rename(self, part: PartHandle, folder: int, target: int) -> None:
        final = os.path.join(self._area.folder.root, part.final)
        with storage_errors("cannot commit", final):
            if os.path.lexists(final) and not self._holds(target, part):
                raise StorageError(
                    f"cannot commit {final!r}: another file bears this name, not the {part.rows} rows staged for it",
                    hint="Move that file away; the job then goes on from its last checkpoint.",
                )
            try:
                os.rename(part.staged, part.final, src_dir_fd=folder, dst_dir_fd=target)
            except FileNotFoundError:
                if self._are_gone([part]):
                    raise

    def _make_dataset(self) -> None:
        root = self._area.folder.root
        with storage_errors("cannot complete", root):
            if any(is_visible(name, self._parts.suffix) for name in os.listdir(root)):
                return
            name = self._stem + part_suffix(0, 0, 0, 0, self._parts.suffix)
            hidden = f".{name}.{os.getpid()}-{secrets.token_hex(4)}"
            with opened_folder(root, []) as target:
                file = io.FileIO(hidden, "x", opener=lambda name, flags: os.open(name, flags, 0o666, dir_fd=target))
                write_part(cast(BinaryIO, file), hidden, self._parts, self._schema, iter(()))
                os.rename(hidden, name, src_dir_fd=target, dst_dir_fd=target)
        fsync_path(root)

    def _holds(self, target: int, part: PartHandle) -> bool:
        fd, status = open_to_read(part.final, target, part.final)
        with open(fd, "rb") as file:
            return status.st_size == part.bytes and self._parts.holds(file, part.rows)


def staged_pieces(snapshots: Iterable[SinkSnapshot]) -> Iterator[str]:
    """The staging files that writers restored from one of the snapshots would read."""
    for snapshot in snapshots:
        for state in snapshot.states:
            if state is not None:
                yield from (check_piece(cut.file) for cut in converted(state, LogState).pieces)

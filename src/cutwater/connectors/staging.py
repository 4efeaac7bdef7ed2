"""Staging of sinks: a write-ahead log of output rows below the target, invisible to readers.

``<root>/_cutwater/<job uid>/<step>/`` holds *pieces*, files that rows are appended to as an Arrow IPC stream.  A piece
has one writer for its whole life: a sink subtask of one incarnation (its name says which).  A checkpoint records how
much of each piece belongs to it, a ``PieceCut``.  A later incarnation reads an old piece up to that length and never
appends to it or truncates it, because the old writer may still be alive (a zombie) and go on writing behind the cut.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence, Sized
from dataclasses import dataclass
from typing import Any, BinaryIO, Generic, TypeVar

import msgspec
import pyarrow as pa

from cutwater.config import FileAccess
from cutwater.connectors.base import Json
from cutwater.connectors.staging_folders import (
    REMOVED_HINT,
    STAGING_FOLDER,
    StagedFolder,
    StoreFolder,
    TargetFolder,
    storage_errors,
)
from cutwater.errors import CorruptSnapshotError, SealError, StorageError
from cutwater.storage.snapshot.limits import SEGMENT_BYTES_MAX, check_name, checked_stream
from cutwater.storage.store.seal import PLAIN, Kind, Seal, is_sealed

_FLUSH_BYTES = 1 << 20
"""Small batches are joined up to this size before they are written: an IPC message costs some 500 bytes of header."""


class EndHandle(msgspec.Struct, frozen=True, tag="end"):
    """A subtask's word that no row will follow: once the job log says that the job finished, the staging goes away."""

    uid: str


def converted(value: Json, kind: Any) -> Any:
    """A handle or state as it lies in a manifest, as the type that it was made of.

    Raises:
        CorruptSnapshotError: it is no such thing.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise CorruptSnapshotError(f"the snapshot says what no sink says of its output: {error}") from error


class PieceCut(msgspec.Struct, frozen=True):
    """The first ``length`` bytes of a piece: what of it belongs to a checkpoint.

    ``digest`` is that of these bytes (xxh3_128, hex, or a seal); ``rows`` the number of rows in them.  ``form`` tells
    format and columns of a piece that is a file of its sink's format; it is empty for a stream of Arrow data.
    """

    file: str
    length: int
    rows: int
    digest: str
    form: str = ""


def open_piece(area: StagingArea[StagedFolder], cut: PieceCut, *, verify: bool) -> pa.RecordBatchReader:
    """Rows of a cut, without copying them (the file is mapped).

    Args:
        area: where the piece lies.
        cut: which part of it to read; what lies behind is some zombie's.
        verify: compare the digest first (rule: before any use of what another process wrote).

    Raises:
        CorruptSnapshotError: the piece is missing, too short, or differs from its digest, or its name is none of ours.
        SealError: it is not sealed with the job's key.
    """
    body = read_piece(area, cut, verify=verify)
    what = f"staged output {area.path(cut.file)!r}"
    return checked_stream(body, what, trusted=not verify or is_sealed(cut.digest))


def read_piece(area: StagingArea[StagedFolder], cut: PieceCut, *, verify: bool) -> pa.Buffer:
    """Bytes of a cut, whatever they are, without copying them.  Arguments and errors as of ``open_piece``."""
    path = area.path(check_piece(cut.file))
    length = max(0, min(cut.length, SEGMENT_BYTES_MAX))
    try:
        body = area.folder.read(cut.file, length)
    except FileNotFoundError as error:
        raise CorruptSnapshotError(
            f"staged output {path!r} is gone",
            hint="Somebody removed it: leave the _cutwater folder to the job, and restore another checkpoint.",
        ) from error
    except OSError as error:
        raise StorageError(f"cannot read staged output {path!r}: {error}") from error
    if body.size != cut.length:
        raise CorruptSnapshotError(f"staged output {path!r} is torn: {body.size} of {cut.length} bytes")
    keyed = area.guard.seal.keyed  # then nothing is read that somebody may have changed meanwhile
    if (verify or keyed) and area.problem("piece", body, cut.digest, f"staged output {path!r}"):
        raise CorruptSnapshotError(f"staged output {path!r} differs from its digest")
    return body


class PieceFile:
    """A new piece, to which bytes are appended.  After a failed write it takes no more: that would lie behind a tear.

    Args:
        area: where it lies.
        name: of the file.
        file: opened for writing, empty, without a buffer.
    """

    def __init__(self, area: StagingArea[StagedFolder], name: str, file: BinaryIO) -> None:
        self.name = name
        self.length = 0
        self._path = area.path(name)
        self._digest = area.guard.seal.hasher("piece")
        self._folder, self._file = area.folder, file

    def append(self, body: pa.Buffer | bytes | memoryview) -> None:
        """Hand bytes to the operating system.

        Raises:
            StorageError: the disk is full, or a write failed before.
        """
        if self._file.closed:
            raise StorageError(f"{self._path!r} is closed, after a failed write or by its owner")
        whole = left = memoryview(body)
        with storage_errors("cannot write", self._path):
            try:
                while left:
                    left = left[self._file.write(left) :]
            except (OSError, StorageError):
                self._file.close()
                raise
        self._digest.update(whole)
        self.length += whole.nbytes

    @property
    def digest(self) -> str:
        """Of all bytes so far."""
        return self._digest.hexdigest()

    def end(self) -> None:
        """Take no more bytes."""
        self._folder.end_piece(self._file)

    def close(self) -> None:
        """Stop, whether it is durable or not."""
        self._file.close()


class _PieceWriter(PieceFile):
    """Appends rows to one new piece."""

    def __init__(self, area: StagingArea[StagedFolder], name: str, schema: pa.Schema) -> None:
        super().__init__(area, name, area.folder.new_piece(name))
        self.rows = 0
        self.append(schema.serialize())

    def write(self, batch: pa.RecordBatch) -> None:
        self.append(batch.serialize())
        self.rows += batch.num_rows

    def cut(self) -> PieceCut:
        return PieceCut(self.name, self.length, self.rows, self.digest)


class StagingLog:
    """The pieces of one sink subtask that hold its rows not yet handed on, oldest first.

    ``append``, ``flush``, ``seal``, ``cuts`` and ``drop`` are for the loop thread; ``make_durable`` is for the snapshot
    thread and may run while the loop goes on.

    Args:
        area: the step's staging folder (made here if needed).
        schema: of the rows; no dictionary types.
        subtask, incarnation: who writes; in the name of every piece (T1).
        restored: cuts taken over from a snapshot, verified here and only read.

    Raises:
        StorageError: the folder cannot be made.
        CorruptSnapshotError: a restored piece is missing, torn or flipped.
    """

    def __init__(
        self,
        area: StagingArea[StagedFolder],
        schema: pa.Schema,
        subtask: int,
        incarnation: int,
        restored: Sequence[PieceCut] = (),
    ) -> None:
        self._area = area
        self._schema = schema.remove_metadata()
        self._subtask, self._incarnation = subtask, incarnation
        area.folder.create()
        for cut in restored:
            for _ in open_piece(area, cut, verify=True):
                pass  # all of it is looked at here
        self._sealed = list(restored)
        self._open: _PieceWriter | None = None
        self._sequence = 0
        self._buffer: list[pa.RecordBatch] = []
        self._buffered_bytes = 0
        self._durable = {cut.file: cut.length for cut in restored}

    @property
    def empty(self) -> bool:
        return not (self._sealed or self._open or self._buffer)

    def append(self, batch: pa.RecordBatch) -> None:
        """Take rows; they may stay in memory until ``flush``."""
        if batch.num_rows == 0:
            return
        self._buffer.append(batch)
        self._buffered_bytes += batch.nbytes
        if self._buffered_bytes >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand all rows to the operating system."""
        if not self._buffer:
            return
        if self._open is None:
            name = piece_name(self._subtask, self._incarnation, self._sequence, LOG_SUFFIX)
            self._open = _PieceWriter(self._area, name, self._schema)
            self._sequence += 1
        rows = self._buffer
        self._buffer, self._buffered_bytes = [], 0
        if len(rows) > 1:
            rows = pa.Table.from_batches(rows).combine_chunks().to_batches()
        for batch in rows:
            self._open.write(batch)

    def seal(self) -> None:
        """Flush, and let the rows to come go into a new piece."""
        self.flush()
        if self._open is not None:
            self._sealed.append(self._open.cut())
            self._open.end()
            self._open = None

    def cuts(self) -> list[PieceCut]:
        """All rows taken and not dropped, as of the last flush."""
        return [*self._sealed, self._open.cut()] if self._open else list(self._sealed)

    def drop(self, files: Container[str]) -> None:
        """Forget sealed pieces, which something else (a part to be) now answers for."""
        self._sealed = [cut for cut in self._sealed if cut.file not in files]

    def make_durable(self, cuts: Sequence[PieceCut]) -> None:
        """Sync what is not durable yet.

        Raises:
            StorageError: a piece is gone (the target was removed under the job), or the disk failed.
        """
        late = [cut for cut in cuts if self._durable.get(cut.file, -1) < cut.length]
        self._area.folder.make_durable([cut.file for cut in late], any(cut.file not in self._durable for cut in late))
        self._durable.update({cut.file: cut.length for cut in late})
        self._area.require("rows that are not committed yet", cuts)

    def close(self) -> None:
        """Stop.  Files stay: a completed checkpoint may name them."""
        self._buffer = []
        if self._open is not None:
            self._open.close()
        self._area.folder.close()


LOG_SUFFIX = ".arrows"
"""End of the names of pieces that are streams of Arrow data."""
TAMPERED = "Somebody changed the snapshot: look who can write there, and restore an older one, restore='DIR/JOB@ID'."
_PIECE = re.compile(r"wal-\d{5,19}-\d{10,19}-\d{6,19}(?:\.arrows|\.parquet|\.(?:jsonl|csv)(?:\.gz|\.zst)?)", re.ASCII)
_STAGED = re.compile(r"(?:wal|part)-.*-\d{10,19}-\d{4,19}\.[a-z.]+", re.ASCII)
"""Names of files in a staging folder that are ours, files half written included."""


@dataclass(frozen=True)
class Guard:
    """Access to staged files, and the seal by which changes are noticed."""

    seal: Seal = PLAIN
    access: FileAccess = "owner"


UNGUARDED = Guard()


def piece_name(subtask: int, incarnation: int, number: int, suffix: str) -> str:
    """The name of a piece.

    >>> piece_name(2, 7, 0, ".csv.gz")
    'wal-00002-0000000007-000000.csv.gz'
    """
    return f"wal-{subtask:05}-{incarnation:010}-{number:06}{suffix}"


def check_piece(name: str) -> str:
    """The name back, if it is that of a piece.

    Raises:
        CorruptSnapshotError: it is another one; nothing is done with it.

    >>> check_piece("../../elsewhere/thesis")
    Traceback (most recent call last):
    cutwater.errors.CorruptSnapshotError: '../../elsewhere/thesis' is no file that a sink stages...
    """
    if not _PIECE.fullmatch(name):
        raise CorruptSnapshotError(
            f"{name[:128]!r} is no file that a sink stages",
            hint=TAMPERED,
        )
    return name


F_co = TypeVar("F_co", bound=StagedFolder, covariant=True)


class StagingArea(Generic[F_co]):
    """The staging folder of one write step of one job: its files by their names, and whose they are.

    Names in it that come from a snapshot are checked before (``check_piece``, ``part_commit.check_part``).

    Args:
        folder: see ``staging_beside`` and ``staging_in_store``.
        job_uid, step: whose it is.
        guard: of the files.
    """

    def __init__(self, folder: F_co, job_uid: str, step: str, guard: Guard = UNGUARDED) -> None:
        self.folder = folder
        self.job_uid, self.step, self.guard = job_uid, step, guard

    def path(self, name: str) -> str:
        """Of a file, for messages."""
        return f"{self.folder.path}/{name}"

    def require(self, what: str, items: Sized) -> None:
        """Raise ``StorageError`` if there are such items but the folder is gone, and they with it."""
        if items and not self.folder.exists():
            raise StorageError(f"the staging folder {self.folder.path!r} is gone, with {what}", hint=REMOVED_HINT)

    def sweep(self, incarnation: int, keep: Container[str] = (), subtasks: Container[int] | None = None) -> None:
        """Remove what writers below ``incarnation`` left, except ``keep``; with ``subtasks`` only theirs."""
        ours = (name for name in self.folder.names() if _STAGED.fullmatch(name))
        old = (name for name in ours if incarnation_of(name) < incarnation and name not in keep)
        self.folder.remove(name for name in old if subtasks is None or subtask_of(name) in subtasks)

    def problem(self, kind: Kind, data: pa.Buffer, digest: str, what: str) -> str:
        """The fault of bytes that another process wrote; empty if there is none.

        Raises:
            SealError: nobody who is known sealed them.
        """
        try:
            return self.guard.seal.problem(kind, data, digest)
        except SealError as error:
            raise SealError(f"{what}: {error.message}", hint=error.hint) from error

    def finish(self, incarnation: int) -> None:
        """Remove what writers up to ``incarnation`` left, and the folder unless a later one is at work there."""
        self.sweep(incarnation + 1)
        self.folder.remove_if_empty()


def staging_beside(root: str, job_uid: str, step: str, guard: Guard = UNGUARDED) -> StagingArea[TargetFolder]:
    """The staging of a step whose output lies in the file system.

    Args:
        root: folder of the output.

    Raises:
        CorruptSnapshotError: uid or step name no folder.
    """
    return StagingArea(TargetFolder(root, _parts(job_uid, step), guard.access), job_uid, step, guard)


def staging_in_store(uri: str, job_uid: str, step: str, guard: Guard = UNGUARDED) -> StagingArea[StoreFolder]:
    """The staging of a step whose output is no file: it lies in the job's store.

    Args:
        uri: what the runtime gave the sink with ``bind``.

    Raises:
        CorruptSnapshotError: uid or step name no folder.
    """
    return StagingArea(StoreFolder(uri, _parts(job_uid, step), guard.seal, guard.access), job_uid, step, guard)


def _parts(job_uid: str, step: str) -> list[str]:
    return [STAGING_FOLDER, check_name(job_uid, "the job's uid"), check_name(step, "the step")]


def incarnation_of(name: str) -> int:
    """Incarnation in the name of a staged file: ``wal-<subtask>-<incarnation>-...``, or a part ``...-<one more>``."""
    try:
        return int(name.split("-")[2] if name.startswith("wal-") else name.rsplit("-", 2)[1])
    except (IndexError, ValueError):
        return -1


def subtask_of(name: str) -> int:
    """Subtask in the name of a staged file (see ``incarnation_of``).

    >>> subtask_of("wal-00002-0000000007-000000.arrows"), subtask_of("part-1f-out-00003-0000000001-0000000007-0000.csv")
    (2, 3)
    """
    try:
        return int(name.split("-")[1] if name.startswith("wal-") else name.rsplit("-", 4)[1])
    except (IndexError, ValueError):
        return -1

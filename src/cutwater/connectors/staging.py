"""Staging of sinks: a write-ahead log of output rows below the target, invisible to readers.

``<root>/_cutwater/<job uid>/<step>/`` holds *pieces*, files that rows are appended to as an Arrow IPC stream.  A piece
has one writer for its whole life: a sink subtask of one incarnation (its name says which).  A checkpoint records how
much of each piece belongs to it, a ``PieceCut``.  A later incarnation reads an old piece up to that length and never
appends to it or truncates it, because the old writer may still be alive (a zombie) and go on writing behind the cut.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
from collections.abc import Container, Generator, Iterable, Sequence, Sized

import msgspec
import pyarrow as pa
import xxhash

from cutwater.errors import CorruptSnapshotError, StorageError

__all__ = [
    "STAGING_FOLDER",
    "EndHandle",
    "PieceCut",
    "StagingArea",
    "StagingLog",
    "fsync_path",
    "incarnation_of",
    "open_piece",
    "storage_errors",
    "subtask_of",
]

STAGING_FOLDER = "_cutwater"
"""Spark, pyarrow and DuckDB globs skip names that start with an underscore."""

_FLUSH_BYTES = 1 << 20
"""Small batches are joined up to this size before they are written: an IPC message costs some 500 bytes of header."""

_HINTS = {
    errno.ENOSPC: "The disk is full: free space; the job then goes on from its last checkpoint.",
    errno.EDQUOT: "The quota is used up: free space; the job then goes on from its last checkpoint.",
    errno.ENOENT: "It was removed while the job was running: leave the target and its _cutwater folder to the job.",
    errno.ENOTDIR: "A part of this path is a file where a folder should be.",
    errno.EACCES: "Give the user that the Spark workers run as the right to write there.",
    errno.EPERM: "Give the user that the Spark workers run as the right to write there.",
    errno.EROFS: "The file system is mounted read-only.",
}


@contextlib.contextmanager
def storage_errors(what: str, path: str) -> Generator[None, None, None]:
    """Turn an ``OSError`` of the block into a ``StorageError`` that says what was tried, where, and what to do.

    >>> with storage_errors("cannot list", "/nowhere"):
    ...     os.listdir("/nowhere")
    Traceback (most recent call last):
    ...
    cutwater.errors.StorageError: cannot list '/nowhere': No such file or directory...
    """
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        hint = _HINTS.get(error.errno or 0, "")
        raise StorageError(f"{what} {path!r}: {reason}", hint=hint) from error


def fsync_path(path: str) -> None:
    """Make a file, or the entries of a directory, durable.

    Raises:
        StorageError: it is not there, or the device reported an error.
    """
    with storage_errors("cannot make durable", path):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class EndHandle(msgspec.Struct, frozen=True, tag="end"):
    """A subtask's word that no row will follow: once the job log says that the job finished, the staging goes away."""

    uid: str


class StagingArea:
    """The staging folder of one write step of one job."""

    def __init__(self, root: str, job_uid: str, step: str) -> None:
        self.root = root
        self.job_uid = job_uid
        self.step = step
        self.directory = os.path.join(root, STAGING_FOLDER, job_uid, step)

    def path(self, name: str) -> str:
        return os.path.join(self.directory, name)

    def create(self) -> None:
        """Make the folder, durably; an existing one is fine.

        Raises:
            StorageError: the target cannot be written.
        """
        top = os.path.dirname(self.root)
        while not os.path.isdir(top):
            top = os.path.dirname(top)
        if os.path.isdir(self.root):
            top = self.root
        with storage_errors("cannot make the staging folder", self.directory):
            for attempt in range(8):
                try:
                    os.makedirs(self.directory, exist_ok=True)
                    break
                except FileNotFoundError:
                    # Another job that ended just now removed the (empty) parent between two steps of makedirs.
                    if attempt == 7:
                        raise
        parent = self.directory
        while parent != top:
            parent = os.path.dirname(parent)
            fsync_path(parent)

    def exists(self) -> bool:
        return os.path.isdir(self.directory)

    def require(self, what: str, items: Sized) -> None:
        """Raise ``StorageError`` if there are such items but the folder is gone, and they with it."""
        if items and not self.exists():
            raise StorageError(f"the staging folder {self.directory!r} is gone, with {what}", hint=_HINTS[errno.ENOENT])

    def files(self) -> list[str]:
        """Names of all files in the folder, sorted; none if the folder is not there."""
        try:
            return sorted(os.listdir(self.directory))
        except FileNotFoundError:
            return []

    def remove(self, names: Iterable[str]) -> None:
        """Remove files; what is gone already is fine."""
        with storage_errors("cannot clean", self.directory):
            for name in names:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path(name))

    def sweep(self, incarnation: int, keep: Container[str] = (), subtasks: Container[int] | None = None) -> None:
        """Remove what writers below ``incarnation`` left, except ``keep``; with ``subtasks`` only theirs."""
        old = (name for name in self.files() if incarnation_of(name) < incarnation and name not in keep)
        self.remove(name for name in old if subtasks is None or subtask_of(name) in subtasks)

    def finish(self, incarnation: int) -> None:
        """Remove what writers up to ``incarnation`` left, and the folder unless a later one is at work there."""
        self.sweep(incarnation + 1)
        self._remove_if_empty()

    def _remove_if_empty(self) -> None:
        """Remove the folder and those above it (up to the root) that are empty."""
        folder = self.directory
        while folder != self.root:
            try:
                os.rmdir(folder)
            except FileNotFoundError:
                pass
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
                    return
                raise StorageError(f"cannot remove {folder!r}: {os.strerror(error.errno or 0)}") from error
            folder = os.path.dirname(folder)


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


class PieceCut(msgspec.Struct, frozen=True):
    """The first ``length`` bytes of a piece: what of it belongs to a checkpoint.

    ``digest`` is the xxh3_128 of these bytes, hex; ``rows`` the number of rows in them.
    """

    file: str
    length: int
    rows: int
    digest: str


def open_piece(area: StagingArea, cut: PieceCut, *, verify: bool) -> pa.RecordBatchReader:
    """Rows of a cut, without copying them (the file is mapped).

    Args:
        area: where the piece lies.
        cut: which part of it to read; what lies behind is some zombie's.
        verify: compare the digest first (rule: before any use of what another process wrote).

    Raises:
        CorruptSnapshotError: the piece is missing, too short, or differs from its digest.
    """
    path = area.path(cut.file)
    try:
        with pa.memory_map(path) as mapped:
            body = mapped.read_buffer(cut.length)
    except FileNotFoundError as error:
        raise CorruptSnapshotError(
            f"staged output {path!r} is gone",
            hint="Somebody removed it: leave the _cutwater folder to the job, and restore another checkpoint.",
        ) from error
    except OSError as error:
        raise StorageError(f"cannot read staged output {path!r}: {error}") from error
    if body.size < cut.length:
        raise CorruptSnapshotError(f"staged output {path!r} is torn: {body.size} of {cut.length} bytes")
    if verify and xxhash.xxh3_128_hexdigest(body) != cut.digest:
        raise CorruptSnapshotError(f"staged output {path!r} differs from its digest {cut.digest}")
    return pa.ipc.open_stream(body)


class _PieceWriter:
    """Appends rows to one new piece.  After a failed write it takes no more: what follows would lie behind a tear."""

    def __init__(self, area: StagingArea, name: str, schema: pa.Schema) -> None:
        self.name = name
        self.length = 0
        self.rows = 0
        self._path = area.path(name)
        self._digest = xxhash.xxh3_128()
        with storage_errors("cannot make", self._path):
            # A file object, not a descriptor: that of a writer which nobody closed is given back with the object.
            self._file = io.FileIO(self._path, "x")
        self._append(schema.serialize())

    def write(self, batch: pa.RecordBatch) -> None:
        self._append(batch.serialize())
        self.rows += batch.num_rows

    def _append(self, body: pa.Buffer) -> None:
        if self._file.closed:
            raise StorageError(f"{self._path!r} is closed, after a failed write or by its owner")
        left = memoryview(body)
        with storage_errors("cannot write", self._path):
            try:
                while left:
                    left = left[os.write(self._file.fileno(), left) :]
            except OSError:
                self.close()
                raise
        self._digest.update(body)
        self.length += body.size

    def cut(self) -> PieceCut:
        return PieceCut(self.name, self.length, self.rows, self._digest.hexdigest())

    def close(self) -> None:
        self._file.close()


class StagingLog:
    """The pieces of one sink subtask that hold its rows not yet handed on, oldest first.

    ``append``, ``flush``, ``seal``, ``cuts`` and ``drop`` are for the loop thread; ``make_durable`` is for the snapshot
    thread and may run while the loop goes on.

    Args:
        area: the step's staging folder (made here if needed).
        schema: of the rows; no dictionary types.
        subtask, incarnation: who writes; in the name of every piece (T1).
        restored: cuts taken over from a snapshot, verified here and only read.
        piece_bytes, piece_rows: a piece that has reached either gets no more rows.

    Raises:
        StorageError: the folder cannot be made.
        CorruptSnapshotError: a restored piece is missing, torn or flipped.
    """

    def __init__(
        self,
        area: StagingArea,
        schema: pa.Schema,
        subtask: int,
        incarnation: int,
        restored: Sequence[PieceCut] = (),
        *,
        piece_bytes: int = 2**62,
        piece_rows: int = 2**62,
    ) -> None:
        self._area = area
        self._schema = schema.remove_metadata()
        self._prefix = f"wal-{subtask:05}-{incarnation:010}"
        self._piece_bytes, self._piece_rows = piece_bytes, piece_rows
        area.create()
        for cut in restored:
            open_piece(area, cut, verify=True).close()
        self._sealed = list(restored)
        self._open: _PieceWriter | None = None
        self._sequence = 0
        self._buffer: list[pa.RecordBatch] = []
        self._buffered_bytes = self._buffered_rows = 0
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
        self._buffered_rows += batch.num_rows
        if self._buffered_bytes >= _FLUSH_BYTES or self._buffered_rows >= self._piece_rows:
            self.flush()

    def flush(self) -> None:
        """Hand all rows to the operating system."""
        if not self._buffer:
            return
        if self._open is None:
            self._open = _PieceWriter(self._area, f"{self._prefix}-{self._sequence:06}.arrows", self._schema)
            self._sequence += 1
        rows = self._buffer
        self._buffer, self._buffered_bytes, self._buffered_rows = [], 0, 0
        if len(rows) > 1:
            rows = pa.Table.from_batches(rows).combine_chunks().to_batches()
        for batch in rows:
            self._open.write(batch)
        if self._open.length >= self._piece_bytes or self._open.rows >= self._piece_rows:
            self.seal()

    def seal(self) -> None:
        """Flush, and let the rows to come go into a new piece."""
        self.flush()
        if self._open is not None:
            self._sealed.append(self._open.cut())
            self._open.close()
            self._open = None

    def cuts(self) -> list[PieceCut]:
        """All rows taken and not dropped, as of the last flush."""
        return [*self._sealed, self._open.cut()] if self._open else list(self._sealed)

    def drop(self, count: int) -> None:
        """Forget the oldest sealed pieces, which something else (a Parquet file to be) now answers for."""
        del self._sealed[:count]

    def make_durable(self, cuts: Sequence[PieceCut]) -> None:
        """Sync what is not durable yet.

        Raises:
            StorageError: a piece is gone (the target was removed under the job), or the disk failed.
        """
        new_names = False
        for cut in cuts:
            if self._durable.get(cut.file, -1) < cut.length:
                fsync_path(self._area.path(cut.file))
                new_names |= cut.file not in self._durable
                self._durable[cut.file] = cut.length
        if new_names:
            fsync_path(self._area.directory)
        self._area.require("rows that are not committed yet", cuts)

    def close(self) -> None:
        """Stop.  Files stay: a completed checkpoint may name them."""
        self._buffer = []
        if self._open is not None:
            self._open.close()

"""Staging of sinks: a write-ahead log of output rows below the target, invisible to readers.

``<root>/_cutwater/<job uid>/<step>/`` holds *pieces*, files that rows are appended to as an Arrow IPC stream.  A piece
has one writer for its whole life: a sink subtask of one incarnation (its name says which).  A checkpoint records how
much of each piece belongs to it, a ``PieceCut``.  A later incarnation reads an old piece up to that length and never
appends to it or truncates it, because the old writer may still be alive (a zombie) and go on writing behind the cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pyarrow as pa

from cutwater.connectors.base import Json
from cutwater.connectors.staging.area import StagingArea, check_piece
from cutwater.connectors.staging.folders import StagedFolder, storage_errors
from cutwater.errors import CorruptSnapshotError, StorageError
from cutwater.storage.snapshot.limits import SEGMENT_BYTES_MAX, checked_stream
from cutwater.storage.store.seal import is_sealed

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

    ``digest`` is that of these bytes (xxh3_128, hex, or a seal); ``rows`` the number of rows in them.
    """

    file: str
    length: int
    rows: int
    digest: str


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
    return checked_stream(body, f"staged output {path!r}", trusted=not verify or is_sealed(cut.digest))


class _PieceWriter:
    """Appends rows to one new piece.  After a failed write it takes no more: what follows would lie behind a tear."""

    def __init__(self, area: StagingArea[StagedFolder], name: str, schema: pa.Schema) -> None:
        self.name = name
        self.length = 0
        self.rows = 0
        self._path = area.path(name)
        self._digest = area.guard.seal.hasher("piece")
        self._folder, self._file = area.folder, area.folder.new_piece(name)
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
                    left = left[self._file.write(left) :]
            except (OSError, StorageError):
                self._file.close()
                raise
        self._digest.update(body)
        self.length += body.size

    def cut(self) -> PieceCut:
        return PieceCut(self.name, self.length, self.rows, self._digest.hexdigest())

    def end(self) -> None:
        """Take no more rows."""
        self._folder.end_piece(self._file)

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
        area: StagingArea[StagedFolder],
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
        area.folder.create()
        for cut in restored:
            for _ in open_piece(area, cut, verify=True):
                pass  # all of it is looked at here
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
            self._open.end()
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

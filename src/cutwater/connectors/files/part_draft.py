"""A part in the making: rows are encoded once, while they come, into the file that readers will see."""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Container, Generator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO, NamedTuple

import pyarrow as pa

from cutwater.connectors.files.part_commit import PartHandle, part_statuses, sync_part, write_part
from cutwater.connectors.files.part_formats import Blocks, Bytes, PartEncoder, PartFormat
from cutwater.connectors.staging import PieceCut, PieceFile, StagingArea, StagingLog, open_piece, read_piece
from cutwater.connectors.staging_folders import TargetFolder, fsync_path, storage_errors
from cutwater.errors import CorruptSnapshotError, DataError


class WholeFile(NamedTuple):
    """A file that is done."""

    bytes: int
    digest: str
    """As of a part."""


class PartDraft:
    """A piece that is a whole file of its format at each of its cuts, and becomes a part without being read again.

    It is there once it has rows.  Pieces that an earlier incarnation left are copied to its begin, because they may
    still have a writer of their own.  One thread at a time uses it.

    Args:
        area: where it lies.
        name: of the piece.
        encoder: of its rows.
        form: of format and columns, see ``PieceCut``.
        inherited: pieces of the same form, verified; they count as soon as the draft is there.
    """

    def __init__(
        self,
        area: StagingArea[TargetFolder],
        name: str,
        encoder: PartEncoder,
        form: str,
        inherited: Sequence[PieceCut] = (),
    ) -> None:
        self.name = name
        self.files = [name, *(cut.file for cut in inherited)]
        """Pieces that hold its rows, its own among them: they can go away when it is visible."""
        self.rows = sum(cut.rows for cut in inherited)
        self.bytes = sum(cut.length for cut in inherited)
        """Of Arrow data or, where that is not known, of the file."""
        self._area, self._encoder, self._form = area, encoder, form
        self._inherited = list(inherited)
        self._piece: PieceFile | None = None
        self._part_digest = area.guard.seal.hasher("part")
        self._whole = False

    def encode(self, batches: list[pa.RecordBatch]) -> None:
        """Append a block of rows.

        Raises:
            DataError: a value that the format cannot hold.
            StorageError: the disk is full.
        """
        piece = self._begun()
        self._whole = False
        try:
            for body in self._encoder.rows(batches):
                self._append(piece, body)
        except DataError:
            piece.close()  # a part of the block may be there
            raise
        self.rows += sum(batch.num_rows for batch in batches)
        self.bytes += sum(batch.nbytes for batch in batches)

    def cuts(self) -> list[PieceCut]:
        """All rows that are encoded.

        Raises:
            StorageError: the disk is full.
        """
        if self._piece is None:
            return list(self._inherited)
        self._end(self._piece)
        return [PieceCut(self.name, self._piece.length, self.rows, self._piece.digest, self._form)]

    def complete(self) -> WholeFile:
        """Take no more rows.

        Raises:
            StorageError: the disk is full.
        """
        piece = self._begun()
        self._end(piece)
        piece.end()
        return WholeFile(piece.length, self._part_digest.hexdigest())

    def make_durable(self) -> None:
        """Sync the file, which is complete.

        Raises:
            StorageError: it is gone, or the disk failed.
        """
        with storage_errors("cannot make durable", path := self._area.path(self.name)), open(path, "rb") as file:
            sync_part(file.fileno())

    def close(self) -> None:
        """Stop.  What is there stays: a completed checkpoint may name it."""
        if self._piece is not None:
            self._piece.close()

    def _begun(self) -> PieceFile:
        if self._piece is not None:
            return self._piece
        piece = PieceFile(self._area, self.name, self._area.folder.new_part(self.name))
        self._append(piece, self._encoder.begin())
        for cut in self._inherited:
            body = read_piece(self._area, cut, verify=False)
            try:
                rows = self._encoder.taken_over(body)
            except CorruptSnapshotError as error:
                path = self._area.path(cut.file)
                raise CorruptSnapshotError(f"staged output {path!r}: {error.message}", hint=error.hint) from error
            self._append(piece, rows)
        self._piece = piece
        return piece

    def _end(self, piece: PieceFile) -> None:
        if not self._whole:
            self._append(piece, self._encoder.end())
            self._whole = True

    def _append(self, piece: PieceFile, body: Bytes) -> None:
        piece.append(body)
        self._part_digest.update(body)


class WaitingRows:
    """Batches that wait until they are enough for a block, oldest first; those at the head may lie in a log as well.

    >>> waiting = WaitingRows()
    >>> waiting.add(pa.record_batch({"n": range(5)}))
    >>> [len(batch) for batch in waiting.block(Blocks(rows=4, bytes=1_000, rest_waits=True))], waiting.rows
    ([4], 1)
    """

    def __init__(self) -> None:
        self.rows = self.bytes = 0
        self._batches: list[pa.RecordBatch] = []
        self._logged = self._logged_rows = 0

    def add(self, *batches: pa.RecordBatch, logged: bool = False) -> None:
        """Take batches.

        Args:
            logged: they lie in the log, as all before them.
        """
        for batch in batches:
            self._batches.append(batch)
            self.rows += batch.num_rows
            self.bytes += batch.nbytes
        if logged:
            self._all_logged()

    def log(self, log: StagingLog) -> None:
        """Write to the log what is not in it."""
        for batch in self._batches[self._logged :]:
            log.append(batch)
        log.flush()
        self._all_logged()

    def block(self, size: Blocks) -> list[pa.RecordBatch]:
        """Take a block, or several, if there are enough rows; all rows that lie in the log are in it."""
        if self.rows < size.rows and self.bytes < size.bytes:
            return []
        whole = self.rows - self.rows % size.rows
        if not size.rest_waits or whole < max(self._logged_rows, 1):
            return self.all()
        taken, left = self._batches, self.rows - whole
        rest: list[pa.RecordBatch] = []
        while left and left >= taken[-1].num_rows:
            rest.insert(0, taken.pop())
            left -= rest[0].num_rows
        if left:
            last = taken.pop()
            taken.append(last.slice(0, last.num_rows - left))
            rest.insert(0, last.slice(last.num_rows - left))
        self._clear()
        self.add(*rest)
        return taken

    def all(self) -> list[pa.RecordBatch]:
        """Take everything."""
        taken = self._batches
        self._clear()
        return taken

    def _clear(self) -> None:
        self._batches, self.rows, self.bytes = [], 0, 0
        self._logged = self._logged_rows = 0

    def _all_logged(self) -> None:
        self._logged, self._logged_rows = len(self._batches), self.rows


class StagedPart(ABC):
    """A file to be.

    Args:
        area: where it is made.
        suffix: end of its name.
    """

    def __init__(self, area: StagingArea[Any], suffix: str) -> None:
        self.suffix = suffix
        self.committed = False
        self.durable = False
        """Its name is durable, too."""
        self._area = area
        self._name = ""
        self._own: list[str] = []
        self._shared: list[str] = []
        self._handle: PartHandle | None = None
        # Two checkpoints may be written at once, and both carry a part that the older one made.
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """How it is called, once it has a name."""
        return self._name

    @property
    @abstractmethod
    def files(self) -> list[str]:
        """Pieces that hold its rows."""

    @property
    @abstractmethod
    def rows(self) -> int:
        """How many it has, once it is made."""

    def name_it(self, name: str, shared: Container[str]) -> None:
        """Say how it is called, and which pieces are in the state of some checkpoint."""
        self._name = name
        self._own = [file for file in self.files if file not in shared]
        self._shared = [file for file in self.files if file in shared]

    def stage(self) -> PartHandle:
        """The file, durable; made unless it is there already.

        Raises:
            DataError: a value that the format cannot hold.
            StorageError: the disk is full, the folder is gone.
        """
        with self._lock:
            if self._handle is None:
                whole = self._make(self._name)
                uid = self._area.job_uid
                self._handle = PartHandle(
                    uid, self._name, self._name, self.rows, whole.bytes, self._own, self._shared, whole.digest
                )
            return self._handle

    @abstractmethod
    def _make(self, name: str) -> WholeFile: ...


class DraftedPart(StagedPart):
    """A draft that gets the name of a part, which costs nothing.

    Args:
        draft: nobody else writes to it any more.
        rest: its last rows.
    """

    def __init__(
        self, area: StagingArea[TargetFolder], suffix: str, draft: PartDraft, rest: list[pa.RecordBatch]
    ) -> None:
        super().__init__(area, suffix)
        self._draft, self._rest = draft, rest

    @property
    def files(self) -> list[str]:
        return self._draft.files

    @property
    def rows(self) -> int:
        return self._draft.rows

    def _make(self, name: str) -> WholeFile:
        if self._rest:
            self._draft.encode(self._rest)
            self._rest = []
        whole = self._draft.complete()
        self._draft.make_durable()
        self._area.folder.give_name(self._draft.name, name)
        return whole


class CutPart(StagedPart):
    """What another version of the program left, of another format or with other columns.

    Args:
        cuts: verified.
    """

    def __init__(self, area: StagingArea[TargetFolder], suffix: str, cuts: list[PieceCut]) -> None:
        super().__init__(area, suffix)
        self.cuts = cuts

    @property
    def files(self) -> list[str]:
        return [cut.file for cut in self.cuts]

    @property
    def rows(self) -> int:
        return sum(cut.rows for cut in self.cuts)

    @contextmanager
    def _new_file(self, name: str) -> Generator[tuple[BinaryIO, str]]:
        """A file that gets its name when it is whole."""
        temporary, folder = f"{name}.tmp", self._area.folder
        path = self._area.path(temporary)
        folder.remove([temporary])  # of a try that failed
        yield folder.new_part(temporary), path
        with storage_errors("cannot finish", path), folder.opened() as opened:
            os.rename(temporary, name, src_dir_fd=opened, dst_dir_fd=opened)

    def _digest(self, name: str) -> WholeFile:
        with storage_errors("cannot read", self._area.path(name)):
            body = self._area.folder.mapped(name)
        return WholeFile(body.size, self._area.guard.seal.digest("part", body))


class CopiedPart(CutPart):
    """A piece that is a whole file; it is copied, because it may still have a writer."""

    def __init__(self, area: StagingArea[TargetFolder], cut: PieceCut) -> None:
        super().__init__(area, cut.file[cut.file.index(".") :], [cut])

    def _make(self, name: str) -> WholeFile:
        left = memoryview(read_piece(self._area, self.cuts[0], verify=False))
        with self._new_file(name) as (file, path), storage_errors("cannot write", path), file:
            while left:
                left = left[file.write(left) :]
            sync_part(file.fileno())
        return self._digest(name)


class RewrittenPart(CutPart):
    """Rows in the log with columns of their own.

    Args:
        parts: format of the file.
        schema: of the rows.
    """

    def __init__(
        self, area: StagingArea[TargetFolder], parts: PartFormat, schema: pa.Schema, cuts: list[PieceCut]
    ) -> None:
        super().__init__(area, parts.suffix, cuts)
        self.schema, self._parts = schema, parts

    def _make(self, name: str) -> WholeFile:
        batches = (batch for cut in self.cuts for batch in open_piece(self._area, cut, verify=False))
        with self._new_file(name) as (file, path):
            write_part(file, path, self._parts, self.schema, batches)
        return self._digest(name)


def stage_parts(area: StagingArea[TargetFolder], parts: Sequence[StagedPart]) -> list[PartHandle]:
    """Make all of them durable, and give the handles of those that are not committed yet.

    Raises:
        DataError, StorageError: as ``StagedPart.stage``.
    """
    handles = [part.stage() for part in parts]
    left: list[PartHandle] = []
    for part, handle, status in zip(parts, handles, part_statuses(area, handles), strict=True):
        if status == "committed":
            part.committed = True
        else:
            left.append(handle)
    if len(left) < len(parts):
        # The next manifest will not name them any more, so that the rename must not be undone by a crash.
        fsync_path(area.folder.root)
    fresh = [part for part in parts if not (part.durable or part.committed)]
    if fresh:
        fsync_path(area.folder.path)
        for part in fresh:
            part.durable = True
    return left

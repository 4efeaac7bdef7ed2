"""The rows of one partition: as the user's reader gives them, checked when they come again; or made durable first."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec
import pyarrow as pa
import xxhash

from cutwater.connectors.base import Json
from cutwater.connectors.data_source.feed import Feed, batches_of
from cutwater.connectors.data_source.hosted import Hosted
from cutwater.connectors.data_source.range_log import FORMAT, opened, sealed
from cutwater.data.decoding import prepare
from cutwater.errors import CorruptSnapshotError, CutwaterError, UserCodeError
from cutwater.storage.snapshot.limits import checked_stream
from cutwater.storage.store.base import Store
from cutwater.storage.store.seal import is_sealed


class Rows(Protocol):
    """Of a partition, in order."""

    @property
    def ended(self) -> bool:
        """All of them were read."""
        ...

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """Up to so many rows; ``None``: there are none now."""
        ...

    @property
    def position(self) -> dict[str, Json]:
        """What tells them from the rows to come."""
        ...

    def close(self) -> None: ...


class RowDigest:
    """A running hash of rows: the same however they are cut into batches.

    >>> rows = pa.record_batch({"n": list(range(10_000)), "s": [None, "a"] * 5_000})
    >>> whole, parts = RowDigest(), RowDigest()
    >>> whole.update(rows)
    >>> for at in range(0, 10_000, 999): parts.update(rows.slice(at, 999))
    >>> whole.hexdigest() == parts.hexdigest()
    True
    """

    _BLOCK = 1024

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_128()
        self._open: list[pa.RecordBatch] = []
        self._rows = 0

    def update(self, batch: pa.RecordBatch) -> None:
        """The next rows."""
        while batch.num_rows:
            taken = batch.slice(0, self._BLOCK - self._rows)
            self._open.append(taken)
            self._rows += taken.num_rows
            batch = batch.slice(taken.num_rows)
            if self._rows == self._BLOCK:
                self._hasher.update(self._block())
                self._open, self._rows = [], 0

    def hexdigest(self) -> str:
        """Of all rows so far."""
        hasher = self._hasher.copy()
        if self._open:
            hasher.update(self._block())
        return hasher.hexdigest()

    def _block(self) -> pa.Buffer:
        """What is open, as bytes that do not tell how it was cut: of a slice Arrow writes what is in it."""
        return pa.concat_batches(self._open).serialize()


class _Slices:
    """Hands batches on in slices."""

    def __init__(self) -> None:
        self._left: pa.RecordBatch | None = None

    def take(self, next_batch: Callable[[], pa.RecordBatch | None], max_rows: int) -> pa.RecordBatch | None:
        batch, self._left = self._left, None
        if batch is None:
            batch = next_batch()
        if batch is not None and batch.num_rows > max_rows:
            batch, self._left = batch.slice(0, max_rows), batch.slice(max_rows)
        return batch


class DirectRows:
    """Rows as the user's reader gives them.

    Args:
        hosted, begin, struct, what: as of ``Feed``.
        position: where a snapshot was taken; the rows before it are read once more, and compared by their hash.
        promised: the user said that they come again as they were.
    """

    def __init__(
        self, hosted: Hosted, begin: Callable[[], Any], struct: Any, what: str, position: Json, *, promised: bool
    ) -> None:
        self._name, self._what, self._promised = hosted.name, what, promised
        self._feed = Feed(hosted, begin, struct, what)
        self._digest, self._slices = RowDigest(), _Slices()
        self._rows = 0
        self._skip: int = position["rows"] if position else 0
        self._expected: str = position["digest"] if position else ""
        self.ended = False

    @property
    def position(self) -> dict[str, Json]:
        """Number of the next row, and the hash of those before it."""
        if self._rows < self._skip:
            return {"rows": self._skip, "digest": self._expected}
        return {"rows": self._rows, "digest": self._digest.hexdigest()}

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """See ``Rows``.

        Raises:
            UserCodeError: the user's code failed, or gives other rows than before.
        """
        while self._rows < self._skip:
            batch = self._slices.take(self._feed.take, self._skip - self._rows)
            if batch is None:
                if self._feed.ended:
                    raise self._others(f"only {self._rows} rows come")
                return None
            self._count(batch)
            if self._rows == self._skip and self._digest.hexdigest() != self._expected:
                raise self._others("the rows are others")
        batch = self._slices.take(self._feed.take, max_rows)
        if batch is None:
            self.ended = self._feed.ended
        else:
            self._count(batch)
        return batch

    def _count(self, batch: pa.RecordBatch) -> None:
        self._rows += batch.num_rows
        self._digest.update(batch)

    def _others(self, what: str) -> UserCodeError:
        promise = ", though replayable=True says that they are the same" if self._promised else ""
        return UserCodeError(
            f"{self._name}: {self._what} was read up to row {self._skip} before the last checkpoint; read once more, "
            f"{what}{promise}",
            hint="With replayable=False its rows are made durable before they are used; the job must begin anew then.",
        )

    def close(self) -> None:
        """Stop reading."""
        self._feed.close()


class _Chunk(msgspec.Struct, frozen=True):
    offset: int
    length: int
    rows: int
    digest: str


class StagedRows(msgspec.Struct, frozen=True):
    """The rows of a partition that count: a file of Arrow streams."""

    file: str
    chunks: list[_Chunk]
    end: Json = None
    """Of a simple stream: the offset behind them."""
    format: int = FORMAT


prepare(StagedRows)

_CHUNK_BYTES = 1 << 23


class Staging:
    """Makes the rows of a partition durable, in a thread, unless that was done before.

    The first one to say which rows they are is right: a second one, who may live on in a lost worker, takes those.

    Args:
        store, folder: where they are to lie.
        name: of the partition there.
        begin: gives an iterator and, of a simple stream, the offset behind it; ``None`` instead: there is nothing yet.
        hosted, struct, what: as of ``Feed``.
        begun: a snapshot has some of the rows, so they must be there.
    """

    def __init__(
        self,
        store: Store,
        folder: str,
        name: str,
        hosted: Hosted,
        begin: Callable[[], tuple[Any, Json] | None],
        struct: Any,
        what: str,
        *,
        begun: bool,
    ) -> None:
        self._store, self._folder, self._name, self._begun = store, folder, name, begun
        self._hosted, self._begin, self._struct, self._what = hosted, begin, struct, what
        self._found: StagedRows | None = None
        self._error: CutwaterError | None = None
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cutwater-data-source", daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """It has ended, one way or the other."""
        return not self._thread.is_alive()

    @property
    def result(self) -> StagedRows | None:
        """The rows, once it is done; ``None``: there are none yet.

        Raises:
            CutwaterError: they could not be read or written.
        """
        if self._error is not None:
            raise self._error
        return self._found

    def close(self) -> None:
        """Stop; what was begun is of no use to anybody."""
        self._stopped.set()

    def _run(self) -> None:
        try:
            self._found = staged_rows(self._store, self._folder, self._name) or self._stage()
        except CutwaterError as error:
            self._error = error
        except BaseException as error:
            self._error = UserCodeError(f"{self._hosted.name}: {self._what} cannot be read: {error!r}")

    def _stage(self) -> StagedRows | None:
        if self._begun:
            raise CorruptSnapshotError(
                f"the rows of {self._what} that were staged in {self._store.uri}/{self._folder} are gone",
                hint="They are kept for as long as a retained checkpoint needs them; restore one of those.",
            )
        with self._hosted.calling(f"{self._what} cannot be read"):
            begun = self._begin()
        if begun is None:
            return None
        iterator, end = begun
        file = f"{self._name}-{uuid.uuid4().hex}.arrows"
        chunks = self._write(file, batches_of(self._hosted, lambda: iterator, self._struct, self._what))
        if chunks is None:
            return None
        marker = sealed(StagedRows(file, chunks, end), self._store.seal)
        if not self._store.create(f"{self._folder}/{self._name}.json", marker):
            self._store.delete(f"{self._folder}/{file}")
        return staged_rows(self._store, self._folder, self._name)

    def _write(self, name: str, batches: Iterator[pa.RecordBatch]) -> list[_Chunk] | None:
        chunks: list[_Chunk] = []
        path = f"{self._folder}/{name}"
        file = self._store.write(path)
        try:
            for group in _groups(batches):
                if self._stopped.is_set():
                    self._store.delete(path)
                    return None
                offset = chunks[-1].offset + chunks[-1].length if chunks else 0
                body = _stream(group)
                file.write(body)
                digest = self._store.seal.digest("piece", body)
                chunks.append(_Chunk(offset, body.size, sum(b.num_rows for b in group), digest))
            self._store.close_durably(file)
        except BaseException:
            self._store.delete(path)
            raise
        finally:
            file.close()
        return chunks


def _groups(batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    group: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        group.append(batch)
        size += batch.nbytes
        if size >= _CHUNK_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _stream(batches: list[pa.RecordBatch]) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as stream:
        for batch in batches:
            stream.write_batch(batch)
    return sink.getvalue()


def staged_rows(store: Store, folder: str, name: str) -> StagedRows | None:
    """The rows of a partition that count, if they were said already.

    Raises:
        CorruptSnapshotError: what says so is damaged.
    """
    marker = f"{name}.json"
    if not store.exists(folder) or marker not in store.names(folder):
        return None
    path = f"{folder}/{marker}"
    found = opened(store.read(path), StagedRows, store.seal, f"{store.uri}/{path}")
    if not found.file.startswith(f"{name}-") or "/" in found.file:
        raise CorruptSnapshotError(f"{store.uri}/{path} names {found.file[:128]!r}, which is no file of its rows")
    return found


class DurableRows:
    """Rows that were made durable.

    Args:
        store, folder: where they lie.
        staged: which.
        position: where to begin.
    """

    def __init__(self, store: Store, folder: str, staged: StagedRows, position: Json) -> None:
        self._store, self._folder, self._staged = store, folder, staged
        self._rows: int = position["rows"] if position else 0
        self._batches = self._from(self._rows)
        self._slices = _Slices()
        self.ended = False

    @property
    def position(self) -> dict[str, Json]:
        """Number of the next row."""
        return {"rows": self._rows}

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """See ``Rows``.

        Raises:
            CorruptSnapshotError: they are not as they were written.
        """
        batch = self._slices.take(lambda: next(self._batches, None), max_rows)
        if batch is None:
            self.ended = True
        else:
            self._rows += batch.num_rows
        return batch

    def close(self) -> None:
        """Nothing is open."""

    def _from(self, skip: int) -> Iterator[pa.RecordBatch]:
        for chunk in self._staged.chunks:
            if skip >= chunk.rows:
                skip -= chunk.rows
                continue
            for batch in self._chunk(chunk):
                if skip < batch.num_rows:
                    yield batch.slice(skip)
                skip = max(0, skip - batch.num_rows)

    def _chunk(self, chunk: _Chunk) -> pa.RecordBatchReader:
        path = f"{self._folder}/{self._staged.file}"
        what = f"{self._store.uri}/{path}"
        body = pa.py_buffer(self._store.read(path, chunk.offset, chunk.length))
        if problem := self._store.seal.problem("piece", body, chunk.digest, what):
            raise CorruptSnapshotError(f"staged rows {what} are damaged: {problem}")
        return checked_stream(body, what, trusted=is_sealed(chunk.digest))


class RowsToCome:
    """Rows that are being made durable, and then read.

    Args:
        staging: of them.
        store, folder: where they will lie.
        position: where to begin.
    """

    def __init__(self, staging: Staging, store: Store, folder: str, position: Json) -> None:
        self._staging, self._store, self._folder = staging, store, folder
        self._position: dict[str, Json] = position or {"rows": 0}
        self._rows: DurableRows | None = None
        self.end: Json = None
        """Of a simple stream, once ``begun``."""
        self.nothing = False
        """There is nothing to read yet."""

    @property
    def begun(self) -> bool:
        """They are durable."""
        return self._rows is not None

    @property
    def ended(self) -> bool:
        """All of them were read."""
        return self._rows is not None and self._rows.ended

    @property
    def position(self) -> dict[str, Json]:
        """See ``Rows``."""
        return self._position if self._rows is None else self._rows.position

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """See ``Rows``.

        Raises:
            CutwaterError: they cannot be read, or not made durable.
        """
        if self._rows is None:
            if not self._staging.done:
                return None
            staged = self._staging.result
            if staged is None:
                self.nothing = True
                return None
            self._rows, self.end = DurableRows(self._store, self._folder, staged, self._position), staged.end
        return self._rows.read(max_rows)

    def close(self) -> None:
        """Stop."""
        self._staging.close()

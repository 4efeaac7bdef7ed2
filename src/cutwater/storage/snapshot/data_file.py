"""The data files of snapshots: appended front to back, and made durable once for each checkpoint.

A segment is one Arrow IPC stream with one record batch, uncompressed (an lz4 stream of 2 MB of integers costs twelve
times the CPU for a 2.5 times smaller file; checkpoints are short-lived, the stream's cores are not).  A file is the
segments of a worker, one after the other, and nothing else.  Each has zeros behind it up to a whole block, which its
length and digest include: so all of it can go to the device in one piece.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, cast

import pyarrow as pa

from cutwater.errors import StorageError
from cutwater.storage.snapshot.manifest import Entry
from cutwater.storage.store.base import Store
from cutwater.storage.store.seal import Hasher

_BLOCK_BYTES = 4_096
_CONTINUED_S = 1.0
_CONTINUED_BYTES = 1 << 25
"""A file that is as old, or as large, is not continued: it stays as long as anything in it is needed."""
_OPTIONS = pa.ipc.IpcWriteOptions()
"""The default ones, which Arrow would put together for each stream."""


class DataFile:
    """A file of a job's folder that comes into being with its first byte.

    Raises:
        StorageError: of all methods: the store fails; the file can only be aborted.
    """

    def __init__(self, store: Store, job: str, path: str) -> None:
        self.path = path
        self._store, self._full = store, f"{job}/{path}"
        self._file: BinaryIO | None = None
        self._durable = 0
        self.length = 0
        """Bytes appended so far."""

    def append(self, batch: pa.RecordBatch, described: dict[str, Any]) -> Entry:
        """Write a segment; its entry, whose other fields are ``described``."""
        if self._file is None:
            self._file = self._store.write(self._full)
        length, digest = encode(batch, self._file, self._store.seal.hasher("segment"), _BLOCK_BYTES)
        entry = Entry(**described, length=length, digest=digest, file=self.path, offset=self.length)
        self.length += length
        return entry

    def sync(self) -> bool:
        """Make durable what was appended, if anything was since the last time; more may follow."""
        if self._file is None or self._durable == self.length:
            return False
        self._store.sync(self._file)
        self._durable = self.length
        return True

    def close(self) -> None:
        """Make durable what was appended; nothing follows."""
        file, self._file = self._file, None
        if file is None:
            return
        if self._durable == self.length:
            file.close()
        else:
            self._store.close_durably(file)

    def abort(self) -> None:
        """Drop what is not durable: nobody names it.  A store that fails here leaves it to retention."""
        file, self._file = self._file, None
        with suppress(StorageError):  # the bytes do not matter any more
            if file is not None:
                file.close()
        with suppress(StorageError):
            if self.length and not self._durable:
                self._store.delete(self._full)


@dataclass(slots=True)
class _Turn:
    checkpoint_id: int
    since_s: float
    """Of its file."""
    file: DataFile | None = None
    complete: bool = False


class Continued:
    """The files with which a worker's next checkpoints may go on.

    A file costs more than what a small state writes into it: it is made, its name becomes durable, and it is removed,
    each of which waits for the device.  So checkpoints that follow one another quickly share files, in turns, as long
    as each is whole: the loss of a file leaves the checkpoint before as it is.

    A file is continued only by the checkpoint that begins ``files`` after the one that wrote its end, and only if that
    one and all in between are known to be published.  So one of the newest completed checkpoints names the file, as
    many as there are files, and nobody collects it meanwhile (``SharedFiles``).

    Args:
        files: how many take turns, no more than completed checkpoints are kept; 0: none is continued.

    >>> from cutwater.storage.store.local import LocalStore
    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> continued, file = Continued(1), DataFile(LocalStore.open(folder.name), "delays", "shared/7-1-0.data")
    >>> continued.take(7)
    >>> entry = file.append(pa.record_batch({"n": [1, 2]}), dict(step="n", subtask=0, name="n", kind="base", rows=2))
    >>> file.sync(), continued.leave(7, file), continued.completed(7)
    (True, None, None)
    >>> continued.take(8) is file, file.length
    (True, 4096)
    >>> file.abort(), folder.cleanup()
    (None, None)
    """

    def __init__(self, files: int) -> None:
        self._files = files
        self._turns: deque[_Turn] = deque()
        """Of the checkpoints that began last."""

    def take(self, checkpoint_id: int) -> DataFile | None:
        """A checkpoint begins: the file that it goes on with, if there is one; ``leave`` it, or abort it."""
        now_s = time.monotonic()
        complete = all(turn.complete for turn in self._turns)
        mine = _Turn(checkpoint_id, now_s)
        self._turns.append(mine)
        last = self._turns.popleft() if len(self._turns) > self._files else None
        if last is None or last.file is None:
            return None
        young = now_s < last.since_s + _CONTINUED_S and last.file.length < _CONTINUED_BYTES
        if complete and young:
            mine.since_s = last.since_s
            return last.file
        last.file.close()
        return None

    def leave(self, checkpoint_id: int, file: DataFile) -> None:
        """A checkpoint wrote to the file, and all of it is durable."""
        turn = self._turn_of(checkpoint_id)
        if turn is None:
            file.close()
        else:
            turn.file = file

    def completed(self, checkpoint_id: int) -> None:
        """The checkpoint is published."""
        if (turn := self._turn_of(checkpoint_id)) is not None:
            turn.complete = True

    def close(self) -> None:
        """Nothing goes on with them."""
        while self._turns:
            if (file := self._turns.popleft().file) is not None:
                file.close()

    def _turn_of(self, checkpoint_id: int) -> _Turn | None:
        return next((turn for turn in self._turns if turn.checkpoint_id == checkpoint_id), None)


class _HashingFile:
    """Passes what Arrow writes on to a file, without copying it, and keeps length and digest."""

    closed = False

    def __init__(self, file: BinaryIO, hasher: Hasher) -> None:
        self._file = file
        self.hasher = hasher
        self.length = 0

    def write(self, data: Any) -> int:
        self._file.write(data)
        self.hasher.update(data)
        self.length += len(data)
        return len(data)

    def tell(self) -> int:
        return self.length

    def flush(self) -> None:
        """Arrow asks for it; the store syncs once, at the end."""

    def close(self) -> None:
        """Arrow asks for it; the file goes on with the next segment."""


def encode(batch: pa.RecordBatch, file: BinaryIO, hasher: Hasher, multiple: int = 1) -> tuple[int, str]:
    """Append a batch as an Arrow IPC stream, and zeros up to a multiple of some length.

    Returns:
        Length and digest of stream and zeros.
    """
    sink = _HashingFile(file, hasher)
    with pa.ipc.new_stream(pa.PythonFile(cast(Any, sink), mode="w"), batch.schema, options=_OPTIONS) as stream:
        stream.write_batch(batch)
    sink.write(bytes(-sink.length % multiple))
    return sink.length, sink.hasher.hexdigest()

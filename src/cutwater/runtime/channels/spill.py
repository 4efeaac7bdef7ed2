"""Rows of channels that overflow to disk: what waits at a receiver, and what is kept for one that goes back."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import deque
from typing import Final

import pyarrow as pa

from cutwater.errors import StorageError
from cutwater.protocol.channel.items import Rows
from cutwater.protocol.channel.sending import Kept

_FILE_BYTES: Final = 64 << 20
_ALIGNMENT: Final = 64
_POOL = pa.system_memory_pool()
"""Arrow's own pool gives memory back that rests for some milliseconds, and the next batches pay for its pages again."""


class SpillFile:
    """Batches in anonymous temporary files, which are gone with the process, however it ends.

    A stored batch is given back at once, now lying in the file's pages: it can be sliced, queued and kept in a log like
    any other, and the system takes its memory back when it needs it.  The space is free again when the last batch in a
    file of 64 MiB is.

    >>> batch = pa.record_batch({"n": [1, 2, 3]})
    >>> file = SpillFile()
    >>> file.store(batch).equals(batch), file.stored_bytes > 0
    (True, True)
    """

    def __init__(self, folder: str | None = None) -> None:
        self._folder = folder
        self._fd: int | None = None
        self._pages: pa.Buffer | None = None
        self._size = self._used = 0
        self.stored_bytes = 0
        """Written so far, over all files."""

    def store(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The same rows, in the file.

        Raises:
            StorageError: the disk is full, or fails.
        """
        return pa.ipc.read_record_batch(self.write(batch.serialize()), batch.schema)

    def write(self, body: pa.Buffer) -> pa.Buffer:
        """The same bytes, in the file.

        Raises:
            StorageError: as ``store``.
        """
        try:
            if self._pages is None or self._used + body.size > self._size:
                self._open(max(_FILE_BYTES, body.size))
            assert self._fd is not None
            start, done = self._used, 0
            view = memoryview(body)
            while done < body.size:
                done += os.pwrite(self._fd, view[done:], start + done)
        except OSError as e:
            folder = self._folder or tempfile.gettempdir()
            raise StorageError(
                f"rows that overflow to disk cannot be written in {folder}: {e.strerror or e}",
                hint="Free space there, set TMPDIR for the workers to another disk, or raise spill_memory_bytes.",
            ) from e
        self._used = -(-(start + body.size) // _ALIGNMENT) * _ALIGNMENT
        self.stored_bytes += body.size
        assert self._pages is not None
        return self._pages.slice(start, body.size)

    def close(self) -> None:
        """Nothing more is stored; what was stays readable."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = self._pages = None

    def _open(self, size: int) -> None:
        self.close()
        with tempfile.TemporaryFile(dir=self._folder, prefix="cutwater-spill-") as file:
            os.truncate(file.fileno(), size)
            self._pages = pa.py_buffer(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ))
            self._fd = os.dup(file.fileno())
        self._size, self._used = size, 0

    def __del__(self) -> None:
        self.close()


class SpillingFrames:
    """Keeps a bounded number of bytes of waiting rows in memory and the rest in a ``SpillFile`` (``FrameStore``).

    Two kinds of channels have one: back-edges, whose sender has no limit (C7), and with ``spill=True`` the others, so
    that an input that is blocked for an aligned snapshot does not hold its sender up: the subtask calls ``relieve``
    while it is blocked, and is woken for that by arrivals.

    Args:
        memory_bytes: rows beyond this go to disk.
    """

    __slots__ = ("_bytes_in", "_bytes_out", "_file", "_memory_bytes", "_sizes")

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._bytes_in = self._bytes_out = 0  # each has one writing thread
        self._sizes: deque[int] = deque()  # bytes in memory of each frame in the queue
        self._file = SpillFile()

    def keep(self, rows: Rows) -> Rows:
        """See ``FrameStore.keep``.

        Raises:
            StorageError: the disk is full, or fails.
        """
        size = rows.batch.nbytes
        if self._bytes_in - self._bytes_out + size > self._memory_bytes:
            rows, size = rows.part(self._file.store(rows.batch), rows.first_row), 0
        self._bytes_in += size
        self._sizes.append(size)
        return rows

    def keep_watermark(self) -> None:
        self._sizes.append(0)

    def restored(self, frames: int) -> None:
        """What lies in a snapshot's file is not spilled again."""
        self._sizes.extend([0] * frames)

    def left(self) -> None:
        self._bytes_out += self._sizes.popleft()


class KeptRows:
    """Encodes the rows that a ``ReplayBuffer`` keeps, in memory as far as they fit, beyond that in a file.

    Rows are kept as a connection sends them: they are encoded once, and the memory they came in is soon used again,
    while it is still in the processor's caches.

    Args:
        memory_bytes: rows beyond this lie in a file.
    """

    def __init__(self, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._file: SpillFile | None = None

    def __call__(self, rows: Rows, kept_bytes: int) -> Kept:
        """Encode a frame that is being sent while ``kept_bytes`` lie in memory.

        Raises:
            StorageError: the disk is full, or fails.
        """
        body = rows.batch.serialize(memory_pool=_POOL)
        if kept_bytes + body.size <= self._memory_bytes:
            encoded = _in_memory_of(rows, body)
            return Kept(encoded, encoded, body.size)
        # What is sent now need not be read from the file's pages.
        self._file = self._file or SpillFile()
        return Kept(rows._replace(body=body), _in_memory_of(rows, self._file.write(body)), 0)


def _in_memory_of(rows: Rows, body: pa.Buffer) -> Rows:
    """The same rows, in the memory of their encoded form."""
    return rows._replace(batch=pa.ipc.read_record_batch(body, rows.batch.schema), body=body)

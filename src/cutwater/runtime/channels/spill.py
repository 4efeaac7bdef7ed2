"""Receiving ends that overflow to disk instead of holding their sender up."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Final

import pyarrow as pa

from cutwater.errors import StorageError
from cutwater.plan.graph import Channel
from cutwater.runtime.channels.input import InputChannel
from cutwater.runtime.channels.items import Barrier, End, Item, Rows, Timed
from cutwater.runtime.transport.signal import nothing

NO_LIMIT: Final = 1 << 62
"""Frames that a feedback channel may hold (rule C7)."""

_FILE_BYTES: Final = 64 << 20
_ALIGNMENT: Final = 64


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


class SpillingInputChannel(InputChannel):
    """An ``InputChannel`` that keeps a bounded number of bytes in memory and the rest in a ``SpillFile``.

    Two kinds of channels are made so: back-edges, whose sender has no limit (C7), and with ``spill=True`` the others,
    so that an input that is blocked for an aligned snapshot does not hold its sender up: the subtask calls ``relieve``
    while it is blocked, and is woken for that by arrivals.

    Args:
        memory_bytes: rows beyond this go to disk.
        others: as for ``InputChannel``.
    """

    __slots__ = ("_bytes_in", "_bytes_out", "_file", "_memory_bytes", "_sizes")

    def __init__(
        self,
        key: Channel,
        schema: pa.Schema,
        capacity_frames: int,
        on_ready: Callable[[], None] = nothing,
        *,
        memory_bytes: int,
        **others: Any,
    ) -> None:
        super().__init__(key, schema, capacity_frames, on_ready, **others)
        self._memory_bytes = memory_bytes
        self._bytes_in = self._bytes_out = 0  # each has one writing thread
        self._sizes: deque[int] = deque()  # bytes in memory of each frame in the queue
        self._file = SpillFile()

    def put(self, item: Item) -> None:
        """As ``InputChannel.put``.

        Raises:
            StorageError: the disk is full, or fails.
        """
        if isinstance(item, Barrier | End):
            super().put(item)
            return
        size = 0
        if type(item) is Rows:
            size = item.batch.nbytes
            if self._bytes_in - self._bytes_out + size > self._memory_bytes:
                item = item.part(self._file.store(item.batch), item.first_row)
                size = 0
        self._bytes_in += size
        self._sizes.append(size)
        super().put(item)
        if self._blocked:
            self.on_ready()

    def _frame_left(self) -> None:
        self._bytes_out += self._sizes.popleft()
        super()._frame_left()

    def restore(self, items: Iterable[Timed]) -> None:
        """As ``InputChannel.restore``; what lies in a snapshot's file is not spilled again."""
        super().restore(items)
        self._sizes.extend([0] * self._uncredited)

    @property
    def queued_bytes(self) -> int:
        """Bytes of rows that wait in memory."""
        return self._bytes_in - self._bytes_out

    @property
    def spilled_bytes(self) -> int:
        """Bytes written to disk so far."""
        return self._file.stored_bytes


def make_input(
    key: Channel,
    schema: pa.Schema,
    capacity_frames: int,
    on_ready: Callable[[], None] = nothing,
    *,
    memory_bytes: int | None = None,
    **others: Any,
) -> InputChannel:
    """A receiving end: with ``memory_bytes`` one that overflows to disk."""
    if memory_bytes is None:
        return InputChannel(key, schema, capacity_frames, on_ready, **others)
    return SpillingInputChannel(key, schema, capacity_frames, on_ready, memory_bytes=memory_bytes, **others)

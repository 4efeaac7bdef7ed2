"""Writing a file front to back with little of the processor: few calls, and no copy in the system's memory.

A file that the system keeps in its memory costs it fresh pages, and their return when the file goes: 9 MB cost ten
milliseconds of processor time or more, and two to four if they go to the device directly (``O_DIRECT``).  Nobody reads
a checkpoint unless something fails.  A large one stays in memory beyond its beginning all the same: after a failure
reading it from the device would be what the restore waits for.
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

_KEPT_BYTES = 1 << 20
_PIECES_PER_CALL = 1_024  # the system takes no more
_DIRECT_BYTES = 1 << 25
"""So much of what is written until a flush goes to the device directly."""
_STAGE_BYTES = 4 << 20
"""Bytes that go to the device at once: more than it takes in one call of most checkpoints."""
_BLOCK_BYTES = 4_096
"""Alignment of places in a file and in memory where nothing is copied."""
_O_DIRECT = getattr(os, "O_DIRECT", 0)
_STAGES: list[mmap.mmap] = []
"""Memory to use again.  It is of the shared kind, of which a fork makes no copies while a device reads it; so a child
that wrote there, too, would write into its parent's file."""
_STAGES_KEPT = 2
os.register_at_fork(after_in_child=_STAGES.clear)


class NewFile(io.FileIO):
    """A file that is not there yet.

    What is written is kept, not copied, until there is much of it: it must not change meanwhile.

    Args:
        path: in its store.
        fd: of the file, just made; closed with this object.
        errors: for the calls of the system.
    """

    def __init__(self, path: str, fd: int, errors: Callable[[], AbstractContextManager[None]]) -> None:
        super().__init__(fd, "wb")
        self.path = path
        self.named = False
        """Its name is durable."""
        self._errors = errors
        self._pieces: list[memoryview] = []
        self._kept_bytes = 0
        self._begun = False
        self._direct: _Direct | None = None

    def write(self, b: Any, /) -> int:
        piece = memoryview(b).cast("B")
        self._pieces.append(piece)
        self._kept_bytes += len(piece)
        if self._kept_bytes >= _KEPT_BYTES:
            with self._errors():
                self._hand_over()
        return len(piece)

    def flush(self) -> None:
        if self._pieces or self._direct is not None:
            with self._errors():
                self._hand_over()
                self._end_direct()
        self._begun = False

    def _hand_over(self) -> None:
        if not self._begun:
            self._begun = True
            self._direct = _Direct.begin(self.fileno()) if self._kept_bytes >= _KEPT_BYTES else None
        if self._direct is not None:
            self._direct.write(self._pieces)
            if self._direct.length >= _DIRECT_BYTES:
                self._end_direct()
        write_all(self.fileno(), self._pieces)
        self._kept_bytes = 0

    def _end_direct(self) -> None:
        if self._direct is not None:
            self._direct.end()
            self._direct = None


class _Direct:
    """The beginning of what is written until a flush: whole blocks go to the device from memory of our own."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._memory = _STAGES.pop() if _STAGES else mmap.mmap(-1, _STAGE_BYTES)
        self._stage = memoryview(self._memory)
        self._filled = 0
        self.length = 0

    @classmethod
    def begin(cls, fd: int) -> _Direct | None:
        """``None`` where the file system does not do that, or a file ends within a block."""
        if os.lseek(fd, 0, os.SEEK_CUR) % _BLOCK_BYTES:
            return None
        return cls(fd) if _O_DIRECT and _switch(fd, on=True) else None

    def write(self, pieces: list[memoryview]) -> None:
        """Take what fits into the beginning; the rest of the pieces is left."""
        while pieces and self.length < _DIRECT_BYTES:
            piece = pieces[0][: _STAGE_BYTES - self._filled]
            self._stage[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            self.length += len(piece)
            if len(piece) == len(pieces[0]):
                del pieces[0]
            else:
                pieces[0] = pieces[0][len(piece) :]
            if self._filled == _STAGE_BYTES:
                self._pass_on(_STAGE_BYTES)

    def end(self) -> None:
        """Write the ordinary way from now on, as what is left of a block."""
        filled, whole = self._filled, self._filled // _BLOCK_BYTES * _BLOCK_BYTES
        if whole:
            self._pass_on(whole)
        _switch(self._fd, on=False)
        if filled > whole:
            write_all(self._fd, [self._stage[whole:filled]])
        if len(_STAGES) < _STAGES_KEPT:
            _STAGES.append(self._memory)

    def _pass_on(self, size: int) -> None:
        left = [self._stage[:size]]
        try:
            write_all(self._fd, left)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            _switch(self._fd, on=False)  # the device has larger blocks
            write_all(self._fd, left)
        self._filled = 0


def _switch(fd: int, *, on: bool) -> bool:
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | _O_DIRECT if on else flags & ~_O_DIRECT)
    except OSError:
        return False
    return True


def write_all(fd: int, pieces: list[memoryview]) -> None:
    """Write and take out all pieces."""
    while pieces:
        written = os.writev(fd, pieces[:_PIECES_PER_CALL])
        while pieces and written >= len(pieces[0]):
            written -= len(pieces.pop(0))
        if written:
            pieces[0] = pieces[0][written:]

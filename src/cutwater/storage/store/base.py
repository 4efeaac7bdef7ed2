"""The store seam: the few things a checkpoint directory must be able to do, and which guarantees they give."""

from __future__ import annotations

import os
from typing import BinaryIO, Protocol

from cutwater.storage.store.seal import Seal


class Readable(Protocol):
    """Where the bytes of a snapshot can be read."""

    @property
    def seal(self) -> Seal:
        """What they are compared with."""
        ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes | memoryview:
        """Bytes of a file.

        Raises:
            CorruptSnapshotError: missing, or shorter than asked for.
        """
        ...


class Store(Protocol):
    """A place for checkpoint data.  Paths are relative, with ``/``.  Reads see every finished write.

    ``atomic_create`` must be true for exactly-once: the job log is a fence only where of two creators of one path
    exactly one succeeds, and nobody ever sees a part of the content.
    """

    atomic_create: bool

    @property
    def seal(self) -> Seal:
        """Makes the digests of what is written here, and compares those of what is read."""
        ...

    def create(self, path: str, data: bytes) -> bool:
        """Make ``path`` with this content, durably and all at once; ``False`` if it exists already (it is left alone).

        Raises:
            StorageError: the place cannot be written (full, read-only, gone).
        """
        ...

    def overwrite(self, path: str, data: bytes) -> None:
        """Give a file of a few hundred bytes new content, of the same length; it is made if it is not there.

        Not durable, and who reads meanwhile may find parts of both: for what processes tell each other, and nothing
        else.

        Raises:
            StorageError: the place cannot be written.
        """
        ...

    def write(self, path: str) -> BinaryIO:
        """A new file, written front to back.  Durable once ``close_durably`` returns; an existing path is an error."""
        ...

    def sync(self, file: BinaryIO) -> None:
        """Make durable what was written so far, and the directory entry; the file may be written on."""
        ...

    def close_durably(self, file: BinaryIO) -> None:
        """``sync`` and close."""
        ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes | memoryview:
        """Bytes of a file.

        Raises:
            CorruptSnapshotError: missing, no file, shorter than asked for, or, as a whole, longer than any that belongs
                here.
        """
        ...

    def list(self, prefix: str = "") -> list[str]:
        """All files below a folder, sorted."""
        ...

    def names(self, folder: str = "") -> list[str]:
        """Names of the files and folders directly in a folder, sorted; a folder that is not there has none."""
        ...

    def delete(self, path: str) -> None:
        """Remove a file, or a folder with all it holds; missing is no error."""
        ...

    def sealed(self, seal: Seal) -> Store:
        """The same place, with another seal."""
        ...

    def at(self, root: str | os.PathLike[str]) -> Store:
        """Another folder of the file system, with the same seal."""
        ...

    def sweep(self, prefix: str = "") -> int:
        """Remove what creates of processes that died half-way left below a folder; returns how many files."""
        ...

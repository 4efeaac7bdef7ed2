"""The store seam: the few things a checkpoint directory must be able to do, and which guarantees they give."""

from __future__ import annotations

from collections.abc import Iterable
from typing import BinaryIO, Protocol

from cutwater.config import FileAccess
from cutwater.storage.store.seal import Seal


class Readable(Protocol):
    """A place that the bytes of a snapshot can be read from."""

    @property
    def seal(self) -> Seal:
        """The seal that they are compared with."""
        ...

    def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes | memoryview:
        """Bytes of a file.

        Raises:
            CorruptSnapshotError: missing, or shorter than asked for.
        """
        ...


class Store(Protocol):
    """A place for checkpoint data.  Paths are relative, with ``/``.  Reads see every finished write.

    Stores are opened by URI (``opening``); they pickle, without their key, so that workers get the driver's.

    ``atomic_create`` must be true for exactly-once: the job log is a fence only where of two creators of one path
    exactly one succeeds, and nobody ever sees a part of the content.

    Raises:
        StorageError: of all methods: the place cannot be read or written (full, read-only, gone).
    """

    atomic_create: bool
    appends: bool
    """A file may be written on after ``sync``.  Where not, each checkpoint has files of its own."""
    look_s: float
    """Seconds between two looks of who waits for something, at least: requests cost time and money."""

    @property
    def uri(self) -> str:
        """Absolute address, with which ``open_store`` opens it in any process.  A path for a local one."""
        ...

    @property
    def seal(self) -> Seal:
        """Makes the digests of what is written here, and compares those of what is read."""
        ...

    @property
    def access(self) -> FileAccess:
        """Users that may read and write what is made here."""
        ...

    def exists(self, folder: str = "") -> bool:
        """True if the place, or a folder of it that was made and not deleted, is there; who only reads makes none."""
        ...

    def create(self, path: str, data: bytes) -> bool:
        """Make ``path`` with this content, durably and all at once; ``False`` if it exists already."""
        ...

    def overwrite(self, path: str, data: bytes) -> None:
        """Give a file of a few hundred bytes new content, of the same length; it is made if it is not there.

        Not durable, and who reads meanwhile may find parts of both: for what processes tell each other, and nothing
        else.
        """
        ...

    def write(self, path: str) -> BinaryIO:
        """A new file, written front to back.  Durable once ``close_durably`` returns.

        Raises:
            StorageError: here or at the end: the path exists.
        """
        ...

    def sync(self, file: BinaryIO) -> None:
        """Make durable what was written so far, and the directory entry; if it ``appends``, more may follow."""
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

    def delete_files(self, paths: Iterable[str]) -> None:
        """Remove files, of which none is a folder, in no particular order; missing is no error."""
        ...

    def delete_empty(self, folder: str) -> bool:
        """Remove a folder that holds nothing, and say whether there is none now."""
        ...

    def sealed(self, seal: Seal) -> Store:
        """The same place, with another seal."""
        ...

    def make_folder(self, path: str) -> None:
        """Make a folder, durably; it may be there.  It stays until it is deleted, whatever comes and goes in it."""
        ...

    def local_folder(self, path: str = "") -> str:
        """Path of a folder, for programs that know file systems only (Spark writing Parquet, whoever reads output).

        Raises:
            ConfigError: it has none.
        """
        ...

    def shares_device(self, directory: str) -> bool:
        """True if a folder of this machine lies on the same device: a copy there would be lost with the original.

        Raises:
            OSError: the folder cannot be looked at.
        """
        ...

    def sweep(self, prefix: str = "") -> int:
        """Remove what creates of processes that died half-way left below a folder; returns how many files."""
        ...

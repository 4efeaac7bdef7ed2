"""Scratch folders that belong to a process, and go when it is gone, however it ended."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Generator
from typing import Final

from cutwater.errors import StorageError

_LOCK: Final = "owner.lock"


class PrivateFolder:
    """A new folder in a shared one, locked by this process until it is removed.

    Folders in ``parent`` whose process is gone are removed first.

    Args:
        parent: made if it is not there; nobody but the user may read it.
        inherit: is called with each folder that is about to be removed and the new one, and may move from one to the
            other what is worth keeping.

    Raises:
        StorageError: ``parent`` belongs to somebody else.
        OSError: it cannot be made or written.

    >>> parent = tempfile.mkdtemp()
    >>> folder = PrivateFolder(parent)
    >>> os.path.isdir(folder.path)
    True
    >>> folder.remove()
    >>> os.listdir(parent)
    []
    """

    def __init__(self, parent: str, inherit: Callable[[str, str], None] | None = None) -> None:
        os.makedirs(parent, mode=0o700, exist_ok=True)
        found = os.stat(parent)
        if found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise StorageError(
                f"{parent} belongs to somebody else, or others may read it",
                hint="Remove it, or set TMPDIR for the workers to a directory of their own.",
            )
        with _gate(parent):
            abandoned = [name for name in os.listdir(parent) if _is_abandoned(os.path.join(parent, name))]
            self.path = tempfile.mkdtemp(dir=parent)
            self._lock = os.open(os.path.join(self.path, _LOCK), os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            for name in abandoned:
                if inherit is not None:
                    inherit(os.path.join(parent, name), self.path)
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder with all it holds; once."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def remove_abandoned(parent: str) -> None:
    """Remove the folders in ``parent`` whose process is gone; one that is not there, or cannot be read, has none."""
    with contextlib.suppress(OSError), _gate(parent):
        for name in os.listdir(parent):
            if _is_abandoned(os.path.join(parent, name)):
                shutil.rmtree(os.path.join(parent, name), ignore_errors=True)


@contextlib.contextmanager
def _gate(parent: str) -> Generator[None]:
    """Nobody looks at a folder between its making and its locking."""
    gate = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(gate, fcntl.LOCK_EX)
        yield
    finally:
        os.close(gate)


def _is_abandoned(folder: str) -> bool:
    try:
        lock = os.open(os.path.join(folder, _LOCK), os.O_RDWR)
    except OSError:
        return True  # its process ended before the lock was made, or while the folder was being removed
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True

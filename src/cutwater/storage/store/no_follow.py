"""Opening what lies below a folder, and nothing else: by descriptors, component by component, following no link.

Whoever may write into a folder can put a link there, and change it between a look and its use.  So nothing is looked at
first: each component is opened in the one before with ``O_NOFOLLOW``, and what is then done is done to what was opened.
A FIFO or a device does not block: whoever reads asks first whether it is a file.

The root itself is what a user named, links and all.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Generator

from cutwater.errors import CorruptSnapshotError, StorageError

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_NO_FILE = frozenset({errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG})
_NAME_BYTES_MAX = 255


def check_relative(path: str) -> list[str]:
    """The components of a path that stays below its root; none for the root itself.

    Raises:
        StorageError: it leads out, or is no path.

    >>> check_relative("delays/chk-7/1-0.data"), check_relative("")
    (['delays', 'chk-7', '1-0.data'], [])
    >>> check_relative("../etc")
    Traceback (most recent call last):
    cutwater.errors.StorageError: path '../etc' leads out of its folder
    """
    if not path:
        return []
    if path.startswith("/") or "\0" in path:
        raise StorageError(f"path {path[:_NAME_BYTES_MAX]!r} leads out of its folder")
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if ".." in parts:
        raise StorageError(f"path {path[:_NAME_BYTES_MAX]!r} leads out of its folder")
    return parts


def open_folder(name: str, parent: int | None = None) -> int:
    """A descriptor of a folder: of a root, or, with ``parent``, of the folder of this name in that one.

    Raises:
        CorruptSnapshotError: in ``parent`` there is a link of this name.
        OSError: there is no such folder.
    """
    if parent is None:
        return os.open(name, _FOLDER)
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and is_link(name, parent):
            raise _link(name) from error
        raise


@contextlib.contextmanager
def opened_folder(root: str, parts: list[str]) -> Generator[int]:
    """The folder that these components lead to.

    Raises:
        CorruptSnapshotError: one of them is a link.
        OSError: one of them is not there, or no folder.
    """
    fd = open_folder(root)
    try:
        for name in parts:
            below = open_folder(name, fd)
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def open_to_read(name: str, folder: int, shown: str) -> tuple[int, os.stat_result]:
    """A descriptor of a file in a folder, and what it is: never a link, a FIFO, a socket or a device.

    Raises:
        CorruptSnapshotError: it is one of these.
        OSError: it is not there, or cannot be read.
    """
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=folder)
    except OSError as error:
        if is_link(name, folder):
            raise _link(shown) from error
        if error.errno in _NO_FILE:
            raise CorruptSnapshotError(f"{shown} is not a file") from error
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise CorruptSnapshotError(f"{shown} is not a file")
    return fd, status


def is_link(name: str, folder: int) -> bool:
    """True if there is a link of this name."""
    try:
        return stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
    except OSError:
        return False


def _link(name: str) -> CorruptSnapshotError:
    return CorruptSnapshotError(
        f"{name} is a symbolic link, and those are not followed",
        hint="If you put it there: name the folder that it leads to as the directory instead.",
    )

"""A disk that forgets: what a directory holds after a process or the whole machine dies at a chosen system call.

The real files are used; only ``os.fsync``, ``os.rename``, ``os.unlink`` and ``os.rmdir`` are watched, and where a store
lies beside the output ``os.link``, ``os.mkdir``, ``os.write`` and ``os.writev`` too.  The model of a power loss: bytes
that were not synced are cut off, a new name in a directory that was not synced is taken back (a rename goes back to
where it came from), a file removed from the root comes back unless the root was synced since; other removals count at
once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


class ForgetfulDisk:
    """
    Args:
        root: the output.
        patch: undoes what is watched.
        moment: called before every system call: another process may look, and this one may die.
        store: a checkpoint directory on the same disk.
    """

    def __init__(
        self, root: str, patch: pytest.MonkeyPatch, moment: Callable[[], None], store: str | None = None
    ) -> None:
        self.root = root
        self._places = [root] if store is None else [root, store]
        self._moment = moment
        self._synced_bytes: dict[int, int] = {}
        self._synced_names: set[tuple[str, int]] = set()
        self._renames: list[tuple[str, str]] = []
        self._removed: list[str] = []
        self._graves = f"{root}.graves"
        watched = ["rename", "unlink", "rmdir", *(() if store is None else ("link", "mkdir", "write", "writev"))]
        self._real = {name: getattr(os, name) for name in ("fsync", *watched)}
        patch.setattr(os, "fsync", self._fsync)
        for name in watched:
            patch.setattr(os, name, self._watched(name))

    def _fsync(self, fd: int) -> None:
        self._moment()
        path, stat = os.readlink(f"/proc/self/fd/{fd}"), os.fstat(fd)
        if os.path.isdir(path):
            self._synced_names |= {(path, entry.inode()) for entry in os.scandir(path)}
            self._removed = [p for p in self._removed if os.path.dirname(p) != path]
            self._renames = [(a, b) for a, b in self._renames if path not in (os.path.dirname(a), os.path.dirname(b))]
        else:
            self._synced_bytes[stat.st_ino] = stat.st_size

    def _watched(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._moment()
            if name == "unlink":
                self._bury(self._path(args[0], kwargs.get("dir_fd")))
            result = self._real[name](*args, **kwargs)
            if name == "rename":
                folders = (kwargs.get("src_dir_fd"), kwargs.get("dst_dir_fd"))
                source, target = map(self._path, args, folders)
                self._renames.append((source, target))
            return result

        return call

    def _path(self, name: str, folder: int | None) -> str:
        return name if folder is None else os.path.join(os.readlink(f"/proc/self/fd/{folder}"), name)

    def _bury(self, path: str) -> None:
        if os.path.dirname(path) == self.root and (self.root, os.stat(path).st_ino) in self._synced_names:
            os.makedirs(self._graves, exist_ok=True)
            grave = os.path.join(self._graves, os.path.basename(path))
            if not os.path.exists(grave):
                os.link(path, grave)
            self._removed.append(path)

    def lose_power(self) -> None:
        """Only what was made durable is left."""
        for path in self._removed:
            if not os.path.exists(path):
                os.link(os.path.join(self._graves, os.path.basename(path)), path)
        self._removed = []
        for source, target in reversed(self._renames):
            if os.path.exists(target) and os.path.isdir(os.path.dirname(source)):
                self._real["rename"](target, source)
        self._renames = []
        files = [(folder, name) for place in self._places for folder, _, names in os.walk(place) for name in names]
        for folder, name in files:
            path = os.path.join(folder, name)
            inode = os.stat(path).st_ino
            if (folder, inode) not in self._synced_names:
                self._real["unlink"](path)
            elif os.stat(path).st_size > self._synced_bytes.get(inode, 0):
                os.truncate(path, self._synced_bytes.get(inode, 0))

"""Which files are in watched folders, look after look, without listing those again in which nothing has happened.

A folder's time of change moves when a name comes or goes, so a look may be a question for that time.  Not everywhere,
though: times may be coarse, and some file systems keep none.  So a list stands only if it was made when the time had
been the same for longer than times are coarse, it is made anew now and then all the same, and a folder that was caught
with another list at the same time is not believed again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cutwater.connectors.files.listing import FileEntry, expanded

_WORTH_S = 0.005
"""A list that takes less time is made at each look."""
_COARSE_S = 2.0
"""No file system's times are coarser."""
_ANEW_S = 5.0
"""A list stands for so long at most."""


@dataclass(frozen=True, slots=True)
class _Listed:
    files: list[str]
    folders: dict[str, int] | None
    """Time of change of each folder before it was listed, nanoseconds; ``None``: they do not tell."""
    began_s: float
    took_s: float
    since_s: float
    """Since then the folders have had these times."""

    @property
    def is_sure(self) -> bool:
        """What came behind the list has changed the time of a folder."""
        return self.folders is not None and self.began_s - self.since_s >= _COARSE_S


class FolderLooks:
    """The files behind paths that are watched.  Used by one thread.

    Args:
        paths: files, directories and globs.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self._paths = paths
        self._listed: dict[str, _Listed] = {}
        self._tell_nothing: set[str] = set()
        """Paths whose folders had another list at the same time."""
        self._entries: dict[str, dict[str, FileEntry]] = {}
        """By path, those that their listing tells."""
        self._parts: list[list[str]] = []
        self._files: list[str] = []

    def look(self, *, anew: bool = False) -> list[str]:
        """The files that are there now, sorted, each once; the same object as before if they are the same.

        Args:
            anew: list all folders, whatever they tell.

        Raises:
            BuildError: a path is not there, or a directory is partitioned by a column.
        """
        parts = [self._of(path, anew) for path in self._paths]
        if len(parts) != len(self._parts) or any(a is not b for a, b in zip(parts, self._parts, strict=True)):
            self._parts, self._files = parts, sorted({file for part in parts for file in part})
        return self._files

    def entry(self, file: str) -> FileEntry | None:
        """A file as it was at the last look, if that tells."""
        return next((found for known in self._entries.values() if (found := known.get(file))), None)

    def _of(self, path: str, anew: bool) -> list[str]:
        now_s, before = time.monotonic(), self._listed.get(path)
        if before is not None and not anew and self._stands(path, before, now_s):
            return before.files
        files, folders, entries = expanded(path, may_be_empty=True)
        self._entries[path] = entries
        since_s = now_s
        if before is not None:
            same = folders == before.folders
            if same:
                since_s = before.since_s
            if files == before.files:
                files = before.files
            elif same and before.is_sure:
                self._tell_nothing.add(path)
        self._listed[path] = _Listed(files, folders, now_s, time.monotonic() - now_s, since_s)
        return files

    def _stands(self, path: str, listed: _Listed, now_s: float) -> bool:
        if path in self._tell_nothing or listed.took_s < _WORTH_S or not listed.is_sure:
            return False
        assert listed.folders is not None
        recent = now_s - listed.began_s < _ANEW_S
        return recent and all(_changed_ns(folder) == when for folder, when in listed.folders.items())


def _changed_ns(folder: str) -> int | None:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return None

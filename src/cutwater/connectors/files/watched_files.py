"""What the driver knows of the files in watched folders."""

from __future__ import annotations

from collections.abc import Sequence

from cutwater.connectors.base import Split
from cutwater.connectors.files.folder_looks import FolderLooks
from cutwater.connectors.files.listing import FileEntry, entry_of

_CHECKED = 1024
"""Of the files found before, so many are looked at with each look for new ones."""


class WatchedFiles:
    """The files of one source, look after look.  Used by one thread.

    Args:
        paths: those of the source.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.looks = FolderLooks(paths)
        self.files: list[str] = []
        """All that are there."""
        self.fresh: list[str] = []
        """Those of which there are no splits yet."""
        self.splits: list[Split] = []
        """Of all others, in the order of their paths."""
        self._turn = 0

    def take_turn(self) -> list[FileEntry]:
        """The next of the files, as they are now."""
        first = self._turn if self._turn < len(self.files) else 0
        self._turn = first + _CHECKED
        return self.entries(self.files[first : self._turn])

    def entries(self, files: Sequence[str]) -> list[FileEntry]:
        """Files as they are now, without those that are gone."""
        known = self.looks.entry
        return [entry for file in files if (entry := known(file) or entry_of(file)) is not None]

"""Small text files that were looked into for their first times: what is parsed of them need not be parsed again."""

from __future__ import annotations

from cutwater.connectors.files.listing import FileEntry
from cutwater.connectors.files.text_reader import PlainParsers, TextReader

SMALL_BYTES = 1 << 14
"""Files of so many bytes are kept, whole."""
_MOST_BYTES = 16 << 20
"""Of files that are kept at most."""


class LookedInto:
    """Readers of one source that have parsed all of their files and given nothing yet.  Used by one thread."""

    def __init__(self, dictionaries: bool) -> None:
        self.parsers = PlainParsers(dictionaries=dictionaries)
        self._kept: dict[str, tuple[FileEntry, TextReader]] = {}
        self._bytes = 0

    def keep(self, split: str, entry: FileEntry, reader: TextReader) -> bool:
        """Keep a reader, and close its file; false if there is no room, or part of the file is still to be read."""
        size = entry.size
        if size > SMALL_BYTES or self._bytes + size > _MOST_BYTES or not reader.holds_the_rest or split in self._kept:
            return False
        reader.close_file()
        self._kept[split] = (entry, reader)
        self._bytes += size
        return True

    def take(self, split: str) -> TextReader | None:
        """The reader of a split that was looked into, if its file is still as it was listed."""
        entry, reader = self._kept.pop(split, (None, None))
        if entry is None or reader is None:
            return None
        self._bytes -= entry.size
        return reader if entry.is_unchanged() else None

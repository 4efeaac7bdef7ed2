"""Files that were looked into for their first times: what was read of them need not be read again."""

from __future__ import annotations

import pyarrow.parquet as pq

from cutwater.connectors.files.listing import FileEntry
from cutwater.connectors.files.text_reader import PlainParsers, TextReader

SMALL_BYTES = 1 << 17
"""Files of so many bytes are kept, whole."""
_LEAST_BYTES = 1 << 12
"""Of a file that is not kept, so much is looked into at first."""
_MOST_BYTES = 16 << 20
"""Of files that are kept at most."""
_FOOTER_BYTES = 4 << 20
"""Of footers that are kept at most; in memory one takes several times its bytes in the file."""


class LookedInto:
    """Readers of one source that have parsed all of their files and given nothing yet, and footers of Parquet files.

    Used by one thread.
    """

    def __init__(self, dictionaries: bool) -> None:
        self.parsers = PlainParsers(dictionaries=dictionaries)
        self._kept: dict[str, tuple[FileEntry, TextReader]] = {}
        self._bytes = 0
        self._footers: dict[str, pq.FileMetaData] = {}
        self._footer_bytes = 0

    def look_bytes(self, entry: FileEntry) -> int:
        """How much of a file to look into: all of it, if it can be kept then."""
        fits = entry.size <= SMALL_BYTES and self._bytes + entry.size <= _MOST_BYTES
        return SMALL_BYTES if fits else _LEAST_BYTES

    def keep_footer(self, split: str, footer: pq.FileMetaData) -> None:
        """Keep what the footer of a Parquet file says, if there is room."""
        if split not in self._footers and self._footer_bytes + footer.serialized_size <= _FOOTER_BYTES:
            self._footers[split] = footer
            self._footer_bytes += footer.serialized_size

    def take_footer(self, split: str) -> pq.FileMetaData | None:
        """The footer of a split's file, as it was when it was listed."""
        footer = self._footers.pop(split, None)
        if footer is not None:
            self._footer_bytes -= footer.serialized_size
        return footer

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

"""An object to read from, at any place of it, and always the same one: not one that has replaced it."""

from __future__ import annotations

import io
from collections.abc import Callable

import pyarrow as pa

from cutwater.errors import CorruptSnapshotError
from cutwater.storage.store.bucket import PART_BYTES, Bucket


class ObjectInput(pa.PythonFile):  # pyright: ignore[reportUntypedBaseClass]
    """A file of Arrow's that is an object; see ``open_object``."""

    ranges: _Ranges

    def peek(self, length: int, offset: int) -> bytes:
        """Bytes at some place; the position stays."""
        return self.ranges.at(offset, length)


def open_object(
    bucket: Bucket, key: str, size: int, tag: str, *, ahead: bool, changed: Callable[[str], Exception]
) -> ObjectInput:
    """An object; nothing is read yet.

    Args:
        bucket, key: of the object.
        size, tag: as it was listed.
        ahead: it is read from front to back, so that more is fetched than was asked for.
        changed: the error where it is another one now, or gone; takes what has happened.
    """
    ranges = _Ranges(bucket, key, size, tag, PART_BYTES if ahead else 0, changed)
    made = ObjectInput(ranges, mode="r")
    made.ranges = ranges
    return made


class _Ranges(io.RawIOBase):
    def __init__(
        self, bucket: Bucket, key: str, size: int, tag: str, ahead_bytes: int, changed: Callable[[str], Exception]
    ) -> None:
        super().__init__()
        self._bucket, self._key, self._size, self._tag = bucket, key, size, tag
        self._ahead_bytes, self._changed = ahead_bytes, changed
        self._place = 0
        self._fetched = b""
        self._fetched_from = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._size}[whence]
        self._place = max(0, base + offset)
        return self._place

    def read(self, size: int = -1, /) -> bytes:
        data = self.at(self._place, self._size - self._place if size < 0 else size)
        self._place += len(data)
        return data

    def at(self, offset: int, length: int) -> bytes:
        end = min(offset + length, self._size)
        if end <= offset:
            return b""
        if not self._ahead_bytes:
            return self._fetch(offset, end)
        begin = offset - self._fetched_from
        if begin < 0 or begin > len(self._fetched):
            self._fetched, self._fetched_from, begin = b"", offset, 0
        if self._fetched_from + len(self._fetched) < end:
            known_to = self._fetched_from + len(self._fetched)
            more = self._fetch(known_to, min(self._size, max(end, known_to + self._ahead_bytes)))
            self._fetched, self._fetched_from, begin = self._fetched[begin:] + more, offset, 0
        return self._fetched[begin : begin + end - offset]

    def _fetch(self, begin: int, end: int) -> bytes:
        try:
            data = self._bucket.get_version(self._key, self._tag, begin, end - begin)
        except CorruptSnapshotError:
            raise self._changed("it is gone") from None
        if data is None:
            raise self._changed("it is another one now")
        if len(data) < end - begin:
            raise self._changed(f"it ends before byte {end}")
        return data

"""Cuts a text file into blocks of whole rows, with the byte offset and the line number of every row.

A row ends at a newline; in CSV a newline inside a quoted field does not end it.  Offsets count in the decompressed
text.
"""

from __future__ import annotations

import itertools
import os
import re
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.connectors.files import listing
from cutwater.connectors.files.listing import FileEntry
from cutwater.connectors.text import line_kernels
from cutwater.errors import DataError
from cutwater.storage.store.object_input import ObjectInput

_NEWLINE = 10
_SHORT_LINE = 16
"""Bytes of lines that are looked for at the first try."""
_TAIL_BYTES = 1 << 14
"""The last newline of a block is looked for among so many."""
_BOMS = {b"\xef\xbb\xbf": "", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd"}

_IS_SPACE = np.zeros(256, np.bool_)
_IS_SPACE[[9, 13, 32]] = True

Offsets = npt.NDArray[np.int64]

_find_newlines: Any = line_kernels.find_newlines


class Block(NamedTuple):
    """Rows of a file: row i is ``data[starts[i]:ends[i]]``, newline included.  Blank lines are no rows."""

    data: bytes
    offset: int
    """Position of ``data`` in the file."""
    starts: Offsets
    ends: Offsets
    lines: Offsets
    """Line of the range in which each row begins, from 1."""
    end_line: int
    """Line after the block."""
    quoted_newlines: bool
    unclosed: bool
    """The block is one line whose quoted field is never closed."""


def compression_of(path: str) -> str | None:
    """Arrow's name of the compression that the file's name tells.

    >>> compression_of("flights.csv.gz")
    'gzip'
    """
    return _COMPRESSIONS.get(os.path.splitext(path)[1])


class LineBlocks:
    """Reads a file from an offset on.

    Uncompressed files are entered by a seek; compressed ones have to be decompressed up to the offset.

    Of a file that grows, what follows the last newline is no row yet; ``next_block`` may be asked again.

    Args:
        entry: the file as it was listed.
        offset: first byte to read (in the decompressed text), the start of a line.
        line: number of that line in the range, from 1.
        within: the range of bytes that is read, of whole rows; None: the file.
        quote: the quoting character of CSV; None: every newline ends a row.
        delimiter: the delimiter of CSV.
        spaces_are_blank: a line of nothing but white space is no row (an empty line never is).
        block_bytes: about how much to read at once.
        max_row_bytes: a longer row is an error.

    Raises:
        DataError: the file is gone, was changed, is not text, or its compression is damaged.
    """

    def __init__(
        self,
        entry: FileEntry,
        offset: int = 0,
        line: int = 1,
        *,
        within: tuple[int, int] | None = None,
        quote: str | None = None,
        delimiter: str = ",",
        spaces_are_blank: bool = False,
        block_bytes: int = 1 << 20,
        max_row_bytes: int = 1 << 28,
    ) -> None:
        self._entry, self._line = entry, line
        self._first, self._end = within or (0, entry.size)
        self._lines_before: int | None = 0 if self._first == 0 else None
        self._quote = quote.encode() if quote else None
        self._quoted_field = _quoted_field(quote, delimiter) if quote else None
        self._delimiter, self._spaces_are_blank = delimiter.encode(), spaces_are_blank
        self._block_bytes, self._max_row_bytes = block_bytes, max_row_bytes
        self._rest = b""
        self._ended = False
        self._compressed = compression_of(entry.path) is not None
        self._file = entry.open(ahead=True)
        try:
            compression = compression_of(entry.path)
            self._stream = pa.CompressedInputStream(self._file, compression) if compression else self._file
            self._enter(offset)
        except BaseException:
            self._file.close()
            raise

    @property
    def ended(self) -> bool:
        """True if no block will follow."""
        return self._ended and not self._rest

    @property
    def offset(self) -> int:
        """Position of the next block."""
        return self._offset

    @property
    def line(self) -> int:
        """Line of the next block's first row."""
        return self._line

    def next_block(self) -> Block | None:
        """The next block that has rows, or None at the end, which may be that for now.

        Raises:
            DataError: the file was changed meanwhile, its compression is damaged, or a row is too long.
        """
        while (block := self._next()) is not None:
            if len(block.starts):
                return block
        return None

    def first_row(self) -> tuple[bytes, int] | None:
        """The next row alone, and its line; None at the end.  Then comes what stands behind it.

        Raises:
            DataError: as ``next_block``.
        """
        block = self.next_block()
        if block is None:
            return None
        first, end, line = int(block.starts[0]), int(block.ends[0]), int(block.lines[0])
        self._rest = block.data[end:] + self._rest
        self._offset, self._line = block.offset + end, line + block.data.count(b"\n", first, end)
        return block.data[first:end], line

    def number(self, line: int) -> int:
        """Number in the file of a line of the range.  Reads what stands before the range, at the first call."""
        if self._lines_before is None:
            self._lines_before = _lines_before(self._entry, self._first)
        return self._lines_before + line

    def _next(self) -> Block | None:
        data, self._rest = self._rest, b""
        while True:
            had = len(data)
            if not self._ended:
                data += self._read(max(self._block_bytes, had))
            if not data:
                return None
            newlines = find_newlines(data)
            row_ends, quoted = self._row_ends(data, newlines)
            if len(row_ends) or self._ended:
                break
            if len(data) > self._max_row_bytes:
                return self._too_long(data, newlines)
            if len(data) == had and self._entry.grows_until is not None:
                self._rest = data  # of a row that is still being written
                return None
        if self._ended and data[-1] != _NEWLINE and not (quoted and self._open_quote(data)):
            row_ends = np.append(row_ends, len(data) - 1)
        if not len(row_ends):
            return self._unclosed(data, newlines)
        return self._block(data, newlines, row_ends, quoted)

    def close(self) -> None:
        self._stream.close()
        self._file.close()

    # -------------------------------------------------------------------------------------------------- reading

    def _enter(self, offset: int) -> None:
        self._offset = 0
        if not self._compressed:
            if self._entry.grows_until is not None and offset > self._file.size():
                raise self._entry.shrank(self._file.size(), offset)
            self._stream.seek(offset)
            self._offset = offset
        while self._offset < offset:
            got = len(self._read(min(1 << 20, offset - self._offset)))
            self._offset += got
            if self._ended and self._offset < offset:
                raise DataError(f"{self._entry.path} ends at {self._offset} bytes, before the position {offset}")
        if offset == 0:
            self._skip_bom()

    def _skip_bom(self) -> None:
        head = self._read(4)
        for bom, encoding in _BOMS.items():
            if head.startswith(bom):
                if encoding:
                    raise DataError(f"{self._entry.path} is {encoding}, not UTF-8", hint="Convert it to UTF-8.")
                head = head[len(bom) :]
                self._offset = len(bom)
        self._rest = head

    def _read(self, size: int) -> bytes:
        is_over = self._entry.is_over  # asked first: what was written before is there to be read
        if self._entry.grows_until is not None:
            self._end = max(self._stream.tell(), os.fstat(self._file.fileno()).st_size)
        try:
            data = self._stream.read(size if self._compressed else self._up_to_newline(size))
        except (OSError, pa.ArrowException) as e:
            self._entry.check(self._file)
            raise DataError(
                f"{self._entry.path} is truncated or not compressed as its name says: {e}",
                hint="Write the file again; rename it in when it is whole.",
            ) from e
        self._entry.check(self._file)
        if self._compressed:
            self._ended = len(data) < size
        else:
            self._ended = is_over and self._stream.tell() >= self._end
        return data

    def _up_to_newline(self, size: int) -> int:
        """About so many bytes, up to a newline if one is near: what is cut off as part of the next row is copied."""
        at = self._stream.tell()
        if at + size >= self._end:
            return self._end - at
        tail = min(size, _TAIL_BYTES)
        newline = _peek(self._file, tail, at + size - tail).rfind(b"\n")
        return size - tail + newline + 1 if newline >= 0 else size

    # ------------------------------------------------------------------------------------------------ row limits

    def _row_ends(self, data: bytes, newlines: Offsets) -> tuple[Offsets, bool]:
        """Newlines that end a row, and whether there are quotes in the data."""
        if self._quote is None or self._quote not in data:
            return newlines, False
        array = np.frombuffer(data, np.uint8)
        quotes = np.flatnonzero(array == self._quote[0])
        if self._regular(array, quotes):
            return newlines[np.searchsorted(quotes, newlines) % 2 == 0], True
        spans = self._spans(data)
        inside = np.searchsorted(spans[:, 0], newlines, side="right") - 1
        return newlines[(inside < 0) | (newlines >= spans[inside, 1])] if len(spans) else newlines, True

    def _regular(self, array: npt.NDArray[np.uint8], quotes: Offsets) -> bool:
        """True if every quote that opens a field by its parity stands where a field begins: then parity is exact."""
        assert self._quote is not None
        opening = quotes[::2]
        before = array[np.maximum(opening - 1, 0)]
        starts = (before == _NEWLINE) | (before == self._delimiter[0]) | (before == self._quote[0]) | (opening == 0)
        return bool(starts.all())

    def _spans(self, data: bytes) -> npt.NDArray[np.int64]:
        """Quoted fields, one by one: a quote opens only where a field begins; elsewhere it is a plain character."""
        assert self._quoted_field is not None
        spans = [m.span() for m in self._quoted_field.finditer(data)]
        return np.array(spans, dtype=np.int64).reshape(-1, 2)

    def _open_quote(self, data: bytes) -> bool:
        """True if the data end inside a quoted field."""
        assert self._quote is not None
        spans = self._spans(data)
        if not len(spans) or spans[-1, 1] < len(data):
            return False
        last = data[spans[-1, 0] : spans[-1, 1]]
        return last.count(self._quote) % 2 == 1

    def _too_long(self, data: bytes, newlines: Offsets) -> Block:
        if len(newlines):
            return self._unclosed(data, newlines)
        line = self.number(self._line)
        raise DataError(
            f"{self._entry.path} line {line}: longer than {self._max_row_bytes} bytes without an end",
            hint="Is it a text file with one row per line?",
        )

    def _unclosed(self, data: bytes, newlines: Offsets) -> Block:
        """The first line alone: whoever opened a quote there forgot to close it."""
        end = int(newlines[0]) + 1 if len(newlines) else len(data)
        block = self._block(data, newlines[:1], np.array([end - 1]), True)
        return block._replace(unclosed=True)

    def _block(self, data: bytes, newlines: Offsets, row_ends: Offsets, quoted: bool) -> Block:
        end = int(row_ends[-1]) + 1
        self._rest = data[end:]
        data = data[:end]
        ends = row_ends + 1
        starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        before = np.searchsorted(newlines, starts) if quoted else np.arange(len(starts))
        passed = int(np.searchsorted(newlines, end))
        lines = self._line + before
        blank = _blank(data, starts, ends)
        if self._spaces_are_blank:
            for row in np.flatnonzero(_IS_SPACE[np.frombuffer(data, np.uint8)[starts]]):
                blank[row] = not data[starts[row] : ends[row]].strip()
        if blank.any():
            starts, ends, lines = starts[~blank], ends[~blank], lines[~blank]
        block = Block(
            data,
            self._offset,
            starts,
            ends,
            lines,
            self._line + passed,
            quoted and passed > len(row_ends),
            False,
        )
        self._offset += end
        self._line += passed
        return block


def row_ranges(entry: FileEntry, quote: str | None) -> list[tuple[int, int]]:
    """Ranges of bytes of about ``SPLIT_BYTES`` that hold whole rows; one of the whole file where they cannot be told.

    That is so where it is compressed, and where it has quotes: a newline need not end a row there.

    Raises:
        DataError: the file is gone or was changed.
    """
    if entry.size <= listing.SPLIT_BYTES or compression_of(entry.path) is not None:
        return [(0, entry.size)]
    ends: list[int] = []
    with entry.open() as file:
        if any(encoding and _peek(file, len(bom), 0) == bom for bom, encoding in _BOMS.items()):
            return [(0, entry.size)]
        if quote is not None and _has(file, quote.encode()):
            return [(0, entry.size)]
        for target in range(listing.SPLIT_BYTES, entry.size, listing.SPLIT_BYTES):
            if not ends or target > ends[-1]:
                ends.append(_row_end(file, target))
        entry.check(file)
    ends = [end for end in ends if end < entry.size]
    return list(itertools.pairwise([0, *ends, entry.size]))


_COUNTED: dict[FileEntry, list[tuple[int, int]]] = {}
"""Of the file that was asked for last: offsets, and the lines before them."""


def _lines_before(entry: FileEntry, offset: int) -> int:
    """Lines before an offset.  Goes on from the nearest place that is known: ranges are asked one after the other."""
    known = _COUNTED.get(entry, [(0, 0)])
    at, lines = max(place for place in known if place[0] <= offset)
    with entry.open(ahead=True) as file:
        file.seek(at)
        for place in range(at, offset, 1 << 20):
            lines += file.read(min(1 << 20, offset - place)).count(b"\n")
    _COUNTED.clear()
    _COUNTED[entry] = [*known, (offset, lines)]
    return lines


def _peek(file: pa.OSFile | ObjectInput, length: int, offset: int) -> bytes:
    """Bytes at some place; the position stays."""
    return file.peek(length, offset) if isinstance(file, ObjectInput) else os.pread(file.fileno(), length, offset)


def _has(file: pa.OSFile | ObjectInput, quote: bytes) -> bool:
    file.seek(0)
    return any(quote in data for data in iter(lambda: file.read(1 << 22), b""))


def _row_end(file: pa.OSFile | ObjectInput, offset: int) -> int:
    """The place behind the first newline from an offset on; the end of the file if there is none."""
    file.seek(offset)
    for data in iter(lambda: file.read(1 << 16), b""):
        found = data.find(b"\n")
        if found >= 0:
            return offset + found + 1
        offset += len(data)
    return offset


def find_newlines(data: bytes) -> Offsets:
    """The places of all newlines.

    >>> find_newlines(b"a\\n\\nb\\n").tolist()
    [1, 2, 4]
    """
    first = np.frombuffer(data, np.uint8).ctypes.data
    room = len(data) // _SHORT_LINE + 1
    while True:
        places = np.empty(room, np.int64)
        found = _find_newlines(first, first + len(data), places)
        if found <= room:
            return places[:found]
        room = found


def _blank(data: bytes, starts: Offsets, ends: Offsets) -> npt.NDArray[np.bool_]:
    """Rows of nothing but a line end (``\\n`` or ``\\r\\n``)."""
    array = np.frombuffer(data, np.uint8)
    length = ends - starts
    return ((length == 1) & (array[starts] == _NEWLINE)) | (
        (length == 2) & (array[starts] == 13) & (array[ends - 1] == _NEWLINE)
    )


def _quoted_field(quote: str, delimiter: str) -> re.Pattern[bytes]:
    q, d = re.escape(quote).encode(), re.escape(delimiter).encode()
    inside = rb"[^" + q + rb"]*+(?:" + q * 2 + rb"[^" + q + rb"]*+)*+"
    return re.compile(rb"(?:(?<=[\n" + d + rb"])|\A)" + q + inside + q + rb"?+")

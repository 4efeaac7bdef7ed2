"""Reads a file of CSV or JSON lines from any row on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.connectors.base import PART_OF, WEIGHT, Json, SourceContext, Split
from cutwater.connectors.files.line_blocks import Block, LineBlocks, row_ranges
from cutwater.connectors.files.listing import FileEntry
from cutwater.connectors.files.schemas import (
    SchemaOrigin,
    Widened,
    cast_batch,
    check_columns,
    good_and_bad,
    name_differences,
    only,
)
from cutwater.connectors.files.text_formats import CsvFormat, JsonFormat, PlainFirst, PlainParser, TextFormat
from cutwater.errors import DataError

BLOCK_BYTES = 1 << 22
"""Bytes of a file that are parsed at once: a few milliseconds' work."""
_LEAST_BLOCK_BYTES, _TEXTS_BYTES = 1 << 20, 1 << 27
_FEW_ROWS, _MOST_BLOCKS = 1 << 14, 4
"""Blocks of wide rows are joined until they have so many, but not more blocks: a call of whatever follows costs the
same for few rows as for many, and the bytes of one block at a time stay in the cache."""
_INFER_BYTES = 1 << 20
"""Bytes of a file that are looked at to guess a schema."""
_MAX_RAW = 10_000
_MAX_REASON = 500


class _Bad(NamedTuple):
    before: int
    """The good row of the block that follows it."""
    line: int
    reason: str
    raw: str


class _Parsed(NamedTuple):
    rows: pa.RecordBatch
    offsets: npt.NDArray[np.int64]
    """Position of each good row in the file; one more for the end of the block."""
    lines: npt.NDArray[np.int64]
    bad: list[_Bad]


def _joined(parsed: list[_Parsed], schema: pa.Schema) -> _Parsed:
    """Blocks that follow each other, as one; of whose columns some may have come as dictionaries."""
    if len(parsed) == 1:
        return parsed[0]
    batches = [part.rows for part in parsed]
    if any(batch.schema != batches[0].schema for batch in batches):
        batches = [cast_batch(batch, schema) for batch in batches]
    before = np.cumsum([0, *(batch.num_rows for batch in batches)])
    return _Parsed(
        pa.concat_batches(batches),
        np.concatenate([*(part.offsets[:-1] for part in parsed[:-1]), parsed[-1].offsets]),
        np.concatenate([*(part.lines[:-1] for part in parsed[:-1]), parsed[-1].lines]),
        [
            bad._replace(before=bad.before + int(first))
            for part, first in zip(parsed, before, strict=False)
            for bad in part.bad
        ],
    )


class _Start(NamedTuple):
    """Position of the first row of a file, and its columns (of a CSV file)."""

    offset: int
    line: int
    names: list[str]


def first_block(entry: FileEntry, text: TextFormat) -> tuple[list[str], Block] | None:
    """Column names (empty for JSON) and first rows of a file; None if it holds neither."""
    start = _start(entry, text)
    with closing(_lines(entry, text, start.offset, start.line, _INFER_BYTES)) as lines:
        block = lines.next_block()
    if block is None:
        # A header without rows still tells the columns.
        none = np.empty(0, np.int64)
        return (start.names, Block(b"", 0, none, none, none, 1, False, False)) if start.names else None
    return start.names, block


def text_splits(entry: FileEntry, text: TextFormat) -> list[Split]:
    """The whole file as one split, or ranges of bytes of a big one.

    Raises:
        DataError: a big file is gone or was changed.
    """
    if entry.grows_until is not None:
        return [Split(entry.path, entry.to_data())]
    ranges = row_ranges(entry, None if isinstance(text, JsonFormat) else text.quote)
    if len(ranges) < 2 or _start(entry, text).offset > ranges[0][1]:  # blank lines before the header may be many
        return [Split(entry.path, entry.to_data())]
    return [
        Split(f"{entry.path}#{a}-{b}", {**entry.to_data(), PART_OF: entry.path, "bytes": [a, b], WEIGHT: b - a})
        for a, b in ranges
    ]


def _lines(
    entry: FileEntry,
    text: TextFormat,
    offset: int,
    line: int,
    block_bytes: int,
    within: tuple[int, int] | None = None,
) -> LineBlocks:
    if isinstance(text, JsonFormat):
        return LineBlocks(entry, offset, line, within=within, spaces_are_blank=True, block_bytes=block_bytes)
    quote, delimiter = text.quote, text.delimiter
    return LineBlocks(entry, offset, line, within=within, quote=quote, delimiter=delimiter, block_bytes=block_bytes)


def _start(entry: FileEntry, text: TextFormat) -> _Start:
    if isinstance(text, JsonFormat):
        return _Start(0, 1, [])
    with closing(_lines(entry, text, 0, 1, block_bytes=1 << 16)) as lines:
        return _begin(entry, text, lines)


def _begin(entry: FileEntry, text: CsvFormat, lines: LineBlocks) -> _Start:
    """The columns of a CSV file by its first row, which is taken from the lines."""
    found = lines.first_row()
    if found is None:
        return _Start(0, 1, [])
    data, line = found
    try:
        row = data.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise DataError(f"{entry.path} line {line}: not UTF-8", hint="Convert the file to UTF-8.") from None
    return (
        _Start(lines.offset, lines.line, text.names(row)) if text.header else _Start(0, 1, text.positional_names(row))
    )


def block_bytes_of(schema: pa.Schema) -> int:
    """Bytes to parse at once: fewer where each of very many columns of texts needs memory for all of them.

    >>> [block_bytes_of(pa.schema({f"t{n}": pa.string() for n in range(columns)})) >> 10 for columns in (4, 100, 1000)]
    [4096, 1310, 1024]
    """
    texts = sum(pa.types.is_string(kind) for kind in schema.types)
    return min(BLOCK_BYTES, max(_LEAST_BLOCK_BYTES, _TEXTS_BYTES // max(1, texts)))


class PlainParsers:
    """Parsers of plain rows, of one source: files with the same columns share one.  Used by one thread.

    Args:
        dictionaries: columns of few texts come as dictionaries.
    """

    def __init__(self, *, dictionaries: bool = False) -> None:
        self._dictionaries = dictionaries
        self._made: dict[tuple[str, ...], PlainParser | None] = {}

    def of(self, text: TextFormat, schema: pa.Schema, names: Sequence[str]) -> PlainParser | None:
        """The parser of rows with these columns, of which the schema names those that are read."""
        key = (type(text).__name__, *schema.names, "", *names)
        if key not in self._made:
            self._made[key] = text.plain(schema, names, self._dictionaries)
        return self._made[key]


class TextReader:
    """Reads one file, or a range of it; of a file that grows, what is there.

    Position: ``{"offset": byte of the next line, "line": its number}``.  Offsets count in the decompressed text, lines
    from the begin of the range.  Rows that cannot be parsed fail with file and line, or are diverted; a diverted row is
    handed over in the same call as the row before it, so that it is handed over once per replay, too.
    """

    def __init__(
        self,
        split: Split,
        position: Json | None,
        schema: pa.Schema,
        origin: SchemaOrigin,
        text: TextFormat,
        divert: SourceContext | None,
        block_bytes: int | None = None,
        columns: frozenset[str] | None = None,
        parsers: PlainParsers | None = None,
    ) -> None:
        self._entry = FileEntry.from_data(split.data)
        self._schema, self._origin, self._text, self._divert = schema, origin, text, divert
        self._read_schema = only(schema, columns) if text.passes_over else schema
        """The columns that are parsed; the others are null."""
        self._joins = block_bytes is None
        self._block_bytes = block_bytes or block_bytes_of(self._read_schema)
        self._lines, start, at = self._opened(split, position, self._block_bytes)
        self._names = self._column_names(start.names)
        self._widened = Widened(schema)
        parsers = PlainParsers() if parsers is None else parsers
        self._plain = PlainFirst(parsers.of(text, self._read_schema, self._names))
        self._parsed: _Parsed | None = None
        self._row = 0
        self._bad = 0
        self._last = (at[1], at[1])

    def _opened(
        self, split: Split, position: Json | None, block_bytes: int
    ) -> tuple[LineBlocks, _Start, tuple[int, int]]:
        """The lines from the position on, the begin of the file, and the place of its first line."""
        entry, text = self._entry, self._text
        first, end = split.data.get("bytes") or (0, entry.size)
        if position is None and first == 0 and isinstance(text, CsvFormat) and text.header:
            lines = _lines(entry, text, 0, 1, block_bytes, (first, end))
            try:
                start = _begin(entry, text, lines)
            except BaseException:
                lines.close()
                raise
            return lines, start, (start.offset, start.line)
        start = _start(entry, text)
        at = (first, 1) if first else (start.offset, start.line)
        if position is not None:
            at = (int(position["offset"]), int(position["line"]))
        return _lines(entry, text, *at, block_bytes, (first, end)), start, at

    def look(self) -> pa.RecordBatch | None:
        """The rows of the first block, which are still to be read; ``None`` if there are none.

        Raises:
            DataError: one of them is bad, or the file is.
        """
        parsed = self._parsed or self._next_parsed()
        return None if parsed is None else parsed.rows

    @property
    def holds_the_rest(self) -> bool:
        """Everything is parsed: the file is not needed any more."""
        return self._lines.ended

    def close_file(self) -> None:
        """Close the file, and keep what is parsed of it."""
        self._lines.close()

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        parsed = self._parsed or self._next_parsed()
        if parsed is None:
            return None
        first = self._row
        batch = parsed.rows.slice(first, max_rows)
        self._row = first + batch.num_rows
        at_end = self._row == parsed.rows.num_rows
        self._hand_over(parsed.bad)
        if batch.num_rows:
            self._last = (int(parsed.lines[first]), int(parsed.lines[self._row - 1]))
        if at_end:
            self._parsed = None
        return batch if batch.num_rows else None

    @property
    def position(self) -> Json:
        parsed = self._parsed
        if parsed is None:
            return {"offset": self._lines.offset, "line": self._lines.line}
        return {"offset": int(parsed.offsets[self._row]), "line": int(parsed.lines[self._row])}

    @property
    def exhausted(self) -> bool:
        return self._parsed is None and self._lines.ended

    @property
    def origin(self) -> str:
        first, last = self._last
        try:
            return f"{self._entry.path} lines {self._lines.number(first)} to {self._lines.number(last)}"
        except DataError:  # it is gone; what is to be told of is something else
            return f"{self._entry.path} lines {first} to {last} of a part of it"

    def close(self) -> None:
        self._parsed = None
        self._lines.close()

    def _next_parsed(self) -> _Parsed | None:
        """The next block, whose rows may be good or bad; or a few, if they have few rows and are there to be read."""
        if (block := self._lines.next_block()) is None:
            return None
        parts = [self._parse(block)]
        rows, most = parts[0].rows.num_rows, _MOST_BLOCKS if self._joins else 1
        while rows < _FEW_ROWS and len(parts) < most and 2 * len(block.data) >= self._block_bytes:
            if (block := self._lines.next_block()) is None:
                break
            parts.append(self._parse(block))
            rows += parts[-1].rows.num_rows
        found = _joined(parts, self._read_schema)
        self._parsed, self._row, self._bad = found._replace(rows=self._widened.widen(found.rows)), 0, 0
        return self._parsed

    def _hand_over(self, bad: list[_Bad]) -> None:
        """Divert the bad rows before the next good one: the position is behind them."""
        while self._bad < len(bad) and bad[self._bad].before <= self._row:
            item = bad[self._bad]
            assert self._divert is not None
            self._divert.dead_letter(self._entry.path, item.line, item.reason, item.raw[:_MAX_RAW])
            self._bad += 1

    # -------------------------------------------------------------------------------------------------- parsing

    def _parse(self, block: Block) -> _Parsed:
        rows = len(block.starts)
        bad: list[tuple[int, str]] = []
        good: list[range] = []
        batches: list[pa.RecordBatch] = []
        if block.unclosed:
            bad = [(0, "a quoted field begins here that is never closed")]
        else:
            result = good_and_bad(rows, lambda a, b: self._batch(block, a, b), first_only=self._divert is None)
            batches, good = result.batches, result.good
            bad = [(row, reason[:_MAX_REASON]) for row, reason in result.bad]  # it may quote a value of megabytes
        if bad and self._divert is None:
            raise self._error(block, *bad[0])
        numbers = np.concatenate([np.arange(r.start, r.stop) for r in good] or [np.empty(0, np.int64)])
        befores = np.searchsorted(numbers, [row for row, _ in bad])
        items = [
            _Bad(int(before), self._lines.number(int(block.lines[row])), reason, self._raw(block, row))
            for before, (row, reason) in zip(befores, bad, strict=True)
        ]
        if len(batches) == 1:
            table = batches[0]
        else:
            empty = pa.RecordBatch.from_pylist([], schema=self._read_schema)
            table = pa.concat_batches([empty, *(cast_batch(batch, self._read_schema) for batch in batches)])
        offsets = np.append(block.starts[numbers], len(block.data)) + block.offset
        return _Parsed(table, offsets, np.append(block.lines[numbers], block.end_line), items)

    def _batch(self, block: Block, first: int, stop: int) -> pa.RecordBatch:
        data = block.data
        if first > 0 or stop < len(block.starts):
            data = data[int(block.starts[first]) : int(block.ends[stop - 1])]
        batch = self._plain.parse(data, stop - first)
        if batch is not None:
            return batch
        return self._text.parse(data, stop - first, self._read_schema, self._names, newlines=block.quoted_newlines)

    def _raw(self, block: Block, row: int) -> str:
        data = block.data[int(block.starts[row]) : int(block.ends[row])]
        return data.decode(errors="backslashreplace").rstrip("\r\n")

    def _error(self, block: Block, row: int, reason: str) -> DataError:
        raw = self._raw(block, row)
        shown = raw if len(raw) <= 200 else f"{raw[:200]}... ({len(raw)} characters)"
        line = self._lines.number(int(block.lines[row]))
        return DataError(
            f"{self._entry.path} line {line}: {reason} (schema from {self._origin.name}): {shown}",
            hint="Correct the row, give schema=..., or read with bad_rows='dead_letter' to divert such rows.",
        )

    def _column_names(self, found: Sequence[str]) -> Sequence[str]:
        """Names of the file's columns in their order.

        Raises:
            DataError: they are not the source's.
        """
        if not isinstance(self._text, CsvFormat) or not found:
            return self._schema.names
        wanted = self._schema.names
        if not self._text.header:
            if len(found) != len(wanted):
                differences = [f"{len(found)} columns instead of {len(wanted)}"]
                check_columns(self._entry.path, differences, self._origin)
            return wanted
        check_columns(self._entry.path, name_differences(found, wanted, self._origin), self._origin)
        return found

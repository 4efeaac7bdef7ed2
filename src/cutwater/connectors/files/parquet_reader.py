"""Reads Parquet files, or ranges of their row groups, from any row on."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cutwater.connectors.base import WEIGHT, Json, PassedOver, SourceContext, Split
from cutwater.connectors.files import listing
from cutwater.connectors.files.listing import FileEntry
from cutwater.connectors.files.row_group_filters import GroupRun, RowGroupFilters, unit_us
from cutwater.connectors.files.schemas import (
    SchemaOrigin,
    Widened,
    check_columns,
    column_differences,
    good_and_bad,
    only,
    plain_schema,
)
from cutwater.data.time import MAX_WATERMARK, MIN_WATERMARK
from cutwater.errors import DataError
from cutwater.storage.store.object_input import ObjectInput

_BATCH_BYTES = 8 << 20
_BATCH_ROWS = 131_072
_HELD_BYTES = 64 << 20
"""A row group of which more is read is read in pieces; else all that is read of it is in memory at once."""
_PIECE_BYTES = 1 << 20
_MAX_RAW = 10_000


@dataclass
class _OpenFile:
    entry: FileEntry
    stream: pa.OSFile | ObjectInput
    parquet: pq.ParquetFile

    def check(self) -> None:
        self.entry.check(self.stream)

    def reopened(self, dictionaries: list[str], *, in_pieces: bool) -> _OpenFile:
        """The same file; texts of these columns come as dictionaries, and row groups need not be held whole."""
        metadata = self.parquet.metadata
        return _OpenFile(self.entry, self.stream, _parquet(self.stream, metadata, dictionaries, in_pieces=in_pieces))

    def close(self) -> None:
        self.parquet.close()
        self.stream.close()


def _open(entry: FileEntry, footer: pq.FileMetaData | None = None) -> _OpenFile:
    """The file, open; with what its footer says, if somebody has read that already."""
    if entry.size == 0:
        raise DataError(f"{entry.path} is empty (0 bytes), not even a Parquet file without rows", hint=_TRUNCATED)
    stream = entry.open()
    try:
        parquet = _parquet(stream, footer)
    except (pa.ArrowException, OSError) as e:
        stream.close()
        raise DataError(f"{entry.path} is truncated or not a Parquet file: {e}", hint=_TRUNCATED) from e
    return _OpenFile(entry, stream, parquet)


def _parquet(
    stream: pa.OSFile | ObjectInput,
    metadata: pq.FileMetaData | None = None,
    dictionaries: list[str] | None = None,
    *,
    in_pieces: bool = False,
) -> pq.ParquetFile:
    return pq.ParquetFile(
        stream,
        metadata=metadata,
        read_dictionary=dictionaries,
        buffer_size=_PIECE_BYTES if in_pieces else 0,
        pre_buffer=not in_pieces,
        coerce_int96_timestamp_unit="us",
        page_checksum_verification=True,
    )


_TRUNCATED = "Write the file again; write under a name that begins with '_' and rename it when it is whole."


def file_schema(entry: FileEntry) -> pa.Schema:
    """Columns and plain types of a file, all of them nullable.

    Raises:
        DataError: not a Parquet file, or a truncated one.
    """
    file = _open(entry)
    try:
        return pa.schema([pa.field(f.name, f.type) for f in _with_instants(file)])
    finally:
        file.close()


def _with_instants(file: _OpenFile) -> pa.Schema:
    """Columns and plain types; INT96, which has no mark of a zone, holds instants, as Spark writes and reads it."""
    leaves = (file.parquet.schema.column(i) for i in range(len(file.parquet.schema)))
    instants = {leaf.path for leaf in leaves if leaf.physical_type == "INT96"}
    plain = plain_schema(file.parquet.schema_arrow)
    return pa.schema([f.with_type(pa.timestamp("us", "UTC")) if f.name in instants else f for f in plain])


def parquet_splits(entry: FileEntry) -> list[Split]:
    """The whole file as one split, or ranges of row groups of a big one.

    Raises:
        DataError: a big file's footer cannot be read.
    """
    if entry.size <= listing.SPLIT_BYTES:
        return [Split(entry.path, entry.to_data())]
    file = _open(entry)
    try:
        metadata = file.parquet.metadata
        sizes = [_compressed_bytes(metadata.row_group(g)) for g in range(metadata.num_row_groups)]
    finally:
        file.close()
    ranges: list[tuple[int, int]] = []
    first, total = 0, 0
    for group, size in enumerate(sizes):
        total += size
        if total >= listing.SPLIT_BYTES or group == len(sizes) - 1:
            ranges.append((first, group + 1))
            first, total = group + 1, 0
    if len(ranges) < 2:
        return [Split(entry.path, entry.to_data())]
    return [
        Split(f"{entry.path}#rg{a}-{b - 1}", {**entry.to_data(), "row_groups": [a, b], WEIGHT: sum(sizes[a:b])})
        for a, b in ranges
    ]


def earliest_by_statistics(split: Split, column: str, keep: Callable[[str, pq.FileMetaData], None]) -> int | None:
    """The smallest value of a timestamp column in a split, microseconds; None if its row groups do not tell.

    The largest integer for a split without rows.

    Args:
        keep: gets the id of the split and the footer of its file.

    Raises:
        DataError: the file is gone, changed or damaged.
    """
    file = _open(FileEntry.from_data(split.data))
    try:
        metadata = file.parquet.metadata
        keep(split.id, metadata)
        first, last = split.data.get("row_groups") or (0, metadata.num_row_groups)
        groups = [metadata.row_group(g) for g in range(first, last)]
        names = [groups[0].column(c).path_in_schema for c in range(metadata.num_columns)] if groups else []
        if column not in names:
            return MAX_WATERMARK if not groups else None
        number = names.index(column)
        per_us = unit_us(file.parquet.schema.column(number))
        lowest = MAX_WATERMARK
        for group in groups:
            statistics = group.column(number).statistics
            if group.num_rows == 0:
                continue
            if per_us is None or statistics is None or not statistics.has_min_max:
                return None
            lowest = min(lowest, math.floor(statistics.min_raw * per_us))
        return lowest
    finally:
        file.close()


_DICTIONARY = pa.dictionary(pa.int32(), pa.string())
_PLACE_BYTES = 3
"""A text that does not lie in a dictionary takes four bytes for its length alone."""


def _has_dictionaries(groups: list[pq.RowGroupMetaData], column: int) -> bool:
    """Whether a column of texts lies in dictionaries, or nearly so.  Others would be hashed to come as such."""
    chunks = [group.column(column) for group in groups if group.num_rows]
    return all(c.has_dictionary_page and c.total_uncompressed_size < _PLACE_BYTES * c.num_values for c in chunks)


def _compressed_bytes(group: pq.RowGroupMetaData) -> int:
    return sum(group.column(c).total_compressed_size for c in range(group.num_columns))


class ParquetReader:
    """Reads one split.  Position: ``{"row": rows of the split consumed so far}``.

    Opening at a position skips whole row groups without reading them.
    """

    def __init__(
        self,
        split: Split,
        position: Json | None,
        schema: pa.Schema,
        origin: SchemaOrigin,
        divert: SourceContext | None,
        columns: frozenset[str] | None = None,
        dictionaries: bool = False,
        filters: RowGroupFilters | None = None,
        footer: pq.FileMetaData | None = None,
    ) -> None:
        self._schema, self._divert, self._filters = schema, divert, filters
        self._file = _open(FileEntry.from_data(split.data), footer)
        try:
            self._check_columns(origin)
            metadata = self._file.parquet.metadata
            first, last = split.data.get("row_groups") or (0, metadata.num_row_groups)
            self._read_schema = only(schema, columns)
            self._reopen(range(first, last), dictionaries)
            self._widened = Widened(self._schema)
            counts = np.array([metadata.row_group(g).num_rows for g in range(first, last)], dtype=np.int64)
            self._rows = int(counts.sum())
            self._first_row = sum(metadata.row_group(g).num_rows for g in range(first))
            self._row = 0 if position is None else int(position["row"])
            ends = np.cumsum(counts)
            skipped = int(np.searchsorted(ends, self._row, side="right"))
            self._skip = self._row - (int(ends[skipped - 1]) if skipped else 0)
            self._batches = self._stream(range(first + skipped, last), schema)
        except BaseException:
            self._file.close()
            raise
        self._pending: pa.RecordBatch | None = None  # read from the file, not yet handed out
        self._passed = PassedOver(0, MIN_WATERMARK)
        self._last = (self._row, self._row)

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        while self._row < self._rows:
            pending = self._next_raw() if self._pending is None else self._pending
            if pending is None:
                continue
            raw = pending.slice(0, max_rows)
            self._pending = pending.slice(raw.num_rows) if raw.num_rows < pending.num_rows else None
            batch = self._convert(raw)
            self._last = (self._row, self._row + raw.num_rows)
            self._row += raw.num_rows
            if batch.num_rows:
                return batch
        return None

    def take_passed_over(self) -> PassedOver | None:
        """Row groups that were left out since the last call, before the rows of the last ``read``."""
        passed, self._passed = self._passed, PassedOver(0, MIN_WATERMARK)
        return passed if passed.rows else None

    @property
    def position(self) -> Json:
        return {"row": self._row}

    @property
    def exhausted(self) -> bool:
        return self._row >= self._rows

    @property
    def origin(self) -> str:
        first, end = (self._first_row + r for r in self._last)
        return f"{self._file.entry.path} rows {first} to {end - 1}"

    def close(self) -> None:
        self._pending = None
        self._batches = iter(())
        self._file.close()

    def _check_columns(self, origin: SchemaOrigin) -> None:
        # With a given schema INT96 may also be read as it lies there, without zone: timestamp_ntz.
        found = plain_schema(self._file.parquet.schema_arrow) if origin.given else _with_instants(self._file)
        check_columns(self._file.entry.path, column_differences(found, self._schema, origin), origin)

    def _reopen(self, groups: range, dictionaries: bool) -> None:
        """Have texts come as dictionaries where they lie so, and large row groups in pieces."""
        names, in_pieces = self._dictionary_columns(groups) if dictionaries else [], self._is_large(groups)
        if names or in_pieces:
            self._file = self._file.reopened(names, in_pieces=in_pieces)
            self._schema, self._read_schema = (_as_dictionaries(s, names) for s in (self._schema, self._read_schema))

    def _is_large(self, groups: range) -> bool:
        """Whether too much is read of a row group to be held in memory."""
        if self._file.entry.size <= _HELD_BYTES:
            return False
        places = self._places()
        chunks = [self._file.parquet.metadata.row_group(g) for g in groups]
        return any(sum(group.column(c).total_compressed_size for c in places) > _HELD_BYTES for group in chunks)

    def _dictionary_columns(self, groups: range) -> list[str]:
        """Columns of texts that lie in dictionaries."""
        metadata = self._file.parquet.metadata
        places = {metadata.schema.column(c).path: c for c in range(metadata.num_columns)}
        found = plain_schema(self._file.parquet.schema_arrow)
        chunks = [metadata.row_group(g) for g in groups]
        return [
            field.name
            for field in self._read_schema
            if field.type == found.field(field.name).type == pa.string()
            and _has_dictionaries(chunks, places[field.name])
        ]

    def _stream(self, groups: range, schema: pa.Schema) -> Iterator[pa.RecordBatch | GroupRun]:
        """Batches of the rows that are read, and the runs of row groups that are not."""
        if self._filters is None:
            yield from self._batches_of(groups)
            return
        for run in self._filters.runs(self._file.parquet, schema, groups):
            if run.is_read:
                yield from self._batches_of(run.groups)
            else:
                yield run

    def _batches_of(self, groups: range) -> Iterator[pa.RecordBatch]:
        chunks = [self._file.parquet.metadata.row_group(g) for g in groups]
        rows, places = max(1, sum(group.num_rows for group in chunks)), self._places()
        total = sum(group.column(c).total_uncompressed_size for group in chunks for c in places)
        fitting = min(_BATCH_ROWS, max(1, _BATCH_BYTES * rows // max(1, total)))
        # Equal shares of a row group, or whole ones: rows of two that have dictionaries of their own come in pieces.
        largest = max((group.num_rows for group in chunks if group.num_rows), default=1)
        batch_rows = (
            math.ceil(largest / math.ceil(largest / fitting)) if largest > fitting else fitting // largest * largest
        )
        return self._file.parquet.iter_batches(
            batch_size=batch_rows, row_groups=list(groups), columns=self._read_schema.names, use_threads=False
        )

    def _places(self) -> list[int]:
        """Where the columns that are read, or the parts of nested ones, lie in a row group."""
        schema, names = self._file.parquet.schema, frozenset(self._read_schema.names)
        parts = tuple(f"{name}." for name in names)
        paths = [schema.column(c).path for c in range(len(schema))]
        return [c for c, path in enumerate(paths) if path in names or path.startswith(parts)]

    def _next_raw(self) -> pa.RecordBatch | None:
        """The next batch as it is in the file; what the position skips is left out.  None: rows were left out."""
        while True:
            try:
                raw = next(self._batches)
                self._file.check()
            except StopIteration:
                self._damaged("it has fewer rows than its footer says")
            except (pa.ArrowException, OSError) as e:
                self._damaged(str(e))
            if isinstance(raw, GroupRun):
                rows, self._skip = raw.rows - self._skip, 0
                self._row += rows
                self._passed = PassedOver(self._passed.rows + rows, max(self._passed.latest_us, raw.latest_us))
                return None
            if raw.num_rows <= self._skip:
                self._skip -= raw.num_rows
                continue
            raw, self._skip = raw.slice(self._skip), 0
            if raw.num_rows:
                return raw

    def _damaged(self, what: str) -> NoReturn:
        self._file.check()
        row = self._first_row + self._row
        raise DataError(f"{self._file.entry.path} is damaged at or after row {row}: {what}", hint=_TRUNCATED)

    def _convert(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        """Rows with the source's schema; rows that do not fit it fail or are diverted."""
        try:
            return self._widened.widen(self._cast(raw))
        except (pa.ArrowException, ValueError):
            pass
        result = good_and_bad(
            raw.num_rows, lambda a, b: self._cast(raw.slice(a, b - a)), first_only=self._divert is None
        )
        for row, reason in result.bad:
            text = json.dumps(raw.slice(row, 1).to_pylist()[0], default=str)[:_MAX_RAW]
            number = self._first_row + self._row + row
            if self._divert is None:
                raise DataError(
                    f"{self._file.entry.path} row {number}: {reason}: {text[:300]}",
                    hint="Correct the row, or read with bad_rows='dead_letter' to divert such rows.",
                )
            self._divert.dead_letter(self._file.entry.path, number, reason, text)
        empty = pa.RecordBatch.from_pylist([], schema=self._read_schema)
        return self._widened.widen(pa.concat_batches([empty, *result.batches]))

    def _cast(self, raw: pa.RecordBatch) -> pa.RecordBatch:
        columns: list[pa.Array] = []
        for field in self._read_schema:
            column = raw.column(field.name)
            if isinstance(column, pa.ExtensionArray):
                column = column.storage
            if not column.type.equals(field.type):
                column = _as_dictionary(column) if field.type.equals(_DICTIONARY) else column.cast(field.type)
            if not field.nullable and column.null_count:
                raise ValueError(f"column {field.name!r} is null and the schema says it is not")
            columns.append(column)
        return pa.RecordBatch.from_arrays(columns, schema=self._read_schema)


def _as_dictionaries(schema: pa.Schema, names: list[str]) -> pa.Schema:
    return pa.schema([field.with_type(_DICTIONARY) if field.name in names else field for field in schema])


def _as_dictionary(column: pa.DictionaryArray) -> pa.DictionaryArray:
    """Indices and values of the types of ``_DICTIONARY``."""
    indices, values = column.indices.cast(_DICTIONARY.index_type), column.dictionary.cast(_DICTIONARY.value_type)
    return pa.DictionaryArray.from_arrays(indices, values)

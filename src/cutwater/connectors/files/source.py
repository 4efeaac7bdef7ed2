"""Files as a replayable source: Parquet, CSV and JSON lines, of a fixed set or in a directory that keeps growing."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import pyarrow as pa

from cutwater.config import parse_duration_ms
from cutwater.connectors.base import (
    BadRows,
    Json,
    SourceContext,
    Split,
    SplitReader,
    check_rate,
    earliest_of,
    earliest_of_first_row,
)
from cutwater.connectors.files.line_blocks import compression_of
from cutwater.connectors.files.listing import (
    FileEntry,
    absolute_paths,
    has_whole_line,
    is_there,
    list_files,
    marker_path,
)
from cutwater.connectors.files.look_interval import LookInterval
from cutwater.connectors.files.looked_into import LookedInto
from cutwater.connectors.files.parquet_reader import ParquetReader, earliest_by_statistics, file_schema, parquet_splits
from cutwater.connectors.files.row_group_filters import RowGroupFilters
from cutwater.connectors.files.schemas import SchemaOrigin
from cutwater.connectors.files.text_formats import CsvFormat, JsonFormat, TextFormat
from cutwater.connectors.files.text_reader import TextReader, first_block, text_splits
from cutwater.connectors.files.watched_files import WatchedFiles
from cutwater.data.schema_text import as_schema
from cutwater.errors import BuildError, ConfigError, DataError
from cutwater.operators.row_filters import RowFilter
from cutwater.storage.store.objects import is_object

FileFormat = Literal["parquet", "csv", "json"]

_FORMATS: dict[str, FileFormat] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "csv",
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
}


class FileSource:
    """Files read in the order of their paths.

    Bounded: the files that are there when the job starts.  With ``watch`` the directory is asked for new files again
    and again; a file counts once it has not been changed for ``settle_ms`` (0: at once, for writers that rename whole
    files in), and must never change afterwards.  With ``follow`` lines may be appended to texts, and are read as they
    come: a file counts as soon as its first line is whole.  Names that begin with ``.`` or ``_`` or end with ``.tmp``
    or ``.crc`` never count.

    Without ``schema`` the first file tells it: Parquet by its footer, CSV and JSON lines by their first rows (about
    1 MiB).  All files must have its columns; a Parquet column may be narrower.  In JSON a missing field is null.
    With ``schema`` columns that it does not name are not read.

    Args:
        path: file, directory (at every depth), glob, or a list of them.
        format: None tells it by the names (``.gz``, ``.bz2``, ``.zst`` may follow on text files).
        time_ordered: as of ``cw.files``, whose other arguments have the same names here.  Files to come need not be
            looked into then, and hold time back only as far as the next one does.
        header: without them columns of CSV are called ``_c0``, ``_c1`` ... or as ``schema`` says.
        timestamp_formats: with them a time without zone in a column with zone is local time there.

    Raises:
        BuildError: no such path, an unknown format, a schema that the format cannot hold.
        ConfigError: an option is wrong.
    """

    replayable = True

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        format: FileFormat | None = None,
        schema: pa.Schema | str | None = None,
        rate: float | None = None,
        bad_rows: BadRows = "fail",
        watch: bool = False,
        follow: bool = False,
        discover_interval_ms: float | str | timedelta | None = None,
        settle_ms: float | str | timedelta = 2000.0,
        end_marker: str | os.PathLike[str] | None = None,
        time_ordered: bool = False,
        header: bool = True,
        delimiter: str | None = None,
        quote: str | None = '"',
        null_values: Sequence[str] = ("",),
        timestamp_formats: Sequence[str] = (),
    ) -> None:
        if format is not None and format not in _FORMATS.values():
            raise BuildError(f"files: unknown format {format!r}", hint="There are 'parquet', 'csv' and 'json'.")
        check_rate(rate)
        if bad_rows not in ("fail", "dead_letter"):
            raise ConfigError(f"files: bad_rows is 'fail' or 'dead_letter', got {bad_rows!r}")
        self.paths = absolute_paths(path)
        objects = any(map(is_object, self.paths))
        if follow and objects:
            raise BuildError("files: objects cannot be followed", hint="Nothing is ever appended to one.")
        self._looks = LookInterval(discover_interval_ms, costly=objects)
        for name, given in (("end_marker", end_marker is not None), ("follow", follow)):
            if given and not watch:
                raise ConfigError(f"files: {name} needs watch=True")
        for name, mark in (("delimiter", delimiter), ("quote", quote)):
            if mark is not None and (len(mark.encode()) != 1 or mark in "\r\n"):
                raise ConfigError(f"files: {name} must be one ASCII character, got {mark!r}")
        self.bad_rows: BadRows = bad_rows
        self._format: FileFormat | None = format
        self.rate, self._watch, self._follow = rate, watch, follow
        self._settle_ms = parse_duration_ms(settle_ms, name="settle_ms")
        self.time_ordered = time_ordered
        self._end_marker = None if end_marker is None else marker_path(end_marker, self.paths)
        self._header, self._delimiter, self._quote = header, delimiter, quote
        self._null_values, self._timestamp_formats = tuple(null_values), tuple(timestamp_formats)
        self._schema: pa.Schema | None = None if schema is None else as_schema(schema)
        self._origin = SchemaOrigin("the given schema", given=schema is not None)
        self._checked = False
        self._read: frozenset[str] | None = None
        self._dictionaries = False
        self._filters: RowGroupFilters | None = None
        self._looked_into = LookedInto(dictionaries=False)
        self._complete = self._saw_end = self._discovered = False
        # Only the driver needs these: what was found so far, and sizes and times seen of files not yet settled.
        self._known: dict[str, tuple[FileEntry, list[Split]]] = {}
        self._unsettled: dict[str, tuple[FileEntry, float]] = {}
        self._watched = WatchedFiles(self.paths)

    def __repr__(self) -> str:
        return f"FileSource({', '.join(self.paths)!r}, format={self._format!r}, watch={self._watch})"

    def __getstate__(self) -> dict[str, Any]:
        fresh = {"_known": {}, "_unsettled": {}, "_watched": WatchedFiles(self.paths)}
        return {**self.__dict__, **fresh, "_looked_into": LookedInto(self._dictionaries)}

    # ------------------------------------------------------------------------------------------------- the seam

    @property
    def schema(self) -> pa.Schema:
        """Schema of the rows; looks at the first file once, unless it was given.

        Raises:
            BuildError: no file to take a schema from, or a schema that the format cannot hold.
            DataError: the first file cannot be read.
        """
        schema = self._infer() if self._schema is None else self._schema
        if not self._checked:
            if not schema.names:
                raise BuildError("files: a schema without columns")
            for file_format in sorted(self._formats()):
                text = self._text(file_format)
                if text is not None:
                    text.check(schema)
        self._schema, self._checked = schema, True
        return schema

    @property
    def discover_interval_ms(self) -> float:
        """Until the driver looks for new files again."""
        return self._looks.interval_ms

    @property
    def interleave(self) -> bool:
        """Files that are followed never end, so that they take turns."""
        return self._follow

    @property
    def bounded(self) -> bool:
        """False while a watched directory may still grow.

        The end marker makes it True: at once if the first ``discover`` sees it, otherwise one call after the one that
        returned the last splits, so that these have surely reached whoever asks.
        """
        return not self._watch or self._complete

    @property
    def ended(self) -> bool:
        """True once no new splits will come: ``discover`` has returned all."""
        return self.bounded

    def with_bad_rows(self, bad_rows: BadRows) -> FileSource:
        """A copy that fails at bad rows or diverts them."""
        copy = FileSource.__new__(type(self))
        copy.__dict__.update(self.__getstate__(), bad_rows=bad_rows)
        return copy

    def reading(self, columns: frozenset[str] | None, *, dictionaries: bool = False) -> FileSource:
        """A copy of which nobody reads other columns than these: those are null, whatever the files say.

        With ``dictionaries`` texts come as such where the files have them so, or a column has few values.
        """
        copy = FileSource.__new__(type(self))
        looked_into = LookedInto(dictionaries)
        copy.__dict__.update(self.__getstate__(), _read=columns, _dictionaries=dictionaries, _looked_into=looked_into)
        return copy

    @property
    def passes_over_by(self) -> list[str]:
        """Filters by which row groups of Parquet may be left out; none at a pace, or where bad rows must be found."""
        if self._filters is None or self.bad_rows != "fail" or self.rate is not None:
            return []
        return self._filters.told if "parquet" in self._formats() else []

    def passing_over(self, filters: tuple[RowFilter, ...], event_time: str | None) -> FileSource:
        """A copy that leaves out row groups of Parquet of which no row fulfils all of the filters."""
        copy = FileSource.__new__(type(self))
        copy.__dict__.update(self.__getstate__(), _filters=RowGroupFilters(filters, event_time))
        return copy

    def discover(self) -> list[Split]:
        """One split per file, or several of a big one; sorted by path.

        Raises:
            BuildError: a path is gone.
            DataError: a file changed after it had been found, or a big Parquet file is damaged.
        """
        began_s = time.perf_counter()
        # First the marker, then the files: what was renamed in before the marker is then seen for certain.
        ended = self._end_marker is not None and is_there(self._end_marker)
        if self._watch:
            splits = self._look(ended)
        else:
            splits = [split for entry in self._list() for split in self._splits(entry)]
        self._complete = ended and (self._saw_end or not self._discovered)
        self._saw_end, self._discovered = ended, True
        self._looks.took(time.perf_counter() - began_s)
        return splits

    def open(self, split: Split, position: Json | None, ctx: SourceContext) -> SplitReader:
        """A reader at ``position``.

        Raises:
            DataError: the file is gone, changed, damaged, or has other columns.
        """
        divert = ctx if self.bad_rows == "dead_letter" else None
        schema = self.schema if self._schema is None else self._schema
        text = self._text(self._file_format(split.data["file"]))
        if text is None:
            if divert is not None:  # dead letters are whole rows
                return ParquetReader(split, position, schema, self._origin, divert)
            reads = (self._read, self._dictionaries, self._filters, self._looked_into.take_footer(split.id))
            return ParquetReader(split, position, schema, self._origin, None, *reads)
        looked_into = self._looked_into.take(split.id) if position is None else None
        parsers = self._looked_into.parsers
        return looked_into or TextReader(
            split, position, schema, self._origin, text, divert, columns=self._read, parsers=parsers
        )

    def earliest_time(self, split: Split, column: str, bound_us: int) -> int | None:
        """See ``earliest.earliest_time``: of Parquet by its statistics, of texts by the first line that has a time.

        Raises:
            DataError: the file is gone, changed, damaged, or has other columns.
        """
        schema = self.schema if self._schema is None else self._schema
        text = self._text(self._file_format(split.data["file"]))
        if text is not None:
            return self._earliest_of_text(split, schema, text, column, bound_us)
        told = earliest_by_statistics(split, column, self._looked_into.keep_footer)
        if told is not None:
            return told
        return earliest_of_first_row(ParquetReader(split, None, schema, self._origin, None), column, bound_us)

    def _earliest_of_text(
        self, split: Split, schema: pa.Schema, text: TextFormat, column: str, bound_us: int
    ) -> int | None:
        """By the first row that has a time.  A small file is parsed here once and for all."""
        entry, parsers = FileEntry.from_data(split.data), self._looked_into.parsers
        look_bytes = self._looked_into.look_bytes(entry)
        reader = TextReader(
            split, None, schema, self._origin, text, None, look_bytes, columns=self._read, parsers=parsers
        )
        kept = False
        try:
            found = earliest_of(reader.look(), column, bound_us, ended=reader.holds_the_rest)
            kept = self._looked_into.keep(split.id, entry, reader)
        finally:
            if not kept:
                reader.close()
        return found

    # ---------------------------------------------------------------------------------------------- files, formats

    def _list(self) -> list[FileEntry]:
        """The files that are there now, without the end marker."""
        found = list_files(self.paths, may_be_empty=self._watch)
        return [entry for entry in found if entry.path != self._end_marker]

    def _look(self, ended: bool) -> list[Split]:
        """What of watched folders is to be read: files that are new, if they are settled, and those found before.

        Whether these are as they were is seen in turns where they are many; their readers look, too.
        """
        watched, known, now_s = self._watched, self._known, time.monotonic()
        files = watched.looks.look(anew=ended)
        news = files is not watched.files
        if news:
            watched.files = files
            watched.fresh = [file for file in files if file not in known and file != self._end_marker]
        entries = watched.entries(watched.fresh)
        for entry in watched.take_turn():
            if entry.path in known:
                self._splits(entry)
        settled = [entry for entry in entries if ended or self._settled(entry, now_s)]
        for entry in settled:
            self._splits(entry)
        if settled:
            watched.fresh = [file for file in watched.fresh if file not in known]
        if settled or news:
            watched.splits = [split for file in files if file in known for split in known[file][1]]
        return watched.splits

    def _settled(self, entry: FileEntry, now_s: float) -> bool:
        """True once the file may be taken: long unchanged by its own time, or by what was seen of it."""
        if self._follow:
            return has_whole_line(entry.path)
        if self._settle_ms == 0 or is_object(entry.path):  # an object is whole once it is there
            return True
        assert entry.mtime_ns is not None
        if time.time_ns() - entry.mtime_ns >= self._settle_ms * 1e6:
            return True
        seen = self._unsettled.get(entry.path)
        if seen is None or seen[0] != entry:
            self._unsettled[entry.path] = (entry, now_s)
            return False
        return (now_s - seen[1]) * 1e3 >= self._settle_ms

    def _splits(self, entry: FileEntry) -> list[Split]:
        known = self._known.get(entry.path)
        if known is None:
            entry = self._listed(entry)
            text = self._text(self._file_format(entry.path))
            if self._follow and (text is None or compression_of(entry.path) is not None):
                raise BuildError(
                    f"files: {entry.path} cannot be followed: its format is not made for being appended to",
                    hint="follow=True is for CSV and JSON lines without compression.",
                )
            splits = parquet_splits(entry) if text is None else text_splits(entry, text)
            self._known[entry.path] = (entry, splits)
            self._unsettled.pop(entry.path, None)
            return splits
        if known[0] != self._listed(entry) and not (self._follow and entry.size >= known[0].size):
            raise DataError(
                f"{entry.path} was changed or replaced after the job had found it",
                hint="Input files must not change: add new files under new names.",
            )
        return known[1]

    def _listed(self, entry: FileEntry) -> FileEntry:
        """Identity of a file, by which a change of it is noticed."""
        return entry._replace(mtime_ns=None, grows_until=self._end_marker or "") if self._follow else entry

    def _formats(self) -> set[FileFormat]:
        """The formats of the files that are there now."""
        if self._format is not None:
            return {self._format}
        return {self._file_format(entry.path) for entry in self._list()}

    def _file_format(self, path: str) -> FileFormat:
        """The format given, or the one that the name of a file tells."""
        if self._format is not None:
            return self._format
        stem = path if compression_of(path) is None else os.path.splitext(path)[0]
        found = _FORMATS.get(os.path.splitext(stem)[1].lower())
        if found is None:
            raise BuildError(
                f"files: cannot tell the format of {path!r} by its name",
                hint="Give format='parquet', 'csv' or 'json', or a path that leaves such files out.",
            )
        return found

    def _text(self, file_format: FileFormat) -> TextFormat | None:
        if file_format == "csv":
            tabs = self._delimiter is None and all(".tsv" in os.path.basename(p) for p in self.paths)
            delimiter = self._delimiter or ("\t" if tabs else ",")
            return CsvFormat(self._header, delimiter, self._quote, self._null_values, self._timestamp_formats)
        if file_format == "json":
            return JsonFormat(self._timestamp_formats, ignore_unknown=self._origin.given)
        return None

    def _infer(self) -> pa.Schema:
        """The schema of the first file that tells one; its name goes into messages."""
        for entry in self._list():
            text = self._text(self._file_format(entry.path))
            if text is None:
                schema = file_schema(entry)
            else:
                first = first_block(self._listed(entry), text)
                if first is None:
                    continue
                schema = text.infer(first[1], first[0])
            repeated = sorted({name for name in schema.names if schema.names.count(name) > 1})
            if repeated:
                raise BuildError(f"{entry.path}: column {repeated[0]!r} is there more than once")
            if len(schema):
                self._origin = SchemaOrigin(entry.path, given=False)
                return schema
        raise BuildError(
            f"files: no rows in {', '.join(map(repr, self.paths))} to take a schema from",
            hint="Give schema='k long, ...'.",
        )

"""Reads a table: one of its files as a split, or what comes with each later version."""

from __future__ import annotations

import os
import time
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq

from cutwater.connectors.base import SIZE, Json, Split
from cutwater.connectors.delta.columns import partition_column
from cutwater.connectors.delta.log import Entry, FileAction, newest_entry, read_entry
from cutwater.connectors.delta.table import described, opened
from cutwater.connectors.delta.target import same_type
from cutwater.connectors.files.parquet_reader import ParquetReader
from cutwater.connectors.files.schemas import SchemaOrigin
from cutwater.data.changes import OP
from cutwater.data.words import batch_of
from cutwater.errors import BuildError, DataError

_compute: Any = pyarrow.compute
_CHANGE_TYPE = "_change_type"
_OPS = {"delete": "-D", "update_preimage": "-U", "insert": "+I", "update_postimage": "+U"}
_REMOVED, _ADDED = ("delete", "update_preimage"), ("insert", "update_postimage")
_ORIGIN = SchemaOrigin("the Delta table", given=True)
_VERSIONS_PER_READ = 256
_VACUUMED = (
    "Versions can be read for as long as the table keeps them (VACUUM, delta.logRetentionDuration, "
    "delta.deletedFileRetentionDuration). Start the job anew, with start= where it is to begin."
)


class Rows(NamedTuple):
    """What is read of a table."""

    path: str
    schema: pa.Schema
    """Of the rows; with ``changes``, ``op`` among them."""
    columns: frozenset[str] | None
    """Those that somebody reads; ``None``: all."""
    changes: bool


class Unit(NamedTuple):
    """A file, and what its rows are."""

    file: FileAction
    op: str | None
    """Of all its rows, in an updating stream; ``None``: each row says what it is, or there is no mark."""
    kinds: tuple[str, ...] = ()
    """Of a file of changes: the rows of it that count."""


class FileReader:
    """Rows of one file, with the columns that the table has now.

    Position: the next row of the file.

    Args:
        rows: what is read.
        unit: the file.
        row: position to begin at.

    Raises:
        DataError: the file is gone, damaged, or has columns of other types.
    """

    def __init__(self, rows: Rows, unit: Unit, row: int) -> None:
        self._unit = unit
        path = _path_of(rows.path, unit.file)
        try:
            footer = pq.read_metadata(path)
        except FileNotFoundError:
            raise DataError(f"{path} of the Delta table is not there any more", hint=_VACUUMED) from None
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} cannot be read: {error}", hint="Is it whole? Look at the disk.") from error
        partition = unit.file.partition_values or {}
        there = set(footer.schema.to_arrow_schema().names) - set(partition)
        found = [field for field in rows.schema if field.name in there]
        wanted = None if rows.columns is None else frozenset(rows.columns & {field.name for field in found})
        if unit.kinds:
            found.append(pa.field(_CHANGE_TYPE, pa.string()))
            wanted = None if wanted is None else wanted | {_CHANGE_TYPE}
        if not found:  # all columns came later; some column tells how many rows there are
            found = [footer.schema.to_arrow_schema().field(0)]
        split = Split(path, {"file": path, SIZE: os.path.getsize(path), "mtime_ns": None})
        self._schema, self._partition = rows.schema, partition
        self._reader = ParquetReader(
            split, {"row": row}, pa.schema(found), _ORIGIN, None, columns=wanted, footer=footer
        )

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """The next rows; perhaps none of many."""
        raw = self._reader.read(max_rows)
        if raw is None:
            return None
        kinds = None
        if self._unit.kinds:
            counts = _compute.is_in(raw.column(_CHANGE_TYPE), value_set=pa.array(self._unit.kinds))
            raw = raw.filter(counts)
            kinds = raw.column(_CHANGE_TYPE)
        columns: list[pa.Array] = []
        for field in self._schema:
            if field.name == OP and (kinds is not None or self._unit.op is not None):
                columns.append(_ops(kinds) if kinds is not None else pa.repeat(pa.scalar(self._unit.op), raw.num_rows))
            elif field.name in self._partition:
                columns.append(partition_column(self._partition[field.name], field, raw.num_rows))
            elif field.name in raw.schema.names:
                columns.append(raw.column(field.name))
            else:
                columns.append(pa.nulls(raw.num_rows, field.type))
        return batch_of(columns, self._schema)

    @property
    def row(self) -> int:
        """The next row."""
        return self._reader.position["row"]

    @property
    def exhausted(self) -> bool:
        return self._reader.exhausted

    @property
    def origin(self) -> str:
        return self._reader.origin

    def close(self) -> None:
        self._reader.close()


def _ops(kinds: pa.Array) -> pa.Array:
    places = _compute.index_in(kinds, value_set=pa.array(list(_OPS)))
    return pa.array(list(_OPS.values())).take(places)


def _path_of(table: str, file: FileAction) -> str:
    """Where a file lies.

    Raises:
        DataError: outside of the table's folder.
    """
    name = file.file
    if ":" in name.partition("/")[0] or name.startswith("/") or ".." in name.split("/"):
        raise DataError(
            f"the Delta table {table!r} has a file elsewhere, {file.path!r}",
            hint="A shallow clone is read with Spark: pass the DataFrame to flow.read.",
        )
    return os.path.join(table, name)


class SnapshotFileReader:
    """A file of the table as it was at the start.  Position: ``{"version", "file", "row"}``, as of ``LogReader``."""

    def __init__(self, rows: Rows, data: Json, position: Json | None) -> None:
        self._version = data["version"]
        self._file = data["file"]
        action = FileAction(data["path"], True, data["partition"], data[SIZE])
        self._reader = FileReader(
            rows, Unit(action, "+I" if rows.changes else None), 0 if position is None else position["row"]
        )

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """See ``SplitReader``."""
        return self._reader.read(max_rows)

    @property
    def position(self) -> Json:
        return {"version": self._version, "file": self._file, "row": self._reader.row}

    @property
    def exhausted(self) -> bool:
        return self._reader.exhausted

    @property
    def origin(self) -> str:
        return self._reader.origin

    def close(self) -> None:
        self._reader.close()


class LogReader:
    """What comes with each version.  Position: ``{"version", "file", "row"}`` of the next row; files count from 0.

    Args:
        rows: what is read.
        begin: position to begin at.
        end: the last version that is read; ``None``: it never ends.
        look_interval_s: between two looks for the next version.
        ignore_deletes: versions that only delete are passed over.
    """

    def __init__(self, rows: Rows, begin: Json, end: int | None, look_interval_s: float, ignore_deletes: bool) -> None:
        self._rows, self._end, self._ignore_deletes = rows, end, ignore_deletes
        self._version, self._file, self._row = int(begin["version"]), int(begin["file"]), int(begin["row"])
        self._look_interval_s, self._looked_s = look_interval_s, float("-inf")
        self._units: list[Unit] | None = None
        self._reader: FileReader | None = None
        self._origin = f"{rows.path} version {self._version}"

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """See ``SplitReader``.

        Raises:
            DataError: a version is gone, or cannot be read as rows that are added.
        """
        for _ in range(_VERSIONS_PER_READ):
            if self.exhausted or (self._units is None and not self._next_version()):
                return None
            batch = self._read_on(max_rows)
            if batch is not None and batch.num_rows:
                return batch
        return None

    def _read_on(self, max_rows: int) -> pa.RecordBatch | None:
        """Rows of the file that is read; ``None``: it, or its version, has ended."""
        assert self._units is not None
        if self._file >= len(self._units):
            self._version, self._file, self._row, self._units = self._version + 1, 0, 0, None
            return None
        if self._reader is None:
            self._reader = FileReader(self._rows, self._units[self._file], self._row)
        batch = self._reader.read(max_rows)
        self._row, self._origin = self._reader.row, f"{self._reader.origin}, version {self._version}"
        if self._reader.exhausted:
            self._reader.close()
            self._reader, self._file, self._row = None, self._file + 1, 0
        return batch

    def _next_version(self) -> bool:
        """Whether it is there."""
        now_s = time.monotonic()
        if now_s - self._looked_s < self._look_interval_s:
            return False
        entry = read_entry(self._rows.path, self._version)
        if entry is None:
            self._looked_s = now_s
            self._check_not_gone()
            return False
        if any(action.metadata is not None or action.protocol is not None for action in entry.actions):
            self._check_table(entry)
        self._units = self._units_of(entry)
        return True

    def _check_not_gone(self) -> None:
        newest = newest_entry(self._rows.path)
        if newest is not None and newest > self._version and read_entry(self._rows.path, self._version) is None:
            raise DataError(
                f"version {self._version} of the Delta table {self._rows.path!r} is gone from its log",
                hint=_VACUUMED,
            )
        if newest is None or newest < self._version - 1:
            raise DataError(
                f"the Delta table {self._rows.path!r} ends at version {newest}, and had been read up to "
                f"{self._version - 1}: it was made anew",
                hint="Start a job of another name on the new table.",
            )

    def _check_table(self, entry: Entry) -> None:
        """Whether the table is still one that is read here, with the columns that it had.

        Raises:
            DataError: it is not.
        """
        handle = opened(self._rows.path, entry.version)
        if handle is None:
            raise DataError(f"the Delta table {self._rows.path!r} is gone", hint=_VACUUMED)
        found = described(handle)
        try:
            found.asked.refuse_to_read(self._rows.path)
        except BuildError as error:
            raise DataError(f"version {entry.version}: {error.message}", hint=error.hint) from error
        for field in found.schema:
            known = field.name in self._rows.schema.names
            if not known or not same_type(self._rows.schema.field(field.name).type, field.type):
                raise DataError(
                    f"since version {entry.version} the Delta table {self._rows.path!r} has a column {field.name!r} "
                    f"of {field.type}, which it had not when the job was started",
                    hint="Start the job again: it then reads the columns that the table has now.",
                )

    def _units_of(self, entry: Entry) -> list[Unit]:
        """The files of a version, in the order in which they are read."""
        files = [*entry.added, *entry.removed]
        if any(file.deletion_vector is not None for file in files):
            raise DataError(
                f"version {entry.version} of the Delta table {self._rows.path!r} deletes rows by deletion vectors, "
                "which this source does not read",
                hint="Unset delta.enableDeletionVectors, or read with Spark and pass the DataFrame to flow.read.",
            )
        if self._rows.changes:
            return _changes_of(entry)
        if not entry.removed:
            return [Unit(file, None) for file in entry.added]
        if self._ignore_deletes and not entry.added and not entry.changes:
            return []
        what = "updates or rewrites rows" if entry.added else "deletes rows"
        besides = "" if entry.added else " Or pass over such versions: ignore_deletes=True."
        raise DataError(
            f"version {entry.version} of the Delta table {self._rows.path!r} {what}, which is no row that is added",
            hint=f"Read it as an updating stream: changes=True.{besides}",
        )

    @property
    def position(self) -> Json:
        return {"version": self._version, "file": self._file, "row": self._row}

    @property
    def exhausted(self) -> bool:
        return self._end is not None and self._version > self._end

    @property
    def origin(self) -> str:
        return self._origin

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None


def _changes_of(entry: Entry) -> list[Unit]:
    """What leaves with a version, then what comes: a key that is updated is gone before it is there again."""
    if entry.changes:
        return [Unit(file, None, kinds) for kinds in (_REMOVED, _ADDED) for file in entry.changes]
    return [*(Unit(file, "-D") for file in entry.removed), *(Unit(file, "+I") for file in entry.added)]

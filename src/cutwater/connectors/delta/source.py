"""A table as a replayable source: its rows at a version, and what comes with each later one."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from cutwater.config import parse_duration_ms
from cutwater.connectors.base import SIZE, Json, SourceContext, Split, SplitReader, check_rate
from cutwater.connectors.delta.log import active_files
from cutwater.connectors.delta.reader import LogReader, Rows, SnapshotFileReader
from cutwater.connectors.delta.table import Description, delta_errors, described, opened
from cutwater.connectors.files.schemas import plain_schema
from cutwater.data.changes import marked_schema
from cutwater.errors import BuildError, ConfigError, CutwaterError, DataError

Start: TypeAlias = Literal["earliest", "latest"] | int | datetime
_LOG = "log"
"""The split of what comes later; the others are files, by version and path."""


class DeltaSource:
    """Rows of a table.

    Where it begins is decided once, in the driver, and goes with the splits: a restart goes on there.

    Args:
        path: of the table, absolute.
        start, until, changes, ignore_deletes, rate, discover_interval_ms: as of ``cw.delta``.

    Raises:
        ConfigError: a setting that makes no sense.
    """

    replayable = True

    def __init__(
        self,
        path: str,
        *,
        start: Start = "earliest",
        until: Literal["latest"] | int | None = None,
        changes: bool = False,
        ignore_deletes: bool = False,
        rate: float | None = None,
        discover_interval_ms: float | str | timedelta = 1000.0,
    ) -> None:
        check_rate(rate)
        if not _is_version(start) and not isinstance(start, datetime) and start not in ("earliest", "latest"):
            raise ConfigError(
                f"delta: start {start!r} is unknown", hint="'earliest', 'latest', a version, or a datetime with a zone."
            )
        if isinstance(start, datetime) and start.tzinfo is None:
            raise ConfigError("delta: start needs a zone", hint="Write datetime(2026, 1, 31, tzinfo=timezone.utc).")
        if until is not None and until != "latest" and not _is_version(until):
            raise ConfigError(f"delta: until {until!r} is unknown", hint="'latest', a version, or None.")
        if isinstance(start, int) and isinstance(until, int) and until < start:
            raise ConfigError(f"delta: until version {until} is before start {start}")
        if changes and ignore_deletes:
            raise ConfigError("delta: changes tell deletes, ignore_deletes passes them over", hint="Leave one out.")
        self._path, self._start, self._until = path, start, until
        self._changes, self._ignore_deletes = changes, ignore_deletes
        self.rate = rate
        self.discover_interval_ms = parse_duration_ms(discover_interval_ms, name="discover_interval_ms")
        self._schema: pa.Schema | None = None
        self._read: frozenset[str] | None = None
        self._splits: list[Split] | None = None

    def __repr__(self) -> str:
        return f"DeltaSource({self._path!r}, start={self._start!r}, until={self._until!r}, changes={self._changes})"

    @property
    def schema(self) -> pa.Schema:
        """Columns of the newest version; with ``changes``, ``op`` before them.

        Raises:
            BuildError: there is no such table, or it has features that are not read here.
            StorageError: it cannot be read.
        """
        if self._schema is None:
            found = plain_schema(self._described(self._handle(None)).schema).remove_metadata()
            schema = pa.schema([pa.field(column.name, column.type) for column in found])
            self._schema = marked_schema(schema) if self._changes else schema
        return self._schema

    @property
    def changes(self) -> tuple[str, ...] | None:
        """See ``SourceHooks.changes``; the table does not say what tells its rows apart."""
        return () if self._changes else None

    @property
    def one_after_another(self) -> bool:
        """See ``SourceHooks.one_after_another``: what comes later changes rows of the first version."""
        return self._changes

    @property
    def bounded(self) -> bool:
        return self._until is not None

    @property
    def ended(self) -> bool:
        """All splits are there from the begin: what comes later is one of them."""
        return self._splits is not None

    def reading(self, columns: frozenset[str] | None, *, dictionaries: bool = False) -> DeltaSource:
        """A copy of which nobody reads other columns than these."""
        copy = DeltaSource.__new__(type(self))
        copy.__dict__.update(self.__dict__, _read=columns)
        return copy

    def discover(self) -> list[Split]:
        """A split for each file of the first version, and one for all that comes later.

        What is wrong with the first version is said when it is read: a job that goes on from a snapshot does not.
        """
        if self._splits is None:
            try:
                self._splits = self._first_splits()
            except CutwaterError as error:
                self._splits = [Split(_LOG, {"error": error.message, "hint": error.hint})]
        return self._splits

    def _first_splits(self) -> list[Split]:
        newest = self._handle(None)
        end: int | None = self._until if isinstance(self._until, int) else None
        if self._until == "latest":
            end = newest.version()
        if self._start == "latest":
            self._described(newest)
            return [self._log(newest, newest.version(), end)]
        handle = self._first(newest)
        found = self._described(handle)
        if "deletionVectors" in found.asked.reader_features and _rows_of(handle.deletion_vectors()):
            raise BuildError(
                f"the Delta table {self._path!r} has deletion vectors, which this source does not read",
                hint="REORG TABLE ... APPLY (PURGE) writes its files without them.",
            )
        version = handle.version()
        splits: list[Split] = []
        for number, file in enumerate(active_files(handle)):
            data = {
                "path": file.path,
                "version": version,
                "file": number,
                "partition": file.partition_values,
                SIZE: file.size,
            }
            splits.append(Split(f"{version}/{file.path}", data))
        return [*splits, self._log(newest, version, end)]

    def _first(self, newest: Any) -> Any:
        """The version whose rows are read."""
        if isinstance(self._start, int):
            return self._handle(self._start)
        if isinstance(self._start, datetime):
            with delta_errors(f"nothing is known at {self._start} of the Delta table", self._path):
                newest.load_as_version(self._start)
            return newest
        if isinstance(self._until, int) and self._until < newest.version():
            return self._handle(self._until)
        return newest

    def _log(self, handle: Any, version: int, end: int | None) -> Split:
        data = {"version": version + 1, "file": 0, "row": 0, "table": str(handle.metadata().id)}
        return Split(_LOG, data if end is None else {**data, "end": end})

    def goes_on(self, known: Mapping[str, Json], listed: list[Split]) -> list[Split]:
        """What a snapshot knows of is all that there is: its first version was another one than today's."""
        self._splits = [Split(id, data) for id, data in known.items()]
        return self._splits

    def open(self, split: Split, position: Json | None, ctx: SourceContext) -> SplitReader:
        """A reader of a file, or of later versions.

        Raises:
            DataError: what is to be read is gone.
        """
        data = split.data
        if "error" in data:
            raise DataError(data["error"], hint=data["hint"])
        rows = Rows(self._path, self.schema, self._read, self._changes)
        if split.id != _LOG:
            return SnapshotFileReader(rows, data, position)
        if str(self._handle(None).metadata().id) != data["table"]:
            raise DataError(
                f"the Delta table {self._path!r} was removed and made again: the job's versions are the old one's",
                hint="Start a job of another name on the new table.",
            )
        look_s = self.discover_interval_ms / 1000
        return LogReader(rows, data if position is None else position, data.get("end"), look_s, self._ignore_deletes)

    def _handle(self, version: int | None) -> Any:
        handle = opened(self._path, version)
        if handle is None and version is not None:
            raise BuildError(
                f"the Delta table {self._path!r} has no version {version} (any more)",
                hint="Old ones go with the log's clean-up (delta.logRetentionDuration): begin at a later one.",
            )
        if handle is None:
            raise BuildError(f"there is no Delta table {self._path!r}", hint="Look at its path: _delta_log lies in it.")
        return handle

    def _described(self, handle: Any) -> Description:
        found = described(handle)
        found.asked.refuse_to_read(self._path)
        return found


def _is_version(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _rows_of(reader: Any) -> int:
    return sum(batch.num_rows for batch in reader)

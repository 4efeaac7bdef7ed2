"""An Iceberg table as a replayable source: a file of a snapshot is a split, a row's number a position."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any, Literal, TypeAlias

import pyarrow as pa

from cutwater.config import parse_duration_ms
from cutwater.connectors.base import Json, SourceContext, Split, check_rate
from cutwater.connectors.files.schemas import only, plain_schema
from cutwater.connectors.iceberg.catalog import IcebergTable, iceberg_library
from cutwater.connectors.iceberg.reader import IcebergReader, NothingToRead
from cutwater.connectors.iceberg.snapshots import (
    FILE,
    GONE_HINT,
    SNAPSHOT,
    History,
    OnOverwrite,
    known_snapshots,
    marker,
)
from cutwater.errors import BuildError, ConfigError, DataError

Start: TypeAlias = Literal["earliest", "latest"] | int | datetime


class IcebergSource:
    """Rows of a table, snapshot by snapshot.

    What was read up to lies in the job's checkpoints: the splits that a snapshot of the job knows tell which of the
    table's snapshots were looked at, and reading goes on behind the newest of them.

    Args:
        table: which.
        start: see ``cw.iceberg``.
        until: ``"latest"``: end with the snapshot that is current at the start; ``None``: never.
        on_overwrite: a later snapshot that takes rows away fails the job, or is passed over.
        rate: rows per second over all subtasks.
        discover_interval_ms: between two looks for new snapshots.

    Raises:
        ConfigError: a setting that makes no sense.
    """

    replayable = True
    knows_lag = True

    def __init__(
        self,
        table: IcebergTable,
        *,
        start: Start = "earliest",
        until: Literal["latest"] | None = None,
        on_overwrite: OnOverwrite = "fail",
        rate: float | None = None,
        discover_interval_ms: float | str | timedelta = 10_000.0,
    ) -> None:
        check_rate(rate)
        if until not in ("latest", None):
            raise ConfigError(f"iceberg: until is 'latest' or None, got {until!r}")
        if on_overwrite not in ("fail", "ignore"):
            raise ConfigError(f"iceberg: on_overwrite is 'fail' or 'ignore', got {on_overwrite!r}")
        if isinstance(start, bool) or not (isinstance(start, int | datetime) or start in ("earliest", "latest")):
            raise ConfigError(
                f"iceberg: start {start!r} is unknown", hint="'earliest', 'latest', a snapshot's id, or a datetime."
            )
        if isinstance(start, datetime) and start.tzinfo is None:
            raise ConfigError("iceberg: start needs a zone", hint="Write datetime(2026, 1, 31, tzinfo=timezone.utc).")
        self._table, self._start, self._until = table, start, until
        self._on_overwrite: OnOverwrite = on_overwrite
        self.rate = rate
        self.discover_interval_ms = parse_duration_ms(discover_interval_ms, name="discover_interval_ms")
        self._columns: tuple[str, pa.Schema] | None = None
        """The table's columns when the flow was built, as Iceberg's JSON and as Arrow's."""
        self._read: frozenset[str] | None = None
        self._known: dict[str, Split] = {}
        self._at: int | None = None
        self._looked = False
        self._loaded: Any = None

    def __repr__(self) -> str:
        return f"IcebergSource({self._table.name!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}, "_at": None, "_looked": False, "_loaded": None}

    @property
    def bounded(self) -> bool:
        return self._until is not None

    @property
    def schema(self) -> pa.Schema:
        """See ``Source.schema``: the table's columns now; those that are added later are not read.

        Raises:
            BuildError: there is no such table.
            StorageError: the catalog does not answer.
        """
        return self._own_columns[1]

    @property
    def _own_columns(self) -> tuple[str, pa.Schema]:
        if self._columns is None:
            schema = self._existing().metadata.schema()
            self._columns = schema.model_dump_json(), plain_schema(schema.as_arrow())
        return self._columns

    def _existing(self) -> Any:
        table = self._table.found()
        if table is None:
            raise BuildError(
                f"there is no Iceberg table {self._table.name!r} in catalog {self._table.catalog!r}",
                hint="Its name has the namespace before it: 'shop.orders'.",
            )
        return table

    def reading(self, columns: frozenset[str] | None, *, dictionaries: bool = False) -> IcebergSource:
        """A copy of which nobody reads other columns than these."""
        copy = IcebergSource.__new__(type(self))
        copy.__dict__.update(self.__getstate__(), _read=columns)
        return copy

    # ------------------------------------------------------------------------------------------------ in the driver

    def discover(self) -> list[Split]:
        """The files to be read, oldest first, those of new snapshots at the end.

        Raises:
            BuildError: no such table or snapshot.
            DataError: a snapshot takes rows away, or the one that was read up to is gone.
            StorageError: the catalog does not answer.
        """
        if not (self._looked and self.bounded):
            history = History(self._table, self._existing())
            later = history.appended(history.after(self._at), self._on_overwrite) if self._looked else None
            self._take(self._first(history) if later is None else later)
        return list(self._known.values())

    def _first(self, history: History) -> list[Split]:
        current = history.current
        self._looked = True
        if isinstance(self._start, int | datetime):
            splits = history.appended(history.beginning(self._start), self._on_overwrite)
            return splits or [marker(current)]
        whole = self._start == "earliest" and current is not None
        return [marker(current), *(history.whole(current) if whole and current is not None else ())]

    def _take(self, splits: list[Split]) -> None:
        for split in splits:
            self._known[split.id] = split
        if splits:
            self._at = splits[-1].data[SNAPSHOT]

    def goes_on(self, known: Mapping[str, Json], listed: list[Split]) -> list[Split]:
        """What the job's snapshot knows, and what the table's snapshots after those have appended.

        Raises:
            DataError, StorageError: as ``discover``.
        """
        self._known = {id: Split(id, data) for id, data in known.items()}
        self._looked = True
        if self.bounded:
            return list(self._known.values())
        history = History(self._table, self._existing())
        snapshots = known_snapshots(list(known.values()))
        self._at = history.newest_of(snapshots) if snapshots else None
        if snapshots and self._at is None:
            raise DataError(
                f"iceberg table {self._table.name!r}: none of the snapshots that the job has read, such as "
                f"{max(snapshots)}, is before the current one: they were expired, or the table was rolled back",
                hint=GONE_HINT,
            )
        self._take(history.appended(history.after(self._at), self._on_overwrite))
        return list(self._known.values())

    # ------------------------------------------------------------------------------------------------- in a worker

    def open(self, split: Split, position: Json | None, ctx: SourceContext) -> IcebergReader | NothingToRead:
        """A reader of a data file.

        Raises:
            StorageError: the catalog does not answer.
        """
        if split.data[FILE] is None:
            return NothingToRead(f"{self._table.name}, snapshot {split.data[SNAPSHOT]}")
        if self._loaded is None:
            self._loaded = self._table.loaded()
        text, schema = self._own_columns
        read = only(schema, self._read)
        wanted = iceberg_library("schema").Schema.model_validate_json(text)
        wanted = wanted.select(*read.names) if len(read) < len(schema) else wanted
        return IcebergReader(self._table, self._loaded, split, position or 0, wanted, read, schema)

"""Tables of Postgres and their changes as a replayable source of one split, an updating stream."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import pyarrow as pa

from cutwater.config import parse_duration_ms
from cutwater.connectors.base import Json, SourceContext, Split, check_rate
from cutwater.connectors.postgres.catalog import OldRows, check_publication, look_up
from cutwater.connectors.postgres.feed import Wanted
from cutwater.connectors.postgres.log_rows import LogRows, OnTruncate, OnUnchanged
from cutwater.connectors.postgres.reader import PostgresReader
from cutwater.connectors.postgres.server import PATIENCE_S, Server, lsn_of, quoted
from cutwater.connectors.postgres.slots import Names, PostgresCommitter
from cutwater.connectors.postgres.stream_rows import StreamSchema
from cutwater.errors import BuildError, ConfigError, DataError, StorageError

_SPLIT = "changes"


class PostgresSource:
    """Rows of tables, then their changes, in the order in which they were committed.

    One split for all tables: a change must not overtake the row that it changes.

    Args:
        server: where.
        tables: names, with the columns that are wanted (``None``: all).
        publication: the user's; ``None``: the job makes one.
        snapshot: ``"initial"``: rows that are there at first come, too; ``"never"``: changes only.
        until: ``"latest"``: end where the log ended at the start; ``None``: never.
        old_rows, on_truncate, on_unchanged: see ``postgres_changes``.
        rate: rows per second.
        check_interval_ms: between two looks whether the tables are still there.

    Raises:
        ConfigError: a setting that makes no sense.
    """

    replayable = True
    repeatable = False
    """After a failure in the snapshot its rest is read in another one."""

    def __init__(
        self,
        server: Server,
        tables: Sequence[tuple[str, tuple[str, ...] | None]],
        *,
        publication: str | None = None,
        snapshot: Literal["initial", "never"] = "initial",
        until: Literal["latest"] | None = None,
        old_rows: OldRows = "full",
        on_truncate: OnTruncate = "fail",
        on_unchanged: OnUnchanged = "fail",
        rate: float | None = None,
        check_interval_ms: float | str | timedelta = 10_000.0,
    ) -> None:
        check_rate(rate)
        if not tables or not all(name for name, _ in tables):
            raise ConfigError("postgres_changes needs a table", hint="Write postgres_changes(dsn, 'orders').")
        if len({name for name, _ in tables}) < len(tables):
            raise ConfigError("postgres_changes: a table is named twice")
        for name, value, known in (
            ("snapshot", snapshot, ("initial", "never")),
            ("until", until, ("latest", None)),
            ("old_rows", old_rows, ("full", "key")),
            ("on_truncate", on_truncate, ("fail", "pass_over")),
            ("on_unchanged", on_unchanged, ("fail", "null")),
        ):
            if value not in known:
                raise ConfigError(f"postgres_changes: {name} is {' or '.join(map(repr, known))}, got {value!r}")
        self._server, self._names, self._publication = server, tuple(tables), publication
        self._snapshot, self._until = snapshot == "initial", until
        self._old_rows: OldRows = old_rows
        self._on_truncate: OnTruncate = on_truncate
        self._on_unchanged: OnUnchanged = on_unchanged
        self.rate = rate
        self.discover_interval_ms = parse_duration_ms(check_interval_ms, name="check_interval_ms")
        self._found: StreamSchema | None = None
        self._split: Split | None = None
        self._answered_s = 0.0

    def __repr__(self) -> str:
        return f"PostgresSource({self._server.shown}, {', '.join(name for name, _ in self._names)})"

    @property
    def _stream(self) -> StreamSchema:
        """What the tables were when somebody asked first."""
        if self._found is None:
            found = look_up(self._server, self._names, self._old_rows)
            if self._publication is not None:
                check_publication(self._server, self._publication, found)
            keyless = [table for table in found if not table.key]
            if keyless and self._snapshot:
                raise BuildError(
                    f"postgres: table {keyless[0].shown!r} has no primary key, by which its rows are read",
                    hint=f"ALTER TABLE {keyless[0].sql} ADD PRIMARY KEY (...); or read changes only: snapshot='never'.",
                )
            self._found = StreamSchema(found)
        return self._found

    @property
    def schema(self) -> pa.Schema:
        """See ``Source.schema``.

        Raises:
            BuildError: a table cannot be read; says with what SQL it can.
            StorageError: the server does not answer.
        """
        return self._stream.arrow

    @property
    def changes(self) -> tuple[str, ...]:
        """It is an updating stream, whose rows these columns tell apart."""
        return self._stream.changes

    @property
    def bounded(self) -> bool:
        return self._until is not None

    # ------------------------------------------------------------------------------------------------ in the driver

    def discover(self) -> list[Split]:
        """The one split; looks now and then whether the tables are still those that are read.

        Raises:
            DataError: one was dropped, or left the publication.
            StorageError: the server has not answered for too long.
        """
        tables = self._stream.tables
        try:
            if self._split is None:
                self._split = Split(_SPLIT, {"tables": [table.oid for table in tables], **self._ends()})
            else:
                self._check_there()
            self._answered_s = time.monotonic()
        except StorageError:
            if self._split is None or time.monotonic() - self._answered_s > PATIENCE_S:
                raise
        return [self._split]

    def _ends(self) -> dict[str, int]:
        if not self.bounded:
            return {}
        with self._server.session("asking where the log ends") as connection:
            (end,) = connection.execute("SELECT pg_current_wal_insert_lsn()::text").fetchone()
        return {"end": lsn_of(end)}

    def _check_there(self) -> None:
        tables = self._stream.tables
        with self._server.session("looking whether the tables are still there") as connection:
            rows = connection.execute(
                "SELECT oid::bigint FROM pg_class WHERE oid = ANY(%s::oid[])", ([table.oid for table in tables],)
            ).fetchall()
            there = {oid for (oid,) in rows}
            named: list[tuple[str, str]] = []
            if self._publication is not None:
                named = connection.execute(
                    "SELECT schemaname::text, tablename::text FROM pg_publication_tables WHERE pubname = %s",
                    (self._publication,),
                ).fetchall()
        for table in tables:
            if table.oid not in there:
                raise DataError(
                    f"postgres: table {table.shown!r} was dropped; which rows left is not told",
                    hint="Start a job of another name on the tables that there are.",
                )
            if self._publication is not None and (table.schema, table.name) not in named:
                raise DataError(
                    f"postgres: publication {self._publication!r} does not have table {table.shown!r} any more: its "
                    "changes are missed",
                    hint=f"ALTER PUBLICATION {quoted(self._publication)} ADD TABLE {table.sql}; then start a job of "
                    "another name.",
                )

    def goes_on(self, known: Mapping[str, Json], listed: list[Split]) -> list[Split]:
        """See ``SourceHooks.goes_on``.

        Raises:
            DataError: the tables are others than those of the snapshot.
        """
        for split in listed:
            if split.id in known and known[split.id]["tables"] != split.data["tables"]:
                raise DataError(
                    "postgres: the job's snapshot is of other tables, or they were dropped and made again",
                    hint="Read the tables of then, in the same order; or start a job of another name.",
                )
        return listed

    def committer(self, job_uid: str, step: str) -> PostgresCommitter:
        """See ``SourceHooks.committer``."""
        return PostgresCommitter(self._server, Names(job_uid, step), self._publication is None)

    # ------------------------------------------------------------------------------------------------- in a worker

    def open(self, split: Split, position: Json | None, ctx: SourceContext) -> PostgresReader:
        """A reader of the tables; it connects on its own when it is read.

        Raises:
            CorruptSnapshotError: the position is none.
        """
        stream = self._stream
        wanted = Wanted(self._server, stream.tables, self._publication, self._snapshot, self.bounded)
        decode: Any = partial(LogRows, stream, self._old_rows, self._on_truncate, self._on_unchanged)
        names = Names(ctx.job_uid, ctx.step)
        return PostgresReader(wanted, stream, decode, names, ctx.incarnation, position, split.data.get("end"))

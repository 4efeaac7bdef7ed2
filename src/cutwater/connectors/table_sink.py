"""The table sink: rows of the stream into a table of a database, exactly once.

Rows wait in files of the job until their checkpoint is complete.  Then the rows of an *epoch* (what one subtask wrote
between two barriers) and a record of the epoch are written in one transaction, so that a second commit of it finds the
record and does nothing.  See ``docs/decisions/0010-table-sink.md``.

Two small tables beside the user's say which epochs are in, and which may not come in any more.  ``cutwater_epochs`` has
a record for each epoch that was committed.  ``cutwater_fences`` says of each attempt which checkpoint it restored: what
older attempts wrote for later checkpoints is void, also if a worker of theirs was paused and commits only now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from cutwater.connectors.base import Guarantee, Json, SinkContext, SinkSnapshot
from cutwater.connectors.databases import Connection, Database, database_of
from cutwater.connectors.files.schemas import plain_schema
from cutwater.connectors.foreach_batch import EpochCommitter, EpochHandle, EpochSink, EpochWriter, check_upsert_key
from cutwater.connectors.staging import StagingArea, incarnation_of
from cutwater.connectors.staging_folders import StoreFolder
from cutwater.data.changes import OP, added_rows
from cutwater.errors import BuildError, ConfigError, did_you_mean

EPOCH_COLUMN = "cutwater_epoch"
"""Column of an appended table: the epoch that wrote the row."""

_ALL_BELOW = -1
"""In place of a subtask: the record stands for all epochs up to its checkpoint."""


class EpochRecords:
    """The epochs of one write step of one job.

    Args:
        database: where its tables are.
        job_uid, step: whose.
    """

    def __init__(self, database: Database, job_uid: str, step: str) -> None:
        self._database = database
        self._of = (job_uid, step)

    def create(self, connection: Connection) -> None:
        """Make the two tables, if they are not there."""
        connection.execute(
            f"CREATE TABLE IF NOT EXISTS cutwater_epochs (epoch {self._database.identity}, job TEXT NOT NULL, "
            "step TEXT NOT NULL, checkpoint_id BIGINT NOT NULL, subtask BIGINT NOT NULL, incarnation BIGINT NOT NULL, "
            "rows BIGINT NOT NULL, UNIQUE (job, step, checkpoint_id, subtask))"
        )
        connection.execute(
            "CREATE TABLE IF NOT EXISTS cutwater_fences (job TEXT NOT NULL, step TEXT NOT NULL, "
            "incarnation BIGINT NOT NULL, checkpoint_id BIGINT NOT NULL, PRIMARY KEY (job, step, incarnation))"
        )

    @contextlib.contextmanager
    def transaction(self) -> Generator[Connection]:
        """A transaction of this step; no other one of it runs at the same time.

        Raises:
            DataError, StorageError: as ``Database.transaction``.
        """
        with self._database.transaction("/".join(self._of)) as connection:
            yield connection

    def enter(self, connection: Connection, epoch: EpochHandle) -> int | None:
        """Record an epoch; returns its number, unique in the database, or ``None`` if its rows must not be written.

        They must not if they are in already, or if a later attempt has gone back behind them.
        """
        incarnation = incarnation_of(epoch.piece.file)
        known = self._one(
            connection,
            "SELECT 1 FROM cutwater_epochs WHERE job = ? AND step = ? AND "
            "((checkpoint_id = ? AND subtask = ?) OR (subtask = ? AND checkpoint_id >= ?)) LIMIT 1",
            (*self._of, epoch.checkpoint_id, epoch.subtask, _ALL_BELOW, epoch.checkpoint_id),
        )
        fenced = self._one(
            connection,
            "SELECT 1 FROM cutwater_fences WHERE job = ? AND step = ? AND incarnation > ? AND checkpoint_id < ? "
            "LIMIT 1",
            (*self._of, incarnation, epoch.checkpoint_id),
        )
        if known is not None or fenced is not None:
            return None
        return self._one(
            connection,
            "INSERT INTO cutwater_epochs (job, step, checkpoint_id, subtask, incarnation, rows) "
            "VALUES (?, ?, ?, ?, ?, ?) RETURNING epoch",
            (*self._of, epoch.checkpoint_id, epoch.subtask, incarnation, epoch.rows),
        )

    def fence(self, checkpoint_id: int, incarnation: int, target: str | None) -> None:
        """Attempt ``incarnation`` goes on from ``checkpoint_id``: what older ones wrote beyond it is void.

        Args:
            target: the table, quoted, from which these rows are taken back; ``None``: they stay.
        """
        void = "job = ? AND step = ? AND subtask >= 0 AND checkpoint_id > ? AND incarnation < ?"
        values = (*self._of, checkpoint_id, incarnation)
        with self.transaction() as connection:
            self._do(
                connection,
                "INSERT INTO cutwater_fences (job, step, checkpoint_id, incarnation) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (job, step, incarnation) DO UPDATE SET checkpoint_id = excluded.checkpoint_id",
                values,
            )
            if target is not None:
                epochs = f"SELECT epoch FROM cutwater_epochs WHERE {self._marked(void)}"
                connection.execute(f"DELETE FROM {target} WHERE {EPOCH_COLUMN} IN ({epochs})", values)
            self._do(connection, f"DELETE FROM cutwater_epochs WHERE {void}", values)

    def compact(self, checkpoint_id: int) -> None:
        """All epochs up to this checkpoint are in for good: one record stands for them."""
        with self.transaction() as connection:
            values = (*self._of, checkpoint_id)
            self._do(
                connection, "DELETE FROM cutwater_epochs WHERE job = ? AND step = ? AND checkpoint_id <= ?", values
            )
            self._do(
                connection,
                "INSERT INTO cutwater_epochs (job, step, checkpoint_id, subtask, incarnation, rows) "
                "VALUES (?, ?, ?, ?, 0, 0)",
                (*values, _ALL_BELOW),
            )

    def _one(self, connection: Connection, sql: str, values: tuple[object, ...]) -> int | None:
        row = self._do(connection, sql, values).fetchone()
        return None if row is None else row[0]

    def _do(self, connection: Connection, sql: str, values: tuple[object, ...]) -> Connection:
        return connection.execute(self._marked(sql), values)

    def _marked(self, sql: str) -> str:
        return sql.replace("?", self._database.mark)


_COMPACT_EVERY = 100
"""Records of old epochs are removed when so many checkpoints were retired since the last time."""


@dataclass(frozen=True)
class TableSink(EpochSink):
    """Appends rows to a table, or upserts them by key; each row's effect exactly once.

    Args:
        database: where.
        name: of the table; made if missing.
        mode: ``"append"`` adds rows, ``"upsert"`` replaces the row with the same key.
        key: key columns of an upsert.
        changes: of an upsert of an updating stream, the columns that tell its rows apart; given through ``applying``.
        parallelism: number of subtasks that write.

    Raises:
        ConfigError: a setting that makes no sense.
    """

    database: Database
    name: str
    mode: Literal["append", "upsert"] = "append"
    key: tuple[str, ...] = ()
    parallelism: int = 1
    changes: tuple[str, ...] | None = None

    guarantee: ClassVar[Guarantee] = "exactly-once"

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a table sink needs the name of a table, got an empty one")
        if self.mode not in ("append", "upsert"):
            raise ConfigError(f"mode {self.mode!r} is unknown", hint="Choose 'append' or 'upsert'.")
        if self.mode == "upsert" and not self.key:
            raise ConfigError("an upsert needs a key", hint="Name the columns that tell rows apart: key=['id'].")
        if self.mode == "append" and self.key:
            raise ConfigError("a key is for upserts", hint="Write mode='upsert', or leave key away.")
        if self.parallelism < 1:
            raise ConfigError(f"parallelism must be at least 1, got {self.parallelism}")
        if self.mode == "upsert" and self.parallelism > 1:
            raise ConfigError(
                f"an upsert with parallelism {self.parallelism} would write rows of one key in any order",
                hint="Leave parallelism at 1, or append.",
            )

    def applying(self, changes: tuple[str, ...]) -> TableSink:
        """The same sink for an updating stream: an upsert makes the table what the stream's added rows are.

        Appended rows stay a log of the changes, with their marks.

        Args:
            changes: the columns that tell the stream's rows apart; none if unknown.

        Raises:
            BuildError: rows that are not told apart by the key of the upsert would replace each other.
        """
        if self.mode == "append":
            return self
        kept = f"the upsert keeps one row for each {', '.join(self.key)}: they would replace, and delete, each other"
        check_upsert_key(changes, self.key, kept)
        return replace(self, changes=changes)

    def stored(self, schema: pa.Schema) -> pa.Schema:
        """The columns of the stream that the table has, with plain types: the mark of a change is none."""
        fields = [field for field in plain_schema(schema) if self.changes is None or field.name != OP]
        return pa.schema(fields)

    def check(self, schema: pa.Schema) -> None:
        """See ``Sink.check``.  Looks at the database, and changes nothing there.

        Raises:
            BuildError: it cannot be reached, or the table cannot take such rows.
        """
        schema = self.stored(schema)
        if not schema.names:
            raise BuildError("rows without columns cannot be written to a table")
        seen: set[str] = {EPOCH_COLUMN} if self.mode == "append" else set()
        for column in schema:
            self.database.column_type(column)
            if column.name.casefold() in seen:
                raise BuildError(f"the table would have two columns {column.name!r}", hint="Rename it in the stream.")
            seen.add(column.name.casefold())
        for name in self.key:
            if name not in schema.names:
                raise BuildError(f"no such key column {name!r}", hint=did_you_mean(name, schema.names))
        if self.database.check():
            self._check_table(schema.names)

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> EpochWriter:
        made = EpochWriter if self.changes is None else _ChangesWriter
        return made(self.area(ctx.job_uid, ctx.step), plain_schema(schema), ctx)

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> TableCommitter:
        return TableCommitter(self, plain_schema(schema), self.area(job_uid, step))

    def _check_table(self, names: Sequence[str]) -> None:
        database = self.database
        with database.reading() as connection:
            present = database.columns(connection, self.name)
            unique = database.unique_keys(connection, self.name) if present else []
        if not present:
            return
        where = f"table {self.name!r} of {database.shown}"
        missing = [name for name in names if name not in present]
        if missing:
            raise BuildError(
                f"{where} has no column {missing[0]!r}; it has {', '.join(present)}",
                hint="Select and rename columns before the sink, or add them to the table.",
            )
        if self.mode == "append" and EPOCH_COLUMN not in present:
            raise BuildError(
                f"{where} was not made by this sink: without a column {EPOCH_COLUMN!r} its rows could not be taken "
                "back when the job goes back to an older checkpoint",
                hint=f"Add it: ALTER TABLE {database.quoted(self.name)} ADD COLUMN {EPOCH_COLUMN} BIGINT. Or upsert.",
            )
        if self.mode == "upsert" and set(self.key) not in unique:
            raise BuildError(
                f"{where} has no unique index on ({', '.join(self.key)}), which an upsert by these columns needs",
                hint=f"CREATE UNIQUE INDEX ON {database.quoted(self.name)} ({', '.join(self.key)}), or another key.",
            )


def table(
    url: str,
    name: str,
    *,
    mode: Literal["append", "upsert"] = "append",
    key: Sequence[str] = (),
    parallelism: int = 1,
) -> TableSink:
    """A table of a database to write to, exactly once.

    Args:
        url: ``sqlite:///relative.db``, ``sqlite:////absolute.db``, or ``postgresql://user@host/database`` (needs
            psycopg).  A password in it appears in no message, log or file; ``PGPASSWORD`` and ``~/.pgpass`` work too.
        name: of the table; made with the first checkpoint if it is missing.
        mode: ``"append"`` adds rows.  They bear the number of their epoch in a column ``cutwater_epoch``, so that
            going back to an older checkpoint takes them back.  ``"upsert"`` replaces the row with the same key, and of
            an updating stream it deletes the rows that leave; an overwritten row cannot be brought back, but what is
            computed again overwrites it again.
        key: the columns that tell rows apart, for an upsert.
        parallelism: number of subtasks that append.

    Raises:
        BuildError: another kind of database.
        ConfigError: settings that contradict each other.

    >>> table("sqlite:////data/out.db", "counts", mode="upsert", key=["word"]).key
    ('word',)
    """
    return TableSink(database_of(url), name, mode, (key,) if isinstance(key, str) else tuple(key), parallelism)


class TableCommitter:
    """Commits the epochs of one write step, each in one transaction.

    Args:
        sink: the table.
        schema: of the rows, with plain types.
        area: the step's staging.
    """

    def __init__(self, sink: TableSink, schema: pa.Schema, area: StagingArea[StoreFolder]) -> None:
        self.takes_back = sink.mode == "append"
        self._sink = sink
        self._schema = sink.stored(schema)
        self._records = EpochRecords(sink.database, area.job_uid, area.step)
        self._epochs = EpochCommitter(area, self._take)
        self._floor = 0

    def commit(self, checkpoint_id: int, handles: list[Json]) -> None:
        """See ``Committer.commit``.

        Raises:
            CorruptSnapshotError: staged rows are torn or flipped.
            DataError: the database refuses a row.
            StorageError: it cannot be written to; the rows stay for the next try.
        """
        self._epochs.commit(checkpoint_id, handles)

    def settle(self, restored: SinkSnapshot | None, retained: Sequence[SinkSnapshot], incarnation: int) -> None:
        """See ``Committer.settle``: commits, raises the fence, and takes appended rows back, in this order.

        Raises:
            CutwaterError: as ``commit``.
        """
        self._make_tables()
        self._epochs.settle(restored, retained, incarnation)
        target = self._target if self.takes_back else None
        self._records.fence(0 if restored is None else restored.checkpoint_id, incarnation, target)

    def retire(self, retired: SinkSnapshot, retained: Sequence[SinkSnapshot]) -> None:
        """See ``Committer.retire``; now and then forgets epochs that no checkpoint names any more."""
        named = [epoch.checkpoint_id for snapshot in retained for epoch in _epochs(snapshot)]
        floor = min([retired.checkpoint_id, *(checkpoint_id - 1 for checkpoint_id in named)])
        if floor >= self._floor + _COMPACT_EVERY:
            self._records.compact(floor)
            self._floor = floor

    def finish(self, incarnation: int) -> None:
        """See ``Committer.finish``.  The records of the last epochs stay: a late worker must find them."""
        self._epochs.finish(incarnation)

    @property
    def _target(self) -> str:
        return self._sink.database.quoted(self._sink.name)

    def _make_tables(self) -> None:
        sink, database = self._sink, self._sink.database
        columns = [
            f"{database.quoted_column(f.name)} {database.column_type(f)}{' NOT NULL' if f.name in sink.key else ''}"
            for f in self._schema
        ]
        if sink.mode == "append":
            columns.append(f"{EPOCH_COLUMN} BIGINT")
        else:
            columns.append(f"PRIMARY KEY ({', '.join(map(database.quoted_column, sink.key))})")
        with database.transaction("cutwater tables") as connection:
            self._records.create(connection)
            connection.execute(f"CREATE TABLE IF NOT EXISTS {self._target} ({', '.join(columns)})")

    def _take(self, rows: pa.Table, epoch: EpochHandle) -> None:
        """The rows and the record of their epoch, in one transaction."""
        with self._records.transaction() as connection:
            number = self._records.enter(connection, epoch)
            if number is None:
                return
            if self._sink.changes is not None:
                gone, rows = last_of_each_key(rows, self._sink.key)
                if gone.num_rows:
                    connection.cursor().executemany(self._deletion, self._values(gone, number))
            if rows.num_rows:
                connection.cursor().executemany(self._statement, self._values(rows, number))

    @property
    def _deletion(self) -> str:
        database = self._sink.database
        where = " AND ".join(f"{database.quoted_column(name)} = {database.mark}" for name in self._sink.key)
        return f"DELETE FROM {self._target} WHERE {where}"

    @property
    def _statement(self) -> str:
        sink, database = self._sink, self._sink.database
        names = [database.quoted_column(name) for name in self._schema.names]
        conflict = ""
        if sink.mode == "append":
            names.append(EPOCH_COLUMN)
        else:
            rest = [database.quoted_column(name) for name in self._schema.names if name not in sink.key]
            updates = ", ".join(f"{name} = excluded.{name}" for name in rest)
            keys = ", ".join(map(database.quoted_column, sink.key))
            conflict = f" ON CONFLICT ({keys}) DO " + (f"UPDATE SET {updates}" if rest else "NOTHING")
        marks = ", ".join([database.mark] * len(names))
        return f"INSERT INTO {self._target} ({', '.join(names)}) VALUES ({marks}){conflict}"

    def _values(self, rows: pa.Table, number: int) -> Iterator[tuple[object, ...]]:
        for batch in rows.to_batches():
            columns = [self._sink.database.values(column) for column in batch.columns]
            if self._sink.mode == "append":
                columns.append([number] * batch.num_rows)
            yield from zip(*columns, strict=True)


class _ChangesWriter(EpochWriter):
    """Refuses a row without a mark when it comes: once its checkpoint is complete it would be too late."""

    def write(self, batch: pa.RecordBatch) -> None:
        added_rows(batch)
        super().write(batch)


def last_of_each_key(rows: pa.Table, key: Sequence[str]) -> tuple[pa.Table, pa.Table]:
    """The net effect of an epoch's changes: the keys of rows that are gone, and the rows that are there.

    What happened to a key before is no matter, so a ``-U`` whose ``+U`` follows is no write.

    >>> rows = pa.table({"op": ["+I", "+I", "-U", "+U", "-D"], "k": [1, 2, 1, 1, 2], "n": [10, 20, 10, 11, 20]})
    >>> [part.to_pylist() for part in last_of_each_key(rows, ["k"])]
    [[{'k': 2}], [{'k': 1, 'n': 11}]]
    """
    names = [str(position) for position in range(len(key))]
    keys = rows.select(list(key)).rename_columns(names)
    numbered = keys.append_column("row", pa.array(np.arange(rows.num_rows)))
    last = numbered.group_by(names).aggregate([("row", "max")]).column("row_max").sort()
    rows = rows.take(last).combine_chunks()
    added = np.concatenate([added_rows(batch) for batch in rows.to_batches()] or [np.zeros(0, np.bool_)])
    kept = pa.array(added)
    gone = rows.select(list(key)).filter(pc.call_function("invert", [kept]))
    return gone, rows.drop_columns([OP]).filter(kept)


def _epochs(snapshot: SinkSnapshot) -> list[EpochHandle]:
    handles = EpochCommitter.decode(snapshot.handles)
    return [handle for handle in handles if isinstance(handle, EpochHandle)]

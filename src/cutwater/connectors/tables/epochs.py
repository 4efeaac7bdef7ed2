"""What a database knows of the epochs written to it: which are in, and which may not come in any more.

Two small tables beside the user's.  ``cutwater_epochs`` has a record for each epoch that was committed; it is entered
in the transaction that writes the epoch's rows.  ``cutwater_fences`` says of each attempt which checkpoint it restored:
what older attempts wrote for later checkpoints is void, also if a worker of theirs was paused and commits only now.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator

from cutwater.connectors.foreach_batch import EpochHandle
from cutwater.connectors.staging.area import incarnation_of
from cutwater.connectors.tables.database import Connection, Database

EPOCH_COLUMN = "cutwater_epoch"
"""Column of an appended table: the epoch that wrote the row."""

_ALL_BELOW = -1
"""In place of a subtask: the record stands for all epochs up to its checkpoint."""


class EpochBook:
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

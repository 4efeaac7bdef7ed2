"""A thread that fetches: first the rows of the tables, then the log of their changes.

It runs ahead of the reader by a few chunks, answers the server meanwhile, and ends at the first error; the reader then
begins another one where it stands itself.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from cutwater.connectors.postgres import decode_kernels as kernels
from cutwater.connectors.postgres.catalog import Table
from cutwater.connectors.postgres.position import Place, Position, Segment
from cutwater.connectors.postgres.receiving import Messages
from cutwater.connectors.postgres.segments import key_sql
from cutwater.connectors.postgres.server import Server, literal, lsn_of, lsn_text, quoted
from cutwater.connectors.postgres.slots import Names, check_anchor
from cutwater.connectors.postgres.wire import StoppedError, Wire

_CHUNKS = 8
"""That wait for the reader."""
_FEEDBACK_S = 5.0
_SIGNATURE = b"PGCOPY\n\xff\r\n\0"
_COPY_HEADER = 19


class Begun(NamedTuple):
    """The reader's position, from now on."""

    position: Position


class CopiedRows(NamedTuple):
    """Rows of a table in the snapshot."""

    table: int
    rows: Messages


class SnapshotEnd(NamedTuple):
    """All rows of the snapshot have come."""


class LogChunk(NamedTuple):
    """Messages of the stream."""

    messages: Messages


class Failed(NamedTuple):
    """The thread has ended with this."""

    error: Exception


Chunk = Begun | CopiedRows | SnapshotEnd | LogChunk | Failed


@dataclass(frozen=True)
class Wanted:
    """What is to be read; a picklable value."""

    server: Server
    tables: tuple[Table, ...]
    publication: str | None
    """The user's; ``None``: one that the job makes."""
    snapshot: bool
    """Rows that are there at first come, too."""
    bounded: bool


class Feed:
    """The thread, and what it has fetched.

    Args:
        wanted: what.
        names: of slots.
        incarnation: of the reader.
        position: where to begin; ``None``: with a new slot.
    """

    def __init__(self, wanted: Wanted, names: Names, incarnation: int, position: Position | None) -> None:
        self._wanted, self._names, self._incarnation = wanted, names, incarnation
        self._position = position
        self._stopping = threading.Event()
        self._chunks: queue.Queue[Chunk] = queue.Queue(_CHUNKS)
        self._wire: Wire | None = None
        self._heard = np.zeros(2, np.int64)
        self._said_s = 0.0
        threading.Thread(target=self._run, name="cutwater-postgres", daemon=True).start()

    def take(self) -> Chunk | None:
        """The next chunk, if there is one."""
        try:
            return self._chunks.get_nowait()
        except queue.Empty:
            return None

    def stop(self) -> None:
        """End the thread soon; what it has fetched is forgotten."""
        self._stopping.set()

    # --------------------------------------------------------------------------------------------------- in the thread

    def _run(self) -> None:
        try:
            self._fetch()
        except StoppedError:
            pass
        except Exception as error:
            self._put_unless_stopped(Failed(error))
        finally:
            if self._wire is not None:
                self._wire.close()

    def _put_unless_stopped(self, chunk: Chunk) -> None:
        try:
            self._put(chunk)
        except StoppedError:
            pass

    def _put(self, chunk: Chunk) -> None:
        while not self._stopping.is_set():
            try:
                return self._chunks.put(chunk, timeout=0.25)
            except queue.Full:
                self._feed_back()
        raise StoppedError

    def _fetch(self) -> None:
        wire = self._wire = Wire(self._wanted.server, self._stopping)
        position = self._position
        if position is None:
            position = self._begin(wire)
        else:
            position = self._own_anchor(position)
            with self._wanted.server.session("looking at the replication slot") as connection:
                check_anchor(connection, position.slot, position.lsn)
            if position.at is not None:
                position = self._begin_segment(wire, position)
        if position.at is not None:
            self._copy_tables(wire, position.at)
            wire.ask("COMMIT")
            self._put(SnapshotEnd())
        self._follow(wire, position)

    def _begin(self, wire: Wire) -> Position:
        """A slot, and the snapshot of the database in which it begins."""
        wanted, anchor = self._wanted, self._names.anchor(self._incarnation)
        publication = wanted.publication or self._names.publication
        if wanted.publication is None:
            self._publish(wire, publication)
        wire.ask(  # of a connection that was lost before anybody had heard of it
            f"SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = {literal(anchor)}"
        )
        create = f"CREATE_REPLICATION_SLOT {quoted(anchor)} LOGICAL pgoutput"
        if wanted.snapshot:
            wire.ask("SET row_security = off")  # or rows that a policy hides would be missed in silence
            wire.ask("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        (made,) = wire.ask(f"{create} {'USE_SNAPSHOT' if wanted.snapshot else 'NOEXPORT_SNAPSHOT'}")
        lsn = lsn_of(made[1] or "")
        at, segments = (Place(0), [Segment(0, 0, [], lsn)]) if wanted.snapshot else (None, [])
        position = Position(anchor, publication, lsn, 0, at, segments)
        self._put(Begun(position))
        return position

    def _publish(self, wire: Wire, publication: str) -> None:
        listed = ", ".join(table.sql for table in self._wanted.tables)
        options = "WITH (publish_via_partition_root = true)"
        if wire.ask(f"SELECT 1 FROM pg_publication WHERE pubname = {literal(publication)}"):
            wire.ask(f"ALTER PUBLICATION {quoted(publication)} SET TABLE {listed}")
        else:
            wire.ask(f"CREATE PUBLICATION {quoted(publication)} FOR TABLE {listed} {options}")

    def _own_anchor(self, position: Position) -> Position:
        """A job that begins from another one's snapshot keeps the log with a slot of its own."""
        if self._names.incarnation(position.slot) is not None:
            return position
        anchor = self._names.anchor(self._incarnation)
        with self._wanted.server.session("taking over a replication slot") as connection:
            check_anchor(connection, position.slot, position.lsn)
            known = connection.execute("SELECT 1 FROM pg_replication_slots WHERE slot_name = %s", (anchor,)).fetchone()
            if known is None:
                connection.execute("SELECT pg_copy_logical_replication_slot(%s, %s)", (position.slot, anchor))
        position = msgspec.structs.replace(position, slot=anchor)
        self._put(Begun(position))
        return position

    def _begin_segment(self, wire: Wire, position: Position) -> Position:
        """A later snapshot for the rows that were not read in the one before."""
        wire.ask("SET row_security = off")
        wire.ask("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        ((seen, lsn),) = wire.ask("SELECT pg_current_snapshot()::text, pg_current_wal_insert_lsn()::text")
        xmin, xmax, running = (seen or "").split(":")
        xids = [int(xid) & 0xFFFFFFFF for xid in running.split(",") if xid]
        segment = Segment(int(xmin) & 0xFFFFFFFF, int(xmax) & 0xFFFFFFFF, xids, lsn_of(lsn or ""))
        before = msgspec.structs.replace(position.segments[-1], until=position.at)
        position = msgspec.structs.replace(position, segments=[*position.segments[:-1], before, segment])
        self._put(Begun(position))
        return position

    def _copy_tables(self, wire: Wire, at: Place) -> None:
        """The rows behind a place, by key."""
        for table in self._wanted.tables:  # or one could be emptied or altered before its turn comes
            wire.ask(f"LOCK TABLE {table.sql} IN ACCESS SHARE MODE")
        for number, table in enumerate(self._wanted.tables):
            if number < at.table:
                continue
            wire.begin_copy(copy_sql(table, at.key if number == at.table else None))
            while (rows := wire.take()) is not None or not wire.ended:
                if rows is not None:
                    self._put_rows(number, rows)
            wire.end_copy()

    def _put_rows(self, number: int, rows: Messages) -> None:
        data, starts = rows
        if bytes(data[: len(_SIGNATURE)]) == _SIGNATURE:
            starts = starts.copy()
            starts[0] += _COPY_HEADER
        if int(data[-2]) == 0xFF and int(data[-1]) == 0xFF and len(data) - int(starts[-1]) == 2:
            starts = starts[:-1]  # the end of the rows
        starts = starts[starts < len(data)]
        if len(starts):
            self._put(CopiedRows(number, Messages(data, starts)))

    def _follow(self, wire: Wire, position: Position) -> None:
        """The log, from a place on, by a copy of the slot."""
        copy = self._names.copy(position.slot)
        wire.ask(f"SELECT pg_copy_logical_replication_slot({literal(position.slot)}, {literal(copy)}, true)")
        options = f"proto_version '1', publication_names {literal(quoted(position.publication))}, binary 'true'"
        self._heard[0] = position.lsn
        wire.begin_copy(f"START_REPLICATION SLOT {quoted(copy)} LOGICAL {lsn_text(position.lsn)} ({options})")
        while True:
            messages = wire.take()
            if messages is None and wire.ended:
                wire.end_copy()
                raise ConnectionError("the server has ended the stream of changes")
            if messages is not None:
                kernels.heard(messages.data, messages.starts, len(messages.starts), self._heard)
                self._put(LogChunk(messages))
            self._feed_back()

    def _feed_back(self) -> None:
        """Tell the server now and then that somebody is there; at once if it asks."""
        now = time.monotonic()
        wanted = bool(self._heard[1])
        pause_s = 0.2 if self._wanted.bounded else _FEEDBACK_S
        if self._wire is None or not self._heard[0] or not (wanted or now >= self._said_s + pause_s):
            return
        self._said_s, self._heard[1] = now, 0
        self._wire.confirm(int(self._heard[0]), answer=self._wanted.bounded)


def copy_sql(table: Table, behind: Sequence[str] | None) -> str:
    """A COPY of the rows of a table by their key, those behind one."""
    names = ", ".join(quoted(column.name) for column in table.columns)
    keys = [table.column(name) for name in table.key]
    where = ""
    if behind is not None:
        own = ", ".join(quoted(key.name) for key in keys)  # as they are, so that the index of the key is used
        where = f" WHERE ROW({own}) > {key_sql(keys, [literal(value) for value in behind])}"
    order = ", ".join(quoted(key.name) for key in keys)
    return f"COPY (SELECT {names} FROM {table.sql}{where} ORDER BY {order}) TO STDOUT (FORMAT binary)"

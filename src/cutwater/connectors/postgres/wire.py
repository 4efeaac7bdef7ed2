"""A connection that takes replication commands, driven so that whoever waits for it can be stopped."""

from __future__ import annotations

import contextlib
import select
import struct
import threading
import time
from typing import Any

from cutwater.connectors.postgres.receiving import Messages, Receiver, receiver
from cutwater.connectors.postgres.server import Server, client_library

_TICK_S = 0.1
_US_TO_2000 = 946_684_800_000_000
_EMPTY, _COMMAND, _TUPLES, _COPY_OUT, _COPY_BOTH, _FATAL = 0, 1, 2, 3, 8, 7
"""States of a result (``ExecStatusType`` of libpq)."""


class StoppedError(Exception):
    """Nobody wants the answer any more."""


class Wire:
    """One connection.

    Args:
        server: where.
        stopping: set when whoever waits must give up.

    Raises:
        psycopg.Error: it cannot be made.
    """

    def __init__(self, server: Server, stopping: threading.Event) -> None:
        self._stopping = stopping
        self._owner = server.connect(replication=True)
        self._connection: Any = self._owner.pgconn
        self._receiver: Receiver | None = None

    def ask(self, sql: str) -> list[list[str | None]]:
        """The rows of a statement or command, as texts.

        Raises:
            psycopg.Error: it failed.
            StoppedError: nobody waits any more.
        """
        rows: list[list[str | None]] = []
        self._send(sql)
        while (result := self._result()) is not None:
            self._check(result)
            for row in range(result.ntuples):
                values = [result.get_value(row, column) for column in range(result.nfields)]
                rows.append([None if value is None else value.decode() for value in values])
        return rows

    def begin_copy(self, sql: str) -> None:
        """Begin a COPY or a stream, of which ``take`` gives the messages.

        Raises:
            psycopg.Error, StoppedError: as ``ask``.
        """
        self._send(sql)
        result = self._result()
        self._check(result)
        if result is None or result.status not in (_COPY_OUT, _COPY_BOTH):
            raise client_library().OperationalError("the server sends no rows")
        self._receiver = receiver(self._connection)

    def take(self) -> Messages | None:
        """Messages that have come; ``None`` after a short while without any, or at the end (``ended``).

        Raises:
            psycopg.Error: the connection is lost, or the server gave up.
            StoppedError: nobody waits any more.
        """
        assert self._receiver is not None
        if self._receiver.ended:
            return None
        found = self._receiver.take()
        if found is None and not self._receiver.ended:
            self._wait()
            found = self._receiver.take()
        return found

    @property
    def ended(self) -> bool:
        """Whether a COPY has come to its end; then ``end_copy``."""
        return self._receiver is not None and self._receiver.ended

    def end_copy(self) -> None:
        """Hear how it ended.

        Raises:
            psycopg.Error: not well.
        """
        self._receiver = None
        while (result := self._result()) is not None:
            self._check(result)

    def confirm(self, lsn: int, *, answer: bool) -> None:
        """Tell the server of a stream that everything up to a place has come.

        Args:
            answer: ask where it stands.
        """
        now = time.time_ns() // 1000 - _US_TO_2000
        with contextlib.suppress(BlockingIOError):
            self._connection.put_copy_data(b"r" + struct.pack("!qqqqB", lsn, lsn, lsn, now, answer))
            self._connection.flush()

    def close(self) -> None:
        """End it."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None
        self._owner.close()

    def _send(self, sql: str) -> None:
        self._connection.send_query(sql.encode())
        self._connection.flush()

    def _result(self) -> Any:
        while self._connection.is_busy():
            self._wait()
        return self._connection.get_result()

    def _wait(self) -> None:
        if self._stopping.is_set():
            raise StoppedError
        ready, _, _ = select.select([self._connection.socket], [], [], _TICK_S)
        if ready:
            self._connection.consume_input()

    def _check(self, result: Any) -> None:
        if result is None or result.status != _FATAL:
            return
        psycopg = client_library()
        state = (result.error_field(_SQLSTATE) or b"").decode()
        text = (result.error_field(_PRIMARY) or result.error_message).decode(errors="replace").strip()
        detail = (result.error_field(_DETAIL) or b"").decode(errors="replace")
        try:
            kind = client_library("psycopg.errors").lookup(state)
        except KeyError:
            kind = psycopg.OperationalError
        raise kind(f"{text}. {detail}" if detail else text)


_SQLSTATE, _PRIMARY, _DETAIL = ord("C"), ord("M"), ord("D")
"""Fields of an error (``PG_DIAG_...`` of libpq)."""

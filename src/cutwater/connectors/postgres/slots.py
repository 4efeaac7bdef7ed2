"""Names of replication slots and publications, and what the driver does with them.

A job has one slot that stays, the *anchor*: it keeps the write-ahead log from the oldest retained checkpoint on, and
nobody ever reads from it.  Who reads makes a temporary copy of it, which goes with the connection.  So no reader can
keep another one from reading, and no reader can confirm what a restore may ask for again.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cutwater.connectors.base import SourceSnapshot
from cutwater.connectors.postgres.position import Position
from cutwater.connectors.postgres.server import Connection, Server, lsn_of, lsn_text, quoted
from cutwater.errors import DataError

_UID_CHARS, _STEP_CHARS = 16, 12
_TEMPORARY, _COPY_BYTES = "_r", 3


@dataclass(frozen=True)
class Names:
    """What a job's step has on a server.

    >>> Names("c0ffee", "Read orders").publication
    'cutwater_c0ffee_read_orders_eded5632'
    """

    job_uid: str
    step: str

    @property
    def publication(self) -> str:
        """One that the job makes for itself, and what names of its slots begin with."""
        plain = re.sub("[^a-z0-9]", "_", self.step.lower())[:_STEP_CHARS]
        digest = hashlib.sha256(self.step.encode()).hexdigest()[:8]
        return f"cutwater_{self.job_uid[:_UID_CHARS]}_{plain}_{digest}"

    def anchor(self, incarnation: int) -> str:
        """The slot that readers of an incarnation make when there is none yet."""
        return f"{self.publication}_{incarnation}"

    def copy(self, anchor: str) -> str:
        """A temporary copy, for one connection: another name each time, for the last one may not be gone yet."""
        return f"{anchor}{_TEMPORARY}{secrets.token_hex(_COPY_BYTES)}"

    def incarnation(self, slot: str) -> int | None:
        """Of whom an anchor or a copy of one is; ``None`` if it is another job's or step's."""
        rest = slot.removeprefix(f"{self.publication}_").partition(_TEMPORARY)[0]
        return int(rest) if slot.startswith(f"{self.publication}_") and rest.isdecimal() else None


class PostgresCommitter:
    """See ``SourceCommitter``: moves the anchor behind the oldest retained checkpoint, and clears away.

    Args:
        server: where.
        names: of the step's slots.
        publishes: the publication is the job's own.
    """

    def __init__(self, server: Server, names: Names, publishes: bool) -> None:
        self._server, self._names, self._publishes = server, names, publishes
        self._moved: dict[str, int] = {}

    def settle(self, retained: Sequence[SourceSnapshot], incarnation: int) -> None:
        """See ``SourceCommitter``: ends readers of older incarnations, and drops anchors that no checkpoint names."""
        named = {position.slot for snapshot in retained for position in _positions(snapshot)}
        with self._server.session("clearing away old replication slots") as connection:
            for slot, temporary, pid in self._slots(connection):
                theirs = self._names.incarnation(slot)
                if theirs is None or theirs >= incarnation or (slot in named and not temporary):
                    continue
                if pid is not None:
                    connection.execute("SELECT pg_terminate_backend(%s)", (pid,))
                elif not temporary:
                    self._drop(connection, slot)

    def retain(self, retained: Sequence[SourceSnapshot]) -> None:
        """See ``SourceCommitter``.

        Raises:
            DataError: the anchor is gone.
        """
        oldest: dict[str, int] = {}
        for position in (position for snapshot in retained for position in _positions(snapshot)):
            oldest[position.slot] = min(oldest.get(position.slot, position.lsn), position.lsn)
        news = {slot: lsn for slot, lsn in oldest.items() if self._moved.get(slot) != lsn}
        if not news:
            return
        with self._server.session("confirming what no restore needs") as connection:
            for slot, lsn in news.items():
                check_anchor(connection, slot)
                connection.execute(
                    "SELECT pg_replication_slot_advance(slot_name, %s) FROM pg_replication_slots "
                    "WHERE slot_name = %s AND confirmed_flush_lsn < %s",
                    (lsn_text(lsn), slot, lsn_text(lsn)),
                )
                self._moved[slot] = lsn

    def close(self) -> None:
        """See ``SourceCommitter``: nothing is held open between two calls."""

    def finish(self, final: SourceSnapshot | None, incarnation: int) -> None:
        """See ``SourceCommitter``: the anchors go, and the publication if it is the job's own."""
        with self._server.session("dropping the replication slot") as connection:
            for slot, temporary, pid in self._slots(connection):
                theirs = self._names.incarnation(slot)
                if theirs is None or theirs > incarnation:
                    continue
                if pid is not None:
                    connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
                if not temporary:
                    self._drop(connection, slot)
            if self._publishes:
                connection.execute(f"DROP PUBLICATION IF EXISTS {quoted(self._names.publication)}")

    def _slots(self, connection: Connection) -> list[tuple[str, bool, int | None]]:
        return connection.execute(
            "SELECT slot_name, temporary, active_pid FROM pg_replication_slots "
            "WHERE database = current_database() AND slot_type = 'logical' ORDER BY slot_name"
        ).fetchall()

    def _drop(self, connection: Connection, slot: str) -> None:
        connection.execute(
            "SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE slot_name = %s", (slot,)
        )


def _positions(snapshot: SourceSnapshot) -> Iterable[Position]:
    return (Position.of(position) for position in snapshot.positions.values() if position is not None)


def check_anchor(connection: Connection, slot: str, lsn: int | None = None) -> None:
    """Check that a slot still has the log from a place on.

    Raises:
        DataError: it does not; changes are lost.
    """
    found = connection.execute(
        "SELECT wal_status, confirmed_flush_lsn::text FROM pg_replication_slots WHERE slot_name = %s", (slot,)
    ).fetchone()
    again = "What changed since cannot be told any more. Start a job of another name, which begins with the tables as "
    again += "they are now."
    if found is None:
        raise DataError(f"postgres: replication slot {slot!r} is gone: somebody dropped it", hint=again)
    status, confirmed = found
    if status == "lost":
        raise DataError(
            f"postgres: replication slot {slot!r} was given up by the server: the job was behind by more than "
            "max_slot_wal_keep_size allows",
            hint=f"{again} ALTER SYSTEM SET max_slot_wal_keep_size = -1; keeps the log for as long as it takes.",
        )
    if lsn is not None and confirmed is not None and lsn_of(confirmed) > lsn:
        raise DataError(
            f"postgres: replication slot {slot!r} stands at {confirmed}, behind the snapshot that the job begins from "
            f"({lsn_text(lsn)}): the changes between them are confirmed and gone",
            hint="Only retained checkpoints can be restored; a savepoint until they have moved on.",
        )

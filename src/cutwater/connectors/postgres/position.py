"""Where a reader is: in the snapshot of the tables, or in the log of their changes.

JSON in the manifest, so that everything in it is checked where it is read.
"""

from __future__ import annotations

import msgspec

from cutwater.connectors.base import Json
from cutwater.data.decoding import prepare
from cutwater.errors import CorruptSnapshotError


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A place in the rows of the tables: all rows of tables before it, of this one up to a key."""

    table: int
    """Number of the table among those that are read."""
    key: list[str] | None = None
    """Values of its key, as text; ``None``: before its first row."""


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """Rows that were read in one snapshot of the database, from where the segment before it ended.

    A transaction is in them if the snapshot saw it (``pg_current_snapshot``).  None that committed behind ``lsn`` is.
    """

    xmin: int
    xmax: int
    running: list[int]
    lsn: int
    until: Place | None = None
    """``None``: the rest."""

    def saw(self, xid: int) -> bool:
        """Whether a transaction, by the 32 bits of its id, is in the snapshot.

        >>> segment = Segment(90, 100, [95], 0)
        >>> [segment.saw(xid) for xid in (7, 94, 95, 100)]
        [True, True, False, False]
        """
        if _ahead(xid, self.xmax) >= 0:
            return False
        return _ahead(xid, self.xmin) < 0 or all(_ahead(xid, other) for other in self.running)


def _ahead(xid: int, other: int) -> int:
    """How far a transaction's id is ahead of another one, the nearest way round 32 bits."""
    return ((xid - other + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)


class Position(msgspec.Struct, frozen=True, omit_defaults=True):
    """The next row of a reader."""

    slot: str
    """The anchor: it has all changes from ``lsn`` on."""
    publication: str
    """As the log knows it: it is there since before ``lsn``."""
    lsn: int
    """End of the last transaction of which all rows were given, or a place up to which there is nothing."""
    rows: int = 0
    """Given of the next transaction."""
    at: Place | None = None
    """In the snapshot of the tables: the last row given.  ``None``: it is read to its end."""
    segments: list[Segment] = []
    """Of the tables' snapshot, as long as the log may tell changes that are in them."""

    @staticmethod
    def of(position: Json) -> Position:
        """The position in a manifest.

        Raises:
            CorruptSnapshotError: it is none.
        """
        try:
            return msgspec.convert(position, Position)
        except (msgspec.ValidationError, TypeError) as error:
            raise CorruptSnapshotError(f"this is no position in the changes of Postgres: {error}") from None

    @property
    def json(self) -> Json:
        """For a manifest."""
        return msgspec.to_builtins(self)


prepare(Position)

"""The snapshot of the tables that needed several: which changes are in it already, and which are still to be told.

Without a failure all rows are read in the snapshot that was made with the replication slot, and each change in the log
comes after it.  After a failure that snapshot is gone; what had not been read yet is read in a later one, a *segment*
of the tables by key.  A change that a segment's snapshot saw is in its rows.  Whether a key lies in a segment only the
server can say, by its own order of keys; it is asked for the few transactions for which it matters.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from cutwater.connectors.postgres.catalog import Column, Table
from cutwater.connectors.postgres.position import Place, Segment
from cutwater.connectors.postgres.server import Connection, Server


def key_sql(columns: Sequence[Column], values: Sequence[str]) -> str:
    """A key in SQL, of texts in SQL, which the server compares by its own order."""
    parts = [
        f"CAST({value} AS {column.declared})" + (f" COLLATE {column.collation}" if column.collation else "")
        for column, value in zip(columns, values, strict=True)
    ]
    return f"ROW({', '.join(parts)})"


class Segments:
    """Judges changes as long as the log may tell some that segments have.

    Args:
        server: is asked where keys lie.
        tables: that are read.
        segments: in their order.
    """

    def __init__(self, server: Server, tables: Sequence[Table], segments: Sequence[Segment]) -> None:
        self._server, self._tables, self._segments = server, tables, segments

    @property
    def until(self) -> int:
        """Transactions that end behind this place are in no segment."""
        return max((segment.lsn for segment in self._segments), default=0)

    def seen(self, xids: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """For each segment and transaction, whether the segment's snapshot saw it."""
        known, places = np.unique(xids, return_inverse=True)
        saw = [[segment.saw(int(xid)) for xid in known] for segment in self._segments]
        return np.array(saw, np.bool_).reshape(len(self._segments), len(known))[:, places]

    def places(self, table: int, keys: Sequence[Sequence[str]]) -> npt.NDArray[np.int64]:
        """The number of the segment in which each key of a table lies.

        Raises:
            CutwaterError: the server cannot be asked.
        """
        found = np.full(len(keys), -1)
        with self._server.session("asking where keys of its first snapshot lie") as connection:
            for number, segment in enumerate(self._segments):
                inside = self._inside(connection, table, keys, segment.until)
                found[(found < 0) & inside] = number
        return found

    def _inside(
        self, connection: Connection, table: int, keys: Sequence[Sequence[str]], until: Place | None
    ) -> npt.NDArray[np.bool_]:
        if until is None or until.table != table:
            return np.full(len(keys), until is None or until.table > table)
        if until.key is None:
            return np.zeros(len(keys), np.bool_)
        columns = [self._tables[table].column(name) for name in self._tables[table].key]
        names = [f"k{n}" for n in range(len(columns))]
        arrays = ", ".join(["%s::text[]"] * len(columns))
        own, bound = key_sql(columns, names), key_sql(columns, ["%s::text"] * len(columns))
        rows = connection.execute(
            f"SELECT {own} <= {bound} FROM unnest({arrays}) WITH ORDINALITY AS u({', '.join(names)}, n) ORDER BY n",
            (*until.key, *([key[n] for key in keys] for n in range(len(columns)))),
        ).fetchall()
        return np.array([inside for (inside,) in rows], np.bool_)

"""Reads the tables and the log of their changes as one split."""

from __future__ import annotations

import time
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from cutwater.connectors.base import Json
from cutwater.connectors.postgres import decode_kernels as kernels
from cutwater.connectors.postgres.column_types import Fields
from cutwater.connectors.postgres.feed import Begun, Chunk, CopiedRows, Failed, Feed, LogChunk, SnapshotEnd, Wanted
from cutwater.connectors.postgres.log_rows import Changes, LogRows
from cutwater.connectors.postgres.position import Place, Position
from cutwater.connectors.postgres.segments import Segments
from cutwater.connectors.postgres.server import PATIENCE_S, client_library, lsn_text
from cutwater.connectors.postgres.slots import Names
from cutwater.connectors.postgres.stream_rows import StreamSchema, key_texts
from cutwater.errors import CutwaterError

_AGAIN_S = 0.5
"""Between two attempts to connect to a server that is away."""
_PAGE_BYTES, _PAGE_HEADER_BYTES = 8192, 40
"""Of the log."""


class _Rows(Protocol):
    """Rows that wait to be given."""

    @property
    def batch(self) -> pa.RecordBatch: ...

    def behind(self, before: Position, taken: int) -> Position:
        """The position once so many of them are given."""
        ...


class MakeLogRows(Protocol):
    """Makes what decodes the changes of one connection."""

    def __call__(self) -> LogRows: ...


class _SnapshotRows(NamedTuple):
    batch: pa.RecordBatch
    table: int
    keys: list[pa.Array]

    def behind(self, before: Position, taken: int) -> Position:
        """See ``_Rows``."""
        if not taken:
            return before
        (key,) = key_texts([key.slice(taken - 1, 1) for key in self.keys])
        return msgspec.structs.replace(before, at=Place(self.table, key))


class _LogRows(NamedTuple):
    batch: pa.RecordBatch
    changes: Changes

    def behind(self, before: Position, taken: int) -> Position:
        """See ``_Rows``."""
        ended = int(np.searchsorted(self.changes.end_rows, taken, side="right"))
        if not ended:
            return msgspec.structs.replace(before, rows=before.rows + taken) if taken else before
        lsn = max(before.lsn, int(self.changes.end_places[ended - 1]))
        rows = taken - int(self.changes.end_rows[ended - 1])
        segments = [] if all(segment.lsn <= lsn for segment in before.segments) else before.segments
        return msgspec.structs.replace(before, lsn=lsn, rows=rows, segments=segments)


class PostgresReader:
    """See ``SplitReader``.

    Args:
        wanted: what is read.
        schema: of the stream.
        log_rows: decodes changes; makes a new one for each connection.
        names: of slots.
        incarnation: of this run of the subtask.
        position: where to begin; ``None``: at the begin.
        end: place in the log to end at; ``None``: it never ends.
    """

    def __init__(
        self,
        wanted: Wanted,
        schema: StreamSchema,
        log_rows: MakeLogRows,
        names: Names,
        incarnation: int,
        position: Json | None,
        end: int | None,
    ) -> None:
        self._wanted, self._schema, self._names, self._incarnation = wanted, schema, names, incarnation
        self._make_log_rows = log_rows
        self._log_rows = log_rows()
        self._position = None if position is None else Position.of(position)
        self._end = None if end is None else _reachable(end)
        self._pending: _Rows | None = None
        self._taken = self._skip = 0
        self._segments: Segments | None = None
        self._feed: Feed | None = None
        self._again_s = 0.0
        self._away_since_s: float | None = None

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        """See ``SplitReader``; an empty batch where changes came of which none is a row."""
        while self._pending is None:
            if self.exhausted or not self._connected():
                return None
            assert self._feed is not None
            chunk = self._feed.take()
            if chunk is None:
                return None
            self._hear(chunk)
        batch = self._pending.batch.slice(self._taken, max_rows)
        self._taken += batch.num_rows
        if self._taken == self._pending.batch.num_rows:
            self._settle()
        return batch

    def _settle(self) -> None:
        """All rows that had come are given."""
        if self._pending is not None and self._position is not None:
            self._position = self._pending.behind(self._position, self._taken)
        self._pending, self._taken = None, 0

    def _connected(self) -> bool:
        if self._feed is None:
            now_s = time.monotonic()
            if now_s < self._again_s:
                return False
            self._again_s = now_s + _AGAIN_S
            self._log_rows = self._make_log_rows()
            self._skip = 0 if self._position is None else self._position.rows
            self._feed = Feed(self._wanted, self._names, self._incarnation, self._position)
            self._judge()
        return True

    def _judge(self) -> None:
        """Have segments of the snapshot a say over changes?"""
        position = self._position
        self._segments = None
        if position is not None and any(segment.xmax for segment in position.segments):
            self._segments = Segments(self._wanted.server, self._wanted.tables, position.segments)

    def _hear(self, chunk: Chunk) -> None:
        if isinstance(chunk, Failed):
            self._failed(chunk.error)
            return
        self._away_since_s = None
        match chunk:
            case Begun(position):
                self._position = position
                self._judge()
            case CopiedRows():
                self._pending = self._copied(chunk)
            case SnapshotEnd():
                assert self._position is not None
                self._position = msgspec.structs.replace(self._position, at=None)
                self._judge()
            case LogChunk(messages):
                self._pending = self._logged(self._log_rows.decode(messages, self._segments))

    def _copied(self, chunk: CopiedRows) -> _SnapshotRows:
        table = self._wanted.tables[chunk.table]
        data, starts = chunk.rows
        at = np.empty((len(table.columns), len(starts)), np.int64)
        length = np.empty_like(at)
        bad = int(kernels.copied_fields(data, starts, at, length))
        assert bad < 0, "the server sends rows of another width than it was asked for"
        fields = {c.name: Fields(data, at[n], length[n]) for n, c in enumerate(table.columns)}
        columns = self._schema.decode(chunk.table, fields)
        batch = self._schema.rows(chunk.table, columns, np.zeros(len(starts), np.int8))
        return _SnapshotRows(batch, chunk.table, [columns[name] for name in table.key])

    def _logged(self, changes: Changes) -> _LogRows | None:
        assert self._position is not None
        if self._skip:  # rows of the next transaction that were given before
            count = min(self._skip, changes.batch.num_rows)
            kept = changes.end_rows >= self._skip
            self._skip -= count
            changes = Changes(changes.batch.slice(count), changes.end_rows[kept] - count, changes.end_places[kept])
        rows = _LogRows(changes.batch, changes)
        if not changes.batch.num_rows:
            self._position = rows.behind(self._position, 0)
            rows = None
        if self._segments is not None and self._position.lsn >= self._segments.until:
            self._segments = None
        return rows

    def _failed(self, error: Exception) -> None:
        """The connection is lost: a new one goes on where this reader stands, unless the server is away for too long.

        Raises:
            CutwaterError: that is of no use.
        """
        self._feed = None
        server, what = self._wanted.server, "reading changes"
        if isinstance(error, CutwaterError):
            raise error
        if not isinstance(error, client_library().Error | ConnectionError):
            raise error
        if isinstance(error, ConnectionError):
            error = client_library().OperationalError(str(error))
        if not server.is_away(error):
            raise server.told(error, what)
        now_s = time.monotonic()
        self._again_s = now_s + _AGAIN_S
        if self._away_since_s is None:
            self._away_since_s = now_s
        if now_s - self._away_since_s > PATIENCE_S:
            raise server.told(error, what)

    @property
    def position(self) -> Json:
        position = self._position
        if position is not None and self._pending is not None:
            position = self._pending.behind(position, self._taken)
        return None if position is None else position.json

    @property
    def exhausted(self) -> bool:
        position = self._position
        if self._end is None or position is None or self._pending is not None or position.at is not None:
            return False
        return position.lsn >= self._end

    @property
    def origin(self) -> str:
        position = self._position
        if position is None:
            return "postgres"
        if position.at is not None:
            return f"postgres, snapshot of table {self._wanted.tables[position.at.table].shown}"
        return f"postgres, changes behind {lsn_text(position.lsn)}"

    def close(self) -> None:
        if self._feed is not None:
            self._feed.stop()
            self._feed = None


def _reachable(lsn: int) -> int:
    """A place as far as the log comes: behind the header of a page there may be nothing yet.

    >>> _reachable(8192 + 24), _reachable(9000)
    (8192, 9000)
    """
    return lsn - lsn % _PAGE_BYTES if lsn % _PAGE_BYTES <= _PAGE_HEADER_BYTES else lsn

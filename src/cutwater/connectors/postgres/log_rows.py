"""Changes out of the log: messages of ``pgoutput`` to rows, with where transactions end among them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.connectors.postgres import decode_kernels as kernels
from cutwater.connectors.postgres.catalog import OldRows, Table, table_changed
from cutwater.connectors.postgres.column_types import Fields, array_type, column_type
from cutwater.connectors.postgres.receiving import Messages
from cutwater.connectors.postgres.segments import Segments
from cutwater.connectors.postgres.stream_rows import StreamSchema, in_order, key_texts
from cutwater.errors import DataError

OnTruncate = Literal["fail", "pass_over"]
OnUnchanged = Literal["fail", "null"]


class Changes(NamedTuple):
    """Rows, and where transactions end among them."""

    batch: pa.RecordBatch
    end_rows: npt.NDArray[np.int64]
    """How many rows there are before the end of each transaction."""
    end_places: npt.NDArray[np.int64]
    """And where it ends in the log."""


class _Taken(NamedTuple):
    """What a kernel has found in messages between two that describe tables."""

    ops: npt.NDArray[np.int8]
    tables: npt.NDArray[np.int64]
    tuples: npt.NDArray[np.int64]
    xids: npt.NDArray[np.int64]

    def chosen(self, rows: Any) -> _Taken:
        """Some of the rows."""
        return _Taken(self.ops[rows], self.tables[rows], self.tuples[rows], self.xids[rows])


class LogRows:
    """Decodes the messages of one stream, in their order.

    Args:
        schema: of the stream.
        old_rows, on_truncate, on_unchanged: see ``postgres_changes``.
    """

    def __init__(
        self, schema: StreamSchema, old_rows: OldRows, on_truncate: OnTruncate, on_unchanged: OnUnchanged
    ) -> None:
        self._schema, self._tables = schema, schema.tables
        self._old_rows, self._on_truncate, self._on_unchanged = old_rows, on_truncate, on_unchanged
        self._oids = np.array([table.oid for table in self._tables], np.int64)
        self._columns: list[dict[str, int] | None] = [None] * len(self._tables)
        """Of each table: where its columns stand in a tuple, as the server said last."""
        self._widths = [0] * len(self._tables)
        self._state = np.zeros(5, np.int64)

    def decode(self, messages: Messages, segments: Segments | None) -> Changes:
        """The rows of messages, without those that segments have.

        Raises:
            DataError: a table has changed, was emptied, or a value is not told.
            CutwaterError: the server cannot be asked where a key lies.
        """
        parts: list[Changes] = []
        first, count = 0, len(messages.starts)
        while first < count:
            stop = int(kernels.next_special(messages.data, messages.starts, first, count))
            if stop > first:
                parts.append(self._between(messages, first, stop, segments))
            if stop < count:
                self._special(messages, stop)
            first = stop + 1
        return _joined(parts, self._schema.arrow)

    # ------------------------------------------------------------------------------------ messages that are no rows

    def _special(self, messages: Messages, number: int) -> None:
        begin = int(messages.starts[number]) + kernels.HEADER
        behind = number + 1
        end = int(messages.starts[behind]) if behind < len(messages.starts) else len(messages.data)
        content = messages.data[begin:end].tobytes()
        if content[:1] == b"R":
            self._described(content)
        else:
            self._truncated(content)

    def _truncated(self, content: bytes) -> None:
        count = struct.unpack_from("!I", content, 1)[0]
        oids = struct.unpack_from(f"!{count}I", content, 6)
        names = [table.shown for table in self._tables if table.oid in oids]
        if names and self._on_truncate == "fail":
            raise DataError(
                f"postgres: table {names[0]!r} was truncated, which does not tell the rows that left it",
                hint="DELETE FROM tells them. To go on as if they were still there: on_truncate='pass_over'.",
            )

    def _described(self, content: bytes) -> None:
        oid = struct.unpack_from("!I", content, 1)[0]
        number = next((n for n, table in enumerate(self._tables) if table.oid == oid), None)
        if number is None:
            return
        at = content.index(b"\0", content.index(b"\0", 5) + 1) + 1
        identity, width = struct.unpack_from("!BH", content, at)
        at += 3
        found: dict[str, tuple[int, int, int]] = {}
        for place in range(width):
            end = content.index(b"\0", at + 1)
            found[content[at + 1 : end].decode()] = (place, *struct.unpack_from("!Ii", content, end + 1))
            at = end + 9
        self._columns[number] = _places(self._tables[number], found)
        self._widths[number] = width
        if identity == ord("n"):
            raise table_changed(self._tables[number], "it has no replica identity any more")

    # ------------------------------------------------------------------------------------------------------- rows

    def _between(self, messages: Messages, first: int, stop: int, segments: Segments | None) -> Changes:
        count = stop - first
        ops, tables = np.empty(2 * count, np.int8), np.empty(2 * count, np.int64)
        tuples, xids = np.empty(2 * count, np.int64), np.empty(2 * count, np.int64)
        end_rows, end_places = np.empty(count, np.int64), np.empty(count, np.int64)
        self._state[kernels.ROWS] = self._state[kernels.ENDED] = 0
        data, starts = messages
        kernels.take_changes(
            data, starts, first, stop, self._oids, self._state, ops, tables, tuples, xids, end_rows, end_places
        )
        rows, ended = int(self._state[kernels.ROWS]), int(self._state[kernels.ENDED])
        if self._old_rows == "full" and (keyed := int(self._state[kernels.KEYED])):
            raise _not_full(self._tables[keyed - 1])
        taken = _Taken(ops, tables, tuples, xids).chosen(slice(rows))
        end_rows, end_places = end_rows[:ended], end_places[:ended]
        parts: list[pa.RecordBatch] = []
        kept: list[npt.NDArray[np.int64]] = []
        for table in np.unique(taken.tables).tolist():
            mine = np.flatnonzero(taken.tables == table)
            batch, chosen = self._of_table(table, data, taken.chosen(mine), segments)
            parts.append(batch)
            kept.append(mine if chosen is None else mine[chosen])
        left = sum(len(rows) for rows in kept)
        if left < rows:
            there = np.zeros(rows + 1, np.int64)
            there[np.concatenate(kept) + 1 if kept else []] = 1
            end_rows = np.cumsum(there)[end_rows]
        return Changes(in_order(parts, kept, self._schema.arrow), end_rows, end_places)

    def _of_table(
        self, number: int, data: Any, taken: _Taken, segments: Segments | None
    ) -> tuple[pa.RecordBatch, npt.NDArray[np.int64] | None]:
        """The rows of one table, and which of them are to be given (``None``: all)."""
        table, columns = self._tables[number], self._columns[number]
        if columns is None:
            raise table_changed(table, "the server did not describe it")
        at = np.empty((self._widths[number], len(taken.ops)), np.int64)
        length = np.empty_like(at)
        if kernels.tuple_fields(data, taken.tuples, at, length) >= 0:
            raise table_changed(table, "rows of another number of columns come")
        self._pair(table, columns, data, taken.ops, at, length)
        fields = {name: Fields(data, at[place], length[place]) for name, place in columns.items()}
        made = self._schema.decode(number, fields)
        batch = self._schema.rows(number, made, taken.ops)
        if segments is None:
            return batch, None
        chosen = _not_seen(segments, number, [made[name] for name in table.key], taken.xids)
        return (batch, None) if chosen is None else (batch.take(pa.array(chosen)), chosen)

    def _pair(
        self, table: Table, columns: dict[str, int], data: Any, ops: npt.NDArray[np.int8], at: Any, length: Any
    ) -> None:
        """What an update leaves as it was comes from the row before it; one that changes the key makes another row."""
        after = np.flatnonzero((ops == kernels.AFTER) | (ops == kernels.INSERT))
        before = after - 1
        paired = (before >= 0) & (ops[np.maximum(before, 0)] == kernels.BEFORE)
        if self._old_rows == "full" and (ops[after[~paired]] == kernels.AFTER).any():
            raise _not_full(table)
        before[~paired] = -1
        kernels.fill_unchanged(at, length, before, after)
        places = list(columns.values())
        unchanged = length[places] == kernels.UNCHANGED
        if unchanged.any():
            if self._on_unchanged == "fail":
                name = list(columns)[int(np.flatnonzero(unchanged.any(axis=1))[0])]
                raise DataError(
                    f"postgres: an update of table {table.shown!r} left column {name!r} as it was, and a value as long "
                    "as that is then not told",
                    hint=f"ALTER TABLE {table.sql} REPLICA IDENTITY FULL; tells it from now on. To have null for it: "
                    "on_unchanged='null'. To do without: tables={...: [other columns]}.",
                )
            length[length == kernels.UNCHANGED] = kernels.NULL
        if table.key and paired.any():
            old, new = before[paired], after[paired]
            moved = np.empty(len(new), np.bool_)
            key = np.array([columns[name] for name in table.key], np.int64)
            kernels.differs(data, at, length, key, old, new, moved)
            ops[old[moved]], ops[new[moved]] = kernels.DELETE, kernels.INSERT


def _not_full(table: Table) -> DataError:
    return table_changed(
        table, f"its replica identity is not FULL any more (ALTER TABLE {table.sql} REPLICA IDENTITY FULL)"
    )


def _places(table: Table, found: dict[str, tuple[int, int, int]]) -> dict[str, int]:
    """Where the columns of a table stand in its tuples.

    Raises:
        DataError: one is missing, or of another type.
    """
    places: dict[str, int] = {}
    for column in table.columns:
        if column.name not in found:
            raise table_changed(table, f"it has no column {column.name!r} (dropped, renamed, or added after this)")
        place, oid, typmod = found[column.name]
        again = column_type(oid, typmod)
        if oid != column.oid or (again is not None and again != column.type):
            raise table_changed(table, f"column {column.name!r} is not {column.declared} any more")
        places[column.name] = place
    return places


def _not_seen(
    segments: Segments, table: int, keys: Sequence[pa.Array], xids: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64] | None:
    """The rows that are in no segment; ``None``: all."""
    seen = segments.seen(xids)
    doubtful = np.flatnonzero(seen.any(axis=0))
    if not len(doubtful):
        return None
    chosen = np.ones(len(xids), np.bool_)
    places = segments.places(table, key_texts([key.take(pa.array(doubtful)) for key in keys]))
    chosen[doubtful] = ~seen[places, doubtful]
    return np.flatnonzero(chosen)


def _joined(parts: Sequence[Changes], schema: pa.Schema) -> Changes:
    if len(parts) == 1:
        return parts[0]
    if not parts:
        none = np.empty(0, np.int64)
        return Changes(in_order((), (), schema), none, none)
    before = np.cumsum([0, *(part.batch.num_rows for part in parts)])
    ends = [part.end_rows + rows for part, rows in zip(parts, before, strict=False)]
    batch: Any = pa.concat_batches([part.batch for part in parts])
    return Changes(batch, np.concatenate(ends), np.concatenate([part.end_places for part in parts]))


def warm_up() -> None:
    """Compile the kernels, over no messages and no values."""
    data, none = np.frombuffer(bytes(8), np.uint8), np.empty(0, np.int64)
    kernels.heard(data, none, 0, np.zeros(2, np.int64))
    kernels.next_special(data, none, 0, 0)
    state, ops, fields = np.zeros(5, np.int64), np.empty(0, np.int8), np.empty((1, 0), np.int64)
    kernels.take_changes(data, none, 0, 0, none, state, ops, none, none, none, none, none)
    kernels.tuple_fields(data, none, fields, fields)
    kernels.copied_fields(data, none, fields, fields)
    kernels.fill_unchanged(fields, fields, none, none)
    kernels.differs(data, fields, fields, none, none, none, np.empty(0, np.bool_))
    for oid in (16, 17, 20, 26, 1082, 1114, 1700, 2950):
        for typmod in (-1, (9 << 16) + 4):
            kind = column_type(oid, typmod)
            assert kind is not None
            array_type(0, kind).decode(Fields(data, none, none))

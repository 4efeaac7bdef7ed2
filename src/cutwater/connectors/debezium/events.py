"""Change events as columns, whatever they were written as, and the rows of an updating stream that they become."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from cutwater.connectors.debezium.encodings import UNAVAILABLE
from cutwater.connectors.files.schemas import Widened
from cutwater.connectors.messages.base import BadValue, Decoded, Values
from cutwater.data.changes import AFTER, BEFORE, DELETE, INSERT, op_column

Numbers = npt.NDArray[np.int64]
NOWHERE = -1
CREATE, READ, UPDATE, REMOVE = (ord(letter) for letter in "crud")
_REFUSED = {
    ord("t"): "the table was truncated: which rows left it is not said. Delete rows instead, or begin anew",
    ord("m"): "it is a message of the database's log, and no change of a row",
}


@dataclass(frozen=True)
class Images:
    """Rows of a table as they were before or after a change.

    Of each event ``at`` says which of the rows is its, ``NOWHERE``: it has none.
    """

    columns: list[pa.Array]
    at: Numbers


@dataclass(frozen=True)
class Events:
    """Changes of rows, with what they say."""

    numbers: Numbers
    """Of their messages."""
    ops: npt.NDArray[np.uint8]
    """Letters; 0: there is none."""
    before: Images
    after: Images
    source: Images
    bad: dict[int, str] = field(default_factory=dict[int, str])
    """Messages that are no events, and why.  They may be among the events."""


@dataclass(frozen=True)
class Table:
    """The table that events change, as far as somebody reads it."""

    columns: pa.Schema
    key: tuple[str, ...]
    """Columns that tell its rows apart; none: events hold rows as they were before, too."""
    source: pa.Schema
    """Further columns, of where the change comes from, by their names there."""

    @property
    def before(self) -> pa.Schema:
        """What is needed of a row before a change."""
        return pa.schema([self.columns.field(name) for name in self.key]) if self.key else self.columns


class EventReader(Protocol):
    """Reads events in one form."""

    gap: int

    def read(self, values: Values) -> Events: ...


class EventDecoder:
    """Events to rows with marks.

    Args:
        reader: reads the events.
        table: whose columns are read.
        schema: of the rows, with columns that nobody reads.
        names: of the columns of ``table.source`` in the rows.
    """

    def __init__(self, reader: EventReader, table: Table, schema: pa.Schema, names: Sequence[str]) -> None:
        self.gap = reader.gap
        self._reader, self._table = reader, table
        columns = [*table.columns.names, *names]
        self._schema = pa.schema([schema.field(0), *(schema.field(name) for name in columns)])
        self._widened = Widened(schema)

    def decode(self, values: Values, *, first_only: bool) -> Decoded:
        """See ``ValueDecoder``.

        Raises:
            StorageError: a registry does not answer.
        """
        events = self._reader.read(values)
        bad = dict(events.bad)
        for reason, wrong in self._wrong(events):
            for number in events.numbers[wrong].tolist():
                bad.setdefault(number, reason)
        listed = sorted(BadValue(number, reason) for number, reason in bad.items())
        if listed and first_only:
            empty = pa.RecordBatch.from_pylist([], schema=self._schema)
            return Decoded(self._widened.widen(empty), np.empty(0, np.int64), listed[:1])
        chosen = np.flatnonzero(~np.isin(events.numbers, np.fromiter(bad, np.int64, len(bad))))
        rows, of = self._rows(events, chosen)
        return Decoded(self._widened.widen(rows), of, listed)

    # ------------------------------------------------------------------------------------------------ what is wrong

    def _wrong(self, events: Events) -> list[tuple[str, npt.NDArray[np.bool_]]]:
        """Reasons and the events that they are of."""
        ops, before, after = events.ops, events.before.at >= 0, events.after.at >= 0
        found = [(reason, ops == letter) for letter, reason in _REFUSED.items()]
        found.append((NO_OPERATION, ops == 0))
        known = np.isin(ops, [CREATE, READ, UPDATE, REMOVE, *_REFUSED, 0])
        found.append(("its operation is none of c, r, u and d", ~known))
        adding = np.isin(ops, [CREATE, READ, UPDATE])
        found.append(("it does not say what the row is now", adding & ~after))
        needed = ops == REMOVE if self._table.key else np.isin(ops, [UPDATE, REMOVE])
        found.append((_NO_BEFORE[bool(self._table.key)], needed & ~before))
        found.append((_UNAVAILABLE, adding & self._unavailable(events.after, self._table.columns)))
        if self._table.key:
            found.append(("a column of the key is null", adding & self._null_keys(events.after, self._table.columns)))
            found.append((_NO_KEY, (ops == REMOVE) & self._null_keys(events.before, self._table.before)))
        else:
            found.append((_UNAVAILABLE, needed & self._unavailable(events.before, self._table.columns)))
        return found

    def _null_keys(self, images: Images, schema: pa.Schema) -> npt.NDArray[np.bool_]:
        bad = np.zeros(len(images.columns[0]) if images.columns else 0, np.bool_)
        for name in self._table.key:
            column = images.columns[schema.get_field_index(name)]
            if column.null_count:
                bad |= np.asarray(column.is_null())
        return _of_events(bad, images)

    def _unavailable(self, images: Images, schema: pa.Schema) -> npt.NDArray[np.bool_]:
        bad = np.zeros(len(images.columns[0]) if images.columns else 0, np.bool_)
        for column, one in zip(images.columns, schema, strict=True):
            if pt.is_string(one.type) or pt.is_binary(one.type):
                missing = pa.scalar(UNAVAILABLE if pt.is_string(one.type) else UNAVAILABLE.encode(), one.type)
                bad |= np.asarray(pc.call_function("equal", [column, missing]).fill_null(False))
        return _of_events(bad, images)

    # ------------------------------------------------------------------------------------------------------- the rows

    def _rows(self, events: Events, chosen: Numbers) -> tuple[pa.RecordBatch, Numbers]:
        """The rows of some of the events, and the number of the message of each."""
        ops, keyed = events.ops[chosen], bool(self._table.key)
        two = self._moved(events, chosen) if keyed else ops == UPDATE
        ends = np.cumsum(np.where(two, 2, 1))
        count = int(ends[-1]) if len(ends) else 0
        event = np.repeat(np.arange(len(chosen)), np.where(two, 2, 1))
        is_first = np.ones(count, np.bool_)
        is_first[(ends - 1)[two]] = False
        of_before = is_first & (two | (ops == REMOVE))[event]
        codes = np.full(count, INSERT, np.int8)
        codes[(ops == UPDATE)[event] & ~of_before] = AFTER
        codes[of_before] = np.where(((ops == REMOVE) | keyed)[event[of_before]], DELETE, BEFORE)
        place = chosen[event]
        columns: list[pa.Array] = [op_column(codes)]
        for number, one in enumerate(self._table.columns):
            columns.append(self._column(events, place, of_before, number, one))
        for column in events.source.columns:
            columns.append(_taken(column, events.source.at[place]))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema), events.numbers[place]

    def _column(
        self, events: Events, place: Numbers, of_before: npt.NDArray[np.bool_], number: int, one: pa.Field
    ) -> pa.Array:
        after, at = events.after.columns[number], events.after.at[place]
        if not of_before.any():
            return _taken(after, at)
        index = self._table.before.get_field_index(one.name)
        if index < 0:
            return _taken(after, np.where(of_before, NOWHERE, at))
        before = events.before.columns[index]
        behind = np.where(at >= 0, at + len(before), NOWHERE)
        return _taken(pa.concat_arrays([before, after]), np.where(of_before, events.before.at[place], behind))

    def _moved(self, events: Events, chosen: Numbers) -> npt.NDArray[np.bool_]:
        """The updates that change a key: a row leaves, another one comes."""
        before, after = events.before.at[chosen], events.after.at[chosen]
        both = np.flatnonzero((events.ops[chosen] == UPDATE) & (before >= 0) & (after >= 0))
        moved = np.zeros(len(chosen), np.bool_)
        for index, name in enumerate(self._table.key):
            old = events.before.columns[index].take(pa.array(before[both]))
            new = events.after.columns[self._table.columns.get_field_index(name)].take(pa.array(after[both]))
            # Some connectors give nulls where the key has not changed.
            moved[both] |= np.asarray(pc.call_function("not_equal", [old, new]).fill_null(False))
        return moved


NO_OPERATION = "it has no operation: no change of a row by Debezium"
_NO_BEFORE = {
    False: "it does not say what the row was before. Let the table tell (REPLICA IDENTITY FULL), or name its key: "
    "cw.debezium(..., key='id')",
    True: "it does not say which row left. Let the table tell (REPLICA IDENTITY DEFAULT or FULL)",
}
_NO_KEY = (
    "it does not say which row left: a column of the key is null. Does key= name what the table's replica identity is?"
)
_UNAVAILABLE = (
    f"a column holds {UNAVAILABLE}: the database has not sent a large value that did not change. Read without the "
    "column, or let the table tell (REPLICA IDENTITY FULL)"
)


def _of_events(rows: npt.NDArray[np.bool_], images: Images) -> npt.NDArray[np.bool_]:
    """Flags of images as flags of the events."""
    if not rows.any():
        return np.zeros(len(images.at), np.bool_)
    return (images.at >= 0) & rows[np.maximum(images.at, 0)]


def _taken(column: pa.Array, places: Numbers) -> pa.Array:
    """Values by their places, null where they are ``NOWHERE``."""
    if len(places) == len(column) and (places == np.arange(len(column))).all():
        return column
    missing = places < 0
    chosen: Any = pa.array(places, mask=missing) if missing.any() else pa.array(places)
    return column.take(chosen)

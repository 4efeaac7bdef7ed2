"""A source of given rows that carries faults as data: tests, examples, fault drills.

memory([{"k": 1}, PAUSE(0.5), {"k": 2}, FAIL("boom", marker="/tmp/boom"), {"k": 3}, KILL(marker="/tmp/kill")])
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import pyarrow as pa

from cutwater.connectors.base import BadRows, Json, SourceContext, Split, check_rate
from cutwater.connectors.files.schemas import SchemaOrigin, column_differences
from cutwater.data.rows import shorten_value
from cutwater.data.schema_text import as_schema
from cutwater.errors import BuildError, DataError, did_you_mean


@dataclass(frozen=True)
class PAUSE:
    """Nothing comes for that many seconds."""

    seconds: float


@dataclass(frozen=True)
class FAIL:
    """Reading raises ``DataError(message)``, ``times`` times in all; after that the item is passed over.

    ``marker`` is a file that counts, since a process started anew remembers nothing; without it the item fails always.
    """

    message: str
    times: int = 1
    marker: str | None = None


@dataclass(frozen=True)
class KILL:
    """The reading process gets SIGKILL, ``times`` times in all (counted in the file ``marker``)."""

    marker: str
    times: int = 1


@dataclass(frozen=True)
class BAD:
    """A row that cannot be parsed: fails the job or goes to the dead letters."""

    raw: str
    reason: str = "bad row"


@dataclass(frozen=True)
class END:
    """The split ends here; what follows is never read."""


Fault: TypeAlias = PAUSE | FAIL | KILL | BAD | END
Item: TypeAlias = pa.RecordBatch | pa.Table | dict[str, Any] | Fault


@dataclass(frozen=True)
class MemorySource:
    """Rows and faults in memory; one split per list.  They travel with the plan, so keep them small."""

    schema: pa.Schema
    partitions: tuple[tuple[pa.RecordBatch | Fault, ...], ...]
    rate: float | None = None
    bad_rows: BadRows = "fail"

    bounded: ClassVar[bool] = True
    replayable: ClassVar[bool] = True
    discover_interval_ms: ClassVar[float] = 3_600_000.0

    def __post_init__(self) -> None:
        check_rate(self.rate)

    def with_bad_rows(self, bad_rows: BadRows) -> MemorySource:
        """A copy that fails at bad rows or diverts them."""
        return replace(self, bad_rows=bad_rows)

    def discover(self) -> list[Split]:
        return [Split(f"memory-{i}", i) for i in range(len(self.partitions))]

    def open(self, split: Split, position: Json | None, ctx: SourceContext) -> _MemoryReader:
        return _MemoryReader(self, split, position, ctx)


class _MemoryReader:
    """Position: ``[number of the item, row within it]``."""

    def __init__(self, source: MemorySource, split: Split, position: Json | None, ctx: SourceContext) -> None:
        self._items = source.partitions[split.data]
        self._divert = source.bad_rows == "dead_letter"
        self._ctx = ctx
        self._id = split.id
        self._item, self._row = position or (0, 0)
        self._resume_s: float | None = None
        self._origin = self._id
        self._skip_empty()

    def read(self, max_rows: int) -> pa.RecordBatch | None:
        while not self.exhausted:
            item = self._items[self._item]
            if isinstance(item, Fault):
                if not self._pass(item):
                    return None
                self._next_item()
                continue
            batch = item.slice(self._row, max_rows)
            self._origin = f"{self._id}, item {self._item}, rows {self._row} to {self._row + batch.num_rows - 1}"
            self._row += batch.num_rows
            if self._row >= item.num_rows:
                self._next_item()
            return batch
        return None

    @property
    def position(self) -> Json:
        return [self._item, self._row]

    @property
    def exhausted(self) -> bool:
        return self._item >= len(self._items) or isinstance(self._items[self._item], END)

    @property
    def origin(self) -> str:
        return self._origin

    def close(self) -> None:
        return None

    def _pass(self, fault: Fault) -> bool:
        """Act out a fault; False while it still holds."""
        where = f"{self._id}, item {self._item}"
        match fault:
            case PAUSE(seconds):
                if self._resume_s is None:
                    self._resume_s = time.monotonic() + seconds
                if time.monotonic() < self._resume_s:
                    return False
                self._resume_s = None
            case FAIL(message, times, marker):
                if marker is None or _count(marker, times):
                    raise DataError(f"{where}: {message}")
            case KILL(marker, times):
                if _count(marker, times):
                    os.kill(os.getpid(), signal.SIGKILL)
            case BAD(raw, reason):
                if not self._divert:
                    raise DataError(
                        f"{where}: {reason}: {raw}", hint="Read with bad_rows='dead_letter' to divert such rows."
                    )
                self._ctx.dead_letter(self._id, self._item, reason, raw)
            case END():
                return False
        return True

    def _next_item(self) -> None:
        self._item, self._row = self._item + 1, 0
        self._skip_empty()

    def _skip_empty(self) -> None:
        """No item without rows is ever the next one, so that the end is known as soon as the last row is out."""
        while self._item < len(self._items):
            item = self._items[self._item]
            if isinstance(item, Fault) or self._row < item.num_rows:
                return
            self._item, self._row = self._item + 1, 0


def _count(marker: str, times: int) -> bool:
    """Note one more occurrence in the file, durably; False once there were ``times``."""
    handle = os.open(marker, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        if os.fstat(handle).st_size >= times:
            return False
        os.write(handle, b"x")
        os.fsync(handle)
        return True
    finally:
        os.close(handle)


def memory(
    *partitions: Iterable[Item], schema: pa.Schema | str | None = None, rate: float | None = None
) -> MemorySource:
    """A source of rows (dicts), record batches and faults; one split per argument.

    Neighbouring dicts become one batch.  Faults: ``PAUSE``, ``FAIL``, ``KILL``, ``BAD``, ``END``.

    Args:
        partitions: the items of each split.
        schema: schema of the rows (or text such as ``"k long, v double"``); None takes it from the first rows.
        rate: rows per second over all subtasks.

    Raises:
        BuildError: no rows to take a schema from, or rows that do not fit it.

    >>> source = memory([{"k": 1}, {"k": 2}], [{"k": 3}])
    >>> source.schema.names, [s.id for s in source.discover()]
    (['k'], ['memory-0', 'memory-1'])
    """
    lists = [_items(partition) for partition in partitions]
    known = _first_schema(lists) if schema is None else as_schema(schema)
    return MemorySource(known, tuple(tuple(_batches(items, known, n)) for n, items in enumerate(lists)), rate)


def _items(partition: Iterable[Item]) -> list[Item]:
    """The items of a split, checked."""
    kind = type(partition).__name__
    if isinstance(partition, dict | pa.RecordBatch | pa.Table | str) or hasattr(partition, "to_dict"):
        hint = "Write cw.memory([{'k': 1}, {'k': 2}]), or cw.memory([table])."
        if hasattr(partition, "to_arrow"):
            hint = "Write cw.memory([frame.to_arrow()])."
        raise BuildError(f"memory: each argument is the list of one split's rows, not a {kind}", hint=hint)
    items = list(partition)
    for item in items:
        if not isinstance(item, dict | pa.RecordBatch | pa.Table | Fault):
            raise BuildError(
                f"memory: an item is a row (dict), a batch or a fault, not {type(item).__name__}",
                hint="Write cw.memory([{'k': 1}, {'k': 2}]).",
            )
    return items


def _first_schema(lists: Sequence[Sequence[Item]]) -> pa.Schema:
    rows: list[dict[str, Any]] = []
    for items in lists:
        for item in items:
            if isinstance(item, dict):
                rows.append(item)
            elif not isinstance(item, Fault):
                return item.schema
    if not rows:
        raise BuildError("memory: no rows to take a schema from", hint="Give schema='k long, v double'.")
    return pa.schema([(name, _guessed(name, lists)) for name in dict.fromkeys(name for row in rows for name in row)])


def _guessed(name: str, lists: Sequence[Sequence[Item]]) -> pa.DataType:
    """The type of a column by all its values; times with a zone are instants in UTC, wherever they were noted."""
    places = [
        (split, number, item.get(name))
        for split, items in enumerate(lists)
        for number, item in enumerate(items)
        if isinstance(item, dict)
    ]
    values = [value for _, _, value in places]
    try:
        kind = pa.array(values).type
    except (pa.ArrowException, OverflowError, ValueError, TypeError) as e:
        seen: list[Any] = []
        for split, number, value in places:
            try:
                pa.array([*seen[-1:], value])
            except (pa.ArrowException, OverflowError, ValueError, TypeError):
                before = f", before it is {type(seen[-1]).__name__} {shorten_value(seen[-1])}" if seen else ""
                raise BuildError(
                    f"memory: the rows have no common schema: {_place(split, number, name)} is {type(value).__name__} "
                    f"{shorten_value(value)}{before}",
                    hint=f"Mend the row, or give schema='{name} string, ...'.",
                ) from e
            seen += [value] if value is not None else []
        raise BuildError(f"memory: column {name!r}: {e}", hint=f"Give schema='{name} string, ...'.") from e
    # Arrow goes by the first value; one instant makes a column of instants, in which a time without zone is UTC.
    return pa.timestamp("us", "UTC") if pa.types.is_timestamp(kind) and any(map(_is_zoned, values)) else kind


def _place(split: int, number: int, column: str) -> str:
    return f"split {split}, row {number}, column {column!r}"


def _batches(items: Sequence[Item], schema: pa.Schema, split: int) -> Iterable[pa.RecordBatch | Fault]:
    rows: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        if isinstance(item, dict):
            rows.append(item)
            continue
        if rows:
            yield _from_rows(rows, schema, split, number - len(rows))
            rows = []
        if isinstance(item, KILL | FAIL) and item.marker is not None:
            yield replace(item, marker=str(Path(item.marker).absolute()))
        elif isinstance(item, Fault):
            yield item
        elif isinstance(item, pa.Table):
            yield from (_fit(b, schema) for b in item.to_batches())
        else:
            yield _fit(item, schema)
    if rows:
        yield _from_rows(rows, schema, split, len(items) - len(rows))


def _from_rows(rows: list[dict[str, Any]], schema: pa.Schema, split: int, first: int) -> pa.RecordBatch:
    """Rows as a batch; ``first`` is the number of the first one in its split."""
    unknown = sorted({name for row in rows for name in row} - set(schema.names))
    if unknown:
        raise BuildError(
            f"memory: column {unknown[0]!r} is not in the schema ({', '.join(schema.names)})",
            hint=did_you_mean(unknown[0], schema.names),
        )
    columns: list[pa.Array] = []
    for field in schema:
        values = [row.get(field.name) for row in rows]
        try:
            columns.append(_column(values, field))
        except (pa.ArrowException, OverflowError, ValueError, TypeError):
            _refuse(values, field, split, first)
            raise
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _column(values: list[Any], field: pa.Field) -> pa.Array:
    """Values as a column of a field.

    Raises:
        pa.ArrowException, OverflowError, ValueError, TypeError: one of them has no place there.
    """
    column = pa.array(values, field.type)
    if column.null_count and not field.nullable:
        raise ValueError("null, and the schema says not null")
    if pa.types.is_timestamp(field.type) and field.type.tz is None and any(map(_is_zoned, values)):
        raise ValueError("a time with a zone, and timestamp_ntz has none: write timestamp")
    return column


def _is_zoned(value: object) -> bool:
    return isinstance(value, datetime) and value.tzinfo is not None


def _refuse(values: list[Any], field: pa.Field, split: int, first: int) -> None:
    """Name the first value that does not fit."""
    for number, value in enumerate(values, start=first):
        try:
            _column([value], field)
        except (pa.ArrowException, OverflowError, ValueError, TypeError) as e:
            raise BuildError(
                f"memory: {_place(split, number, field.name)}: {type(value).__name__} {shorten_value(value)} does not "
                f"fit the schema, which says {field.type}: {e}",
                hint="Mend the row, or the schema.",
            ) from e


def _fit(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if not batch.schema.equals(schema):
        differences = column_differences(batch.schema, schema, SchemaOrigin("the schema", given=False))
        what = "; ".join(differences) or f"columns {batch.schema.names} instead of {schema.names}"
        raise BuildError(
            f"memory: a batch does not have the schema of the source: {what}", hint="Cast it: table.cast(schema)."
        )
    return batch

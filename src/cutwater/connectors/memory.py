"""A source of given rows that carries faults as data: tests, examples, fault drills.

memory([{"k": 1}, PAUSE(0.5), {"k": 2}, FAIL("boom", marker="/tmp/boom"), {"k": 3}, KILL(marker="/tmp/kill")])
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import pyarrow as pa

from cutwater.connectors.base import BadRows, Json, SourceContext, Split, check_rate
from cutwater.errors import BuildError, DataError
from cutwater.operators.schema_text import as_schema

__all__ = ["BAD", "END", "FAIL", "KILL", "PAUSE", "Item", "MemorySource", "memory"]


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

    def __post_init__(self) -> None:
        check_rate(self.rate)

    @property
    def bounded(self) -> bool:
        return True

    @property
    def replayable(self) -> bool:
        return True

    @property
    def discover_interval_ms(self) -> float:
        return 3_600_000.0

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
    lists = [list(p) for p in partitions]
    for item in (item for items in lists for item in items):
        if not isinstance(item, dict | pa.RecordBatch | pa.Table | Fault):
            raise BuildError(f"memory: an item is a row (dict), a batch or a fault, not {type(item).__name__}")
    known = _first_schema(lists) if schema is None else as_schema(schema)
    return MemorySource(known, tuple(tuple(_batches(items, known)) for items in lists), rate)


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
    names = dict.fromkeys(name for row in rows for name in row)
    try:
        return pa.RecordBatch.from_pylist([{n: row.get(n) for n in names} for row in rows]).schema
    except (pa.ArrowInvalid, pa.ArrowTypeError) as e:
        raise BuildError(f"memory: the rows have no common schema: {e}", hint="Give schema=...") from e


def _batches(items: Sequence[Item], schema: pa.Schema) -> Iterable[pa.RecordBatch | Fault]:
    rows: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, dict):
            rows.append(item)
            continue
        if rows:
            yield _from_rows(rows, schema)
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
        yield _from_rows(rows, schema)


def _from_rows(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.RecordBatch:
    unknown = sorted({name for row in rows for name in row} - set(schema.names))
    if unknown:
        raise BuildError(f"memory: column {unknown[0]!r} is not in the schema ({', '.join(schema.names)})")
    try:
        return pa.RecordBatch.from_pylist(rows, schema=schema)
    except (pa.ArrowInvalid, pa.ArrowTypeError) as e:
        raise BuildError(f"memory: a row does not fit the schema: {e}") from e


def _fit(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    if not batch.schema.equals(schema):
        raise BuildError(f"memory: a batch has {batch.schema.names} of other types or names than {schema.names}")
    return batch

"""The rows of Nexmark as files of plain columns, which both engines map into memory: neither of them computes a row.

Made once per program by the generator of the examples.  A table ``bid`` is one file per column: ``bid.price`` has
little-endian 64-bit numbers (times in microseconds), ``bid.extra`` has texts one after the other, and
``bid.extra.ends`` 32-bit numbers, the place where each begins and, as the last one, where all end.  The rows of the
first *n* events are the beginning of every file.  Columns that none of the measured queries reads are left out.
Whoever asks for more rows than are stored gets the same again, at times that follow.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import IO

import nexmark_data as nx
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

import cutwater as cw
from benchmarks.probe import note_first
from benchmarks.workload import PARALLELISM

__all__ = [
    "COLUMNS",
    "PER_SECOND",
    "StoredTables",
    "lasts_us",
    "mapped",
    "rows_of",
    "schema_of",
    "stored_rows",
    "write",
]

PER_SECOND = 10_000
"""Events in a second of event time."""
COLUMNS = {
    "person": ("id", "name", "city", "state", "time"),
    "auction": ("id", "item", "seller", "category", "time", "expires"),
    "bid": ("auction", "bidder", "price", "time", "extra"),
}
_TABLES: dict[str, nx.Table] = {
    "person": nx.People(PER_SECOND),
    "auction": nx.Auctions(PER_SECOND),
    "bid": nx.Bids(PER_SECOND),
}
_CHUNK = 262_144
_TIME_BYTES = 8


def rows_of(table: str, events: int) -> int:
    """Rows of a table among the first events.

    >>> rows_of("bid", 100)
    92
    """
    return nx.rows_of(_TABLES[table], events)


def write(folder: Path, events: int, bids: int | None = None) -> None:
    """Write all tables: the rows of the first events, of the bids those of ``bids`` events, a multiple of 50.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     write(Path(name), 1_000)
    ...     found = mapped(name, "auction", 7, 50).to_pylist()
    >>> found == nx.Auctions(PER_SECOND)(7, 50).select(COLUMNS["auction"]).to_pylist()
    True
    """
    for name, table in _TABLES.items():
        with ExitStack() as stack:
            files = {
                file: stack.enter_context((folder / f"{name}.{file}").open("wb"))
                for column in COLUMNS[name]
                for file in ([column, f"{column}.ends"] if _is_text(_field(name, column)) else [column])
            }
            rows = rows_of(name, events if name != "bid" or bids is None else bids)
            _write_table(table, rows, COLUMNS[name], files)


def _write_table(table: nx.Table, rows: int, columns: tuple[str, ...], files: dict[str, IO[bytes]]) -> None:
    written = {column: 0 for column in columns if f"{column}.ends" in files}
    for start in range(0, rows, _CHUNK):
        batch = table(start, min(_CHUNK, rows - start))
        for column in columns:
            array = batch.column(column)
            if column in written:
                written[column] = _write_texts(array, files[column], files[f"{column}.ends"], written[column])
            else:
                files[column].write(array.buffers()[1])
    for column, end in written.items():
        files[f"{column}.ends"].write(np.int32(end).tobytes())


def _write_texts(texts: pa.Array, file: IO[bytes], ends: IO[bytes], written: int) -> int:
    """Append a column of whole texts; returns the bytes in the file from now on."""
    _, offsets, data = texts.buffers()
    places = np.frombuffer(offsets, np.int32)[: len(texts) + 1]
    ends.write((places[:-1] + written).tobytes())
    file.write(memoryview(data)[: places[-1]])
    return written + int(places[-1])


def _field(table: str, column: str) -> pa.Field:
    return _TABLES[table].schema.field(column)


def _is_text(field: pa.Field) -> bool:
    return pa.types.is_string(field.type)


@cache
def _buffers(folder: str, table: str) -> dict[str, tuple[pa.Buffer, pa.Buffer | None]]:
    """Each column's data and ends, mapped once in each process."""

    def buffer(name: str) -> pa.Buffer:
        return pa.memory_map(str(Path(folder, f"{table}.{name}"))).read_buffer()

    return {
        column: (buffer(column), buffer(f"{column}.ends") if _is_text(_field(table, column)) else None)
        for column in COLUMNS[table]
    }


def schema_of(table: str) -> pa.Schema:
    """The columns in the files of a table."""
    return pa.schema([_field(table, column) for column in COLUMNS[table]])


def mapped(folder: str, table: str, start: int, count: int) -> pa.RecordBatch:
    """Rows of a table, without a copy."""
    arrays: list[pa.Array] = []
    for column, (data, ends) in _buffers(folder, table).items():
        buffers = [None, data] if ends is None else [None, ends, data]
        arrays.append(pa.Array.from_buffers(_field(table, column).type, count, buffers, offset=start))
    return pa.record_batch(arrays, schema=schema_of(table))


def stored_rows(folder: str, table: str) -> int:
    """How many rows a table has in the files."""
    return _buffers(folder, table)["time"][0].size // _TIME_BYTES


def lasts_us(table: str, rows: int) -> int:
    """The event time of whole blocks of events, in microseconds, by their rows of a table.

    >>> lasts_us("bid", rows_of("bid", 10_000))
    1000000
    """
    return rows * 50 // rows_of(table, 50) * 1_000_000 // PER_SECOND


def again(folder: str, table: str, start: int, count: int) -> pa.RecordBatch:
    """Rows of a table whose rows come again and again, each time later.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as name:
    ...     write(Path(name), 100)
    ...     times = again(name, "bid", 90, 4).column("time").to_pylist()
    >>> [(time - times[1]).total_seconds() > 0 for time in times]
    [False, False, True, True]
    """
    stored = stored_rows(folder, table)
    passed, first = divmod(start, stored)
    head = mapped(folder, table, first, min(count, stored - first))
    if passed:
        column = head.schema.get_field_index("time")
        later = pc.add(head.column(column), pa.scalar(lasts_us(table, stored) * passed, pa.duration("us")))
        head = head.set_column(column, head.schema.field(column), later)
    if head.num_rows == count:
        return head
    return pa.concat_batches([head, again(folder, table, start + head.num_rows, count - head.num_rows)])


@dataclass(frozen=True)
class Rows:
    """``fn(start, count)`` for ``cw.generate``; the first call in each process is noted in ``reports``."""

    folder: str
    table: str
    reports: str

    def __call__(self, start: int, count: int) -> pa.RecordBatch:
        note_first(self.reports, time.monotonic_ns())
        return again(self.folder, self.table, start, count)


class StoredTables:
    """The streams that queries are built on, read from the files; only those that a query asks for are read."""

    def __init__(self, flow: cw.Dataflow, folder: Path, reports: Path, events: int) -> None:
        self._flow, self._folder, self._reports, self._events = flow, folder, reports, events

    @cached_property
    def person(self) -> cw.Stream:
        return self._read("person")

    @cached_property
    def auction(self) -> cw.Stream:
        return self._read("auction")

    @cached_property
    def bid(self) -> cw.Stream:
        return self._read("bid")

    def _read(self, table: str) -> cw.Stream:
        rows = rows_of(table, self._events)
        fn = Rows(str(self._folder), table, str(self._reports))
        source = cw.generate(fn, schema=schema_of(table), rows=rows, partitions=PARALLELISM)
        return self._flow.read(table, source, event_time="time", out_of_order="2s")

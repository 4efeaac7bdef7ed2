"""Readers of changes without a job around them, and what a stream of changes comes to."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Iterator
from typing import Any

from pyspark import cloudpickle

from cutwater.connectors.postgres.changes import postgres_changes
from cutwater.connectors.postgres.reader import PostgresReader
from cutwater.connectors.postgres.source import PostgresSource
from postgres_world import Database

PATIENCE_S = 15.0


class Context:
    """Of a reader."""

    job_uid, step, subtask = "c0ffee", "read", 0

    def __init__(self, incarnation: int = 1, job_uid: str = "c0ffee") -> None:
        self.incarnation, self.job_uid = incarnation, job_uid

    def dead_letter(self, origin: str, position: int, reason: str, raw: str) -> None:
        raise AssertionError("no row is diverted")


def source_of(database: Database, tables: Any = "t", **options: Any) -> PostgresSource:
    return postgres_changes(database.dsn, tables, **options)


def opened(source: PostgresSource, position: Any = None, incarnation: int = 1, uid: str = "c0ffee") -> PostgresReader:
    """A reader, as if in a worker."""
    source.discover()
    source = cloudpickle.loads(cloudpickle.dumps(source))
    return source.open(source.discover()[0], position, Context(incarnation, uid))


def batches(reader: PostgresReader, most: int = 1000) -> Iterator[Any]:
    """Until the end of a bounded source."""
    ends = time.monotonic() + PATIENCE_S
    while not reader.exhausted:
        assert time.monotonic() < ends, f"nothing comes: {reader.position}"
        batch = reader.read(most)
        if batch is None:
            time.sleep(0.002)
        else:
            yield batch


def rows_of(reader: PostgresReader, most: int = 1000) -> list[dict[str, Any]]:
    """All rows of a bounded source; the reader is closed."""
    rows = [row for batch in batches(reader, most) for row in batch.to_pylist()]
    reader.close()
    return rows


def until_now(source: PostgresSource, position: Any = None, incarnation: int = 1) -> tuple[list[dict[str, Any]], Any]:
    """All rows of a bounded source, and the position behind them."""
    reader = opened(source, position, incarnation)
    rows = [row for batch in batches(reader) for row in batch.to_pylist()]
    position = reader.position
    reader.close()
    return rows, position


def some(reader: PostgresReader, count: int) -> list[dict[str, Any]]:
    """At least so many rows."""
    rows: list[dict[str, Any]] = []
    ends = time.monotonic() + PATIENCE_S
    while len(rows) < count:
        assert time.monotonic() < ends, f"nothing comes: {reader.position}"
        batch = reader.read(count - len(rows))
        if batch is None:
            time.sleep(0.002)
        else:
            rows += batch.to_pylist()
    return rows


def folded(rows: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """The table of an updating stream; no row may leave that is not there."""
    table: Counter[tuple[Any, ...]] = Counter()
    for row in rows:
        values = tuple(value for name, value in row.items() if name != "op")
        table[values] += 1 if row["op"] in ("+I", "+U") else -1
        assert table[values] in (0, 1), (row, table[values])
    return sorted(values for values, times in table.items() if times)


def table_of(database: Database, name: str = "t") -> list[tuple[Any, ...]]:
    rows = database.run(f"SELECT * FROM {name}")
    return sorted(tuple(str(v) if isinstance(v, uuid.UUID) else v for v in row) for row in rows)

"""What the result of a query of Nexmark has to be: DuckDB over the same rows, as sums over each column."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from nexmark_queries import QUERIES

from benchmarks.nexmark_rows import COLUMNS, lasts_us, mapped, rows_of, schema_of, stored_rows
from benchmarks.tally import Sums
from benchmarks.workload import WrongResultError

__all__ = ["ColumnSums", "Unit", "columns_of", "expected", "verify"]

Unit = Literal["us", "ms"]
"""Flink's event times are of milliseconds; then they are so in all rows."""


@dataclass(frozen=True)
class ColumnSums:
    """Sums of numbers, of times since 1970 in microseconds, and of the bytes of texts, by column.

    >>> batch = pa.record_batch({"n": [1, 2], "name": ["a", "bcd"], "more": [7, 7]})
    >>> ColumnSums(("n", "name"))(batch)
    {'n': 3, 'name': 4}
    """

    columns: tuple[str, ...]

    def __call__(self, batch: pa.RecordBatch) -> Sums:
        return {name: pc.sum(_summable(batch.column(name))).as_py() or 0 for name in self.columns}


def _summable(column: pa.Array) -> pa.Array:
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.timestamp("us", column.type.tz)).view(pa.int64())
    if pa.types.is_integer(column.type) or pa.types.is_floating(column.type):
        return column
    return pc.binary_length(column)


def _tables(folder: Path, events: int, unit: Unit) -> duckdb.DuckDBPyConnection:
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    for table in COLUMNS:
        wanted, stored = rows_of(table, events), stored_rows(str(folder), table)
        passes, rest = divmod(wanted, stored)
        parts = [(stored, f"range({passes})")] * bool(passes) + [(rest, f"range({passes}, {passes + 1})")] * bool(rest)
        for number, (count, _) in enumerate(parts):
            rows = pa.Table.from_batches([mapped(str(folder), table, 0, count)])
            connection.register(f"{table}_part_{number}", rows)
        lasts = f"to_microseconds({lasts_us(table, stored)} * passed.range)"
        connection.execute(
            f"CREATE VIEW {table}_rows AS "
            + " UNION ALL ".join(
                f"SELECT rows.* REPLACE (rows.time + {lasts} AS time) FROM {table}_part_{number} rows, {which} passed"
                for number, (_, which) in enumerate(parts)
            )
        )
        times = [name for name in COLUMNS[table] if name in ("time", "expires")]
        whole = {"us": "{0}::TIMESTAMP", "ms": "date_trunc('milliseconds', {0}::TIMESTAMP)"}[unit]
        plain = ", ".join(f"{whole.format(name)} AS {name}" for name in times)
        connection.execute(f"CREATE VIEW {table} AS SELECT * REPLACE ({plain}) FROM {table}_rows")
    return connection


@cache
def columns_of(sql: str) -> tuple[str, ...]:
    """Names of the columns that a query gives.

    >>> columns_of(QUERIES["q2"].sql)
    ('auction', 'price')
    """
    connection = duckdb.connect()
    for table in COLUMNS:
        connection.register(table, schema_of(table).empty_table())
    return tuple(column[0] for column in connection.execute(f"DESCRIBE {sql}").fetchall())


@cache
def expected(folder: Path, query: str, events: int, unit: Unit) -> tuple[int, Sums]:
    """Number of result rows and sums by column, over the rows of the first events."""
    connection = _tables(folder, events, unit)
    sql = QUERIES[query].sql
    kinds = {name: kind for name, kind, *_ in connection.execute(f"DESCRIBE {sql}").fetchall()}
    of = {"VARCHAR": "strlen({})", "TIMESTAMP": f"epoch_{unit}({{}})"}
    sums = ", ".join(f"sum({of.get(kind, '{}').format(name)})" for name, kind in kinds.items())
    found = connection.execute(f"SELECT count(*), {sums} FROM ({sql})").fetchone()
    assert found is not None
    return found[0], {name: value or 0 for name, value in zip(kinds, found[1:], strict=True)}


def verify(folder: Path, query: str, events: int, unit: Unit, result: dict[str, Any]) -> None:
    """Compare a contender's result with DuckDB's.

    Whole numbers are compared modulo 2^64, others to nine places.  Rows of updated results are not counted: how many
    updates there are is the engine's own matter.

    Raises:
        WrongResultError: the number of rows or the sum of a column is another one.
    """
    rows, sums = expected(folder, query, events, unit)
    if QUERIES[query].key is None and result["rows"] != rows:
        raise WrongResultError(f"{result['rows']:,} result rows instead of {rows:,}")
    for name, want in sums.items():
        got = result["sums"][name]
        same = abs(got - want) <= 1e-9 * abs(want) if isinstance(want, float) else (got - int(want)) % 2**64 == 0
        if not same:
            raise WrongResultError(f"the sum of column {name} is {got:,} instead of {want:,}")

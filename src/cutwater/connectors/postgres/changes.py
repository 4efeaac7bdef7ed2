"""``cw.postgres_changes``: tables of Postgres, as they are and as they change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Literal

from cutwater.connectors.postgres.server import Server
from cutwater.connectors.postgres.source import PostgresSource


def postgres_changes(
    dsn: str,
    tables: str | Sequence[str] | Mapping[str, Sequence[str]],
    *,
    password: str | None = None,
    publication: str | None = None,
    snapshot: Literal["initial", "never"] = "initial",
    until: Literal["latest"] | None = None,
    old_rows: Literal["full", "key"] = "full",
    on_truncate: Literal["fail", "pass_over"] = "fail",
    on_unchanged: Literal["fail", "null"] = "fail",
    rate: float | None = None,
    check_interval: float | str | timedelta = "10s",
) -> PostgresSource:
    """Tables of Postgres as an updating stream: their rows in one snapshot, then each change, exactly once.

    The columns are ``op``, for several tables ``table``, and those of the tables.  Needs
    ``pip install 'cutwater[postgres]'``, and a server from version 14 on with ``wal_level = logical``.

    Args:
        dsn: ``"postgresql://user@host/database"``, or where that lies: ``"env:NAME"``, ``"file:/path"``.
        tables: names as in SQL, ``"orders"`` or ``"sales.orders"``; a mapping says which of their columns.
        password: where it lies: ``"env:NAME"``, ``"file:/path"``.  ``PGPASSWORD`` and ``~/.pgpass`` work, too.
        publication: an existing one; without it the job makes its own, for which it must own the tables.
        snapshot: ``"never"`` leaves the rows out that are there when the job begins.
        until: ``"latest"`` ends where the log ended at the start.
        old_rows: ``"full"``: what an updated or deleted row was comes whole, as steps that keep all rows need it; the
            tables must have REPLICA IDENTITY FULL.  ``"key"``: a deleted row has its key only, and what an updated row
            was does not come: enough for steps and sinks that keep a row for each key.
        on_truncate: a TRUNCATE fails the job, since it does not say which rows leave, or is passed over.
        on_unchanged: with ``old_rows="key"``: a long value that an update leaves as it was is not told; that fails the
            job, or the column is ``"null"``.
        rate: rows per second; None for as fast as possible.
        check_interval: how often it is looked whether the tables are still there.

    Raises:
        ConfigError: a password in plain, or a setting that makes no sense.
        BuildError: psycopg is not installed.

    >>> postgres_changes("postgresql://me@db.example/sales", ["orders", "customers"])
    PostgresSource(database sales at db.example:5432, orders, customers)
    """
    return PostgresSource(
        Server(dsn, password),
        _named(tables),
        publication=publication,
        snapshot=snapshot,
        until=until,
        old_rows=old_rows,
        on_truncate=on_truncate,
        on_unchanged=on_unchanged,
        rate=rate,
        check_interval_ms=check_interval,
    )


def _named(tables: str | Sequence[str] | Mapping[str, Sequence[str]]) -> list[tuple[str, tuple[str, ...] | None]]:
    if isinstance(tables, Mapping):
        return [(name, tuple(columns)) for name, columns in tables.items()]
    return [(name, None) for name in ((tables,) if isinstance(tables, str) else tables)]

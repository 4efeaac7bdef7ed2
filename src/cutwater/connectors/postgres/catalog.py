"""What a server says of tables: their columns, keys and identities, and whether their changes can be read at all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cutwater.connectors.postgres.column_types import ColumnType, array_type, column_type, label_type
from cutwater.connectors.postgres.server import Connection, Server, quoted
from cutwater.errors import BuildError, DataError, did_you_mean

OldRows = Literal["full", "key"]
_LEAST_VERSION = 140_000
_IDENTITIES = {"d": "DEFAULT", "n": "NOTHING", "f": "FULL", "i": "INDEX"}


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    name: str
    oid: int
    """Of its type, as the table has it."""
    type: ColumnType
    declared: str
    """Its type in SQL."""
    collation: str = ""
    """By which its values are ordered, quoted; empty where its type has none."""


@dataclass(frozen=True)
class Table:
    """A table as it was when the dataflow was built.  A picklable value."""

    oid: int
    schema: str
    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...]
    """Columns that tell its rows apart: its primary key, or the index that is its replica identity."""

    @property
    def shown(self) -> str:
        """Its name for people."""
        return self.name if self.schema == "public" else f"{self.schema}.{self.name}"

    @property
    def sql(self) -> str:
        """Its name in a statement."""
        return f"{quoted(self.schema)}.{quoted(self.name)}"

    def column(self, name: str) -> Column:
        """One that it has."""
        return next(column for column in self.columns if column.name == name)


def look_up(server: Server, names: Sequence[tuple[str, tuple[str, ...] | None]], old_rows: OldRows) -> list[Table]:
    """The tables, checked.

    Args:
        names: of tables, as in SQL, with the columns that are wanted (``None``: all).
        old_rows: see ``postgres_changes``.

    Raises:
        BuildError: one cannot be read; says with what SQL it can.
        StorageError: the server cannot be asked.
    """
    with server.session("looking at its tables") as connection:
        _check_server(connection, server)
        return [_table(connection, name, wanted, old_rows) for name, wanted in names]


def _check_server(connection: Connection, server: Server) -> None:
    if connection.info.server_version < _LEAST_VERSION:
        raise BuildError(f"postgres: {server.shown} is older than version 14")
    level, encoding = connection.execute(
        "SELECT current_setting('wal_level'), current_setting('server_encoding')"
    ).fetchone()
    if level != "logical":
        raise BuildError(
            f"postgres: wal_level of {server.shown} is {level}: changes of tables are not told to anybody",
            hint="ALTER SYSTEM SET wal_level = logical; then start the server again.",
        )
    if encoding == "SQL_ASCII":
        raise BuildError(f"postgres: texts of {server.shown} have no encoding (SQL_ASCII)")
    allowed, user = connection.execute(
        "SELECT rolsuper OR rolreplication OR EXISTS (SELECT FROM pg_roles g WHERE g.rolname IN "
        "('rds_replication', 'cloudsqlreplica') AND pg_has_role(r.oid, g.oid, 'member')), quote_ident(rolname) "
        "FROM pg_roles r WHERE rolname = current_user"
    ).fetchone()
    if not allowed:
        raise BuildError(f"postgres: user {user} may not replicate", hint=f"ALTER ROLE {user} REPLICATION;")


_CLASS = (
    "SELECT c.oid::bigint, n.nspname, c.relname, c.relkind::text, c.relpersistence::text, c.relreplident::text, "
    "c.relkind = 'r' AND EXISTS (SELECT FROM pg_inherits i WHERE i.inhparent = c.oid), "
    "has_table_privilege(c.oid, 'SELECT') "
    "FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(%s)"
)
_COLUMNS = (
    "SELECT a.attname, a.atttypid::bigint, a.atttypmod, format_type(a.atttypid, a.atttypmod), a.attgenerated <> '', "
    "CASE WHEN o.oid IS NULL THEN '' ELSE quote_ident(m.nspname) || '.' || quote_ident(o.collname) END "
    "FROM pg_attribute a LEFT JOIN pg_collation o ON o.oid = a.attcollation "
    "LEFT JOIN pg_namespace m ON m.oid = o.collnamespace "
    "WHERE a.attrelid = %s AND a.attnum > 0 AND NOT a.attisdropped ORDER BY a.attnum"
)
_KEY = (
    "SELECT a.attname FROM pg_index i CROSS JOIN LATERAL unnest(i.indkey) WITH ORDINALITY AS k(n, place) "
    "JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.n "
    "WHERE i.indrelid = %s AND k.place <= i.indnkeyatts AND CASE WHEN %s = 'i' THEN i.indisreplident "
    "ELSE i.indisprimary END ORDER BY k.place"
)
_PARTITIONS = (
    "SELECT c.oid::regclass::text, c.relreplident::text FROM pg_partition_tree(%s) t JOIN pg_class c ON c.oid = t.relid"
)


def _table(connection: Connection, name: str, wanted: tuple[str, ...] | None, old_rows: OldRows) -> Table:
    found = connection.execute(_CLASS, (name,)).fetchone()
    if found is None:
        raise BuildError(f"postgres: there is no table {name!r}", hint="Names are as in SQL: 'orders', 'sales.orders'.")
    oid, schema, table, kind, persistence, identity, inherited, readable = found
    sql = f"{quoted(schema)}.{quoted(table)}"
    if kind not in ("r", "p"):
        raise BuildError(f"postgres: {name!r} is no table, so nobody is told of its changes", hint="Read its tables.")
    if persistence != "p":
        raise BuildError(
            f"postgres: changes of table {name!r}, which is unlogged, are not told",
            hint=f"ALTER TABLE {sql} SET LOGGED;",
        )
    if inherited:
        raise BuildError(
            f"postgres: other tables inherit from {name!r}; their rows would come under other names",
            hint="Read them one by one, or make it a partitioned table.",
        )
    if not readable:
        raise BuildError(f"postgres: table {name!r} may not be read", hint=f"GRANT SELECT ON {sql} TO current_user;")
    identities = {sql: identity}
    if kind == "p":
        identities = dict(connection.execute(_PARTITIONS, (oid,)).fetchall())
    key = tuple(column for (column,) in connection.execute(_KEY, (oid, identity)).fetchall())
    _check_identity(name, identities, key, old_rows)
    columns = _columns(connection, oid, name, wanted, key)
    return Table(oid, schema, table, columns, key)


def _check_identity(name: str, identities: dict[str, str], key: tuple[str, ...], old_rows: OldRows) -> None:
    for sql, identity in identities.items():
        full = f"ALTER TABLE {sql} REPLICA IDENTITY FULL;"
        if old_rows == "full" and identity != "f":
            raise BuildError(
                f"postgres: of updates and deletes of table {name!r} only the key of the old row is told (its replica "
                f"identity is {_IDENTITIES[identity]}), but an updating stream removes whole rows",
                hint=f"{full} Or read it with old_rows='key': steps that keep a row for each key need no more.",
            )
        if identity == "n" or (identity == "d" and not key):
            raise BuildError(
                f"postgres: table {name!r} has no replica identity: which row was updated or deleted is not told",
                hint=f"ALTER TABLE {sql} ADD PRIMARY KEY (...); or {full}",
            )


def _columns(
    connection: Connection, oid: int, name: str, wanted: tuple[str, ...] | None, key: tuple[str, ...]
) -> tuple[Column, ...]:
    found = connection.execute(_COLUMNS, (oid,)).fetchall()
    names = [column for column, *_ in found]
    for column in (*(wanted or ()), *key):
        if column not in names:
            raise BuildError(f"postgres: table {name!r} has no column {column!r}", hint=did_you_mean(column, names))
    for column in key:
        if wanted is not None and column not in wanted:
            raise BuildError(
                f"postgres: column {column!r} is of the key of table {name!r} and must be read",
                hint="Name it among the columns.",
            )
    columns: list[Column] = []
    for column, type_oid, typmod, declared, generated, collation in found:
        if wanted is not None and column not in wanted:
            continue
        if generated:
            if wanted is not None:
                raise BuildError(
                    f"postgres: column {column!r} of table {name!r} is generated: its changes are not told"
                )
            continue
        kind = _type(connection, type_oid, typmod)
        if kind is None:
            others = ", ".join(repr(other) for other in names if other != column)
            raise BuildError(
                f"postgres: column {column!r} of table {name!r} is {declared}, which has no counterpart",
                hint=f"Leave it out: tables={{{name!r}: [{others}]}}.",
            )
        columns.append(Column(column, type_oid, kind, declared, collation))
    return tuple(columns)


def _type(connection: Connection, oid: int, typmod: int) -> ColumnType | None:
    """The type of a column: that of a domain is its base, that of an enumeration text."""
    simple = column_type(oid, typmod)
    if simple is not None:
        return simple
    kind, base, base_typmod, element, category, name = connection.execute(
        "SELECT typtype::text, typbasetype::bigint, typtypmod, typelem::bigint, typcategory::text, typname "
        "FROM pg_type WHERE oid = %s",
        (oid,),
    ).fetchone()
    if kind == "d":
        return _type(connection, base, base_typmod)
    if kind == "e" or (name == "citext" and category == "S"):
        return label_type(oid)
    if category == "A" and element:
        inner = _type(connection, element, typmod)
        return array_type(oid, inner) if inner is not None and inner.kind != "array" else None
    return None


def check_publication(server: Server, name: str, tables: Sequence[Table]) -> None:
    """Check that a user's publication tells all changes of the tables.

    Raises:
        BuildError: it does not; says with what SQL it would.
    """
    sql = quoted(name)
    with server.session("looking at the publication") as connection:
        found = connection.execute(
            "SELECT pubinsert AND pubupdate AND pubdelete AND pubtruncate FROM pg_publication WHERE pubname = %s",
            (name,),
        ).fetchone()
        if found is None:
            listed = ", ".join(table.sql for table in tables)
            raise BuildError(
                f"postgres: there is no publication {name!r}",
                hint=f"CREATE PUBLICATION {sql} FOR TABLE {listed} WITH (publish_via_partition_root = true);",
            )
        if not found[0]:
            raise BuildError(
                f"postgres: publication {name!r} leaves some kinds of changes out",
                hint=f"ALTER PUBLICATION {sql} SET (publish = 'insert, update, delete, truncate');",
            )
        rows = connection.execute(
            "SELECT to_jsonb(p) FROM pg_publication_tables p WHERE pubname = %s", (name,)
        ).fetchall()
    published = {(row["schemaname"], row["tablename"]): row for (row,) in rows}
    for table in tables:
        row = published.get((table.schema, table.name))
        if row is None:
            raise BuildError(
                f"postgres: publication {name!r} does not have table {table.shown!r}",
                hint=f"ALTER PUBLICATION {sql} ADD TABLE {table.sql}; (for a partitioned table also "
                f"ALTER PUBLICATION {sql} SET (publish_via_partition_root = true);)",
            )
        if row.get("rowfilter") is not None:
            raise BuildError(
                f"postgres: publication {name!r} has a filter for rows of table {table.shown!r}; a snapshot has none",
                hint="Filter in the dataflow, and publish the whole table.",
            )
        missing = [c.name for c in table.columns if c.name not in row.get("attnames", [c.name])]
        if missing:
            raise BuildError(
                f"postgres: publication {name!r} leaves column {missing[0]!r} of table {table.shown!r} out",
                hint="Publish it, or name the columns: tables={...}.",
            )


def table_changed(table: Table, what: str) -> DataError:
    """The error for a table that is not any more what the dataflow was built for."""
    return DataError(
        f"postgres: table {table.shown!r} has changed while it was read: {what}",
        hint="Its rows are others now than those before: start a job of another name on the table as it is.",
    )

"""The databases that a table sink writes to: what differs between SQLite and Postgres, and nothing else.

Both are used through their DB-API drivers, with explicit transactions.  A transaction takes a lock first, so that two
of one write step never run side by side: what one has checked still holds when it commits.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, ClassVar
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from cutwater.errors import BuildError, DataError, StorageError

Connection = Any
"""A DB-API connection whose ``execute`` returns a cursor (sqlite3, psycopg)."""

_BUSY_TIMEOUT_S = 30.0
_SECRETS = {"password", "sslpassword", "passfile"}


@dataclass(frozen=True)
class Database(ABC):
    """One database.  A picklable value; its ``repr`` shows no password."""

    mark: ClassVar[str]
    """Stands for a parameter in a statement."""
    identity: ClassVar[str]
    """Type of a column that numbers its rows and never uses a number twice."""

    @property
    @abstractmethod
    def shown(self) -> str:
        """Its address for messages, without secrets."""

    @abstractmethod
    def check(self) -> bool:
        """True if it is there; raises ``BuildError`` if it can be neither used nor made."""

    @abstractmethod
    def column_type(self, field: pa.Field) -> str:
        """SQL type of a column; raises ``BuildError`` for one that has none."""

    @abstractmethod
    def values(self, column: pa.Array) -> list[Any]:
        """Values as the driver takes them."""

    @abstractmethod
    def columns(self, connection: Connection, table: str) -> list[str]:
        """Columns of a table; none if it does not exist."""

    @abstractmethod
    def unique_keys(self, connection: Connection, table: str) -> list[set[str]]:
        """Sets of columns that are unique in a table."""

    @abstractmethod
    def quoted(self, table: str) -> str:
        """The name of a table in a statement."""

    def quoted_column(self, name: str) -> str:
        """The name of a column in a statement."""
        return _quote(name)

    @abstractmethod
    def _connect(self) -> Connection: ...

    @abstractmethod
    def _begin(self, connection: Connection, lock: str) -> None: ...

    @abstractmethod
    def _errors(self) -> tuple[type[Exception], type[Exception], type[Exception]]:
        """Of the driver: any error, a violated constraint, a value that does not fit."""

    @contextlib.contextmanager
    def transaction(self, lock: str) -> Generator[Connection]:
        """A transaction: committed as a whole if the block ends well, else not at all.

        Args:
            lock: those of one name run one after the other.

        Raises:
            DataError: the database refuses a row.
            StorageError: it cannot be reached, is full, or was locked for too long.
        """
        general, *refused = self._errors()
        try:
            with contextlib.closing(self._connect()) as connection:
                self._begin(connection, lock)
                try:
                    yield connection
                except BaseException:
                    with contextlib.suppress(general):
                        connection.execute("ROLLBACK")
                    raise
                connection.execute("COMMIT")
        except tuple(refused) as error:
            raise DataError(
                f"{self.shown} refuses a row: {self._told(error)}",
                hint="Compare the rows with the table's columns and constraints.",
            ) from None
        except general as error:
            raise StorageError(
                f"cannot write to {self.shown}: {self._told(error)}",
                hint="Once the database can be written to, the job goes on from its last checkpoint.",
            ) from None

    @contextlib.contextmanager
    def reading(self) -> Generator[Connection]:
        """A connection to look around, when the dataflow is built.

        Raises:
            BuildError: it cannot be reached.
        """
        try:
            with contextlib.closing(self._connect()) as connection:
                yield connection
        except self._errors()[0] as error:
            raise BuildError(f"cannot read {self.shown}: {self._told(error)}") from None

    def _told(self, error: Exception) -> str:
        """The driver's message; drivers quote what they were given, so the secrets are taken out."""
        return str(error).strip()


@dataclass(frozen=True)
class Sqlite(Database):
    """A SQLite file, through Python's own driver.

    Times are texts in ISO format, which SQLite's date functions understand, decimals are texts, booleans 0 and 1.
    """

    path: str

    mark: ClassVar[str] = "?"
    identity: ClassVar[str] = "INTEGER PRIMARY KEY AUTOINCREMENT"

    @property
    def shown(self) -> str:
        return f"SQLite database {self.path!r}"

    def check(self) -> bool:
        if os.path.exists(self.path):
            return True
        folder = os.path.dirname(self.path)
        if not os.path.isdir(folder) or not os.access(folder, os.W_OK | os.X_OK):
            raise BuildError(f"cannot make {self.shown}: there is no folder {folder!r} to write in")
        return False

    def column_type(self, field: pa.Field) -> str:
        kind = field.type
        if pt.is_boolean(kind) or (pt.is_integer(kind) and kind != pa.uint64()):
            return "INTEGER"
        if pt.is_floating(kind):
            return "REAL"
        if pt.is_binary(kind) or pt.is_fixed_size_binary(kind):
            return "BLOB"
        if _is_text(kind) or pt.is_decimal(kind):
            return "TEXT"
        raise _no_type(field, "SQLite")

    def values(self, column: pa.Array) -> list[Any]:
        if pt.is_temporal(column.type) or pt.is_decimal(column.type):
            if pt.is_timestamp(column.type) and column.type.tz:
                column = column.cast(pa.timestamp(column.type.unit, "UTC"))
            column = column.cast(pa.string())
        elif pt.is_boolean(column.type):
            column = column.cast(pa.int8())
        return column.to_pylist()

    def columns(self, connection: Connection, table: str) -> list[str]:
        return [name for (name,) in connection.execute("SELECT name FROM pragma_table_info(?)", (table,))]

    def unique_keys(self, connection: Connection, table: str) -> list[set[str]]:
        primary = connection.execute("SELECT name FROM pragma_table_info(?) WHERE pk > 0", (table,)).fetchall()
        sql = 'SELECT name FROM pragma_index_list(?) WHERE "unique" AND NOT partial'
        indexes = connection.execute(sql, (table,)).fetchall()
        found = [primary]
        found += [connection.execute("SELECT name FROM pragma_index_info(?)", index).fetchall() for index in indexes]
        return [{name for (name,) in columns} for columns in found]

    def quoted(self, table: str) -> str:
        return _quote(table)

    def _connect(self) -> Connection:
        return sqlite3.connect(self.path, timeout=_BUSY_TIMEOUT_S, isolation_level=None)

    def _begin(self, connection: Connection, lock: str) -> None:
        connection.execute("BEGIN IMMEDIATE")  # the one writer of the whole file

    def _errors(self) -> tuple[type[Exception], type[Exception], type[Exception]]:
        return sqlite3.Error, sqlite3.IntegrityError, OverflowError


@dataclass(frozen=True)
class Postgres(Database):
    """A Postgres server, through psycopg (``pip install 'cutwater[postgres]'``)."""

    url: str = field(repr=False)

    mark: ClassVar[str] = "%s"
    identity: ClassVar[str] = "BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY"

    @property
    def shown(self) -> str:
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        user = parts.netloc.rpartition("@")[0].partition(":")[0]
        query = urlencode([(k, v) for k, v in parse_qsl(parts.query) if k not in _SECRETS])
        return f"database {urlunsplit((parts.scheme, f'{user}@{host}' if user else host, parts.path, query, ''))!r}"

    def check(self) -> bool:
        try:
            importlib.import_module("psycopg")
        except ImportError:
            raise BuildError(
                f"{self.shown} needs psycopg",
                hint="Install it in the driver and where the workers run: pip install 'cutwater[postgres]'.",
            ) from None
        return True

    def column_type(self, field: pa.Field) -> str:
        kind = field.type
        if "%" in field.name:
            raise BuildError(f"psycopg takes no column name with a percent sign: {field.name!r}", hint="Rename it.")
        if kind in _POSTGRES_TYPES:
            return _POSTGRES_TYPES[kind]
        if pt.is_decimal(kind):
            return f"NUMERIC({kind.precision}, {kind.scale})"
        if pt.is_timestamp(kind):
            return "TIMESTAMPTZ" if kind.tz else "TIMESTAMP"
        if pt.is_time(kind):
            return "TIME"
        if pt.is_binary(kind) or pt.is_fixed_size_binary(kind):
            return "BYTEA"
        raise _no_type(field, "Postgres")

    def values(self, column: pa.Array) -> list[Any]:
        if (pt.is_timestamp(column.type) or pt.is_time(column.type)) and column.type.unit == "ns":
            column = pc.call_function("floor_temporal", [column], pc.RoundTemporalOptions(unit="microsecond"))
        return column.to_pylist()

    def columns(self, connection: Connection, table: str) -> list[str]:
        sql = "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped"
        return [name for (name,) in connection.execute(sql, (self.quoted(table),)).fetchall()]

    def unique_keys(self, connection: Connection, table: str) -> list[set[str]]:
        sql = (
            "SELECT array_agg(a.attname::text) FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND "
            "a.attnum = ANY (i.indkey) WHERE i.indrelid = to_regclass(%s) AND i.indisunique AND i.indpred IS NULL "
            "GROUP BY i.indexrelid"
        )
        return [set(names) for (names,) in connection.execute(sql, (self.quoted(table),)).fetchall()]

    def quoted(self, table: str) -> str:
        return ".".join(_quote(part) for part in table.split(".", 1))

    def _connect(self) -> Connection:
        psycopg: Any = importlib.import_module("psycopg")
        return psycopg.connect(self.url, autocommit=True)

    def _begin(self, connection: Connection, lock: str) -> None:
        connection.execute("BEGIN")
        connection.execute("SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))", (lock,))

    def _errors(self) -> tuple[type[Exception], type[Exception], type[Exception]]:
        psycopg: Any = importlib.import_module("psycopg")
        return psycopg.Error, psycopg.IntegrityError, psycopg.DataError

    def _told(self, error: Exception) -> str:
        text = str(error).strip()
        parts = urlsplit(self.url)
        secrets = [parts.password, *(value for name, value in parse_qsl(parts.query) if name in _SECRETS)]
        for secret in filter(None, secrets):
            for form in (secret, unquote(secret), quote(secret)):
                text = text.replace(form, "***")
        return text


def database_of(url: str) -> Database:
    """The database behind an address.

    Raises:
        BuildError: another kind of database, or no name of one.

    >>> database_of("sqlite:////data/out.db").shown
    "SQLite database '/data/out.db'"
    >>> database_of("postgresql://me:secret@db.example/sales")
    Postgres()
    """
    scheme, _, rest = url.partition("://")
    if scheme == "sqlite" and rest.startswith("/") and len(rest) > 1:
        return Sqlite(os.path.abspath(rest[1:]))
    if scheme in ("postgresql", "postgres"):
        return Postgres(url)
    kind = f"{scheme}://..." if "://" in url else "an address without scheme"
    raise BuildError(
        f"a table sink cannot write to {kind}",
        hint="Use sqlite:///relative.db, sqlite:////absolute.db or postgresql://user@host/database.",
    )


def _quote(name: str) -> str:
    """An SQL identifier.

    >>> print(_quote('odd "name" of a column'))
    "odd ""name"" of a column"
    """
    return '"' + name.replace('"', '""') + '"'


_POSTGRES_TYPES = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "SMALLINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INTEGER",
    pa.int64(): "BIGINT",
    pa.uint8(): "SMALLINT",
    pa.uint16(): "INTEGER",
    pa.uint32(): "BIGINT",
    pa.float16(): "REAL",
    pa.float32(): "REAL",
    pa.float64(): "DOUBLE PRECISION",
    pa.string(): "TEXT",
    pa.date32(): "DATE",
    pa.date64(): "DATE",
}


def _is_text(kind: pa.DataType) -> bool:
    return pt.is_string(kind) or pt.is_timestamp(kind) or pt.is_date(kind) or pt.is_time(kind)


def _no_type(field: pa.Field, what: str) -> BuildError:
    if pt.is_nested(field.type):
        hint = "Select its parts as columns of their own, or write it as text."
    elif field.type == pa.uint64():
        hint = "Cast it to int64, or to a decimal."
    else:
        hint = "Cast the column to int64 or string."
    return BuildError(f"column {field.name!r} of type {field.type} cannot be written to {what}", hint=hint)

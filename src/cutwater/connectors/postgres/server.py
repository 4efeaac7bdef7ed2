"""A Postgres server: where it is, connections to it, and what it says when something is wrong."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

from cutwater.connectors.secrets import check_named, secret_at
from cutwater.errors import BuildError, ConfigError, CutwaterError, DataError, StorageError

Connection = Any
"""Of psycopg."""

CONNECT_S = 10
PATIENCE_S = 120.0
"""How long a server may be away before a job fails: shorter than that is a restart."""
_SECRETS = ("password", "sslpassword")
_NAMED = ("env:", "file:")
_AWAY = {"57P01", "57P02", "57P03", "53300"}
"""It shuts down, crashed, starts, or has too many clients: later it will serve us."""
_LOGICAL = "ALTER SYSTEM SET wal_level = logical; then start the server again."
_HINTS = {
    "42501": "ALTER ROLE {user} REPLICATION; GRANT SELECT ON the tables TO {user}.",
    "28P01": "Is the password right? It is looked up where password= says.",
    "53400": "A job needs two slots. ALTER SYSTEM SET max_replication_slots = ...; then start the server again. Those "
    "that nobody reads: SELECT slot_name FROM pg_replication_slots WHERE NOT active.",
}


def client_library(module: str = "psycopg") -> Any:
    """The Python client, or a module of it.

    Raises:
        BuildError: it is not installed; says how.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise BuildError(
            "reading the changes of Postgres needs psycopg",
            hint="Install it in the driver and where the workers run: pip install 'cutwater[postgres]'.",
        ) from None


@dataclass(frozen=True)
class Server:
    """Where a database is.  A picklable value that holds no secret.

    Args:
        dsn: as libpq takes it, ``postgresql://user@host/database`` or ``host=... dbname=...``; or where that lies:
            ``"env:NAME"``, ``"file:/path"``.
        password: where it lies, in the same way; ``None``: libpq finds it (``PGPASSWORD``, ``~/.pgpass``).

    Raises:
        ConfigError: a password in plain, or no address.

    >>> Server("postgresql://me:hunter2@db/sales")
    Traceback (most recent call last):
    cutwater.errors.ConfigError: the address of postgres_changes holds a secret...
    """

    dsn: str = field(repr=False)
    password: str | None = None

    def __post_init__(self) -> None:
        if not self.dsn.strip():
            raise ConfigError("postgres_changes needs an address", hint="Write 'postgresql://user@host/database'.")
        if self.password is not None:
            check_named("password of postgres_changes", "password", self.password)
        if not self.dsn.startswith(_NAMED):
            for name in _SECRETS:
                if name in self._parsed(self.dsn):
                    check_named("the address of postgres_changes", "password", "")

    @staticmethod
    def _parsed(dsn: str) -> dict[str, Any]:
        psycopg = client_library()
        try:
            return client_library("psycopg.conninfo").conninfo_to_dict(dsn)
        except psycopg.ProgrammingError:
            raise ConfigError(
                "postgres_changes: this is no address of a database",
                hint="Write 'postgresql://user@host/database' or 'host=... dbname=...'.",
            ) from None

    @property
    def _parameters(self) -> dict[str, Any]:
        dsn = secret_at("address of postgres_changes", self.dsn) if self.dsn.startswith(_NAMED) else self.dsn
        found = self._parsed(dsn)
        if self.password is not None:
            found["password"] = secret_at("password of postgres_changes", self.password)
        return found

    @property
    def shown(self) -> str:
        """Its address for messages."""
        if self.dsn.startswith(_NAMED):
            return f"database at {self.dsn!r}"
        found = self._parsed(self.dsn)
        place = f"{found.get('host', 'localhost')}:{found.get('port', 5432)}"
        return f"database {found.get('dbname') or found.get('user') or ''!s} at {place}"

    def _hidden(self, text: str) -> str:
        """A message of the library's without the secrets that it may quote."""
        try:
            found = self._parameters
        except CutwaterError:
            return text
        for name in _SECRETS:
            for form in (
                {str(found[name]), quote(str(found[name])), unquote(str(found[name]))} if found.get(name) else ()
            ):
                text = text.replace(form, "***")
        return text

    def connect(self, *, replication: bool = False) -> Connection:
        """A connection, each statement a transaction of its own; one that takes replication commands, too.

        Raises:
            ConfigError: a secret is not where it should be.
            psycopg.Error: of the library; ``told`` makes ours of it.
        """
        ours = {
            "application_name": "cutwater",
            "connect_timeout": CONNECT_S,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
            "client_encoding": "UTF8",
        }
        given = {**ours, **self._parameters, **({"replication": "database"} if replication else {})}
        connection = client_library().connect(**given, autocommit=True)
        if not replication:
            connection.execute("SET statement_timeout = '60s'")
        return connection

    @contextlib.contextmanager
    def session(self, what: str) -> Generator[Connection]:
        """A connection for a few statements.

        Args:
            what: is being done, for messages.

        Raises:
            CutwaterError: it fails, as ``told`` says.
        """
        try:
            with contextlib.closing(self.connect()) as connection:
                yield connection
        except client_library().Error as error:
            raise self.told(error, what) from None

    def is_away(self, error: Exception) -> bool:
        """Whether an error of the library's means that the server cannot be reached, for now."""
        psycopg = client_library()
        state = getattr(error, "sqlstate", None)
        if state is not None:
            return state in _AWAY or state.startswith("08")
        return isinstance(error, psycopg.OperationalError | psycopg.InterfaceError)

    def told(self, error: Exception, what: str) -> CutwaterError:
        """An error of the library's as ours."""
        text = self._hidden(" ".join(str(error).split()))
        state = getattr(error, "sqlstate", None) or ""
        if self.is_away(error) and state != "53300":
            return StorageError(
                f"postgres: {what}: {self.shown} does not answer: {text}",
                hint="Once it does, the job goes on from its last checkpoint.",
            )
        kind = StorageError if state[:2] in ("53", "57", "28", "") else DataError
        hint = _LOGICAL if "wal_level" in text else _HINTS.get(state, "").replace("{user}", self._user)
        return kind(f"postgres: {what}: {self.shown} says: {text}", hint=hint)

    @property
    def _user(self) -> str:
        try:
            return str(self._parameters.get("user", "the user"))
        except CutwaterError:
            return "the user"


def lsn_of(text: str) -> int:
    """A place in the write-ahead log, from the server's form.

    >>> lsn_of("1/0000002A") == (1 << 32) + 42
    True
    """
    high, _, low = text.partition("/")
    return int(high, 16) << 32 | int(low, 16)


def lsn_text(lsn: int) -> str:
    """The server's form of a place in the write-ahead log.

    >>> lsn_text((1 << 32) + 42)
    '1/2A'
    """
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"


def quoted(name: str) -> str:
    """An SQL identifier.

    >>> print(quoted('an "odd" name'))
    "an ""odd"" name"
    """
    return '"' + name.replace('"', '""') + '"'


def literal(text: str) -> str:
    """An SQL text.

    >>> print(literal("it's"))
    'it''s'
    """
    escaped = text.replace("'", "''")
    return f"E'{escaped.replace(chr(92), chr(92) * 2)}'" if "\\" in text else f"'{escaped}'"

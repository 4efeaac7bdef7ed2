"""One Postgres server for the tests of a process, and a database for each test."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
from servers.postgres import PostgresServer

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with PostgresServer() as started:
        yield started


class Database:
    """A fresh database of a server."""

    def __init__(self, server: PostgresServer, name: str) -> None:
        self.server, self.name, self.dsn = server, name, server.dsn_of(name)

    def run(self, sql: str) -> list[Any]:
        """The rows of a statement, if it has any."""
        return self.server.run(sql, database=self.name)

    def connect(self) -> Any:
        """A connection of psycopg's."""
        return self.server.connect(self.name)

    @property
    def slots(self) -> list[str]:
        """Replication slots that do not end with a connection."""
        found = self.run(
            "SELECT slot_name FROM pg_replication_slots WHERE database = current_database() AND NOT temporary "
            "ORDER BY slot_name"
        )
        return [name for (name,) in found]


@pytest.fixture
def database(postgres: PostgresServer) -> Iterator[Database]:
    """Its slots go with the test, so that those of many tests never fill the server."""
    name = f"d{next(_numbers)}"
    postgres.run(f"CREATE DATABASE {name}")
    made = Database(postgres, name)
    yield made
    made.run(
        "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots "
        "WHERE database = current_database() AND active"
    )
    for slot in made.slots:
        made.run(f"SELECT pg_drop_replication_slot('{slot}')")

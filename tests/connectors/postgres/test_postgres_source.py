"""Changes of Postgres as a source: positions are exact in the snapshot and behind it, whatever happens meanwhile."""

from __future__ import annotations

import datetime as dt
import random
import uuid
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest
from changes_world import folded, opened, rows_of, some, source_of, table_of, until_now

from cutwater.connectors.base import SourceHooks
from cutwater.connectors.postgres import receiving
from cutwater.errors import BuildError
from postgres_world import Database

FULL = "ALTER TABLE t REPLICA IDENTITY FULL"


@pytest.fixture(params=["libpq", "psycopg"])
def either_client(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "psycopg":
        monkeypatch.setattr(receiving, "_functions", lambda: None)
    return request.param


def test_the_rows_then_each_change(either_client: str, database: Database) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY, x text)")
    database.run(FULL)
    database.run("INSERT INTO t VALUES (1, 'a'), (2, NULL), (3, 'c')")
    source = source_of(database, until="latest")
    assert source.schema.names == ["op", "id", "x"]
    assert SourceHooks(source).changes == ("id",)
    rows, position = until_now(source)
    assert [tuple(row.values()) for row in rows] == [("+I", 1, "a"), ("+I", 2, None), ("+I", 3, "c")]
    database.run("UPDATE t SET x = 'z' WHERE id < 3")
    database.run("UPDATE t SET id = 9 WHERE id = 3")
    database.run("DELETE FROM t WHERE id = 1")
    database.run("INSERT INTO t VALUES (4)")
    rows = rows_of(opened(source_of(database, until="latest"), position))
    assert [tuple(row.values()) for row in rows] == [
        ("-U", 1, "a"),
        ("+U", 1, "z"),
        ("-U", 2, None),
        ("+U", 2, "z"),
        ("-D", 3, "c"),
        ("+I", 9, "c"),
        ("-D", 1, "z"),
        ("+I", 4, None),
    ]


def test_any_position_in_the_log_gives_the_rest(database: Database) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY, x int)")
    database.run(FULL)
    database.run("CREATE TABLE other (id int PRIMARY KEY)")
    source = source_of(database, snapshot="never")
    reader = opened(source)
    while reader.position is None:
        reader.read(1)
    database.run("INSERT INTO t SELECT g, 0 FROM generate_series(1, 5) g")
    database.run("INSERT INTO other SELECT generate_series(1, 5)")  # transactions without rows of ours
    database.run("UPDATE t SET x = 1")
    database.run("INSERT INTO other VALUES (7)")
    database.run("DELETE FROM t WHERE id > 3")
    positions, rows = [reader.position], []
    for _ in range(5 + 10 + 2):
        rows += some(reader, 1)
        positions.append(reader.position)
    reader.close()
    assert folded(rows) == table_of(database)
    for at, position in enumerate(positions):
        assert rows_of(opened(source_of(database, until="latest"), position, 2), 2) == rows[at:], position


KEYS = {
    "int": ("id int PRIMARY KEY, x int", lambda n: n),
    "text": ('id text COLLATE "C" PRIMARY KEY, x int', lambda n: f"{'aAbBäÄ-_'[n % 8]}{n // 3}\\'"),
    "label": ("id label PRIMARY KEY, x int", lambda n: f"label {n}"),  # in an order that is not that of their texts
    "uuid": ("id uuid PRIMARY KEY, x int", lambda n: str(uuid.UUID(int=n * 2**101 + n))),
    "bytea": ("id bytea PRIMARY KEY, x int", lambda n: bytes([n % 7, n])),
    "time": ("id timestamptz PRIMARY KEY, x int", lambda n: dt.datetime(2026, 1, 1, 0, 0, n % 60, n, dt.UTC)),
    "numeric": ("id numeric(9, 3) PRIMARY KEY, x int", lambda n: Decimal(n * 7 - 100) / 1000),
}


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
def test_what_is_read_in_pieces_between_changes_is_the_table(database: Database, key: str, seed: int) -> None:
    """Crashes in the snapshot and behind it: each goes back to a position, and forgets what came after it."""
    columns, value = KEYS[key]
    rng = random.Random(seed)
    labels = ", ".join(f"'label {n * 37 % 80}'" for n in range(80))
    database.run(f"CREATE TYPE label AS ENUM ({labels})")
    database.run(f"CREATE TABLE t ({columns})")
    database.run(FULL)
    with database.connect() as writer:
        for n in range(40):
            writer.execute("INSERT INTO t VALUES (%s, %s)", (value(2 * n), n))
        open_ = database.connect()  # a transaction that several snapshots see running
        open_.execute("BEGIN")
        open_.execute("DELETE FROM t WHERE id = %s", (value(4),))
        open_.execute("INSERT INTO t VALUES (%s, -1)", (value(79),))
        # The slot waits for transactions that run when it is made, so this one begins with the next.
        open_.execute("ROLLBACK")

        def change() -> None:
            writer.execute("BEGIN")
            for _ in range(rng.choice([1, 3])):
                old, new = value(rng.randrange(80)), value(rng.randrange(80))
                match rng.randrange(4):
                    case 0:
                        writer.execute("INSERT INTO t VALUES (%s, 100) ON CONFLICT DO NOTHING", (new,))
                    case 1:
                        writer.execute("UPDATE t SET x = x + 1 WHERE id >= %s AND x %% 3 = 0", (old,))
                    case 2:
                        writer.execute("DELETE FROM t WHERE id = %s", (old,))
                    case _:
                        writer.execute(
                            "UPDATE t SET id = %s WHERE id = %s AND NOT EXISTS (SELECT FROM t WHERE id = %s)",
                            (new, old, new),
                        )
            writer.execute("COMMIT" if rng.random() < 0.9 else "ROLLBACK")

        kept: list[dict[str, Any]] = []
        position = None
        for incarnation in range(1, 9):
            running = position is not None and rng.random() < 0.5  # a new slot would wait for it
            if running:
                open_.execute("BEGIN")
                open_.execute("UPDATE t SET x = x + 1000")
            reader = opened(source_of(database), position, incarnation)
            taken = list(kept)
            for _ in range(rng.randrange(4)):
                if reader.position is None or "at" in reader.position:
                    taken += some(reader, rng.choice([1, 2, 5]))
                elif (batch := reader.read(rng.choice([1, 2, 5]))) is not None:
                    taken += batch.to_pylist()
                kept, position = list(taken), reader.position
                if not running:
                    change()
            if running:
                reader.read(1)
                open_.execute(rng.choice(["COMMIT", "ROLLBACK"]))
            reader.read(3)  # is lost
            reader.close()
        open_.close()
    kept += rows_of(opened(source_of(database, until="latest"), position, 20), 7)
    assert folded(kept) == table_of(database)


def test_several_tables_come_in_the_order_of_their_commits(database: Database) -> None:
    database.run("CREATE TABLE a (id int PRIMARY KEY, x int)")
    database.run("CREATE SCHEMA s")
    database.run("CREATE TABLE s.b (a_id int, n int, y text, PRIMARY KEY (a_id, n))")
    for name in ("a", "s.b"):
        database.run(f"ALTER TABLE {name} REPLICA IDENTITY FULL")
    database.run("INSERT INTO a VALUES (1, 10)")
    database.run("INSERT INTO s.b VALUES (1, 1, 'first')")
    source = source_of(database, ["a", "s.b"], until="latest")
    assert source.schema.names == ["op", "table", "id", "x", "a_id", "n", "y"]
    assert source.changes == ("table", "id", "a_id", "n")
    rows, position = until_now(source)
    with database.connect() as connection, connection.transaction():
        connection.execute("UPDATE a SET x = 11")
        connection.execute("INSERT INTO s.b VALUES (1, 2, 'second')")
        connection.execute("DELETE FROM a")
    rows += rows_of(opened(source_of(database, ["a", "s.b"], until="latest"), position), 1)
    assert [(r["op"], r["table"], r["x"], r["n"]) for r in rows] == [
        ("+I", "a", 10, None),
        ("+I", "s.b", None, 1),
        ("-U", "a", 10, None),
        ("+U", "a", 11, None),
        ("+I", "s.b", None, 2),
        ("-D", "a", 11, None),
    ]


TYPES: dict[str, list[Any]] = {
    "smallint": [-(2**15), 2**15 - 1, None],
    "integer": [-(2**31), 2**31 - 1, 0],
    "bigint": [-(2**63), 2**63 - 1, None],
    "real": [0.5, -(2.0**20), None],
    "double precision": [0.1, -1e300, float("inf")],
    "boolean": [True, False, None],
    "text": ["ä\n\\", "", None],
    "varchar(5)": ["abc", "äöü", None],
    "char(4)": ["ab  ", "abcd", None],
    "bytea": [b"\x00\xff", b"", None],
    "date": [dt.date(1, 1, 1), dt.date(2026, 2, 28), None],
    "time": [dt.time(0), dt.time(23, 59, 59, 999999), None],
    "timestamp": [dt.datetime(1969, 12, 31, 23, 59, 59, 999999), dt.datetime(9999, 12, 31), None],
    "timestamptz": [dt.datetime(2000, 1, 1, tzinfo=dt.UTC), dt.datetime(1999, 12, 31, 23, tzinfo=dt.UTC), None],
    "numeric(10,2)": [Decimal("12345678.90"), Decimal("-0.01"), None],
    "numeric(38,10)": [Decimal("-1234567890123456789012345678.0123456789"), Decimal("0.0000000001"), Decimal(0)],
    "numeric(6,6)": [Decimal("0.000001"), Decimal("-0.999999"), Decimal("0.1")],
    "numeric(20,0)": [Decimal("99999999999999999999"), Decimal("10000"), Decimal("-100000000")],
    "integer[]": [[1, None, -3], [], None],
    "text[]": [["a", "", None], ["ä"], None],
    "numeric(5,1)[]": [[Decimal("1.5"), None], [Decimal("-9999.9")], []],
    "mood": ["happy", "sad", None],
    "positive": [1, 2, None],
}


@pytest.mark.parametrize("where", ["snapshot", "log"])
def test_values_are_those_that_another_client_reads(database: Database, where: str) -> None:
    database.run("CREATE TYPE mood AS ENUM ('happy', 'sad')")
    database.run("CREATE DOMAIN positive AS integer CHECK (VALUE > 0)")
    columns = ", ".join(f"c{n} {kind}" for n, kind in enumerate(TYPES))
    database.run(f"CREATE TABLE t (id int PRIMARY KEY, {columns})")
    database.run(FULL)
    source = source_of(database, snapshot="initial" if where == "snapshot" else "never", until="latest")
    reader, position = None, None
    if where == "log":
        reader = opened(source)
        while (position := reader.position) is None:
            reader.read(1)
        reader.close()
    names = ", ".join(f"%s::{kind}" for kind in TYPES)
    with database.connect() as connection:
        for row in range(3):
            connection.execute(
                f"INSERT INTO t VALUES (%s, {names})", (row, *(values[row] for values in TYPES.values()))
            )
    rows = rows_of(opened(source_of(database, until="latest"), position, 2), 2)
    wanted = database.run("SELECT * FROM t ORDER BY id")
    assert [tuple(row.values())[1:] for row in rows] == wanted
    types = source.schema
    assert types.field("c16").type == pa.decimal128(6, 6)
    assert types.field("c20").type == pa.list_(pa.decimal128(5, 1))


def test_values_that_become_texts(database: Database) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY, n numeric, u uuid, j json, b jsonb)")
    database.run(FULL)
    numbers = [
        "0", "1", "-1", "10000", "1e20", "-1e-20", "0.00", "123.4500", "-9999.9999", "NaN", "Infinity", "-Infinity",
        "100000000.00001", "0.1", "12345678901234567890123456789012345678901234567890.5",
    ]  # fmt: skip
    with database.connect() as connection:
        for n, number in enumerate(numbers):
            connection.execute(
                "INSERT INTO t VALUES (%s, %s, gen_random_uuid(), '{\"a\":  1}', '{\"a\":  [1]}')", (n, number)
            )
    rows = rows_of(opened(source_of(database, until="latest")))
    wanted = database.run("SELECT id, n::text, u::text, j::text, b::text FROM t ORDER BY id")
    assert [tuple(row.values())[1:] for row in rows] == wanted


def test_times_without_end_are_the_ends_of_the_range(database: Database) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY, at timestamp, day date)")
    database.run(FULL)
    database.run("INSERT INTO t VALUES (1, 'infinity', 'infinity'), (2, '-infinity', '-infinity')")
    source = source_of(database, until="latest")
    reader = opened(source)
    batch = None
    while batch is None:
        batch = reader.read(10)
    reader.close()
    assert batch.column("at").cast(pa.int64()).to_pylist() == [2**63 - 1, -(2**63)]
    assert batch.column("day").cast(pa.int32()).to_pylist() == [2**31 - 1, -(2**31)]


def test_a_partitioned_table_is_one(database: Database) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY, x int) PARTITION BY RANGE (id)")
    for n in range(2):
        database.run(f"CREATE TABLE t{n} PARTITION OF t FOR VALUES FROM ({n * 10}) TO ({n * 10 + 10})")
        database.run(f"ALTER TABLE t{n} REPLICA IDENTITY FULL")
    with pytest.raises(BuildError, match="only the key"):
        _ = source_of(database).schema
    database.run(FULL)
    database.run("INSERT INTO t VALUES (1, 1), (11, 11)")
    source = source_of(database, until="latest")
    rows, position = until_now(source)
    database.run("UPDATE t SET id = id + 12, x = -1 WHERE id = 1")
    database.run("INSERT INTO t VALUES (5, 5)")
    rows += rows_of(opened(source_of(database, until="latest"), position))
    assert folded(rows) == table_of(database)


def test_keys_only(database: Database) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY, x text)")
    database.run("INSERT INTO t VALUES (1, 'a'), (2, 'b')")
    source = source_of(database, old_rows="key", until="latest")
    rows, position = until_now(source)
    database.run("UPDATE t SET x = 'z' WHERE id = 1")
    database.run("UPDATE t SET id = 3 WHERE id = 2")
    database.run("DELETE FROM t WHERE id = 1")
    rows += rows_of(opened(source_of(database, old_rows="key", until="latest"), position))
    assert [tuple(row.values()) for row in rows[2:]] == [
        ("+U", 1, "z"),
        ("-D", 2, None),
        ("+I", 3, "b"),
        ("-D", 1, None),
    ]


def test_long_values_that_an_update_leaves(database: Database) -> None:
    database.run("CREATE TABLE t (id int PRIMARY KEY, x int, long text)")
    database.run("ALTER TABLE t ALTER long SET STORAGE EXTERNAL")
    database.run(FULL)
    database.run("INSERT INTO t VALUES (1, 0, repeat('ä', 100000))")
    rows, position = until_now(source_of(database, until="latest"))
    database.run("UPDATE t SET x = 1")
    database.run("UPDATE t SET id = 2")
    rows += rows_of(opened(source_of(database, until="latest"), position))
    assert folded(rows) == table_of(database)

"""What is wrong is said, with the SQL that helps; what is old goes, what a restore may ask for stays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from changes_world import Context, batches, folded, opened, rows_of, some, source_of, table_of, until_now
from servers.postgres import PostgresServer

import cutwater as cw
from cutwater.connectors.base import SourceSnapshot
from cutwater.connectors.postgres import reader as reader_module
from cutwater.connectors.postgres.changes import postgres_changes
from cutwater.connectors.postgres.position import Position
from cutwater.connectors.postgres.slots import Names
from cutwater.errors import BuildError, ConfigError, CorruptSnapshotError, DataError, StorageError
from postgres_world import Database


@pytest.fixture
def table(database: Database) -> Database:
    """``t (id, x)`` with one row, whose old rows are told."""
    database.run("CREATE TABLE t (id int PRIMARY KEY, x text)")
    database.run("ALTER TABLE t REPLICA IDENTITY FULL")
    database.run("INSERT INTO t VALUES (1, 'a')")
    return database


# ------------------------------------------------------------------------------------------------- before it begins


@pytest.mark.parametrize(
    ("sql", "tables", "options", "message", "hint"),
    [
        ("", "nix", {}, "no table 'nix'", ""),
        ("CREATE TABLE u (id int PRIMARY KEY)", "u", {}, "only the key", 'ALTER TABLE "public"."u" REPLICA IDENTITY'),
        ("CREATE TABLE u (id int)", "u", {"old_rows": "key"}, "no replica identity", "ADD PRIMARY KEY"),
        (
            "CREATE TABLE u (id int PRIMARY KEY); ALTER TABLE u REPLICA IDENTITY NOTHING",
            "u",
            {"old_rows": "key"},
            "no replica identity",
            "REPLICA IDENTITY FULL",
        ),
        ("CREATE TABLE u (id int); ALTER TABLE u REPLICA IDENTITY FULL", "u", {}, "no primary key", "snapshot='never'"),
        ("CREATE UNLOGGED TABLE u (id int PRIMARY KEY)", "u", {}, "unlogged", "SET LOGGED"),
        ("CREATE VIEW u AS SELECT 1", "u", {}, "is no table", ""),
        ("CREATE TABLE u () INHERITS (t)", "t", {}, "inherit", ""),
        (
            "CREATE TABLE u (id int PRIMARY KEY, p point); ALTER TABLE u REPLICA IDENTITY FULL",
            "u",
            {},
            "'p' of table 'u' is point",
            "tables={'u': ['id']}",
        ),
        ("", {"t": ["id", "y"]}, {}, "no column 'y'", ""),
        ("", {"t": ["x"]}, {}, "is of the key", ""),
        ("", "t", {"publication": "p"}, "no publication 'p'", 'CREATE PUBLICATION "p" FOR TABLE "public"."t"'),
        ("CREATE PUBLICATION p", "t", {"publication": "p"}, "does not have table", "ADD TABLE"),
        (
            "CREATE PUBLICATION p FOR TABLE t WITH (publish = 'insert')",
            "t",
            {"publication": "p"},
            "kinds",
            "SET (publish",
        ),
        ("CREATE PUBLICATION p FOR TABLE t WHERE (id > 1)", "t", {"publication": "p"}, "filter", ""),
        ("CREATE PUBLICATION p FOR TABLE t (id)", "t", {"publication": "p"}, "leaves column 'x'", ""),
        ("ALTER TABLE t ADD op text", "t", {}, "named 'op'", ""),
    ],
)
def test_what_cannot_be_read_is_refused_with_what_to_do(
    table: Database, sql: str, tables: Any, options: dict[str, Any], message: str, hint: str
) -> None:
    if sql:
        table.run(sql)
    flow = cw.Dataflow("refused")
    with pytest.raises(BuildError, match=message) as caught:
        flow.read("read", source_of(table, tables, **options))
    assert hint in caught.value.hint


def test_a_server_without_logical_replication() -> None:
    with PostgresServer(settings={"wal_level": "replica"}, version=16) as server:
        with pytest.raises(BuildError, match=r"wal_level of .* is replica") as caught:
            _ = postgres_changes(server.dsn, "t").schema
    assert "ALTER SYSTEM SET wal_level = logical" in caught.value.hint


def test_a_user_who_may_not_replicate(table: Database) -> None:
    table.run("DROP ROLE IF EXISTS nobody; CREATE ROLE nobody LOGIN")
    with pytest.raises(BuildError, match="nobody may not replicate") as caught:
        _ = postgres_changes(table.dsn.replace("postgres@", "nobody@"), "t").schema
    assert caught.value.hint == "ALTER ROLE nobody REPLICATION;"


def test_secrets_are_named_and_not_given(table: Database, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    for dsn in ("postgresql://me:hunter2@h/d", "host=h password=hunter2"):
        with pytest.raises(ConfigError, match="holds a secret") as caught:
            postgres_changes(dsn, "t")
        assert "hunter2" not in str(caught.value)
    with pytest.raises(ConfigError, match="holds a secret"):
        postgres_changes("postgresql://h/d", "t", password="hunter2")
    monkeypatch.setenv("THE_DSN", table.dsn)
    (tmp_path / "password").write_text("hunter2\n")
    source = postgres_changes("env:THE_DSN", "t", password=f"file:{tmp_path}/password", until="latest")
    assert "hunter2" not in repr(source)
    assert table.dsn not in repr(source)
    assert len(rows_of(opened(source))) == 1
    monkeypatch.setenv("THE_DSN", "postgresql://me:hunter2@127.0.0.1:1/d")
    with pytest.raises(StorageError) as failed:
        _ = postgres_changes("env:THE_DSN", "t").schema
    assert "hunter2" not in str(failed.value)


def test_steps_know_that_it_is_an_updating_stream(table: Database) -> None:
    flow = cw.Dataflow("typed")
    rows = flow.read("read", source_of(table))
    with pytest.raises(BuildError, match="updating stream"):
        rows.key_by("x").aggregate("n", n=cw.count())
    with pytest.raises(BuildError, match="have no event time"):
        flow.read("timed", source_of(table), event_time="x")
    rows.write("out", cw.discard())
    with pytest.raises(BuildError, match="may give other rows"):
        flow.start(None, recovery="task")  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ while it is read


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("ALTER TABLE t DROP COLUMN x; INSERT INTO t VALUES (2)", "no column 'x'"),
        ("ALTER TABLE t RENAME COLUMN x TO y; INSERT INTO t VALUES (2)", "no column 'x'"),
        ("ALTER TABLE t ALTER x TYPE varchar(9); INSERT INTO t VALUES (2)", "not text any more"),
        ("ALTER TABLE t REPLICA IDENTITY DEFAULT; UPDATE t SET x = 'b'", "not FULL any more"),
        ("ALTER TABLE t REPLICA IDENTITY DEFAULT; DELETE FROM t", "not FULL any more"),
        ("TRUNCATE t", "truncated"),
    ],
)
def test_a_table_that_changes_its_shape_fails_the_job(table: Database, sql: str, message: str) -> None:
    _, position = until_now(source_of(table, until="latest"))
    reader = opened(source_of(table), position)
    table.run(sql)
    with pytest.raises(DataError, match=message):
        some(reader, 9)
    reader.close()


def test_a_column_that_comes_is_passed_over(table: Database) -> None:
    rows, position = until_now(source_of(table, until="latest"))
    reader = opened(source_of(table), position)
    table.run("ALTER TABLE t ADD y int DEFAULT 5; UPDATE t SET x = 'b'; INSERT INTO t VALUES (2, 'c', 7)")
    rows += some(reader, 3)
    reader.close()
    assert folded(rows) == [(1, "b"), (2, "c")]


def test_a_truncation_can_be_passed_over(table: Database) -> None:
    _, position = until_now(source_of(table, until="latest"))
    reader = opened(source_of(table, on_truncate="pass_over"), position)
    table.run("TRUNCATE t; INSERT INTO t VALUES (2)")
    assert [row["id"] for row in some(reader, 1)] == [2]
    reader.close()


def test_a_long_value_that_is_not_told(table: Database) -> None:
    table.run(
        "ALTER TABLE t REPLICA IDENTITY DEFAULT; ALTER TABLE t ALTER x SET STORAGE EXTERNAL; ALTER TABLE t ADD n int"
    )
    table.run("UPDATE t SET x = repeat('x', 10000)")
    _, position = until_now(source_of(table, old_rows="key", until="latest"))
    table.run("UPDATE t SET n = 1")
    with pytest.raises(DataError, match="column 'x' as it was") as caught:
        rows_of(opened(source_of(table, old_rows="key", until="latest"), position))
    assert "REPLICA IDENTITY FULL" in caught.value.hint
    options = {"old_rows": "key", "until": "latest"}
    rows = rows_of(opened(source_of(table, on_unchanged="null", **options), position, 2))
    assert [tuple(row.values()) for row in rows] == [("+U", 1, None, 1)]


def test_a_value_that_its_column_cannot_hold(table: Database) -> None:
    table.run("ALTER TABLE t ADD m int[]; UPDATE t SET m = '{{1,2},{3,4}}'")
    with pytest.raises(DataError, match=r"column 'm' of table 't' is an array of more than one dimension \(id = 1\)"):
        rows_of(opened(source_of(table, until="latest")))


def test_a_table_that_is_dropped_is_missed(table: Database) -> None:
    source = source_of(table)
    source.discover()
    assert len(source.discover()) == 1
    table.run("DROP TABLE t")
    with pytest.raises(DataError, match="'t' was dropped"):
        source.discover()
    table.run("CREATE TABLE t (id int PRIMARY KEY, x text); ALTER TABLE t REPLICA IDENTITY FULL")
    again = source_of(table)
    with pytest.raises(DataError, match="other tables"):
        again.goes_on({"changes": source._split.data}, again.discover())


def test_a_table_that_leaves_the_publication_is_missed(table: Database) -> None:
    table.run("CREATE PUBLICATION mine FOR TABLE t")
    source = source_of(table, publication="mine")
    source.discover()
    table.run("ALTER PUBLICATION mine DROP TABLE t")
    with pytest.raises(DataError, match="does not have table 't' any more"):
        source.discover()


# ------------------------------------------------------------------------------------------ slots, and who has them


def snapshots(*positions: Any) -> list[SourceSnapshot]:
    return [SourceSnapshot(n, {"changes": position}) for n, position in enumerate(positions)]


def test_the_log_stays_from_the_oldest_retained_checkpoint_on(table: Database) -> None:
    source = source_of(table, until="latest")
    positions, taken = [], []
    position = None
    for n in range(3):
        rows, position = until_now(source_of(table, until="latest"), position)
        taken.append(rows)
        positions.append(position)
        table.run(f"INSERT INTO t VALUES ({n + 10})")
    committer = source.committer("c0ffee", "read")
    committer.retain(snapshots(*positions[1:]))
    rest = rows_of(opened(source_of(table, until="latest"), positions[1], 2))
    assert [row["id"] for row in rest] == [11, 12]
    with pytest.raises(DataError, match="confirmed and gone"):
        rows_of(opened(source_of(table, until="latest"), positions[0], 2))
    committer.retain(snapshots(*positions[2:]))
    with pytest.raises(DataError, match="confirmed and gone"):
        rows_of(opened(source_of(table, until="latest"), positions[1], 2))
    assert [row["id"] for row in rows_of(opened(source_of(table, until="latest"), positions[2], 2))] == [12]


def test_nothing_is_confirmed_for_a_checkpoint_in_the_snapshot(table: Database) -> None:
    source = source_of(table)
    reader = opened(source)
    some(reader, 1)
    position = reader.position
    reader.close()
    before = table.run("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE NOT temporary")
    source.committer("c0ffee", "read").retain(snapshots(None, position))
    assert table.run("SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE NOT temporary") == before


def test_a_silent_table_does_not_keep_the_log(table: Database) -> None:
    table.run("CREATE TABLE other (id int)")
    reader = opened(source_of(table))
    some(reader, 1)
    table.run("INSERT INTO other SELECT generate_series(1, 1000)")
    (behind,) = table.run("SELECT pg_current_wal_flush_lsn() - '0/0'")[0]
    ends = time.monotonic() + 30
    while reader.position["lsn"] < int(behind) - 64:
        assert time.monotonic() < ends
        assert reader.read(10) is None
        time.sleep(0.01)
    source_of(table).committer("c0ffee", "read").retain(snapshots(reader.position))
    (confirmed,) = table.run("SELECT confirmed_flush_lsn - '0/0' FROM pg_replication_slots WHERE NOT temporary")[0]
    assert int(confirmed) == reader.position["lsn"]
    reader.close()


def test_what_no_checkpoint_names_goes_and_the_rest_at_the_end(table: Database) -> None:
    positions = []
    for incarnation in (1, 2, 3):
        _, position = until_now(source_of(table, until="latest"), None, incarnation)
        positions.append(position)
    names = Names("c0ffee", "read")
    assert table.slots == [names.anchor(n) for n in (1, 2, 3)]
    committer = source_of(table).committer("c0ffee", "read")
    committer.settle(snapshots(positions[0]), 3)  # an attempt that began, and knows nothing of the third
    assert table.slots == [names.anchor(1), names.anchor(3)]
    source_of(table).committer("c0ffee", "another").finish(None, 9)
    source_of(table).committer("c0ff", "read").finish(None, 9)
    assert len(table.slots) == 2
    assert table.run("SELECT pubname FROM pg_publication") == [(names.publication,)]
    for _ in range(2):
        committer.finish(None, 3)
    assert table.slots == []
    assert table.run("SELECT pubname FROM pg_publication") == []


def test_a_reader_that_was_forgotten_is_ended_and_takes_nothing_away(table: Database) -> None:
    zombie = opened(source_of(table))
    rows = some(zombie, 1)
    position = zombie.position
    table.run("INSERT INTO t VALUES (2), (3)")
    while not zombie.read(1):  # it has its copy of the slot, and goes on reading
        time.sleep(0.01)
    source_of(table).committer("c0ffee", "read").settle(snapshots(position), 2)
    reader = opened(source_of(table), position, 2)
    rows += some(reader, 2)
    assert folded(rows) == table_of(table)
    table.run("DELETE FROM t WHERE id = 2")
    rows += some(reader, 1)
    assert folded(rows) == table_of(table)
    reader.close()
    zombie.close()


def test_two_readers_at_once_see_the_same(table: Database) -> None:
    _, position = until_now(source_of(table, until="latest"))
    readers = [opened(source_of(table), position, incarnation) for incarnation in (2, 3)]
    table.run("INSERT INTO t VALUES (2), (3), (4)")
    one, other = (some(reader, 3) for reader in readers)
    assert one == other
    for reader in readers:
        reader.close()


def test_another_job_goes_on_with_a_slot_of_its_own(table: Database) -> None:
    rows, position = until_now(source_of(table, until="latest"))
    table.run("INSERT INTO t VALUES (2)")
    reader = opened(source_of(table, until="latest"), position, 1, uid="decaf")
    rows += [row for batch in batches(reader) for row in batch.to_pylist()]
    assert Position.of(reader.position).slot == Names("decaf", "read").anchor(1)
    reader.close()
    assert folded(rows) == table_of(table)
    source_of(table).committer("c0ffee", "read").retain(snapshots(reader.position))
    assert len(table.slots) == 2


def test_a_slot_that_is_gone(table: Database) -> None:
    _, position = until_now(source_of(table, until="latest"))
    table.run("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots WHERE NOT temporary")
    table.run("INSERT INTO t VALUES (2)")
    with pytest.raises(DataError, match="somebody dropped it"):
        rows_of(opened(source_of(table, until="latest"), position, 2))
    with pytest.raises(DataError, match="somebody dropped it"):
        source_of(table).committer("c0ffee", "read").retain(snapshots(position))


def test_a_slot_that_the_server_gave_up() -> None:
    with PostgresServer(
        settings={"max_slot_wal_keep_size": "1MB", "min_wal_size": "32MB", "max_wal_size": "32MB"}
    ) as server:
        database = Database(server, "postgres")
        database.run("CREATE TABLE t (id int PRIMARY KEY); ALTER TABLE t REPLICA IDENTITY FULL")
        _, position = until_now(source_of(database, until="latest"))
        for _ in range(4):
            database.run("SELECT pg_logical_emit_message(false, '', repeat('x', 1000)) FROM generate_series(1, 20000)")
            database.run("CHECKPOINT")
        with pytest.raises(DataError, match="max_slot_wal_keep_size"):
            rows_of(opened(source_of(database, until="latest"), position, 2))


def test_no_slot_is_free() -> None:
    with PostgresServer(settings={"max_replication_slots": "1"}, version=16) as server:
        database = Database(server, "postgres")
        database.run("CREATE TABLE t (id int PRIMARY KEY); ALTER TABLE t REPLICA IDENTITY FULL")
        with pytest.raises(StorageError, match="replication slots are in use") as caught:
            some(opened(source_of(database)), 1)
    assert "max_replication_slots" in caught.value.hint


@pytest.fixture
def own_server() -> Iterator[Database]:
    with PostgresServer() as server:
        database = Database(server, "postgres")
        database.run("CREATE TABLE t (id int PRIMARY KEY, x text); ALTER TABLE t REPLICA IDENTITY FULL")
        database.run("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 500) g")
        yield database


def test_a_server_that_starts_again_is_waited_for(own_server: Database) -> None:
    reader = opened(source_of(own_server))
    rows = some(reader, 100)
    own_server.server.stop()  # in the snapshot
    rows += some(reader, 1)
    own_server.server.start()
    own_server.run("UPDATE t SET x = 'y' WHERE id > 480")
    rows += some(reader, 399)
    own_server.server.kill()
    own_server.server.start()
    own_server.run("DELETE FROM t WHERE id < 3")
    ends = time.monotonic() + 30
    while folded(rows) != table_of(own_server):
        assert time.monotonic() < ends
        batch = reader.read(7)
        rows += batch.to_pylist() if batch is not None else []
    reader.close()


def test_a_server_that_stays_away_fails_the_job(own_server: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "PATIENCE_S", 0.5)
    reader = opened(source_of(own_server))
    some(reader, 1)
    own_server.server.kill()
    with pytest.raises(StorageError, match="does not answer"):
        some(reader, 10_000)
    reader.close()


def test_a_position_that_is_none(table: Database) -> None:
    source = source_of(table)
    for position in (7, {"slot": "x"}, {"slot": 1, "publication": "p", "lsn": 1}):
        with pytest.raises(CorruptSnapshotError, match="no position"):
            source.open(source.discover()[0], position, Context())

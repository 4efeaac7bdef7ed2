"""The table sink on a Postgres server."""

from __future__ import annotations

import datetime as dt
import threading
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from cutwater.connectors.base import SinkSnapshot
from cutwater.connectors.table_sink import TableCommitter, TableSink, table
from cutwater.errors import BuildError, DataError, StorageError
from cutwater.testing.sink_job import SCHEMA, Identity, batch_of
from postgres_world import Database, database, postgres

__all__ = ["database", "postgres"]


@pytest.fixture
def server(database: Database) -> str:
    """Address of a database; who connects from here needs no password, so that one in it is only seen by us."""
    return database.dsn.replace("postgres@", "postgres:secret@")


@pytest.fixture
def query(database: Database) -> Any:
    return database.run


def committer(sink: TableSink, schema: pa.Schema = SCHEMA) -> TableCommitter:
    return sink.committer(schema, "c0ffee", "out")


def test_epochs_are_committed_once_fenced_and_taken_back(server: str, query: Any, tmp_path: Path) -> None:
    sink = table(server, "t").bind(str(tmp_path))
    sink.check(SCHEMA)
    committer(sink).settle(None, [], 1)
    sink.check(SCHEMA)
    writer = sink.writer(SCHEMA, Identity(0, 1, 1), [])
    made: list[SinkSnapshot] = []
    for checkpoint_id in (1, 2):
        writer.write(batch_of([checkpoint_id]))
        made.append(SinkSnapshot(checkpoint_id, writer.pre_commit(checkpoint_id, False)().handles))
    files = {path: path.read_bytes() for path in tmp_path.rglob("*.arrows")}
    for _ in range(2):
        for snapshot in made:
            committer(sink).commit(snapshot.checkpoint_id, snapshot.handles)
        for path, content in files.items():
            path.write_bytes(content)
    assert query("SELECT row FROM t ORDER BY row") == [(1,), (2,)]
    committer(sink).settle(made[0], made[:1], 2)
    assert query("SELECT row FROM t") == [(1,)]
    for path, content in files.items():
        path.write_bytes(content)
    committer(sink).commit(2, made[1].handles)
    assert query("SELECT row FROM t") == [(1,)]
    committer(sink)._records.compact(5)
    assert query("SELECT checkpoint_id, subtask FROM cutwater_epochs") == [(5, -1)]


def test_an_upsert_and_types(server: str, query: Any, tmp_path: Path) -> None:
    schema = pa.schema(
        {"k": pa.string(), "b": pa.bool_(), "d": pa.decimal128(9, 2), "at": pa.timestamp("ns"), "raw": pa.binary()}
    )
    sink = table(server, "t", mode="upsert", key="k").bind(str(tmp_path))
    committer(sink, schema).settle(None, [], 1)
    sink.check(schema)
    writer = sink.writer(schema, Identity(0, 1, 1), [])
    rows = [{"k": "a", "b": True}, {"k": "a", "b": False, "d": "1.50", "at": 1_000_001, "raw": b"x"}]
    for row in rows:
        arrays = [pa.array([row.get(f.name)]).cast(f.type) for f in schema]
        writer.write(pa.RecordBatch.from_arrays(arrays, schema=schema))
    committer(sink, schema).commit(1, writer.pre_commit(1, False)().handles)
    assert query("SELECT k, b, d::text, at::text, raw FROM t") == [
        ("a", False, "1.50", "1970-01-01 00:00:00.001", b"x")
    ]
    writer.write(pa.RecordBatch.from_pylist([{"k": None}], schema))
    with pytest.raises(DataError, match="refuses a row"):
        committer(sink, schema).commit(2, writer.pre_commit(2, False)().handles)
    with pytest.raises(BuildError, match="percent sign"):
        sink.check(pa.schema({"k": pa.string(), "50%": pa.int8()}))
    query("ALTER TABLE t DROP CONSTRAINT t_pkey")
    with pytest.raises(BuildError, match="no unique index"):
        sink.check(schema)


def test_an_upsert_of_changes_deletes_what_leaves(server: str, query: Any, tmp_path: Path) -> None:
    schema = pa.schema({"op": pa.string(), "k": pa.string(), "day": pa.date32(), "n": pa.int64()})
    sink = table(server, "t", mode="upsert", key=["k", "day"]).applying(("k", "day")).bind(str(tmp_path))
    sink.check(schema)
    committer(sink, schema).settle(None, [], 1)
    writer = sink.writer(schema, Identity(0, 1, 1), [])
    day = dt.date(2024, 5, 1)
    rows = [("+I", "a", day, 1), ("+I", "b", day, 2), ("-U", "a", day, 1), ("+U", "a", day, 3), ("-D", "b", day, 2)]
    for checkpoint_id, part in enumerate((rows[:2], rows[2:]), start=1):
        writer.write(pa.RecordBatch.from_pylist([dict(zip(schema.names, row, strict=True)) for row in part], schema))
        committer(sink, schema).commit(checkpoint_id, writer.pre_commit(checkpoint_id, False)().handles)
    assert query("SELECT k, day, n FROM t") == [("a", day, 3)]


def test_a_server_that_cannot_be_reached_is_told_without_the_password(tmp_path: Path) -> None:
    sink = table(f"postgresql://me:s3cret@/postgres?host={tmp_path}", "t").bind(str(tmp_path))
    for act, kind in (
        (lambda: sink.check(SCHEMA), BuildError),
        (lambda: committer(sink).settle(None, [], 1), StorageError),
    ):
        with pytest.raises(kind) as caught:
            act()
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("mode", [{"mode": "append"}, {"mode": "upsert", "key": ["row"]}], ids=["append", "upsert"])
def test_a_worker_that_wakes_behind_its_successor_commits_nothing(
    server: str, query: Any, tmp_path: Path, mode: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds the lock of the step while another one waits for it, reads the fence, or waits and then reads it."""
    sink = table(server, "t", **mode).bind(str(tmp_path))
    committer(sink).settle(None, [], 1)
    writer = sink.writer(SCHEMA, Identity(0, 1, 1), [])
    made: list[SinkSnapshot] = []
    for checkpoint_id in (1, 2):
        writer.write(batch_of([checkpoint_id]))
        made.append(SinkSnapshot(checkpoint_id, writer.pre_commit(checkpoint_id, False)().handles))
    committer(sink).commit(1, made[0].handles)
    real, settled = TableCommitter._take, threading.Event()

    def take(self: TableCommitter, rows: pa.Table, epoch: Any) -> None:
        if epoch.checkpoint_id == 2 and not settled.is_set():
            committer(sink).settle(made[0], made[:1], 2)
            settled.set()
        real(self, rows, epoch)

    monkeypatch.setattr(TableCommitter, "_take", take)
    committer(sink).commit(2, made[1].handles)
    assert settled.is_set()
    assert query("SELECT row FROM t") == [(1,)]


def test_a_connection_that_is_lost_in_the_middle_of_a_commit_leaves_nothing(
    server: str, query: Any, tmp_path: Path
) -> None:
    sink = table(server, "t").bind(str(tmp_path))
    committer(sink).settle(None, [], 1)
    query(
        "CREATE FUNCTION cut() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF new.row = 2 THEN PERFORM pg_terminate_backend(pg_backend_pid()); END IF; RETURN new; END $$"
    )
    query("CREATE TRIGGER cut BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION cut()")
    writer = sink.writer(SCHEMA, Identity(0, 1, 1), [])
    writer.write(batch_of([1, 2, 3]))
    handles = writer.pre_commit(1, False)().handles
    with pytest.raises(StorageError, match="cannot write to database"):
        committer(sink).commit(1, handles)
    assert query("SELECT row FROM t") == []
    query("DROP TRIGGER cut ON t")
    for _ in range(2):
        committer(sink).commit(1, handles)
    assert query("SELECT row FROM t ORDER BY row") == [(1,), (2,), (3,)]

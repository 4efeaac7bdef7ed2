"""The table sink: what a table gets, what is refused before anything runs, fencing, and secrets."""

from __future__ import annotations

import datetime as dt
import pickle
import sqlite3
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from sink_identity import SCHEMA, Identity, numbers

import cutwater as cw
from cutwater.connectors import table_sink
from cutwater.connectors.base import Json, SinkSnapshot
from cutwater.connectors.databases import database_of
from cutwater.connectors.table_sink import TableCommitter, TableSink, table
from cutwater.errors import BuildError, ConfigError, DataError, StorageError

SECRET_URL = "postgresql://me:s3cr%40t@db.example:5432/sales?sslmode=require&sslpassword=hush"


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "out.db"


def sink_of(db: Path, **options: Any) -> TableSink:
    return table(f"sqlite:///{db}", "t", **options).bind(str(db.parent / "staging"))


def query(db: Path, sql: str) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(db, isolation_level=None)
    try:
        return connection.execute(sql).fetchall()
    finally:
        connection.close()


def staged(sink: TableSink, *batches: pa.RecordBatch, checkpoint_id: int = 1, incarnation: int = 1) -> list[Json]:
    """The handles of an epoch with these rows."""
    writer = sink.writer(batches[0].schema, Identity(subtask=checkpoint_id, incarnation=incarnation), [])
    for batch in batches:
        writer.write(batch)
    handles = writer.pre_commit(checkpoint_id, False)().handles
    writer.close()
    return handles


def committer(sink: TableSink, schema: pa.Schema = SCHEMA) -> TableCommitter:
    return sink.committer(schema, "uid", "out")


def refused(sink: TableSink, schema: pa.Schema, match: str) -> None:
    flow = cw.Dataflow("refused")
    with pytest.raises(BuildError, match=match):
        flow.read("in", cw.memory([], schema=schema)).write("out", sink)


# ---------------------------------------------------------------------------------------------------------- contents


def test_values_of_every_type_come_out_as_sqlite_knows_them(db: Path) -> None:
    at = dt.datetime(2024, 5, 1, 12, 0, 0, 250)
    schema = pa.schema(
        {
            "i": pa.int8(),
            "u": pa.uint32(),
            "x": pa.float32(),
            "b": pa.bool_(),
            "s": pa.dictionary(pa.int32(), pa.string()),
            "raw": pa.large_binary(),
            "d": pa.decimal128(30, 3),
            "day": pa.date32(),
            "at": pa.timestamp("us"),
            "zoned": pa.timestamp("ms", tz="Europe/Berlin"),
            'odd "name"': pa.int64(),
        }
    )
    values = [-1, 2**32 - 1, 0.5, True, "ä", b"\x00", Decimal("123456789012345678901234567.001"), at.date(), at]
    values += [at.replace(microsecond=0, tzinfo=dt.UTC), 2**63 - 1]
    rows = [dict(zip(schema.names, values, strict=True)), dict.fromkeys(schema.names)]
    batch = pa.RecordBatch.from_pylist(rows, schema)
    sink = sink_of(db)
    sink.check(schema)
    committer(sink, schema).settle(None, [], 1)
    committer(sink, schema).commit(1, staged(sink, batch))
    found = query(db, "SELECT *, datetime(zoned), date(at) FROM t")
    texts = ["123456789012345678901234567.001", "2024-05-01", "2024-05-01 12:00:00.000250"]
    shown = [*values[:3], 1, *values[4:6], *texts, "2024-05-01 12:00:00.000Z", 2**63 - 1]
    assert found[0] == (*shown, 1, "2024-05-01 12:00:00", "2024-05-01")
    assert found[1] == (*[None] * len(schema), 1, None, None)


def test_an_upsert_keeps_the_last_row_of_a_key(db: Path) -> None:
    schema = pa.schema({"k": pa.string(), "v": pa.int64()})
    sink = sink_of(db, mode="upsert", key=["k"])
    committer(sink, schema).settle(None, [], 1)
    for checkpoint_id, rows in enumerate([[("a", 1), ("b", 1), ("a", 2)], [("b", 3), ("c", 3)]], start=1):
        batch = pa.RecordBatch.from_pylist([{"k": k, "v": v} for k, v in rows], schema)
        committer(sink, schema).commit(checkpoint_id, staged(sink, batch, checkpoint_id=checkpoint_id))
    assert query(db, "SELECT k, v FROM t ORDER BY k") == [("a", 2), ("b", 3), ("c", 3)]
    with pytest.raises(DataError, match="refuses a row: NOT NULL constraint failed"):
        committer(sink, schema).commit(
            9, staged(sink, pa.RecordBatch.from_pylist([{"k": None, "v": 1}], schema), checkpoint_id=9)
        )


def test_an_upsert_of_nothing_but_keys_is_a_set(db: Path) -> None:
    sink = sink_of(db, mode="upsert", key="n")
    committer(sink).settle(None, [], 1)
    committer(sink).commit(1, staged(sink, numbers(1, 1, 2)))
    assert query(db, "SELECT n FROM t ORDER BY n") == [(1,), (2,)]


# ----------------------------------------------------------------------------------------------------------- fencing


def snapshot(checkpoint_id: int, handles: list[Json]) -> SinkSnapshot:
    return SinkSnapshot(checkpoint_id, handles, [None])


@pytest.mark.parametrize("mode", [{"mode": "append"}, {"mode": "upsert", "key": ["n"]}], ids=["append", "upsert"])
def test_a_worker_that_wakes_between_reading_and_writing_commits_nothing_of_an_older_attempt(
    mode: dict[str, Any], db: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink = sink_of(db, **mode)
    committer(sink).settle(None, [], 1)
    first = staged(sink, numbers(1), checkpoint_id=1)
    second = staged(sink, numbers(2), checkpoint_id=2)
    real = TableCommitter._take

    def take(self: TableCommitter, rows: pa.Table, epoch: Any) -> None:
        if epoch.checkpoint_id == 2:  # it has read the staged rows; two drivers later it writes them
            for incarnation in (2, 3):
                committer(sink).settle(snapshot(1, first), [snapshot(1, first)], incarnation)
        real(self, rows, epoch)

    monkeypatch.setattr(TableCommitter, "_take", take)
    committer(sink).commit(2, second)
    assert query(db, "SELECT n FROM t") == [(1,)]
    third = staged(sink, numbers(3), checkpoint_id=3, incarnation=3)
    committer(sink).commit(3, third)
    assert query(db, "SELECT n FROM t ORDER BY n") == [(1,), (3,)]


def test_going_back_takes_back_only_what_this_step_appended(db: Path) -> None:
    sink = sink_of(db)
    other = table(f"sqlite:///{db}", "t").bind(str(db.parent / "other"))
    for one, uid in ((sink, "uid"), (other, "second")):
        one.committer(SCHEMA, uid, "out").settle(None, [], 1)
    committer(sink).commit(1, staged(sink, numbers(1), checkpoint_id=1))
    committer(sink).commit(2, staged(sink, numbers(2), checkpoint_id=2))
    writer = other.writer(SCHEMA, Identity(job_uid="second"), [])
    writer.write(numbers(7))
    other.committer(SCHEMA, "second", "out").commit(5, writer.pre_commit(5, False)().handles)
    query(db, "INSERT INTO t (n) VALUES (100)")
    committer(sink).settle(snapshot(1, []), [snapshot(1, [])], 2)
    assert query(db, "SELECT n FROM t ORDER BY n") == [(1,), (7,), (100,)]


def test_records_of_old_epochs_are_put_together_and_still_count(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_sink, "_COMPACT_EVERY", 3)
    sink, driver = sink_of(db), committer(sink_of(db))
    driver.settle(None, [], 1)
    kept: list[list[Json]] = []
    for checkpoint_id in range(1, 11):
        kept.append(staged(sink, numbers(checkpoint_id), checkpoint_id=checkpoint_id))
        files = {p: p.read_bytes() for p in (db.parent / "staging").rglob("*.arrows")}
        driver.commit(checkpoint_id, kept[-1])
        driver.retire(snapshot(checkpoint_id - 1, []), [snapshot(checkpoint_id, kept[-1])])
        for path, content in files.items():  # as if a late worker had read them in time
            path.write_bytes(content)
    assert query(db, "SELECT count(*) < 6, max(checkpoint_id) FROM cutwater_epochs") == [(1, 10)]
    for checkpoint_id, handles in enumerate(kept, start=1):
        driver.commit(checkpoint_id, handles)
    assert query(db, "SELECT n FROM t ORDER BY n") == [(n,) for n in range(1, 11)]


def test_rows_that_cannot_be_written_stay_for_the_next_try(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = sink_of(db)
    committer(sink).settle(None, [], 1)
    handles = staged(sink, numbers(1))
    monkeypatch.setattr("cutwater.connectors.databases._BUSY_TIMEOUT_S", 0.0)
    other = sqlite3.connect(db, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(
        StorageError, match=r"cannot write to SQLite database .*locked.* goes on from its last checkpoint"
    ):
        committer(sink).commit(1, handles)
    other.execute("ROLLBACK")
    other.close()
    committer(sink).commit(1, handles)
    assert query(db, "SELECT n FROM t") == [(1,)]


# ------------------------------------------------------------------------------------------------------------ checks


def test_building_makes_nothing(db: Path) -> None:
    sink_of(db).check(SCHEMA)
    assert list(db.parent.iterdir()) == []


def test_columns_that_do_not_fit_are_refused_when_the_dataflow_is_built(db: Path) -> None:
    refused(
        sink_of(db), pa.schema({"l": pa.list_(pa.int64())}), "'out': column 'l' .* cannot be written to SQLite.*parts"
    )
    refused(sink_of(db), pa.schema({"u": pa.uint64()}), "column 'u' .*Cast it to int64")
    refused(sink_of(db), pa.schema({"n": pa.int8(), "N": pa.int8()}), "two columns 'N'")
    refused(sink_of(db), pa.schema({"cutwater_epoch": pa.int8()}), "two columns 'cutwater_epoch'")
    refused(sink_of(db, mode="upsert", key=["k"]), SCHEMA, "no such key column 'k'.*There are: n")
    refused(sink_of(db.parent / "nowhere" / "x.db"), SCHEMA, "no folder '.*nowhere'")


def test_a_table_that_does_not_fit_is_refused_when_the_dataflow_is_built(db: Path) -> None:
    query(db, "CREATE TABLE t (m BIGINT)")
    refused(sink_of(db), SCHEMA, "has no column 'n'; it has m")
    query(db, "ALTER TABLE t ADD COLUMN n BIGINT")
    refused(sink_of(db), SCHEMA, 'ALTER TABLE "t" ADD COLUMN cutwater_epoch BIGINT')
    refused(sink_of(db, mode="upsert", key=["n"]), SCHEMA, r"no unique index on \(n\)")
    query(db, "CREATE UNIQUE INDEX i ON t (n)")
    sink_of(db, mode="upsert", key=["n"]).check(SCHEMA)
    query(db, "ALTER TABLE t ADD COLUMN cutwater_epoch BIGINT")
    sink_of(db).check(SCHEMA)
    db.write_bytes(b"no database at all, but long enough to be looked at" * 100)
    refused(sink_of(db), SCHEMA, "cannot read SQLite database .*not a database")


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"mode": "replace"}, "'append' or 'upsert'"),
        ({"mode": "upsert"}, "needs a key"),
        ({"key": ["n"]}, "mode='upsert'"),
        ({"parallelism": 0}, "at least 1"),
        ({"mode": "upsert", "key": ["n"], "parallelism": 2}, "in any order"),
    ],
)
def test_settings_that_make_no_sense_are_refused(wrong: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        table("sqlite:///x.db", "t", **wrong)


def test_addresses() -> None:
    for url in ("mysql://me:pw@host/db", "out.db", "sqlite:///", "sqlite://host/x"):
        with pytest.raises(BuildError, match=r"sqlite:///relative\.db") as caught:
            table(url, "t")
        assert "pw" not in str(caught.value)
    assert table("sqlite:///out.db", "t").database == database_of(f"sqlite:///{Path.cwd() / 'out.db'}")
    sink = table("sqlite:////data/out.db", "t").bind("/staging")
    assert pickle.loads(pickle.dumps(sink)) == sink


def test_a_password_is_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    sink = table(SECRET_URL, "sales.t", mode="upsert", key=["n"])
    with pytest.raises(BuildError, match=r"psycopg.*pip install 'cutwater\[postgres\]'") as caught:
        sink.check(SCHEMA)
    error = Exception(f'connection to "{SECRET_URL}" failed: password "s3cr@t" is wrong, hush')
    told = sink.database._told(error)
    texts = [repr(sink), str(sink), str(caught.value), sink.database.shown, told]
    for text in texts:
        assert not any(secret in text for secret in ("s3cr", "hush")), text
    assert sink.database.shown == "database 'postgresql://me@db.example:5432/sales?sslmode=require'"
    assert sink.database.quoted("sales.t") == '"sales"."t"'


def test_a_text_that_looks_like_sql_is_a_text(db: Path) -> None:
    nasty = "'); DROP TABLE t; --"
    rows = pa.record_batch({"s": [nasty]})
    sink = sink_of(db)
    tables = committer(sink, rows.schema)
    tables.settle(None, [], 1)
    tables.commit(1, staged(sink, rows))
    assert query(db, "SELECT s FROM t") == [(nasty,)]

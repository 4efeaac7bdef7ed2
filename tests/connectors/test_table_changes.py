"""Upserts of updating streams: the table is what the stream's rows, added minus removed, are; also through crashes."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sink_identity import Identity

import cutwater as cw
from cutwater.connectors.base import Json, SinkSnapshot
from cutwater.connectors.table_sink import TableCommitter, TableSink, table
from cutwater.errors import BuildError, DataError

SCHEMA = pa.schema({"op": pa.string(), "a": pa.int64(), "b": pa.string(), "n": pa.int64()})
KEY = ["a", "b"]
Change = tuple[str, int, str, int]


def sink_of(db: Path) -> TableSink:
    sink = table(f"sqlite:///{db}", "t", mode="upsert", key=KEY).bind(str(db.parent / "staging"))
    return sink.applying(("a", "b"))


def committer(db: Path) -> TableCommitter:
    return sink_of(db).committer(SCHEMA, "uid", "out")


def batch_of(changes: list[Change]) -> pa.RecordBatch:
    columns = list(zip(*changes, strict=True)) or [()] * len(SCHEMA)
    return pa.RecordBatch.from_arrays(
        [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)], schema=SCHEMA
    )


def staged(db: Path, changes: list[Change], checkpoint_id: int, incarnation: int = 1) -> list[Json]:
    """The handles of an epoch, which came in batches of seven rows."""
    writer = sink_of(db).writer(SCHEMA, Identity(subtask=checkpoint_id, incarnation=incarnation), [])
    for begin in range(0, len(changes), 7):
        writer.write(batch_of(changes[begin : begin + 7]))
    handles = writer.pre_commit(checkpoint_id, False)().handles
    writer.close()
    return handles


def stored(db: Path) -> list[tuple[Any, ...]]:
    connection = sqlite3.connect(db)
    try:
        return connection.execute("SELECT a, b, n FROM t ORDER BY a, b").fetchall()
    finally:
        connection.close()


def history(rows: int, seed: int) -> list[Change]:
    """Changes of a table with key (a, b): rows come, change and leave."""
    random, now, found = np.random.default_rng(seed), dict[tuple[int, str], int](), list[Change]()
    while len(found) < rows:
        key, n = (int(random.integers(0, 5)), "xyz"[random.integers(0, 3)]), len(found)
        if key not in now:
            found.append(("+I", *key, n))
        elif random.random() < 0.4:
            found.append(("-D", *key, now.pop(key)))
            continue
        else:
            found += [("-U", *key, now[key]), ("+U", *key, n)]
        now[key] = n
    return found


def table_after(changes: list[Change]) -> list[tuple[Any, ...]]:
    """DuckDB: added minus removed rows."""
    with duckdb.connect() as connection:
        connection.register("t", pa.Table.from_batches([batch_of(changes)]))
        return connection.execute(
            """select a, b, n from t group by all
            having sum(case when op in ('+I', '+U') then 1 else -1 end) > 0 order by a, b"""
        ).fetchall()


@given(cuts=st.lists(st.integers(0, 120), max_size=4), seed=st.integers(0, 99))
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_after_each_commit_the_table_is_that_of_the_stream(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], seed: int
) -> None:
    db = tmp_path_factory.mktemp("changes") / "out.db"
    changes = history(120, seed)
    committer(db).settle(None, [], 1)
    borders = sorted({*cuts, len(changes)} - {0})  # also between a -U and its +U
    for checkpoint_id, (begin, end) in enumerate(zip([0, *borders], borders, strict=False), start=1):
        committer(db).commit(checkpoint_id, staged(db, changes[begin:end], checkpoint_id))
        assert stored(db) == table_after(changes[:end])


class Killed(Exception):
    """The process is gone."""


@pytest.fixture(autouse=True)
def kill_at(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """Sets before which call to the database the process dies; ``None``: it lives."""
    monkeypatch.setattr(os, "fsync", lambda file: None)  # processes die here, machines do not
    left: list[int | None] = [None]
    real = sqlite3.connect

    def call() -> None:
        if left[0] is not None:
            left[0] -= 1
            if left[0] < 0:
                raise Killed

    class Cursor(sqlite3.Cursor):
        def executemany(self, sql: str, rows: Any) -> Any:
            for row in rows:  # it may die between two rows
                call()
                super().execute(sql, row)
            return self

    class Watched(sqlite3.Connection):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            super().execute("PRAGMA synchronous=OFF")

        def execute(self, *arguments: Any) -> Any:
            call()
            return super().execute(*arguments)

        def cursor(self, *arguments: Any) -> Any:
            return super().cursor(Cursor)

    monkeypatch.setattr(sqlite3, "connect", lambda *a, **options: real(*a, factory=Watched, **options))

    def kill(calls: int | None) -> None:
        left[0] = calls

    return kill


def test_a_death_before_any_call_to_the_database_leaves_the_table_of_a_checkpoint(
    tmp_path: Path, kill_at: Callable[[int | None], None]
) -> None:
    changes = history(60, 3)
    deaths = 0
    for calls in range(1000):
        db = tmp_path / str(calls) / "out.db"
        db.parent.mkdir()
        committer(db).settle(None, [], 1)
        first, second = staged(db, changes[:31], 1), staged(db, changes[31:], 2)
        committer(db).commit(1, first)
        kill_at(calls)
        try:
            committer(db).commit(2, second)
        except Killed:
            deaths += 1
        kill_at(None)
        assert stored(db) in (table_after(changes[:31]), table_after(changes))
        # The next driver finds the second checkpoint in the log; the worker that died, or seemed to, may wake up.
        snapshot = SinkSnapshot(2, second, [None])
        committer(db).settle(snapshot, [snapshot], 2)
        assert stored(db) == table_after(changes)
        committer(db).commit(2, second)
        committer(db).commit(1, first)
        assert stored(db) == table_after(changes)
        if deaths <= calls:
            break
    assert deaths > 12, "nothing died in the middle of a commit"


def test_an_epoch_of_an_older_attempt_deletes_nothing(db: Path) -> None:
    committer(db).settle(None, [], 1)
    first = staged(db, [("+I", 1, "x", 1)], 1)
    late = staged(db, [("-D", 1, "x", 1)], 2)
    committer(db).commit(1, first)
    files = {path: path.read_bytes() for path in (db.parent / "staging").rglob("*.arrows")}
    assert files
    snapshot = SinkSnapshot(1, first, [None])
    committer(db).settle(snapshot, [snapshot], 2)
    for path, content in files.items():  # the worker had read its rows before they were swept
        path.write_bytes(content)
    committer(db).commit(2, late)
    assert stored(db) == [(1, "x", 1)]


@pytest.fixture
def db(tmp_path: Path) -> Path:
    return tmp_path / "out.db"


def test_the_mark_is_no_column_of_the_table(db: Path) -> None:
    sink_of(db).check(SCHEMA)
    committer(db).settle(None, [], 1)
    committer(db).commit(1, staged(db, [("+I", 1, "x", 1)], 1))
    connection = sqlite3.connect(db)
    names = [name for (name,) in connection.execute("SELECT name FROM pragma_table_info('t')")]
    connection.close()
    assert names == ["a", "b", "n"]


def test_a_row_without_a_mark_is_refused_when_it_comes(db: Path) -> None:
    writer = sink_of(db).writer(SCHEMA, Identity(subtask=0, incarnation=1), [])
    with pytest.raises(DataError, match=r"'op' is none of .* in row 1"):
        writer.write(batch_of([("+I", 1, "x", 1), ("+", 2, "x", 1)]))
    writer.close()


# --------------------------------------------------------------------------------------- what is said when it is built


def updating() -> Any:
    rows = cw.Dataflow("f").read("rows", cw.memory([], schema="a long, b string, n long"))
    return rows.key_by("a", "b").deduplicate("latest", keep="last")


def test_rows_that_the_key_does_not_tell_apart_are_refused_with_the_fix(db: Path) -> None:
    target = f"sqlite:///{db}"
    with pytest.raises(BuildError, match=r"told apart by a, b, but the upsert keeps one row for each a:") as raised:
        updating().write("out", cw.table(target, "t", mode="upsert", key=["a"]))
    assert raised.value.step == "out"
    assert raised.value.hint == "Write key=['a', 'b']."
    top = updating().key_by("a").top("best", 2, by="n").drop("less", "b")
    with pytest.raises(BuildError, match="have no known key") as raised:
        top.write("out", cw.table(target, "t", mode="upsert", key=["a"]))
    assert "with_changes" in str(raised.value.hint)
    with pytest.raises(BuildError, match="no such key column 'op'"):
        updating().write("out", cw.table(target, "t", mode="upsert", key=["op", "a", "b"]))


def test_a_finer_key_and_a_log_of_changes_are_fine(db: Path) -> None:
    target = f"sqlite:///{db}"
    updating().write("out", cw.table(target, "t", mode="upsert", key=["a", "b", "n"]))
    updating().write("log", cw.table(target, "log"))

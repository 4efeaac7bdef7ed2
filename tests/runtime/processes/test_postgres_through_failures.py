"""A table of Postgres that changes all the time, read through kills and new starts; it is the oracle."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_host import FakeSpark
from runtime_world import kill_some, query, wait_until
from servers.postgres import PostgresServer

import cutwater as cw
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import LogState
from cutwater.storage.store.local import LocalStore
from postgres_world import Database, database, postgres

__all__ = ["database", "postgres"]
KEYS, ROWS = 400, 3_000


class Writer:
    """Changes rows, in transactions of one or many, some of which are rolled back; keys move, too."""

    def __init__(self, database: Database, seed: int) -> None:
        self._database, self._rng = database, random.Random(seed)
        self._stopping = threading.Event()
        self.error: BaseException | None = None
        self.committed = 0
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(30)
        assert self.error is None, self.error

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with self._database.connect() as connection:
                    while not self._stopping.wait(0.002):
                        self._transaction(connection)
            except Exception as error:
                if "terminating" in str(error) or "connection" in str(error):  # the server starts again
                    time.sleep(0.1)
                    continue
                self.error = error
                return

    def _transaction(self, connection: Any) -> None:
        rng = self._rng
        connection.execute("BEGIN")
        for _ in range(rng.choice([1, 1, 2, 30])):
            id = rng.randrange(KEYS * 2)
            what = rng.random()
            if what < 0.4:
                connection.execute(
                    "INSERT INTO items VALUES (%s, %s, %s) ON CONFLICT (id) DO UPDATE SET n = items.n + 1",
                    (id, f"new {id}", rng.randrange(1000)),
                )
            elif what < 0.7:
                connection.execute("UPDATE items SET n = n + 1 WHERE id BETWEEN %s AND %s", (id, id + 3))
            elif what < 0.85:
                connection.execute("DELETE FROM items WHERE id = %s", (id,))
            else:
                connection.execute(
                    "UPDATE items SET id = %s WHERE id = %s AND NOT EXISTS (SELECT FROM items WHERE id = %s)",
                    (id + KEYS, id, id + KEYS),
                )
        connection.execute("COMMIT" if rng.random() < 0.9 else "ROLLBACK")
        self.committed += 1


def make_tables(database: Database, rows: int = ROWS) -> None:
    database.run("CREATE TABLE items (id int PRIMARY KEY, name text, n int NOT NULL)")
    database.run("ALTER TABLE items REPLICA IDENTITY FULL")
    database.run(f"INSERT INTO items SELECT g, 'row ' || g, g FROM generate_series(0, {rows - 1}) g")


def flow_of(database: Database, out: Path, *, rate: float | None = None) -> cw.Dataflow:
    flow = cw.Dataflow("changes")
    rows = flow.read("items", cw.postgres_changes(database.dsn, "items", rate=rate, check_interval="200ms"))
    rows.write("log", cw.files(str(out), roll_rows=500))
    rows.write("copy", cw.table(database.dsn, "items_copy", mode="upsert", key="id"))
    return flow


def folded(out: Path) -> list[tuple[Any, ...]]:
    """What all added rows without all removed ones are: the table, whatever their order in the files."""
    if not list(out.glob("*.parquet")):
        return []
    return query(
        "SELECT id, name, n, sum(CASE WHEN op IN ('+I', '+U') THEN 1 ELSE -1 END)::int AS times FROM {out} "
        "GROUP BY ALL HAVING times <> 0 ORDER BY ALL",
        out=out,
    )


def table(database: Database, name: str = "items") -> list[tuple[Any, ...]]:
    return database.run(f"SELECT id, name, n FROM {name} ORDER BY 1, 2, 3")


def job_log(folder: Path) -> LogState:
    return JobLog(LocalStore(str(folder / "chk")), "changes").read()


def caught_up(database: Database, out: Path) -> bool:
    if not database.run("SELECT to_regclass('items_copy')")[0][0]:
        return False
    now = table(database)
    return table(database, "items_copy") == now and folded(out) == [(*row, 1) for row in now]


@pytest.mark.parametrize(
    ("recovery", "shapes"),
    [("job", (2, 3, 1)), pytest.param("region", (1, 2, 3), marks=pytest.mark.full)],
    ids=str,
)
def test_the_stream_is_the_table(
    start: Any, fake_spark: FakeSpark, database: Database, tmp_path: Path, recovery: str, shapes: tuple[int, int, int]
) -> None:
    first, then, last = shapes
    out = tmp_path / "out"
    make_tables(database)

    def started(parallelism: int, rate: float | None = None) -> Any:
        job = start(flow_of(database, out, rate=rate), parallelism=parallelism, interval="100ms", recovery=recovery)
        wait_until(lambda: job.status.phase == "running", "the start", job=job)
        return job

    with Writer(database, first) as writer:
        job = started(first, rate=6_000)
        kill_some(job, fake_spark, 2, seed=first)  # in the middle of the snapshot
        wait_until(lambda: writer.committed > 200, "changes", job=job)
        job.rescale(then)
        kill_some(job, fake_spark, 1, seed=then)
        wait_until(lambda: job.status.phase == "running", "the recovery", job=job)
        job.stop()
        job = started(last)
        kill_some(job, fake_spark, 2, seed=last)
    wait_until(lambda: caught_up(database, out), "all changes", job=job)
    assert len(database.slots) == 1
    job.stop()


def test_an_older_checkpoint_finds_its_changes(start: Any, database: Database, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make_tables(database, 100)
    job = start(flow_of(database, out), interval="150ms", num_retained=4)
    with Writer(database, 3):
        wait_until(lambda: job.status.checkpoints.completed > 5, "checkpoints", job=job)
    wait_until(lambda: caught_up(database, out), "all changes", job=job)
    job.stop()
    oldest = min(job_log(tmp_path).completed, key=lambda entry: entry.checkpoint_id).checkpoint_id
    job = start(flow_of(database, out), interval="150ms", restore=f"{tmp_path / 'chk'}/changes@{oldest}")
    wait_until(lambda: job.status.checkpoints.completed > 1, "a checkpoint", job=job)
    wait_until(lambda: caught_up(database, out), "all changes again", job=job)
    job.stop()


def test_a_server_that_is_killed_is_waited_for(start: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with PostgresServer() as server:
        database = Database(server, "postgres")
        make_tables(database, 100)
        flow = cw.Dataflow("changes")
        rows = flow.read("items", cw.postgres_changes(server.dsn, "items", check_interval="200ms"))
        rows.write("log", cw.files(str(out), roll_rows=500))
        job = start(flow, interval="100ms")
        with Writer(database, 5) as writer:
            wait_until(lambda: writer.committed > 50, "changes", job=job)
            server.kill()
            server.start()
            before = writer.committed
            wait_until(lambda: writer.committed > before + 50, "changes after it", job=job)
        wait_until(lambda: folded(out) == [(*row, 1) for row in table(database)], "all changes", job=job)
        assert job.status.restarts == 0
        assert len(database.slots) == 1
        job.stop()


def test_rows_of_which_only_the_key_leaves_are_made_whole(start: Any, database: Database, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make_tables(database, 300)
    database.run("ALTER TABLE items REPLICA IDENTITY DEFAULT")
    flow = cw.Dataflow("keys")
    rows = flow.read("items", cw.postgres_changes(database.dsn, "items", old_rows="key"))
    latest = rows.key_by("id").deduplicate("latest", keep="last")
    latest.write("log", cw.files(str(out)))
    latest.write("copy", cw.table(database.dsn, "items_copy", mode="upsert", key="id"))
    job = start(flow, interval="100ms")
    wait_until(lambda: database.run("SELECT to_regclass('items_copy') IS NOT NULL") == [(True,)], "a copy", job=job)
    with Writer(database, 11) as writer:
        wait_until(lambda: writer.committed > 50, "changes", job=job)
    wait_until(lambda: table(database, "items_copy") == table(database), "all changes", job=job)
    job.stop(savepoint=tmp_path / "savepoint")  # which leaves no row in an open file
    assert folded(out) == [(*row, 1) for row in table(database)]


def test_a_bounded_job_leaves_nothing_on_the_server(start: Any, database: Database, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make_tables(database, 1000)
    flow = cw.Dataflow("once")
    rows = flow.read("items", cw.postgres_changes(database.dsn, "items", until="latest"))
    rows.write("log", cw.files(str(out)))
    start(flow).await_termination(60)
    assert folded(out) == [(*row, 1) for row in table(database)]
    assert database.slots == []
    assert database.run("SELECT pubname FROM pg_publication") == []

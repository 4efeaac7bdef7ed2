"""One topic into every kind of sink, checkpoints in a bucket, while workers, drivers and servers are killed."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import confluent_kafka as client
import deltalake
import duckdb
import pytest
from fake_host import FakeHost, FakeSpark, adopt, context, server_address
from pyiceberg.catalog import load_catalog
from servers.kafka import Broker
from servers.object_store import ObjectServer
from servers.postgres import PostgresServer

import cutwater as cw
from cutwater.api.jobs import job as job_module
from object_world import in_environment

RATE = 2_000
SINKS = ("files", "kafka", "delta", "iceberg", "table")


def catalog_of(folder: Path) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}


def flow_of(folder: Path, broker: str, dsn: str) -> cw.Dataflow:
    flow = cw.Dataflow("everything")
    rows = flow.read("in", cw.kafka(broker, "in", schema="id long, page string"))
    rows.write("files", cw.files(str(folder / "files"), roll_rows=5_000, roll_interval_ms=1_000))
    rows.write("kafka", cw.kafka(broker, "out", key="page"))
    rows.write("delta", cw.delta(folder / "delta", roll_interval_ms=1_000))
    rows.write("iceberg", cw.iceberg("all.rows", catalog=catalog_of(folder)))
    rows.write("table", cw.table(dsn, "rows"))
    return flow


def drive(folder: str, server: str, broker: str, dsn: str, environment: Mapping[str, str], seed: int) -> None:
    """A driver in a process of its own; it kills workers at random moments, and tells each kill."""
    adopt(server)
    os.environ.update(environment)
    job_module.SparkHost = FakeHost  # type: ignore[misc]
    spark, rng, place = FakeSpark(), random.Random(seed), Path(folder)
    spark.prepare = in_environment(environment)
    job = flow_of(place, broker, dsn).start(
        spark,  # type: ignore[arg-type]
        checkpoint=f"{environment['BUCKET_OF_TEST']}/chk",
        interval="300ms",
        parallelism=2,
        restart={"strategy": "fixed_delay", "attempts": 10_000, "delay_ms": 100},
    )

    def kill() -> None:
        while job.is_active:
            time.sleep(rng.uniform(0.5, 3.0))
            if job.status.phase == "running" and spark.pids and (place / "storm").exists():
                os.kill(rng.choice(spark.pids), signal.SIGKILL)
                with open(place / "kills", "a") as log:
                    log.write("worker\n")

    threading.Thread(target=kill, daemon=True).start()
    job.await_termination()


class Storm:
    """Rows that come all the time, and what is killed meanwhile."""

    def __init__(
        self, folder: Path, broker: Broker, store: ObjectServer, postgres: PostgresServer, bucket: str, seed: int
    ) -> None:
        self.folder, self.broker, self.store, self.postgres = folder, broker, store, postgres
        self.environment = {**store.environment, "BUCKET_OF_TEST": bucket}
        self.dsn = postgres.dsn_of("postgres")
        self.rng = random.Random(seed)
        self.sent, self.killed = 0, Counter[str]()
        self._done = threading.Event()
        self._writer = threading.Thread(target=self._send, daemon=True)
        self.process: Any = None

    def _send(self) -> None:
        producer = client.Producer(
            {"bootstrap.servers": self.broker.address, "enable.idempotence": True, "log_level": 0}
        )
        while not self._done.is_set():
            for _ in range(RATE // 20):
                body = json.dumps({"id": self.sent, "page": f"p{self.sent % 7}"})
                producer.produce("in", body, partition=self.sent % 4)
                self.sent += 1
            producer.poll(0)
            time.sleep(0.05)
        assert producer.flush(60) == 0

    def start_driver(self) -> None:
        seed = self.rng.randrange(1 << 30)
        arguments = (str(self.folder), server_address(), self.broker.address, self.dsn, self.environment, seed)
        self.process = context().Process(target=drive, args=arguments)
        self.process.start()

    def restart(self, server: Any) -> None:
        server.kill()
        server.start()

    def kill_driver(self) -> None:
        self.process.kill()
        self.process.join()
        self.start_driver()

    @property
    def workers_killed(self) -> int:
        log = self.folder / "kills"
        return len(log.read_text().splitlines()) if log.exists() else 0

    @property
    def kills(self) -> int:
        return self.killed.total() + self.workers_killed

    def rage(self, kills: int) -> None:
        """Until there were so many."""
        victims: list[tuple[str, Callable[[], None]]] = [
            ("driver", self.kill_driver),
            ("driver", self.kill_driver),
            ("broker", lambda: self.restart(self.broker)),
            ("store", lambda: self.restart(self.store)),
            ("postgres", lambda: self.restart(self.postgres)),
        ]
        self._writer.start()
        self.start_driver()
        (self.folder / "storm").touch()
        while self.kills < kills:
            known, ends_s = self.workers_killed, time.monotonic() + self.rng.uniform(5.0, 12.0)
            while time.monotonic() < ends_s and self.workers_killed < min(known + 4, kills):
                time.sleep(0.1)
                assert self.process.is_alive(), "the job failed"
            if self.kills < kills:
                name, kill = self.rng.choice(victims)
                kill()
                self.killed[name] += 1
        (self.folder / "storm").unlink()
        self._done.set()
        self._writer.join()
        self.killed["worker"] = self.workers_killed

    def ids(self, sink: str) -> Iterable[int]:
        """As a reader of that system's own sees them."""
        if sink == "files" and not list((self.folder / "files").glob("*.parquet")):
            return []
        if sink == "files":
            return [
                i for (i,) in duckdb.sql(f"SELECT id FROM read_parquet('{self.folder}/files/*.parquet')").fetchall()
            ]
        if sink == "kafka":
            return [json.loads(message.value())["id"] for message in self.broker.committed("out")]
        if sink == "delta":
            return deltalake.DeltaTable(self.folder / "delta").to_pyarrow_table(columns=["id"])["id"].to_pylist()
        if sink == "iceberg":
            table = load_catalog("default", **catalog_of(self.folder)).load_table("all.rows")
            return table.scan(selected_fields=("id",)).to_arrow()["id"].to_pylist()
        return [i for (i,) in self.postgres.run("SELECT id FROM rows")]

    def check(self) -> None:
        """Each row once, in every sink."""
        ends_s = time.monotonic() + 120
        for sink in SINKS:
            while len(seen := list(self.ids(sink))) < self.sent and time.monotonic() < ends_s:
                time.sleep(0.5)
            doubled = [id for id, times in Counter(seen).items() if times > 1]
            lost = set(range(self.sent)).difference(seen)
            assert (sink, len(lost), len(doubled), len(seen)) == (sink, 0, 0, self.sent)

    def close(self) -> None:
        self._done.set()
        if self.process is not None:
            self.process.kill()
            self.process.join()


@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(6, marks=[pytest.mark.full, pytest.mark.timeout(300)]),
        pytest.param(200, marks=[pytest.mark.chaos, pytest.mark.timeout(3600)]),
    ],
)
def test_each_row_is_once_in_every_sink(tmp_path: Path, kills: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with Broker() as broker, ObjectServer("everything") as store, PostgresServer() as postgres:
        broker.create_topic("in", 4)
        broker.create_topic("out", 2)
        load_catalog("default", **catalog_of(tmp_path)).create_namespace("all")
        for name, value in store.environment.items():
            monkeypatch.setenv(name, value)
        storm = Storm(tmp_path, broker, store, postgres, "s3://everything/job", seed=kills)
        try:
            storm.rage(kills)
            storm.check()
        finally:
            storm.close()
    print(f"{storm.sent:,} rows, {storm.killed.total()} kills: {dict(storm.killed)}")

"""Clicks from Kafka to Kafka and Delta, exactly once, while a worker, the driver and the servers are killed.

``make run-kafka`` executes this file.  ``build`` is the whole Cutwater program.  The rest starts a broker and an object
store of its own, sends clicks, and runs the program, with its checkpoints in the store, in a process that can be
killed.  At the end a reader of committed messages and a reader of the Delta table must both see what Polars computes
from the clicks: each minute of each page once, with the right numbers.

    python examples/kafka_clicks.py
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl

import cutwater as cw

HOME = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HOME))
PAGES, PER_MINUTE, RATE, SECONDS = 200, 20_000, 20_000, 24
"""Pages; clicks in a minute of event time; clicks that are sent in a second, and for how long."""
DEADLINE_S = 180
BUCKET = "clicks"
KILL_A_WORKER = "kill-a-worker"
"""A file with this name in the job's folder."""


def build(servers: str, table: str) -> cw.Dataflow:
    """Clicks in, counts and sums by page and minute out, to a topic and to a table.  Building runs nothing."""
    flow = cw.Dataflow("clicks")
    clicks = flow.read(
        "clicks",
        cw.kafka(servers, "clicks", schema="id long, page string, kind string, cents long, at timestamp_ntz"),
        event_time="at",
        out_of_order="2s",
    )
    sums = (
        clicks.filter("paid", pl.col("kind") != "view")
        .key_by("page")
        .window("minute", cw.tumbling("1m"))
        .aggregate("sums", n=cw.count(), cents=cw.sum("cents"))
    )
    sums.write("topic", cw.kafka(servers, "sums", key="page"))
    sums.write("table", cw.delta(table, roll_interval_ms=1_000))
    return flow


def clicks_of(first: int, count: int) -> pl.DataFrame:
    """Clicks by their numbers, up to a second out of order."""
    ids = np.arange(first, first + count)
    ms = 60_000 + ids * 60_000 // PER_MINUTE - ids * 7919 % 1000
    return pl.DataFrame(
        {
            "id": ids,
            "page": np.char.add("p", (ids * 31 % PAGES).astype(str)),
            "kind": np.array(["view", "click", "buy"])[ids * 17 % 10 % 3],
            "cents": ids * 13 % 997,
            "at": np.datetime64("2026-01-01") + ms.astype("timedelta64[ms]"),
        }
    )


def job(servers: str, folder: str) -> None:
    """The program as a user runs it; it kills one of its workers when it is asked to."""
    flow = build(servers, f"{folder}/sums")
    running = flow.start(checkpoint=f"s3://{BUCKET}/checkpoints", interval="1s", parallelism=2)
    asked = Path(folder, KILL_A_WORKER)
    while not running.await_termination(0.2):
        workers = running.status.workers
        if asked.exists() and workers:
            asked.unlink()
            print(f"  killing worker process {workers[0].pid}", flush=True)
            os.kill(workers[0].pid, signal.SIGKILL)


def send(servers: str, done: threading.Event) -> None:
    """Clicks at a steady rate, then one far in the future in each partition, which closes the last windows."""
    import confluent_kafka

    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": servers,
            "enable.idempotence": True,
            "queue.buffering.max.messages": 1_000_000,
            "log_level": 2,  # that a broker is killed is no news here
        }
    )
    began = time.monotonic()
    for block in range(SECONDS * 10):
        rows = clicks_of(block * RATE // 10, RATE // 10)
        for number, line in enumerate(rows.write_ndjson().splitlines()):
            producer.produce("clicks", line, partition=number % 4)
        producer.poll(0)
        time.sleep(max(0.0, began + block / 10 - time.monotonic()))
    end = {"id": -1, "page": "end", "kind": "buy", "cents": 0, "at": "2026-02-01T00:00:00"}
    for partition in range(4):
        producer.produce("clicks", json.dumps(end), partition=partition)
    producer.flush()
    done.set()


def expected() -> list[tuple[str, str, int, int]]:
    """What topic and table must hold, by Polars from the clicks."""
    paid = clicks_of(0, SECONDS * RATE).filter(pl.col("kind") != "view")
    sums = paid.group_by(pl.col("at").dt.truncate("1m"), "page").agg(pl.len().alias("n"), pl.col("cents").sum())
    sums = sums.with_columns(pl.col("at").dt.to_string("%Y-%m-%d %H:%M:%S"))
    return sorted(sums.select("at", "page", "n", "cents").rows())


def in_table(folder: Path) -> list[tuple[str, str, int, int]]:
    """What a reader of the Delta table sees."""
    import deltalake

    if not (folder / "sums" / "_delta_log").exists():
        return []
    rows = pl.from_arrow(deltalake.DeltaTable(folder / "sums").to_pyarrow_table())
    assert isinstance(rows, pl.DataFrame)
    minutes = pl.col("window_start").dt.to_string("%Y-%m-%d %H:%M:%S")
    return sorted(rows.select(minutes, "page", "n", "cents").rows())


def main() -> int:
    from servers.kafka import Broker
    from servers.object_store import ObjectServer

    folder = HOME / "out" / "kafka"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def start(servers: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, __file__, servers, str(folder)], start_new_session=True)

    print("starting a broker and an object store")
    with Broker(heap="512m") as broker, ObjectServer(BUCKET) as store:
        os.environ.update(store.environment)
        broker.create_topic("clicks", 4)
        broker.create_topic("sums", 2)
        done, wanted = threading.Event(), expected()
        threading.Thread(target=send, args=(broker.address, done), daemon=True).start()
        running = start(broker.address)

        def seen() -> list[tuple[str, str, int, int]]:
            rows = [json.loads(message.value()) for message in broker.committed("sums")]
            return sorted((row["window_start"], row["page"], row["n"], row["cents"]) for row in rows)

        def wait_for(sums: int, look: Callable[[], list[tuple[str, str, int, int]]] = seen) -> None:
            ends = time.monotonic() + DEADLINE_S
            while len(look()) < sums and time.monotonic() < ends and running.poll() is None:
                time.sleep(0.5)

        try:
            wait_for(len(wanted) // 5)
            (folder / KILL_A_WORKER).touch()
            wait_for(2 * len(wanted) // 5)
            print("  killing the driver", flush=True)
            os.killpg(running.pid, signal.SIGKILL)
            running = start(broker.address)
            wait_for(3 * len(wanted) // 5)
            print("  killing the broker", flush=True)
            broker.kill()
            broker.start()
            wait_for(4 * len(wanted) // 5)
            print("  killing the object store", flush=True)
            store.kill()
            store.start()
            wait_for(len(wanted))
            wait_for(len(wanted), lambda: in_table(folder))
            found = {"a reader of committed messages": seen(), "a reader of the Delta table": in_table(folder)}
        finally:
            os.killpg(running.pid, signal.SIGKILL)
    print(f"{SECONDS * RATE:,} clicks, {len(wanted):,} sums")
    for who, rows in found.items():
        right = "exactly these, each once" if rows == wanted else f"{len(rows):,}, and they are NOT these"
        print(f"  {who} sees {right}")
    return 0 if all(rows == wanted for rows in found.values()) else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        job(*sys.argv[1:])
    else:
        sys.exit(main())

"""Clicks from Kafka to Kafka, exactly once, while a worker, the driver and the broker are killed.

``make run-kafka`` executes this file.  ``build`` is the whole Cutwater program.  The rest starts a broker of its own,
sends clicks to it, and runs the program in a process that can be killed.  At the end a reader of committed messages
must see what Polars computes from the clicks: each minute of each page once, with the right numbers.

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
from pathlib import Path

import numpy as np
import polars as pl

import cutwater as cw

HOME = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HOME))
PAGES, PER_MINUTE, RATE, SECONDS = 200, 20_000, 20_000, 24
"""Pages; clicks in a minute of event time; clicks that are sent in a second, and for how long."""
DEADLINE_S = 180
KILL_A_WORKER = "kill-a-worker"
"""A file with this name in the job's folder."""


def build(servers: str) -> cw.Dataflow:
    """Clicks in, counts and sums by page and minute out.  Building runs nothing."""
    flow = cw.Dataflow("clicks")
    clicks = flow.read(
        "clicks",
        cw.kafka(servers, "clicks", schema="id long, page string, kind string, cents long, at timestamp_ntz"),
        event_time="at",
        out_of_order="2s",
    )
    (
        clicks.filter("paid", pl.col("kind") != "view")
        .key_by("page")
        .window("minute", cw.tumbling("1m"))
        .aggregate("sums", n=cw.count(), cents=cw.sum("cents"))
        .write("out", cw.kafka(servers, "sums", key="page"))
    )
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
    running = build(servers).start(checkpoint=f"{folder}/checkpoints", interval="1s", parallelism=2)
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
        {"bootstrap.servers": servers, "enable.idempotence": True, "queue.buffering.max.messages": 1_000_000}
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
    """What the topic must hold, by Polars from the clicks."""
    paid = clicks_of(0, SECONDS * RATE).filter(pl.col("kind") != "view")
    sums = paid.group_by(pl.col("at").dt.truncate("1m"), "page").agg(pl.len().alias("n"), pl.col("cents").sum())
    sums = sums.with_columns(pl.col("at").dt.to_string("%Y-%m-%d %H:%M:%S"))
    return sorted(sums.select("at", "page", "n", "cents").rows())


def main() -> int:
    from servers.kafka import Broker

    folder = HOME / "out" / "kafka"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)

    def start(servers: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, __file__, servers, str(folder)], start_new_session=True)

    print("starting a broker")
    with Broker(heap="512m") as broker:
        broker.create_topic("clicks", 4)
        broker.create_topic("sums", 2)
        done, wanted = threading.Event(), expected()
        threading.Thread(target=send, args=(broker.address, done), daemon=True).start()
        running = start(broker.address)

        def seen() -> list[tuple[str, str, int, int]]:
            rows = [json.loads(message.value()) for message in broker.committed("sums")]
            return sorted((row["window_start"], row["page"], row["n"], row["cents"]) for row in rows)

        def wait_for(sums: int) -> None:
            ends = time.monotonic() + DEADLINE_S
            while len(seen()) < sums and time.monotonic() < ends and running.poll() is None:
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
            wait_for(len(wanted))
            found = seen()
        finally:
            os.killpg(running.pid, signal.SIGKILL)
    right = found == wanted
    print(
        f"{SECONDS * RATE:,} clicks, {len(wanted):,} sums: a reader of committed messages sees "
        + ("exactly these, each once" if right else f"{len(found):,}, and they are NOT these")
    )
    return 0 if right else 1


if __name__ == "__main__":
    if len(sys.argv) > 1:
        job(*sys.argv[1:])
    else:
        sys.exit(main())

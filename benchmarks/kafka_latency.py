"""Time from a row's produce call until a reader of committed messages has what came of it, by guarantee and interval.

    python -m benchmarks.kafka_latency [--seconds 20] [--rate 10000] [--quick] [--only at-least-once,exactly-once]

JSON of 100 bytes goes into four partitions, a running count of each page goes out into two.  Broker, job and this
program, which produces and reads, are processes of their own; all three tell time by the machine's monotonic clock.  A
row counts as read with the first count of its page that includes it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from servers.kafka import Broker

import cutwater as cw
from benchmarks.kafka_rows import PAGE_AT, PAGE_WIDTH, PAGES, SCHEMA, WIDTH, columns, encoded
from benchmarks.machine import busy_cpus, facts
from benchmarks.processes import ROOT
from benchmarks.row_times import SKIP_S, late_ms, told
from cutwater.config import ProtocolName, parse_duration_ms
from cutwater.connectors.kafka.kafka import kafka
from cutwater.connectors.kafka.producer import Producer

__all__ = ["main"]

PARTITIONS, PARALLELISM = 4, 2
TICK_S, WARM_RATE = 0.002, 500
"""Rows are produced so often, those that are due."""
CASES = (("at-least-once", "1s"), *(("exactly-once", interval) for interval in ("1s", "500ms", "200ms", "100ms")))
_START_S, _END_S = 90.0, 30.0


def run_job(servers: str, source: str, out: str, folder: str, guarantee: str, interval: str) -> None:
    """The job, until this process' input ends."""
    from cutwater.spark.session import session

    flow = cw.Dataflow("latency")
    rows = flow.read("clicks", cw.kafka(servers, source, schema=SCHEMA))
    counts = rows.key_by("page").aggregate("counts", n=cw.count(), cents=cw.sum("cents"))
    counts.write("out", cw.kafka(servers, out, key="page", guarantee=guarantee))
    protocol: ProtocolName = "aligned" if guarantee == "exactly-once" else "at_least_once"
    settings: dict[str, Any] = {"parallelism": PARALLELISM, "interval": interval, "protocol": protocol}
    job = flow.start(session(PARALLELISM), checkpoint=folder, **settings)
    while job.status.phase != "running":
        if job.status.outcome:
            job.await_termination()
        time.sleep(0.02)
    print("running", flush=True)
    sys.stdin.read()
    checkpoints = job.status.checkpoints
    print(f"{checkpoints.completed} checkpoints, {checkpoints.failed} failed", flush=True)
    job.stop()


class Feed:
    """Produces rows in a thread, and notes when: few until the job shows the first, then at a rate.

    Args:
        rate: rows a second.
        seconds: at that rate.
    """

    def __init__(self, servers: str, topic: str, rate: int, seconds: float) -> None:
        rows = int(rate * seconds) + int(WARM_RATE * _START_S)
        made = columns(np.arange(rows))
        self.pages = made["page"]
        self.began_ns = np.zeros(rows, np.int64)
        self.sent, self.ended = 0, False
        self.first: int | None = None
        """The first row at the full rate."""
        self._rate, self._rows, self._messages = rate, int(rate * seconds), encoded(made)
        self._producer = Producer(kafka(servers, topic).cluster, topic, {"linger_ms": 0})
        self._shown, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def shown(self) -> None:
        """The job has shown a row."""
        self._shown.set()

    def _run(self) -> None:
        began_s, behind, rate, most = time.monotonic(), 0, WARM_RATE, int(WARM_RATE * _START_S)
        while not self._stopped.wait(TICK_S) and self.sent < most:
            if self.first is None and self._shown.is_set():
                self.first = behind = self.sent
                began_s, rate, most = time.monotonic(), self._rate, self.first + self._rows
            due = min(most, behind + int((time.monotonic() - began_s) * rate))
            structs = np.zeros((due - self.sent, 9), np.int64)
            structs[:, 3] = self._messages.ctypes.data + WIDTH * np.arange(self.sent, due)
            structs[:, 4] = WIDTH
            structs[:, 5], structs[:, 6] = structs[:, 3] + PAGE_AT, PAGE_WIDTH  # the key: rows of a page have an order
            self.began_ns[self.sent : due] = time.monotonic_ns()
            self._producer.send(structs)
            self.sent = due
        self.ended = True

    def end(self) -> None:
        """Produce no more."""
        self._stopped.set()
        self._thread.join()
        self._producer.flush()
        self._producer.close()


def measure(broker: Broker, number: int, guarantee: str, interval: str, rate: int, seconds: float) -> None:
    """One job; prints its percentiles.

    Raises:
        RuntimeError: it failed, or rows are missing, or came twice.
    """
    import confluent_kafka as client

    source, out = f"in-{number}", f"out-{number}"
    broker.create_topic(source, PARTITIONS)
    broker.create_topic(out, PARALLELISM)
    options: dict[str, Any] = {"bootstrap.servers": broker.address, "group.id": "reader", "enable.auto.commit": False}
    reader = client.Consumer({**options, "isolation.level": "read_committed", "fetch.wait.max.ms": 10})
    reader.assign([client.TopicPartition(out, partition, 0) for partition in range(PARALLELISM)])
    others = busy_cpus()
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as folder:
        command = [sys.executable, "-m", "benchmarks.kafka_latency", "--job", broker.address, source, out, folder]
        log = Path(folder, "log")
        with open(log, "w") as errors:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            job = subprocess.Popen([*command, guarantee, interval], cwd=ROOT, text=True, **pipes)
        assert job.stdin is not None
        assert job.stdout is not None
        try:
            if job.stdout.readline() != "running\n":
                raise RuntimeError(log.read_text()[-3000:])
            feed = Feed(broker.address, source, rate, seconds + SKIP_S)
            try:
                seen = _read(reader, feed, _START_S + seconds + SKIP_S + _END_S)
            finally:
                feed.end()
            job.stdin.close()
            checkpoints = job.stdout.readline().strip()
            job.wait(_START_S)
        finally:
            if job.poll() is None:
                job.kill()
                job.wait()
            reader.close()
    late = late_ms(feed.began_ns[feed.first : feed.sent], seen[feed.first : feed.sent])
    half = parse_duration_ms(interval) / 2 if guarantee == "exactly-once" else 0
    limit = f"p50 <= {half + 80:.0f}" if half else "p50 <= 15, p99 <= 60"
    print(
        f"{guarantee:<14} {interval:>6}: {told(late)}  p90 {np.percentile(late, 90):.1f}; aimed at {limit}; "
        f"{checkpoints}; others used {others} CPUs",
        flush=True,
    )


def _read(reader: Any, feed: Feed, limit_s: float) -> npt.NDArray[np.int64]:
    """When each row was read."""
    came: list[tuple[int, list[Any]]] = []
    ends, messages = time.monotonic() + limit_s, 0
    while not feed.ended or messages < feed.sent:
        if time.monotonic() > ends:
            raise RuntimeError(f"{feed.sent - messages} of {feed.sent} rows did not come out")
        head = reader.poll(0.05)
        if head is not None:
            feed.shown()
            batch = [head, *reader.consume(10_000, 0)]
            came.append((time.monotonic_ns(), [m.value() for m in batch if m.error() is None]))
            messages += len(came[-1][1])
    order = np.argsort(feed.pages[: feed.sent], kind="stable")  # the rows of a page as they were produced
    first = np.searchsorted(feed.pages[order], np.arange(PAGES))
    counted = [0] * PAGES
    seen, left = np.zeros(feed.sent, np.int64), feed.sent
    for now_ns, values in came:
        for value in values:
            row = json.loads(value)
            page, count = int(row["page"][1:]), row["n"]
            if count <= counted[page]:
                raise RuntimeError(f"page {page} was counted to {count} again")
            places = order[first[page] + counted[page] : first[page] + count]
            seen[places] = now_ns
            left -= len(places)
            counted[page] = count
    if left:
        raise RuntimeError(f"{left} rows were not counted")
    return seen


def main() -> None:
    if sys.argv[1:2] == ["--job"]:
        run_job(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="that count, in each run")
    parser.add_argument("--rate", type=int, default=10_000, help="rows a second")
    parser.add_argument("--quick", action="store_true", help="four seconds of two cases: does it all work?")
    parser.add_argument("--only", help="guarantees or intervals, comma-separated")
    arguments = parser.parse_args()
    wanted = set((arguments.only or "at-least-once,exactly-once").split(","))
    cases = [case for case in CASES if set(case) & wanted]
    if arguments.quick:
        cases, arguments.seconds = [cases[0], cases[-1]], 4.0
    print(facts())
    with Broker(heap="1g") as broker:
        for number, (guarantee, interval) in enumerate(cases):
            measure(broker, number, guarantee, interval, arguments.rate, arguments.seconds)


if __name__ == "__main__":
    main()

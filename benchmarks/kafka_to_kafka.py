"""From topic to topic, exactly once, on Cutwater, Flink SQL and Spark: rows for each second of processor time.

    python -m benchmarks.kafka_to_kafka [--rows 5000000] [--rounds 3] [--quick] [--only cutwater,flink,spark,limit]

100 bytes of JSON become typed columns, half of the rows go, the rest is counted and summed by page in windows of a
minute, and the windows are written as JSON.  Parallelism 2, a checkpoint every second.  What a reader of committed
messages finds is compared with DuckDB's answer.

All rows lie in the topic before a contender begins, the last four fifths in a transaction that is still open.  Once the
windows of the first are visible, so that everything is compiled and loaded, it is committed: what follows counts.
Processor time is that of all processes of a contender, the broker is none of them.  Spark's sink is at least once.  The
limit reads and parses with our readers, nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import confluent_kafka as client
import numpy as np
import psutil
from servers.kafka import Broker

from benchmarks import peers
from benchmarks.kafka_rows import PER_MINUTE, WIDTH, columns, encoded, last_row, windows
from benchmarks.machine import busy_cpus, facts
from benchmarks.processes import ROOT
from benchmarks.turns import OUT
from cutwater.connectors.kafka.kafka import kafka
from cutwater.connectors.kafka.librdkafka import library
from cutwater.connectors.kafka.producer import Producer

__all__ = ["main"]

CONTENDERS = ("cutwater", "flink", "spark", "limit")
PARTITIONS, OUT_PARTITIONS = 4, 2
_BLOCK = 200_000
_LIMIT_S, _REST_S = 400.0, 2.0
_LOOK_S = 0.1

Window = tuple[str, str, int, int]


class Tree:
    """A contender's processes, and the processor time of all of them as it goes by.

    Args:
        command: of the first.
        log: takes what it says.
    """

    def __init__(self, command: list[str], log: Path) -> None:
        self.began_s = time.monotonic()
        self.log = log
        with open(log, "w") as errors:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
            )
        self.memory = 0
        """Most bytes that they held."""
        self._used: dict[int, float] = {}
        self._history: list[tuple[float, float]] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            memory = 0
            for process in self._processes():
                with contextlib.suppress(psutil.Error), process.oneshot():
                    times = process.cpu_times()
                    self._used[process.pid] = times.user + times.system
                    memory += process.memory_info().rss
            self.memory = max(self.memory, memory)
            self._history.append((time.monotonic(), sum(self._used.values())))

    def _processes(self) -> list[psutil.Process]:
        try:
            first = psutil.Process(self.process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.Error:
            return []

    def used_s(self, at_s: float) -> float:
        """Processor time up to a moment."""
        moments, used = zip(*self._history, strict=True)
        return float(np.interp(at_s, moments, used))

    def end(self) -> None:
        """End all of them."""
        self._ended.set()
        self._thread.join()
        processes = self._processes()
        for process in processes:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(processes, 10)
        self.process.wait(10)


class Input:
    """A topic with rows in their order, the first of them visible.

    Args:
        broker: where.
        topic: its name.
        rows: that count.
        before: rows that are visible at once.
    """

    def __init__(self, broker: Broker, topic: str, rows: int, before: int) -> None:
        self._broker, self.topic = broker, topic
        found = library()
        if found is None:
            raise RuntimeError("librdkafka cannot be called by itself")
        self._library = found
        broker.create_topic(topic, PARTITIONS, retention_ms=-1)
        options = {
            "linger_ms": 20,
            "batch_size": 1_000_000,
            "partitioner": "random",
            "sticky_partitioning_linger_ms": 0,
        }
        more = {"transactional_id": topic, "transaction_timeout_ms": 900_000}
        self._producer = Producer(kafka(broker.address, topic).cluster, topic, {**options, **more})
        self._producer.begin_as_only_one()
        self._begin()
        self._put(0, before)
        self.show()
        self._begin()
        self._put(before, before + rows)

    def _begin(self) -> None:
        assert not self._library.begin_transaction(self._producer.client.handle)

    def _put(self, begin: int, end: int) -> None:
        for first in range(begin, end, _BLOCK):
            messages = encoded(columns(np.arange(first, min(end, first + _BLOCK))))
            structs = np.zeros((len(messages), 9), np.int64)
            structs[:, 3] = messages.ctypes.data + WIDTH * np.arange(len(messages))
            structs[:, 4] = WIDTH
            self._producer.send(structs)
            self._producer.flush()

    def show(self) -> None:
        """All that was written is visible."""
        assert not self._library.commit_transaction(self._producer.client.handle, 60_000)

    def finish(self) -> None:
        """All of it, and behind it what closes the windows."""
        self.show()
        self._producer.close()
        last = client.Producer({"bootstrap.servers": self._broker.address})
        for partition in range(PARTITIONS):
            last.produce(self.topic, bytes(last_row()[0]), partition=partition)
        last.flush()

    def close(self) -> None:
        """Remove the topic."""
        self._producer.close()
        self._broker.delete_topic(self.topic)


def command_of(contender: str, *arguments: str) -> list[str]:
    """What runs a contender.

    Raises:
        PeerError: it cannot be had.
    """
    if contender == "flink":
        return [*peers.flink_command("KafkaWindows", f"{peers.jars('flink-kafka')}/*"), *arguments]
    if contender == "spark":
        peers.jars("spark-kafka")
    return [sys.executable, "-m", "benchmarks.kafka_contenders", contender, *arguments]


def limit(input: Input, broker: Broker, rows: int, scratch: Path) -> dict[str, Any]:
    """A run of what only reads and parses, all that lies there.

    Raises:
        RuntimeError: it failed.
    """
    input.finish()
    tree = Tree(command_of("limit", broker.address, input.topic, "-", str(scratch)), scratch / "limit.log")
    try:
        said = [line for line in tree.process.stdout or () if line.startswith("RESULT ")]
        tree.process.wait(_LIMIT_S)
    finally:
        tree.end()
    if not said:
        raise RuntimeError(tree.log.read_text()[-3000:])
    result = json.loads(said[0].removeprefix("RESULT "))
    if result["rows"] != rows + PARTITIONS:
        raise RuntimeError(f"the limit read {result['rows']} of {rows + PARTITIONS} rows")
    per_cpu_s, per_s = rows / result["cpu_s"], rows / result["seconds"]
    return {"rows_per_cpu_s": per_cpu_s, "rows_per_s": per_s, "memory_mib": tree.memory >> 20}


def run(broker: Broker, contender: str, rows: int, expected: list[Window], number: int) -> dict[str, Any]:
    """One run, its result compared.

    Raises:
        RuntimeError: it failed, or its result is wrong.
    """
    before = rows // 4
    with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as name:
        scratch, out = Path(name), f"out-{contender}-{number}"
        input = Input(broker, f"in-{contender}-{number}", rows, before)
        try:
            if contender == "limit":
                return limit(input, broker, rows + before, scratch)
            broker.create_topic(out, OUT_PARTITIONS)
            tree = Tree(command_of(contender, broker.address, input.topic, out, name), scratch / "log")
            reader = Reader(broker, out, tree)
            try:
                # The last two minutes of these rows are not closed yet.
                reader.until(sum(window[0] < _minute(before // PER_MINUTE - 1) for window in expected))
                time.sleep(_REST_S)
                begin_s = time.monotonic()
                input.finish()
                reader.until(len(expected))
                end_s = reader.last_s
                reader.until(len(expected) + 1, patience_s=1.5)
            finally:
                tree.end()
                reader.close()
            _compare(contender, sorted(reader.found), expected, tree)
            broker.delete_topic(out)
        finally:
            input.close()
    return {
        "rows_per_cpu_s": rows / (tree.used_s(end_s) - tree.used_s(begin_s)),
        "rows_per_s": rows / (end_s - begin_s),
        "rows_per_cpu_s_in_all": (rows + before) / tree.used_s(end_s),
        "memory_mib": tree.memory >> 20,
    }


def _minute(number: int) -> str:
    """The begin of a window: rows begin one minute after the year does, those of one minute disorder before."""
    return str(np.datetime64("2026-01-01T00:00:00") + np.timedelta64(60 * (number + 1), "s")).replace("T", " ")


def _compare(contender: str, found: list[Window], expected: list[Window], tree: Tree) -> None:
    if found != expected:
        wrong = sorted(set(found) ^ set(expected))[:3]
        story = tree.log.read_text()[-3000:]
        raise RuntimeError(f"{contender}: {len(found)} of {len(expected)} windows, wrong {wrong}\n{story}")


class Reader:
    """Gathers the windows of a contender as they become visible."""

    def __init__(self, broker: Broker, topic: str, tree: Tree) -> None:
        options: dict[str, Any] = {"bootstrap.servers": broker.address, "group.id": "reader"}
        options |= {"enable.auto.commit": False, "isolation.level": "read_committed", "fetch.wait.max.ms": 20}
        self._consumer, self._tree = client.Consumer(options), tree
        self._consumer.assign([client.TopicPartition(topic, partition, 0) for partition in range(OUT_PARTITIONS)])
        self.found: list[Window] = []
        self.last_s = 0.0
        """When the last one came."""

    def until(self, count: int, patience_s: float = _LIMIT_S) -> None:
        """Returns when there are so many, or the contender is no more, or nothing came for too long."""
        ends_s = time.monotonic() + patience_s
        while len(self.found) < count and time.monotonic() < ends_s and self._tree.process.poll() is None:
            messages = [message for message in self._consumer.consume(20_000, 0.1) if message.error() is None]
            rows = [json.loads(message.value()) for message in messages]
            part = [(r["w"][:19], r["page"], r["n"], r["cents"]) for r in rows if r["w"] < "2026-01-20"]
            if part:
                self.found += part
                self.last_s = time.monotonic()

    def close(self) -> None:
        self._consumer.close()


def table(runs: list[dict[str, Any]]) -> str:
    """Medians."""
    names = ("rows_per_cpu_s", "rows_per_s", "rows_per_cpu_s_in_all", "memory_mib")
    lines = ["", "| | rows/CPU-s | rows/s | rows/CPU-s with the start | MiB |", "|---|" + "---:|" * 4]
    for contender in dict.fromkeys(run["contender"] for run in runs):
        mine = [run for run in runs if run["contender"] == contender]
        medians = [[run[name] for run in mine if name in run] for name in names]
        lines.append(
            f"| {contender} | " + " | ".join(f"{statistics.median(m):,.0f}" if m else "" for m in medians) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=5_000_000, help="that count")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="one round of a fifth of the rows: does it all work?")
    parser.add_argument("--only", default=",".join(CONTENDERS))
    arguments = parser.parse_args()
    rounds, rows = (1, arguments.rows // 5) if arguments.quick else (arguments.rounds, arguments.rows)
    machine, runs = facts(), list[dict[str, Any]]()
    print(machine)
    with Broker(heap="1g") as broker:
        expected = windows(rows + rows // 4)
        for number in range(rounds):
            for contender in arguments.only.split(","):
                others = busy_cpus()
                try:
                    found = run(broker, contender, rows, expected, number)
                except peers.PeerError as e:
                    print(f"SKIPPED {contender}: {e}", file=sys.stderr)
                    continue
                runs.append({"contender": contender, "round": number, "others_cpus": others, **found})
                print(json.dumps(runs[-1]), flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    data = {"machine": machine, "rounds": rounds, "rows": rows, "runs": runs}
    (OUT / f"kafka_to_kafka{'-quick' if arguments.quick else ''}.json").write_text(json.dumps(data, indent=1) + "\n")
    print(table(runs))


if __name__ == "__main__":
    main()

"""One run of the keyed count on Bytewax: two processes, ``stateful_map``; prints one line of JSON.

Runs under the peer's Python:

    python keyed_count_bytewax.py FOLDER ROWS INTERVAL_S WATCH_AFTER

``INTERVAL_S`` 0 means no recovery store.  Keys are texts, as Bytewax demands; they come from a table made before the
clock starts, and rows are computed 10,000 at a time, so that the source costs as little as it can.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import bytewax.operators as op
import numpy as np
from bytewax.dataflow import Dataflow
from bytewax.inputs import FixedPartitionedSource, StatefulSourcePartition
from bytewax.outputs import DynamicSink, StatelessSinkPartition
from bytewax.recovery import RecoveryConfig, init_db_dir
from bytewax.testing import cluster_main

KEYS = 100_000
PARALLELISM = 2
BATCH = 10_000
NAMES = [str(key) for key in range(KEYS)]


def keys_of(start: int, count: int) -> list[int]:
    z = np.arange(start, start + count, dtype=np.uint64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) % np.uint64(KEYS)).tolist()


class Partition(StatefulSourcePartition):
    def __init__(self, folder: Path, start: int, end: int) -> None:
        self.folder, self.next, self.end, self.noted = folder, start, end, False

    def next_batch(self) -> list[tuple[str, int]]:
        if self.next >= self.end:
            raise StopIteration
        start, self.next = self.next, min(self.next + BATCH, self.end)
        rows = [(NAMES[key], start + i) for i, key in enumerate(keys_of(start, self.next - start))]
        if not self.noted:
            self.noted = True
            (self.folder / f"first-{os.getpid()}-{time.monotonic_ns()}").touch()
        return rows

    def snapshot(self) -> int:
        return self.next


class Numbers(FixedPartitionedSource):
    def __init__(self, folder: Path, rows: int) -> None:
        self.folder, self.rows = folder, rows

    def list_parts(self) -> list[str]:
        return [str(part) for part in range(PARALLELISM)]

    def build_part(self, step_id: str, for_part: str, resume_state: int | None) -> Partition:
        share = self.rows // PARALLELISM
        part = int(for_part)
        end = self.rows if part == PARALLELISM - 1 else (part + 1) * share
        return Partition(self.folder, part * share if resume_state is None else resume_state, end)


class ProbePartition(StatelessSinkPartition):
    def __init__(self, folder: Path, worker: int, watch_after: int) -> None:
        self.folder, self.worker, self.watch_after = folder, worker, watch_after
        self.rows, self.last_ns = 0, 0
        self.newest: dict[str, tuple[int, int]] = {}

    def write_batch(self, items: list[tuple[str, tuple[int, int]]]) -> None:
        self.last_ns = time.monotonic_ns()
        self.rows += len(items)
        if self.rows > self.watch_after:
            self.newest.update(items)

    def close(self) -> None:
        totals = np.zeros((2, KEYS), "<i8")
        for key, (count, total) in self.newest.items():
            totals[:, int(key)] = count, total
        totals.tofile(self.folder / f"state-{self.worker}.bin")
        report = {"rows": self.rows, "last_ns": self.last_ns}
        (self.folder / f"report-{self.worker}.json").write_text(json.dumps(report))


class Probe(DynamicSink):
    def __init__(self, folder: Path, watch_after: int) -> None:
        self.folder, self.watch_after = folder, watch_after

    def build(self, step_id: str, worker_index: int, worker_count: int) -> ProbePartition:
        return ProbePartition(self.folder, worker_index, self.watch_after)


def count_and_sum(state: tuple[int, int] | None, value: int) -> tuple[tuple[int, int], tuple[int, int]]:
    totals = (1, value) if state is None else (state[0] + 1, state[1] + value)
    return totals, totals


def process(folder: Path, rows: int, interval_s: float, watch_after: int, number: int, addresses: list[str]) -> None:
    """One of the processes of the cluster."""
    flow = Dataflow("keyed_count")
    numbers = op.input("gen", flow, Numbers(folder, rows))
    op.output("out", op.stateful_map("agg", numbers, count_and_sum), Probe(folder, watch_after))
    if interval_s:
        recovery = RecoveryConfig(folder / "store")
        cluster_main(flow, addresses, number, epoch_interval=timedelta(seconds=interval_s), recovery_config=recovery)
    else:
        cluster_main(flow, addresses, number)


def free_addresses() -> list[str]:
    sockets = [socket.socket() for _ in range(PARALLELISM)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    return addresses


def main() -> None:
    folder, rows, interval_s, watch_after = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
    if len(sys.argv) > 5:
        process(folder, rows, interval_s, watch_after, int(sys.argv[5]), sys.argv[6:])
        return
    folder.mkdir(parents=True)
    if interval_s:
        (folder / "store").mkdir()
        init_db_dir(folder / "store", PARALLELISM)
    addresses = free_addresses()
    processes = [
        subprocess.Popen([sys.executable, __file__, *sys.argv[1:5], str(i), *addresses]) for i in range(PARALLELISM)
    ]
    if any(p.wait() for p in processes):
        sys.exit("a process of the cluster failed")
    reports = [json.loads(path.read_text()) for path in folder.glob("report-*.json")]
    first_ns = min(int(path.name.split("-")[2]) for path in folder.glob("first-*"))
    result = {
        "rows": sum(report["rows"] for report in reports),
        "seconds": (max(report["last_ns"] for report in reports) - first_ns) / 1e9,
    }
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

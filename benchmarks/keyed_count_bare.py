"""The keyed count without an engine: Numba kernels and plain sockets between two processes; prints one line of JSON.

    python -m benchmarks.keyed_count_bare FOLDER ROWS WARM_UP_ROWS

What the machine can do when nobody asks for checkpoints, flow control per channel, types, recovery or a graph: an upper
bound that shows what the engine costs.  The kernels are the obvious ones, in blocks that stay in the cache.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import queue
import socket
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numba as nb
import numpy as np

from benchmarks.workload import KEYS, PARALLELISM, fill, mix, watch_after

BLOCK = 16_384
QUEUED_BLOCKS = 8
SLOTS = 1 << 17


@nb.njit(cache=True, nogil=True)
def split(keys: Any, values: Any, out: Any) -> Any:
    """Deal rows out by the hash of their key; ``out``: (target, column, row).  Returns rows per target."""
    filled = np.zeros(PARALLELISM, np.int64)
    for i in range(keys.shape[0]):
        target = np.int64(mix(keys[i]) >> np.uint64(63))
        at = filled[target]
        out[target, 0, at], out[target, 1, at] = keys[i], values[i]
        filled[target] = at + 1
    return filled


@nb.njit(cache=True, nogil=True)
def aggregate(table: Any, keys: Any, values: Any, counts: Any, sums: Any) -> None:
    """Running count and sum; ``table``: open addressing, rows of (key + 1, count, sum)."""
    mask = table.shape[0] - 1
    for i in range(keys.shape[0]):
        slot = np.int64(mix(keys[i]) & np.uint64(mask))
        while table[slot, 0] != 0 and table[slot, 0] != keys[i] + 1:
            slot = (slot + 1) & mask
        table[slot, 0] = keys[i] + 1
        table[slot, 1] += 1
        table[slot, 2] += values[i]
        counts[i], sums[i] = table[slot, 1], table[slot, 2]


@nb.njit(cache=True, nogil=True)
def keep_newest(keys: Any, counts: Any, sums: Any, newest: Any) -> None:
    for i in range(keys.shape[0]):
        newest[0, keys[i]], newest[1, keys[i]] = counts[i], sums[i]


class Subtask:
    """Table and output of one process."""

    def __init__(self, watch_after_rows: int) -> None:
        self.table = np.zeros((SLOTS * 2, 3), np.int64)
        self.counts, self.sums = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
        self.newest = np.zeros((2, KEYS), np.int64)
        self.watch_after, self.rows, self.last_ns = watch_after_rows, 0, 0

    def take(self, keys: Any, values: Any) -> None:
        n = len(keys)
        aggregate(self.table, keys, values, self.counts, self.sums)
        self.last_ns = time.monotonic_ns()
        self.rows += n
        if self.rows > self.watch_after:
            keep_newest(keys, self.counts[:n], self.sums[:n], self.newest)


def receive(link: socket.socket, rows: queue.Queue[Any]) -> None:
    """A thread: blocks from the other process (length, then both columns); None at the end."""
    header = np.empty(1, np.int64)
    while True:
        _receive_into(link, header)
        if not header[0]:
            rows.put(None)
            return
        block = np.empty((2, header[0]), np.int64)
        _receive_into(link, block)
        rows.put(block)


def _receive_into(link: socket.socket, array: Any) -> None:
    view, done = memoryview(array).cast("B"), 0
    while done < len(view):
        got = link.recv_into(view[done:])
        if not got:
            raise ConnectionError("the other process is gone")
        done += got


def work(me: int, rows: int, link: socket.socket) -> tuple[Subtask, int]:
    """Generate this process's half, exchange, aggregate; returns the subtask and when it began."""
    subtask, incoming = Subtask(watch_after(rows)), queue.Queue(QUEUED_BLOCKS)
    threading.Thread(target=receive, args=(link, incoming), daemon=True).start()
    keys, values = np.empty(BLOCK, np.int64), np.empty(BLOCK, np.int64)
    out, other, ended = np.empty((PARALLELISM, 2, BLOCK), np.int64), 1 - me, False
    start, end = me * (rows // 2), rows if me else rows // 2
    first_ns = 0
    while start < end or not ended:
        while not ended:
            try:
                block = incoming.get(block=start >= end)
            except queue.Empty:
                break
            if block is None:
                ended = True
            else:
                subtask.take(block[0], block[1])
        if start >= end:
            continue
        n = min(BLOCK, end - start)
        fill(start, keys[:n], values[:n])
        first_ns = first_ns or time.monotonic_ns()
        start += n
        filled = split(keys[:n], values[:n], out)
        if theirs := filled[other]:
            link.sendall(np.array([theirs]).data)
            link.sendall(out[other, 0, :theirs].data)
            link.sendall(out[other, 1, :theirs].data)
        if start >= end:
            link.sendall(np.zeros(1, np.int64).data)
        subtask.take(out[me, 0, : filled[me]], out[me, 1, : filled[me]])
    return subtask, first_ns


def process(me: int, folder: Path, rows: int, warm_up: int, links: list[socket.socket], report: Connection) -> None:
    """One of the two processes: a short run, then the measured one."""
    work(me, warm_up, links[0])
    subtask, first_ns = work(me, rows, links[1])
    subtask.newest.astype("<i8").tofile(folder / f"state-{me}.bin")
    report.send((subtask.rows, first_ns, subtask.last_ns))


def main() -> None:
    folder, rows, warm_up = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    folder.mkdir(parents=True)
    context = mp.get_context("fork")
    pairs = [_loopback_pair() for _ in range(2)]
    pipes = [context.Pipe(duplex=False) for _ in range(PARALLELISM)]
    processes = [
        context.Process(target=process, args=(i, folder, rows, warm_up, [p[i] for p in pairs], pipes[i][1]))
        for i in range(PARALLELISM)
    ]
    for p in processes:
        p.start()
    for _, writer in pipes:
        writer.close()
    reports = [reader.recv() for reader, _ in pipes]
    for p in processes:
        p.join()
    seconds = (max(r[2] for r in reports) - min(r[1] for r in reports)) / 1e9
    print("RESULT", json.dumps({"rows": sum(r[0] for r in reports), "seconds": seconds}), flush=True)


def _loopback_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends of a TCP connection (what an engine would use, not a Unix socket)."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        a = socket.create_connection(server.getsockname())
        b, _ = server.accept()
    for end in (a, b):
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return a, b


if __name__ == "__main__":
    main()

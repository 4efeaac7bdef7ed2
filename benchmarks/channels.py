"""Channels between two processes: rows per second, and the latency of small batches.

    python benchmarks/channels.py [--rows 50e6] [--batch 16384] [--seconds 2]

Throughput: two columns of int64, one way and both ways at once.  Latency: 10-row batches at 1,000 a second go over and
come back; printed is half of the way there and back (one hop, the waking of the receiver included).
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import multiprocessing.connection
import sys
import threading
import time

import numpy as np
import pyarrow as pa

from cutwater.errors import CutwaterError
from cutwater.plan.graph import Channel
from cutwater.protocol.channel.receiving import EMPTY, ROWS, ReceivingEnd
from cutwater.protocol.wire import Peer
from cutwater.runtime.channels.connection import Connection, DataServer, connect
from cutwater.runtime.channels.output import OutputChannel
from cutwater.runtime.transport.secret import Secret, new_secret
from cutwater.runtime.transport.sockets import Signal

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])


def batch_of(rows: int) -> pa.RecordBatch:
    values = np.arange(rows)
    return pa.record_batch([values, values + 1], schema=SCHEMA)


def lost(connection: Connection, error: CutwaterError) -> None:
    print(error, file=sys.stderr)


def link(worker: int, pipe: multiprocessing.connection.Connection, secret: Secret) -> Connection:
    """The connection to the other process."""
    me = Peer("data", "benchmark", worker, 1)
    if worker == 0:
        return connect(pipe.recv(), me, secret)
    accepted: list[Connection] = []
    ready = threading.Event()
    server = DataServer(me, secret, lambda peer: None, lambda c: (accepted.append(c), ready.set()))
    server.start()
    pipe.send(server.address)
    ready.wait()
    server.close()
    return accepted[0]


def pump(out: OutputChannel | None, inp: ReceivingEnd | None, signal: Signal, total: int, batch: pa.RecordBatch) -> int:
    """Send ``total`` rows while taking everything; returns the rows that came."""
    sent = received = 0
    while (out is not None and not out.ended) or (inp is not None and not inp.ended):
        idle = True
        if inp is not None and (head := inp.head()) != EMPTY:
            idle = False
            item = inp.take(1 << 30)
            if head == ROWS:
                received += item.batch.num_rows
        if out is not None and not out.ended and not out.full:
            idle = False
            out.offer(batch)
            sent += batch.num_rows
            if sent >= total:
                out.offer_end()
        if idle:
            signal.wait(1.0)
    return received


def echo(out: OutputChannel, inp: ReceivingEnd, signal: Signal) -> None:
    while not inp.ended:
        if inp.head() == EMPTY:
            signal.wait(1.0)
            continue
        item = inp.take(1 << 30)
        if hasattr(item, "batch"):
            out.offer(item.batch)
            out.flush()
    out.offer_end()


def ping(out: OutputChannel, inp: ReceivingEnd, signal: Signal, seconds: float) -> np.ndarray:
    batch, times = batch_of(10), []
    due = time.perf_counter()
    end = due + seconds
    while due < end:
        due += 0.001
        time.sleep(max(0.0, due - time.perf_counter()))
        start = time.perf_counter()
        out.offer(batch)
        out.flush()
        while inp.head() == EMPTY:
            signal.wait(1.0)
        inp.take(100)
        times.append(time.perf_counter() - start)
    out.offer_end()
    return np.array(times) / 2


def worker(index: int, pipe: multiprocessing.connection.Connection, secret: Secret, args: argparse.Namespace) -> None:
    connection, signal = link(index, pipe, secret), Signal()
    ends: list[tuple[OutputChannel, ReceivingEnd]] = []
    for i in range(3):
        there, here = Channel(i, index, 1 - index), Channel(i, 1 - index, index)
        send = connection.sender(there)
        out = OutputChannel(there, SCHEMA, send, batch_rows=args.batch, on_ready=signal.set)
        inp = ReceivingEnd(here, 8, signal.set, credit_batch=4)
        connection.add_output(out)
        connection.add_input(inp, SCHEMA)
        ends.append((out, inp))
    connection.start(lost)
    batch, total = batch_of(args.batch), int(args.rows)
    if args.seconds:
        out, inp = ends[2]
        if index == 0:
            hops = ping(out, inp, signal, args.seconds) * 1e6
            p50, p90, p99 = np.percentile(hops, [50, 90, 99])
            print(f"latency of a hop, 10-row batches: p50 {p50:.0f} us, p90 {p90:.0f} us, p99 {p99:.0f} us")
        else:
            echo(out, inp, signal)
    for name, i, ways in (("one way", 0, 1), ("both ways", 1, 2)):
        pipe.send(None)
        pipe.recv()
        out, inp = ends[i]
        start = time.perf_counter()
        sender, receiver = (out, inp) if ways == 2 else (out, None) if index == 0 else (None, inp)
        received = pump(sender, receiver, signal, total, batch)
        elapsed = time.perf_counter() - start
        if index == 1:
            print(f"{name}, batches of {args.batch}: {ways * received / elapsed / 1e6:.0f} M rows/s")
    connection.close(2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=float, default=50e6)
    parser.add_argument("--batch", type=int, default=16_384)
    parser.add_argument("--seconds", type=float, default=2.0, help="of the latency test")
    args = parser.parse_args()
    context, secret = mp.get_context("fork"), new_secret()
    pipes = context.Pipe()
    workers = [context.Process(target=worker, args=(i, pipes[i], secret, args)) for i in range(2)]
    for process in workers:
        process.start()
    for process in workers:
        process.join()


if __name__ == "__main__":
    main()

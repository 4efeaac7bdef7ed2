"""What a process function costs: the reference work, the keyed count, written five ways, in rows per second.

    python -m benchmarks.process [--rounds 5] [--interval 1s] [--only aggregate,batch,row,ttl,timer] [--seconds 5]

Each way gives one row for each event, its key's count and sum so far (see ``benchmarks.workload``), through the public
API at parallelism 2 with exactly-once checkpoints, and every result is compared with the closed form.  The ways take
turns; printed are medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

import cutwater as cw
from benchmarks.probe import SCHEMA, Probe, Rows, read_reports
from benchmarks.workload import PARALLELISM, verify, watch_after
from cutwater.spark.session import session

RESULT = "k long, n long, s long"
WARM_UP_ROWS = 100_000


class Row(cw.ProcessFunction):
    """One Python call for each row."""

    n = cw.ValueState("long")
    s = cw.ValueState("long")

    def process(self, row: dict[str, Any], ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        self.n.value = n = self.n.get(0) + 1
        self.s.value = s = self.s.get(0) + row["v"]
        yield {"k": ctx.key, "n": n, "s": s}


class Ttl(Row):
    """The same, with states that expire after an hour."""

    n = cw.ValueState("long", ttl="1h")
    s = cw.ValueState("long", ttl="1h")


class Timer(Row):
    """The same, with a timer that every row puts off."""

    due_ms = cw.ValueState("long")

    def process(self, row: dict[str, Any], ctx: cw.ProcessContext) -> Iterator[dict[str, Any]]:
        due_ms = ctx.processing_time_ms() + 3_600_000
        if self.due_ms.value is not None:
            ctx.timers.delete_processing(self.due_ms.value)
        ctx.timers.register_processing(due_ms)
        self.due_ms.value = due_ms
        return super().process(row, ctx)

    def on_timer(self, time: int, domain: str, ctx: cw.ProcessContext) -> None:
        self.due_ms.clear()


class Batch(cw.BatchProcessFunction):
    """One call for each batch: NumPy over its columns, one Python value for each distinct key of the batch."""

    n = cw.ValueState("long")
    s = cw.ValueState("long")

    def process_batch(self, batch: pa.RecordBatch, ctx: Any) -> Iterator[pa.RecordBatch]:
        groups = ctx.group(batch)
        codes, values = groups.codes, batch.column("v").to_numpy()
        order = np.argsort(codes, kind="stable")
        counts = np.bincount(codes)
        begin = np.cumsum(counts) - counts
        running = np.cumsum(values[order])
        base = np.repeat(running[begin] - values[order][begin], counts)
        n, s = np.empty_like(values), np.empty_like(values)
        n[order] = np.arange(len(values)) - np.repeat(begin, counts) + 1
        s[order] = running - base
        n += np.array(self.n.get_many(groups.keys, 0))[codes]
        s += np.array(self.s.get_many(groups.keys, 0))[codes]
        last = order[begin + counts - 1]
        self.n.put_many(groups.keys, n[last])
        self.s.put_many(groups.keys, s[last])
        yield pa.record_batch({"k": batch.column("k"), "n": n, "s": s})


WAYS: dict[str, tuple[str, Any, int]] = {
    "aggregate": ("built-in aggregate", None, 6_000_000),
    "batch": ("process function of batches", Batch, 500_000),
    "row": ("process function of rows", Row, 60_000),
    "ttl": ("... with a time to live", Ttl, 40_000),
    "timer": ("... with a timer that every row puts off", Timer, 30_000),
}
"""Per way: its name, the function, and about how many rows it does in a second."""


def dataflow(way: str, folder: Path, rows: int) -> cw.Dataflow:
    """The keyed count, written one way."""
    flow = cw.Dataflow(f"process-{way}")
    numbers = flow.read("gen", cw.generate(Rows(str(folder)), schema=SCHEMA, rows=rows, partitions=PARALLELISM))
    keyed = numbers.key_by("k")
    function = WAYS[way][1]
    if function is None:
        made = keyed.aggregate("agg", n=cw.count(), s=cw.sum("v"))
    else:
        made = keyed.process("agg", function(), RESULT)
    made.write("out", Probe(str(folder), watch_after(rows)))
    return flow


def rows_per_second(way: str, folder: Path, rows: int, interval: str) -> float:
    """One run, its result verified."""
    folder.mkdir(parents=True)
    flow = dataflow(way, folder, rows)
    flow.run(session(PARALLELISM), checkpoint=folder / "checkpoints", parallelism=PARALLELISM, interval=interval)
    reports = read_reports(folder)
    verify(rows, reports.rows, folder)
    return rows / ((reports.last_ns - reports.first_ns) / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--interval", default="1s")
    parser.add_argument("--only", default=",".join(WAYS))
    parser.add_argument("--seconds", type=float, default=5.0, help="of a run, about")
    options = parser.parse_args()
    ways = options.only.split(",")
    found: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for way in ways:
            rows_per_second(way, folder / f"warm-up-{way}", WARM_UP_ROWS, options.interval)
        for number in range(options.rounds):
            for way in ways:
                rows = max(WARM_UP_ROWS, int(WAYS[way][2] * options.seconds))
                found[way].append(rows_per_second(way, folder / f"{way}-{number}", rows, options.interval))
    print("| keyed count as | rows/s | of the first |\n|---|---:|---:|")
    first = statistics.median(found[ways[0]])
    for way in ways:
        median = statistics.median(found[way])
        print(f"| {WAYS[way][0]} | {median:,.0f} | {median / first:.3f} |")


if __name__ == "__main__":
    main()

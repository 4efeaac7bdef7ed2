"""One ``StatefulProcessor``, here and in Spark itself: running count and sum, rows per second.

    python -m benchmarks.tws [--rounds 5] [--interval 1s] [--only rows,pandas,spark-rows,spark-pandas] [--seconds 5]

The work is the keyed count (see ``benchmarks.workload``): one row for each event, its key's count and sum so far,
100,000 keys. The class is the same in both engines, in the form of rows and in that of pandas; every result is compared
with the closed form. Here: parallelism 2, the public API, exactly-once checkpoints. Spark: two shuffle partitions,
RocksDB, one file of rows for each micro-batch, of which the first fifth is warm-up. The contenders take turns, and each
run has a process and a session of its own: what one leaves behind takes processor time from the next. Printed are
medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

import cutwater as cw
from benchmarks.probe import SCHEMA, Probe, Rows, read_reports
from benchmarks.processes import RunError, run_json
from benchmarks.workload import PARALLELISM, WrongResultError, expected, fill, verify, watch_after
from cutwater.spark.session import session

RESULT = "k long, n long, s long"
WARM_UP_ROWS = 100_000
_CHILD = "--run"
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
BATCHES = 10
"""Micro-batches of a run in Spark."""


class Counts(StatefulProcessor):
    """The form of rows."""

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "n long, s long")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        n, s = self.total.get() if self.total.exists() else (0, 0)
        for row in rows:
            n, s = n + 1, s + row.v
            yield Row(k=key[0], n=n, s=s)
        self.total.update((n, s))


class CountsInPandas(Counts):
    """The form of pandas."""

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        n, s = self.total.get() if self.total.exists() else (0, 0)
        for frame in rows:
            sums = s + frame["v"].cumsum()
            yield pd.DataFrame({"k": key[0], "n": np.arange(n + 1, n + 1 + len(frame)), "s": sums})
            n, s = n + len(frame), int(sums.iloc[-1])
        self.total.update((n, s))


def ours(form: str, folder: Path, rows: int, interval: str) -> float:
    """Rows per second of one run, verified."""
    flow = cw.Dataflow(f"tws-{form}")
    keyed = flow.read("gen", cw.generate(Rows(str(folder)), schema=SCHEMA, rows=rows, partitions=PARALLELISM)).key_by(
        "k"
    )
    if form == "rows":
        made = keyed.transform_with_state("count", Counts(), RESULT)
    else:
        made = keyed.transform_with_state_in_pandas("count", CountsInPandas(), RESULT)
    made.write("out", Probe(str(folder), watch_after(rows)))
    flow.run(session(PARALLELISM), checkpoint=folder / "checkpoints", parallelism=PARALLELISM, interval=interval)
    reports = read_reports(folder)
    verify(rows, reports.rows, folder)
    return rows / ((reports.last_ns - reports.first_ns) / 1e9)


def sparks(form: str, folder: Path, rows: int, interval: str) -> float:
    """Rows per second of one run in Spark itself, verified; without the first fifth of the micro-batches."""
    if importlib.util.find_spec("google") is None or importlib.util.find_spec("google.protobuf") is None:
        raise SystemExit("Spark's own transformWithState needs the package protobuf; --only rows,pandas goes without")
    spark = session(PARALLELISM)
    spark.conf.set("spark.sql.shuffle.partitions", str(PARALLELISM))
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
    (folder / "in").mkdir()
    batch = -(-rows // BATCHES)
    for start in range(0, rows, batch):
        count = min(batch, rows - start)
        keys, values = np.empty(count, np.int64), np.empty(count, np.int64)
        fill(start, keys, values)
        pq.write_table(pa.table([keys, values], schema=SCHEMA), folder / "in" / f"{start:012}.parquet")
    keyed = (
        spark.readStream.schema("k long, v long")
        .option("maxFilesPerTrigger", 1)
        .parquet(str(folder / "in"))
        .groupBy("k")
    )
    if form == "rows":
        made = keyed.transformWithState(Counts(), RESULT, "Append", "None")
    else:
        made = keyed.transformWithStateInPandas(CountsInPandas(), RESULT, "Append", "None")
    writer = made.writeStream.format("parquet").outputMode("append").trigger(availableNow=True)
    query = writer.option("checkpointLocation", str(folder / "checkpoint")).start(str(folder / "out"))
    query.awaitTermination()
    progress = [p for p in query.recentProgress if p["numInputRows"]]
    _verify_files(rows, folder / "out")
    timed = progress[max(1, len(progress) // 5) :]
    begin = datetime.fromisoformat(timed[0]["timestamp"]).timestamp()
    end = datetime.fromisoformat(timed[-1]["timestamp"]).timestamp() + timed[-1]["durationMs"]["triggerExecution"] / 1e3
    return sum(p["numInputRows"] for p in timed) / (end - begin)


def _verify_files(rows: int, folder: Path) -> None:
    found = pa.concat_tables([pq.read_table(path) for path in sorted(folder.glob("*.parquet"))])
    newest = found.group_by("k").aggregate([("n", "max"), ("s", "max")]).to_pydict()
    whole = expected(rows)
    keys = np.array(newest["k"])
    right = np.array_equal(whole.counts[keys], newest["n_max"]) and np.array_equal(whole.sums[keys], newest["s_max"])
    if found.num_rows != rows or len(keys) != np.count_nonzero(whole.counts) or not right:
        raise WrongResultError(f"Spark's {found.num_rows:,} rows in {folder} are not those of the closed form")


CONTENDERS: dict[str, tuple[str, Callable[[str, Path, int, str], float], int]] = {
    "rows": ("Cutwater, rows", ours, 180_000),
    "pandas": ("Cutwater, pandas", ours, 5_000),
    "spark-rows": ("Spark, transformWithState", sparks, 2_000),
    "spark-pandas": ("Spark, transformWithStateInPandas", sparks, 1_500),
}
"""Per contender: its name, how it is run, and about how many rows it does in a second."""


def measured(contender: str, folder: Path, rows: int, interval: str) -> float:
    folder.mkdir(parents=True)
    return CONTENDERS[contender][1](contender.removeprefix("spark-"), folder, rows, interval)


def main() -> None:
    if sys.argv[1:2] == [_CHILD]:
        contender, scratch, rows, interval = sys.argv[2:]
        folder = Path(scratch)
        if contender in ("rows", "pandas"):
            measured(contender, folder / "warm-up", min(int(rows), WARM_UP_ROWS), interval)
        print("RESULT", json.dumps({"rate": measured(contender, folder / "run", int(rows), interval)}), flush=True)
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--interval", default="1s")
    parser.add_argument("--only", default=",".join(CONTENDERS))
    parser.add_argument("--seconds", type=float, default=5.0, help="of a run, about")
    options = parser.parse_args()
    contenders = options.only.split(",")
    found: dict[str, list[float]] = {contender: [] for contender in contenders}
    for _ in range(options.rounds):
        for contender in contenders:
            rows = int(CONTENDERS[contender][2] * options.seconds)
            with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as folder:
                arguments = [_CHILD, contender, folder, str(rows), options.interval]
                try:
                    result = run_json([sys.executable, "-m", "benchmarks.tws", *arguments], 120 + 20 * options.seconds)
                except RunError as e:
                    sys.exit(str(e))
            found[contender].append(result["rate"])
            print(f"{CONTENDERS[contender][0]:32s} {result['rate']:12,.0f} rows/s", flush=True)
    print("| the same class in | rows/s | of the last |\n|---|---:|---:|")
    last = statistics.median(found[contenders[-1]])
    for contender in contenders:
        rates = found[contender]
        median = statistics.median(rates)
        extent = f"{min(rates):,.0f} - {max(rates):,.0f}"
        print(f"| {CONTENDERS[contender][0]} | {median:,.0f} ({extent}) | {median / last:.1f} |")


if __name__ == "__main__":
    main()

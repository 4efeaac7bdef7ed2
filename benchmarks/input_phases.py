"""Where the time of a first job over files goes: each phase alone, one thread, beside what the libraries take.

    python -m benchmarks.input_phases [--rows 3000000] [--only CASE ...] [--large]

The job is that of ``benchmarks.real_input``: a filter, counts and sums by key and minute, Parquet out.  Its operators
are taken from its plan and driven here one after another, in one thread and without channels: listing and reading, the
filter, the split by key between two subtasks, the windows, the results of windows that end, and writing them.  Figures
are nanoseconds of processor time for each row of the input; the file that is written also has what each phase
allocated from Arrow's pool, and how often.  Beside them the fastest of DuckDB, Polars and pyarrow, with one thread,
over the same bytes: reading the four columns into Arrow, and DuckDB's query for the whole.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa

from benchmarks.machine import facts
from benchmarks.turns import OUT
from benchmarks.workload import WrongResultError

USED = ("ts", "user", "page", "kind", "cents")
_TYPES = {"ts": "timestamp", "user": "long", "page": "string", "kind": "string", "cents": "long"}


@dataclass(frozen=True)
class Case:
    """One kind of input.

    Attributes:
        kind: ``json``, ``csv`` or ``parquet``.
        key: the column that rows are grouped by: a text (``page``) or an integer (``user``).
        columns: how many there are; five of them are used.
        packed: ``gz`` or ``zst``; of Parquet ``gz`` within the file instead of zstd.
        files: among how many the rows are dealt.
        share: of the rows that the others have.
    """

    kind: str
    key: str = "page"
    columns: int = 5
    packed: str = ""
    files: int = 4
    share: float = 1.0

    @property
    def pattern(self) -> str:
        return f"*.{self.kind}" + (f".{self.packed}" if self.packed and self.kind != "parquet" else "")


CASES = {
    "json": Case("json"),
    "csv": Case("csv"),
    "parquet": Case("parquet"),
    "json, integer key": Case("json", "user"),
    "csv, integer key": Case("csv", "user"),
    "parquet, integer key": Case("parquet", "user"),
    "json, 50 columns": Case("json", columns=50, share=0.2),
    "csv, 50 columns": Case("csv", columns=50, share=0.2),
    "parquet, 50 columns": Case("parquet", columns=50, share=0.2),
    "json, gzip": Case("json", packed="gz"),
    "json, zstd": Case("json", packed="zst"),
    "csv, gzip": Case("csv", packed="gz"),
    "csv, zstd": Case("csv", packed="zst"),
    "parquet, gzip": Case("parquet", packed="gz"),
    "json, 10,000 files": Case("json", files=10_000),
    "csv, 10,000 files": Case("csv", files=10_000),
    "parquet, 10,000 files": Case("parquet", files=10_000),
    "json, gzip, 10,000 files": Case("json", packed="gz", files=10_000),
    "json, zstd, 10,000 files": Case("json", packed="zst", files=10_000),
    "csv, gzip, 10,000 files": Case("csv", packed="gz", files=10_000),
    "csv, zstd, 10,000 files": Case("csv", packed="zst", files=10_000),
}
LARGE = {f"{kind}, one file of 2 GB": Case(kind, files=1) for kind in ("json", "csv", "parquet")}
_LARGE_BYTES = {"json": 91, "csv": 50, "parquet": 9.5}


def make_files(folder: Path, case: Case, rows: int) -> int:
    """Events in the order of their times; returns how many bytes they take."""
    rng = np.random.default_rng(1)
    share = max(1, rows // case.files)
    for number in range(case.files):
        frame = _events(rng, number, share)
        for extra in range(case.columns - len(USED)):
            values = rng.integers(0, 1_000_000, share)
            column = pl.Series(f"x{extra}", values)
            frame = frame.with_columns(column if extra % 2 else pl.format("text {}", column).alias(column.name))
        path = folder / f"{number:05}.{case.kind}"
        if case.kind == "parquet":
            codec = "gzip" if case.packed == "gz" else "zstd"
            zoned = frame.with_columns(pl.col("ts").dt.replace_time_zone("UTC"))
            zoned.write_parquet(path, row_group_size=250_000, compression=codec)
            continue
        texts = frame.with_columns(pl.col("ts").dt.strftime("%Y-%m-%dT%H:%M:%S%.6fZ"))
        (texts.write_ndjson if case.kind == "json" else texts.write_csv)(path)
        if case.packed:
            codec = "gzip" if case.packed == "gz" else "zstd"
            with pa.CompressedOutputStream(str(path) + f".{case.packed}", codec) as out:
                out.write(path.read_bytes())
            path.unlink()
    return sum(entry.stat().st_size for entry in folder.iterdir())


def _events(rng: np.random.Generator, number: int, share: int) -> pl.DataFrame:
    micros = (np.arange(share) + number * share) * 1_000
    return pl.DataFrame(
        {
            "ts": np.datetime64("2026-01-01T00:00:00") + micros.astype("timedelta64[us]"),
            "user": rng.integers(0, 100_000, share),
            "page": np.array([f"p{p}" for p in range(1_000)])[rng.integers(0, 1_000, share)],
            "kind": np.array(["view", "click", "buy"])[rng.choice(3, share, p=[0.8, 0.15, 0.05])],
            "cents": rng.integers(1, 10_000, share),
        }
    )


@dataclass
class Meter:
    """What the phases took."""

    seconds: dict[str, float] = field(default_factory=dict[str, float])
    bytes: dict[str, int] = field(default_factory=dict[str, int])
    allocations: dict[str, int] = field(default_factory=dict[str, int])

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        pool = pa.default_memory_pool()
        begin, held, calls = time.thread_time(), pool.total_bytes_allocated(), pool.num_allocations()
        yield
        for counter, spent in (
            (self.seconds, time.thread_time() - begin),
            (self.bytes, pool.total_bytes_allocated() - held),
            (self.allocations, pool.num_allocations() - calls),
        ):
            counter[name] = counter.get(name, 0) + spent


def run_phases(folder: Path, case: Case, scratch: Path) -> dict[str, Any]:
    """The job's operators, one after another over all files."""
    import cutwater as cw
    from cutwater.data.time import MAX_WATERMARK
    from cutwater.plan.planner import columns_of_source, filters_of_source, fuse_links, make_plan, may_read_dictionaries
    from cutwater.runtime.chains.source_runner import SourceRunner
    from cutwater.runtime.channels.partitioner import HashPartitioner
    from cutwater.runtime.channels.texts import plain_rows
    from cutwater.runtime.control.messages import SplitAssignment
    from cutwater.runtime.worker.wiring import OperatorContext, SinkIdentity

    schema = ", ".join(f"{name} {_TYPES.get(name, 'string')}" for name in USED)
    if case.columns > len(USED):
        schema += "".join(f", x{n} {'long' if n % 2 else 'string'}" for n in range(case.columns - len(USED)))
    flow = cw.Dataflow("phases")
    source = cw.files(str(folder / case.pattern), schema=None if case.kind == "parquet" else schema)
    events = flow.read("events", source, event_time="ts", out_of_order="10s")
    paid = events.filter("paid", pl.col("kind") != "view").key_by(case.key).window("minute", cw.tumbling("1m"))
    sink = cw.files(str(scratch / "out"))
    paid.aggregate("revenue", n=cw.count(), cents=cw.sum("cents")).write("out", sink)
    plan = make_plan(flow, 2)
    vertex, edge = plan.vertices[0], plan.outputs(0)[0]
    step = plan.steps[vertex.steps[0]]
    asked = columns_of_source(plan, vertex), filters_of_source(plan, vertex), may_read_dictionaries(plan, vertex)
    runner = SourceRunner(step, 0, None, *asked)
    filtered = fuse_links(plan, vertex).nodes[1].spec.build()
    partitioner = HashPartitioner(edge.schema, edge.keys, 2, plan.max_parallelism)
    windows = plan.steps["revenue"].operator
    assert windows is not None
    operator = windows.build()
    ignore: Callable[..., None] = lambda *_: None  # noqa: E731
    clock: Any = None
    shape = (0, 1, plan.max_parallelism, range(plan.max_parallelism))
    operator.open(OperatorContext("revenue", *shape, ignore, clock, False, ignore, None, None))
    writer = plan.steps["out"].spec.writer(windows.outputs[0], SinkIdentity("0" * 32, "out", 0, 1, 1), [])
    meter = Meter()
    with meter.phase("list"):
        splits = step.spec.discover()
        runner.assign([SplitAssignment(s.id, s.data, None, -(1 << 62), False) for s in splits], True)
    rows = batches = kept = results = 0
    while True:
        with meter.phase("read"):
            read = runner.read(131_072, 0.0)
        if read is None:
            if runner.exhausted:
                break
            continue
        for _, batch in read.outputs:
            rows, batches = rows + batch.num_rows, batches + 1
            with meter.phase("filter"):
                found = filtered.process(0, batch)
            for _, left in found:
                kept += left.num_rows
                with meter.phase("split"):
                    divided = partitioner.split(left.select(edge.schema.names))
                    parts = [plain_rows(part, edge.schema) for _, part in divided]
                with meter.phase("windows"):
                    for part in parts:
                        operator.process(0, part)
        with meter.phase("results"):
            made = operator.on_watermark(read.watermark)
            while operator.pending:
                made += operator.resume()
        with meter.phase("write"):
            for _, batch in made:
                results += batch.num_rows
                writer.write(batch)
    with meter.phase("results"):
        last = operator.on_watermark(MAX_WATERMARK)
        while operator.pending:
            last += operator.resume()
    with meter.phase("write"):
        for _, batch in last:
            results += batch.num_rows
            writer.write(batch)
        writer.pre_commit(1, True)()
    return {"rows": rows, "batches": batches, "kept": kept, "results": results, **vars(meter)}


_LIMITS = """
import json, sys, time
import duckdb, polars as pl, pyarrow as pa, pyarrow.csv, pyarrow.dataset, pyarrow.json, pyarrow.parquet as pq
pattern, kind, key, types = sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4])
pa.set_cpu_count(1); pa.set_io_thread_count(1)
duckdb.sql("set threads=1"); duckdb.sql("set preserve_insertion_order=false")
columns = ["ts", key, "kind", "cents"]
names = ", ".join(columns)
sql = {"timestamp": "TIMESTAMPTZ", "long": "BIGINT", "string": "VARCHAR"}
listed = "{" + ", ".join(f"{n}: '{sql[t]}'" for n, t in types.items()) + "}"
table = {"json": f"read_json('{pattern}', format='newline_delimited', columns={listed})",
         "csv": f"read_csv('{pattern}', columns={listed})", "parquet": f"'{pattern}'"}[kind]
def duck():
    reader = duckdb.sql(f"select {names} from {table}").to_arrow_reader(65536)
    return sum(batch.num_rows for batch in reader)
def polars():
    if kind == "parquet":
        return pl.scan_parquet(pattern).select(columns).collect(engine="streaming").height
    if kind == "csv":
        return pl.scan_csv(pattern, try_parse_dates=True).select(columns).collect(engine="streaming").height
    return pl.scan_ndjson(pattern).select(columns).collect(engine="streaming").height
def arrow():
    import glob
    files = sorted(glob.glob(pattern))
    if kind == "json":
        return sum(pyarrow.json.read_json(f).num_rows for f in files)
    if kind == "csv":
        options = pyarrow.csv.ConvertOptions(include_columns=columns)
        return sum(batch.num_rows for f in files for batch in pyarrow.csv.open_csv(f, convert_options=options))
    texts = [c for c in columns if c in ("page", "kind")]
    return sum(batch.num_rows for f in files for batch in
               pq.ParquetFile(f, read_dictionary=texts).iter_batches(65536, columns=columns, use_threads=False))
def whole():
    made = f"time_bucket(interval 1 minute, ts) as start, {key}, count(*) as n, sum(cents)::bigint as cents"
    groups = duckdb.sql(f"select {made} from {table} where kind <> 'view' group by 1, 2").to_arrow_table()
    found_groups.append(groups.num_rows)
found, found_groups = {}, []
for name, run in (("DuckDB", duck), ("Polars", polars), ("pyarrow", arrow), ("query", whole)):
    try:
        run()
        begin = time.process_time(); run(); found[name] = time.process_time() - begin
    except Exception as error:
        found[name] = None
        print(name, type(error).__name__, str(error)[:200], file=sys.stderr)
print(json.dumps({**found, "groups": found_groups[-1]}))
"""


def limits(folder: Path, case: Case) -> dict[str, float | None]:
    """Processor seconds of the libraries, with one thread each, in a process of its own, and the number of groups."""
    types = {name: _TYPES[name] for name in USED}
    types |= {f"x{n}": "long" if n % 2 else "string" for n in range(case.columns - len(USED))}
    command = [sys.executable, "-c", _LIMITS, str(folder / case.pattern), case.kind, case.key, json.dumps(types)]
    environment = {**os.environ, "POLARS_MAX_THREADS": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


PHASES = ("list", "read", "filter", "split", "windows", "results", "write")


def table(found: dict[str, dict[str, Any]]) -> str:
    """All cases as a table of nanoseconds for each row."""
    lines = ["| input | " + " | ".join(PHASES) + " | all | reading by the fastest library | DuckDB's query |"]
    lines.append("|---" * (len(PHASES) + 4) + "|")
    for name, case in found.items():
        ns = [case["seconds"][phase] / case["rows"] * 1e9 for phase in PHASES]
        readers = {who: case["limits"][who] for who in ("DuckDB", "Polars", "pyarrow") if case["limits"][who]}
        fastest = min(readers, key=lambda who: readers[who])
        query = case["limits"]["query"]
        told = [f"{value:.1f}" for value in (*ns, sum(ns))]
        told.append(f"{readers[fastest] / case['rows'] * 1e9:.1f} ({fastest})")
        told.append("" if query is None else f"{query / case['rows'] * 1e9:.1f}")
        lines.append(f"| {name} | " + " | ".join(told) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--large", action="store_true", help="also files of 2 GB")
    asked = parser.parse_args()
    cases = {
        n: c for n, c in ({**CASES, **LARGE} if asked.large else CASES).items() if not asked.only or n in asked.only
    }
    found: dict[str, dict[str, Any]] = {}
    for name, case in cases.items():
        rows = int(asked.rows * case.share)
        if name in LARGE:
            rows = int(2_000_000_000 / _LARGE_BYTES[case.kind])
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary) / "in"
            folder.mkdir()
            size = make_files(folder, case, rows)
            best: dict[str, Any] | None = None
            for number in range(1 if name in LARGE else asked.rounds):
                scratch = Path(temporary) / f"{number}"
                run = run_phases(folder, case, scratch)
                shutil.rmtree(scratch, ignore_errors=True)
                if best is None or sum(run["seconds"].values()) < sum(best["seconds"].values()):
                    best = run
            assert best is not None
            found[name] = {**best, "input_bytes": size, "limits": limits(folder, case)}
            expected = found[name]["limits"]["groups"]
            if best["results"] != expected:
                raise WrongResultError(f"{name}: {best['results']} results, DuckDB has {expected}")
            print(table({name: found[name]}).splitlines()[-1], flush=True)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "input_phases.json").write_text(json.dumps({"machine": facts(), "cases": found}, indent=1))
    print(table(found))


if __name__ == "__main__":
    main()

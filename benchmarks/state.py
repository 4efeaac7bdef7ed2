"""Ten million keys: gaps in the output around checkpoints, what a checkpoint writes, and how long a restore takes.

    python -m benchmarks.state [--keys 10000000] [--rounds 5] [--quick]
    python -m benchmarks.state --keys 100000000 --rounds 1      # 4 minutes, 16 GiB of memory, 11 on the disk

A keyed count and sum (two int64 columns) in one job.  First every key comes once, as fast as it goes; then keys come at
random, so many that one in a hundred changes in a second.  In turns with a checkpoint every second and with none, the
sink notes the time of every batch; of every second, once the load is over, the longest gap between two batches of a
subtask counts.  That is reported for both, beside what the machine does to a thread that only looks at the clock
(``machine.stalls_ms``), because shared machines have gaps of their own: the medians tell what a checkpoint adds.

What a checkpoint wrote is in its manifest: bytes in files of older checkpoints against all.  Then the job is stopped
and started again: the time to its first output, less that of a start without state, is the restore.  Keys that came
after it must have the counts and sums of the closed form.

Memory is what the machine has less of for programs at the worst moment, files that it keeps in memory not counted; what
the sinks note is part of it: 32 bytes a key.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numba as nb
import numpy as np
import pyarrow as pa

import cutwater as cw
from benchmarks.machine import MemoryUse, busy_cpus, facts, stalls_ms
from benchmarks.processes import RunError, run_json
from benchmarks.workload import PARALLELISM, WrongResultError, mix
from cutwater.api.jobs.job import Job
from cutwater.connectors.base import Json, PreCommit, SinkContext
from cutwater.connectors.discard import NothingToCommit
from cutwater.storage.job_log import JobLog
from cutwater.storage.snapshot.segment_files import load_manifest
from cutwater.storage.store.local import LocalStore
from cutwater.storage.store.paths import writer_of_shared

__all__ = ["main"]

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64())])
SHARE = 0.01
"""Of the keys, touched in a second."""
STEADY_S = 12
SETTLED_S = 5
"""After the load, for the rows that have waited meanwhile."""
RETAINED = 4
"""Checkpoints: with a hundred million keys each may be gigabytes."""
_CHILD = "--run"


@dataclass
class Load:
    """Every key once."""

    def __call__(self, start: int, count: int) -> pa.RecordBatch:
        keys = np.arange(start, start + count)
        return pa.record_batch([keys, keys], schema=SCHEMA)


@dataclass
class Touches:
    """Keys at random."""

    keys: int

    def __call__(self, start: int, count: int) -> pa.RecordBatch:
        rows = np.arange(start, start + count)
        return pa.record_batch([touched(rows, self.keys), rows], schema=SCHEMA)


def touched(rows: np.ndarray[Any, Any], keys: int) -> np.ndarray[Any, Any]:
    """The key of each row."""
    found = np.empty(len(rows), np.int64)
    _fill(rows, keys, found)
    return found


@nb.njit(cache=True, nogil=True)
def _key(row: int, keys: int) -> Any:
    return np.int64(mix(row) % np.uint64(keys))


@nb.njit(cache=True, nogil=True)
def _fill(rows: Any, keys: int, found: Any) -> None:
    for i in range(rows.shape[0]):
        found[i] = _key(rows[i], keys)


@nb.njit(cache=True, nogil=True)
def _count_and_sum(touches: int, counts: Any, sums: Any) -> None:
    for key in range(counts.shape[0]):
        counts[key], sums[key] = 1, key
    for row in range(touches):
        key = _key(row, counts.shape[0])
        counts[key] += 1
        sums[key] += row


@dataclass(frozen=True)
class Gaps:
    """Notes when batches come, and the newest count and sum of each key."""

    folder: str
    keys: int

    @property
    def guarantee(self) -> Literal["exactly-once", "at-least-once"]:
        return "exactly-once"

    @property
    def parallelism(self) -> int | None:
        return None

    def check(self, schema: pa.Schema) -> None:
        """The counts and sums of this file."""

    def writer(self, schema: pa.Schema, ctx: SinkContext, restored: list[Json]) -> _GapsWriter:
        return _GapsWriter(self, f"{ctx.subtask}-{ctx.incarnation}")

    def committer(self, schema: pa.Schema, job_uid: str, step: str) -> NothingToCommit:
        return NothingToCommit()


class _GapsWriter:
    def __init__(self, sink: Gaps, name: str) -> None:
        self._folder, self._name = Path(sink.folder), name
        self._times_ns: list[int] = []
        self._newest = np.zeros((2, sink.keys), np.int64)

    def write(self, batch: pa.RecordBatch) -> None:
        now_ns = time.monotonic_ns()
        if not self._times_ns:
            (self._folder / f"output-{self._name}-{now_ns}").touch()
        self._times_ns.append(now_ns)
        keys = batch.column("k").to_numpy()
        for values, name in zip(self._newest, ("n", "s"), strict=True):
            values[keys] = batch.column(name).to_numpy()

    def roll(self) -> None:
        """Nothing is in progress."""

    def pre_commit(self, checkpoint_id: int, final: bool) -> Callable[[], PreCommit]:
        return lambda: PreCommit(state=None)

    def close(self) -> None:
        np.save(self._folder / f"times-{self._name}.npy", np.array(self._times_ns, np.int64))
        np.save(self._folder / f"newest-{self._name}.npy", self._newest)


def start(folder: Path, spark: Any, keys: int, interval: str, touches: int, memory_bytes: int) -> Job:
    """The job; its sink leaves its notes in ``folder / "notes"``.  With ``memory_bytes`` its state lies on disk."""
    notes = folder / "notes"
    notes.mkdir(parents=True, exist_ok=True)
    flow = cw.Dataflow("state")
    load = flow.read("load", cw.generate(Load(), schema=SCHEMA, rows=keys, partitions=PARALLELISM))
    random_keys = cw.generate(
        Touches(keys), schema=SCHEMA, rows=touches, partitions=PARALLELISM, rate=keys * SHARE, stripe_rows=256
    )
    both = load.union("both", flow.read("touches", random_keys))
    both.key_by("k").aggregate("agg", n=cw.count(), s=cw.sum("v")).write("out", Gaps(str(notes), keys))
    checkpoints = folder / "checkpoints"
    on_disk: dict[str, Any] = {"state_backend": "rocksdb", "state_memory_bytes": memory_bytes} if memory_bytes else {}
    return flow.start(
        spark, checkpoint=checkpoints, parallelism=PARALLELISM, interval=interval, num_retained=RETAINED, **on_disk
    )


def first_output_s(job: Job, notes: Path, begun_ns: int, known: set[str]) -> float:
    """From the start of a job until every subtask has given something out."""
    while True:
        new = [path.name for path in notes.glob("output-*") if path.name not in known]
        if len(new) >= PARALLELISM:
            return (max(int(name.rsplit("-", 1)[1]) for name in new) - begun_ns) / 1e9
        if not job.is_active:
            job.await_termination()
            raise RuntimeError("the job ended without output")
        time.sleep(0.01)


def await_load(job: Job, keys: int) -> None:
    """Until every key has come once."""
    while job.is_active:
        load = job.status.steps.get("load")
        if load is not None and load.rows_out >= keys:
            return
        time.sleep(0.05)
    job.await_termination()
    raise RuntimeError("the job ended before all keys had come")


def longest_gaps_ms(notes: Path) -> list[float]:
    """Between two batches of one subtask, in the last seconds: the longest one of each second."""
    found: list[float] = []
    for path in notes.glob("times-*.npy"):
        times = np.load(path)
        steady = times[times > times[-1] - (STEADY_S + 1) * 10**9]
        gaps, seconds = np.diff(steady) / 1e6, (steady[1:] - steady[0]) // 10**9
        found += [float(gaps[seconds == second].max(initial=0)) for second in range(int(seconds[-1]))]
    return found


def written_shares(folder: Path) -> list[float]:
    """Of the retained incremental checkpoints: bytes written for them, as a share of all their bytes."""
    store = LocalStore(folder / "checkpoints")
    shares: list[float] = []
    for completed in JobLog(store, "state").read().completed:
        entries = load_manifest(store, "state", completed).entries
        own = (completed.checkpoint_id, completed.attempt)
        older = sum(e.length for e in entries if writer_of_shared(e.file) not in (None, own))
        if older:
            size = sum(e.length for e in entries)
            shares.append((size - older) / size)
    return shares


def run(folder: Path, keys: int, memory_bytes: int) -> None:
    """One round; prints the result."""
    from cutwater.spark.session import session

    spark = session(PARALLELISM)
    touches = int(keys * SHARE * (3 * STEADY_S + 5 + 8 * keys / 10_000_000))  # the load takes time, too
    result: dict[str, Any] = {}
    for name, interval in (("checkpoints", "1s"), ("none", "1h")):
        place = folder / name
        begun_ns = time.monotonic_ns()
        job = start(place, spark, keys, interval, touches, memory_bytes)
        result[f"first_{name}_s"] = first_output_s(job, place / "notes", begun_ns, set())
        await_load(job, keys)
        time.sleep(SETTLED_S + STEADY_S)
        if name == "checkpoints":
            result["shares"] = written_shares(place)
        job.stop()
        result[f"gaps_{name}_ms"] = longest_gaps_ms(place / "notes")
        for path in (place / "notes").glob("newest-*"):
            path.unlink()  # nobody asks for them, and they are large
    shutil.rmtree(folder / "none")
    place = folder / "checkpoints"
    known = {path.name for path in (place / "notes").iterdir()}
    begun_ns = time.monotonic_ns()
    job = start(place, spark, keys, "1s", touches, memory_bytes)
    restored_s = first_output_s(job, place / "notes", begun_ns, known)
    result["restore_s"] = max(0.0, restored_s - result["first_none_s"])
    job.await_termination()
    result["shares"] += written_shares(place)
    verify(place / "notes", known, keys, touches)
    print("RESULT", json.dumps(result), flush=True)


def verify(notes: Path, known: set[str], keys: int, touches: int) -> None:
    """Counts and sums of the keys that came after the restore.

    Raises:
        WrongResultError: one differs from the closed form.
    """
    counts, sums = np.empty(keys, np.int64), np.empty(keys, np.int64)
    _count_and_sum(touches, counts, sums)
    seen = 0
    for path in notes.glob("newest-*.npy"):
        if path.name in known:
            continue
        newest = np.load(path)
        came = newest[0] > 0
        seen += int(came.sum())
        if not ((newest[0] == counts)[came].all() and (newest[1] == sums)[came].all()):
            raise WrongResultError("after the restore, counts or sums are wrong")
    if not seen:
        raise WrongResultError("no key came after the restore")


def main() -> None:
    if sys.argv[1:2] == [_CHILD]:
        run(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--keys", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-mb", type=int, default=0, help="state on disk, and so much of it in memory")
    parser.add_argument("--quick", action="store_true", help="one round of 200,000 keys")
    arguments = parser.parse_args()
    keys, rounds = (200_000, 1) if arguments.quick else (arguments.keys, arguments.rounds)
    memory_bytes = arguments.memory_mb << 20
    runs: list[dict[str, Any]] = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as scratch:
            others, stalls = busy_cpus(), stalls_ms()
            command = [sys.executable, "-m", "benchmarks.state", _CHILD, scratch, str(keys), str(memory_bytes)]
            try:
                with MemoryUse() as memory:
                    found = run_json(command, 600 + keys / 50_000)
                runs.append({"others_cpus": others, "stalls_ms": stalls, "memory_gib": memory.most_gib, **found})
            except RunError as e:
                sys.exit(str(e))
    print(json.dumps({"machine": facts(), "runs": runs}, indent=1))
    where = f"on disk, {arguments.memory_mb} MiB of it in memory" if memory_bytes else "in memory"
    print(f"\n{keys:,} keys {where}, two int64 columns, {SHARE:.0%} touched a second, medians of {rounds}:\n")
    for text, name in (
        ("a checkpoint every second", "gaps_checkpoints_ms"),
        ("no checkpoint", "gaps_none_ms"),
        ("a thread that looks at the clock, nothing else running", "stalls_ms"),
    ):
        gaps = [gap for run in runs for gap in run[name]]
        median = statistics.median(gaps)
        print(f"| longest gap of a second (ms): {text} | {median:.3g} | {min(gaps):.3g}-{max(gaps):.3g} |")
    for text, value in (
        ("bytes a checkpoint writes, share of its size", [statistics.median(r["shares"] or [1.0]) for r in runs]),
        ("restore (s)", [r["restore_s"] for r in runs]),
        ("memory (GiB)", [r["memory_gib"] for r in runs]),
    ):
        print(f"| {text} | {statistics.median(value):.3g} | {min(value):.3g}-{max(value):.3g} |")


if __name__ == "__main__":
    main()

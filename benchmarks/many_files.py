"""What very many small files cost: their positions in checkpoints, and a watched folder that holds them.

    python -m benchmarks.many_files [--files 10000 100000] [--positions | --watched]

Positions: a source of which all files are read, in two subtasks: the bytes of a manifest, and the time that freezing,
writing and loading it takes, with one file read on since the checkpoint before.  Watched: a folder in which so many
files of a line lie is watched by a job at parallelism 2 with checkpoints every second.  Told are the time until all are
read, what driver and workers take when nothing comes, memory, and the time from moving in a file of a line to the
function that gets its row.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.machine import facts
from benchmarks.watched_latency import IDLE_S, PARALLELISM, Note, put, spent_s

__all__ = ["main"]

MOVED = 30
"""Files that come behind the others."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, nargs="*", default=[10_000, 100_000])
    parser.add_argument("--positions", action="store_true", help="only those")
    parser.add_argument("--watched", action="store_true", help="only that")
    asked = parser.parse_args()
    print(facts())
    for files in asked.files:
        if not asked.watched:
            positions(files)
        if not asked.positions:
            with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as scratch:
                watched(Path(scratch), files)


def positions(files: int) -> None:
    """Freeze, write and load a checkpoint of a source whose files are all read; prints what that takes."""
    import cutwater as cw
    from cutwater.plan.planner import make_plan
    from cutwater.runtime.chains.source_runner import SourceRunner
    from cutwater.runtime.control.messages import SplitAssignment
    from cutwater.storage.snapshot.manifest import Manifest, SubtaskRecord
    from cutwater.storage.snapshot.packed_splits import with_all_splits
    from cutwater.storage.snapshot.segment_files import dumps_manifest
    from cutwater.storage.store.seal import PLAIN

    with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as scratch:
        flow = cw.Dataflow("positions")
        flow.read("lines", cw.files(scratch, schema="k long", format="csv")).write("out", cw.discard())
        step = make_plan(flow, PARALLELISM).steps["lines"]
        chance, runners = random.Random(1), [SourceRunner(step, n) for n in range(PARALLELISM)]
        for subtask, runner in enumerate(runners):
            given: list[SplitAssignment] = []
            for number in range(subtask, files, PARALLELISM):
                name, size = f"/data/2026/11/24/part-{number:06}.csv", chance.randrange(80_000, 120_000)
                when = 1_790_000_000_000_000_000 + number * 30_000_000 + chance.randrange(10_000_000)
                data = {"file": name, "size": size, "mtime_ns": when}
                given.append(SplitAssignment(name, data, {"offset": size, "line": 1001}, when // 1000, True))
            runner.assign(given, True)
            runner.records()
        seconds: dict[str, float] = {}
        for runner in runners:
            runner._changed(runner._given[-300 % len(runner._given)])
        subtasks = []
        for subtask, runner in enumerate(runners):
            begin = time.perf_counter()
            found = runner.records()
            seconds["freeze, each subtask"] = time.perf_counter() - begin
            record = SubtaskRecord(
                0, subtask, subtask, "aligned", splits={"lines": found.splits}, packed={"lines": found.packed}
            )
            begin = time.perf_counter()
            sent = msgspec.msgpack.encode(record)
            subtasks.append(msgspec.msgpack.decode(sent, type=SubtaskRecord))
            seconds["send, each subtask"] = time.perf_counter() - begin
        manifest = Manifest("j", "u", 1, 1, "aligned", 128, PARALLELISM, 1, 2, [], subtasks, [])
        begin = time.perf_counter()
        data, _ = dumps_manifest(manifest, PLAIN)
        seconds["write"] = time.perf_counter() - begin
        begin = time.perf_counter()
        with_all_splits(msgspec.json.decode(data, type=Manifest))
        seconds["load"] = time.perf_counter() - begin
    told = ", ".join(f"{what} {took * 1e3:.1f} ms" for what, took in seconds.items())
    print(f"{files:,} finished files: a manifest of {len(data):,} bytes; {told}", flush=True)


def watched(scratch: Path, files: int) -> None:
    """One job over a folder with so many files; prints what it takes."""
    import cutwater as cw
    from cutwater.connectors.files.source import FileSource
    from cutwater.spark.session import session

    folder, out = scratch / "in", scratch / "times"
    folder.mkdir()
    out.mkdir()
    for number in range(files):
        (folder / f"{number:06}.csv").write_text("k,t\n1,0\n")
    looks: list[float] = []
    alone = FileSource(folder, schema="k long, t long", watch=True, settle_ms=0)
    for wait_s in (0.0, 0.5, 2.1, 0.1, 0.1, 0.1):
        time.sleep(wait_s)
        begin = time.perf_counter()
        alone.discover()
        looks.append(time.perf_counter() - begin)
    print(f"{files:,} files, a look: " + ", ".join(f"{took * 1e3:.1f}" for took in looks) + " ms", flush=True)
    source = cw.files(folder, schema="k long, t long", watch=True, settle_ms=0, end_marker="_END")
    flow = cw.Dataflow("watched")
    rows: Any = flow.read("lines", source)
    rows.map_batches("note", Note(str(out)), schema="late_ns long").write("nothing", cw.discard())
    spark = session(PARALLELISM)
    began_s = time.monotonic()
    job = flow.start(spark, checkpoint=scratch / "checkpoints", parallelism=PARALLELISM, interval="1s")
    while times_in(out).shape[0] < files:
        time.sleep(0.2)
        if job.status.phase == "failed":
            raise SystemExit(str(job.status))
    print(f"  all read after {time.monotonic() - began_s:.1f} s", flush=True)
    time.sleep(5.0)
    pids = [worker.pid for worker in job.status.workers]
    before, began_s = [spent_s(pid) for pid in [*pids, os.getpid()]], time.monotonic()
    time.sleep(IDLE_S)
    took_s = time.monotonic() - began_s
    shares = [(spent_s(pid) - was) / took_s for pid, was in zip([*pids, os.getpid()], before, strict=True)]
    memory = [resident_mib(pid) for pid in [*pids, os.getpid()]]
    chance = random.Random(1)
    for number in range(MOVED):
        time.sleep(chance.uniform(0.2, 0.6))
        put(folder / f"moved-{number:06}.csv", f"k,t\n2,{time.monotonic_ns()}\n")
    while (times := times_in(out)).shape[0] < files + MOVED:
        time.sleep(0.2)
    late = [(came - written) / 1e6 for written, came in times.tolist() if written]
    (folder / "_END").touch()
    job.await_termination(120)
    print(
        f"  when nothing comes: workers {shares[0]:.1%} {shares[1]:.1%}, driver {shares[2]:.1%} of a core", flush=True
    )
    print(f"  memory: workers {memory[0]} {memory[1]}, driver {memory[2]} MiB", flush=True)
    print(f"  a file moved in: {statistics.median(late):.0f} ms (median), {max(late):.0f} ms (worst)", flush=True)
    newest = max((scratch / "checkpoints").rglob("*.json"), key=lambda path: path.stat().st_size)
    print(f"  largest file of the checkpoints' records: {newest.stat().st_size:,} bytes", flush=True)


def times_in(folder: Path) -> np.ndarray[Any, np.dtype[np.int64]]:
    """When each row was written and when it came."""
    found = [np.fromfile(path, np.int64) for path in folder.iterdir()]
    whole = [part[: len(part) // 2 * 2].reshape(-1, 2) for part in found]
    return np.concatenate(whole) if whole else np.empty((0, 2), np.int64)


def resident_mib(pid: int) -> int:
    """The resident set of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) >> 10 for line in lines if line.startswith("VmRSS"))


if __name__ == "__main__":
    main()

"""What a commit into a Delta table costs in the driver, and whether it costs more as the table grows.

    python -m benchmarks.delta_commits [--subtasks 8] [--commits 10000] [--folder /tmp]

Only ``commit`` is timed: the files of all subtasks, made durable before, come into the table as one version, which is
made durable, too.  The log is put together as the sink does it by default; those commits are counted like others.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from typing import Any

import msgspec
import pyarrow as pa

from benchmarks.machine import facts
from cutwater.connectors.delta.delta import delta
from cutwater.connectors.delta.sink import DeltaSink
from cutwater.connectors.delta.writer import DeltaHandle
from cutwater.connectors.files.part_commit import part_stem, part_suffix

__all__ = ["main"]

SCHEMA = pa.schema({"id": pa.int64(), "page": pa.string(), "cents": pa.int64(), "at": pa.timestamp("us")})
UID, STEP = "c0ffee", "out"


class Subtask:
    """Who writes."""

    job_uid, step, subtask, parallelism, incarnation = UID, STEP, 0, 1, 1


_LINKED = 2_000
"""So many checkpoints link the same file."""


class Files:
    """Staged files for any checkpoint: one that a writer made, under many names."""

    def __init__(self, sink: DeltaSink) -> None:
        writer = sink.writer(SCHEMA, Subtask(), [])
        count = 1_000
        columns = [
            range(count),
            [f"p{n % 50}" for n in range(count)],
            range(count),
            pa.array(range(count), SCHEMA[3].type),
        ]
        writer.write(pa.record_batch(list(columns), schema=SCHEMA))
        [made] = writer.pre_commit(0, False)().handles
        self._handle = msgspec.convert(made, DeltaHandle)
        self._folder = os.path.join(sink.target.path, "_cutwater", UID, STEP)
        self._first = os.path.join(self._folder, self._handle.part.staged)

    def _next(self) -> str:
        self._first += "-"
        return self._first

    def of(self, checkpoint_id: int, subtasks: int) -> list[Any]:
        """The handles of a checkpoint."""
        handles: list[Any] = []
        for subtask in range(subtasks):
            name = part_stem(UID, STEP) + part_suffix(subtask, checkpoint_id, 1, 0, ".parquet")
            path = os.path.join(self._folder, name)
            if checkpoint_id % _LINKED == 0 and subtask == 0:  # file systems limit how many names a file has
                shutil.copyfile(self._first, path)
                os.link(path, self._next())
            else:
                os.link(self._first, path)
            part = msgspec.structs.replace(self._handle.part, staged=name, final=name, pieces=[])
            handles.append(msgspec.to_builtins(msgspec.structs.replace(self._handle, part=part)))
        return handles


def measured(folder: str, subtasks: int, commits: int) -> tuple[list[float], list[float]]:
    """Seconds, and seconds of processor time, of each commit."""
    path = os.path.join(folder, "table")
    sink = delta(path, roll_interval_ms=0).as_sink()
    assert isinstance(sink, DeltaSink)
    committer = sink.committer(SCHEMA, UID, STEP)
    committer.settle(None, [], 1)
    files = Files(sink)
    walls: list[float] = []
    busy: list[float] = []
    for checkpoint_id in range(1, commits + 1):
        handles = files.of(checkpoint_id, subtasks)
        wall_s, busy_s = time.perf_counter(), time.process_time()
        committer.commit(checkpoint_id, handles)
        walls.append(time.perf_counter() - wall_s)
        busy.append(time.process_time() - busy_s)
    return walls, busy


def told(name: str, seconds: list[float]) -> str:
    ordered = sorted(seconds)
    high = ordered[int(len(ordered) * 0.99)]
    return f"{name:>16}: p50 {statistics.median(seconds) * 1e3:6.1f} ms   p99 {high * 1e3:6.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--subtasks", type=int, default=8)
    parser.add_argument("--commits", type=int, default=10_000)
    parser.add_argument("--folder", help="where the table is made, and removed again")
    arguments = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="delta-commits-", dir=arguments.folder)
    try:
        walls, busy = measured(folder, arguments.subtasks, arguments.commits)
    finally:
        shutil.rmtree(folder)
    print(facts(), f"load average {os.getloadavg()[0]:.1f}")
    print(f"{arguments.commits} commits of {arguments.subtasks} files each")
    print(told("all", walls))
    print(told("processor time", busy))
    tenth = max(1, len(walls) // 10)
    first, last = walls[:tenth], walls[-tenth:]
    print(told(f"first {tenth}", first))
    print(told(f"last {tenth}", last))
    print(f"last to first: {statistics.median(last) / statistics.median(first):.2f}")


if __name__ == "__main__":
    main()

"""Time from a line appended to a watched file, or a small file moved in, to the function that gets its row.

    python -m benchmarks.watched_latency [--seconds 20] [--files 2] [--quick]

Lines carry the machine's monotonic clock, which all processes share: as written, and in the last step.  Both go through
a stateless flow and one with a running count by key, at parallelism 2 with checkpoints every second, one line every
50 ms on average at random times.  Then nothing comes for a while: the processor time that looking takes is told.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.machine import facts
from benchmarks.row_times import late_ms, told

__all__ = ["main"]

PARALLELISM = 2
GAP_S = 0.05
IDLE_S = 5.0
SKIP_S = 2.0
"""Lines at the beginning do not count: workers load what they need with the first ones."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of appending, in each run")
    parser.add_argument("--files", type=int, default=2, help="that are followed")
    parser.add_argument("--quick", action="store_true", help="short runs")
    arguments = parser.parse_args()
    print(facts())
    for keyed in (False, True):
        for moved_in in (False, True):
            with tempfile.TemporaryDirectory(prefix="cutwater-bench-") as scratch:
                seconds = 3.0 if arguments.quick else arguments.seconds
                run(Path(scratch), seconds, arguments.files, keyed=keyed, moved_in=moved_in)


def run(scratch: Path, seconds: float, files: int, *, keyed: bool, moved_in: bool) -> None:
    """One job: lines, or files of a line, then silence; prints the percentiles."""
    import cutwater as cw
    from cutwater.spark.session import session

    folder, out = scratch / "in", scratch / "times"
    folder.mkdir()
    out.mkdir()
    for number in range(1 if moved_in else files):
        (folder / f"{number:04}.csv").write_text("k,t\n")
    source = cw.files(folder, schema="k long, t long", watch=True, follow=not moved_in, settle_ms=0, end_marker="_END")
    flow = cw.Dataflow("watched")
    rows: Any = flow.read("lines", source)
    if keyed:
        rows = rows.key_by("k").aggregate("count", n=cw.count(), t=cw.last("t"))
    rows.map_batches("note", Note(str(out)), schema="late_ns long").write("nothing", cw.discard())
    job = flow.start(session(PARALLELISM), checkpoint=scratch / "checkpoints", parallelism=PARALLELISM, interval="1s")
    while job.status.phase != "running":
        time.sleep(0.05)
    chance = random.Random(1)
    end_s, number = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        time.sleep(chance.uniform(0, 2 * GAP_S))
        number += 1
        if moved_in:
            put(folder / f"moved-{number:06}.csv", f"k,t\n{number % 100},{time.monotonic_ns()}\n")
        else:
            with (folder / f"{number % files:04}.csv").open("a") as lines:
                lines.write(f"{number % 100},{time.monotonic_ns()}\n")
    time.sleep(1.0)
    pids = [worker.pid for worker in job.status.workers]
    before, began_s = [spent_s(pid) for pid in [*pids, os.getpid()]], time.monotonic()
    time.sleep(IDLE_S)
    took_s = time.monotonic() - began_s
    shares = [(spent_s(pid) - was) / took_s for pid, was in zip([*pids, os.getpid()], before, strict=True)]
    (folder / "_END").touch()
    job.await_termination(60)
    written, came = np.concatenate([np.fromfile(path, np.int64).reshape(-1, 2) for path in out.iterdir()]).T
    if len(came) != number:
        raise SystemExit(f"{number} lines were written, {len(came)} came")
    what = "a file moved in" if moved_in else f"a line in one of {files} files"
    name = f"{'keyed' if keyed else 'stateless'}, {what}"
    workers = " ".join(f"{share:.1%}" for share in shares[:-1])
    print(f"{name}: {told(late_ms(written, came))}", flush=True)
    print(f"  when nothing comes: workers {workers}, driver {shares[-1]:.1%} of a core", flush=True)


class Note:
    """``map_batches`` function that leaves when each row was written and when it came, in a file of its process."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            written, now_ns = batch.column("t").to_numpy(), time.monotonic_ns()
            with Path(self._folder, str(os.getpid())).open("ab") as file:
                np.column_stack([written, np.full(len(written), now_ns)]).tofile(file)
            yield pa.record_batch({"late_ns": now_ns - written})


def put(path: Path, text: str) -> None:
    """A file that is there as a whole."""
    hidden = path.with_name(f"_{path.name}")
    hidden.write_text(text)
    hidden.rename(path)


def spent_s(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()

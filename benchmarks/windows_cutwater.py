"""One run of the windowed work on Cutwater, in a process of its own: prints one line of JSON.

python -m benchmarks.windows_cutwater FOLDER ROWS WARM_UP_ROWS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cutwater as cw
from benchmarks.tally import Tally, read_tallies
from benchmarks.window_work import DISORDER_MS, SCHEMA, WINDOW_MS, Rows, sums
from benchmarks.workload import PARALLELISM
from cutwater.api.jobs.job import Job
from cutwater.spark.session import session

INTERVAL = "1s"


def dataflow(folder: Path, rows: int) -> cw.Dataflow:
    """The windowed work from the ordinary parts."""
    flow = cw.Dataflow("windows")
    source = cw.generate(Rows(str(folder)), schema=SCHEMA, rows=rows, partitions=PARALLELISM)
    windows = (
        flow.read("gen", source, event_time="t", out_of_order=f"{DISORDER_MS}ms")
        .key_by("k")
        .window("second", cw.tumbling(f"{WINDOW_MS}ms"))
        .aggregate("totals", n=cw.count(), s=cw.sum("v"))
    )
    windows.write("out", Tally(str(folder), sums))
    return flow


def run(folder: Path, rows: int) -> Job:
    """One job from start to end."""
    folder.mkdir(parents=True)
    return dataflow(folder, rows).run(
        session(PARALLELISM), checkpoint=folder / "checkpoints", parallelism=PARALLELISM, interval=INTERVAL
    )


def main() -> None:
    folder, rows, warm_up = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    run(folder / "warm-up", warm_up)
    checkpoints = run(folder / "run", rows).status.checkpoints
    found = read_tallies(folder / "run")
    result = {
        "rows": found.rows,
        "seconds": found.seconds,
        "checkpoints": checkpoints.completed,
        "checkpoints_failed": checkpoints.failed,
        **found.sums,
    }
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

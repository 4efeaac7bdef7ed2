"""One run of the keyed count on Cutwater, in a process of its own: prints one line of JSON.

    python -m benchmarks.keyed_count_cutwater FOLDER ROWS INTERVAL WARM_UP_ROWS KEYS

``INTERVAL`` is ``off`` (protocol ``none``) or a duration, ``KEYS`` is ``int64`` or ``text``.  A
short job of the same dataflow goes first in the same session: it warms up the JVM and the kernels.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cutwater as cw
from benchmarks.probe import SCHEMA, TEXT_SCHEMA, Probe, Rows, TextRows, read_reports
from benchmarks.workload import PARALLELISM, watch_after
from cutwater.api.jobs.job import Job
from cutwater.config import RecoveryName
from cutwater.spark.session import session


def dataflow(folder: Path, rows: int, keys: str = "int64", *, times: bool = False) -> cw.Dataflow:
    """The keyed count from the ordinary parts; ``times``: the sinks report time and rows of every batch."""
    flow = cw.Dataflow("keyed_count")
    fn, schema = (TextRows(str(folder)), TEXT_SCHEMA) if keys == "text" else (Rows(str(folder)), SCHEMA)
    numbers = flow.read("gen", cw.generate(fn, schema=schema, rows=rows, partitions=PARALLELISM))
    counted = numbers.key_by("k").aggregate("agg", n=cw.count(), s=cw.sum("v"))
    counted.write("out", Probe(str(folder), watch_after(rows), times=times))
    return flow


def run(folder: Path, rows: int, interval: str, keys: str = "int64", recovery: RecoveryName = "job") -> Job:
    """One job from start to end."""
    folder.mkdir(parents=True)
    settings = {"protocol": "none"} if interval == "off" else {"interval": interval, "recovery": recovery}
    return dataflow(folder, rows, keys).run(
        session(PARALLELISM), checkpoint=folder / "checkpoints", parallelism=PARALLELISM, **settings
    )


def main() -> None:
    folder, rows, interval, warm_up = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    keys = sys.argv[5]
    run(folder / "warm-up", warm_up, interval, keys)
    job = run(folder / "run", rows, interval, keys)
    reports, checkpoints = read_reports(folder / "run"), job.status.checkpoints
    result = {
        "rows": reports.rows,
        "seconds": (reports.last_ns - reports.first_ns) / 1e9,
        "checkpoints": checkpoints.completed,
        "checkpoints_failed": checkpoints.failed,
        "state": str(folder / "run"),
    }
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

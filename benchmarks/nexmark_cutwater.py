"""One run of a query of Nexmark on Cutwater, in a process of its own: prints one line of JSON.

python -m benchmarks.nexmark_cutwater FOLDER QUERY ROWS_FOLDER EVENTS WARM_UP_EVENTS
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, cast

from nexmark_queries import QUERIES, Tables

import cutwater as cw
from benchmarks.nexmark_check import ColumnSums, columns_of
from benchmarks.nexmark_rows import StoredTables
from benchmarks.tally import Tally, read_tallies
from benchmarks.workload import PARALLELISM
from cutwater.api.jobs.job import Job
from cutwater.spark.session import session

INTERVAL = "1s"


def run(folder: Path, name: str, stored: Path, events: int) -> Job:
    """One job from start to end."""
    folder.mkdir(parents=True)
    query, flow = QUERIES[name], cw.Dataflow(name)
    result = query.build(cast(Tables, StoredTables(flow, stored, folder, events)))
    newest_by = None if query.key is None else query.key[0]
    result.write("out", Tally(str(folder), ColumnSums(columns_of(query.sql)), newest_by))
    return flow.run(session(PARALLELISM), checkpoint=folder / "checkpoints", parallelism=PARALLELISM, interval=INTERVAL)


def main() -> None:
    folder, name, stored = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    events, warm_up = int(sys.argv[4]), int(sys.argv[5])
    run(folder / "warm-up", name, stored, warm_up)
    checkpoints = run(folder / "run", name, stored, events).status.checkpoints
    found = read_tallies(folder / "run")
    result: dict[str, Any] = {
        "rows": found.rows,
        "seconds": found.seconds,
        "checkpoints": checkpoints.completed,
        "checkpoints_failed": checkpoints.failed,
        "sums": found.sums,
    }
    print("RESULT", json.dumps(result), flush=True)


if __name__ == "__main__":
    main()

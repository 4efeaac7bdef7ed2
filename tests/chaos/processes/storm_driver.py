"""A driver of its own, as a user's program would be: ``python storm_driver.py FOLDER COMBINATION``.

It reads slowly and goes on until the file ``gate`` is in the folder; started again, it resumes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from storm_world import NAME, SHAPES, combinations, paced

from cutwater.api.jobs.job import start
from cutwater.spark.session import session

_PACE_S = 25.0


def main(folder: Path, name: str) -> None:
    """Run the job to its end."""
    combination = next(c for c in combinations() if str(c) == name)
    make, _ = SHAPES[combination.shape]
    graph, _, pace = paced(make(NAME), folder)
    pace.hold(_PACE_S)
    settings = combination.settings
    spark = session(settings["parallelism"])
    job = start(graph, spark, checkpoint=folder / "chk", **settings)
    while job.is_active and not (folder / "gate").exists():
        time.sleep(0.05)
    pace.release()
    job.await_termination()
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

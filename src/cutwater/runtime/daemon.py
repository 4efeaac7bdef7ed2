"""A ``spark.python.daemon.module`` that loads the data path before it forks workers.

A replacement worker is then ready in a fraction of the time that the imports and the loading of compiled kernels take.
Nothing may be printed here: standard output is the daemon's protocol with the JVM.  Polars is imported but not used,
since its thread pool would not survive the fork.
"""

from __future__ import annotations

import contextlib
import os


def preload() -> None:
    """Import what a worker needs, and run the common kernels once on a few rows."""
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    with contextlib.suppress(Exception):  # the worker reports a failing import with its own traceback
        import polars  # noqa: F401  # pyright: ignore[reportUnusedImport]
        import pyarrow as pa

        import cutwater.runtime.worker  # noqa: F401  # pyright: ignore[reportUnusedImport]
        from cutwater.operators.accumulators import Aggregate
        from cutwater.operators.aggregate import RunningAggregateSpec
        from cutwater.operators.partition import HashPartitioner
        from cutwater.runtime.wiring import OperatorContext

        rows = pa.record_batch({"k": [1, 2, 3], "v": [4, 5, 6]})
        aggregates = (Aggregate("n", "count", None), Aggregate("s", "sum", "v"))
        for _, part in HashPartitioner(rows.schema, ["k"], 2, 128).split(rows):
            operator = RunningAggregateSpec(part.schema, ("k",), aggregates, None).build()
            operator.open(OperatorContext("warm", 0, 1, 128, range(128), lambda *_: None))
            operator.process(0, part)
            segments = list(operator.freeze(1).segments())
            again = RunningAggregateSpec(part.schema, ("k",), aggregates, None).build()
            again.open(OperatorContext("warm", 0, 1, 128, range(128), lambda *_: None))
            again.restore(segments)


if __name__ == "__main__":
    preload()
    from pyspark.daemon import manager

    manager()

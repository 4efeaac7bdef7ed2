"""A ``spark.python.daemon.module`` that loads the data path before it forks workers.

A replacement worker is then ready in a fraction of the time that the imports and the loading of compiled kernels take.
Nothing may be printed here: standard output is the daemon's protocol with the JVM.  Polars is imported but not used,
since its thread pool would not survive the fork.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from pathlib import Path


def prefer_installed_spark() -> None:
    """Take PySpark from where pip put it, if Spark's archives of the same installation come first on the path.

    They hold sources only: each start compiles them again, and each task reads their directories anew.
    """

    def is_installed_beside(entry: str) -> bool:
        path = Path(entry)
        package = path.parents[2] if len(path.parts) > 3 else path
        return (
            path.suffix == ".zip"
            and path.parts[-4:-1] == ("pyspark", "python", "lib")
            and str(package.parent) in sys.path
        )

    sys.path[:] = [entry for entry in sys.path if not is_installed_beside(entry)]


def preload() -> None:
    """Import what a worker needs, and load the compiled kernels if they lie in the cache."""
    os.environ.setdefault("POLARS_MAX_THREADS", "1")
    # Once a second Arrow's allocator gives the system what is free: to a stream that is its next batch, on fresh pages.
    os.environ.setdefault("MIMALLOC_PURGE_DELAY", "60000")  # ms; read when Arrow is loaded
    with contextlib.suppress(Exception):  # the worker reports a failing import with its own traceback
        import polars  # noqa: F401  # pyright: ignore[reportUnusedImport]

        import cutwater.runtime.worker.worker  # noqa: F401  # pyright: ignore[reportUnusedImport]
        from cutwater.runtime.chains.warm import is_warm, warm_up

        if is_warm():  # else workers compile only what their job needs: nobody waits here for all kernels there are
            warm_up()
    gc.collect()
    gc.freeze()  # the workers' collector need not look at, nor copy by touching, what they all share


if __name__ == "__main__":
    prefer_installed_spark()
    preload()
    from pyspark.daemon import manager

    manager()

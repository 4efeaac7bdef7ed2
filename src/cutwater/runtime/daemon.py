"""A ``spark.python.daemon.module`` that loads the data path before it forks workers.

A replacement worker is then ready in a fraction of the time that the imports and the loading of compiled kernels take.
Nothing may be printed here: standard output is the daemon's protocol with the JVM.  Polars is imported but not used,
since its thread pool would not survive the fork.
"""

from __future__ import annotations

import contextlib
import gc
import os


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
    preload()
    from pyspark.daemon import manager

    manager()

"""A ``spark.python.daemon.module`` that loads the data path before it forks workers.

A replacement worker is then ready in a fraction of the time that the imports take.  Nothing may be printed here:
standard output is the daemon's protocol with the JVM.
"""

from __future__ import annotations

import contextlib


def _preload() -> None:
    with contextlib.suppress(Exception):  # the worker reports a failing import with its own traceback
        import polars  # noqa: F401  # pyright: ignore[reportUnusedImport]

        import cutwater.runtime.worker  # noqa: F401  # pyright: ignore[reportUnusedImport]


if __name__ == "__main__":
    _preload()
    from pyspark.daemon import manager

    manager()

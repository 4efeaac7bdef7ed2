"""What the fork server of the runtime tests imports once, so that a new worker is there in milliseconds."""

import duckdb  # noqa: F401  # the oracles'; a worker imports their module with the sources in it
import pytest  # noqa: F401  # a child of multiprocessing imports the main module again
from pyspark import cloudpickle

from cutwater.runtime.daemon import preload

preload()


def work(pickled: bytes) -> None:
    """Be a worker."""
    from cutwater.runtime.worker import run_worker

    prepare, args = cloudpickle.loads(pickled)
    if prepare is not None:
        prepare(args)
    run_worker(args)

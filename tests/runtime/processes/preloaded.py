"""What the fork server of the runtime tests imports once, so that a new worker is there in milliseconds."""

import faulthandler
import os

import duckdb  # noqa: F401  # the oracles'; a worker imports their module with the sources in it
import pytest  # noqa: F401  # a child of multiprocessing imports the main module again
from pyspark import cloudpickle

from cutwater.runtime.daemon import preload

preload()


def work(pickled: bytes) -> None:
    """Be a worker."""
    from cutwater.runtime.worker.worker import run_worker

    prepare, args, crash_log = cloudpickle.loads(pickled)
    if crash_log is not None:
        faulthandler.enable(os.open(crash_log, os.O_CREAT | os.O_APPEND | os.O_WRONLY))
    if prepare is not None:
        prepare(args)
    run_worker(args)

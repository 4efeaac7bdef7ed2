"""What workers find in the process that they are forked from."""

import os
import subprocess
import sys

import pytest

from cutwater.runtime.daemon import prefer_installed_spark

_CODE = """
import resource, time
from cutwater.runtime.daemon import preload
preload()
import numpy as np, pyarrow as pa
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def use_for(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        batches = [pa.allocate_buffer((1 << 20) + (i % 7 << 14)) for i in range(60)]
        for batch in batches:
            np.frombuffer(batch, np.uint8)[::4096] = 1
        del batch, batches
        time.sleep(0.03)
use_for(0.3)
before = faults()
use_for(2.2)
print(faults() - before)
"""


def test_memory_of_batches_is_not_given_back_between_them() -> None:
    """Arrow's allocator did so once a second, and each batch began with page faults."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("MIMALLOC_")}
    done = subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=False, env=own)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 300


def test_the_installed_spark_is_taken_before_its_archive_of_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    site = "/venv/lib/python3.11/site-packages"
    archives = [f"{site}/pyspark/python/lib/pyspark.zip", f"{site}/pyspark/python/lib/py4j-0.10.9.9-src.zip"]
    mine = ["/data/more.zip", "/opt/spark/python/lib/pyspark.zip", site]
    monkeypatch.setattr(sys, "path", [*archives, *mine])
    prefer_installed_spark()
    assert sys.path == mine
    monkeypatch.setattr(sys, "path", [*archives])  # nothing is installed beside: they are all there is
    prefer_installed_spark()
    assert sys.path == archives

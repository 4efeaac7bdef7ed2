"""After a warm-up, ordinary keyed work compiles nothing more."""

import os
import subprocess
import sys
from pathlib import Path


def test_ordinary_work_after_a_warm_up_compiles_nothing() -> None:
    code = """
from numba.core.dispatcher import Dispatcher
from cutwater.runtime.chains.warm import _Context, warm_up
warm_up()
import gc
import numpy as np, pyarrow as pa
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.aggregate.running_spec import RunningAggregateSpec
from cutwater.runtime.channels.partitioner import HashPartitioner
kernels = [o for o in gc.get_objects() if isinstance(o, Dispatcher)]
before = {k: len(k.signatures) for k in kernels}
assert sum(before.values()) > 20
rows = pa.record_batch({"k": pa.array(np.arange(9), pa.int32()), "s": list("abcdefghi"), "v": np.arange(9.0)})
for keys in (("k",), ("s",), ("k", "s")):
    parts = HashPartitioner(rows.schema, keys, 3, 128).split(rows)
    aggregates = (Aggregate("n", "count"), Aggregate("v1", "sum", "v"), Aggregate("v2", "max", "v"))
    operator = RunningAggregateSpec(rows.schema, keys, aggregates).build()
    operator.open(_Context())
    for _, part in parts:
        operator.process(0, part)
grown = [k.py_func.__name__ for k in kernels if len(k.signatures) > before[k]]
assert grown in ([], ["scatter"]), grown  # a column of another width is another physical type
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_large_state_and_its_snapshots_compile_nothing_after_a_warm_up() -> None:
    """Small tables do without the kernels that copy, mark and grow large ones: a warm-up must not be all small."""
    code = """
import gc, time
import numpy as np, pyarrow as pa
from numba.core.dispatcher import Dispatcher
from cutwater.runtime.chains.warm import _Context, warm_up
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.aggregate.running_spec import RunningAggregateSpec
from cutwater.state.table.keyed_segments import in_groups
import threading
warm_up()
kernels = [o for o in gc.get_objects() if isinstance(o, Dispatcher)]
before = {k: len(k.signatures) for k in kernels}
for text in (False, True):
    rows = 400_000
    keys = pa.array([f"key {i}" for i in range(rows)]) if text else pa.array(np.arange(rows))
    batch = pa.record_batch({"k": keys, "v": np.arange(rows)})
    aggregates = (Aggregate("n", "count"), Aggregate("s", "sum", "v"))
    operator = RunningAggregateSpec(batch.schema, ("k",), aggregates).build()
    operator.open(_Context())
    for begin in range(0, rows, 50_000):
        operator.process(0, batch.slice(begin, 50_000))
    for checkpoint_id in (1, 2, 3):
        frozen = operator.freeze(checkpoint_id)
        operator.process(0, batch.slice(0, 1000))
        changes = frozen.changes(checkpoint_id - 1)
        segments = list(frozen.segments() if changes is None else changes)
        if changes is None:
            few = pa.record_batch(segments[0].batch.columns[1:3], names=["k", "n"])
            in_groups(few, 1, 128)
        assert (changes is None) == (checkpoint_id == 1)
        frozen.release()
    operator.restore(segments)
for thread in threading.enumerate():
    if thread.name == "cutwater-memory":
        thread.join()
grown = [k.py_func.__name__ for k in kernels if len(k.signatures) > before[k]]
assert not grown, grown
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_daemon_waits_for_no_compilation_where_only_some_kernels_are_cached(tmp_path: Path) -> None:
    """The few kernels of a first job once made the next daemon compile all there are, and its workers late."""
    code = """
import numpy as np
import cutwater.runtime.chains.warm as warm
from cutwater.state import kernels
from cutwater.state.kernels import cache_directory
import os
kernels.hash_words(np.arange(3), np.empty(3, np.uint64))
assert os.listdir(cache_directory()), "a first job would have left something"
compiled = []
warm.warm_up = lambda: compiled.append(1)
from cutwater.runtime.daemon import preload
preload()
assert not compiled
warm._marker().touch()
preload()
assert compiled
"""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr

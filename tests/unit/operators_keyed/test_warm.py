"""After a warm-up, ordinary keyed work compiles nothing more."""

import subprocess
import sys


def test_ordinary_work_after_a_warm_up_compiles_nothing() -> None:
    code = """
from numba.core.dispatcher import Dispatcher
from cutwater.operators.warm import warm_up
warm_up()
import gc
import numpy as np, pyarrow as pa
from cutwater.operators.accumulators import Aggregate
from cutwater.operators.aggregate import RunningAggregateSpec
from cutwater.operators.partition import HashPartitioner
kernels = [o for o in gc.get_objects() if isinstance(o, Dispatcher)]
before = {k: len(k.signatures) for k in kernels}
assert sum(before.values()) > 20
rows = pa.record_batch({"k": pa.array(np.arange(9), pa.int32()), "s": list("abcdefghi"), "v": np.arange(9.0)})
for keys in (("k",), ("s",), ("k", "s")):
    parts = HashPartitioner(rows.schema, keys, 3, 128).split(rows)
    aggregates = (Aggregate("n", "count"), Aggregate("v1", "sum", "v"), Aggregate("v2", "max", "v"))
    operator = RunningAggregateSpec(rows.schema, keys, aggregates).build()
    for _, part in parts:
        operator.process(0, part)
grown = [k.py_func.__name__ for k in kernels if len(k.signatures) > before[k]]
assert grown in ([], ["scatter"]), grown  # a column of another width is another physical type
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr

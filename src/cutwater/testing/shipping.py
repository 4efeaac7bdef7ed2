"""A connector as a worker gets it: through the pickler that Spark sends programs with, perhaps in a new process."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

T = TypeVar("T")
_TIMEOUT_S = 60.0
_RUN = """
import pathlib, sys
sys.path[:] = sys.argv[2:]
from pyspark import cloudpickle
function, arguments = cloudpickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
function(*arguments)
"""


def shipped(value: T) -> T:
    """A copy of a value that went the way to a worker.

    >>> shipped({"a": [1]})
    {'a': [1]}
    """
    from pyspark import cloudpickle

    return cast("T", cloudpickle.loads(cloudpickle.dumps(value)))


def in_another_process(function: Callable[..., object], *arguments: object) -> None:
    """Call a function in a new process, which finds modules where this one does.

    Raises:
        AssertionError: it failed there, or has not ended after a minute.
    """
    from pyspark import cloudpickle

    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "program")
        program.write_bytes(cloudpickle.dumps((function, arguments)))
        command = [sys.executable, "-c", _RUN, str(program), *sys.path]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"another process has not ended after {_TIMEOUT_S:.0f} s") from None
    assert done.returncode == 0, f"in another process: {done.stderr}"

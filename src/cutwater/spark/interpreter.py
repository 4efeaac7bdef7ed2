"""Whether the Python that Spark starts workers with can run them: asked before a job starts, not by a boot that hangs.

Spark takes the Python of its workers from the environment at the moment its context is made: ``PYSPARK_PYTHON``, else
the first ``python3`` on the ``PATH``.  Without an active virtual environment that is another one than the program's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any, cast

from cutwater.errors import ConfigError

_PROBE = """
import importlib.util, sys
print("cutwater-probe", "%d.%d" % sys.version_info[:2], importlib.util.find_spec("cutwater") is not None)
"""
_PROBE_S = 30.0
_HINT = (
    "Set PYSPARK_PYTHON before the session is made, here to {executable}; or leave the session out, and Cutwater makes "
    "one that uses the program's own Python."
)


def require_interpreter(spark: object) -> None:
    """Check the Python of a session's workers, where they run on this machine.

    Raises:
        ConfigError: as ``check_interpreter``.
    """
    if not type(spark).__module__.startswith("pyspark."):
        return
    context = cast(Any, spark).sparkContext
    if str(context.master).startswith("local"):
        files = context.getConf().get("spark.submit.pyFiles", "")
        check_interpreter(str(context.pythonExec), ships_files=bool(files or context._python_includes))


def check_interpreter(python: str, *, ships_files: bool = False) -> None:
    """Ask a Python of this machine whether it can run workers; the program's own is not asked.

    Args:
        python: a command or path, as Spark would start it.
        ships_files: workers get Python files besides: then it need not have the package itself.

    Raises:
        ConfigError: it is not there, is of another version than this one, or lacks the package.
    """
    hint, would = _HINT.format(executable=sys.executable), "Spark would start its workers with"
    found = shutil.which(python)
    if found is None:
        raise ConfigError(f"{would} {python!r}, which is not there", hint=hint)
    if _is_ours(found):
        return
    try:
        done = subprocess.run(
            [found, "-c", _PROBE], capture_output=True, text=True, errors="replace", timeout=_PROBE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return  # a machine that is busy is no reason to refuse
    except OSError as error:
        raise ConfigError(f"{would} {found}, which cannot be run: {error}", hint=hint) from None
    words = next((line.split() for line in done.stdout.splitlines() if line.startswith("cutwater-probe ")), None)
    if words is None or len(words) != 3:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ConfigError(f"{would} {found}, which is no Python that runs: {said}", hint=hint)
    ours = f"{sys.version_info[0]}.{sys.version_info[1]}"
    if words[1] != ours:
        raise ConfigError(
            f"{would} {found}, a Python {words[1]}, and this program runs on Python {ours} "
            f"({sys.executable}): functions cannot be sent from one to the other",
            hint=hint,
        )
    if words[2] != "True" and not ships_files:
        raise ConfigError(
            f"{would} {found}, which has no cutwater; this program's Python is {sys.executable}",
            hint=hint,
        )


def _is_ours(found: str) -> bool:
    """The same file in the same folder: environments share the file behind the links, and differ in what they have."""
    same_folder = os.path.dirname(os.path.abspath(found)) == os.path.dirname(os.path.abspath(sys.executable))
    return same_folder and os.path.realpath(found) == os.path.realpath(sys.executable)

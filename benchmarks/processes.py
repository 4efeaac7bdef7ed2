"""Runs one measurement in a process of its own and reads its one line of result."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["EXAMPLES", "ROOT", "RunError", "run_json"]

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


class RunError(Exception):
    """A measurement failed; holds the end of what it said."""


def run_json(command: list[str], timeout_s: float) -> dict[str, Any]:
    """Run in the repository's root; returns the object that the process printed after ``RESULT``.

    Raises:
        RunError: it failed, said nothing, or took longer than ``timeout_s`` (then its whole group is killed).
    """
    path = os.pathsep.join(str(ROOT / folder) for folder in (".", "src", "examples"))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, errors = process.communicate(timeout=timeout_s)
    except BaseException as e:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if isinstance(e, subprocess.TimeoutExpired):
            raise RunError(f"no end after {timeout_s:.0f} s: {' '.join(command)}") from e
        raise
    lines = [line.removeprefix("RESULT ") for line in out.splitlines() if line.startswith("RESULT ")]
    if process.returncode or not lines:
        raise RunError(f"{' '.join(command)} ended with {process.returncode}:\n{(errors or out).strip()[-2000:]}")
    return json.loads(lines[-1])

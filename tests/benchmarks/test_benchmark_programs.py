"""The programs of the benchmarks: their closed forms, what they check, and one short run of each."""

from __future__ import annotations

import doctest
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

FORMS = ("report", "tally", "window_work", "workload")
SHORT_RUNS = {"compare": ("cutwater 1 s text",), "windows": ("cutwater",)}


@pytest.mark.parametrize("name", FORMS)
def test_the_examples_of_a_closed_form_and_of_a_report_are_right(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(f"benchmarks.{name}"))
    assert tried.attempted > 0
    assert tried.failed == 0


def short_runs() -> Iterator[tuple[str, str]]:
    yield from ((name, only) for name, cases in SHORT_RUNS.items() for only in cases)


@pytest.mark.spark
@pytest.mark.full
@pytest.mark.parametrize(("name", "only"), short_runs())
def test_a_short_run_of_cutwater_is_right(name: str, only: str) -> None:
    """It checks its own result, and ends with an error if that is wrong."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", *(["--only", only] if only else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "short runs" in done.stdout

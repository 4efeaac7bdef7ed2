"""Which modules an import pulls in: that, and not a clock, decides how long it takes."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = {"numba", "llvmlite", "polars", "pandas", "pyspark", "py4j", "duckdb", "rich", "click", "scipy"}


def imported_by(code: str) -> set[str]:
    """Top names of the modules that a new interpreter holds after running the code."""
    report = "import sys, json; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


def test_importing_the_package_imports_nothing_else():
    assert imported_by("import cutwater") & (HEAVY | {"pyarrow", "numpy", "msgspec", "xxhash"}) == set()


@pytest.mark.parametrize(
    "code",
    [
        "import cutwater as cw; cw.Dataflow('x')",
        "import cutwater as cw; cw.count(); cw.sum('x')",
        "import cutwater as cw; cw.files('in/*.parquet'); cw.JobConfig()",
    ],
)
def test_beginning_a_dataflow_imports_no_heavy_library(code):
    assert imported_by(code) & HEAVY == set()


def test_building_keyed_steps_imports_neither_numba_nor_spark():
    code = """
import cutwater as cw
stream = cw.Dataflow('x').read('r', cw.rate(None, rows=5), event_time='timestamp')
keyed = stream.key_by('value', dead_letters='bad')
keyed.aggregate('a', n=cw.count(), m=cw.max('value'))
keyed.window('w', cw.tumbling('1h')).aggregate('b', n=cw.count()).write('out', cw.discard())
"""
    assert imported_by(code) & {"numba", "pyspark", "pandas"} == set()


def test_explaining_a_dataflow_imports_neither_numba_nor_spark():
    code = """
import cutwater as cw
flow = cw.Dataflow('x')
flow.read('r', cw.rate(None, rows=5)).key_by('value').aggregate('a', n=cw.count()).write('out', cw.discard())
flow.explain()
"""
    assert imported_by(code) & {"numba", "pyspark", "pandas", "polars"} == set()


def test_what_is_looked_for_would_be_seen():
    assert "click" in imported_by("import cutwater, click")

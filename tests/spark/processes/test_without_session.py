"""A job needs no session; one that is made later finds Cutwater's format by itself."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
import cutwater as cw

folder = sys.argv[1]
flow = cw.Dataflow("counts")
read = flow.read("in", cw.memory([{"k": i % 3} for i in range(30)], schema="k long"))
read.key_by("k").aggregate("n", n=cw.count()).collect("out")
job = flow.run(checkpoint=folder + "/chk", interval="1s")
from pyspark.sql import SparkSession
assert SparkSession.getActiveSession() is None, "a session was made"
print("largest", max(row["n"] for row in job.result_table("out").to_pylist()))

spark = SparkSession.builder.getOrCreate()
rows = spark.read.format("cutwater").option("state", "n").load(folder + "/chk/counts").collect()
print("state", sorted((row["k"], row["n"]) for row in rows))
"""


@pytest.mark.spark
def test_a_job_runs_without_a_session_and_its_snapshot_is_read_by_one(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3_000:]
    assert "largest 10" in done.stdout
    assert "state [(0, 10), (1, 10), (2, 10)]" in done.stdout

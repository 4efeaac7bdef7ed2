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


OWN = {
    "made by the program": """
import os, sys
os.environ["PYSPARK_PYTHON"] = sys.executable
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[4]").appName("mine").getOrCreate()
def doubled(row):
    return {"k": 2 * row["k"]}
flow = cw.Dataflow("own")
rows = flow.read("in", cw.memory([{"k": 1}], schema="k long"))
rows.map("doubled", doubled, schema="k long").write("out", cw.files(FOLDER))
""",
    "taken by a function": """
def flow(spark):
    assert spark.conf.get("spark.app.name") == "cutwater own.py", spark.conf.get("spark.app.name")
    flow = cw.Dataflow("own")
    flow.read("in", spark.range(1).selectExpr("id as k")).write("out", cw.files(FOLDER))
    return flow
""",
    "stopped by a function": """
def flow(spark):
    rows = spark.range(1).collect()
    spark.stop()
    flow = cw.Dataflow("own")
    flow.read("in", cw.memory([{"k": row.id} for row in rows], schema="k long")).write("out", cw.files(FOLDER))
    return flow
""",
}
TARGET = {"made by the program": "", "taken by a function": ":flow", "stopped by a function": ":flow"}


@pytest.mark.spark
@pytest.mark.parametrize(
    "session", ["made by the program", *(pytest.param(name, marks=pytest.mark.full) for name in list(OWN)[1:])]
)
def test_the_command_line_goes_on_with_the_session_of_a_program(tmp_path: Path, session: str) -> None:
    out = tmp_path / "out"
    (tmp_path / "own.py").write_text(f"import cutwater as cw\nFOLDER = {str(out)!r}\n{OWN[session]}")
    command = [
        sys.executable,
        "-c",
        "from cutwater.ui.cli import main; main()",
        "run",
        f"{tmp_path}/own.py{TARGET[session]}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-3_000:]
    assert len(list(out.glob("*.parquet"))) == 1

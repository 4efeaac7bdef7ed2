"""The installed command line with real jobs on a local Spark."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.spark

COMMAND = [sys.executable, "-c", "from cutwater.ui.cli import main; main()"]
ROWS = 20_000
DEADLINE_S = 120

PROGRAM = """
import cutwater as cw
import pyarrow as pa
from remainders import remainder  # beside this file: executors do not have it


def with_key(batches):
    for batch in batches:
        yield pa.record_batch({{"key": remainder(batch.column("value"))}})


def make(rate, rows) -> cw.Dataflow:
    flow = cw.Dataflow("counts")
    numbers = flow.read("numbers", cw.rate(rate, rows=rows))
    keyed = numbers.map_batches("keys", with_key, schema="key long")
    keyed.key_by("key").aggregate("count", n=cw.count()).write("out", cw.files({out!r}, roll_rows=1))
    return flow


def bounded():
    return make(None, {rows})


def endless():
    return make(2_000, None)
"""

NEIGHBOUR = """
import pyarrow as pa


def remainder(values):
    return pa.array([v.as_py() % 7 for v in values], pa.int64())
"""


@pytest.fixture
def program(tmp_path):
    (tmp_path / "remainders.py").write_text(NEIGHBOUR)
    path = tmp_path / "counts.py"
    path.write_text(PROGRAM.format(out=str(tmp_path / "out"), rows=ROWS))
    return path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEADLINE_S)


def counts_by_key(folder: Path) -> dict[int, list[int]]:
    """What was committed: a running count writes 1, 2, 3 ... for each key."""
    found: dict[int, list[int]] = {}
    for file in sorted(folder.glob("*.parquet")):
        for row in pq.read_table(file).to_pylist():
            found.setdefault(row["key"], []).append(row["n"])
    assert found, "nothing was committed"
    return found


def test_a_bounded_job_runs_to_its_end_and_its_snapshot_can_be_looked_at(program, tmp_path):
    chk = tmp_path / "chk"
    done = run("run", f"{program}:bounded", "--checkpoint", chk, "--interval", "200ms", "--json")
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert (lines[-1]["phase"], lines[-1]["outcome"]) == ("ended", "finished")
    assert {"started", "ended"} <= {line["event"] for line in lines}

    expected = Counter(value % 7 for value in range(ROWS))
    found = counts_by_key(tmp_path / "out")
    assert {k: sorted(n) for k, n in found.items()} == {k: list(range(1, n + 1)) for k, n in expected.items()}

    assert "finished" in run("list", chk).stdout
    info = json.loads(run("inspect", chk / "counts", "--json").stdout)
    assert info["final"]
    assert next(s["rows"] for s in info["steps"] if s["id"] == "count") == 7
    assert run("verify", chk).returncode == 0

    again = run("run", f"{program}:bounded", "--checkpoint", chk)
    assert again.returncode == 0, again.stderr
    assert "had finished already" in again.stderr


@pytest.mark.full
def test_a_job_is_stopped_from_elsewhere_goes_on_and_is_interrupted(program, tmp_path):
    chk = tmp_path / "chk"
    arguments = ["run", f"{program}:endless", "--checkpoint", chk, "--interval", "200ms", "--json"]

    def until(process: subprocess.Popen[str], event: str) -> dict:
        for line in process.stdout:
            body = json.loads(line)
            if body["event"] == event:
                return body
        raise AssertionError(f"no {event!r} in the output; exit code {process.wait()}")

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen([*COMMAND, *map(str, arguments)], stdout=subprocess.PIPE, text=True)

    with start() as first:
        until(first, "checkpoint")
        assert "running" in run("list", chk).stdout
        stopped = run("stop", chk, "counts", "--timeout", "60s")
        assert (stopped.returncode, "stopped by its driver" in stopped.stdout) == (0, True), stopped.stderr
        assert "stopped" in until(first, "ended")["text"]
        assert first.wait(DEADLINE_S) == 0
    newest = json.loads(run("inspect", chk, "--json").stdout)["checkpoint_id"]

    with start() as second:
        assert until(second, "started")["text"].endswith(f"from checkpoint {newest}")
        until(second, "checkpoint")
        second.send_signal(signal.SIGINT)
        assert "stopped" in until(second, "ended")["text"]
        assert second.wait(DEADLINE_S) == 130
    for key, found in counts_by_key(tmp_path / "out").items():
        assert sorted(found) == list(range(1, len(found) + 1)), f"rows of key {key} are lost or there twice"
    assert " stopped " in run("list", chk).stdout

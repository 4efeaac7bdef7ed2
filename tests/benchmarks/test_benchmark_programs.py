"""The programs of the benchmarks: their closed forms, what they check, and one short run of each."""

from __future__ import annotations

import doctest
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.workload import WrongResultError

from benchmarks import network, nexmark, nexmark_check, nexmark_rows, report, turns, window_work

ROOT = Path(__file__).resolve().parents[2]
FORMS = (
    *("checkpoint_cost", "checkpoint_phases", "large_state", "network", "nexmark", "nexmark_check", "nexmark_rows"),
    *("report", "rescale", "row_times", "tally", "window_work", "workload"),
)
SHORT_RUNS = {
    "checkpoint_cost": ("",),
    "checkpoint_phases": ("",),
    "compare": ("cutwater 1 s text",),
    "nexmark": ("cutwater q0", "cutwater q7"),
    "real_input": ("json", "csv", "parquet"),
    "windows": ("cutwater",),
    "with_less": ("csv",),
}
FLINK_QUERIES = ROOT / "benchmarks" / "flink" / "Nexmark.java"


@pytest.mark.parametrize("name", FORMS)
def test_the_examples_of_a_closed_form_and_of_a_report_are_right(name: str) -> None:
    tried = doctest.testmod(importlib.import_module(f"benchmarks.{name}"))
    assert tried.attempted > 0
    assert tried.failed == 0


def test_every_query_that_flink_sql_can_express_is_there_for_flink() -> None:
    found = set(re.findall(r'^ +"(q\d+)", new Query', FLINK_QUERIES.read_text(), re.MULTILINE))
    assert found == set(nexmark.EVENTS) == {f"q{n}" for n in range(9)} - {"q6"}


def test_a_result_of_nexmark_with_one_wrong_number_is_refused(tmp_path: Path) -> None:
    nexmark_rows.write(tmp_path, 5_000)
    rows, sums = nexmark_check.expected(tmp_path, "q2", 5_000, "us")
    assert rows > 0
    nexmark_check.verify(tmp_path, "q2", 5_000, "us", {"rows": rows, "sums": sums})
    for wrong in ({"rows": rows + 1, "sums": sums}, {"rows": rows, "sums": sums | {"price": sums["price"] + 1}}):
        with pytest.raises(WrongResultError, match="instead of"):
            nexmark_check.verify(tmp_path, "q2", 5_000, "us", wrong)


def test_sums_wrap_at_64_bits_as_the_engines_do(tmp_path: Path) -> None:
    nexmark_rows.write(tmp_path, 10_000)
    rows, sums = nexmark_check.expected(tmp_path, "q0", 10_000, "us")
    assert sums["time"] > 2**63
    wrapped = {**sums, "time": int(sums["time"]) % 2**64 - 2**64}
    nexmark_check.verify(tmp_path, "q0", 10_000, "us", {"rows": rows, "sums": wrapped})


def test_a_windowed_result_that_lost_or_doubled_something_is_refused() -> None:
    whole = window_work.expected(10_000)
    window_work.verify(10_000, dict(whole))
    for name in whole:
        with pytest.raises(WrongResultError):
            window_work.verify(10_000, {**whole, name: whole[name] + 1})


def test_contenders_are_chosen_by_engine_case_or_name() -> None:
    some = nexmark.contenders(Path("rows"))
    assert [c.name for c in turns.choose(some, "cutwater q3,cutwater q4")] == ["cutwater q3", "cutwater q4"]
    with pytest.raises(SystemExit, match="nothing fits; there are cutwater q0"):
        turns.choose(some, "q99")


def test_figures_of_short_runs_stay_out_of_the_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = {"engine": "cutwater", "interval": "1 s", "rate": 1e6, "others_cpus": 0.0, "checkpoints": 1}
    monkeypatch.setattr(report, "OUT", tmp_path)
    monkeypatch.setattr(report, "ROOT", tmp_path)
    for share, filled in ((0.1, "old"), (1.0, "| Cutwater | 1 s | 1.00 |")):
        (tmp_path / "windows.json").write_text(json.dumps({"share": share, "runs": [run]}))
        assert filled in report.fill_markers("<!-- bench:windows -->old<!-- /bench:windows -->", report.section)


def test_every_token_of_a_network_is_in_each_snapshot_once_or_the_program_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(network.measure(processes=20, channels=60, tokens=30, snapshots=3).seconds) == 3
    passed_on = network.Passer._pass

    def careless(self: network.Passer, ctx: object) -> None:
        if self.passed < 50:
            passed_on(self, ctx)

    monkeypatch.setattr(network.Passer, "_pass", careless)
    with pytest.raises(RuntimeError, match="of 30 lost"):
        network.measure(processes=20, channels=60, tokens=30, snapshots=3)


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


def test_the_benchmark_of_the_kernels_runs() -> None:
    """It calls the operators without a runtime, so that only running it tells whether it still fits them."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels.py"), "64"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("M rows/s") == 11


@pytest.mark.full
def test_the_phases_of_a_first_job_are_timed() -> None:
    """Its results are compared with DuckDB's."""
    command = [sys.executable, "-m", "benchmarks.input_phases", "--rows", "20000", "--rounds", "1", "--only"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    cases = ["json", "parquet, integer key", "csv, gzip"]
    done = subprocess.run([*command, *cases], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [line.split(" | ")[0] for line in done.stdout.splitlines()[-3:]] == [f"| {case}" for case in cases]


@pytest.mark.full
@pytest.mark.spark
def test_the_first_row_is_timed_beside_an_empty_query() -> None:
    command = [sys.executable, "-m", "benchmarks.first_row", "--rounds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.search(r"empty query [\d.]+ s, first row [\d.]+ s, median of the ratios [\d.]+\n", done.stdout)
    assert re.search(r"warm session: [\d.]+ s", done.stdout)


def test_rows_that_are_stored_once_are_expected_as_often_as_they_come(tmp_path: Path) -> None:
    nexmark_rows.write(tmp_path, 5_000, bids=1_000)
    rows = nexmark_rows.rows_of("bid", 2_500)
    batch = nexmark_rows.again(str(tmp_path), "bid", 0, rows)
    times = batch.column("time").cast("int64").to_pylist()
    assert times == sorted(times)
    assert len(set(times)) > nexmark_rows.rows_of("bid", 2_000)
    found = nexmark_check.ColumnSums(nexmark_check.columns_of(nexmark_check.QUERIES["q0"].sql))(
        batch.select(nexmark_rows.COLUMNS["bid"])
    )
    assert nexmark_check.expected(tmp_path, "q0", 2_500, "us") == (rows, found)

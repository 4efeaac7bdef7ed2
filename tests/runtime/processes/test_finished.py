"""A job that has finished is not run again: no session is started for it, and its user is told what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest

import cutwater as cw
from cutwater.api.jobs import job as job_module
from cutwater.runtime.spark_host import SparkHost

ADVICE = (
    "give another job name (name=, --name) or checkpoint directory (checkpoint=, --checkpoint); "
    "with restore= (--restore) it begins from a snapshot of this one."
)


def totals(*, of: object = None, doubled: bool = False, total: bool = False) -> cw.Dataflow:
    flow = cw.Dataflow("totals")
    rows = flow.read("in", of or cw.rate(None, rows=100))
    if doubled:
        rows = rows.with_columns("double", value=pl.col("value") * 2)
    kept = {"n": cw.sum("value")} if total else {"n": cw.count()}
    rows.key_by("value").aggregate("count", **kept).collect("out")
    return flow


@pytest.fixture
def no_session(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Once it is called there is real Spark, and it must not be started."""

    def no_spark(*_: object) -> None:
        raise AssertionError("Spark was started")

    def begin() -> None:
        monkeypatch.setattr(job_module, "SparkHost", SparkHost)
        monkeypatch.setattr(job_module, "session", no_spark)
        monkeypatch.setattr(job_module, "usable_context", no_spark)

    return begin


def test_no_session_is_started_for_it(start, tmp_path: Path, no_session: Callable[[], None]) -> None:
    assert start(totals()).await_termination(30)
    no_session()
    job = totals().run(checkpoint=tmp_path / "chk")
    assert job.status.outcome == "finished"
    assert job.status.warnings == [f"had finished already: nothing was run. To run it again, {ADVICE}"]
    assert job.result_table("out").num_rows == 100


def test_its_sources_may_be_gone(start, tmp_path: Path, no_session: Callable[[], None]) -> None:
    file = tmp_path / "rows.parquet"
    pl.DataFrame({"value": range(50)}).write_parquet(file)
    assert start(totals(of=cw.files(str(file)))).await_termination(30)
    again = totals(of=cw.files(str(file)))
    file.unlink()
    no_session()
    assert again.run(checkpoint=tmp_path / "chk").status.outcome == "finished"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"doubled": True}, "step 'double' is new"),
        ({"total": True}, "step 'count' has changed"),
        ({"of": cw.memory([{"value": 1, "more": 2}])}, "step 'in' has changed"),
    ],
)
def test_a_changed_program_is_told_that_it_was_another_one(
    start, tmp_path: Path, change: dict[str, object], told: str, no_session: Callable[[], None]
) -> None:
    assert start(totals()).await_termination(30)
    no_session()
    job = totals(**change).run(checkpoint=tmp_path / "chk")  # type: ignore[arg-type]
    assert job.status.warnings == [
        f"had finished already, as another program: {told}. Nothing was run. To run this program, {ADVICE}"
    ]


def test_a_step_that_is_gone_or_has_another_name(start, tmp_path: Path, no_session: Callable[[], None]) -> None:
    assert start(totals(doubled=True)).await_termination(30)
    no_session()
    assert "step 'double' is gone. Nothing" in totals().run(checkpoint=tmp_path / "chk").status.warnings[0]


def test_what_is_advised_works_a_job_of_another_name_begins_with_its_state(start, tmp_path: Path) -> None:
    source = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    pl.DataFrame({"value": [1, 2]}).write_parquet(source[0])
    assert start(totals(of=cw.files(str(tmp_path / "*.parquet")))).await_termination(30)
    pl.DataFrame({"value": [2, 3]}).write_parquet(source[1])
    again = totals(of=cw.files(str(tmp_path / "*.parquet")))
    job = start(again, name="more", restore=str(tmp_path / "chk" / "totals"))
    assert job.await_termination(30)
    assert sorted(job.result_table("out").column("n").to_pylist()) == [1, 2]


def test_another_parallelism_is_no_other_program(start, tmp_path: Path, no_session: Callable[[], None]) -> None:
    assert start(totals(), parallelism=2).await_termination(30)
    no_session()
    job = totals().run(checkpoint=tmp_path / "chk", parallelism=1)
    assert job.status.warnings[0].startswith("had finished already: nothing was run")


def test_a_damaged_manifest_is_no_matter(start, tmp_path: Path, no_session: Callable[[], None]) -> None:
    assert start(totals()).await_termination(30)
    for manifest in (tmp_path / "chk" / "totals").rglob("manifest*"):
        manifest.write_bytes(b"")
    no_session()
    assert totals().run(checkpoint=tmp_path / "chk").status.warnings[0].startswith("had finished already: nothing")


def test_its_result_as_a_dataframe_starts_a_session_then(
    start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_session: Callable[[], None]
) -> None:
    assert start(totals()).await_termination(30)
    no_session()
    job = totals().run(checkpoint=tmp_path / "chk")
    made = SimpleNamespace(read=SimpleNamespace(parquet=lambda path: f"read {path}"))
    monkeypatch.setattr(job_module, "session", lambda parallelism: made)
    assert str(job.result("out")).endswith("output/out")

"""``Dataflow.run`` on real workers: what a script sees of an end from elsewhere, and of what its functions log."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_host import FakeSpark
from runtime_world import counting, gated, open_gate, wait_until

import cutwater as cw
from cutwater.runtime.driver.requests import send
from cutwater.storage.job_log import JobLog
from cutwater.storage.store.local import LocalStore


@pytest.mark.parametrize(("kind", "ends"), [("cancel", "cancelled"), ("stop", "stopped")])
def test_an_end_from_another_terminal_is_seen_by_the_script(
    fake_spark: FakeSpark, tmp_path: Path, kind: Any, ends: str
) -> None:
    seen: list[object] = []

    def script() -> None:
        flow = counting("job", gated(tmp_path, 10_000), tmp_path / "out")
        try:
            job = flow.run(fake_spark, checkpoint=tmp_path / "chk", interval="50ms", progress=False)  # type: ignore[arg-type]
            seen.append(job.outcome)
        except cw.CutwaterError as error:
            seen.append(error)

    thread = threading.Thread(target=script)
    thread.start()
    store = LocalStore(tmp_path / "chk")
    try:
        wait_until(lambda: (tmp_path / "chk").exists() and JobLog(store, "job").read().completed, "a checkpoint")
        answer = send(store, "job", kind)
        assert answer is not None
        assert answer.ok
    finally:
        open_gate(tmp_path)
        thread.join(60)
    if kind == "cancel":
        assert isinstance(seen[0], cw.JobCancelledError)
        assert "job 'job' was cancelled" in str(seen[0])
    else:
        assert seen == [ends]
    assert JobLog(store, "job").read().outcome == ends


@pytest.mark.parametrize("level", ["warning", "info"])
def test_what_functions_log_comes_to_the_log_of_the_driver(
    start: Any, caplog: pytest.LogCaptureFixture, level: str
) -> None:
    def told(row: dict[str, Any]) -> dict[str, Any]:
        if row["value"] == 3:
            logging.getLogger("users").warning("value %d", row["value"])
            logging.getLogger("users").info("a detail")
        return row

    flow = cw.Dataflow("told")
    rows = flow.read("in", cw.rate(None, rows=10))
    rows.map("told", told, "value long, timestamp timestamp").write("out", cw.discard())
    with caplog.at_level(logging.INFO, "cutwater"):
        job = start(flow, parallelism=1, worker_log_level=level)
        assert job.await_termination(30)
    lines = [(r.levelname, r.getMessage()) for r in caplog.records if r.name == "cutwater.worker"]
    wanted = [("WARNING", "job 'told', worker 0: value 3"), ("INFO", "job 'told', worker 0: a detail")]
    assert lines == (wanted if level == "info" else wanted[:1])
    assert "worker 0 warning: value 3" in job.status.log

"""Few rows: a worker with nothing else to do sends them at once."""

from __future__ import annotations

from pathlib import Path

from runtime_world import assert_running_counts, counting, gated, open_gate, wait_until

ROWS = 3_200
BEFORE_THE_GATE = 2_880


def test_rows_do_not_wait_for_others_that_are_not_there(start, tmp_path: Path) -> None:
    """Neither a full batch nor the timeout nor a barrier would send them before the gate opens."""
    flow = counting("light", gated(tmp_path, ROWS), tmp_path / "out")
    job = start(flow, interval="1h", buffer_timeout="1h")
    arrived = "the rows at the sink"
    wait_until(lambda: (s := job.status.steps.get("out")) and s.rows_in == BEFORE_THE_GATE, arrived, job=job)
    open_gate(tmp_path)
    assert job.await_termination(40)
    assert_running_counts(tmp_path / "out", ROWS)

"""Rows that workers show come out where the job was started."""

from __future__ import annotations

import pytest

import cutwater as cw


def test_rows_of_all_workers_are_printed_by_the_driver(start, capfd: pytest.CaptureFixture[str]) -> None:
    flow = cw.Dataflow("shown")
    rows = flow.read("in", cw.memory([{"word": "left", "n": 1}], [{"word": "right", "n": 2}]))
    rows.write("show", cw.console())
    job = start(flow)
    assert job.await_termination(30)
    lines = capfd.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split(" | ")] for line in lines if " | " in line]
    assert sorted(row for row in cells if row != ["word", "n"]) == [["left", "1"], ["right", "2"]]
    assert any(line.startswith("-- show, subtask ") and line.endswith(" 1 row") for line in lines)

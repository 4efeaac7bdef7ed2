"""``cutwater diagram`` and ``cutwater check-trace``."""

from __future__ import annotations

import json

import msgspec
import pytest
from click.testing import CliRunner
from trace_world import run

from cutwater.errors import ConfigError
from cutwater.trace.diagram import diagram
from cutwater.trace.events import Trace, write_trace
from cutwater.ui.cli import cli


@pytest.fixture
def traces(tmp_path):
    write_trace(tmp_path / "good", run(2, crash=True))
    write_trace(tmp_path / "bad", run(4, fault="late cut"))
    return tmp_path


def call(*words):
    return CliRunner().invoke(cli, list(map(str, words)))


def test_diagram_writes_the_picture(traces):
    out = traces / "out.svg"
    assert call("diagram", traces / "good", "--snapshot", 2, "-o", out).exit_code == 0
    assert out.read_text() == diagram(run(2, crash=True), snapshot=2)
    assert call("diagram", traces / "good", "--snapshot", 2).output == out.read_text()


def test_diagram_with_the_verdict_of_the_checker(traces):
    assert "no violation" in call("diagram", traces / "good", "--check").output
    assert "inconsistent cut: snapshot 1" in call("diagram", traces / "bad", "--check").output


def test_diagram_names_the_snapshots_that_there_are(traces):
    result = call("diagram", traces / "good", "--snapshot", 3)
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == "the trace has no snapshot 3. It has: 1, 2."


def test_check_trace_says_what_is_wrong_and_exits_with_1(traces):
    good, bad = call("check-trace", traces / "good"), call("check-trace", traces / "bad")
    assert good.exit_code == 0
    assert "2 complete snapshots: no violation" in good.output
    assert "snapshot 2: an equivalent run leads through its state" in good.output
    assert bad.exit_code == 1
    assert "inconsistent cut: snapshot 1, channel" in bad.output


def test_check_trace_as_json(traces):
    found = json.loads(call("check-trace", traces / "bad", "--json", "--quick").output)
    assert found["ok"] is False
    assert "inconsistent cut" in {v["kind"] for v in found["violations"]}
    assert found["reorderings"] == []


def test_parts_of_several_machines_are_put_together(traces):
    whole = run(2, crash=True)
    parts = []
    for i, process in enumerate(whole.header.processes):
        own = [msgspec.structs.replace(e, time_ms=e.time_ms - 20 * i) for e in whole.events if e.process == process]
        parts.append(traces / process)
        write_trace(parts[-1], Trace(whole.header, tuple(own)))
    assert call("check-trace", *parts).exit_code == 0


def test_parts_of_different_runs_are_refused(traces):
    write_trace(traces / "other", run(1, count=2))
    result = call("check-trace", traces / "good", traces / "other")
    assert isinstance(result.exception, ConfigError)
    assert "different runs" in str(result.exception)

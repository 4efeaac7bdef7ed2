"""Progress of ``Dataflow.run`` in a plain script, with a job that does what the test says."""

from __future__ import annotations

import io
import logging
import os
import pty
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import cutwater as cw
from cutwater.api.jobs import script
from cutwater.api.jobs.script import shown
from cutwater.errors import ConfigError, JobCancelledError, JobFailedError
from cutwater.runtime.status.status import JobStatus

RUNNING = JobStatus(name="delays", uid="", phase="running", attempt=1, rows_read=12, rows_per_second=1.5)
ENDED = JobStatus(name="delays", uid="", phase="ended", outcome="finished", rows_read=34)


class FakeJob:
    """Runs for some looks, then ends."""

    name = "delays"

    def __init__(self, looks: int = 3, outcome: str = "finished", error: Exception | None = None) -> None:
        self.looks, self.ends_as, self.error = looks, outcome, error

    @property
    def outcome(self) -> str:
        return self.ends_as if self.looks <= 0 else ""

    @property
    def status(self) -> JobStatus:
        if self.looks > 0:
            return RUNNING
        return JobStatus(name="delays", uid="", phase="ended", outcome=self.ends_as, rows_read=34)

    def await_termination(self, timeout_s: float | None = None) -> bool:
        self.looks -= 1
        while self.looks > 0:
            print("a row")
            if timeout_s is not None:
                time.sleep(timeout_s)
                return False
            self.looks -= 1
        if self.error is not None:
            raise self.error
        return True


@pytest.fixture
def flow(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A dataflow whose ``start`` gives the job of the test, in a script that has set up no logging."""

    def make(job: FakeJob) -> cw.Dataflow:
        logger = logging.getLogger("cutwater")  # pytest adds its handlers when a test begins
        own = [h for h in logger.handlers if not type(h).__module__.startswith("_pytest")]
        monkeypatch.setattr(logger, "handlers", own)
        monkeypatch.setattr(cw.Dataflow, "start", lambda self, spark, **settings: job)
        return cw.Dataflow("delays")

    return make


@pytest.fixture(autouse=True)
def no_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The root has pytest's handlers, and other tests leave some behind."""
    monkeypatch.setattr(logging.getLogger("cutwater"), "propagate", False)
    monkeypatch.setattr(logging.getLogger("cutwater"), "handlers", [])
    monkeypatch.setattr(script, "_LOOK_S", 0.0)
    monkeypatch.delenv(script.PROGRESS_VARIABLE, raising=False)


def test_without_a_terminal_lines_go_to_standard_error_and_standard_output_is_the_scripts(
    flow: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "_PERIOD_S", 0.0)
    assert flow(FakeJob()).run().outcome == "finished"
    out, err = capfd.readouterr()
    assert out == "a row\na row\n"
    lines = [line[10:] for line in err.splitlines()]
    assert lines[0] == "delays: running, 12 rows, 1.5/s"
    assert lines[-1].startswith("delays: finished after ")
    assert lines[-1].endswith(": 34 rows, 0 checkpoints")


def test_a_short_job_is_one_line(flow: Any, capfd: pytest.CaptureFixture[str]) -> None:
    flow(FakeJob()).run()
    assert len(capfd.readouterr().err.splitlines()) == 1


def test_a_script_that_has_set_up_logging_gets_them_there(flow: Any, capfd: pytest.CaptureFixture[str]) -> None:
    said = io.StringIO()
    logger, handler = logging.getLogger("cutwater"), logging.StreamHandler(said)
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        flow(FakeJob()).run()
        assert said.getvalue().startswith("delays: finished after ")
        logger.setLevel(logging.WARNING)
        said.seek(0)
        said.truncate()
        flow(FakeJob()).run()
        assert said.getvalue() == ""
    finally:
        logger.removeHandler(handler)
        logger.setLevel(logging.NOTSET)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("progress", "variable"), [(False, ""), (None, "off"), (None, "0"), (False, "on")])
def test_it_can_be_switched_off(
    flow: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, progress: Any, variable: str
) -> None:
    monkeypatch.setenv(script.PROGRESS_VARIABLE, variable)
    flow(FakeJob()).run(progress=progress)
    assert capfd.readouterr().err == ""


def test_another_word_in_the_environment_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(script.PROGRESS_VARIABLE, "perhaps")
    with pytest.raises(ConfigError, match="CUTWATER_PROGRESS='perhaps' is unknown"), shown(None):
        raise AssertionError("it came through")


def test_a_cancelled_job_does_not_pass_for_a_finished_one(flow: Any) -> None:
    with pytest.raises(JobCancelledError, match="job 'delays' was cancelled: what it wrote before stays"):
        flow(FakeJob(outcome="cancelled")).run(progress=False)


def test_a_stopped_job_is_told_by_its_outcome(flow: Any) -> None:
    assert flow(FakeJob(outcome="stopped")).run(progress=False).outcome == "stopped"


@pytest.mark.parametrize("progress", [False, True])
def test_a_failed_job_raises_what_made_it_fail(flow: Any, progress: bool) -> None:
    with pytest.raises(JobFailedError, match="it broke"):
        flow(FakeJob(outcome="failed", error=JobFailedError("it broke"))).run(progress=progress)


TERMINAL_SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
import cutwater as cw
from cutwater.api.jobs import script
from test_script import FakeJob
script._LOOK_S = 0.3
cw.Dataflow.start = lambda self, spark, **settings: FakeJob(looks=4)
print("before")
cw.Dataflow("delays").run()
print("behind")
"""


def on_terminal(*, output_to_file: Path | None) -> str:
    """What a terminal of 40 columns shows of a script; its standard output may go to a file."""
    master, slave = pty.openpty()
    code = TERMINAL_SCRIPT.format(tests=str(Path(__file__).parent))
    out = output_to_file.open("wb") if output_to_file else slave
    environment = {**os.environ, "COLUMNS": "40", "TERM": "xterm"}
    environment.pop("NO_COLOR", None)
    process = subprocess.Popen([sys.executable, "-c", code], stdout=out, stderr=slave, stdin=slave, env=environment)
    os.close(slave)
    shown = b""
    while True:
        try:
            part = os.read(master, 65_536)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(master)
    assert process.wait(60) == 0, shown.decode()
    return shown.decode()


def test_on_a_terminal_a_line_is_drawn_anew_and_what_the_script_prints_stays_whole() -> None:
    shown = on_terminal(output_to_file=None)
    assert "delays  running  12 rows" in shown
    plain = shown.replace("\r\n", "\n")
    assert plain.startswith("before\n")
    assert plain.count("a row\n") == 3
    assert plain.rstrip().endswith("behind")
    assert "delays  finished after" in plain


def test_with_standard_output_in_a_file_the_line_is_on_the_terminal_and_the_file_is_the_scripts(tmp_path: Path) -> None:
    shown = on_terminal(output_to_file=tmp_path / "out")
    assert (tmp_path / "out").read_text() == "before\na row\na row\na row\nbehind\n"
    assert "a row" not in shown
    assert "delays  finished after" in shown

"""Staying with a job until it ends, with a job that does what the test says."""

from __future__ import annotations

import logging
import signal
import threading
from pathlib import Path

import pytest
from ui_world import run_main

from cutwater.errors import JobFailedError
from cutwater.runtime.status.status import JobStatus
from cutwater.storage.job_log import JobLog
from cutwater.storage.log_entries import JobFinished
from cutwater.storage.store.local import LocalStore
from cutwater.ui import run as run_module
from cutwater.ui.run import Interrupts, RunOptions, follow, interrupts_counted


class FakeJob:
    """Ends when it is told to, or when its script is played: one action per look."""

    def __init__(self, *script, error: Exception | None = None) -> None:
        self.script, self.error, self.asked = list(script), error, []
        self.ended = threading.Event()
        self.outcome = "finished"

    @property
    def status(self) -> JobStatus:
        if self.ended.is_set():
            return JobStatus(name="job", uid="u", phase="ended", outcome="failed" if self.error else self.outcome)
        return JobStatus(name="job", uid="u", phase="running")

    def await_termination(self, timeout_s):
        if self.script:
            self.script.pop(0)()
        ended = self.ended.wait(0.01)
        if ended and self.error:
            raise self.error
        return ended

    def stop(self):
        self.asked.append("stop")

    def cancel(self):
        self.asked.append("cancel")
        self.outcome = "cancelled"
        self.ended.set()


class SeenView:
    def __init__(self) -> None:
        self.phases, self.hints = [], []

    def update(self, status):
        self.phases.append(status.phase)

    def hint(self, text):
        self.hints.append(text)


def nothing() -> None:
    """A look at which nothing happens."""


def test_a_job_is_shown_until_its_last_state():
    view, job = SeenView(), FakeJob(nothing, nothing)
    job.script.append(job.ended.set)
    assert follow(job, view, Interrupts()).outcome == "finished"
    assert view.phases[0] == "running"
    assert view.phases[-1] == "ended"
    assert job.asked == []


def test_the_first_interrupt_stops_and_the_second_cancels():
    interrupts, view = Interrupts(), SeenView()

    def interrupt() -> None:
        interrupts(signal.SIGINT, None)

    job = FakeJob(nothing, interrupt, nothing, interrupt)
    assert follow(job, view, interrupts).outcome == "cancelled"
    assert sorted(job.asked) == ["cancel", "stop"]
    assert view.hints == ["stopping with a last checkpoint (Ctrl-C again: cancel at once)", "cancelling"]


def test_more_interrupts_than_two_change_nothing():
    interrupts = Interrupts()
    for _ in range(5):
        interrupts(signal.SIGINT, None)
    job = FakeJob(*[nothing] * 6)
    job.script.append(job.ended.set)
    job.cancel = lambda: job.asked.append("cancel")  # takes its time
    follow(job, SeenView(), interrupts)
    assert sorted(job.asked) == ["cancel", "stop"]


def test_a_failed_job_raises_after_its_last_state_was_shown():
    view, job = SeenView(), FakeJob(error=JobFailedError("it broke"))
    job.ended.set()
    with pytest.raises(JobFailedError, match="it broke"):
        follow(job, view, Interrupts())
    assert view.phases == ["ended"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_counted_and_handlers_come_back(number):
    before = signal.getsignal(number)
    with interrupts_counted() as interrupts:
        signal.raise_signal(number)
        assert (interrupts.count, interrupts.number) == (1, number)
    assert signal.getsignal(number) is before


def test_a_job_that_has_finished_is_told_so_before_spark_is_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "done.py"
    program.write_text(
        "import cutwater as cw\n"
        "flow = cw.Dataflow('done')\n"
        "flow.read('in', cw.rate(None, rows=5)).write('out', cw.discard())\n"
    )
    log = JobLog(LocalStore.open(str(tmp_path / "chk")), "done")
    log.begin_attempt("here:1")
    log.append(JobFinished(1, 1, 1_000))

    def start_context(*_: object, **__: object) -> None:
        raise AssertionError("Spark was started")

    monkeypatch.setattr(run_module, "start_context", start_context)
    code, out, err = run_main(capfd, "run", program, "--checkpoint", tmp_path / "chk")
    assert code == 0
    assert "had finished already: nothing was run. To run it again, give another job name" in " ".join(
        (out + err).split()
    )


class NotedView(SeenView):
    def __init__(self) -> None:
        super().__init__()
        self.notes = []

    def note(self, text):
        self.notes.append(text)


@pytest.mark.parametrize("takeover", [False, True])
def test_a_start_says_that_it_waits_for_another_driver_and_takes_over_if_told_to(takeover: bool) -> None:
    """The command line has its own way of showing warnings, so what is logged must come to it."""

    class Flow:
        def start(self, **settings):
            logging.getLogger("cutwater.lease").warning("job %r: its driver gives no sign of life", "job")
            self.settings = settings

    flow, view = Flow(), NotedView()
    options = RunOptions("x.py", checkpoint="chk", takeover=takeover)
    run_module.begin(flow, options, view)
    assert flow.settings["takeover"] is takeover
    assert view.notes == ["job 'job': its driver gives no sign of life"]
    assert not any(type(h) is logging.Handler for h in logging.getLogger("cutwater.lease").handlers)

"""``cutwater run`` and ``cutwater chaos``: the dataflow of a file, once to its end, or without and with faults."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cutwater.api.flow import Dataflow
from cutwater.api.jobs.job import Job
from cutwater.errors import CutwaterError, JobCancelledError
from cutwater.plan.planner import make_plan
from cutwater.runtime.driver.lease import LEASE_LOGGER
from cutwater.runtime.driver.preparing import has_finished
from cutwater.runtime.settings import make_config
from cutwater.runtime.spark_host import active_context, ship_by_value
from cutwater.runtime.status.status import JobStatus
from cutwater.spark.session import session, start_context
from cutwater.storage.reading import resolve_snapshot
from cutwater.storage.store.seal import seal_of
from cutwater.ui.program import Program, load_program
from cutwater.ui.views import View

if TYPE_CHECKING:
    from cutwater.chaos.trial import Report

_REFRESH_S = 0.2
_STOPPING = "stopping with a last checkpoint (Ctrl-C again: cancel at once)"
_CANCELLING = "cancelling"


@dataclass(frozen=True)
class RunOptions:
    """Options as the user typed them."""

    target: str
    checkpoint: str | None = None
    master: str | None = None
    restore: str = "latest"
    settings: dict[str, Any] = field(default_factory=dict[str, Any])
    debug: bool = False
    upgrade: dict[str, Any] = field(default_factory=dict[str, Any])
    """``step_ids``, ``state_names``, ``allow_dropped_state``."""
    claim: bool = False
    name: str | None = None
    """Of the job, if not the dataflow's."""
    fork: bool = False
    """``restore`` is the snapshot of a job to be forked."""
    follow: bool = True
    """Of a fork."""
    takeover: bool = False
    """Also from a driver that lives."""


def run_file(options: RunOptions, view: View) -> int:
    """Run a file's dataflow to its end; returns the exit code.

    Raises:
        CutwaterError: the file, a setting or the checkpoint directory is wrong, or the job failed.
    """
    with ExitStack() as stack:
        stack.callback(view.close)
        program = load_program(options.target)
        config = make_config(options.settings)
        starter = SparkStarter(program, options, view, config.parallelism)
        stack.callback(starter.stop)
        flow = program.dataflow(starter.session)
        flow.validate()
        plan = make_plan(flow, config.parallelism, config.max_parallelism)  # what is wrong is said before Spark starts
        if options.restore != "latest":
            resolve_snapshot(options.restore, seal_of(config.key_file))
        if options.checkpoint is None and not options.fork:
            view.note("no --checkpoint: the job survives the loss of workers, not of this process")
        starter.parallelism = plan.parallelism
        idle = options.checkpoint is not None and has_finished(
            options.checkpoint, options.name or flow.graph.name, config
        )
        if not idle:  # who waits for Spark only to hear that there is nothing to do?
            starter.start()
        interrupts = stack.enter_context(interrupts_counted())
        job = begin(flow, options, view)
        return _exit_code(follow(job, view, interrupts), interrupts)


def begin(flow: Dataflow, options: RunOptions, view: View) -> Job:
    """Start the job, or the fork, and show what it waits for."""
    name, checkpoint, restore = options.name, options.checkpoint, options.restore
    settings: dict[str, Any] = {**options.settings, **options.upgrade, "takeover": options.takeover}
    with _said_by_the_lease(view):
        if options.fork:
            return flow.fork(restore, name=name or "", checkpoint=checkpoint, follow=options.follow, **settings)
        claim = "claim" if options.claim else "no_claim"
        return flow.start(checkpoint=checkpoint, restore=restore, claim=claim, name=name, **settings)


@dataclass
class SparkStarter:
    """Starts Spark when it is first wanted: by the user's function, which takes a session, or for the job."""

    program: Program
    options: RunOptions
    view: View
    parallelism: int
    _context: Any = None

    def start(self) -> None:
        """Start Spark if it does not run; the program may have done so, or have stopped what it was given."""
        self._context = active_context()
        if self._context is None:
            master = self.options.master
            self.view.preparing("starting Spark" + (f" on {master}" if master else ""))
            with nullcontext() if self.options.debug else spark_output(self.view.note):
                name = f"cutwater {self.program.path.name}"
                self._context = start_context(self.parallelism, master=master, name=name)
        ship_by_value(self.program.path.parent, self.program.module)

    def session(self) -> Any:
        """A session, which a function of the user's may take."""
        self.start()
        return session()

    def stop(self) -> None:
        """End Spark, if the job or the program wanted it."""
        if self._context is not None:
            self._context.stop()


@contextmanager
def _said_by_the_lease(view: View) -> Generator[None]:
    """While another driver is waited for, the view says so: nobody else listens to our loggers here."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: view.note(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(LEASE_LOGGER)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


class Interrupts:
    """Signals that came so far; the handler only counts."""

    def __init__(self) -> None:
        self.count = 0
        self.number = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        self.number = number


@contextmanager
def interrupts_counted() -> Generator[Interrupts]:
    """Ctrl-C and SIGTERM are counted.  Spark's own handler would kill all its jobs at the first one."""
    interrupts = Interrupts()
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(s, interrupts) for s in signals]
    try:
        yield interrupts
    finally:
        for s, handler in zip(signals, before, strict=True):
            signal.signal(s, handler)


def follow(job: Job, view: View, interrupts: Interrupts) -> JobStatus:
    """Show a job until it ends.  The first interrupt stops it with a last checkpoint, the second cancels it.

    Raises:
        CutwaterError: the job failed.
    """
    handled = 0
    try:
        while True:
            ended = job.await_termination(_REFRESH_S)
            view.update(job.status)
            if ended:
                return job.status
            if handled < min(interrupts.count, 2):
                handled += 1
                action, text = (job.stop, _STOPPING) if handled == 1 else (job.cancel, _CANCELLING)
                view.hint(text)
                # It blocks until the job has ended, and the display goes on meanwhile.
                threading.Thread(target=action, name="cutwater-interrupt", daemon=True).start()
    finally:
        view.update(job.status)


def _exit_code(status: JobStatus, interrupts: Interrupts) -> int:
    if interrupts.count:
        return 128 + interrupts.number
    return JobCancelledError.exit_code if status.outcome == "cancelled" else 0


@contextmanager
def spark_output(show: Callable[[str], None]) -> Generator[None]:
    """Takes the standard error that a Spark session finds when it starts: processes started inside write it to us.

    On this machine that is also where the output of the workers ends: what users print in their functions.

    Args:
        show: called from a thread with every line that is not blank; it must not write to file descriptor 2, which is
            ours meanwhile.
    """

    def pass_on() -> None:
        with open(reader, encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if line.strip():
                    show(line.rstrip())

    reader, writer = os.pipe()
    own = os.dup(2)
    threading.Thread(target=pass_on, name="cutwater-spark-output", daemon=True).start()
    os.dup2(writer, 2)
    os.close(writer)
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)


_HINTS = {
    "different": "What a function keeps outside its state, or takes from a clock or from chance, is another after a "
    "restore. The outputs are in {folder}.",
    "unsteady": "Rows of several sources or subtasks meet in any order. Try --ignore COLUMN for what depends on it, "
    "--digits 9 for sums of floating point numbers, or --parallelism 1.",
    "void": "Give the job more rows, or fewer faults.",
}
_SAID = {
    "different": "the results with and without faults differ",
    "unsteady": "the results of two runs without faults differ, so nothing can be said of faults",
    "void": "fewer faults hit than were wanted",
}


class ChaosFailedError(CutwaterError):
    """The results differ, or nothing can be said; the report went to standard output."""

    exit_code = 1


def run_trial(options: RunOptions, given: dict[str, Any], view: View) -> None:
    """Try the dataflow of a file, and print the report.

    Args:
        given: ``kills``, ``faults``, ``seed``, ``digits``, ``ignore``, ``out``, ``as_json``.

    Raises:
        ChaosFailedError: the results differ, or too few faults hit.
        CutwaterError: the file or a setting is wrong, or the job failed.
    """
    from cutwater.chaos.trial import Trial

    with ExitStack() as stack:
        stack.callback(view.close)
        program = load_program(options.target)
        starter = SparkStarter(program, options, view, make_config(options.settings).parallelism)
        flow = program.dataflow(starter.session)
        flow.validate()
        trial = Trial(
            flow.graph,
            kinds=[kind.strip() for kind in given["faults"].split(",")],
            count=given["kills"],
            seed=given["seed"],
            digits=given["digits"],
            ignore=given["ignore"],
            settings=options.settings,
            folder=given["out"],
            told=view.note,
        )
        starter.parallelism = trial.parallelism
        stack.callback(starter.stop)
        report = trial.run(starter.session())
    _show(report, given["as_json"])
    if report.verdict != "same":
        raise ChaosFailedError(_SAID[report.verdict], hint=_HINTS[report.verdict].format(folder=report.folder))


def _show(report: Report, as_json: bool) -> None:
    if as_json:
        body = {"event": "report", "verdict": report.verdict, **msgspec.to_builtins(report)}
        click.echo(json.dumps(body))
        return
    for line in report.lines:
        click.echo(line)

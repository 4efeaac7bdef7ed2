"""Progress of ``Dataflow.run`` in a plain script, on standard error; standard output is the user's."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cutwater.errors import ConfigError
from cutwater.runtime.status.progress import phase_text, status_line, summary_line
from cutwater.runtime.status.status import JobStatus

if TYPE_CHECKING:
    from cutwater.api.jobs.job import Job

PROGRESS_LOGGER = "cutwater.progress"
PROGRESS_VARIABLE = "CUTWATER_PROGRESS"
_LOOK_S = 0.2
_PERIOD_S = 10.0
"""Between two lines where there is no terminal."""
_SWITCH = {"": True, "on": True, "1": True, "off": False, "0": False}


@contextmanager
def shown(progress: bool | None) -> Generator[Callable[[Job], None]]:
    """Gives a function that waits for a job's end, and shows how far it is.

    Args:
        progress: whether to; ``None``: as the environment says.

    Raises:
        ConfigError: the environment says something else than on or off.
    """
    view = _view() if _wanted(progress) else None

    def follow(job: Job) -> None:
        if view is None:
            job.await_termination()
            return
        try:
            while not job.await_termination(_LOOK_S):
                view.update(job.status)
        finally:
            view.update(job.status)

    try:
        yield follow
    finally:
        if view is not None:
            view.close()


def _wanted(progress: bool | None) -> bool:
    if progress is not None:
        return progress
    said = os.environ.get(PROGRESS_VARIABLE, "").strip().lower()
    if said not in _SWITCH:
        raise ConfigError(f"{PROGRESS_VARIABLE}={said!r} is unknown", hint="Set it to on or off.")
    return _SWITCH[said]


def _view() -> LineProgress | LoggedProgress:
    console = Console(stderr=True, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        return LineProgress(console)
    return LoggedProgress()


class LineProgress:
    """One line of a terminal, drawn anew; in the end, how the job ended.

    What the program prints meanwhile comes out above the line if it goes to the same terminal, and elsewhere untouched.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began_s = time.monotonic()
        self._status: JobStatus | None = None
        both = sys.stdout.isatty()
        self._live = Live(
            console=console, refresh_per_second=5, transient=True, redirect_stdout=both, redirect_stderr=True
        )
        self._show("starting")

    def update(self, status: JobStatus) -> None:
        self._status = status
        runs = status.phase in ("running", "draining")
        text = status_line(status, int(time.time() * 1000))
        self._show(f"{status.name}  {phase_text(status)}  {text}" if runs else f"{status.name}  {text}")

    def _show(self, text: str) -> None:
        self._live.update(Text(text, "dim", no_wrap=True, overflow="ellipsis"))
        if not self._live.is_started:
            self._live.start()

    def close(self) -> None:
        self._live.stop()
        if self._status is not None:
            line = summary_line(self._status, time.monotonic() - self._began_s)
            self._console.print(Text(f"{self._status.name}  {line}"))


class LoggedProgress:
    """A line every so often, and one in the end: by the logger if anybody listens to it, else on standard error."""

    def __init__(self) -> None:
        self._began_s = self._told_s = time.monotonic()
        self._status: JobStatus | None = None
        self._logger = logging.getLogger(PROGRESS_LOGGER)

    def update(self, status: JobStatus) -> None:
        self._status = status
        now_s = time.monotonic()
        if status.phase != "ended" and now_s - self._told_s >= _PERIOD_S:
            self._told_s = now_s
            phase = f"{status.phase}, " if status.phase in ("running", "draining") else ""
            self._write(f"{status.name}: {phase}{status_line(status, int(time.time() * 1000))}")

    def close(self) -> None:
        if self._status is not None:
            self._write(f"{self._status.name}: {summary_line(self._status, time.monotonic() - self._began_s)}")

    def _write(self, text: str) -> None:
        if self._logger.hasHandlers():
            self._logger.info("%s", text)
        else:
            sys.stderr.write(f"{time.strftime('%H:%M:%S')}  {text}\n")
            sys.stderr.flush()

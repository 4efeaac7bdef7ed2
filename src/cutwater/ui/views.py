"""Where progress goes: a live display on a terminal, lines in a log, or one JSON object per line."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from datetime import datetime
from typing import IO, Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from cutwater.runtime.status.progress import (
    Event,
    EventKind,
    events,
    json_event,
    json_status,
    status_line,
    summary_line,
)
from cutwater.runtime.status.status import JobStatus
from cutwater.ui.panel import panel

_STYLES: dict[EventKind, str] = {"failure": "red", "warning": "yellow", "checkpoint_failed": "yellow"}


class View(Protocol):
    """Shows a job; called with every new state.  Its times count from the first one."""

    def preparing(self, text: str) -> None:
        """What takes a while before the job runs."""
        ...

    def note(self, text: str) -> None:
        """A line that is not about the job's state, for example what a program printed.  From any thread."""
        ...

    def update(self, status: JobStatus) -> None:
        """The job's newest state."""
        ...

    def hint(self, text: str) -> None:
        """What the user can do now."""
        ...

    def close(self) -> None:
        """The job has ended (or never began)."""
        ...


class PlainView:
    """Lines for a log: at every event, and every few seconds how far it is.

    Args:
        out: where to, line by line.
        period_s: between two lines of state.
        debug: show the workers' log lines too.
    """

    def __init__(self, out: IO[str], *, period_s: float = 5.0, debug: bool = False) -> None:
        self._out, self._period_s, self._debug = out, period_s, debug
        self._before: JobStatus | None = None
        self._began_s = self._told_s = time.monotonic()

    def preparing(self, text: str) -> None:
        self._write(text)

    def note(self, text: str) -> None:
        self._write(text)

    def update(self, status: JobStatus) -> None:
        now_s = time.monotonic()
        if self._before is None:
            self._began_s = self._told_s = now_s
        before, self._before = self._before, status
        for event in events(before, status):
            if self._is_told(event, status):
                self._write(f"{status.name}  {event.text}")
        if status.phase == "ended":
            return
        if now_s - self._told_s >= self._period_s:
            self._told_s = now_s
            self._write(f"{status.name}  {status_line(status, int(time.time() * 1000))}")

    def _is_told(self, event: Event, status: JobStatus) -> bool:
        if event.kind == "checkpoint":  # of the others the periodic line tells
            return status.checkpoints.completed <= 1
        return event.kind not in ("log", "ended") or (event.kind == "log" and self._debug)

    def hint(self, text: str) -> None:
        self._write(text)

    def close(self) -> None:
        if self._before is not None:
            self._write(f"{self._before.name}  {summary_line(self._before, time.monotonic() - self._began_s)}")

    def _write(self, text: str) -> None:
        self._out.write(f"{datetime.now():%H:%M:%S}  {text}\n")
        self._out.flush()


class JsonView:
    """One JSON object per line: every event, and the whole state every few moments.

    Args:
        out: where to.
        period_s: between two states.
    """

    def __init__(self, out: IO[str], *, period_s: float = 1.0) -> None:
        self._out, self._period_s = out, period_s
        self._before: JobStatus | None = None
        self._told_s = -math.inf

    def preparing(self, text: str) -> None:
        self.note(text)

    def note(self, text: str) -> None:
        self._write({"event": "note", "time_ms": _now_ms(), "text": text})

    def update(self, status: JobStatus) -> None:
        before, self._before = self._before, status
        for event in events(before, status):
            self._write(json_event(event, status, _now_ms()))
        now_s = time.monotonic()
        if now_s - self._told_s >= self._period_s or status.phase == "ended":
            self._told_s = now_s
            self._write(json_status(status, _now_ms()))

    def hint(self, text: str) -> None:
        self.note(text)

    def close(self) -> None:
        self._out.flush()

    def _write(self, body: dict[str, object]) -> None:
        self._out.write(json.dumps(body) + "\n")
        self._out.flush()


class LiveView:
    """A display that is drawn anew in place; events stay above it.

    Args:
        console: of the terminal.
        debug: show the workers' log lines too.
    """

    def __init__(self, console: Console, *, debug: bool = False) -> None:
        self._console, self._debug = console, debug
        self._before: JobStatus | None = None
        self._began_s = time.monotonic()
        self._rates: deque[float] = deque(maxlen=24)
        self._rated_s = 0.0
        self._hint = "Ctrl-C: last checkpoint, then stop"
        both = sys.stdout.isatty()  # else what the job prints belongs into a file, and must not come out here
        self._live = Live(console=console, refresh_per_second=5, transient=True, redirect_stdout=both)

    def preparing(self, text: str) -> None:
        self._show(Spinner("dots", Text(f" {text}", "dim"), style="cyan"))

    def note(self, text: str) -> None:
        self._console.print(Text(text, "dim"))

    def update(self, status: JobStatus) -> None:
        now_s = time.monotonic()
        if self._before is None:
            self._began_s = now_s
        before, self._before = self._before, status
        for event in events(before, status):
            if event.kind not in ("checkpoint", "ended") and (event.kind != "log" or self._debug):
                stamp = Text(f"{datetime.now():%H:%M:%S}  ", "dim")
                self._console.print(stamp.append(event.text, _STYLES.get(event.kind, "default")))
        if status.rows_per_second and status.phase == "running" and now_s - self._rated_s >= 1.0:
            self._rated_s = now_s
            self._rates.append(status.rows_per_second)
        if status.phase != "ended":
            self._show(panel(status, now_s - self._began_s, _now_ms(), list(self._rates), self._hint))

    def _show(self, what: RenderableType) -> None:
        self._live.update(what)
        if not self._live.is_started:
            self._live.start()

    def hint(self, text: str) -> None:
        self._hint = text

    def close(self) -> None:
        self._live.stop()
        if self._before is not None:
            status = self._before
            mark = {"finished": ("✓ ", "green"), "failed": ("✗ ", "red")}.get(status.outcome, ("• ", "yellow"))
            line = summary_line(status, time.monotonic() - self._began_s)
            self._console.print(Text.assemble(mark, (status.name, "bold"), " ", line))


def _now_ms() -> int:
    return int(time.time() * 1000)

"""Views of a job's progress: a live display on a terminal, lines in a log, or one JSON object per line."""

from __future__ import annotations

import json
import math
import sys
import time
from collections import deque
from collections.abc import Sequence
from datetime import datetime
from typing import IO, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from cutwater.data.text import clock, count, milliseconds, plural, rate, size
from cutwater.runtime.status.progress import (
    Event,
    EventKind,
    events,
    json_event,
    json_status,
    lag_text,
    phase_text,
    status_line,
    summary_line,
    waiting_text,
)
from cutwater.runtime.status.status import JobStatus, WorkerStatus

_STYLES: dict[EventKind, str] = {"failure": "red", "warning": "yellow", "checkpoint_failed": "yellow"}


class View(Protocol):
    """Shows a job; called with every new state.  Its times count from the first one."""

    def preparing(self, text: str) -> None:
        """Work that takes a while before the job runs."""
        ...

    def note(self, text: str) -> None:
        """A line that is not about the job's state, for example what a program printed.  From any thread."""
        ...

    def update(self, status: JobStatus) -> None:
        """The job's newest state."""
        ...

    def hint(self, text: str) -> None:
        """Advice on what the user can do now."""
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


_BARS = "▁▂▃▄▅▆▇█"
_PHASE_STYLES = {"running": "green", "draining": "green", "restarting": "yellow", "ending": "yellow", "ended": "dim"}
_STEPS_SHOWN_MAX = 12
_WORKERS_SHOWN_MAX = 6
_BLOCKED_SHOWN_FROM = 0.05


def panel(
    status: JobStatus, elapsed_s: float, now_ms: int, rates: Sequence[float] = (), hint: str = ""
) -> RenderableType:
    """All that is worth knowing of a job now, for a terminal of 80 columns or more.

    Args:
        status: the job's state.
        elapsed_s: since the job was started here.
        now_ms: wall clock, milliseconds since the epoch.
        rates: rows per second at the last looks, oldest first.
        hint: what the user can do now, shown dim below.
    """
    phase = phase_text(status)
    head = Text.assemble((status.name, "bold"), "  ", (phase, _PHASE_STYLES.get(status.phase, "cyan")))
    head.append(f"  {clock(elapsed_s)}", "dim")
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", width=11)
    facts.add_column(no_wrap=True, overflow="ellipsis")
    for name, text in _facts(status, now_ms, rates):
        facts.add_row(name, text)
    parts: list[RenderableType] = [head, facts]
    if status.steps:
        parts += [Text(), _steps(status)]
    if hint:
        parts += [Text(), Text(hint, "dim")]
    return Group(*parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last values as bars, scaled to the largest.

    >>> sparkline([0, 1, 2, 4], 4)
    '▁▂▄█'
    """
    shown = values[-width:]
    top = max(shown, default=0.0)
    return "".join(_BARS[min(7, int(v / top * 7.999))] if top > 0 else _BARS[0] for v in shown)


def _facts(status: JobStatus, now_ms: int, rates: Sequence[float]) -> list[tuple[str, Text]]:
    c = status.checkpoints
    since = f" since checkpoint {c.restored_id}" if c.restored_id else ""
    rows = Text(f"{count(status.rows_read)}{since}   {rate(status.rows_per_second)}   ")
    rows.append(sparkline(rates, 24), "cyan")
    facts = [("rows", rows)]
    if lag := lag_text(status, now_ms):
        name, _, value = lag.rpartition("lag ") if lag.startswith("lag") else ("", "", lag.removeprefix("event time "))
        facts.append(("lag" if lag.startswith("lag") else "event time", Text(name + value)))
    facts.append(("checkpoint", _checkpoint(status)))
    facts.append(("workers", _workers(status)))
    if status.waiting is not None:
        facts += [
            ("" if i else "waits", Text(part, "yellow")) for i, part in enumerate(status.waiting.text.split("; "))
        ]
    if status.restarts:
        facts.append(("restarts", _restarts(status)))
    return facts


def _checkpoint(status: JobStatus) -> Text:
    c = status.checkpoints
    if not c.last_completed_id:
        return Text("none yet", "dim")
    text = Text(f"{c.last_completed_id}   {milliseconds(c.last_duration_ms)}   {size(c.last_size_bytes)}")
    text.append(f"   {count(c.completed)} completed", "dim")
    if c.failed:
        text.append(f"   {c.failed} failed", "yellow")
    if waiting := waiting_text(status):
        text.append(f"   {waiting}", "yellow")
    return text


def _workers(status: JobStatus) -> Text:
    here = len(status.workers)
    text = Text(f"{here} of {status.parallelism}", "" if here == status.parallelism else "yellow")
    for worker in status.workers[:_WORKERS_SHOWN_MAX]:
        text.append(f"   {_load(worker)}", "dim")
    if here > _WORKERS_SHOWN_MAX:
        text.append(" …", "dim")
    return text


def _load(worker: WorkerStatus) -> str:
    waits = f", {worker.backpressured:.0%} blocked" if worker.backpressured >= _BLOCKED_SHOWN_FROM else ""
    return f"{worker.slot}: {worker.busy:.0%} busy{waits}"


def _restarts(status: JobStatus) -> Text:
    text = Text(str(status.restarts), "yellow")
    if status.failures:
        last = status.failures[-1]
        took = None if last.running_ms is None else milliseconds(last.running_ms - last.failed_ms)
        text.append(f"   last recovered in {took}" if took else "   recovering", "dim")
    return text


def _steps(status: JobStatus) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("step", width=20, no_wrap=True, overflow="ellipsis")
    table.add_column("rows in", justify="right", width=15)
    table.add_column("rows out", justify="right", width=15)
    table.add_column("busy", justify="right", width=4)
    table.add_column("", style="yellow", no_wrap=True, overflow="ellipsis")
    for id, step in list(status.steps.items())[:_STEPS_SHOWN_MAX]:
        notes = [f"{step.backpressured:.0%} blocked"] if step.backpressured >= _BLOCKED_SHOWN_FROM else []
        notes += [f"{count(n)} {name.replace('_', ' ')}" for name, n in step.counters.items() if n]
        rows_in = "" if step.rows_out and not step.rows_in else count(step.rows_in)  # a source has no input
        rows_out = "" if step.rows_in and not step.rows_out else count(step.rows_out)
        busy = f"{step.busy:.0%}" if step.subtasks else ""
        table.add_row(id, rows_in, rows_out, busy, ", ".join(notes))
    hidden = len(status.steps) - _STEPS_SHOWN_MAX
    if hidden > 0:
        table.add_row(Text(f"… {plural(hidden, 'step')} more", "dim"), *[""] * 4)
    return table

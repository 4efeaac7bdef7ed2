"""A job's state as a shell, ``print`` and a notebook show it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from html import escape

from cutwater.data.text import count, event_time, lines_of_table, milliseconds, plural, rate
from cutwater.runtime.failures import first_line
from cutwater.runtime.status.progress import last_checkpoint, phase_text, status_line, waiting_text
from cutwater.runtime.status.status import JobStatus, failure_text

_SHOWN_MAX = 5
"""Of warnings, failures and workers: the newest."""
_STEPS_HEAD = ("step", "rows in", "rows out", "")


def as_line(status: JobStatus) -> str:
    """All in one short line.

    >>> as_line(JobStatus(name="delays", uid="", phase="running", rows_read=12, rows_per_second=1.5))
    "'delays': running, 12 rows, 1.5/s"
    """
    if status.phase == "ended":
        reason = f": {first_line(status.reason)}" if status.reason and status.outcome != "finished" else ""
        return f"{status.name!r}: {status.outcome}{reason}, {count(status.rows_read)} rows"
    runs = status.phase in ("running", "draining")
    return f"{status.name!r}: {f'{status.phase}, ' if runs else ''}{status_line(status, int(time.time() * 1000))}"


def as_text(status: JobStatus) -> str:
    """A job's state on a page."""
    lines = [f"job {status.name}"]
    lines += [f"  {name:<11} {text}" for name, text in _facts(status)]
    if status.steps:
        lines += ["", *(f"  {line}" for line in lines_of_table(_STEPS_HEAD, list(_steps(status)), right=(1, 2)))]
    lines += [f"  {kind}: {text}" for kind, text in _notes(status)]
    return "\n".join(lines)


def as_html(status: JobStatus) -> str:
    """The same for a notebook; every text is escaped."""
    facts = "".join(f"<tr><th>{escape(name)}</th><td>{escape(text)}</td></tr>" for name, text in _facts(status))
    parts = [f"<b>job {escape(status.name)}</b><table>{facts}</table>"]
    if status.steps:
        head = "".join(f"<th>{escape(name)}</th>" for name in _STEPS_HEAD)
        rows = ("".join(f"<td>{escape(cell)}</td>" for cell in row) for row in _steps(status))
        parts.append(f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>")
    if notes := list(_notes(status)):
        parts.append(f"<ul>{''.join(f'<li>{escape(kind)}: {escape(text)}</li>' for kind, text in notes)}</ul>")
    return f"<div>{''.join(parts)}</div>"


def _facts(status: JobStatus) -> Iterator[tuple[str, str]]:
    c = status.checkpoints
    yield "state", _state(status)
    since = f" since checkpoint {c.restored_id}" if c.restored_id else ""
    yield "rows read", f"{count(status.rows_read)}{since}, {rate(status.rows_per_second)}"
    if status.watermark_ms is not None:
        yield "event time", event_time(status.watermark_ms)
    if c.last_completed_id:
        failed = f", {c.failed} failed" if c.failed else ""
        yield "checkpoint", f"{last_checkpoint(status).removeprefix('checkpoint ')}, {c.completed} completed{failed}"
    if waiting := waiting_text(status):
        yield "", waiting
    if status.phase != "ended":
        yield "workers", _workers(status)
    if status.checkpoint_dir:
        yield "folder", status.checkpoint_dir


def _state(status: JobStatus) -> str:
    if status.phase == "ended":
        return f"{status.outcome}{': ' if status.reason else ''}{first_line(status.reason) if status.reason else ''}"
    restarts = f", {plural(status.restarts, 'restart')}" if status.restarts else ""
    return f"{phase_text(status)}, attempt {status.attempt}{restarts}"


def _workers(status: JobStatus) -> str:
    here = [f"{w.slot}: {w.host}, process {w.pid}, {w.busy:.0%} busy" for w in status.workers[:_SHOWN_MAX]]
    more = [f"{len(status.workers) - _SHOWN_MAX} more"] if len(status.workers) > _SHOWN_MAX else []
    return "; ".join([f"{len(status.workers)} of {status.parallelism}", *here, *more])


def _steps(status: JobStatus) -> Iterator[tuple[str, str, str, str]]:
    for id, step in status.steps.items():
        notes = ", ".join(f"{count(n)} {name.replace('_', ' ')}" for name, n in step.counters.items() if n)
        yield id, count(step.rows_in), count(step.rows_out), notes


def _notes(status: JobStatus) -> Iterator[tuple[str, str]]:
    for failure in status.failures[-_SHOWN_MAX:]:
        took = "" if failure.running_ms is None else milliseconds(failure.running_ms - failure.failed_ms)
        yield "failure", f"{failure_text(failure)}{f' (recovered in {took})' if took else ''}"
    for warning in status.warnings[-_SHOWN_MAX:]:
        yield "warning", first_line(warning)

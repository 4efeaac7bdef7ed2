"""A job's successive states for the person who watches, as pure functions: events, lines and pages.

Every view (terminal, log, JSON, notebook) renders what is made here out of ``JobStatus`` values.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Literal

import msgspec

from cutwater.data.text import count, event_time, lines_of_table, milliseconds, plural, rate, size
from cutwater.runtime.failures import first_line
from cutwater.runtime.status.status import JobStatus, RestartEvent, failure_text

_HELD_UP_FROM = 0.5
"""Share of the time."""
EventKind = Literal["started", "checkpoint", "checkpoint_failed", "failure", "recovered", "warning", "log", "ended"]

_LAG_SHOWN_BELOW_MS = 24 * 3_600_000
"""A watermark further back is that of old data: its date says more than the distance to now."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened between two states of a job."""

    kind: EventKind
    text: str


def events(before: JobStatus | None, now: JobStatus) -> list[Event]:
    """Events between one state and the next, in the order in which they are told.

    >>> before = JobStatus(name="delays", uid="", phase="deploying")
    >>> [e.text for e in events(before, msgspec.structs.replace(before, phase="running", attempt=1, parallelism=2))]
    ['running on 2 workers, attempt 1']
    """
    old = before or JobStatus(name=now.name, uid=now.uid, phase="forming")
    return [*_warnings(old, now), *_failures(old, now), *_start(old, now), *_checkpoints(old, now), *_end(old, now)]


def _start(old: JobStatus, now: JobStatus) -> Iterator[Event]:
    if not _has_run(old) and _has_run(now) and not now.failures:
        restored = now.checkpoints.restored_id
        origin = f", from checkpoint {restored}" if restored else ""
        yield Event("started", f"running on {plural(now.parallelism, 'worker')}, attempt {now.attempt}{origin}")


def _has_run(status: JobStatus) -> bool:
    return status.phase in ("running", "draining") or status.checkpoints.completed > 0


def _checkpoints(old: JobStatus, now: JobStatus) -> Iterator[Event]:
    failed = now.checkpoints.failed - old.checkpoints.failed
    if failed > 0:
        yield Event("checkpoint_failed", f"{plural(failed, 'checkpoint')} failed ({now.checkpoints.failed} in all)")
    if now.checkpoints.last_completed_id > old.checkpoints.last_completed_id:
        yield Event("checkpoint", f"{last_checkpoint(now)} completed")


def _failures(old: JobStatus, now: JobStatus) -> Iterator[Event]:
    known = {_identity(f): f for f in old.failures}
    for failure in now.failures:
        seen = known.get(_identity(failure))
        if seen is None:
            yield Event("failure", failure_text(failure))
        if failure.running_ms is not None and (seen is None or seen.running_ms is None):
            took = milliseconds(failure.running_ms - failure.failed_ms)
            origin = f"from checkpoint {failure.restored_id}" if failure.restored_id else "from the beginning"
            yield Event("recovered", f"recovered in {took} {origin}")


def _identity(failure: RestartEvent) -> tuple[int, float]:
    return failure.attempt, failure.failed_ms


def _warnings(old: JobStatus, now: JobStatus) -> Iterator[Event]:
    known = set(old.warnings)
    yield from (Event("warning", w) for w in now.warnings if w not in known)
    yield from (Event("log", line.rstrip()) for line in _appended(old.log, now.log))


def _appended(old: Sequence[str], now: Sequence[str]) -> Sequence[str]:
    """Items added to a list that also loses its oldest ones.

    >>> _appended(["a", "b", "c"], ["b", "c", "d"]), _appended([], ["x"]), _appended(["x"], ["x"])
    (['d'], ['x'], [])
    """
    for kept in range(min(len(old), len(now)), 0, -1):
        if old[len(old) - kept :] == now[:kept]:
            return now[kept:]
    return now


def _end(old: JobStatus, now: JobStatus) -> Iterator[Event]:
    if now.phase == "ended" and old.phase != "ended":
        reason = f": {first_line(now.reason)}" if now.reason and now.outcome != "finished" else ""
        yield Event("ended", f"{now.outcome}{reason}")


def status_line(status: JobStatus, now_ms: int) -> str:
    """The state of a job in one line, without its name.

    Args:
        status: the state.
        now_ms: wall clock, milliseconds since the epoch.
    """
    runs = status.phase in ("running", "draining")
    lacks = [status.waiting.text] if status.waiting is not None else []
    parts = [_rows(status), rate(status.rows_per_second), *lacks] if runs else lacks or [phase_text(status)]
    lag = lag_text(status, now_ms)
    parts += [lag] if lag else []
    if status.checkpoints.last_completed_id:
        parts.append(last_checkpoint(status))
    if status.checkpoints.failed:
        parts.append(f"{status.checkpoints.failed} failed")
    if waiting := waiting_text(status):
        parts.append(waiting)
    if runs and (held := bottleneck_text(status)):
        parts.append(held)
    if status.restarts:
        parts.append(plural(status.restarts, "restart"))
    return ", ".join(parts)


def summary_line(status: JobStatus, elapsed_s: float) -> str:
    """The last line: how it ended, and what it took."""
    parts = [_rows(status), f"{plural(status.checkpoints.completed, 'checkpoint')}"]
    if status.restarts:
        parts.append(plural(status.restarts, "restart"))
    return f"{status.outcome or status.phase} after {milliseconds(elapsed_s * 1000)}: {', '.join(parts)}"


def phase_text(status: JobStatus) -> str:
    """
    >>> phase_text(JobStatus(name="", uid="", phase="forming"))
    'waiting for workers'
    """
    return {"forming": "waiting for workers", "deploying": "restoring"}.get(status.phase, status.phase)


def waiting_text(status: JobStatus) -> str:
    """Why no checkpoint begins, if workers are being replaced.

    >>> from cutwater.runtime.status.status import CheckpointStatus
    >>> checkpoints = CheckpointStatus(waits_for=[1, 2])
    >>> waiting_text(JobStatus(name="", uid="", phase="running", checkpoints=checkpoints))
    'checkpoints wait for workers 1, 2'
    """
    slots = status.checkpoints.waits_for
    if not slots or status.phase != "running":
        return ""
    return f"checkpoints wait for worker{'s' if len(slots) > 1 else ''} {', '.join(map(str, slots))}"


def bottleneck_text(status: JobStatus) -> str:
    """The step that others wait for, if some are held up most of the time.

    >>> from cutwater.runtime.status.status import StepStatus
    >>> steps = {"read": StepStatus(busy=0.01, backpressured=0.98), "score": StepStatus(busy=0.99)}
    >>> bottleneck_text(JobStatus(name="", uid="", phase="running", steps=steps))
    "held up by step 'score' (99% busy)"
    """
    if max((step.backpressured for step in status.steps.values()), default=0.0) < _HELD_UP_FROM:
        return ""
    name, busiest = max(status.steps.items(), key=lambda item: item[1].busy)
    return f"held up by step {name!r} ({busiest.busy:.0%} busy)" if busiest.busy >= _HELD_UP_FROM else ""


def lag_text(status: JobStatus, now_ms: int) -> str:
    """Delay of the sources' event time against the wall clock; of old data, the event time itself.

    >>> lag_text(JobStatus(name="", uid="", phase="running", watermark_ms=1_000), 3_500)
    'lag 2.5 s'
    >>> lag_text(JobStatus(name="", uid="", phase="running", watermark_ms=1_000), 90_000_000_000)
    'event time 1970-01-01 00:00:01'
    """
    if status.watermark_ms is None:
        return ""
    lag_ms = now_ms - status.watermark_ms
    if 0 <= lag_ms < _LAG_SHOWN_BELOW_MS:
        return f"lag {milliseconds(lag_ms)}"
    return f"event time {event_time(status.watermark_ms)}"


def json_status(status: JobStatus, now_ms: int) -> dict[str, Any]:
    """A state as one JSON object; ``event`` is "progress"."""
    body = msgspec.to_builtins(status)
    body.pop("log")
    return {"event": "progress", "time_ms": now_ms, **body}


def json_event(event: Event, status: JobStatus, now_ms: int) -> dict[str, Any]:
    """An event as one JSON object."""
    return {"event": event.kind, "time_ms": now_ms, "name": status.name, "attempt": status.attempt, "text": event.text}


def _rows(status: JobStatus) -> str:
    """Rows are counted anew after a restore."""
    restored = status.checkpoints.restored_id
    return f"{count(status.rows_read)} rows{f' since checkpoint {restored}' if restored else ''}"


def last_checkpoint(status: JobStatus) -> str:
    """The newest checkpoint, how long it took, and its size."""
    c = status.checkpoints
    return f"checkpoint {c.last_completed_id} ({milliseconds(c.last_duration_ms)}, {size(c.last_size_bytes)})"


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

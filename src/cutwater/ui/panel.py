"""The live display of a running job on a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from cutwater.data.text import clock, count, milliseconds, plural, rate, size
from cutwater.runtime.status.progress import lag_text, phase_text, waiting_text
from cutwater.runtime.status.status import JobStatus, WorkerStatus

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

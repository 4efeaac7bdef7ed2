"""The dry run of a restore as a page to read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from cutwater.data.text import lines_of_table, milliseconds, plural, size

if TYPE_CHECKING:
    from cutwater.api.jobs.restore_plan import ReadingTime, RestorePlan
    from cutwater.plan.restore_report import StepOutlook

_COLOURS = {"new": "green", "changed": "yellow", "dropped": "yellow", "orphaned": "red", "refused": "red"}


def render_restore_plan(plan: RestorePlan, *, colours: bool = False) -> str:
    """The plan as text."""
    return "\n".join(_lines(plan, colours)) + "\n"


def _lines(plan: RestorePlan, colours: bool) -> Iterator[str]:
    outlook = plan.outlook
    rescaled = plan.parallelism != plan.was_parallelism
    scale = f", parallelism {plan.was_parallelism} -> {plan.parallelism}" if rescaled else ""
    yield f"{plan.program} from checkpoint {plan.checkpoint_id} of {plan.snapshot}{scale}"
    if plan.foreign:
        yield f"  as a job of its own: what {plan.job} has written and not committed stays with {plan.job}"
    yield ""
    head = ["step", "kind", "", "subtasks", "keeps", "stored rows", "size"]
    table = lines_of_table(head, [_row(step) for step in outlook.steps], right=[5, 6])
    column = table[0].index("subtasks") if outlook.steps else 0
    yield f"  {table[0]}"
    for step, line in zip(outlook.steps, table[1:], strict=True):
        yield f"  {_coloured(line, step.verdict, column) if colours else line}"
        yield from (f"      {note}" for note in _notes(step))
    if outlook.edges:
        yield ""
        yield "  rows on their way"
        for edge in outlook.edges:
            yield f"    {edge.name}: {plural(edge.rows, 'row')}, {edge.reason or edge.verdict}"
    yield ""
    yield from (f"  {reason}" for reason in outlook.reasons)
    yield f"  {_reading(plan.reading)}"
    yield ""
    yield _conclusion(plan)


def _row(step: StepOutlook) -> list[str]:
    then, now = step.was_parallelism, step.parallelism
    subtasks = f"{then} -> {now}" if step.rescaled else str(now or then)
    amount = [f"{step.rows:,}", size(step.bytes)] if step.holds == "state" else ["", ""]
    return [step.id, step.kind, step.verdict, subtasks, step.holds or "-", *amount]


def _coloured(line: str, verdict: str, end: int) -> str:
    colour = _COLOURS.get(verdict)
    at = line.rfind(verdict, 0, end)
    return (
        line if colour is None else line[:at] + click.style(verdict, fg=colour, bold=True) + line[at + len(verdict) :]
    )


def _notes(step: StepOutlook) -> Iterator[str]:
    """Below the step's line: what changes, why not, what to do."""
    if step.was_id:
        yield f"was {step.was_id}"
    if step.verdict == "new":
        return
    for change in step.changes:
        yield str(change)
    if step.verdict == "gone":
        yield "not in the program; nothing is kept of it"
    if step.verdict == "dropped":
        yield "not in the program; dropped, as you say"
    for reason in step.reasons:
        yield f"NOT POSSIBLE: {reason}"
    if step.advice:
        yield f"-> {step.advice}"


def _reading(reading: ReadingTime) -> str:
    if reading.seconds is None or reading.bytes_per_s is None:
        return f"reading {size(reading.bytes)} takes next to no time; starting Spark and the workers comes on top"
    return (
        f"reading takes about {milliseconds(1000 * reading.seconds)}: {size(reading.bytes)}, once to verify, once to "
        f"load,\n  at {size(round(reading.bytes_per_s))}/s, as measured on {size(reading.sample_bytes)} of it just now "
        "(files in this machine's memory\n  read faster than from disk); starting Spark and the workers, and filling "
        "tables, comes on top"
    )


def _conclusion(plan: RestorePlan) -> str:
    if plan.ok:
        lost = ", without what is dropped" if plan.outlook.warnings else ""
        return f"{plan.program} can begin from this snapshot{lost}."
    return f"{plan.program} CANNOT begin from this snapshot: {plural(len(plan.outlook.all_reasons), 'reason')} above."

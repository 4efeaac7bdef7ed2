"""The dry run of a restore, and as a page to read: what would become of every step, and how long reading would take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click
import msgspec

from cutwater.data.text import lines_of_table, milliseconds, plural, size
from cutwater.plan.compatibility import RestoreReport, compare
from cutwater.plan.planner import HasGraph, make_plan
from cutwater.plan.upgrade import Upgrade
from cutwater.storage.reading import Snapshot, measure_read_rate, open_snapshot

if TYPE_CHECKING:
    from cutwater.plan.compatibility import StepReport
    from cutwater.storage.reading import SnapshotAddress

TIMES_READ = 2
"""The driver verifies every byte, then the workers load what is theirs."""


class ReadingTime(msgspec.Struct, frozen=True, kw_only=True):
    """Time for reading the snapshot; starting Spark and building tables come on top."""

    bytes: int
    """Of the snapshot's data."""
    sample_bytes: int
    """Read for this estimate, just now."""
    bytes_per_s: float | None
    """As measured on the sample; ``None`` if it was too small to tell."""

    @property
    def seconds(self) -> float | None:
        """``None`` if the snapshot is too small for an estimate: then it is next to nothing."""
        return None if self.bytes_per_s is None else TIMES_READ * self.bytes / self.bytes_per_s


class RestorePlan(msgspec.Struct, frozen=True, kw_only=True):
    """Forecast of a program that begins from a snapshot.

    ``print`` shows it as the command line does.
    """

    program: str
    snapshot: str
    job: str
    """That wrote the snapshot."""
    checkpoint_id: int
    parallelism: int
    was_parallelism: int
    outlook: RestoreReport
    reading: ReadingTime

    @property
    def ok(self) -> bool:
        """True if the program can begin from the snapshot."""
        return self.outlook.ok

    @property
    def foreign(self) -> bool:
        """True if another job would begin from it: the one that wrote it keeps its uncommitted rows."""
        return self.program != self.job

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for JSON."""
        made: dict[str, Any] = msgspec.to_builtins(self)
        report = made.pop("outlook")
        return {
            "ok": self.ok,
            "foreign": self.foreign,
            **made,
            **report,
            "reading": {**made["reading"], "seconds": self.reading.seconds},
            "reasons": self.outlook.all_reasons,
            "warnings": self.outlook.warnings,
        }

    def __str__(self) -> str:

        return render_restore_plan(self)


def plan_restore(
    flow: HasGraph,
    snapshot: str | SnapshotAddress,
    *,
    parallelism: int = 2,
    max_parallelism: int = 128,
    upgrade: Upgrade | None = None,
) -> RestorePlan:
    """Forecast of a dataflow that begins from the snapshot; see ``Dataflow.plan_restore``."""
    found: Snapshot = open_snapshot(snapshot)
    manifest = found.manifest
    plan = make_plan(flow, parallelism, max_parallelism)
    bound = compare(plan, manifest, upgrade or Upgrade(), foreign=plan.name != manifest.job)
    rate = measure_read_rate(found)
    return RestorePlan(
        program=plan.name,
        snapshot=str(snapshot),
        job=manifest.job,
        checkpoint_id=manifest.checkpoint_id,
        parallelism=plan.parallelism,
        was_parallelism=manifest.parallelism,
        outlook=bound.report,
        reading=ReadingTime(
            bytes=sum(e.length for e in manifest.entries), sample_bytes=rate.bytes, bytes_per_s=rate.bytes_per_s
        ),
    )


_COLOURS = {"new": "green", "changed": "yellow", "dropped": "yellow", "orphaned": "red", "refused": "red"}


def render_restore_plan(plan: RestorePlan, *, colours: bool = False) -> str:
    """The plan as text."""
    return "\n".join(_lines(plan, colours)) + "\n"


def _lines(plan: RestorePlan, colours: bool) -> Iterator[str]:
    report = plan.outlook
    rescaled = plan.parallelism != plan.was_parallelism
    scale = f", parallelism {plan.was_parallelism} -> {plan.parallelism}" if rescaled else ""
    yield f"{plan.program} from checkpoint {plan.checkpoint_id} of {plan.snapshot}{scale}"
    if plan.foreign:
        yield f"  as a job of its own: what {plan.job} has written and not committed stays with {plan.job}"
    yield ""
    head = ["step", "kind", "", "subtasks", "keeps", "stored rows", "size"]
    table = lines_of_table(head, [_row(step) for step in report.steps], right=[5, 6])
    column = table[0].index("subtasks") if report.steps else 0
    yield f"  {table[0]}"
    for step, line in zip(report.steps, table[1:], strict=True):
        yield f"  {_coloured(line, step.verdict, column) if colours else line}"
        yield from (f"      {note}" for note in _notes(step))
    if report.edges:
        yield ""
        yield "  rows on their way"
        for edge in report.edges:
            yield f"    {edge.name}: {plural(edge.rows, 'row')}, {edge.reason or edge.verdict}"
    yield ""
    yield from (f"  {reason}" for reason in report.reasons)
    yield f"  {_reading(plan.reading)}"
    yield ""
    if plan.ok:
        yield f"{plan.program} can begin from this snapshot{', without what is dropped' if report.warnings else ''}."
    else:
        yield f"{plan.program} CANNOT begin from this snapshot: {plural(len(report.all_reasons), 'reason')} above."


def _row(step: StepReport) -> list[str]:
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


def _notes(step: StepReport) -> Iterator[str]:
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

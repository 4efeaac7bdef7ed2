"""The commands ``diagram`` and ``check-trace``: a run's history as a picture, and judged."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cutwater.errors import ConfigError

if TYPE_CHECKING:
    from cutwater.trace.result import CheckResult

_TRACES = click.argument("traces", metavar="TRACE...", nargs=-1, required=True)
_AT_LEAST_ONCE = click.option(
    "--at-least-once", is_flag=True, help="Rows may be doubled: the run was made with that protocol."
)


@click.command()
@_TRACES
@click.option("--snapshot", type=int, metavar="N", help="Only what is around this snapshot.")
@click.option("--from", "first", type=int, metavar="N", help="Number of the first event (counted from 1).")
@click.option("--to", "last", type=int, metavar="N", help="Number of the last event.")
@click.option("--by-time", is_flag=True, help="Place events by their times, not one after the other.")
@click.option("--check", "judge", is_flag=True, help="Write the checker's verdict below.")
@_AT_LEAST_ONCE
@click.option("--output", "-o", metavar="FILE.svg", help="Where to write (default: standard output).")
def diagram(traces: tuple[str, ...], output: str | None, judge: bool, at_least_once: bool, **window: Any) -> None:
    """Draw a trace as a space-time diagram (SVG).

    Several files, or a directory of them, are parts of one run: those of its workers and attempts.
    """
    from cutwater.trace.checker import check
    from cutwater.trace.diagram import diagram as draw
    from cutwater.trace.parts import read_run

    trace = read_run(traces)
    notes = str(check(trace, at_least_once=at_least_once)).splitlines() if judge else []
    picture = draw(trace, notes=notes, **window)
    if output is None:
        click.echo(picture, nl=False)
        return
    try:
        Path(output).write_text(picture, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror}") from error


@click.command("check-trace")
@_TRACES
@click.option("--quick", is_flag=True, help="Without vector clocks, states and reorderings.")
@_AT_LEAST_ONCE
@click.option("--drained", is_flag=True, help="The run ended by itself: no row may be left in a channel.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def check_trace(traces: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Judge a trace by the rules of consistent snapshots.

    Says what is wrong, where, and exits with 1 if anything is.

    Several files, or a directory of them, are parts of one run: those of its workers and attempts.
    """
    from cutwater.trace.checker import check
    from cutwater.trace.parts import read_run

    result = check(read_run(traces), **options)
    click.echo(json.dumps(_as_json(result)) if as_json else _text(result))
    if not result.ok:
        sys.exit(1)


def _text(result: CheckResult) -> str:
    lines = [str(result)]
    for reordering in result.reorderings:
        when = (
            f"the run was in it after event {reordering.occurred_after}"
            if reordering.occurred
            else "the run never was in it"
        )
        lines.append(
            f"snapshot {reordering.snapshot}: an equivalent run leads through its state, {reordering.swaps} exchanges "
            f"of neighbours away; {when}"
        )
    return "\n".join(lines)


def _as_json(result: CheckResult) -> dict[str, Any]:
    return {
        "ok": result.ok,
        "events": result.events,
        "snapshots": result.snapshots,
        "restores": result.restores,
        "in_flight": result.in_flight,
        "violations": [
            {
                "kind": v.kind.value,
                "text": v.text,
                "snapshot": v.snapshot,
                "channel": v.channel,
                "process": v.process,
                "events": v.events,
            }
            for v in result.violations
        ],
        "reorderings": [
            {"snapshot": r.snapshot, "swaps": r.swaps, "occurred_after": r.occurred_after} for r in result.reorderings
        ],
    }

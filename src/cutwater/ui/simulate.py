"""The commands ``simulate``, ``explore``, ``diagram`` and ``check-trace``: the core under faults and under all
interleavings, and a run's trace as a picture or checked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from cutwater.errors import ConfigError, CutwaterError

if TYPE_CHECKING:
    from cutwater.sim.mutants.core import Mutant
    from cutwater.sim.schedules.schedule import Schedule
    from cutwater.sim.simulate import Report
    from cutwater.sim.world.oracle import Violation
    from cutwater.trace.result import CheckResult

_DEFAULT_SCHEDULES = 1000
_WORTH_A_PROCESS = 100
"""Schedules that take as long as a process takes to begin."""
_PROTOCOL = click.option(
    "--protocol", default="all", metavar="NAME|all", show_default=True, help="Which snapshot protocol."
)
_PLANT = click.option("--plant", default="", metavar="NAME", help="Plant a bug of this name, to see that it is found.")
_TRACES = click.argument("traces", metavar="TRACE...", nargs=-1, required=True)
_AT_LEAST_ONCE = click.option(
    "--at-least-once", is_flag=True, help="Rows may be doubled: the run was made with that protocol."
)


class SimulationFailedError(CutwaterError):
    """A schedule broke a promise; the script that shows it went to standard output."""

    exit_code = 1


@click.command()
@_PROTOCOL
@click.option("--world", default="all", metavar="NAME|all", show_default=True, help="Which small dataflow.")
@click.option("--schedules", type=int, metavar="N", help=f"How many (default: {_DEFAULT_SCHEDULES}; with --seed 1).")
@click.option("--seed", type=int, metavar="S", help="The first seed (default: 0).")
@click.option("--jobs", type=int, metavar="J", help="Processes (default: one for each core).")
@_PLANT
@click.option("--script", metavar="FILE", help="Play a script instead of seeds.")
@click.option("--diagram", metavar="FILE.svg", help="Draw the failing schedule, or the last one.")
@click.option("--trace", metavar="FILE", help="Write its trace.")
@click.option("--json", "as_json", is_flag=True, help="The report as JSON on standard output.")
def simulate(
    seed: int | None, schedules: int | None, script: str | None, as_json: bool, jobs: int | None, **given: Any
) -> None:
    """Run the protocol under simulated faults.

    Every schedule is one job, in one thread, whose network, disks, clocks and crashes come from its seed.  A failing
    one is made short and printed as a script.
    """
    from cutwater.sim.simulate import Simulation

    given |= {"as_json": as_json}
    if script is not None:
        _play_script(script, given)
        return
    first, count = seed or 0, schedules or (_DEFAULT_SCHEDULES if seed is None else 1)
    worlds, protocols = _chosen(given["world"], given["protocol"], given["plant"])
    simulation = Simulation(worlds, protocols, given["plant"])
    if jobs is None:
        jobs = min(len(os.sched_getaffinity(0)), count // _WORTH_A_PROCESS)
    if jobs > 1:
        report = _in_processes(first, count, jobs, given)
    else:
        report = simulation.run(range(first, first + count), told=_tell(count))
    _show(report, as_json)
    picked = report.failures[0].seed if report.failures else first + count - 1
    schedule = simulation.schedule(picked)
    if report.failures:
        schedule = _shrunk(schedule, str(report.failures[0].text), as_json)
    _keep(schedule, given)
    if report.failures:
        raise SimulationFailedError(
            f"{len(report.failures)} of {report.schedules} schedules broke a promise, the first is seed {picked}",
            hint="Keep the script above in tests/sim/scripts and play it with: cutwater simulate --script FILE.",
        )


def _chosen(world: str, protocol: str, plant: str) -> tuple[list[str] | None, list[str] | None]:
    """Names to run; a mutant runs where it can show, unless other names are given."""
    from cutwater.protocol.protocols import PROTOCOLS
    from cutwater.sim.schedules.graphs import RANDOM, dataflow

    if (mutant := _mutant(plant)) is not None:
        world = mutant.world if world == "all" else world
        protocol = mutant.protocol if protocol == "all" else protocol
    if world not in ("all", RANDOM):
        dataflow(world)
    if protocol != "all" and protocol not in PROTOCOLS:
        raise ConfigError(f"no protocol {protocol!r}", hint=f"There are: {', '.join(PROTOCOLS)}.")
    return (None if world == "all" else [world]), (None if protocol == "all" else [protocol])


def _mutant(name: str) -> Mutant | None:
    """The mistake to be put in; ``None`` without a name."""
    from cutwater.sim.simulate import MUTANTS

    if name and name not in MUTANTS:
        raise ConfigError(f"no planted bug {name!r}", hint=f"There are: {'; '.join(MUTANTS)}.")
    return MUTANTS[name] if name else None


def _tell(count: int) -> Any:
    """Progress on standard error, where it is a terminal."""

    def told(report: Report) -> None:
        if sys.stderr.isatty():
            text = f"\r{report.schedules} of {count} schedules, {len(report.failures)} failures"
            click.echo(f"{text}, {report.per_second:.0f} a second", err=True, nl=False)

    return told


def _in_processes(first: int, count: int, jobs: int, given: dict[str, Any]) -> Report:
    import msgspec

    from cutwater.sim.simulate import Report

    command = [sys.executable, "-c", "from cutwater.ui.cli import main; main()", "simulate", "--json", "--jobs", "1"]
    command += ["--protocol", given["protocol"], "--world", given["world"], "--plant", given["plant"]]
    shares = [count * (i + 1) // jobs - count * i // jobs for i in range(jobs)]
    children: list[subprocess.Popen[bytes]] = []
    for share in shares:
        if share:
            part = ["--seed", str(first), "--schedules", str(share)]
            children.append(subprocess.Popen([*command, *part], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL))
            first += share
    report = Report()
    for child in children:
        out, _ = child.communicate()
        if child.returncode not in (0, SimulationFailedError.exit_code) or not out:
            raise CutwaterError(f"a simulating process ended with code {child.returncode}", hint="Try --jobs 1.")
        report.add(msgspec.json.decode(out.splitlines()[0], type=Report))
        _tell(count)(report)
    return report


def _show(report: Report, as_json: bool) -> None:
    import msgspec

    if sys.stderr.isatty():
        click.echo("\r\033[K", err=True, nl=False)
    if as_json:
        click.echo(msgspec.json.encode(report).decode())
        return
    word = "schedule" if report.schedules == 1 else "schedules"
    click.echo(
        f"{report.schedules} {word}: {report.inconsistent} inconsistent cuts, {len(report.failures)} failures, "
        f"{report.void} void (no load, or no fault struck), {report.passed} passed"
    )
    reached, struck = sum(map(bool, report.walked.values())), sum(report.struck.values())
    click.echo(
        f"{report.recoveries} recoveries, {report.fallbacks} of them behind a completed checkpoint, "
        f"{report.checkpoints} checkpoints, {report.events} events"
    )
    click.echo(
        f"{reached} of {len(report.walked)} transitions walked, {struck} faults and requests of "
        f"{sum(map(bool, report.struck.values()))} kinds struck"
    )
    broken = Counter(failure.protocol for failure in report.failures)
    counts = ", ".join(f"{name} {count}/{broken[name]}" for name, count in sorted(report.by_protocol.items()))
    click.echo(f"schedules/failures by protocol: {counts}")
    click.echo(f"{report.per_second:.0f} schedules a second and core")
    if report.digest:
        click.echo(f"trace digest {report.digest}")
    for failure in report.failures[:5]:
        click.echo(f"seed {failure.seed}, {failure.world}, {failure.protocol}: {failure.text.splitlines()[0]}")


def _shrunk(schedule: Schedule, text: str, as_json: bool) -> Schedule:
    from cutwater.sim.scripts import script_of, shrink

    short, kind = shrink(schedule)
    click.echo(script_of(short, kind, f"seed {schedule.seed}: {text}"), err=as_json, nl=False)
    return short


def _play_script(path: str, given: dict[str, Any]) -> None:
    from cutwater.sim.scripts import parse_script

    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    schedule, expect = parse_script(text, path)
    violation = _keep(schedule, given)
    kind = violation.kind if violation else "ok"
    if given["as_json"]:
        click.echo(json.dumps({"expect": expect, "found": kind, "text": str(violation or "")}))
    else:
        click.echo(f"{path}: {violation or 'ok'}")
    if kind != expect:
        raise SimulationFailedError(f"{path} expects {expect!r}, found {kind!r}")


def _keep(schedule: Schedule, given: dict[str, Any]) -> Violation | None:
    """Play it once more for the picture and the trace; what was broken."""
    if not given["diagram"] and not given["trace"] and schedule.seed is not None:
        return None
    from cutwater.sim.simulate import play
    from cutwater.sim.world.record import to_trace
    from cutwater.trace.diagram import diagram
    from cutwater.trace.events import write_trace

    world, violation = play(schedule)
    trace = to_trace(world)
    try:
        if given["diagram"]:
            notes = str(violation).splitlines() if violation else []
            Path(given["diagram"]).write_text(diagram(trace, notes=notes), encoding="utf-8")
        if given["trace"]:
            write_trace(given["trace"], trace)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be written: {error.strerror}") from error
    return violation


@click.command()
@_PROTOCOL
@click.option("--world", default="all", metavar="NAME|all", show_default=True, help="Which small dataflow or network.")
@click.option("--large", is_flag=True, help="Larger worlds: minutes instead of seconds.")
@click.option("--states", type=int, default=1_000_000, metavar="N", show_default=True, help="Stop after so many.")
@_PLANT
@click.option("--json", "as_json", is_flag=True, help="As JSON, a line a world.")
def explore(protocol: str, world: str, large: bool, states: int, plant: str, as_json: bool) -> None:
    """Walk through all interleavings of small worlds.

    In every state all invariants must hold, every complete snapshot must be a consistent cut, and a way must lead to
    an end with all output there, once.  What breaks a promise is printed with the shortest way to it.
    """
    from cutwater.sim.explorer.explore import CROSSING, JOBS, combinations, explore_world, no_such_world

    mutant = _mutant(plant)
    if mutant is not None and protocol == "all":
        protocol = mutant.protocol
    chosen = [(w, p) for w, p in combinations() if world in ("all", w) and protocol in ("all", p)]
    if mutant is not None:
        chosen = [(w, p) for w, p in chosen if w in JOBS | CROSSING]
    if not chosen:
        raise no_such_world(world, protocol)
    seen = Counter[str]()
    for one, under in chosen:
        found = explore_world(one, under, large=large, states_max=states, mutant=mutant)
        seen[under] += found.states
        click.echo(json.dumps(found.as_dict()) if as_json else str(found))
        if found.violation:
            raise SimulationFailedError(
                f"{one}, {under}: {found.violation}",
                hint=f"The shortest way there, {len(found.script)} steps, went to standard output.",
            )
    if not as_json and len(chosen) > 1:
        click.echo(f"states by protocol: {', '.join(f'{name} {count}' for name, count in seen.items())}")


@click.command()
@_TRACES
@click.option("--snapshot", type=int, metavar="N", help="Only what is around this snapshot.")
@click.option("--from", "first", type=int, metavar="N", help="Number of the first event (counted from 1).")
@click.option("--to", "last", type=int, metavar="N", help="Number of the last event.")
@click.option("--by-time", is_flag=True, help="Place events by their times, not one after the other.")
@click.option("--check", "checked", is_flag=True, help="Write the checker's verdict below.")
@_AT_LEAST_ONCE
@click.option("--output", "-o", metavar="FILE.svg", help="Where to write (default: standard output).")
def diagram(traces: tuple[str, ...], output: str | None, checked: bool, at_least_once: bool, **window: Any) -> None:
    """Draw a trace as a space-time diagram (SVG).

    Several files, or a directory of them, are parts of one run: those of its workers and attempts.
    """
    from cutwater.trace.checker import check
    from cutwater.trace.diagram import diagram as draw
    from cutwater.trace.parts import read_run

    trace = read_run(traces)
    notes = str(check(trace, at_least_once=at_least_once)).splitlines() if checked else []
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
    for r in result.reorderings:
        when = f"the run was in it after event {r.occurred_after}" if r.occurred else "the run never was in it"
        way = f"an equivalent run leads through its state, {r.swaps} exchanges of neighbours away"
        lines.append(f"snapshot {r.snapshot}: {way}; {when}")
    return "\n".join(lines)


def _as_json(result: CheckResult) -> dict[str, Any]:
    import msgspec

    return {
        "ok": result.ok,
        "events": result.events,
        "snapshots": result.snapshots,
        "restores": result.restores,
        "in_flight": result.in_flight,
        "violations": msgspec.to_builtins(result.violations),
        "reorderings": [
            {"snapshot": r.snapshot, "swaps": r.swaps, "occurred_after": r.occurred_after} for r in result.reorderings
        ],
    }

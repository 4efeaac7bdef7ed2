"""The command line, ``cutwater``."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any, TypeVar

import click

from cutwater import __version__
from cutwater.config import ProtocolName
from cutwater.errors import ConfigError, CorruptSnapshotError, CutwaterError
from cutwater.protocol.protocols import PROTOCOLS
from cutwater.ui.connectors import connectors
from cutwater.ui.simulate import check_trace, diagram, explore, simulate
from cutwater.ui.states import diff, state, states

if TYPE_CHECKING:
    from collections.abc import Callable

    from cutwater.runtime.driver.requests import RequestKind
    from cutwater.ui.views import View

_DIFFERENT = 1
"""Exit code where two forks differ."""
_CANNOT = 3
"""Exit code where the program cannot begin from the snapshot."""

F = TypeVar("F", bound="Callable[..., Any]")
_PROTOCOL, _NAMES = click.Choice(list(PROTOCOLS)), ", ".join(PROTOCOLS)
_maps = click.option(
    "--map",
    "maps",
    multiple=True,
    metavar="OLD=NEW",
    help="A step has another id now; STEP/NAME=NEW: an aggregate or state. May be repeated.",
)
_allow_dropped_state = click.option(
    "--allow-dropped-state", is_flag=True, help="State that the program no longer has may go."
)
_as_json = click.option("--json", "as_json", is_flag=True, help="As JSON.")
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class _Options:
    """Options of the command that failed, for ``main``."""

    debug = False


@click.group(context_settings=_CONTEXT)
@click.version_option(__version__, prog_name="cutwater")
def cli() -> None:
    """Exactly-once stateful streaming for PySpark, on distributed snapshots."""


for _command in (connectors, diagram, check_trace, explore, simulate, states, state, diff):
    cli.add_command(_command)


def _running(command: F) -> F:
    """Options of the commands that run a program until it ends."""
    for option in (
        click.option("--debug", is_flag=True, help="Tracebacks, workers' log lines, and all that Spark says."),
        click.option("--json", "as_json", is_flag=True, help="One JSON object per line on standard output."),
        click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Any other setting; repeatable."),
        _allow_dropped_state,
        _maps,
        click.option("--takeover", is_flag=True, help="Take the job from a driver that lives."),
        click.option("--protocol", type=_PROTOCOL, metavar="NAME", help=f"{_NAMES} (default: aligned)."),
        click.option("--interval", metavar="TIME", help="Between two checkpoints, for example 500ms or 1s."),
        click.option("--checkpoint", metavar="DIR", help="Where checkpoints go; shared by driver and workers."),
        click.option("--parallelism", type=int, metavar="N", help="Workers (default: 2)."),
        click.option("--master", metavar="URL", help="Spark master (default: this machine)."),
    ):
        command = option(command)
    return command


@cli.command()
@click.argument("target", metavar="FILE.py[:NAME]")
@_running
@click.option("--restore", default="latest", metavar="latest|SNAPSHOT", show_default=True, help="Where to begin.")
@click.option("--claim", is_flag=True, help="Remove the restored savepoint when it is not needed any more.")
@click.option("--name", metavar="JOB", help="Of the job, if not the dataflow's.")
def run(target: str, restore: str, claim: bool, **given: Any) -> None:
    """Run the dataflow in FILE.py until it ends.

    NAME is a variable that holds the dataflow, or a function that returns it; it may be left out if the file has only
    one.  Ctrl-C takes a last checkpoint and stops, so that the next run goes on from there; a second Ctrl-C cancels at
    once.
    """
    _run(target, restore, claim=claim, **given)


@cli.command()
@click.argument("snapshot")
@click.argument("target", metavar="FILE.py[:NAME]", required=False)
@click.option("--name", metavar="JOB", required=True, help="Of the fork.")
@click.option("--no-follow", is_flag=True, help="Read without regard to the other job; there is no promotion then.")
@_running
def fork(snapshot: str, target: str | None, no_follow: bool, **given: Any) -> None:
    """Run FILE.py from a snapshot of another job, beside it.

    Its sinks are shadows: they keep the rows below the fork's own folder, for "compare".  It reads what the other job
    has checkpointed and not beyond, so that "promote" can let it take over.  Its checkpoints go beside those of the
    other job, unless --checkpoint says otherwise.  The same command again goes on with the fork.

    SNAPSHOT is DIR/JOB (its newest checkpoint), DIR/JOB@7, DIR/JOB/chk-7, or the folder of a savepoint.
    """
    if target is None:
        missing = "a snapshot holds state and positions, but no program"
        raise ConfigError(missing, hint=f"Say which one goes on from it: cutwater fork {snapshot} FILE.py --name JOB.")
    _run(target, snapshot, fork=True, follow=not no_follow, **given)


def _run(target: str, restore: str, *, master: str | None, checkpoint: str | None, **given: Any) -> None:
    from cutwater.ui.run import RunOptions, run_file

    _Options.debug = given.pop("debug")
    view = _view(given.pop("as_json"), _Options.debug)
    upgrade = _upgrade_settings(given.pop("maps"), given.pop("allow_dropped_state"))
    kept = {k: given.pop(k) for k in ("claim", "name", "fork", "follow", "takeover") if k in given}
    settings = _settings(given.pop("settings")) | {k: v for k, v in given.items() if v is not None}
    options = RunOptions(target, checkpoint, master, restore, settings, _Options.debug, upgrade, **kept)
    sys.exit(run_file(options, view))


@cli.command()
@click.argument("target", metavar="FILE.py[:NAME]")
@click.option("--kills", type=int, default=20, metavar="N", show_default=True, help="Faults that are to hit.")
@click.option(
    "--faults",
    default="kill,stop,exception,disk-full,slow-disk,disconnect",
    metavar="KIND,...",
    show_default=True,
    help="Which kinds.",
)
@click.option("--seed", type=int, default=0, metavar="S", show_default=True, help="Of kinds, moments and victims.")
@click.option("--digits", type=int, metavar="N", help="Compare floating point numbers to N significant digits.")
@click.option("--ignore", multiple=True, metavar="COLUMN", help="Do not compare this column; may be repeated.")
@click.option("--out", metavar="DIR", help="Keep checkpoints and outputs of both runs here.")
@click.option("--master", metavar="URL", help="Spark master on this machine (default: a local one).")
@click.option("--parallelism", type=int, metavar="N", help="Workers (default: 2).")
@click.option("--interval", metavar="TIME", help="Between two checkpoints (default: 500ms).")
@click.option("--set", "settings", multiple=True, metavar="NAME=VALUE", help="Any other setting; may be repeated.")
@click.option("--json", "as_json", is_flag=True, help="JSON lines on standard output, the report last.")
@click.option("--debug", is_flag=True, help="Tracebacks, and all that Spark says.")
def chaos(target: str, master: str | None, parallelism: int | None, interval: str | None, **given: Any) -> None:
    """Run FILE.py without and with faults, and compare the results.

    The dataflow must have an end.  Its sinks are replaced: nothing is written but below a folder of the trial.  Exits
    with 1 if the results differ.
    """
    from cutwater.ui.run import RunOptions, run_trial

    _Options.debug = given.pop("debug")
    view = _view(given["as_json"], _Options.debug)
    named = {"parallelism": parallelism, "interval": interval}
    settings = _settings(given.pop("settings")) | {k: v for k, v in named.items() if v is not None}
    run_trial(RunOptions(target, None, master, "latest", settings, _Options.debug), given, view)


@cli.command()
@click.argument("target", metavar="FILE.py[:NAME]")
@click.option("--parallelism", type=int, default=2, metavar="N", show_default=True, help="Workers.")
@click.option(
    "--protocol",
    type=_PROTOCOL,
    metavar="NAME",
    default="aligned",
    show_default=True,
    help=f"{_NAMES}.",
)
def explain(target: str, parallelism: int, protocol: ProtocolName) -> None:
    """Show the graph of FILE.py and what it guarantees."""
    from cutwater.spark.session import session
    from cutwater.ui.program import load_program

    flow = load_program(target).dataflow(session)
    click.echo(flow.explain(parallelism=parallelism, protocol=protocol))


@cli.command()
@click.argument("one", metavar="DIR/JOB")
@click.argument("other", metavar="DIR/JOB")
@click.option("--digits", type=int, metavar="N", help="Compare floating point numbers to N significant digits.")
@click.option("--ignore", multiple=True, metavar="COLUMN", help="Do not compare this column; may be repeated.")
@click.option(
    "--samples", type=int, default=5, metavar="N", show_default=True, help="Differing rows to show, per step."
)
@click.option("--timeout", default="0s", metavar="TIME", help="Wait so long for both to have read as far.")
@_as_json
def compare(
    one: str, other: str, digits: int | None, ignore: tuple[str, ...], samples: int, timeout: str, as_json: bool
) -> None:
    """Show where the outputs of two forks of one job differ.

    Since the cut from which both began, up to where both have read every source exactly as far.  Exits with 1 if they
    differ.
    """
    from cutwater.runtime.driver.comparison import compare_forks

    found = compare_forks(one, other, digits=digits, ignore=ignore, samples=samples, timeout=timeout)
    click.echo(json.dumps(found.to_dict(), default=str) if as_json else str(found))
    if not found.same:
        sys.exit(_DIFFERENT)


@cli.command()
def warm() -> None:
    """Compile all kernels, once per machine and installation.

    Some twenty seconds, which the first job would need piece by piece.  From then on Spark's daemon loads them before
    it starts a worker, so that replacements of lost workers begin sooner.  Run it as the user of the workers.
    """
    from cutwater.runtime.chains.warm import compile_connectors, is_warm, warm_up
    from cutwater.state.kernels import cache_directory

    place = cache_directory()
    if place is None:
        raise ConfigError(
            "there is no folder where compiled kernels could be kept",
            hint="Set NUMBA_CACHE_DIR to a folder that you can write and nobody else can.",
        )
    if is_warm():
        click.echo(f"The kernels of this installation were compiled before, and are kept in {place}")
        return
    click.echo("Compiling the kernels of this installation")
    compile_connectors()
    warm_up()
    click.echo(f"They are kept in {place}")


@cli.command("list")
@click.argument("directory", metavar="DIR")
@_as_json
def list_command(directory: str, as_json: bool) -> None:
    """List the jobs in a checkpoint directory."""
    from cutwater.storage.store.opening import open_existing
    from cutwater.ui.inspect import driver_runs, job_infos, render_jobs

    infos = job_infos(open_existing(directory), driver_runs)
    click.echo(json.dumps(infos) if as_json else render_jobs(infos, int(time.time() * 1000)), nl=as_json)
    if any(i["state"] == "damaged" for i in infos):
        sys.exit(CorruptSnapshotError.exit_code)


@cli.command()
@click.argument("snapshot")
@_as_json
def inspect(snapshot: str, as_json: bool) -> None:
    """Show what lies in a checkpoint.

    Steps with their rows and bytes, positions of the sources, watermarks.

    SNAPSHOT is DIR/JOB (its newest checkpoint), DIR/JOB@7, DIR/JOB/chk-7, or the
    folder of a savepoint.
    """
    from cutwater.storage.reading import resolve_snapshot
    from cutwater.ui.inspect import inspect_snapshot, render_inspect

    found = resolve_snapshot(snapshot)
    info = inspect_snapshot(found.store, found.job, found.checkpoint_id)
    click.echo(json.dumps(info) if as_json else render_inspect(info), nl=as_json)


@cli.command()
@click.argument("snapshot")
@_as_json
def verify(snapshot: str, as_json: bool) -> None:
    """Compare a checkpoint with its digests.

    Reads every byte; names the files that differ and exits with 5 if there are any.

    SNAPSHOT is DIR/JOB (all its checkpoints), DIR/JOB@7, DIR/JOB/chk-7, or the
    folder of a savepoint.
    """
    from cutwater.storage.reading import resolve_snapshot
    from cutwater.ui.inspect import render_verify, verify_snapshot

    found = resolve_snapshot(snapshot)
    info = verify_snapshot(found.store, found.job, found.checkpoint_id)
    click.echo(json.dumps(info) if as_json else render_verify(info), nl=as_json)
    if not info["ok"]:
        sys.exit(CorruptSnapshotError.exit_code)


def _settings(pairs: tuple[str, ...]) -> dict[str, Any]:
    """``NAME=VALUE`` to settings; ``restart.attempts=3`` sets a part."""
    settings: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ConfigError(
                f"--set {pair!r} sets nothing", hint="Write --set name=value, for example num_retained=5."
            )
        whole, dot, part = name.replace("-", "_").partition(".")
        if dot:
            settings[whole] = {**settings.get(whole, {}), part: value}
        else:
            settings[whole] = value
    return settings


def _view(as_json: bool, debug: bool) -> View:
    from rich.console import Console

    from cutwater.ui.views import JsonView, LiveView, PlainView

    if as_json:
        return JsonView(sys.stdout)
    # A descriptor of its own: number 2 is lent to Spark while its session starts.
    stderr = open(os.dup(2), "w", encoding="utf-8", buffering=1)  # noqa: SIM115
    console = Console(file=stderr, highlight=False)
    return LiveView(console, debug=debug) if console.is_terminal else PlainView(stderr, debug=debug)


def _upgrade_settings(maps: tuple[str, ...], allow: bool) -> dict[str, object]:
    """Keyword arguments of ``Dataflow.start`` from what was typed; none if nothing was.

    Raises:
        ConfigError: not of the form OLD=NEW.

    >>> _upgrade_settings(("a=b", "c/n=m"), False)
    {'step_ids': {'a': 'b'}, 'state_names': {'c/n': 'm'}}
    """
    names: dict[str, dict[str, str]] = {"step_ids": {}, "state_names": {}}
    for text in maps:
        old, equals, new = text.partition("=")
        if not (old and equals and new):
            raise ConfigError(f"--map {text!r} maps nothing", hint="Write --map old=new, or --map step/old=new.")
        names["state_names" if "/" in old else "step_ids"][old] = new
    given: dict[str, object] = {name: of for name, of in names.items() if of}
    return {**given, "allow_dropped_state": True} if allow else given


@cli.command()
@click.argument("snapshot")
@click.argument("target", metavar="FILE.py[:NAME]")
@click.option("--parallelism", type=int, default=2, metavar="N", show_default=True, help="Workers.")
@click.option("--max-parallelism", type=int, default=128, metavar="N", show_default=True, help="Key groups.")
@_maps
@_allow_dropped_state
@_as_json
def plan(
    snapshot: str,
    target: str,
    parallelism: int,
    max_parallelism: int,
    maps: tuple[str, ...],
    allow_dropped_state: bool,
    as_json: bool,
) -> None:
    """Show what a restore of SNAPSHOT into FILE.py would do.

    Nothing is started or changed. Exits with 3 if the program cannot begin from the snapshot.

    SNAPSHOT is DIR/JOB (its newest checkpoint), DIR/JOB@7, DIR/JOB/chk-7, or a savepoint.
    """
    from cutwater.api.jobs.restore_plan import plan_restore, render_restore_plan
    from cutwater.plan.upgrade import upgrade_of
    from cutwater.spark.session import session
    from cutwater.ui.program import load_program

    flow = load_program(target).dataflow(session)
    upgrade, _ = upgrade_of(_upgrade_settings(maps, allow_dropped_state))
    found = plan_restore(flow, snapshot, parallelism=parallelism, max_parallelism=max_parallelism, upgrade=upgrade)
    click.echo(json.dumps(found.to_dict()) if as_json else render_restore_plan(found, colours=True), nl=as_json)
    if not found.ok:
        sys.exit(_CANNOT)


def _of_a_job(command: F) -> F:
    """The arguments of a request to a running job."""
    return click.argument("directory", metavar="DIR")(click.argument("job")(command))


_timeout = click.option(
    "--timeout", default="10s", metavar="TIME", show_default=True, help="For the driver to take the request."
)


@cli.command()
@_of_a_job
@_timeout
def cancel(directory: str, job: str, timeout: str) -> None:
    """Stop a running job at once."""
    _ask(directory, job, "cancel", timeout)


@cli.command()
@_of_a_job
@_timeout
@click.option("--savepoint", "target", metavar="TO", help="Stop with a savepoint, in a new folder below TO.")
@click.option("--drain", is_flag=True, help="With --savepoint: end as if the sources were exhausted.")
def stop(directory: str, job: str, timeout: str, target: str | None, drain: bool) -> None:
    """Stop a running job after a last checkpoint.

    The next run goes on from there.  With --savepoint, no row is read behind it, and its folder is the last line of the
    output.  With --drain the last windows fire, and the job has finished.
    """
    if drain and target is None:
        raise ConfigError("a job is drained with a savepoint", hint="Say where to: --savepoint TO --drain.")
    _ask(directory, job, "stop", timeout, savepoint=target, drain=drain)


@cli.command()
@_of_a_job
@click.argument("parallelism", type=click.IntRange(min=1))
@_timeout
def rescale(directory: str, job: str, parallelism: int, timeout: str) -> None:
    """Have a running job go on at another parallelism.

    It starts the workers that it lacks, takes a checkpoint and goes on from there.
    """
    _ask(directory, job, "rescale", timeout, parallelism=parallelism)


@cli.command()
@_of_a_job
@click.argument("target", metavar="TO")
@_timeout
def savepoint(directory: str, job: str, target: str, timeout: str) -> None:
    """Take a savepoint of a running job.

    It lies in a new folder below TO, the last line of the output, and is yours: restore it, move it, delete it.
    """
    _ask(directory, job, "savepoint", timeout, savepoint=target)


@cli.command()
@_of_a_job
@click.option(
    "--savepoint", "target", metavar="TO", help="Of the job that stops (default: DIR of that job/savepoints)."
)
@_timeout
def promote(directory: str, job: str, target: str | None, timeout: str) -> None:
    """Let a running fork take over from its leader.

    The leader, the job that it was forked from, serves until it has stopped with a savepoint, whose folder is the last
    line of the output.  The fork reads exactly as far and writes what follows.  Whatever fails, the same command again
    goes on.  If the leader's driver is dead, the fork's does that for it, from the leader's newest checkpoint.
    """
    _ask(directory, job, "promote", timeout, savepoint=target)


_NOT_RUNNING = {
    "finished": "it has finished",
    "stopped": "it was stopped",
    "cancelled": "it was cancelled",
    "failed": "it has failed",
    "dead": "its driver died",
    "sealed": "or its log is sealed with a key that CUTWATER_KEY_FILE does not name",
}
"""Reasons for which nobody takes a request, by the state of a job as ``cutwater list`` shows it."""
_DONE = {"promote": "promoted", "cancel": "cancelled", "stop": "stopped", "rescale": "rescaled", "savepoint": "saved"}


def _ask(
    directory: str,
    job: str,
    kind: RequestKind,
    timeout: str,
    *,
    parallelism: int = 0,
    savepoint: str | None = None,
    drain: bool = False,
) -> None:
    from cutwater.config import parse_duration_ms
    from cutwater.runtime.driver.requests import send
    from cutwater.storage.snapshot.retention import list_jobs
    from cutwater.storage.store.opening import open_existing
    from cutwater.ui.inspect import driver_runs, job_infos

    store = open_existing(directory)
    states = {info["job"]: info["state"] for info in job_infos(store, driver_runs, only=[job])}
    if job not in states:
        there = ", ".join(list_jobs(store))
        raise ConfigError(f"no job {job!r} in {directory}", hint=f"There are: {there or 'none'}.")
    if (why := _NOT_RUNNING.get(states[job])) is not None:
        raise CutwaterError(f"job {job!r} does not run: {why}", hint="Nothing was done.")
    target = "" if savepoint is None else os.path.abspath(savepoint)
    claim_s = parse_duration_ms(timeout, name="timeout") / 1000
    answer = send(store, job, kind, parallelism=parallelism, savepoint=target, drain=drain, claim_s=claim_s)
    if answer is None:
        raise CutwaterError(
            f"no driver of job {job!r} took the request within {timeout}: nothing was done",
            hint=f"Is it running? See: cutwater list {directory}.",
        )
    if not answer.ok:
        what = f"take a savepoint of job {job!r}" if kind == "savepoint" else f"{kind} job {job!r}"
        raise CutwaterError(f"driver {answer.by} could not {what}: {answer.detail}")
    click.echo(f"job {job} {_DONE[kind]}{f' to {parallelism}' if parallelism else ''} by its driver {answer.by}")
    if answer.savepoint:
        click.echo(answer.savepoint)


def main() -> None:
    """Entry point: errors become one paragraph on standard error and the exit code of their class."""
    _Options.debug = False
    logging.getLogger("cutwater").addHandler(logging.NullHandler())  # warnings are part of what is shown of a job
    try:
        code = cli.main(prog_name="cutwater", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        sys.exit(130)
    except CutwaterError as error:
        if _Options.debug:
            traceback.print_exception(error)
        _show(error)
        sys.exit(error.exit_code)
    sys.exit(code if isinstance(code, int) else 0)


def _show(error: CutwaterError) -> None:
    where = f"step {error.step!r}: " if error.step else ""
    click.echo(f"{click.style('error:', fg='red', bold=True)} {where}{error.message}", err=True)
    if error.hint:
        click.echo(f"{click.style('hint:', fg='cyan', bold=True)} {error.hint}", err=True)

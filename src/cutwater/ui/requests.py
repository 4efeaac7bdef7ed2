"""Requests of the command line to a running driver: ``stop``, ``cancel``, ``rescale``, ``savepoint``, ``promote``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from cutwater.errors import ConfigError, CutwaterError

if TYPE_CHECKING:
    from cutwater.runtime.driver.requests import RequestKind


@click.command()
@click.argument("directory", metavar="DIR")
@click.argument("job")
@click.option("--timeout", default="10s", metavar="TIME", show_default=True, help="For the driver to take the request.")
def cancel(directory: str, job: str, timeout: str) -> None:
    """Stop a running job at once."""
    _ask(directory, job, "cancel", timeout)


@click.command()
@click.argument("directory", metavar="DIR")
@click.argument("job")
@click.option("--timeout", default="10s", metavar="TIME", show_default=True, help="For the driver to take the request.")
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


@click.command()
@click.argument("directory", metavar="DIR")
@click.argument("job")
@click.argument("parallelism", type=click.IntRange(min=1))
@click.option("--timeout", default="10s", metavar="TIME", show_default=True, help="For the driver to take the request.")
def rescale(directory: str, job: str, parallelism: int, timeout: str) -> None:
    """Have a running job go on at another parallelism.

    It starts the workers that it lacks, takes a checkpoint and goes on from there.
    """
    _ask(directory, job, "rescale", timeout, parallelism=parallelism)


@click.command()
@click.argument("directory", metavar="DIR")
@click.argument("job")
@click.argument("target", metavar="TO")
@click.option("--timeout", default="10s", metavar="TIME", show_default=True, help="For the driver to take the request.")
def savepoint(directory: str, job: str, target: str, timeout: str) -> None:
    """Take a savepoint of a running job.

    It lies in a new folder below TO, the last line of the output, and is yours: restore it, move it, delete it.
    """
    _ask(directory, job, "savepoint", timeout, savepoint=target)


@click.command()
@click.argument("directory", metavar="DIR")
@click.argument("job")
@click.option(
    "--savepoint", "target", metavar="TO", help="Of the job that stops (default: DIR of that job/savepoints)."
)
@click.option("--timeout", default="10s", metavar="TIME", show_default=True, help="For the driver to take the request.")
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
    from cutwater.ui.listing import driver_runs, job_infos

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

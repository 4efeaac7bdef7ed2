"""The command ``chaos``: a user's job without and with faults."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import click

from cutwater.errors import CutwaterError

if TYPE_CHECKING:
    from cutwater.chaos.trial import Report
    from cutwater.ui.run import RunOptions
    from cutwater.ui.views import View

_HINTS = {
    "different": "What a function keeps outside its state, or takes from a clock or from chance, is another after a "
    "restore. The outputs are in {folder}.",
    "unsteady": "Rows of several sources or subtasks meet in any order. Try --ignore COLUMN for what depends on it, "
    "--digits 9 for sums of floating point numbers, or --parallelism 1.",
    "void": "Give the job more rows, or fewer faults.",
}
_SAID = {
    "different": "the results with and without faults differ",
    "unsteady": "the results of two runs without faults differ, so nothing can be said of faults",
    "void": "fewer faults hit than were wanted",
}


class ChaosFailedError(CutwaterError):
    """The results differ, or nothing can be said; the report went to standard output."""

    exit_code = 1


def run_trial(options: RunOptions, given: dict[str, Any], view: View) -> None:
    """Try the dataflow of a file, and print the report.

    Args:
        given: ``kills``, ``faults``, ``seed``, ``digits``, ``ignore``, ``out``, ``as_json``.

    Raises:
        ChaosFailedError: the results differ, or too few faults hit.
        CutwaterError: the file or a setting is wrong, or the job failed.
    """
    from cutwater.chaos.trial import Trial
    from cutwater.runtime.settings import make_config
    from cutwater.ui.program import load_program
    from cutwater.ui.run import SparkStarter

    with ExitStack() as stack:
        stack.callback(view.close)
        program = load_program(options.target)
        starter = SparkStarter(program, options, view, make_config(options.settings).parallelism)
        flow = program.dataflow(starter.session)
        flow.validate()
        trial = Trial(
            flow.graph,
            kinds=[kind.strip() for kind in given["faults"].split(",")],
            count=given["kills"],
            seed=given["seed"],
            digits=given["digits"],
            ignore=given["ignore"],
            settings=options.settings,
            folder=given["out"],
            told=view.note,
        )
        starter.parallelism = trial.parallelism
        spark = starter.session()
        stack.callback(spark.stop)
        report = trial.run(spark)
    _show(report, given["as_json"])
    if report.verdict != "same":
        raise ChaosFailedError(_SAID[report.verdict], hint=_HINTS[report.verdict].format(folder=report.folder))


def _show(report: Report, as_json: bool) -> None:
    import msgspec

    if as_json:
        body = {"event": "report", "verdict": report.verdict, **msgspec.to_builtins(report)}
        click.echo(json.dumps(body))
        return
    for line in report.lines:
        click.echo(line)

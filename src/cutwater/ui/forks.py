"""``cutwater compare``: where two forks of one job differ."""

from __future__ import annotations

import json
import sys

import click

DIFFERENT = 1
"""Exit code where two forks differ."""


@click.command()
@click.argument("one", metavar="DIR/JOB")
@click.argument("other", metavar="DIR/JOB")
@click.option("--digits", type=int, metavar="N", help="Compare floating point numbers to N significant digits.")
@click.option("--ignore", multiple=True, metavar="COLUMN", help="Do not compare this column; may be repeated.")
@click.option(
    "--samples", type=int, default=5, metavar="N", show_default=True, help="Differing rows to show, per step."
)
@click.option("--timeout", default="0s", metavar="TIME", help="Wait so long for both to have read as far.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def compare(
    one: str, other: str, digits: int | None, ignore: tuple[str, ...], samples: int, timeout: str, as_json: bool
) -> None:
    """Show where the outputs of two forks of one job differ.

    Since the cut from which both began, up to where both have read every source exactly as far.  Exits with 1 if they
    differ.
    """
    from cutwater.runtime.cutover.comparison import compare_forks

    found = compare_forks(one, other, digits=digits, ignore=ignore, samples=samples, timeout=timeout)
    click.echo(json.dumps(found.to_dict(), default=str) if as_json else str(found))
    if not found.same:
        sys.exit(DIFFERENT)

"""The command that lists connectors."""

from __future__ import annotations

import dataclasses
import json

import click

from cutwater.data.text import lines_of_table, shown_width


@click.command()
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def connectors(as_json: bool) -> None:
    """List the connectors that are installed.

    Ours, and other packages': whether each is a source, what it promises as a sink, which package provides it, and
    what is missing.
    """
    from cutwater.connectors.registry import Connector
    from cutwater.connectors.registry import connectors as installed

    def needs(one: Connector) -> str:
        return f"{one.extra}, which is missing" if one.missing else one.extra

    found = installed()
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(one) for one in found]))
        return
    says = {True: "yes", False: "-", None: "?"}
    rows = [
        [
            one.name,
            says[one.source],
            one.sink or "-",
            f"{one.package} {one.version}",
            needs(one) or "-",
            one.what or "-",
        ]
        for one in found
    ]
    head = ["connector", "source", "sink", "package", "needs", "what"]
    for line in lines_of_table(head, rows, right=[], width=shown_width()):
        click.echo(line)
    for one in found:
        if one.problem:
            click.echo(f"{one.name} of {one.package}: {one.problem}")

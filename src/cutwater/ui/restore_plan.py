"""``cutwater plan``: what would happen if a program began from a snapshot."""

from __future__ import annotations

import json

import click

from cutwater.api.jobs.restore_plan_text import render_restore_plan
from cutwater.errors import ConfigError

CANNOT = 3
"""Exit code where the program cannot begin from the snapshot."""

maps = click.option(
    "--map",
    "maps",
    multiple=True,
    metavar="OLD=NEW",
    help="A step has another id now; STEP/NAME=NEW: an aggregate or state. May be repeated.",
)
allow_dropped_state = click.option(
    "--allow-dropped-state", is_flag=True, help="State that the program no longer has may go."
)


def upgrade_settings(maps: tuple[str, ...], allow: bool) -> dict[str, object]:
    """Keyword arguments of ``Dataflow.start`` from what was typed; none if nothing was.

    Raises:
        ConfigError: not of the form OLD=NEW.

    >>> upgrade_settings(("a=b", "c/n=m"), False)
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


@click.command()
@click.argument("snapshot")
@click.argument("target", metavar="FILE.py[:NAME]")
@click.option("--parallelism", type=int, default=2, metavar="N", show_default=True, help="Workers.")
@click.option("--max-parallelism", type=int, default=128, metavar="N", show_default=True, help="Key groups.")
@maps
@allow_dropped_state
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
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
    from cutwater.api.jobs.restore_plan import plan_restore
    from cutwater.plan.upgrade import upgrade_of
    from cutwater.spark.session import session
    from cutwater.ui.program import load_program

    flow = load_program(target).dataflow(session)
    upgrade, _ = upgrade_of(upgrade_settings(maps, allow_dropped_state))
    found = plan_restore(flow, snapshot, parallelism=parallelism, max_parallelism=max_parallelism, upgrade=upgrade)
    click.echo(json.dumps(found.to_dict()) if as_json else render_restore_plan(found, colours=True), nl=as_json)
    if not found.ok:
        raise SystemExit(CANNOT)

"""The commands that look into a snapshot's state: ``states``, ``state`` and ``diff``."""

from __future__ import annotations

import csv
import datetime as dt
import itertools
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import click

from cutwater.data.text import lines_of_table, plural, shown_width, size
from cutwater.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from cutwater.state_reader.compare import Difference
    from cutwater.state_reader.reader import Snapshot

_TABLE_ROWS = 20
_SHOWN_CHARS = 60
_SIGNS = {"added": "+", "removed": "-", "changed": "~"}


@click.command()
@click.argument("snapshot")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def states(snapshot: str, as_json: bool) -> None:
    """List the state tables in a snapshot, with their columns.

    SNAPSHOT is DIR/JOB (its newest checkpoint), DIR/JOB@7 or DIR/JOB/chk-7.
    """
    found = _open(snapshot).states
    if as_json:
        infos = [
            {
                "step": t.step,
                "state": t.name,
                "kind": t.kind,
                "columns": {f.name: str(f.type) for f in t.schema},
                "keys": list(t.keys),
                "stored_rows": t.stored_rows,
                "bytes": t.bytes,
            }
            for t in found
        ]
        click.echo(json.dumps(infos))
        return
    rows = [
        [t.step, t.name, t.kind, f"{t.stored_rows:,}", size(t.bytes), ", ".join(f"{f.name} {f.type}" for f in t.schema)]
        for t in found
    ]
    for line in lines_of_table(
        ["step", "state", "kind", "stored rows", "size", "columns"], rows, right=[3, 4], width=shown_width()
    ):
        click.echo(line)


@click.command()
@click.argument("snapshot")
@click.argument("name", metavar="STEP[.STATE]")
@click.option("--sql", metavar="SELECT", help="A query over the table 'state', such as SELECT count(*) FROM state.")
@click.option("--key", "keys", multiple=True, metavar="COLUMN=VALUE", help="Only this key; name all its columns.")
@click.option("--columns", metavar="A,B", help="Only these columns.")
@click.option("--raw", is_flag=True, help="What is stored: of a mean its sum and count.")
@click.option("--limit", type=click.IntRange(min=0), metavar="N", help="At most so many rows (a table: 20).")
@click.option(
    "--format", "shape", type=click.Choice(["table", "json", "csv"]), default="table", help="json: an object per line."
)
def state(
    snapshot: str,
    name: str,
    sql: str | None,
    keys: tuple[str, ...],
    columns: str | None,
    raw: bool,
    limit: int | None,
    shape: Literal["table", "json", "csv"],
) -> None:
    """Show the rows of a state.

    SNAPSHOT is DIR/JOB (its newest checkpoint), DIR/JOB@7 or DIR/JOB/chk-7; `cutwater states` lists what it holds.
    """
    opened = _open(snapshot)
    wanted = columns.split(",") if columns else None
    names, rows = _rows(opened, name, sql, {"columns": wanted, "key": _key(opened, name, keys), "raw": raw})
    most = _TABLE_ROWS if limit is None and shape == "table" else limit
    shown = rows if most is None else itertools.islice(rows, most)
    if shape == "json":
        for row in shown:
            click.echo(json.dumps(row, default=_plain, ensure_ascii=False))
    elif shape == "csv":
        writer = csv.writer(sys.stdout)
        writer.writerow(names)
        writer.writerows([_cell(row[n]) for n in names] for row in shown)
    else:
        _print_table(names, list(shown), rows, limit is None)


@click.command()
@click.argument("first")
@click.argument("second")
@click.argument("name", metavar="[STEP[.STATE]]", required=False)
@click.option("--limit", type=click.IntRange(min=0), default=50, show_default=True, metavar="N", help="Rows to show.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line, all of them.")
def diff(first: str, second: str, name: str | None, limit: int, as_json: bool) -> None:
    """Compare the states of two snapshots.

    Exits with 1 if they differ.
    """
    from cutwater.state_reader.compare import comparable_states, compare_states

    before, after = _open(first), _open(second)
    counts: dict[str, dict[str, int]] = {}
    shown = 0
    for address in [name] if name else comparable_states(before, after):
        for found in compare_states(before, after, address):
            of_state = counts.setdefault(found.state, dict.fromkeys(_SIGNS, 0))
            of_state[found.kind] += 1
            if as_json:
                click.echo(json.dumps(_as_dict(found), default=_plain, ensure_ascii=False))
            elif shown < limit:
                shown += 1
                click.echo(_line(found))
    total = sum(sum(c.values()) for c in counts.values())
    if not as_json:
        if total > shown:
            click.echo(f"... {total - shown:,} more")
        for address, of_state in counts.items():
            click.echo(f"{address}: " + ", ".join(f"{n:,} {kind}" for kind, n in of_state.items() if n))
        if not total:
            click.echo("no difference")
    sys.exit(1 if total else 0)


# ------------------------------------------------------------------------------------------------------------ reading


def _open(address: str) -> Snapshot:
    from cutwater.state_reader.reader import Snapshot

    return Snapshot(address)


def _key(snapshot: Snapshot, name: str, pairs: tuple[str, ...]) -> dict[str, Any] | None:
    """Values of key columns from texts, in their types."""
    if not pairs:
        return None
    import pyarrow as pa

    schema = snapshot.state(name).schema
    key: dict[str, Any] = {}
    for pair in pairs:
        column, equals, text = pair.partition("=")
        if not equals or column not in schema.names:
            raise ConfigError(f"--key {pair!r} names no column", hint=did_you_mean(column, schema.names))
        try:
            key[column] = pa.scalar(text).cast(schema.field(column).type).as_py()
        except pa.ArrowException as error:
            raise ConfigError(f"--key {pair!r}: {error}") from error
    return key


def _rows(
    snapshot: Snapshot, name: str, sql: str | None, which: dict[str, Any]
) -> tuple[list[str], Iterator[dict[str, Any]]]:
    if sql is None:
        names = which["columns"] or snapshot.table(name, **(which | {"groups": range(0)})).schema.names
        return names, (row for batch in snapshot.batches(name, **which) for row in batch.to_pylist())
    import polars as pl

    try:
        found = pl.SQLContext(state=pl.from_arrow(snapshot.table(name, **which)), eager=True).execute(sql)
    except pl.exceptions.PolarsError as error:
        raise ConfigError(f"the query fails: {error}", hint="It reads FROM state, in the SQL of Polars.") from error
    return found.columns, found.iter_rows(named=True)


# ------------------------------------------------------------------------------------------------------------ showing


def _print_table(names: list[str], shown: list[Mapping[str, Any]], rest: Iterable[Any], count: bool) -> None:
    cells = [[_short(_cell(row[n])) for n in names] for row in shown]
    numbers = [i for i, n in enumerate(names) if any(isinstance(row[n], int | float) for row in shown)]
    width = shown_width()
    lines = lines_of_table(names, cells, right=numbers, width=width)
    if width is not None and max(map(len, lines)) > width:  # too many columns: each row becomes a table of its own
        lines = [line for row in cells for line in (*_upright(names, row, width), "")]
    for line in lines:
        click.echo(line)
    more = sum(1 for _ in rest) if count else 0
    click.echo(f"{plural(len(shown), 'row')}{f', {more:,} more (--limit)' if more else ''}")


def _upright(names: list[str], row: list[str], width: int) -> list[str]:
    return lines_of_table(["column", "value"], [[n, c] for n, c in zip(names, row, strict=True)], width=width)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else text[: _SHOWN_CHARS - 3] + "..."


def _cell(value: Any) -> str:
    """A value as text.

    >>> _cell(None), _cell(1.5), _cell([1, 2]), _cell("a")
    ('', '1.5', '[1, 2]', 'a')
    """
    if value is None:
        return ""
    if isinstance(value, list | dict):
        return json.dumps(value, default=_plain, ensure_ascii=False)
    return str(_plain(value))


def _plain(value: Any) -> Any:
    """Text or list for a value that JSON has no form for."""
    if isinstance(value, dt.datetime | dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    return [*value] if isinstance(value, tuple) else value if isinstance(value, int | float) else str(value)


def _as_dict(found: Difference) -> dict[str, Any]:
    return {"state": found.state, "change": found.kind, "key": found.key, "before": found.before, "after": found.after}


def _line(found: Difference) -> str:
    key = ", ".join(f"{name}={_cell(value)}" for name, value in found.key.items())
    old, new = found.before, found.after
    if old is not None and new is not None:
        values = ", ".join(f"{n}: {_cell(v)} -> {_cell(new[n])}" for n, v in old.items() if _cell(v) != _cell(new[n]))
    else:
        values = ", ".join(f"{n}: {_cell(v)}" for n, v in (old or new or {}).items())
    return f"{_SIGNS[found.kind]} {found.state} {key}{'  ' if values else ''}{values}"

"""Differences of two snapshots: rows added, removed and changed, a stretch of key groups in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import polars as pl
import polars.selectors as cs
import pyarrow as pa

from cutwater.data.changes import OP
from cutwater.errors import ConfigError
from cutwater.state_reader.reader import Snapshot, StateTable, chunks

_PLACES = ("key_group", "subtask")
"""Columns that say where a row lies: it may lie elsewhere and be the same."""
_OUTSIDE = ("read", "write", "edge")
"""Tables that are no state of a step: positions, handles, rows on their way."""
_LEFT, _RIGHT, _AFTER = "__in_first", "__in_second", "__after"

Kind = Literal["added", "removed", "changed"]


@dataclass(frozen=True)
class Difference:
    """One row that is not the same in both.

    Attributes:
        state: the table's address, ``STEP.NAME``.
        kind: what became of it from the first snapshot to the second.
        key: its key columns; of a table without key the whole row.
        before: its other columns in the first snapshot; ``None`` if it is not there.
        after: and in the second.
    """

    state: str
    kind: Kind
    key: Mapping[str, Any]
    before: Mapping[str, Any] | None
    after: Mapping[str, Any] | None


def comparable_states(first: Snapshot, second: Snapshot) -> list[str]:
    """Addresses of the states of both snapshots, in the order of the second one's program, then of the first one's."""
    found = [t.address for snapshot in (second, first) for t in snapshot.states if t.main and t.kind not in _OUTSIDE]
    return list(dict.fromkeys(found))


def compare_states(first: Snapshot, second: Snapshot, name: str) -> Iterator[Difference]:
    """The differences of one table, in the order of key groups.

    A table that one of the snapshots does not have counts as empty there.

    Raises:
        ConfigError: neither has it, its columns differ, or the snapshots have not as many key groups.
    """
    tables = [_table(snapshot, name) for snapshot in (first, second)]
    known = [table for table in tables if table is not None]
    if not known:
        second.state(name)  # says what there is
    if first.max_parallelism != second.max_parallelism:
        raise ConfigError(
            f"{first} has {first.max_parallelism} key groups, {second} has {second.max_parallelism}",
            hint="Their states cannot be compared group by group: read both and join them.",
        )
    if not known[0].schema.equals(known[-1].schema):
        columns = " and ".join(f"({', '.join(f'{f.name} {f.type}' for f in t.schema)})" for t in known)
        raise ConfigError(f"{name} has other columns: {columns}", hint="Read both and compare what they share.")
    table = known[0]
    entries = [
        entry
        for snapshot, found in zip((first, second), tables, strict=True)
        if found is not None
        for entry in snapshot.entries(found.address)
    ]
    for groups in chunks(entries, range(first.max_parallelism)):
        sides = [
            _rows(snapshot, table, groups if found is not None else range(0))
            for snapshot, found in zip((first, second), (tables[0], tables[1]), strict=True)
        ]
        yield from _keyed(table, *sides) if table.keys else _counted(table, *sides)


def _table(snapshot: Snapshot, name: str) -> StateTable | None:
    try:
        return snapshot.state(name)
    except ConfigError:
        return None


def _rows(snapshot: Snapshot, table: StateTable, groups: range) -> pl.DataFrame:
    """The rows of some key groups, without the columns that say where they lie."""
    columns = [name for name in table.schema.names if name not in _PLACES]
    if len(groups) == 0:
        schema = pa.schema([table.schema.field(name) for name in columns])
        return cast("pl.DataFrame", pl.from_arrow(schema.empty_table()))
    return cast("pl.DataFrame", pl.from_arrow(snapshot.table(table.address, columns=columns, groups=groups)))


def _keyed(table: StateTable, before: pl.DataFrame, after: pl.DataFrame) -> Iterator[Difference]:
    keys = list(table.keys)
    values = [name for name in before.columns if name not in keys]
    both = before.with_columns(pl.lit(True).alias(_LEFT)).join(
        after.with_columns(pl.lit(True).alias(_RIGHT)),
        on=keys,
        how="full",
        nulls_equal=True,
        coalesce=True,
        suffix=_AFTER,
        maintain_order="left_right",
    )
    there = pl.col(_LEFT).is_not_null() & pl.col(_RIGHT).is_not_null()
    same = [pl.col(name).eq_missing(pl.col(f"{name}{_AFTER}")) for name in values]
    for row in both.filter(~(there & pl.all_horizontal(pl.lit(True), *same))).iter_rows(named=True):
        old = {name: row[name] for name in values} if row[_LEFT] else None
        new = {name: row[f"{name}{_AFTER}"] for name in values} if row[_RIGHT] else None
        kind: Kind = "added" if old is None else "removed" if new is None else "changed"
        yield Difference(table.address, kind, {name: row[name] for name in keys}, old, new)


def _counted(table: StateTable, before: pl.DataFrame, after: pl.DataFrame) -> Iterator[Difference]:
    """Of rows that may be equal: those that one side has more often."""
    columns = before.columns
    sides = pl.concat([_counts(before, columns, -1), _counts(after, columns, 1)])
    changed = sides.group_by(columns, maintain_order=True).agg(pl.col(_AFTER).sum()).filter(pl.col(_AFTER) != 0)
    for row in changed.iter_rows(named=True):
        more = row.pop(_AFTER)
        for _ in range(abs(more)):
            yield Difference(table.address, "added" if more > 0 else "removed", row, None, None)


def _counts(rows: pl.DataFrame, columns: Sequence[str], sign: int) -> pl.DataFrame:
    return rows.group_by(columns, maintain_order=True).agg((pl.len().cast(pl.Int64) * sign).alias(_AFTER))


TIMES, OF_ONE, OF_OTHER, PLACE = "__times", "__in_one", "__in_other", "__place"
_ADDED = ("+I", "+U")


def rows_of(rows: pl.LazyFrame, *, updating: bool, digits: int | None, ignore: Sequence[str]) -> pl.LazyFrame:
    """Every different row once, with how often it is there (column ``TIMES``).

    Args:
        updating: the rows are changes of a table (``data.changes``): counted are the rows of the table.
        digits: floating point numbers are rounded to so many significant digits.
        ignore: columns that do not count; of those that are there.
    """
    kept = rows.select(cs.exclude(*ignore)) if ignore else rows
    columns = [c for c in kept.collect_schema().names() if not (updating and c == OP)]
    count = pl.when(pl.col(OP).is_in(_ADDED)).then(1).otherwise(-1).sum() if updating else pl.len()
    if digits is not None:
        kept = kept.with_columns(cs.float().round_sig_figs(digits))
    return kept.group_by(columns).agg(count.cast(pl.Int64).alias(TIMES)).filter(pl.col(TIMES) != 0)


def differing_rows(one: pl.LazyFrame, other: pl.LazyFrame) -> pl.DataFrame:
    """The rows of which two results of ``rows_of`` have not equally many, in the order of their columns.

    Columns ``OF_ONE`` and ``OF_OTHER`` say how many; ``PLACE``, how many rows come before in the first result.
    """
    columns = [c for c in one.collect_schema().names() if c != TIMES]
    both = one.rename({TIMES: OF_ONE}).join(
        other.rename({TIMES: OF_OTHER}), on=columns, how="full", coalesce=True, nulls_equal=True
    )
    both = both.with_columns(pl.col(OF_ONE, OF_OTHER).fill_null(0)).sort(columns)
    both = both.with_columns((pl.col(OF_ONE).cum_sum() - pl.col(OF_ONE)).alias(PLACE))
    return both.filter(pl.col(OF_ONE) != pl.col(OF_OTHER)).collect()

"""Where two results differ, as multisets of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import polars as pl
import pyarrow as pa

from cutwater.operators.changes import OP, added_rows

__all__ = ["Difference", "compare"]

_CALM, _STORMY, _BEFORE = "__without_faults", "__with_faults", "__rows_before"


@dataclass(frozen=True)
class Difference:
    """The first row that one result has more often than the other.

    Rows are counted from 1 in the order of their columns, first column first, in the result without faults.
    """

    row_number: int
    row: dict[str, Any]
    times_without: int
    times_with: int
    lost: int
    """Rows that the result with faults lacks, over the whole result."""
    extra: int
    """Rows that it has too many."""

    def __str__(self) -> str:
        row = ", ".join(f"{name}={value!r}" for name, value in self.row.items())
        return (
            f"row {self.row_number:,} (in sorted order): {row}: {self.times_without} times without faults, "
            f"{self.times_with} times with; in all {self.lost:,} rows lost, {self.extra:,} too many"
        )


def compare(
    calm: pa.Table, stormy: pa.Table, *, updating: bool = False, digits: int | None = None, ignore: Sequence[str] = ()
) -> Difference | None:
    """The first difference of two results; ``None`` if every row is in both equally often.

    Args:
        updating: the rows are changes of a table (``operators.changes``): the tables that they lead to are compared.
        digits: floating point numbers are rounded to so many significant digits, since their sums depend on the order.
        ignore: columns that do not count; of those that are there.

    >>> one, other = pa.table({"k": [1, 2, 2]}), pa.table({"k": [2, 1, 3]})
    >>> compare(one, pa.table({"k": [2, 1, 2]}))
    >>> print(compare(one, other))
    row 2 (in sorted order): k=2: 2 times without faults, 1 times with; in all 1 rows lost, 1 too many
    """
    columns = [c for c in calm.column_names if c not in ignore and not (updating and c == OP)]
    if not columns:
        return None
    both = [_counted(table, columns, name, updating, digits) for table, name in ((calm, _CALM), (stormy, _STORMY))]
    joined = both[0].join(both[1], on=columns, how="full", coalesce=True, nulls_equal=True)
    joined = joined.with_columns(pl.col(_CALM, _STORMY).fill_null(0).cast(pl.Int64)).sort(columns)
    joined = joined.with_columns((pl.col(_CALM).cum_sum() - pl.col(_CALM)).alias(_BEFORE))
    differing = joined.filter(pl.col(_CALM) != pl.col(_STORMY))
    if differing.is_empty():
        return None
    missing = differing[_CALM] - differing[_STORMY]
    first = differing.row(0, named=True)
    return Difference(
        row_number=cast(int, first[_BEFORE]) + 1,
        row={name: first[name] for name in columns},
        times_without=cast(int, first[_CALM]),
        times_with=cast(int, first[_STORMY]),
        lost=int(missing.clip(lower_bound=0).sum()),
        extra=int((-missing).clip(lower_bound=0).sum()),
    )


def _counted(table: pa.Table, columns: list[str], name: str, updating: bool, digits: int | None) -> pl.DataFrame:
    """Every different row once, with how often it is there."""
    count, kept = pl.len(), table.select(columns)
    if updating:
        added = pa.chunked_array([pa.array(added_rows(b)) for b in table.to_batches()], pa.bool_())
        kept = kept.append_column(name, added)
        count = pl.when(name).then(1).otherwise(-1).sum()
    rows = cast(pl.DataFrame, pl.from_arrow(kept))
    floats = [c for c, kind in rows.schema.items() if kind.is_float()]
    if digits is not None and floats:
        rows = rows.with_columns(pl.col(floats).round_sig_figs(digits))
    return rows.group_by(columns).agg(count.cast(pl.Int64).alias(name)).filter(pl.col(name) != 0)

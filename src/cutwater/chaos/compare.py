"""Where two results differ, as multisets of rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import polars as pl
import pyarrow as pa

from cutwater.data.changes import OP
from cutwater.state_reader.multisets import OF_ONE, OF_OTHER, PLACE, differing_rows, rows_of


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
        updating: the rows are changes of a table (``data.changes``): the tables that they lead to are compared.
        digits: floating point numbers are rounded to so many significant digits, since their sums depend on the order.
        ignore: columns that do not count; of those that are there.

    >>> one, other = pa.table({"k": [1, 2, 2]}), pa.table({"k": [2, 1, 3]})
    >>> compare(one, pa.table({"k": [2, 1, 2]}))
    >>> print(compare(one, other))
    row 2 (in sorted order): k=2: 2 times without faults, 1 times with; in all 1 rows lost, 1 too many
    """
    if not [c for c in calm.column_names if c not in ignore and not (updating and c == OP)]:
        return None
    counted = [
        rows_of(cast(pl.DataFrame, pl.from_arrow(table)).lazy(), updating=updating, digits=digits, ignore=ignore)
        for table in (calm, stormy)
    ]
    differing = differing_rows(*counted)
    if differing.is_empty():
        return None
    missing = differing[OF_ONE] - differing[OF_OTHER]
    first = differing.row(0, named=True)
    times_without, times_with, before = (cast(int, first.pop(name)) for name in (OF_ONE, OF_OTHER, PLACE))
    return Difference(
        row_number=before + 1,
        row=first,
        times_without=times_without,
        times_with=times_with,
        lost=int(missing.clip(lower_bound=0).sum()),
        extra=int((-missing).clip(lower_bound=0).sum()),
    )

"""The first n rows of a key as an aggregate."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from cutwater.data.changes import row_type
from cutwater.data.words import is_word_type
from cutwater.errors import BuildError
from cutwater.operators.aggregate.accumulators import Accumulator, Aggregate
from cutwater.operators.stateless.expression_checks import unknown_column

ROWS = ".rows"
"""State column: the rows of a key, best first."""
MAX_ROWS = 10_000
"""Largest n: one row may move as many."""


@dataclass(frozen=True)
class TopRows(Aggregate):
    """The first ``n`` rows, as an aggregate: a list, best first.  ``column`` is none; whole rows are kept.

    Args:
        by: columns to order by, the first one first.
        descending: whether the largest comes first, by column.  Nulls come last, NaN counts as largest.
        n: rows that count.
        removing: all rows are kept, because rows may be removed.
        ranked: rows that move among the first n have changed.
    """

    by: tuple[str, ...] = ()
    descending: tuple[bool, ...] = ()
    n: int = 1
    removing: bool = False
    ranked: bool = False

    def __str__(self) -> str:
        order = ", ".join(f"{c} descending" if d else c for c, d in zip(self.by, self.descending, strict=True))
        return f"top {self.n} by {order}"

    def result_type(self, schema: pa.Schema) -> pa.DataType:
        return pa.list_(row_type(schema))

    def accumulator(self, schema: pa.Schema) -> Accumulator:
        from cutwater.operators.aggregate.ranked_rows import RankedRows  # Numba: only where rows flow

        return RankedRows(self, schema)

    @property
    def columns_read(self) -> frozenset[str] | None:
        return None

    def mergeable(self) -> Aggregate:
        return self

    def description(self, schema: pa.Schema) -> str:
        return str(self)

    def state_fields(self, schema: pa.Schema) -> list[pa.Field]:
        return [pa.field(self.name, self.result_type(schema))]


def check_order(schema: pa.Schema, rows: TopRows) -> None:
    """Check that rows can be ordered so.

    Raises:
        BuildError: an unknown column, a type without an order in 64 bits, or an ``n`` out of range.
    """
    if isinstance(rows.n, bool) or not isinstance(rows.n, int) or not 1 <= rows.n <= MAX_ROWS:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BuildError(f"n is a whole number from 1 to {MAX_ROWS}, not {rows.n!r}")
    if not rows.by or len(rows.by) != len(rows.descending):
        raise BuildError("by names at least one column, and descending is one answer for all or one for each")
    for name in rows.by:
        if schema.get_field_index(name) < 0:
            raise unknown_column(name, schema.names)
        kind = schema.field(name).type
        if not is_word_type(kind):
            raise BuildError(
                f"rows cannot be ordered by {name!r} of type {kind}",
                hint="Order by numbers, booleans, dates or times; cast the column first.",
            )

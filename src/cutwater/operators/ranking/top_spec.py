"""Top-n: the first n rows of each key in some order, kept up to date."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from cutwater.data.changes import OP, marked_schema, row_type
from cutwater.data.words import is_word_type
from cutwater.errors import BuildError
from cutwater.operators.aggregate.accumulators import Accumulator, Aggregate
from cutwater.operators.base import KeyedSpec, Operator
from cutwater.operators.stateless.expression_checks import unknown_column
from cutwater.state.keys import check_key_types, is_key_type
from cutwater.storage.snapshot.manifest import Shape, TableRecord

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
        from cutwater.operators.ranking.top_operator import RankedRows  # Numba: only where rows flow

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


@dataclass(frozen=True)
class TopSpec(KeyedSpec):
    """An updating stream (see ``changes``) of the first ``n`` rows of each key.

    Without ``rank`` a row comes (``+I``) when it enters the first n and goes (``-D``) when it leaves them; with it the
    column ``rank`` counts from 1, and each row that moves is updated.  Rows that compare equal rank in the order in
    which they came.  If the input is an updating stream itself, all its rows are kept, so that the next one moves up
    when a row is removed; a removed row is recognised by its place in the order and a 64-bit hash of its columns, and
    counts in ``rows_unmatched`` if it is not there.

    Args:
        rows: order and number.
        rank: name of the column with the rank, if one is wanted.
        updating: whether the input is an updating stream.

    Raises:
        BuildError: unknown columns, types that do not fit, names that collide.

    >>> rows = pa.schema({"shop": pa.int64(), "price": pa.float64()})
    >>> TopSpec(rows, ("shop",), TopRows(ROWS, "top", by=("price",), descending=(True,), n=3), "rank").outputs[0].names
    ['op', 'shop', 'price', 'rank']
    """

    repeatable = True

    rows: TopRows
    rank: str | None = None
    updating: bool = False

    def __post_init__(self) -> None:
        check_key_types(self.input_schema, self.keys)
        check_order(self.table, self.rows)
        if self.rank is not None and self.rank in (*self.table.names, OP):
            raise BuildError(
                f"two columns would be named {self.rank!r}", hint="Give the rank another name: rank='...'."
            )
        _ = self.outputs
        if self.updating:
            self._check_comparable()

    def _check_comparable(self) -> None:
        for column in self.table:
            if not (is_key_type(column.type) or is_word_type(column.type)):
                raise BuildError(
                    f"a row to be removed cannot be recognised by {column.name!r} of type {column.type}",
                    hint="Drop the column before this step, or cast it to text or a number.",
                )

    @property
    def table(self) -> pa.Schema:
        """Columns of the rows, without the mark of an updating stream."""
        return pa.schema([column for column in self.input_schema if not (self.updating and column.name == OP)])

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        rank = [] if self.rank is None else [pa.field(self.rank, pa.int64(), nullable=False)]
        return (marked_schema(pa.schema([*self.table, *rank])),)

    @property
    def state_tables(self) -> tuple[TableRecord, ...]:
        return (TableRecord("table", shape=Shape.TOP),)

    @property
    def settings(self) -> dict[str, str]:
        return {"rows": str(self.rows)}

    @property
    def state_schema(self) -> pa.Schema:
        return pa.schema([*self.key_fields, *self.rows.state_fields(self.table)])

    def build(self) -> Operator:
        from cutwater.operators.ranking.top_operator import Top  # Numba: only where rows flow

        return Top(self)

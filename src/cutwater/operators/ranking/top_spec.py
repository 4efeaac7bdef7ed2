"""Top-n: the first n rows of each key in some order, kept up to date."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from cutwater.data.changes import OP, marked_schema
from cutwater.data.words import is_word_type
from cutwater.errors import BuildError
from cutwater.operators.aggregate.top_rows import TopRows, check_order
from cutwater.operators.base import Operator, OperatorSpec
from cutwater.state.keys import check_key_types, is_key_type
from cutwater.storage.snapshot.manifest import Shape, TableRecord


@dataclass(frozen=True)
class TopSpec(OperatorSpec):
    """An updating stream (see ``changes``) of the first ``n`` rows of each key.

    Without ``rank`` a row comes (``+I``) when it enters the first n and goes (``-D``) when it leaves them; with it the
    column ``rank`` counts from 1, and each row that moves is updated.  Rows that compare equal rank in the order in
    which they came.  If the input is an updating stream itself, all its rows are kept, so that the next one moves up
    when a row is removed; a removed row is recognised by its place in the order and a 64-bit hash of its columns, and
    counts in ``rows_unmatched`` if it is not there.

    Args:
        input_schema: schema of the rows.
        keys: key columns.
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

    input_schema: pa.Schema
    keys: tuple[str, ...]
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
    def input_schemas(self) -> tuple[pa.Schema, ...]:
        return (self.input_schema,)

    @property
    def state_tables(self) -> tuple[TableRecord, ...]:
        return (TableRecord("table", shape=Shape.TOP),)

    @property
    def settings(self) -> dict[str, str]:
        return {"rows": str(self.rows)}

    @property
    def state_schema(self) -> pa.Schema:
        return pa.schema([*(self.input_schema.field(name) for name in self.keys), *self.rows.state_fields(self.table)])

    def build(self) -> Operator:
        from cutwater.operators.ranking.top_operator import Top  # Numba: only where rows flow

        return Top(self)

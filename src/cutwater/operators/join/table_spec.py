"""Join of two tables: each holds the latest row of every key, and the result is kept up to date."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import pyarrow as pa

from cutwater.data.changes import OP, marked_schema, row_type
from cutwater.errors import BuildError
from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.base import Operator
from cutwater.operators.join.columns import joined_fields
from cutwater.operators.join.spec import JoinSpec

JoinType = Literal["inner", "left", "right", "full"]
TABLES = (".left", ".right")
"""State columns: the row of each table."""


@dataclass(frozen=True, eq=False)
class TableJoinSpec(JoinSpec):
    """An updating stream (see ``changes``) of the join of two tables by key.

    A row that comes replaces the row of its key in its table.  An input that is an updating stream itself sets a row
    with ``+I`` and ``+U`` and removes it with ``-U`` and ``-D``; a removed row that is not there counts in
    ``rows_unmatched``.

    Output: ``op``, the left columns, the right ones without keys of the same name as their left partner.  Such a key
    column holds the key also where the left side has no row; a right column whose name the left side has gets
    ``suffix``.

    Args:
        left_schema: rows of input 0.
        right_schema: rows of input 1.
        left_keys: key columns of the left side.
        right_keys: their partners on the right side, in the same order.
        how: which rows come out without a partner: none, those of one side, or of both.
        suffix: appended to a right name that the left side has too.
        updating: whether the left and the right input are updating streams.

    Raises:
        BuildError: unknown columns, keys of types that do not fit, colliding names.

    >>> rows = pa.schema({"k": pa.int64(), "v": pa.string()})
    >>> TableJoinSpec(rows, rows, ("k",), ("k",)).outputs[0].names
    ['op', 'k', 'v', 'v_right']
    """

    how: JoinType = "inner"
    suffix: str = "_right"
    updating: tuple[bool, bool] = (False, False)

    def __post_init__(self) -> None:
        if self.how not in get_args(JoinType):
            raise BuildError(f"how is one of {', '.join(map(repr, get_args(JoinType)))}, not {self.how!r}")
        super().__post_init__()

    def _joined_fields(self) -> list[pa.Field]:
        left, right = self.tables
        of_left: list[pa.Field] = []
        for column in left:
            if column.name in self.shared_keys:
                of_left.append(pa.field(column.name, self.key_types[self.left_keys.index(column.name)]))
            else:
                of_left.append(column.with_nullable(column.nullable or self.outer[1]))
        of_right = joined_fields(left, right, self.shared_keys, self.suffix, nullable=self.outer[0])
        return list(marked_schema(pa.schema([*of_left, *of_right])))

    @property
    def tables(self) -> tuple[pa.Schema, pa.Schema]:
        """Columns of the two tables: those of the inputs without the mark of an updating stream."""
        left, right = (
            pa.schema([column for column in schema if not (updating and column.name == OP)])
            for schema, updating in zip((self.left_schema, self.right_schema), self.updating, strict=True)
        )
        return left, right

    @property
    def shared_keys(self) -> tuple[str, ...]:
        """Key columns that have one name on both sides."""
        return tuple(a for a, b in zip(self.left_keys, self.right_keys, strict=True) if a == b)

    @property
    def outer(self) -> tuple[bool, bool]:
        """Whether rows of the left, and of the right table come out without a partner."""
        return self.how in ("left", "full"), self.how in ("right", "full")

    @property
    def held_schema(self) -> pa.Schema:
        """Columns of which the state keeps the latest value by key."""
        return pa.schema([pa.field(n, row_type(t)) for n, t in zip(TABLES, self.tables, strict=True)])

    @property
    def held(self) -> tuple[Aggregate, ...]:
        """What the state keeps by key, over rows of ``held_schema``."""
        return tuple(Aggregate(name, "last", name) for name in TABLES)

    @property
    def keeps_every_row(self) -> bool:
        return self.how == "left"

    @property
    def state_schema(self) -> pa.Schema:
        keys = [pa.field(name, kind) for name, kind in zip(self.left_keys, self.key_types, strict=True)]
        return pa.schema([*keys, *self.held_schema])

    def build(self) -> Operator:
        from cutwater.operators.join.table_operator import TableJoin  # Numba: only where rows flow

        return TableJoin(self)

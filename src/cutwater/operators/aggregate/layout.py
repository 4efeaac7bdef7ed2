"""Tables of aggregates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import pyarrow as pa

from cutwater.operators.aggregate.accumulators import Accumulator, Aggregate
from cutwater.state.table.keyed_table import KeyedTable, Layout

AggregateTable: TypeAlias = KeyedTable[Accumulator]
"""The values of each aggregate, by key."""


def aggregate_layout(aggregates: Sequence[Aggregate], schema: pa.Schema) -> Layout[Accumulator]:
    """One accumulator per aggregate, over rows of ``schema``."""
    types = [[field.type for field in aggregate.state_fields(schema)] for aggregate in aggregates]
    return Layout(lambda: [aggregate.accumulator(schema) for aggregate in aggregates], types)

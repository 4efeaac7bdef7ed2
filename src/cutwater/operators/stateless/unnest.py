"""Unnest: a row for each element of a list column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from cutwater.errors import BuildError
from cutwater.operators.base import BaseOperator, OperatorSpec, Outputs


@dataclass(frozen=True)
class UnnestSpec(OperatorSpec):
    """The columns of the rows that lists of rows hold, then the place in its list (from 1 on).

    Args:
        input_schema: schema of the rows.
        column: a column of lists of structs.
        kept: columns that come out before those of the structs.
        place: name of the column with the place.

    Raises:
        BuildError: two columns would have the same name.

    >>> lists = pa.list_(pa.struct({"v": pa.int64()}))
    >>> spec = UnnestSpec(pa.schema({"k": pa.int64(), "rows": lists}), "rows", ("k",), "rank")
    >>> batch = pa.record_batch({"k": [1], "rows": pa.array([[{"v": 5}, {"v": 6}]], lists)})
    >>> [b.to_pylist() for _, b in Unnest(spec).process(0, batch)]
    [[{'k': 1, 'v': 5, 'rank': 1}, {'k': 1, 'v': 6, 'rank': 2}]]
    """

    repeatable = True

    input_schema: pa.Schema
    column: str
    kept: tuple[str, ...]
    place: str

    def __post_init__(self) -> None:
        names = self.outputs[0].names
        for position, name in enumerate(names):
            if name in names[:position]:
                raise BuildError(
                    f"two columns would be named {name!r}",
                    hint="Rename the column, or give the rank another name: rank='...'.",
                )

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        rows: Any = self.input_schema.field(self.column).type.value_type
        kept = [self.input_schema.field(name) for name in self.kept]
        inner = [rows.field(i) for i in range(rows.num_fields)]
        return (pa.schema([*kept, *inner, pa.field(self.place, pa.int64(), nullable=False)]),)

    @property
    def input_schemas(self) -> tuple[pa.Schema, ...]:
        return (self.input_schema,)

    def build(self) -> Unnest:
        return Unnest(self)


class Unnest(BaseOperator):
    """Stateless."""

    def __init__(self, spec: UnnestSpec) -> None:
        self._spec = spec

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        lists: Any = batch.column(self._spec.column)
        starts = lists.offsets.to_numpy()
        lengths = np.diff(starts)
        rows: Any = lists.flatten()
        if len(rows) == 0:
            return []
        owners = pa.array(np.repeat(np.arange(len(lengths)), lengths))
        places = np.arange(1, len(rows) + 1) - np.repeat(starts[:-1] - starts[0], lengths)
        kept = [batch.column(name).take(owners) for name in self._spec.kept]
        columns = [*kept, *rows.flatten(), pa.array(places)]
        return [(0, pa.RecordBatch.from_arrays(columns, schema=self._spec.outputs[0]))]

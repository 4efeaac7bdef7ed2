"""Union: the rows of several streams of one schema, in the order in which they arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from cutwater.data.schema_differences import schema_differences
from cutwater.data.schema_text import ZONES_DIFFER_HINT, zones_differ
from cutwater.errors import BuildError
from cutwater.operators.base import BaseOperator, OperatorSpec

_HINT = "Bring them to one schema with select, rename or a cast before the union."


def check_same_schema(schemas: Sequence[pa.Schema]) -> pa.Schema:
    """The schema of a union of streams of these schemas; a column is nullable if it is in one of them.

    Raises:
        BuildError: they differ in names, types or order; the message lists how.
    """
    first = schemas[0]
    for number, other in enumerate(schemas[1:], start=2):
        differences = schema_differences(first, other)
        if differences:
            zones = any(
                zones_differ(f.type, other.field(f.name).type) for f in first if other.get_field_index(f.name) >= 0
            )
            raise BuildError(
                f"stream {number} of the union differs from the first: {'; '.join(differences)}",
                hint=ZONES_DIFFER_HINT if zones else _HINT,
            )
    nullable = (any(s.field(i).nullable for s in schemas) for i in range(len(first)))
    return pa.schema([f.with_nullable(n) for f, n in zip(first, nullable, strict=True)], metadata=first.metadata)


@dataclass(frozen=True)
class UnionSpec(OperatorSpec):
    """``inputs`` streams that all have ``schema``.

    Raises:
        BuildError: fewer than one input.
    """

    repeatable = True

    schema: pa.Schema
    inputs: int

    def __post_init__(self) -> None:
        if self.inputs < 1:
            raise BuildError(f"a union needs at least 1 stream, got {self.inputs}")

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        return (self.schema,)

    @property
    def input_schemas(self) -> tuple[pa.Schema, ...]:
        return (self.schema,) * self.inputs

    @property
    def keeps_every_row(self) -> bool:
        return True

    def build(self) -> UnionOperator:
        return UnionOperator(self.schema)


class UnionOperator(BaseOperator):
    """Passes batches on; a batch of a stream with stricter nullability takes the union's schema."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def process(self, input: int, batch: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
        if batch.schema is not self._schema and batch.schema != self._schema:
            batch = pa.RecordBatch.from_arrays(batch.columns, schema=self._schema)
        return [(0, batch)]

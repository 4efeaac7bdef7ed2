"""Steps that keep nothing and compute nothing: union, a row for each element of a list, and the check of keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from cutwater.data.schema_text import ZONES_DIFFER_HINT, schema_differences, zones_differ
from cutwater.errors import BuildError
from cutwater.operators.base import KeyedSpec, OneInputSpec, Operator, OperatorSpec, Outputs, check_names
from cutwater.state.keys import check_key_types, valid_key_mask

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


class UnionOperator(Operator):
    """Passes batches on; a batch of a stream with stricter nullability takes the union's schema."""

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema

    def process(self, input: int, batch: pa.RecordBatch) -> list[tuple[int, pa.RecordBatch]]:
        if batch.schema is not self._schema and batch.schema != self._schema:
            batch = pa.RecordBatch.from_arrays(batch.columns, schema=self._schema)
        return [(0, batch)]


@dataclass(frozen=True)
class UnnestSpec(OneInputSpec):
    """The columns of the rows that lists of rows hold, then the place in its list (from 1 on).

    Args:
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

    column: str
    kept: tuple[str, ...]
    place: str

    def __post_init__(self) -> None:
        check_names(self.outputs[0].names, "Rename the column, or give the rank another name: rank='...'.")

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        rows: Any = self.input_schema.field(self.column).type.value_type
        kept = [self.input_schema.field(name) for name in self.kept]
        inner = [rows.field(i) for i in range(rows.num_fields)]
        return (pa.schema([*kept, *inner, pa.field(self.place, pa.int64(), nullable=False)]),)

    def build(self) -> Unnest:
        return Unnest(self)


class Unnest(Operator):
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


@dataclass(frozen=True)
class KeyCheckSpec(KeyedSpec):
    """Divert rows with a null or NaN in a key column.

    Output 0 holds the rows with a key, output 1 the others as they came, so that they can be repaired and read again.
    Both keep the order of the input.

    Raises:
        BuildError: unknown key column, or a type that cannot be a key.

    >>> spec = KeyCheckSpec(pa.schema({"k": pa.int64()}), ("k",))
    >>> [(n, b.to_pydict()) for n, b in KeyCheck(spec).process(0, pa.record_batch({"k": [1, 2]}))]
    [(0, {'k': [1, 2]})]
    """

    repeatable = True

    def __post_init__(self) -> None:
        if not self.keys:
            raise BuildError("a key check needs a key column")
        check_key_types(self.input_schema, self.keys)

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        return (self.input_schema, self.input_schema)

    def build(self) -> KeyCheck:
        return KeyCheck(self)


class KeyCheck(Operator):
    """Counts what it diverts as ``rows_dead_letter``."""

    def __init__(self, spec: KeyCheckSpec) -> None:
        self._keys = spec.keys

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        valid = valid_key_mask(batch, self._keys)
        if valid is None:
            return [(0, batch)]
        good = batch.filter(pa.array(valid))
        bad = batch.filter(pa.array(~valid))
        if bad.num_rows:
            self.ctx.count("rows_dead_letter", bad.num_rows)
        return [(n, part) for n, part in enumerate((good, bad)) if part.num_rows]

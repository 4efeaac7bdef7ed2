"""Key check: rows without a usable key leave by a side output instead of failing the job."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow as pa

from cutwater.errors import BuildError
from cutwater.operators.base import BaseOperator, OperatorSpec, Outputs
from cutwater.state.keys import check_key_types, valid_key_mask


@dataclass(frozen=True)
class KeyCheckSpec(OperatorSpec):
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

    input_schema: pa.Schema
    keys: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.keys:
            raise BuildError("a key check needs a key column")
        check_key_types(self.input_schema, self.keys)

    @property
    def outputs(self) -> tuple[pa.Schema, ...]:
        return (self.input_schema, self.input_schema)

    @property
    def input_schemas(self) -> tuple[pa.Schema, ...]:
        return (self.input_schema,)

    def build(self) -> KeyCheck:
        return KeyCheck(self)


class KeyCheck(BaseOperator):
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

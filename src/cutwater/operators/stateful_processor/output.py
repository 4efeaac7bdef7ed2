"""The rows that a ``StatefulProcessor`` yields, as batches of its declared schema."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa

from cutwater.data.rows import Row
from cutwater.operators.base import Outputs
from cutwater.operators.row_output import RowBuilder
from cutwater.operators.stateful_processor.records import codec

_NO_FIELDS: dict[str, list[str]] = {}


class TupleBuilder(RowBuilder):
    """Collects ``Row`` objects and tuples.

    A ``Row`` with the names of the declared columns is taken by name, any other row by position, as Spark does it.

    >>> builder = TupleBuilder(print, pa.schema({"k": pa.string(), "n": pa.int64()}))
    >>> builder.add(("a", 1), {}, 0)
    >>> [(n, batch.to_pydict()) for n, batch in builder.take(0, lambda index: {})]
    [(0, {'k': ['a'], 'n': [1]})]
    """

    def __init__(self, fn: object, schema: pa.Schema) -> None:
        super().__init__(fn, schema)
        self.unit = "key"
        self._order: list[str] = schema.names
        self._sorted = sorted(self._order)
        self._stores = [codec(field.type).store for field in schema]

    def extend(self, rows: list[Any], index: int) -> None:
        """Rows made from input key ``index``; ``take`` looks at them."""
        self._made += rows
        self._origins += [index] * len(rows)

    def add(self, out: object, row: Row, index: int) -> None:
        """One row made from input key ``index``."""
        self.extend([out], index)

    def take(self, output: int, origin: Callable[[int], Row]) -> Outputs:
        """The rows so far as batches for an output.

        Raises:
            UserCodeError: one is no row, has not as many values as there are columns, or a value does not fit.
        """
        width, made = len(self._order), self._made
        for row, index in zip(made, self._origins, strict=True):
            if not isinstance(row, tuple):
                raise self.misfit(f"made {type(row).__name__} instead of a Row", origin(index), index)
            if len(row) != width:  # pyright: ignore[reportUnknownArgumentType]
                raise self.misfit(f"made a row of {len(row)} values for {width} columns", origin(index), index)  # pyright: ignore[reportUnknownArgumentType]
        order = self._order
        for number, row in enumerate(made):
            fields = getattr(row, "__dict__", _NO_FIELDS).get("__fields__")
            if fields is not None and fields != order and sorted(fields) == self._sorted:
                made[number] = tuple([row[fields.index(name)] for name in order])
        return super().take(output, origin)

    def _columns(self, made: list[Any]) -> Iterable[list[Any]]:
        columns = map(list, zip(*made, strict=True))
        for column, store in zip(columns, self._stores, strict=True):
            yield column if store is None else [None if value is None else store(value) for value in column]

"""The rows that a ``StatefulProcessor`` yields, as batches of its declared schema."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from cutwater.operators.row_output import RowBuilder
from cutwater.operators.rows import Row
from cutwater.tws.records import codec

__all__ = ["TupleBuilder"]


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
        self._width = len(schema)
        self._order: list[str] = schema.names
        self._sorted = sorted(self._order)
        self._stores = [codec(field.type).store for field in schema]

    def add(self, out: object, row: Row, index: int) -> None:
        """One row made from input key ``index``.

        Raises:
            UserCodeError: it is no row, or has not as many values as there are columns.
        """
        if not isinstance(out, tuple):
            raise self.misfit(f"made {type(out).__name__} instead of a Row", row, index)
        if len(out) != self._width:  # pyright: ignore[reportUnknownArgumentType]
            raise self.misfit(f"made a row of {len(out)} values for {self._width} columns", row, index)  # pyright: ignore[reportUnknownArgumentType]
        made: Any = out  # pyright: ignore[reportUnknownVariableType]
        fields = made.__dict__.get("__fields__") if hasattr(made, "__dict__") else None
        if fields is not None and fields != self._order and sorted(fields) == self._sorted:
            made = tuple(made[fields.index(name)] for name in self._order)
        self._made.append(made)
        self._origins.append(index)

    def _columns(self, made: list[Any]) -> Iterable[list[Any]]:
        columns = map(list, zip(*made, strict=True))
        for column, store in zip(columns, self._stores, strict=True):
            yield column if store is None else [None if value is None else store(value) for value in column]

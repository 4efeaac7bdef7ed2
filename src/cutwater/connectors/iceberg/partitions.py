"""Rows of a partitioned table, dealt to its partitions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.types as pt

from cutwater.connectors.iceberg.catalog import iceberg_library
from cutwater.errors import BuildError

_compute: Any = pyarrow.compute
_EPOCH_YEAR, _HOUR_US = 1970, 3_600_000_000

Key = tuple[bytes | None, ...]
"""Values of a partition as Iceberg writes single values, which is also how a handle has them."""


class PartitionRows(NamedTuple):
    """Rows of one partition."""

    key: Key
    rows: pa.RecordBatch


class Partitioning:
    """The default partitioning of a table.

    Args:
        metadata: of the table.
        name: of the table.

    Raises:
        BuildError: it has a transform that is not written.
    """

    def __init__(self, metadata: Any, name: str) -> None:
        self.spec, self._schema = metadata.spec(), metadata.schema()
        types = self.spec.partition_type(self._schema).fields
        self._types = [field.field_type for field in types]
        self._conversions: Any = iceberg_library("conversions")
        self._fields: list[tuple[str, Callable[[Any], pa.Array]]] = []
        for field in self.spec.fields:
            transform = _TRANSFORMS.get(str(field.transform))
            column = self._schema.find_column_name(field.source_id)
            if transform is None or column is None or column not in self._schema.as_arrow().names:
                raise BuildError(
                    f"iceberg table {name!r} is partitioned by {field.transform} of {column!r}, which is not written",
                    hint=f"Partition it by a column's values or times: {', '.join(_TRANSFORMS)}.",
                )
            self._fields.append((column, transform))

    @property
    def partitioned(self) -> bool:
        """True if there is more than one partition."""
        return bool(self._fields)

    def split(self, rows: pa.RecordBatch) -> Iterator[PartitionRows]:
        """The rows by partition; those of one keep their order."""
        if not self._fields or not rows.num_rows:
            yield PartitionRows((), rows)
            return
        values = [transform(rows.column(column)) for column, transform in self._fields]
        groups = np.zeros(rows.num_rows, np.int64)
        for array in values:
            encoded: Any = array.dictionary_encode(null_encoding="encode")
            groups = groups * len(encoded.dictionary) + np.asarray(encoded.indices)
            groups = np.unique(groups, return_inverse=True)[1]  # else the numbers of many fields grow too large
        _, firsts, groups = np.unique(groups, return_index=True, return_inverse=True)
        if len(firsts) == 1:
            yield PartitionRows(self._key(values, 0), rows)
            return
        order = np.argsort(groups, kind="stable")
        ends = np.searchsorted(groups[order], np.arange(1, len(firsts) + 1))
        ordered: Any = rows.take(pa.array(order))
        begin = 0
        for first, end in zip(firsts, ends, strict=True):
            yield PartitionRows(self._key(values, int(first)), ordered.slice(begin, int(end) - begin))
            begin = int(end)

    def _key(self, values: list[pa.Array], row: int) -> Key:
        found = (array[row].as_py() for array in values)
        return tuple(
            None if value is None else self._conversions.to_bytes(kind, value)
            for kind, value in zip(self._types, found, strict=True)
        )

    def record(self, key: Key) -> Any:
        """A partition's values as the library wants them."""
        values = (
            None if value is None else self._conversions.from_bytes(kind, value)
            for kind, value in zip(self._types, key, strict=True)
        )
        return iceberg_library("typedef").Record(*values)

    def folder(self, key: Key) -> str:
        """Where its files lie below those of the table; nowhere else if there is only one partition."""
        return self.spec.partition_to_path(self.record(key), self._schema) + "/" if key else ""


def _identity(column: Any) -> pa.Array:
    return column


def _void(column: Any) -> pa.Array:
    return pa.nulls(len(column), pa.int32())


def _year(column: Any) -> pa.Array:
    return _compute.subtract(_compute.year(column), _EPOCH_YEAR).cast(pa.int32())


def _month(column: Any) -> pa.Array:
    months = _compute.subtract(_compute.month(column), 1)
    return _compute.add(_compute.multiply(_compute.subtract(_compute.year(column), _EPOCH_YEAR), 12), months).cast(
        pa.int32()
    )


def _day(column: Any) -> pa.Array:
    if not pt.is_date32(column.type):
        column = _compute.floor_temporal(column, unit="day").cast(pa.date32())
    return column.cast(pa.int32())


def _hour(column: Any) -> pa.Array:
    us = column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
    hours = np.floor_divide(np.asarray(us.fill_null(0)), _HOUR_US).astype(np.int32)
    return pa.array(hours, mask=np.asarray(us.is_null()))


_TRANSFORMS: dict[str, Callable[[Any], pa.Array]] = {
    "identity": _identity,
    "year": _year,
    "month": _month,
    "day": _day,
    "hour": _hour,
    "void": _void,
}
"""By the name that the specification gives to each, times counted from 1970."""

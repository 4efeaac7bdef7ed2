"""Python objects by key as keyed segments, and back: what process functions keep, on its way to disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from cutwater.operators.keyed_table import group_segments, keyed_rows
from cutwater.state.index import Slots
from cutwater.state.segments import Segment

__all__ = ["object_rows", "object_segments"]


def object_segments(
    name: str, keys: Sequence[pa.Field], value: pa.Field, rows: Iterable[tuple[tuple[Any, ...], Any]], groups: int
) -> Iterator[Segment]:
    """Segments of a state: a row for each key and value.

    Args:
        name: of the state.
        keys: the key columns.
        value: the column of the values.
        rows: keys, and values as Arrow takes them.
        groups: number of all key groups.
    """
    found, values = [], []
    for key, content in rows:
        found.append(key)
        values.append(content)

    def key_arrays(slots: Slots) -> list[pa.Array]:
        columns = zip(*(found[i] for i in slots), strict=True)
        return [pa.array(column, field.type) for column, field in zip(columns, keys, strict=True)]

    def arrays(slots: Slots) -> list[pa.Array]:
        return [*key_arrays(slots), pa.array([values[i] for i in slots], value.type)]

    order = np.arange(len(found), dtype=np.int32)
    return group_segments(name, pa.schema([*keys, value]), order, key_arrays, arrays, groups)


def object_rows(
    segments: Iterable[Segment], keys: Sequence[pa.Field], value: pa.Field, owned: range
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """What ``object_segments`` was given, as far as it lies in the owned key groups.

    Raises:
        StorageError: the segments hold other columns, or types that do not convert.
    """
    for batch in keyed_rows(segments, pa.schema([*keys, value]), owned):
        yield from zip(
            zip(*(c.to_pylist() for c in batch.columns[:-1]), strict=True), batch.columns[-1].to_pylist(), strict=True
        )

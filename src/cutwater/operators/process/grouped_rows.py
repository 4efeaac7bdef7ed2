"""The rows of a batch grouped by key: what a process function of batches works with."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.errors import UserCodeError


@dataclass(frozen=True)
class GroupedRows:
    """The distinct keys of a batch, and which of them each row has.

    Attributes:
        keys: each key once, as a tuple of the values of the key columns.
        codes: per row, the place of its key in ``keys``.
    """

    keys: list[tuple[Hashable, ...]]
    codes: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.keys)


def group_rows(batch: pa.RecordBatch, keys: Sequence[str]) -> GroupedRows:
    """Group by key columns; null is a key like any other.

    Raises:
        UserCodeError: there is no key.

    >>> grouped = group_rows(pa.record_batch({"k": ["a", "b", "a"], "n": [1, 1, 2]}), ["k"])
    >>> grouped.keys, grouped.codes.tolist()
    ([('a',), ('b',)], [0, 1, 0])
    """
    if not keys:
        raise UserCodeError("rows without key cannot be grouped", hint="Call key_by(...) before process(...).")
    encoded = [batch.column(name).dictionary_encode("encode") for name in keys]
    codes: npt.NDArray[np.int64] = np.zeros(batch.num_rows, np.int64)
    for column in encoded:
        codes = codes * max(len(column.dictionary), 1) + column.indices.to_numpy()
        if len(encoded) > 1:  # compact after each column, so that the product stays small
            _, codes = np.unique(codes, return_inverse=True)
    count = int(codes.max(initial=-1)) + 1
    first = np.empty(count, np.int64)
    first[codes[::-1]] = np.arange(batch.num_rows - 1, -1, -1)
    values = [column.dictionary.take(column.indices.take(pa.array(first))).to_pylist() for column in encoded]
    found = list(zip(*values, strict=True))
    if not any(pa.types.is_floating(batch.column(name).type) for name in keys):
        return GroupedRows(found, codes)
    places: dict[tuple[Hashable, ...], int] = {}
    renumbered = np.array([places.setdefault(key, len(places)) for key in found], np.int64)
    if len(places) == count:
        return GroupedRows(found, codes)
    return GroupedRows(list(places), renumbered[codes])  # 0.0 and -0.0 are one key

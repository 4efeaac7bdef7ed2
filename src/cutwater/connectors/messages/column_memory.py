"""Columns as kernels see them that write rows: addresses of their values, validity, and offsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pt

from cutwater.data.words import bytes_view

COLUMN_BYTES = 32
"""Of a column in the table: where its values lie, where a byte for each tells whether it is there (0: all are), where
its offsets lie, and an unused word."""


class ColumnMemory:
    """Where columns lie, in the order in which they are added; keeps them alive.

    >>> memory = ColumnMemory(1)
    >>> memory.leaf(memory.begin(pa.array([1, 2])), pa.array([1, 2]))
    >>> memory.table[0].astype(bool).tolist()
    [True, False, False, False]
    """

    def __init__(self, columns: int) -> None:
        self.table = np.zeros((columns, COLUMN_BYTES // 8), np.int64)
        self._next = 0
        self._kept: list[object] = []

    def begin(self, array: pa.Array) -> int:
        """The number of a further column, of which the validity is noted."""
        place, self._next = self._next, self._next + 1
        if array.null_count:
            self.table[place, 1] = self._address(np.asarray(array.is_valid()).view(np.uint8))
        return place

    def lists(self, place: int, array: pa.Array) -> None:
        """Note the offsets of a column of lists or maps."""
        self.table[place, 2] = self._address(_ends(array))

    def leaf(self, place: int, array: pa.Array) -> None:
        """Note the values of a column that holds no others."""
        if pt.is_binary(array.type) or pt.is_string(array.type):
            data, ends = bytes_view(array)
            self.table[place, 0], self.table[place, 2] = self._address(data), self._address(ends)
        elif pt.is_boolean(array.type):
            self.table[place, 0] = self._address(np.asarray(array.cast(pa.uint8()).fill_null(0)))
        else:
            buffer = array.buffers()[1]
            self._kept.append(buffer)
            width = array.type.bit_width // 8
            self.table[place, 0] = 0 if buffer is None else buffer.address + width * array.offset

    def _address(self, values: npt.NDArray[Any]) -> int:
        whole = np.ascontiguousarray(values)
        self._kept.append(whole)
        return whole.ctypes.data


def _ends(array: pa.Array) -> npt.NDArray[np.int32]:
    """The offsets of lists or maps, one more than there are."""
    buffer = array.buffers()[1]
    if buffer is None or buffer.size == 0:
        return np.zeros(len(array) + 1, np.int32)
    return np.frombuffer(buffer, np.int32, len(array) + 1, 4 * array.offset)

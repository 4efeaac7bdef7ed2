"""Columns of few texts as dictionaries: what follows looks at each value once and moves places instead of texts."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.connectors.text.dictionary_kernels import find_values
from cutwater.data.words import new_buffer

FEW_ROWS = 1024
"""Blocks of fewer rows are not worth a dictionary."""
MOST_VALUES = 4096
"""A column of more values is none of few."""
_MOST_BYTES = 1 << 17
_SLOTS = 4 * MOST_VALUES

_find_values: Any = find_values


class TextDictionary:
    """The values of one column of a file, as far as they have come, in the order in which they came.

    The dictionary stays the same object while no new value comes, which whoever follows may rely on to keep what they
    found out about it.

    >>> names = TextDictionary()
    >>> texts = np.frombuffer(b"abba" + bytes(16), np.uint8)
    >>> ends, valid = np.array([0, 1, 2, 3, 4], np.int32), np.ones(4, np.uint8)
    >>> names.column(texts, ends, valid, None, 0).to_pylist()
    ['a', 'b', 'b', 'a']
    """

    def __init__(self) -> None:
        self._places = np.full(_SLOTS, -1, np.int32)
        self._words = np.zeros(_SLOTS, np.uint64)
        self._values = np.empty(_MOST_BYTES, np.uint8)
        self._ends = np.zeros(MOST_VALUES + 2, np.int32)
        self._dictionary = pa.array([], pa.string())

    def column(
        self,
        texts: npt.NDArray[np.uint8],
        ends: npt.NDArray[np.int32],
        valid: npt.NDArray[np.uint8],
        mask: pa.Buffer | None,
        nulls: int,
    ) -> pa.DictionaryArray | None:
        """The rows of a block.

        Args:
            texts: their bytes; eight more behind them can be read.
            ends: where each text ends, one more than there are rows: the first begins at ``ends[0]``.
            valid: a byte for each row, 0 for null.
            mask, nulls: the same as Arrow has it.

        Returns:
            ``None`` if the column has too many values for a dictionary, or half of its rows are new ones; it is of no
            more use then.

        Raises:
            ArrowInvalid: a text is not UTF-8.
        """
        rows, known = len(ends) - 1, int(self._ends[0])
        buffer, out = new_buffer(rows, np.int32)
        if not _find_values(texts, ends, valid, self._places, self._words, self._values, self._ends, out):
            return None
        if rows >= FEW_ROWS and int(self._ends[0]) - known > rows // 2:
            return None
        if len(self._dictionary) != self._ends[0]:
            self._dictionary = self._as_array()
        indices = pa.Array.from_buffers(pa.int32(), rows, [mask, buffer], nulls)
        return pa.DictionaryArray.from_arrays(indices, self._dictionary, safe=False)

    def _as_array(self) -> pa.Array:
        count = int(self._ends[0])
        ends = self._ends[1 : count + 2].copy()
        values = self._values[: ends[-1]].copy()
        array = pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(ends), pa.py_buffer(values)], 0)
        array.validate(full=True)
        return array

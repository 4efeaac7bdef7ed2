"""A store of Arrow values of any type: appended, referred to by row number, never changed in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_MERGE_BYTES = 1 << 30


class ValueStore:
    """Values in chunks.  A reference is the number of a value since the store was made; -1 refers to null.

    Small chunks are merged into larger ones as they come, so that there are few and each value is copied
    O(log n) times.  Chunks are immutable: a frozen store shares them.

    >>> store = ValueStore(pa.string())
    >>> store.append(pa.array(["a", "b"])), store.append(pa.array(["c"]))
    (0, 2)
    >>> store.take(np.array([2, -1, 0])).to_pylist()
    ['c', None, 'a']
    """

    def __init__(self, kind: pa.DataType) -> None:
        self.type = kind
        self._chunks: list[pa.Array] = []
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    @property
    def nbytes(self) -> int:
        """What the values take."""
        return sum(chunk.nbytes for chunk in self._chunks)

    def append(self, values: pa.Array) -> int:
        """Add values; returns the reference of the first, the others follow it."""
        first = self._rows
        if len(values) == 0:
            return first
        self._rows += len(values)
        self._chunks.append(values)
        while len(self._chunks) > 1 and len(self._chunks[-2]) <= 2 * len(self._chunks[-1]):
            if self._chunks[-2].nbytes + self._chunks[-1].nbytes > _MERGE_BYTES:
                break
            self._chunks[-2:] = [pa.concat_arrays(self._chunks[-2:])]
        return first

    def take(self, references: npt.NDArray[np.int64]) -> pa.Array:
        """The values referred to, in that order."""
        if len(self._chunks) == 1 or len(references) == 0:
            chunk = self._chunks[0] if self._chunks else pa.nulls(0, self.type)
            return chunk.take(_indices(references))
        starts = np.cumsum([0, *(len(chunk) for chunk in self._chunks)])
        home = np.searchsorted(starts, references, side="right") - 1  # -1 for null
        order = np.argsort(home, kind="stable")
        pieces: list[pa.Array] = []
        for number in np.unique(home):
            wanted = references[home == number]
            if number < 0:
                pieces.append(pa.nulls(len(wanted), self.type))
            else:
                pieces.append(self._chunks[number].take(pa.array(wanted - starts[number])))
        back = np.empty(len(order), np.int64)
        back[order] = np.arange(len(order))
        return pa.concat_arrays(pieces).take(pa.array(back))

    def compacted(self, references: npt.NDArray[np.int64]) -> ValueStore:
        """A new store of the values referred to (none of them null), numbered 0, 1, 2 ... in that order."""
        store = ValueStore(self.type)
        step = len(references)
        begin = 0
        while begin < len(references):
            try:
                store.append(self.take(references[begin : begin + step]))
                begin += step
            except pa.ArrowInvalid:  # over 2 GB of text in one array
                if step == 1:
                    raise
                step = (step + 1) // 2
        return store

    def frozen(self) -> ValueStore:
        """The store as it is now, at no cost."""
        view = ValueStore(self.type)
        view._chunks, view._rows = list(self._chunks), self._rows
        return view


def _indices(references: npt.NDArray[np.int64]) -> pa.Array:
    missing: Any = references < 0
    return pa.array(references, mask=missing) if missing.any() else pa.array(references)

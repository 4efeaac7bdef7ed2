"""Kernels of rows as bytes."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.state.kernels import kernel


@kernel
def join_spans(data: Any, offsets: Any, cursors: Any, out: Any) -> None:
    """Append each row's bytes to ``out`` at the row's cursor, and move the cursor."""
    for i in range(cursors.shape[0]):
        start = np.int64(offsets[i])
        length = np.int64(offsets[i + 1]) - start
        at = cursors[i]
        for b in range(length):
            out[at + b] = data[start + b]
        cursors[i] = at + length


@kernel
def row_starts(data: Any, offsets: Any, width: Any, lengths: Any, starts: Any, counts: Any) -> Any:
    """Find the beginnings of the rows that lie one behind the other in each value; returns their number.

    A row has ``width`` bytes, and behind them as many as the four bytes at each of ``lengths`` in it say.
    """
    rows = 0
    for i in range(counts.shape[0]):
        at = np.int64(offsets[i])
        first = rows
        while at < offsets[i + 1]:
            starts[rows] = at
            rows += 1
            size = np.int64(width)
            for k in range(lengths.shape[0]):
                place = at + lengths[k]
                for b in range(4):
                    size += np.int64(data[place + b]) << (8 * b)
            at += size
        counts[i] = rows - first
    return rows

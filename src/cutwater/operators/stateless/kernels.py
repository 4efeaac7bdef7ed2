"""Kernels of filters over Arrow columns: which rows are kept, and their values moved together."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.state.kernels import kernel


@kernel
def rows_of_values(places: Any, kept: Any, rows: Any) -> Any:
    """Numbers of the rows whose value is kept, ascending.

    Args:
        places: for each row the place of its value in a dictionary.
        kept: for each value whether its rows are kept, 0 or 1.
        rows: receives the numbers; as long as ``places``.

    Returns how many there are; -1 if a place lies outside of the dictionary.
    """
    values = np.uint64(kept.shape[0])
    count = np.uint64(0)
    # Every number is written and the count moves on or not: without a branch that nobody could foretell.
    for i in range(np.uint64(places.shape[0])):
        place = np.uint64(places[i])
        if place >= values:
            return np.int64(-1)
        rows[count] = i
        count += np.uint64(kept[place])
    return np.int64(count)


@kernel
def rows_of_mask(kept: Any, rows: Any) -> Any:
    """Numbers of the rows where the mask (bytes, 0 or 1) is set, ascending; returns how many there are."""
    count = np.uint64(0)
    for i in range(np.uint64(kept.shape[0])):
        rows[count] = i
        count += np.uint64(kept[i])
    return np.int64(count)


@kernel
def gather(values: Any, rows: Any, out: Any) -> None:
    """``out[i] = values[rows[i]]``; the caller has checked the numbers."""
    for i in range(np.uint64(rows.shape[0])):
        out[i] = values[np.uint64(rows[i])]

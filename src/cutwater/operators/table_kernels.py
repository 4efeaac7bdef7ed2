"""Kernels of the steps that keep rows by key: which rows come out, as numbers of rows in a pool, and how marked.

The pool holds the stored row of each key of the batch first (``local`` is the key's number there), then the rows of
the batch.  ``current`` is by key the pool row held now, -1 for none; afterwards it is what the key is left with.
"""

from __future__ import annotations

from typing import Any

from cutwater.data.changes import AFTER, BEFORE, DELETE, INSERT
from cutwater.state.kernels import kernel


@kernel
def keep_first(local: Any, times: Any, within: Any, known: Any, until: Any, kept: Any) -> None:
    """Mark the rows that are no duplicates: of an unknown key, or at or after the time that it is known ``until``."""
    for i in range(local.shape[0]):
        key = local[i]
        kept[i] = not known[key] or times[i] >= until[key]
        if kept[i]:
            known[key] = True
            until[key] = times[i] + within


@kernel
def keep_last(local: Any, times: Any, within: Any, known: Any, until: Any, current: Any, rows: Any, codes: Any) -> Any:
    """Changes of the table of latest rows; returns how many."""
    count = 0
    offset = current.shape[0]
    for i in range(local.shape[0]):
        key = local[i]
        if known[key] and times[i] < until[key]:
            rows[count] = current[key]
            codes[count] = BEFORE
            codes[count + 1] = AFTER
            count += 1
        else:
            codes[count] = INSERT
            known[key] = True
            until[key] = times[i] + within
        rows[count] = offset + i
        count += 1
        current[key] = offset + i
    return count


@kernel
def replace_rows(
    local: Any, added: Any, current: Any, other: Any, outer: Any, other_outer: Any, rows: Any, keys: Any, codes: Any
) -> Any:
    """Changes of a join of two tables when rows of one are set (``added``) or removed.

    Args:
        other: by key, whether the other table has a row.
        outer: whether rows of this table come out without a partner.
        other_outer: the same of the other table.
        rows: gets pool rows of this table, -1 for none.
        keys: gets the number of the key.

    Returns (changes, removed rows that were not there).
    """
    count = 0
    missing = 0
    offset = current.shape[0]
    for i in range(local.shape[0]):
        key = local[i]
        old = current[key]
        new = offset + i if added[i] else -1
        if old < 0 and new < 0:
            missing += 1
            continue
        before = (old >= 0 and (outer or other[key])) or (other[key] and other_outer)
        after = (new >= 0 and (outer or other[key])) or (other[key] and other_outer)
        if before:
            rows[count] = old
            keys[count] = key
            codes[count] = BEFORE if after else DELETE
            count += 1
        if after:
            rows[count] = new
            keys[count] = key
            codes[count] = AFTER if before else INSERT
            count += 1
        current[key] = new
    return count, missing

"""Kernels of the accumulators, and of the steps that keep rows by key.

Those of the accumulators make one pass over the rows, with state in arrays by group id, and the value after each row in
``out``.  ``valid`` is the mask of the rows whose value is not null, empty if all are; with a mask, ``out_seen`` tells
which rows of ``out`` hold a value.

Those that keep rows say which rows come out, as numbers of rows in a *pool*, and how marked.  The pool holds the stored
row of each key of the batch first (``local`` is the key's number there), then the rows of the batch.  ``current`` is by
key the pool row held now, -1 for none; afterwards it is what the key is left with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cutwater.data.changes import AFTER, BEFORE, DELETE, INSERT
from cutwater.state.kernels import kernel


@kernel
def add(gids: Any, amounts: Any, values: Any) -> None:
    for i in range(gids.shape[0]):
        values[gids[i]] += amounts[i]


@kernel
def count(gids: Any, valid: Any, counts: Any, out: Any) -> None:
    masked = valid.shape[0] > 0
    for i in range(np.uint64(gids.shape[0])):
        gid = np.uint64(gids[i])
        value = counts[gid]
        if not masked or valid[i]:
            value += 1
            counts[gid] = value
        out[i] = value


@kernel
def sum_words(gids: Any, words: Any, valid: Any, sums: Any, seen: Any, out: Any, out_seen: Any) -> Any:
    """Returns the first row whose sum does not fit 64 bits, -1 if none."""
    masked = valid.shape[0] > 0
    for i in range(np.uint64(gids.shape[0])):
        gid = np.uint64(gids[i])
        before = sums[gid]
        if masked and not valid[i]:
            out[i] = before
            out_seen[i] = seen[gid]
            continue
        after = before + words[i]
        if (before ^ after) & (words[i] ^ after) < 0:
            return np.int64(i)
        sums[gid] = after
        seen[gid] = True
        out[i] = after
        if masked:
            out_seen[i] = True
    return -1


@kernel
def sum_floats(gids: Any, values: Any, valid: Any, sums: Any, seen: Any, out: Any, out_seen: Any) -> None:
    masked = valid.shape[0] > 0
    for i in range(gids.shape[0]):
        gid = gids[i]
        if not masked or valid[i]:
            sums[gid] += values[i]
            seen[gid] = True
        out[i] = sums[gid]
        if masked:
            out_seen[i] = seen[gid]


@kernel
def mean(gids: Any, values: Any, valid: Any, sums: Any, counts: Any, out: Any, out_seen: Any) -> None:
    masked = valid.shape[0] > 0
    for i in range(gids.shape[0]):
        gid = gids[i]
        if not masked or valid[i]:
            sums[gid] += values[i]
            counts[gid] += 1
        out[i] = sums[gid] / np.float64(counts[gid])
        if masked:
            out_seen[i] = counts[gid] > 0


@kernel
def spread(
    gids: Any,
    values: Any,
    valid: Any,
    counts: Any,
    means: Any,
    squares: Any,
    less: Any,
    root: Any,
    out: Any,
    out_seen: Any,
) -> None:
    """Variance, or its ``root``, of n - ``less`` values: Welford's recurrence (1962), stable where means are large."""
    masked = valid.shape[0] > 0
    for i in range(gids.shape[0]):
        gid = gids[i]
        if not masked or valid[i]:
            counts[gid] += 1
            away = values[i] - means[gid]
            means[gid] += away / np.float64(counts[gid])
            squares[gid] += away * (values[i] - means[gid])
        seen = counts[gid] > less
        value = squares[gid] / np.float64(counts[gid] - less) if seen else 0.0
        out[i] = np.sqrt(value) if root else value
        out_seen[i] = seen


@kernel
def merge_spread(
    gids: Any, more_counts: Any, more_means: Any, more_squares: Any, counts: Any, means: Any, squares: Any
) -> None:
    """Chan, Golub and LeVeque (1979): two sets of values as one."""
    for i in range(gids.shape[0]):
        gid = gids[i]
        if more_counts[i] > 0:
            total = counts[gid] + more_counts[i]
            away = more_means[i] - means[gid]
            share = np.float64(more_counts[i]) / np.float64(total)
            squares[gid] += more_squares[i] + away * away * np.float64(counts[gid]) * share
            means[gid] += away * share
            counts[gid] = total


FIRST, LAST, MIN, MAX = range(4)


def _choosing(how: int) -> Callable[..., None]:
    """The kernel that keeps one of the words of each group id; ``how`` is a constant of its machine code."""

    @kernel
    def choose(gids: Any, words: Any, valid: Any, values: Any, seen: Any, out: Any, out_seen: Any) -> None:
        masked = valid.shape[0] > 0
        for i in range(gids.shape[0]):
            gid = gids[i]
            if not masked or valid[i]:
                word, held = words[i], values[gid]
                if not seen[gid] or how == LAST or (how == MIN and word < held) or (how == MAX and word > held):
                    values[gid] = word
                seen[gid] = True
            out[i] = values[gid]
            if masked:
                out_seen[i] = seen[gid]

    return choose


CHOOSE = {"first": _choosing(FIRST), "last": _choosing(LAST), "min": _choosing(MIN), "max": _choosing(MAX)}
"""Kernels by kind of aggregate."""


@kernel
def put(gids: Any, restored: Any, values: Any) -> None:
    """Set group ids to what a snapshot held of them."""
    for i in range(gids.shape[0]):
        values[gids[i]] = restored[i]


@kernel
def put_seen(gids: Any, restored: Any, valid: Any, values: Any, seen: Any) -> None:
    """The same where null says that nothing has been seen: such a group id holds zero, whatever lies below the null."""
    masked = valid.shape[0] > 0
    for i in range(gids.shape[0]):
        gid = gids[i]
        seen[gid] = not masked or valid[i]
        values[gid] = restored[i] if seen[gid] else 0


@kernel
def localise(gids: Any, numbers: Any, local: Any, touched: Any) -> Any:
    """Number the distinct group ids of a batch 0, 1 ... as they come; returns how many.

    ``numbers`` is scratch by group id, zero everywhere before and after; ``local`` gets the number of each row's group
    id and ``touched`` the group id of each number.
    """
    count = 0
    for i in range(gids.shape[0]):
        gid = gids[i]
        number = np.int64(numbers[gid]) - 1
        if number < 0:
            number = count
            touched[number] = gid
            count += 1
            numbers[gid] = count
        local[i] = number
    for number in range(count):
        numbers[touched[number]] = 0
    return count


@kernel
def pick(local: Any, valid: Any, ranks: Any, how: Any, current: Any, out: Any) -> None:
    """The pool row that each number holds after each row; the rows of the batch follow the earlier values in the pool.

    ``how``: one of ``FIRST`` to ``MAX``.  ``current``: pool row by number, -1 for none.
    """
    masked = valid.shape[0] > 0
    offset = current.shape[0]
    for i in range(local.shape[0]):
        number = local[i]
        now = current[number]
        if not masked or valid[i]:
            row = offset + i
            if now < 0 or how == LAST:
                now = row
            elif how == MIN:
                if ranks[row] < ranks[now]:
                    now = row
            elif how == MAX and ranks[row] > ranks[now]:
                now = row
            current[number] = now
        out[i] = now


@kernel
def note_orders(gids: Any, orders: Any, valid: Any, first: Any, held: Any) -> None:
    """Rows come: ``held`` by group id is one more than the order of the first, or the last, valid one; 0 for none."""
    masked = valid.shape[0] > 0
    for i in range(gids.shape[0]):
        if masked and not valid[i]:
            continue
        gid = gids[i]
        if not first or held[gid] == 0:
            held[gid] = orders[i] + 1


@kernel
def take_orders(gids: Any, orders: Any, first: Any, held: Any) -> None:
    """States come: the lowest, or the highest, order wins; -1 is none.  ``held`` as above."""
    for i in range(gids.shape[0]):
        order = orders[i] + 1
        gid = gids[i]
        if order == 0:
            continue
        if held[gid] == 0 or (first and order < held[gid]) or (not first and order > held[gid]):
            held[gid] = order


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

"""Kernels of the accumulators: one pass over the rows, state in arrays by id, the value after each row in ``out``.

``valid`` is the mask of the rows whose value is not null, empty if all are; with a mask, ``out_seen`` tells which rows
of ``out`` hold a value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

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


@kernel
def minimum(gids: Any, words: Any, valid: Any, values: Any, seen: Any, out: Any, out_seen: Any) -> None:
    masked = valid.shape[0] > 0
    for i in range(gids.shape[0]):
        gid = gids[i]
        if not masked or valid[i]:
            if not seen[gid] or words[i] < values[gid]:
                values[gid] = words[i]
            seen[gid] = True
        out[i] = values[gid]
        if masked:
            out_seen[i] = seen[gid]


@kernel
def maximum(gids: Any, words: Any, valid: Any, values: Any, seen: Any, out: Any, out_seen: Any) -> None:
    masked = valid.shape[0] > 0
    for i in range(gids.shape[0]):
        gid = gids[i]
        if not masked or valid[i]:
            if not seen[gid] or words[i] > values[gid]:
                values[gid] = words[i]
            seen[gid] = True
        out[i] = values[gid]
        if masked:
            out_seen[i] = seen[gid]


@kernel
def first(gids: Any, words: Any, valid: Any, values: Any, seen: Any, out: Any, out_seen: Any) -> None:
    masked = valid.shape[0] > 0
    for i in range(gids.shape[0]):
        gid = gids[i]
        if not seen[gid] and (not masked or valid[i]):
            values[gid] = words[i]
            seen[gid] = True
        out[i] = values[gid]
        if masked:
            out_seen[i] = seen[gid]


@kernel
def last(gids: Any, words: Any, valid: Any, values: Any, seen: Any, out: Any, out_seen: Any) -> None:
    masked = valid.shape[0] > 0
    for i in range(gids.shape[0]):
        gid = gids[i]
        if not masked or valid[i]:
            values[gid] = words[i]
            seen[gid] = True
        out[i] = values[gid]
        if masked:
            out_seen[i] = seen[gid]


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

    ``how``: 0 first, 1 last, 2 min, 3 max.  ``current``: pool row by number, -1 for none.
    """
    masked = valid.shape[0] > 0
    offset = current.shape[0]
    for i in range(local.shape[0]):
        number = local[i]
        now = current[number]
        if not masked or valid[i]:
            row = offset + i
            if now < 0 or how == 1:
                now = row
            elif how == 2:
                if ranks[row] < ranks[now]:
                    now = row
            elif how == 3 and ranks[row] > ranks[now]:
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

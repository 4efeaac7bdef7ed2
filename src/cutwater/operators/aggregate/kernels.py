"""Kernels of the accumulators: one pass over the rows, state in arrays by slot, the value after each row in ``out``.

``valid`` is the mask of the rows whose value is not null, empty if all are; with a mask, ``out_seen`` tells which rows
of ``out`` hold a value.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.state.kernels import kernel


@kernel
def add(slots: Any, amounts: Any, values: Any) -> None:
    for i in range(slots.shape[0]):
        values[slots[i]] += amounts[i]


@kernel
def count(slots: Any, valid: Any, counts: Any, out: Any) -> None:
    masked = valid.shape[0] > 0
    for i in range(np.uint64(slots.shape[0])):
        slot = np.uint64(slots[i])
        value = counts[slot]
        if not masked or valid[i]:
            value += 1
            counts[slot] = value
        out[i] = value


@kernel
def sum_words(slots: Any, words: Any, valid: Any, sums: Any, seen: Any, out: Any, out_seen: Any) -> Any:
    """Returns the first row whose sum does not fit 64 bits, -1 if none."""
    masked = valid.shape[0] > 0
    for i in range(np.uint64(slots.shape[0])):
        slot = np.uint64(slots[i])
        before = sums[slot]
        if masked and not valid[i]:
            out[i] = before
            out_seen[i] = seen[slot]
            continue
        after = before + words[i]
        if (before ^ after) & (words[i] ^ after) < 0:
            return np.int64(i)
        sums[slot] = after
        seen[slot] = True
        out[i] = after
        if masked:
            out_seen[i] = True
    return -1


@kernel
def sum_floats(slots: Any, values: Any, valid: Any, sums: Any, seen: Any, out: Any, out_seen: Any) -> None:
    masked = valid.shape[0] > 0
    for i in range(slots.shape[0]):
        slot = slots[i]
        if not masked or valid[i]:
            sums[slot] += values[i]
            seen[slot] = True
        out[i] = sums[slot]
        if masked:
            out_seen[i] = seen[slot]


@kernel
def mean(slots: Any, values: Any, valid: Any, sums: Any, counts: Any, out: Any, out_seen: Any) -> None:
    masked = valid.shape[0] > 0
    for i in range(slots.shape[0]):
        slot = slots[i]
        if not masked or valid[i]:
            sums[slot] += values[i]
            counts[slot] += 1
        out[i] = sums[slot] / np.float64(counts[slot])
        if masked:
            out_seen[i] = counts[slot] > 0


@kernel
def spread(
    slots: Any,
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
    for i in range(slots.shape[0]):
        slot = slots[i]
        if not masked or valid[i]:
            counts[slot] += 1
            away = values[i] - means[slot]
            means[slot] += away / np.float64(counts[slot])
            squares[slot] += away * (values[i] - means[slot])
        seen = counts[slot] > less
        value = squares[slot] / np.float64(counts[slot] - less) if seen else 0.0
        out[i] = np.sqrt(value) if root else value
        out_seen[i] = seen


@kernel
def merge_spread(
    slots: Any, more_counts: Any, more_means: Any, more_squares: Any, counts: Any, means: Any, squares: Any
) -> None:
    """Chan, Golub and LeVeque (1979): two sets of values as one."""
    for i in range(slots.shape[0]):
        slot = slots[i]
        if more_counts[i] > 0:
            total = counts[slot] + more_counts[i]
            away = more_means[i] - means[slot]
            share = np.float64(more_counts[i]) / np.float64(total)
            squares[slot] += more_squares[i] + away * away * np.float64(counts[slot]) * share
            means[slot] += away * share
            counts[slot] = total


@kernel
def minimum(slots: Any, words: Any, valid: Any, values: Any, seen: Any, out: Any, out_seen: Any) -> None:
    masked = valid.shape[0] > 0
    for i in range(slots.shape[0]):
        slot = slots[i]
        if not masked or valid[i]:
            if not seen[slot] or words[i] < values[slot]:
                values[slot] = words[i]
            seen[slot] = True
        out[i] = values[slot]
        if masked:
            out_seen[i] = seen[slot]


@kernel
def maximum(slots: Any, words: Any, valid: Any, values: Any, seen: Any, out: Any, out_seen: Any) -> None:
    masked = valid.shape[0] > 0
    for i in range(slots.shape[0]):
        slot = slots[i]
        if not masked or valid[i]:
            if not seen[slot] or words[i] > values[slot]:
                values[slot] = words[i]
            seen[slot] = True
        out[i] = values[slot]
        if masked:
            out_seen[i] = seen[slot]


@kernel
def first(slots: Any, words: Any, valid: Any, values: Any, seen: Any, out: Any, out_seen: Any) -> None:
    masked = valid.shape[0] > 0
    for i in range(slots.shape[0]):
        slot = slots[i]
        if not seen[slot] and (not masked or valid[i]):
            values[slot] = words[i]
            seen[slot] = True
        out[i] = values[slot]
        if masked:
            out_seen[i] = seen[slot]


@kernel
def last(slots: Any, words: Any, valid: Any, values: Any, seen: Any, out: Any, out_seen: Any) -> None:
    masked = valid.shape[0] > 0
    for i in range(slots.shape[0]):
        slot = slots[i]
        if not masked or valid[i]:
            values[slot] = words[i]
            seen[slot] = True
        out[i] = values[slot]
        if masked:
            out_seen[i] = seen[slot]


@kernel
def put(slots: Any, restored: Any, values: Any) -> None:
    """Set slots to what a snapshot held of them."""
    for i in range(slots.shape[0]):
        values[slots[i]] = restored[i]


@kernel
def put_seen(slots: Any, restored: Any, valid: Any, values: Any, seen: Any) -> None:
    """The same where null says that nothing has been seen: such a slot holds zero, whatever lies below the null."""
    masked = valid.shape[0] > 0
    for i in range(slots.shape[0]):
        slot = slots[i]
        seen[slot] = not masked or valid[i]
        values[slot] = restored[i] if seen[slot] else 0


@kernel
def localise(slots: Any, numbers: Any, local: Any, touched: Any) -> Any:
    """Number the distinct slots of a batch 0, 1 ... as they come; returns how many.

    ``numbers`` is scratch by slot, zero everywhere before and after; ``local`` gets the number of each row's slot and
    ``touched`` the slot of each number.
    """
    count = 0
    for i in range(slots.shape[0]):
        slot = slots[i]
        number = np.int64(numbers[slot]) - 1
        if number < 0:
            number = count
            touched[number] = slot
            count += 1
            numbers[slot] = count
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
def note_orders(slots: Any, orders: Any, valid: Any, first: Any, held: Any) -> None:
    """Rows come: ``held`` by slot is one more than the order of the first, or the last, valid one; 0 for none."""
    masked = valid.shape[0] > 0
    for i in range(slots.shape[0]):
        if masked and not valid[i]:
            continue
        slot = slots[i]
        if not first or held[slot] == 0:
            held[slot] = orders[i] + 1


@kernel
def take_orders(slots: Any, orders: Any, first: Any, held: Any) -> None:
    """States come: the lowest, or the highest, order wins; -1 is none.  ``held`` as above."""
    for i in range(slots.shape[0]):
        order = orders[i] + 1
        slot = slots[i]
        if order == 0:
            continue
        if held[slot] == 0 or (first and order < held[slot]) or (not first and order > held[slot]):
            held[slot] = order

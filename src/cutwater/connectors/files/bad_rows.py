"""Tells good rows from bad ones when a whole block cannot be converted, with few attempts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa


@dataclass
class Salvaged:
    """Good rows of a block as batches, with their row numbers, and the bad rows with the reason."""

    batches: list[pa.RecordBatch] = field(default_factory=list[pa.RecordBatch])
    good: list[range] = field(default_factory=list[range])
    """Row numbers in the block of each batch's rows."""
    bad: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])


def salvage(rows: int, convert: Callable[[int, int], pa.RecordBatch], *, first_only: bool) -> Salvaged:
    """Convert ``rows`` rows; where that fails, halve until single rows are left.

    Needs about ``2 * log2(rows)`` attempts per bad row.

    Args:
        convert: rows ``[start, stop)`` as a batch of that many rows; raises ``pa.ArrowException`` or ``ValueError`` if
            one of them is bad.
        first_only: stop at the first bad row.

    >>> numbers = ["1", "2", "x", "4"]
    >>> result = salvage(4, lambda a, b: pa.record_batch({"n": [int(n) for n in numbers[a:b]]}), first_only=False)
    >>> result.bad[0][0], result.good
    (2, [range(0, 2), range(3, 4)])
    """
    result = Salvaged()
    todo = [(0, rows)] if rows else []
    while todo:
        start, stop = todo.pop()
        try:
            batch = convert(start, stop)
        except (pa.ArrowException, ValueError) as e:
            if stop - start == 1:
                result.bad.append((start, str(e)))
                if first_only:
                    break
            else:
                middle = (start + stop) // 2
                todo += [(middle, stop), (start, middle)]
            continue
        result.batches.append(batch)
        result.good.append(range(start, stop))
    return result

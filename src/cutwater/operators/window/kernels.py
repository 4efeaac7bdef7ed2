"""Kernels of the windows."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.state.kernels import kernel


@kernel
def assign(times: Any, every: Any, cut: Any, offset: Any, starts: Any) -> Any:
    """Start of each row's slice: [k * every, k * every + cut), or from there to the next; ``cut`` 0: not cut.

    Returns the first and the last start.
    """
    current = np.int64(0)
    end = np.int64(0)
    known = False
    lowest = np.int64(2**63 - 1)
    highest = np.int64(-(2**63))
    for i in range(times.shape[0]):
        time = times[i]
        if not known or time < current or time >= end:
            current = time - (time - offset) % every  # the remainder is never negative: floor division
            end = current + every
            if cut > 0:
                if time >= current + cut:
                    current += cut
                else:
                    end = current + cut
            known = True
            lowest = min(lowest, current)
            highest = max(highest, current)
        starts[i] = current
    return lowest, highest


@kernel
def expand(
    times: Any, size: Any, every: Any, offset: Any, lateness: Any, complete: Any, reached: Any, rows: Any, starts: Any
) -> Any:
    """Every (row, window start) such that the row lies in the window and the window is still open for it.

    ``complete``: only windows that have fired.  ``reached``: the watermark by row, or one for all.  Returns how many;
    writes them if ``rows`` has room.
    """
    count = 0
    write = rows.shape[0] > 0
    each = reached.shape[0] > 1
    for i in range(times.shape[0]):
        time = times[i]
        watermark = reached[i if each else 0]
        start = time - (time - offset) % every
        while start + size > time:
            last = start + size - 1
            if last + lateness <= watermark:
                break  # closed, and so are all the earlier ones
            if not complete or last <= watermark:
                if write:
                    rows[count] = i
                    starts[count] = start
                count += 1
            start -= every
    return count


@kernel
def touch(gids: Any, starts: Any, reach: Any, reached: Any, limit: Any, pending: Any, fired: Any, fire: Any) -> Any:
    """Which rows make their window come out at once: it is complete, or has ``limit`` rows that have not come out.

    ``pending``: such rows by group id (empty: not counted).  ``limit``: 0 for none.  Returns how many rows fire.
    """
    count = 0
    each = reached.shape[0] > 1
    counted = pending.shape[0] > 0
    for i in range(gids.shape[0]):
        gid = gids[i]
        complete = starts[i] + reach <= reached[i if each else 0]
        if counted:
            pending[gid] += 1
        if complete:
            fired[gid] = True
        now = complete or (counted and limit > 0 and pending[gid] >= limit)
        fire[i] = now
        if now:
            count += 1
            if counted:
                pending[gid] = 0
    return count


@kernel
def count_rows(gids: Any, pending: Any) -> None:
    for i in range(gids.shape[0]):
        pending[gids[i]] += 1


@kernel
def epochs(numbers: Any, fire: Any, current: Any, local: Any) -> Any:
    """Give the rows after a firing a number of their own: ``current`` by number is where its rows go now.

    Returns how many numbers there are then.
    """
    following = current.shape[0]
    for i in range(numbers.shape[0]):
        number = numbers[i]
        local[i] = current[number]
        if fire[i]:
            current[number] = following
            following += 1
    return following

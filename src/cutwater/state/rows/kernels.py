"""Kernels of chains: stored rows by key, in the order in which they came."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.state.kernels import kernel

FROM_HEAD = -2
"""Cursor of a row whose chain has not been entered yet."""


@kernel
def link(gids: Any, first: Any, heads: Any, tails: Any, nexts: Any) -> None:
    """Append rows ``first``, ``first`` + 1 ... to the chains of their group ids."""
    for i in range(gids.shape[0]):
        gid = gids[i]
        row = first + i
        nexts[row] = -1
        last = tails[gid]
        if last < 0:
            heads[gid] = row
        else:
            nexts[last] = row
        tails[gid] = row


@kernel
def rows_of(gids: Any, heads: Any, nexts: Any, bounds: Any, rows: Any) -> None:
    """The rows of the chains of some group ids, one chain behind the other; ``bounds`` says where each begins.

    With no room for them only ``bounds`` is set.
    """
    count = 0
    for i in range(gids.shape[0]):
        bounds[i] = count
        at = heads[gids[i]]
        while at >= 0:
            if rows.shape[0] > 0:
                rows[count] = at
            count += 1
            at = nexts[at]
    bounds[gids.shape[0]] = count


@kernel
def probe(
    gids: Any,
    times: Any,
    begin: Any,
    cursor: Any,
    low: Any,
    high: Any,
    dead_below: Any,
    heads: Any,
    tails: Any,
    nexts: Any,
    stored: Any,
    max_steps: Any,
    rows: Any,
    references: Any,
) -> Any:
    """Pairs of arriving rows with stored rows of their group id whose time lies within [time + low, time + high].

    Starts at arriving row ``begin`` where ``cursor`` left its chain, stops when the outputs are full or after
    ``max_steps`` stored rows.  Rows at the head of a chain that can match nothing any more are unlinked for good.

    Returns (pairs, next arriving row, its cursor).
    """
    pairs = 0
    steps = 0
    for i in range(begin, gids.shape[0]):
        gid = gids[i]
        at = cursor
        if at == FROM_HEAD:
            at = heads[gid]
            while at >= 0 and stored[at] < dead_below:
                at = nexts[at]
                steps += 1
            heads[gid] = at
            if at < 0:
                tails[gid] = -1
        earliest = times[i] + low
        latest = times[i] + high
        while at >= 0:
            if pairs == rows.shape[0] or steps >= max_steps:
                return pairs, np.int64(i), np.int64(at)
            steps += 1
            if earliest <= stored[at] <= latest:
                rows[pairs] = i
                references[pairs] = at
                pairs += 1
            at = nexts[at]
        cursor = np.int64(FROM_HEAD)
    return pairs, np.int64(gids.shape[0]), np.int64(FROM_HEAD)


@kernel
def latest(gids: Any, times: Any, settled: Any, heads: Any, nexts: Any, stored: Any, references: Any) -> None:
    """For each row the stored row of its group id with the highest time at or before its own, of equal ones the last.

    -1 where there is none.  Every row yet to come is later than ``settled``: a head of a chain that the row after it
    replaces by then is unlinked for good.
    """
    for i in range(gids.shape[0]):
        gid = gids[i]
        at = heads[gid]
        while at >= 0 and nexts[at] >= 0 and stored[at] <= stored[nexts[at]] <= settled:
            at = nexts[at]
        heads[gid] = at
        found = np.int64(-1)
        while at >= 0:
            if stored[at] <= times[i] and (found < 0 or stored[at] >= stored[found]):
                found = at
            at = nexts[at]
        references[i] = found

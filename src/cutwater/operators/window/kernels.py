"""Kernels of the windows, and of the sessions.

``by_gid`` of the sessions is (starts, ends, alive, nexts, taken, pending, fired, came_out, parents), by group id:

- ``nexts`` chains the sessions of a key from its *anchor*, the group id that holds the first of them;
- ``taken`` of an anchor is the highest session number of its key;
- ``pending`` counts the rows that have not come out;
- ``came_out`` says that the session came out since the call began, and is False everywhere before;
- ``parents`` is the session that swallowed this one, or itself; -1 for an anchor that holds no session yet.
"""

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


@kernel
def find(anchor: Any, time: Any, end: Any, by_gid: Any) -> Any:
    """The first of the key's sessions that a row belongs to (-1: none), how many others, and whether one came out."""
    starts, ends, alive, nexts, _, _, _, came_out, _ = by_gid
    found, others, blocked = -1, 0, False
    gid = anchor
    while gid >= 0:
        if alive[gid] and starts[gid] <= end and ends[gid] >= time:
            blocked = blocked or came_out[gid]
            if found < 0:
                found = gid
            else:
                others += 1
        gid = nexts[gid]
    return found, others, blocked


@kernel
def extend(found: Any, others: Any, time: Any, end: Any, by_gid: Any, gone: Any, swallowed: Any) -> Any:
    """Put a row into its session, which swallows the others it belongs to; returns how many ``gone`` holds then."""
    starts, ends, alive, nexts, _, pending, _, _, parents = by_gid
    low = min(starts[found], time)
    high = max(ends[found], end)
    gid = nexts[found] if others > 0 else -1
    while gid >= 0:
        if alive[gid] and starts[gid] <= end and ends[gid] >= time:
            low = min(low, starts[gid])
            high = max(high, ends[gid])
            alive[gid] = False
            parents[gid] = found
            pending[found] += pending[gid]
            gone[swallowed] = gid
            swallowed += 1
        gid = nexts[gid]
    starts[found] = low
    ends[found] = high
    return swallowed


@kernel
def begin(found: Any, time: Any, end: Any, by_gid: Any) -> None:
    """A session of one row, which is counted later."""
    starts, ends, alive, _, _, pending, fired, _, parents = by_gid
    starts[found] = time
    ends[found] = end
    alive[found] = True
    pending[found] = 0
    fired[found] = False
    parents[found] = found


@kernel
def take_rows(
    first: Any, times: Any, anchors: Any, settings: Any, reached: Any, used: Any, by_gid: Any, out: Any
) -> Any:
    """Put rows into sessions, one by one as they came.

    Stops before a row that would merge sessions one of which came out: a result must not hold what is merged later.

    Args:
        settings: gap, lateness, rows that make a session come out (0: none).
        reached: the watermark of each row, or one for all.
        used: group ids in use; new sessions get the next ones.
        out: group ids (by row, its session; -1 if it is late), borders (by row, of its session once the row is in),
            fire (by row, whether its session comes out at once), new_rows and new_ids (the row that began each new
            group id, and its session number), begun (sessions that have to be looked at when their time comes), gone
            (swallowed).

    Returns:
        the first row not taken; how many new group ids, sessions in ``begun`` and in ``gone``, rows that fire, and
        late rows.
    """
    gap, lateness, limit = settings
    _, ends, _, nexts, taken, pending, fired, came_out, parents = by_gid
    gids, borders, fire, new_rows, new_ids, begun, gone = out
    created, started, swallowed, firing, late = 0, 0, 0, 0, 0
    for i in range(first, times.shape[0]):
        anchor, end, watermark = anchors[i], times[i] + gap, reached[i if reached.shape[0] > 1 else 0]
        found, others, blocked = find(anchor, times[i], end, by_gid)
        if others > 0 and blocked:
            return i, created, started, swallowed, firing, late
        if found < 0 and end - 1 + lateness <= watermark:
            gids[i], fire[i] = -1, False
            late += 1
            continue
        if found < 0:
            found = anchor
            if parents[anchor] >= 0:
                found = used + created
                taken[anchor] += 1
                new_rows[created], new_ids[created] = i, taken[anchor]
                nexts[found], nexts[anchor] = nexts[anchor], found
                created += 1
            begin(found, times[i], end, by_gid)
            begun[started] = found
            started += 1
        else:
            swallowed = extend(found, others, times[i], end, by_gid, gone, swallowed)
        gids[i] = found
        borders[i, 0], borders[i, 1] = by_gid[0][found], ends[found]
        pending[found] += 1
        complete = ends[found] - 1 <= watermark
        if fired[found] and not complete:
            begun[started] = found  # it goes on, and fires again at its new end
            started += 1
        fired[found] = complete
        fire[i] = complete or (limit > 0 and pending[found] >= limit)
        if fire[i]:
            firing += 1
            pending[found] = 0
            came_out[found] = True
    return times.shape[0], created, started, swallowed, firing, late


@kernel
def members(anchors: Any, nexts: Any, out: Any) -> Any:
    """All group ids of some keys, each anchor given once; returns how many ``out`` holds."""
    count = 0
    for i in range(anchors.shape[0]):
        gid = anchors[i]
        while gid >= 0:
            out[count] = gid
            count += 1
            gid = nexts[gid]
    return count


@kernel
def resolve(gids: Any, parents: Any) -> None:
    """Replace each group id by the session that holds its rows in the end."""
    for i in range(gids.shape[0]):
        gid = gids[i]
        while parents[gid] != gid:
            gid = parents[gid]
        gids[i] = gid


@kernel
def place(anchors: Any, parents: Any, taken: Any, ids: Any) -> None:
    """Number sessions within their keys: the first takes the anchor."""
    for i in range(anchors.shape[0]):
        anchor = anchors[i]
        if parents[anchor] < 0:
            parents[anchor] = anchor
            ids[i] = 0
        else:
            taken[anchor] += 1
            ids[i] = taken[anchor]


@kernel
def link(gids: Any, anchors: Any, nexts: Any) -> None:
    """Chain group ids to their anchors; an anchor itself begins its chain."""
    for i in range(gids.shape[0]):
        if gids[i] != anchors[i]:
            nexts[gids[i]] = nexts[anchors[i]]
            nexts[anchors[i]] = gids[i]

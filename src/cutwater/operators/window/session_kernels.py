"""Kernels of the sessions.

``by_slot`` is (starts, ends, alive, nexts, taken, pending, fired, came_out, parents), arrays by slot:

- ``nexts`` chains the sessions of a key from its *anchor*, the slot that holds the first of them;
- ``taken`` of an anchor is the highest session number of its key;
- ``pending`` counts the rows that have not come out;
- ``came_out`` says that the session came out since the call began, and is False everywhere before;
- ``parents`` is the session that swallowed this one, or itself; -1 for an anchor that holds no session yet.
"""

from __future__ import annotations

from typing import Any

from cutwater.state.kernels import kernel


@kernel
def find(anchor: Any, time: Any, end: Any, by_slot: Any) -> Any:
    """The first of the key's sessions that a row belongs to (-1: none), how many others, and whether one came out."""
    starts, ends, alive, nexts, _, _, _, came_out, _ = by_slot
    found, others, blocked = -1, 0, False
    slot = anchor
    while slot >= 0:
        if alive[slot] and starts[slot] <= end and ends[slot] >= time:
            blocked = blocked or came_out[slot]
            if found < 0:
                found = slot
            else:
                others += 1
        slot = nexts[slot]
    return found, others, blocked


@kernel
def extend(found: Any, others: Any, time: Any, end: Any, by_slot: Any, gone: Any, swallowed: Any) -> Any:
    """Put a row into its session, which swallows the others it belongs to; returns how many ``gone`` holds then."""
    starts, ends, alive, nexts, _, pending, _, _, parents = by_slot
    low = min(starts[found], time)
    high = max(ends[found], end)
    slot = nexts[found] if others > 0 else -1
    while slot >= 0:
        if alive[slot] and starts[slot] <= end and ends[slot] >= time:
            low = min(low, starts[slot])
            high = max(high, ends[slot])
            alive[slot] = False
            parents[slot] = found
            pending[found] += pending[slot]
            gone[swallowed] = slot
            swallowed += 1
        slot = nexts[slot]
    starts[found] = low
    ends[found] = high
    return swallowed


@kernel
def begin(found: Any, time: Any, end: Any, by_slot: Any) -> None:
    """A session of one row, which is counted later."""
    starts, ends, alive, _, _, pending, fired, _, parents = by_slot
    starts[found] = time
    ends[found] = end
    alive[found] = True
    pending[found] = 0
    fired[found] = False
    parents[found] = found


@kernel
def take_rows(
    first: Any, times: Any, anchors: Any, settings: Any, reached: Any, used: Any, by_slot: Any, out: Any
) -> Any:
    """Put rows into sessions, one by one as they came.

    Stops before a row that would merge sessions one of which came out: a result must not hold what is merged later.

    Args:
        settings: gap, lateness, rows that make a session come out (0: none).
        reached: the watermark of each row, or one for all.
        used: slots in use; new sessions get the next ones.
        out: slots (by row, its session; -1 if it is late), borders (by row, of its session once the row is in), fire
            (by row, whether its session comes out at once), new_rows and new_ids (the row that began each new slot, and
            its session number), begun (sessions that have to be looked at when their time comes), gone (swallowed).

    Returns:
        the first row not taken; how many new slots, sessions in ``begun`` and in ``gone``, rows that fire, late rows.
    """
    gap, lateness, limit = settings
    _, ends, _, nexts, taken, pending, fired, came_out, parents = by_slot
    slots, borders, fire, new_rows, new_ids, begun, gone = out
    created, started, swallowed, firing, late = 0, 0, 0, 0, 0
    for i in range(first, times.shape[0]):
        anchor, end, watermark = anchors[i], times[i] + gap, reached[i if reached.shape[0] > 1 else 0]
        found, others, blocked = find(anchor, times[i], end, by_slot)
        if others > 0 and blocked:
            return i, created, started, swallowed, firing, late
        if found < 0 and end - 1 + lateness <= watermark:
            slots[i], fire[i] = -1, False
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
            begin(found, times[i], end, by_slot)
            begun[started] = found
            started += 1
        else:
            swallowed = extend(found, others, times[i], end, by_slot, gone, swallowed)
        slots[i] = found
        borders[i, 0], borders[i, 1] = by_slot[0][found], ends[found]
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
    """All slots of some keys, each anchor given once; returns how many ``out`` holds."""
    count = 0
    for i in range(anchors.shape[0]):
        slot = anchors[i]
        while slot >= 0:
            out[count] = slot
            count += 1
            slot = nexts[slot]
    return count


@kernel
def resolve(slots: Any, parents: Any) -> None:
    """Replace each slot by the session that holds its rows in the end."""
    for i in range(slots.shape[0]):
        slot = slots[i]
        while parents[slot] != slot:
            slot = parents[slot]
        slots[i] = slot


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
def link(slots: Any, anchors: Any, nexts: Any) -> None:
    """Chain slots to their anchors; an anchor itself begins its chain."""
    for i in range(slots.shape[0]):
        if slots[i] != anchors[i]:
            nexts[slots[i]] = nexts[anchors[i]]
            nexts[anchors[i]] = slots[i]

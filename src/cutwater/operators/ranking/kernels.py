"""Kernels of ranked rows: for every group id a sorted list of references to rows, in one arena.

An entry is a row of int64: the reference, a fingerprint of the row's content (0 where rows are never removed), then the
words to order by.  Equal words are in the order in which the rows came.  A list lies in a block that doubles as it
fills; as in ``distinct_kernels`` a block of an older epoch is moved, never changed, because a snapshot may read it.

By group id: epoch of the block, where it begins, entries that fit, entries in use.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.data.changes import AFTER, BEFORE, DELETE, INSERT
from cutwater.state.kernels import kernel

DONE, ARENA_FULL, OUTPUT_FULL = range(3)
_FIRST_ENTRIES = 2
_WORDS = 2
"""The place of the words in an entry."""


@kernel
def _compare(arena: Any, at: Any, words: Any, row: Any) -> Any:
    """Sign of an entry's words minus those of a row."""
    for c in range(words.shape[1]):
        if arena[at, _WORDS + c] < words[row, c]:
            return -1
        if arena[at, _WORDS + c] > words[row, c]:
            return 1
    return 0


@kernel
def _position(arena: Any, first: Any, count: Any, words: Any, row: Any, least: Any) -> Any:
    """Number of entries before a row: those not above it (``least`` 1), or those below it (``least`` 0)."""
    low = np.int64(0)
    high = np.int64(count)
    while low < high:
        middle = (low + high) >> 1
        if _compare(arena, first + middle, words, row) < least:
            low = middle + 1
        else:
            high = middle
    return low


@kernel
def _find(arena: Any, first: Any, count: Any, words: Any, prints: Any, row: Any) -> Any:
    """The latest entry equal to a row, -1 if there is none."""
    at = _position(arena, first, count, words, row, 1) - 1
    while at >= 0 and _compare(arena, first + at, words, row) == 0:
        if arena[first + at, 1] == prints[row]:
            return at
        at -= 1
    return np.int64(-1)


@kernel
def _make_room(arena: Any, used: Any, gid: Any, more: Any, epoch: Any, sides: Any) -> Any:
    """The block is of this epoch and has room for ``more`` entries; returns the entries in use, -1 if none are left."""
    epochs, offsets, sizes, counts = sides
    size = np.int64(sizes[gid])
    wanted = size
    while wanted < counts[gid] + more:
        wanted = max(2 * wanted, _FIRST_ENTRIES)
    if wanted == size and epochs[gid] == epoch:
        return used
    if used + wanted > arena.shape[0]:
        return np.int64(-1)
    old = offsets[gid]
    for at in range(counts[gid]):
        for c in range(arena.shape[1]):
            arena[used + at, c] = arena[old + at, c]
    epochs[gid] = epoch
    offsets[gid] = used
    sizes[gid] = wanted
    return used + wanted


@kernel
def _emit(count: Any, reference: Any, code: Any, rank: Any, out: Any) -> Any:
    references, codes, ranks = out
    references[count] = reference
    codes[count] = code
    ranks[count] = rank + 1
    return count + 1


@kernel
def _insert(arena: Any, first: Any, count: Any, at: Any, limit: Any, ranked: Any, emitted: Any, out: Any) -> Any:
    """Open a gap at ``at`` in a list of ``count`` entries with room for one more; its reference is set already.

    The new entry waits behind the last; what leaves or changes rank among the first ``limit`` is emitted.
    """
    width = arena.shape[1]
    if at < limit and not ranked:
        if count >= limit:
            emitted = _emit(emitted, arena[first + limit - 1, 0], DELETE, limit - 1, out)
        emitted = _emit(emitted, arena[first + count, 0], INSERT, at, out)
    if at < limit and ranked:
        fresh = arena[first + count, 0]
        for rank in range(at, min(count + 1, limit)):
            new = fresh if rank == at else arena[first + rank - 1, 0]
            if rank < count:
                emitted = _emit(emitted, arena[first + rank, 0], BEFORE, rank, out)
                emitted = _emit(emitted, new, AFTER, rank, out)
            else:
                emitted = _emit(emitted, new, INSERT, rank, out)
    for c in range(width):
        value = arena[first + count, c]
        for place in range(first + count, first + at, -1):
            arena[place, c] = arena[place - 1, c]
        arena[first + at, c] = value
    return emitted


@kernel
def _remove(arena: Any, first: Any, count: Any, at: Any, limit: Any, ranked: Any, emitted: Any, out: Any) -> Any:
    """Close the gap at ``at``; the entry behind the first ``limit`` moves up."""
    if at < limit and not ranked:
        emitted = _emit(emitted, arena[first + at, 0], DELETE, at, out)
        if count > limit:
            emitted = _emit(emitted, arena[first + limit, 0], INSERT, limit - 1, out)
    if at < limit and ranked:
        for rank in range(at, min(count, limit)):
            if rank + 1 < count:
                emitted = _emit(emitted, arena[first + rank, 0], BEFORE, rank, out)
                emitted = _emit(emitted, arena[first + rank + 1, 0], AFTER, rank, out)
            else:
                emitted = _emit(emitted, arena[first + rank, 0], DELETE, rank, out)
    for place in range(first + at, first + count - 1):
        for c in range(arena.shape[1]):
            arena[place, c] = arena[place + 1, c]
    return emitted


@kernel
def _add_row(
    arena: Any,
    used: Any,
    gid: Any,
    content: Any,
    row: Any,
    reference: Any,
    epoch: Any,
    sides: Any,
    rules: Any,
    emitted: Any,
    out: Any,
) -> Any:
    """Returns (entries in use, -1 if the arena is full; changes; whether the row is in the list)."""
    words, prints = content
    limit, keep_all, ranked = rules
    counts = sides[3]
    count = np.int64(counts[gid])
    at = _position(arena, sides[1][gid], count, words, row, 1)
    if at >= limit and not keep_all:
        return used, emitted, False
    used = _make_room(arena, used, gid, 1, epoch, sides)
    if used < 0:
        return used, emitted, False
    last = sides[1][gid] + count
    arena[last, 0] = reference
    arena[last, 1] = prints[row]
    for c in range(words.shape[1]):
        arena[last, _WORDS + c] = words[row, c]
    emitted = _insert(arena, sides[1][gid], count, at, limit, ranked, emitted, out)
    counts[gid] = count + 1 if keep_all else min(count + 1, limit)
    return used, emitted, True


@kernel
def _remove_row(
    arena: Any, used: Any, gid: Any, content: Any, row: Any, epoch: Any, sides: Any, rules: Any, emitted: Any, out: Any
) -> Any:
    """Returns (entries in use, -1 if the arena is full; changes; whether the row was there)."""
    words, prints = content
    limit, _, ranked = rules
    counts = sides[3]
    count = np.int64(counts[gid])
    at = _find(arena, sides[1][gid], count, words, prints, row)
    if at < 0:
        return used, emitted, False
    used = _make_room(arena, used, gid, 0, epoch, sides)
    if used < 0:
        return used, emitted, False
    emitted = _remove(arena, sides[1][gid], count, at, limit, ranked, emitted, out)
    counts[gid] = count - 1
    return used, emitted, True


@kernel
def change(
    gids: Any,
    content: Any,
    added: Any,
    begin: Any,
    rules: Any,
    reference: Any,
    arena: Any,
    used: Any,
    epoch: Any,
    sides: Any,
    accepted: Any,
    out: Any,
) -> Any:
    """Add rows to the lists of their group ids, or remove them, and emit what that changes among the first ``limit``.

    Args:
        content: words and prints of the rows.
        added: by row, whether it is added; a removed one is found by its words and its print.
        rules: ``limit``, whether entries behind it stay (because rows may be removed), and whether ranks are part of
            the rows, so that a row that moves is updated.
        reference: of the first row that is accepted; the others follow it.
        sides: epochs, offsets, sizes, counts.
        accepted: gets the rows that are now referred to.
        out: gets references, codes of changes, ranks from 1 on.

    Returns (why it stopped, next row, entries in use, rows accepted, changes, removed rows that were not there).
    """
    taken = 0
    emitted = np.int64(0)
    missing = 0
    for i in range(begin, gids.shape[0]):
        if emitted + 2 * rules[0] + 2 > out[0].shape[0]:
            return OUTPUT_FULL, np.int64(i), used, taken, emitted, missing
        if added[i]:
            room, emitted, done = _add_row(
                arena, used, gids[i], content, i, reference + taken, epoch, sides, rules, emitted, out
            )
            if done:
                accepted[taken] = i
                taken += 1
        else:
            room, emitted, done = _remove_row(arena, used, gids[i], content, i, epoch, sides, rules, emitted, out)
            if not done and room >= 0:
                missing += 1
        if room < 0:
            return ARENA_FULL, np.int64(i), used, taken, emitted, missing
        used = room
    return DONE, np.int64(gids.shape[0]), used, taken, emitted, missing


@kernel
def gather(gids: Any, arena: Any, offsets: Any, starts: Any, references: Any) -> None:
    """References of the lists of some group ids, from ``starts[i]`` to ``starts[i + 1]``."""
    for i in range(gids.shape[0]):
        first = offsets[gids[i]]
        for at in range(starts[i + 1] - starts[i]):
            references[starts[i] + at] = arena[first + at, 0]


@kernel
def pack(arena: Any, offsets: Any, counts: Any, into: Any, references: Any) -> Any:
    """Move the entries of all ids side by side and number their references anew; ``references`` gets the old ones."""
    used = np.int64(0)
    for gid in range(offsets.shape[0]):
        first = offsets[gid]
        offsets[gid] = used
        for at in range(counts[gid]):
            for c in range(1, arena.shape[1]):
                into[used, c] = arena[first + at, c]
            into[used, 0] = used
            references[used] = arena[first + at, 0]
            used += 1
    return used

"""Kernels of the distinct counts: HyperLogLog sketches of many group ids in one arena.

A sketch has m = 2**precision registers.  Of a value's 64-bit hash the low bits choose the register; the register holds
the highest *rank* seen, which is one more than the number of zero bits that end the rest.  A register is kept as an
entry ``index << 6 | rank`` in a small open-addressing block that doubles as it fills.  The block of m / 4 words is
dense instead: a byte per register, its number of the byte.

A block that a snapshot may read is never changed: every freeze begins a new *epoch*, and the first change of a group
id in an epoch moves its block.

By group id: epoch of the block (``epochs``), where it begins (``offsets``), its words (``sizes``, 0 for none),
registers that are not zero (``filled``), the sum of 2**-rank over those in units of 2**-48 (``sums``: exact, whatever
the order), and the ``estimates`` that follow from the two.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cutwater.state.kernels import GAMMA, kernel, mix

MAX_RANK = 48
_FIRST_WORDS = 4
_ALPHA = 1 / (2 * math.log(2))


@kernel
def _sigma(x: Any) -> Any:
    """x + sum of x**(2**k) * 2**(k - 1) over k >= 1, for 0 <= x < 1."""
    total = x
    factor = 1.0
    while True:
        x *= x
        before = total
        total += x * factor
        factor += factor
        if total == before:
            return total


@kernel
def _estimate(registers: Any, filled: Any, total: Any) -> Any:
    """The estimator of Ertl (2017, "New cardinality estimation algorithms for HyperLogLog sketches", algorithm 6)."""
    if filled == 0:
        return np.int64(0)
    z = total * 2.0**-MAX_RANK + registers * _sigma((registers - filled) / registers)
    return np.int64(round(_ALPHA * registers * registers / z))


@kernel
def _raise(arena: Any, offset: Any, size: Any, registers: Any, index: Any, rank: Any) -> Any:
    """Set a register to ``rank`` if it is lower; returns what it was.  A sparse block has room for one more."""
    if size * 4 == registers:
        at = offset + (index >> 2)
        shift = np.uint32(8 * (index & 3))
        old = np.int64((arena[at] >> shift) & np.uint32(255))
        if rank > old:
            arena[at] = arena[at] + (np.uint32(rank - old) << shift)
        return old
    at = index & (size - 1)
    while True:
        entry = np.int64(arena[offset + at])
        if entry == 0 or entry >> 6 == index:
            old = entry & 63
            if rank > old:
                arena[offset + at] = np.uint32(index << 6 | rank)
            return old
        at = (at + 1) & (size - 1)


@kernel
def _make_room(
    arena: Any, used: Any, gid: Any, registers: Any, epoch: Any, epochs: Any, offsets: Any, sizes: Any, filled: Any
) -> Any:
    """Move the group id's block if it is of an older epoch, into a larger one if one more entry might not fit.

    Returns the words in use, -1 if the arena is full.
    """
    size = np.int64(sizes[gid])
    enough = size * 4 == registers or (filled[gid] + 1) * 4 <= size * 3
    if enough and epochs[gid] == epoch:
        return used
    grown = size
    if not enough:
        grown = size * 2 if size > 0 else np.int64(_FIRST_WORDS)
    if used + grown > arena.shape[0]:
        return np.int64(-1)
    old = offsets[gid]
    for at in range(size):
        if enough:
            arena[used + at] = arena[old + at]
        elif arena[old + at] > 0:
            entry = np.int64(arena[old + at])
            _raise(arena, used, grown, registers, entry >> 6, entry & 63)
    epochs[gid] = epoch
    offsets[gid] = used
    sizes[gid] = grown
    return used + grown


@kernel
def _put(
    arena: Any, gid: Any, registers: Any, index: Any, rank: Any, offsets: Any, sizes: Any, filled: Any, sums: Any
) -> Any:
    """Raise a register and keep its counts; returns whether anything changed."""
    old = _raise(arena, offsets[gid], np.int64(sizes[gid]), registers, index, rank)
    if rank <= old:
        return False
    if old == 0:
        filled[gid] += 1
    else:
        sums[gid] -= np.int64(1) << np.int64(MAX_RANK - old)
    sums[gid] += np.int64(1) << np.int64(MAX_RANK - rank)
    return True


@kernel
def add_hashes(
    gids: Any,
    hashes: Any,
    valid: Any,
    precision: Any,
    begin: Any,
    arena: Any,
    used: Any,
    epoch: Any,
    out: Any,
    epochs: Any,
    offsets: Any,
    sizes: Any,
    filled: Any,
    sums: Any,
    estimates: Any,
) -> Any:
    """Add the hash of each row to the sketch of its group id; ``out`` gets the estimate after each row.

    Returns (row, words in use): ``row`` is the number of rows, or where to go on with a larger arena.
    """
    registers = np.int64(1) << np.int64(precision)
    masked = valid.shape[0] > 0
    for i in range(begin, gids.shape[0]):
        gid = gids[i]
        if not masked or valid[i]:
            room = _make_room(arena, used, gid, registers, epoch, epochs, offsets, sizes, filled)
            if room < 0:
                return np.int64(i), used
            used = room
            # Mixed again: the hash alone decides which subtask has the row, if the column is a key somewhere.
            hashed = mix(hashes[i] ^ GAMMA)
            index = np.int64(hashed & np.uint64(registers - 1))
            rest = hashed >> np.uint64(precision)
            rank = np.int64(1)
            while rank < MAX_RANK and rest & np.uint64(1) == np.uint64(0):
                rest >>= np.uint64(1)
                rank += 1
            if _put(arena, gid, registers, index, rank, offsets, sizes, filled, sums):
                estimates[gid] = _estimate(registers, filled[gid], sums[gid])
        out[i] = estimates[gid]
    return np.int64(gids.shape[0]), used


@kernel
def absorb(
    gids: Any,
    words: Any,
    starts: Any,
    precision: Any,
    begin: Any,
    arena: Any,
    used: Any,
    epoch: Any,
    epochs: Any,
    offsets: Any,
    sizes: Any,
    filled: Any,
    sums: Any,
    estimates: Any,
) -> Any:
    """Merge written sketch i, ``words[starts[i]:starts[i + 1]]``, into ``gids[i]``: the higher rank of each register.

    Returns as ``add_hashes``; to merge one sketch again changes nothing.
    """
    registers = np.int64(1) << np.int64(precision)
    for i in range(begin, gids.shape[0]):
        gid = gids[i]
        dense = (starts[i + 1] - starts[i]) * 4 == registers
        for at in range(starts[i], starts[i + 1]):
            for part in range(4 if dense else 1):
                if dense:
                    index = (at - starts[i]) * 4 + part
                    rank = np.int64((words[at] >> np.uint32(8 * part)) & np.uint32(255))
                else:
                    index = np.int64(words[at]) >> 6
                    rank = np.int64(words[at]) & 63
                if rank > 0:
                    room = _make_room(arena, used, gid, registers, epoch, epochs, offsets, sizes, filled)
                    if room < 0:
                        return np.int64(i), used
                    used = room
                    _put(arena, gid, registers, index, rank, offsets, sizes, filled, sums)
        estimates[gid] = _estimate(registers, filled[gid], sums[gid])
    return np.int64(gids.shape[0]), used


@kernel
def write_sketches(
    gids: Any, precision: Any, arena: Any, offsets: Any, sizes: Any, filled: Any, starts: Any, words: Any
) -> None:
    """Write sketches so that equal ones are equal words: sorted entries while they are the shorter form, else dense.

    ``starts`` holds where each goes: ``filled`` words if that is below m / 4, else m / 4.
    """
    registers = np.int64(1) << np.int64(precision)
    for i in range(gids.shape[0]):
        gid = gids[i]
        offset = offsets[gid]
        size = np.int64(sizes[gid])
        to = starts[i]
        if size * 4 < registers:
            for at in range(offset, offset + size):
                if arena[at] > 0:
                    words[to] = arena[at]
                    to += 1
            words[starts[i] : to] = np.sort(words[starts[i] : to])
        elif filled[gid] * 4 < registers:
            for index in range(registers):
                rank = (arena[offset + (index >> 2)] >> np.uint32(8 * (index & 3))) & np.uint32(255)
                if rank > 0:
                    words[to] = np.uint32(index << 6) | rank
                    to += 1
        else:
            for at in range(size):
                words[to + at] = arena[offset + at]


@kernel
def copy_blocks(arena: Any, offsets: Any, sizes: Any, into: Any) -> None:
    """Move the blocks of all group ids side by side into another arena."""
    used = np.int64(0)
    for gid in range(offsets.shape[0]):
        offset = offsets[gid]
        for at in range(sizes[gid]):
            into[used + at] = arena[offset + at]
        offsets[gid] = used
        used += sizes[gid]


@kernel
def first_seen(gids: Any, rows: Any, entries: Any, known: Any, counts: Any, out: Any) -> Any:
    """Count entries by group id when they come first: new entries are numbered on from ``known`` in row order.

    ``rows`` are the rows with a value, ``entries`` the entry of each; ``out`` gets the count after every row.
    """
    at = 0
    for i in range(gids.shape[0]):
        if at < rows.shape[0] and rows[at] == i:
            if entries[at] == known:
                counts[gids[i]] += 1
                known += 1
            at += 1
        out[i] = counts[gids[i]]
    return known

"""Kernels of the key indexes: open addressing with linear probing; a table entry holds group id + 1, and 0 is empty.

Lookups jump about in memory that no cache holds, so each block of rows is prefetched level by level before it is looked
up (twice as fast with a million keys).

An ``upsert`` stops where the table (or the arena) is full and says how far it came; the caller grows and goes on.  A
``rehash`` enters the group ids ``first`` .. ``count`` - 1 into another table.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.state.kernels import GAMMA, hash_span, hash_word, kernel, load_u64, mix, prefetch

_NONE = np.uint64(0)
_ONE = np.uint64(1)
_LOW = np.int64(0xFFFFFFFF)
_BLOCK_ROWS = 256
"""Rows looked ahead at once: what they touch fits the second-level cache, and fetching hides the first misses."""


@kernel
def upsert_word(words: Any, first: Any, table: Any, keys: Any, count: Any, gids: Any) -> Any:
    """One word per key.  Returns (rows done, group ids used).

    Most rows find their key at the first place.  So all are looked up there without a branch that could be guessed
    wrong, and the others are collected and probed one by one, in their order.
    """
    mask = np.uint64(table.shape[0] - 1)
    limit = keys.shape[0]
    places = np.empty(_BLOCK_ROWS, np.uint64)
    entries = np.empty(_BLOCK_ROWS, np.uint64)
    missed = np.empty(_BLOCK_ROWS + 1, np.uint64)
    for begin in range(first, words.shape[0], _BLOCK_ROWS):
        base, rows = np.uint64(begin), np.uint64(min(_BLOCK_ROWS, words.shape[0] - begin))
        for b in range(rows):  # alone, and without a sign: vector code
            places[b] = hash_word(words[base + b]) & mask
        for b in range(rows):
            prefetch(table, np.int64(places[b]))
        for b in range(rows):
            entry = np.uint64(table[places[b]])
            entries[b] = entry
            prefetch(keys, np.int64(entry - np.uint64(entry > _NONE)))
        misses = _NONE
        for b in range(rows):
            gid = entries[b] - np.uint64(entries[b] > _NONE)
            gids[base + b] = gid
            missed[misses] = b
            misses += np.uint64((keys[gid] != words[base + b]) | (entries[b] == _NONE))
        for m in range(misses):
            row = base + missed[m]
            key = words[row]
            at = places[missed[m]]
            while True:
                entry = np.uint64(table[at])
                if entry == _NONE:
                    if count >= limit:
                        return np.int64(row), count
                    keys[count] = key
                    count += 1
                    table[at] = count
                    entry = np.uint64(count)
                    break
                if keys[entry - _ONE] == key:
                    break
                at = (at + _ONE) & mask
            gids[row] = entry - _ONE
    return words.shape[0], count


@kernel
def find_word(words: Any, table: Any, keys: Any, gids: Any) -> None:
    """Group id of each key, -1 where it is unknown."""
    mask = np.uint64(table.shape[0] - 1)
    for i in range(words.shape[0]):
        key = words[i]
        at = hash_word(key) & mask
        gid = np.int64(table[at]) - 1
        while gid >= 0 and keys[gid] != key:
            at = (at + _ONE) & mask
            gid = np.int64(table[at]) - 1
        gids[i] = gid


@kernel
def rehash_word(keys: Any, first: Any, count: Any, table: Any) -> None:
    mask = np.uint64(table.shape[0] - 1)
    for gid in range(first, count):
        at = hash_word(keys[gid]) & mask
        while table[at] != 0:
            at = (at + _ONE) & mask
        table[at] = gid + 1


@kernel
def hash_row(words: Any, row: Any) -> Any:
    h = np.uint64(0)
    for c in range(words.shape[1]):
        h = mix(h + np.uint64(words[row, c]) + GAMMA)
    return h


@kernel
def same_words(a: Any, row: Any, b: Any, gid: Any) -> Any:
    for c in range(a.shape[1]):  # noqa: SIM110 - Numba has no generators here
        if a[row, c] != b[gid, c]:
            return False
    return True


@kernel
def upsert_words(words: Any, first: Any, table: Any, keys: Any, count: Any, gids: Any) -> Any:
    """Several words per key, one row of a matrix.  Returns (rows done, group ids used)."""
    mask = np.uint64(table.shape[0] - 1)
    limit = keys.shape[0]
    width = words.shape[1]
    flat = keys.reshape(-1)
    places = np.empty(_BLOCK_ROWS, np.uint64)
    for begin in range(first, words.shape[0], _BLOCK_ROWS):
        rows = min(_BLOCK_ROWS, words.shape[0] - begin)
        for b in range(rows):
            places[b] = hash_row(words, begin + b) & mask
            prefetch(table, np.int64(places[b]))
        for b in range(rows):
            prefetch(flat, width * max(0, np.int64(table[places[b]]) - 1))
        for b in range(rows):
            i = begin + b
            at = places[b]
            while True:
                gid = np.int64(table[at]) - 1
                if gid < 0:
                    if count >= limit:
                        return i, count
                    gid = count
                    for c in range(width):
                        keys[gid, c] = words[i, c]
                    count += 1
                    table[at] = count
                    break
                if same_words(words, i, keys, gid):
                    break
                at = (at + _ONE) & mask
            gids[i] = gid
    return words.shape[0], count


@kernel
def upsert_pairs(words: Any, first: Any, table: Any, keys: Any, count: Any, gids: Any) -> Any:
    """Two words per key, as ``upsert_word`` does it.  Returns (rows done, group ids used)."""
    mask = np.uint64(table.shape[0] - 1)
    limit = keys.shape[0]
    flat = keys.reshape(-1)
    places = np.empty(_BLOCK_ROWS, np.uint64)
    entries = np.empty(_BLOCK_ROWS, np.uint64)
    missed = np.empty(_BLOCK_ROWS + 1, np.uint64)
    for begin in range(first, words.shape[0], _BLOCK_ROWS):
        base, rows = np.uint64(begin), np.uint64(min(_BLOCK_ROWS, words.shape[0] - begin))
        for b in range(rows):  # alone, and without a sign: vector code
            places[b] = hash_word(hash_word(words[base + b, _NONE]) + np.uint64(words[base + b, _ONE])) & mask
        for b in range(rows):
            prefetch(table, np.int64(places[b]))
        for b in range(rows):
            entry = np.uint64(table[places[b]])
            entries[b] = entry
            prefetch(flat, np.int64((entry - np.uint64(entry > _NONE)) << _ONE))
        misses = _NONE
        for b in range(rows):
            row, gid = base + b, entries[b] - np.uint64(entries[b] > _NONE)
            gids[row] = gid
            missed[misses] = b
            other = (keys[gid, _NONE] ^ words[row, _NONE]) | (keys[gid, _ONE] ^ words[row, _ONE])
            misses += np.uint64((other != 0) | (entries[b] == _NONE))
        for m in range(misses):
            row = base + missed[m]
            at = places[missed[m]]
            while True:
                entry = np.uint64(table[at])
                if entry == _NONE:
                    if count >= limit:
                        return np.int64(row), count
                    keys[count, _NONE] = words[row, _NONE]
                    keys[count, _ONE] = words[row, _ONE]
                    count += 1
                    table[at] = count
                    entry = np.uint64(count)
                    break
                gid = entry - _ONE
                if keys[gid, _NONE] == words[row, _NONE] and keys[gid, _ONE] == words[row, _ONE]:
                    break
                at = (at + _ONE) & mask
            gids[row] = entry - _ONE
    return words.shape[0], count


@kernel
def find_words(words: Any, table: Any, keys: Any, gids: Any) -> None:
    """Group id of each key, -1 where it is unknown."""
    mask = np.uint64(table.shape[0] - 1)
    for i in range(words.shape[0]):
        at = hash_row(words, i) & mask
        gid = np.int64(table[at]) - 1
        while gid >= 0 and not same_words(words, i, keys, gid):
            at = (at + _ONE) & mask
            gid = np.int64(table[at]) - 1
        gids[i] = gid


@kernel
def rehash_words(keys: Any, first: Any, count: Any, table: Any) -> None:
    mask = np.uint64(table.shape[0] - 1)
    for gid in range(first, count):
        at = hash_row(keys, gid) & mask
        while table[at] != 0:
            at = (at + _ONE) & mask
        table[at] = gid + 1


@kernel
def same_bytes(a: Any, start: Any, b: Any, other: Any, length: Any) -> Any:
    if length < 8:
        for at in range(length):  # noqa: SIM110 - Numba has no generators here
            if a[start + at] != b[other + at]:
                return False
        return True
    at = 0
    while at + 8 < length:
        if load_u64(a, start + at) != load_u64(b, other + at):
            return False
        at += 8
    return load_u64(a, start + length - 8) == load_u64(b, other + length - 8)  # may overlap what was compared


@kernel
def hash_mixed(data: Any, start: Any, stop: Any, words: Any, row: Any) -> Any:
    h = hash_span(data, start, stop)
    for c in range(words.shape[1]):
        h = mix(h + np.uint64(words[row, c]) + GAMMA)
    return np.int64(h)


@kernel
def hash_block(words: Any, data: Any, offsets: Any, first: Any, rows: Any, hashes: Any) -> None:
    """Hashes of the next ``rows`` keys."""
    if words.shape[1] == 0:  # a loop of its own: half the time
        for b in range(rows):
            hashes[b] = np.int64(hash_span(data, np.int64(offsets[first + b]), np.int64(offsets[first + b + 1])))
        return
    for b in range(rows):
        start, stop = np.int64(offsets[first + b]), np.int64(offsets[first + b + 1])
        hashes[b] = hash_mixed(data, start, stop, words, first + b)


@kernel
def look_first(
    hashes: Any,
    first: Any,
    rows: Any,
    words: Any,
    data: Any,
    offsets: Any,
    table: Any,
    keys: Any,
    arena: Any,
    spans: Any,
    gids: Any,
    missed: Any,
) -> Any:
    """Look the next ``rows`` keys up at their first place, level by level; where that is not it, into ``missed``.

    Also the bytes of a wrong key are compared, as far as both reach: that costs less than a branch guessed wrong.
    """
    mask = np.int64(table.shape[0] - 1)
    for b in range(rows):
        prefetch(table, hashes[b] & mask)
    for b in range(rows):
        prefetch(spans, table[hashes[b] & mask] & _LOW)
    for b in range(rows):
        prefetch(arena, spans[max(0, (table[hashes[b] & mask] & _LOW) - 1)])
    misses = 0
    for b in range(rows):
        i = first + b
        entry = table[hashes[b] & mask]
        gid = max(0, (entry & _LOW) - 1)
        start = np.int64(offsets[i])
        length = np.int64(offsets[i + 1]) - start
        stored = spans[gid + 1] - spans[gid]
        same = (entry != 0) & ((entry ^ hashes[b]) & ~_LOW == 0) & (stored == length)
        same &= same_bytes(data, start, arena, spans[gid], min(length, stored))
        same &= same_words(words, i, keys, gid)
        gids[i] = gid
        missed[misses] = b
        misses += 1 - np.int64(same)
    return misses


@kernel
def upsert_bytes(
    words: Any,
    data: Any,
    offsets: Any,
    first: Any,
    table: Any,
    keys: Any,
    arena: Any,
    spans: Any,
    count: Any,
    gids: Any,
) -> Any:
    """Words and a span of bytes per key; a table entry carries the upper half of the hash beside the group id.

    Returns (rows done, group ids used).
    """
    mask = np.int64(table.shape[0] - 1)
    hashes = np.empty(_BLOCK_ROWS, np.int64)
    missed = np.empty(_BLOCK_ROWS + 1, np.int64)
    for begin in range(first, words.shape[0], _BLOCK_ROWS):
        rows = min(_BLOCK_ROWS, words.shape[0] - begin)
        hash_block(words, data, offsets, begin, rows, hashes)
        misses = look_first(hashes, begin, rows, words, data, offsets, table, keys, arena, spans, gids, missed)
        for m in range(misses):
            i = begin + missed[m]
            start = np.int64(offsets[i])
            length = np.int64(offsets[i + 1]) - start
            h = hashes[missed[m]]
            at = h & mask
            tag = h & ~_LOW
            while True:
                entry = table[at]
                gid = (entry & _LOW) - 1
                if gid < 0:
                    end = spans[count]
                    if count >= keys.shape[0] or end + length > arena.shape[0]:
                        return i, count
                    gid = count
                    for c in range(words.shape[1]):
                        keys[gid, c] = words[i, c]
                    for b in range(length):
                        arena[end + b] = data[start + b]
                    count += 1
                    spans[count] = end + length
                    table[at] = tag | count
                    break
                if (
                    entry & ~_LOW == tag
                    and spans[gid + 1] - spans[gid] == length
                    and same_words(words, i, keys, gid)
                    and same_bytes(data, start, arena, spans[gid], length)
                ):
                    break
                at = (at + 1) & mask
            gids[i] = gid
    return words.shape[0], count


@kernel
def find_bytes(words: Any, data: Any, offsets: Any, table: Any, keys: Any, arena: Any, spans: Any, gids: Any) -> None:
    """Group id of each key, -1 where it is unknown."""
    mask = np.int64(table.shape[0] - 1)
    for i in range(words.shape[0]):
        start = np.int64(offsets[i])
        length = np.int64(offsets[i + 1]) - start
        h = hash_mixed(data, start, start + length, words, i)
        at = h & mask
        tag = h & ~_LOW
        while True:
            entry = table[at]
            gid = (entry & _LOW) - 1
            if gid < 0 or (
                entry & ~_LOW == tag
                and spans[gid + 1] - spans[gid] == length
                and same_words(words, i, keys, gid)
                and same_bytes(data, start, arena, spans[gid], length)
            ):
                break
            at = (at + 1) & mask
        gids[i] = gid


@kernel
def rehash_bytes(keys: Any, arena: Any, spans: Any, first: Any, count: Any, table: Any) -> None:
    mask = np.int64(table.shape[0] - 1)
    for gid in range(first, count):
        h = hash_mixed(arena, spans[gid], spans[gid + 1], keys, gid)
        at = h & mask
        while table[at] != 0:
            at = (at + 1) & mask
        table[at] = (h & ~_LOW) | (gid + 1)


@kernel
def gather_spans(arena: Any, starts: Any, offsets: Any, out: Any) -> None:
    """Row i of ``out`` (between its offsets) is what lies in the arena from ``starts[i]`` on."""
    for i in range(starts.shape[0]):
        start = starts[i]
        at = offsets[i]
        for b in range(offsets[i + 1] - at):
            out[at + b] = arena[start + b]

"""Kernels that find out which values a column of texts has, so that each comes once."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.state.kernels import hash_span, kernel, load_u64, mix

_WORD = 8


@kernel
def first_word(texts: Any, start: Any, length: Any) -> Any:
    """The first eight bytes of a text, zeros behind a shorter one; eight bytes behind it can be read."""
    word = load_u64(texts, start)
    if length < _WORD:
        word &= (np.uint64(1) << np.uint64(8 * length)) - np.uint64(1)
    return word


@kernel
def same_bytes(texts: Any, start: Any, values: Any, at: Any, length: Any) -> Any:
    """Whether a text and a value are the same from their ninth byte on."""
    same = True
    for i in range(_WORD, length):
        same = same and texts[start + i] == values[at + i]
    return same


@kernel
def find_values(
    texts: Any, ends: Any, valid: Any, places: Any, words: Any, values: Any, value_ends: Any, out: Any
) -> Any:
    """The place of each row's text among the values; texts that are new become values.

    Args:
        texts, ends: bytes of the texts, and where each ends: the first begins at ``ends[0]``.
        valid: a byte for each row, 0 for null: such rows get place 0.
        places: hash table, a power of two in size: value by slot, -1 where none is.
        words: first word of the slot's value.
        values, value_ends: bytes of the values, and where they end; ``value_ends[0]`` is how many there are, the ends
            follow, from 0 on.
        out: receives the places.

    Returns:
        True; False if there is no room for another value: nothing of the batch counts then.
    """
    mask = np.uint64(places.shape[0] - 1)
    for row in range(np.uint64(out.shape[0])):
        if not valid[row]:
            out[row] = 0
            continue
        start, stop = np.int64(ends[row]), np.int64(ends[row + np.uint64(1)])
        length = stop - start
        word = first_word(texts, start, length)
        hashed = mix(word + np.uint64(length)) if length <= _WORD else hash_span(texts, start, stop)
        slot = hashed & mask
        found = np.int64(-1)
        while places[slot] >= 0:
            value = np.int64(places[slot])
            at = np.int64(value_ends[value + 1])
            same = words[slot] == word and value_ends[value + 2] - at == length
            if same and (length <= _WORD or same_bytes(texts, start, values, at, length)):
                found = value
                break
            slot = (slot + np.uint64(1)) & mask
        if found < 0:
            found = np.int64(value_ends[0])
            at = np.int64(value_ends[found + 1])
            if found + 2 >= value_ends.shape[0] or at + length > values.shape[0]:
                return False
            for i in range(length):
                values[at + i] = texts[start + i]
            value_ends[found + 2] = at + length
            value_ends[0] = found + 1
            places[slot], words[slot] = found, word
        out[row] = found
    return True

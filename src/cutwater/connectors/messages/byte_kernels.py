"""Kernels over bytes in memory that the programs of several formats use: numbers at an address, texts."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.state.kernels import byte_at, kernel, low_bytes, set_word, word_at

_HIGH = np.uint64(0x8080808080808080)
_BYTE, _TOP_BYTE, _LAST_SHIFT = np.uint64(8), np.uint64(56), np.uint64(63)


@kernel
def int_at(at: Any) -> Any:
    return np.int64(word_at(at))


@kernel
def int32_at(at: Any) -> Any:
    bits = byte_at(at) | byte_at(at + 1) << 8 | byte_at(at + 2) << 16 | byte_at(at + 3) << 24
    return np.int64(np.int32(bits))


@kernel
def copied(to: Any, source: Any, length: Any, limit: Any) -> Any:
    """Copy bytes; words, so there must be room for seven more.  True if one is not ASCII.

    ``limit`` is behind the last byte that may be read.
    """
    if length < 8:
        if source + 8 <= limit:
            word = word_at(source) & low_bytes(length)
        else:
            word = np.uint64(0)
            for i in range(length):
                word |= np.uint64(byte_at(source + i)) << np.uint64(8 * i)
        set_word(to, word)
        return (word & _HIGH) != np.uint64(0)
    seen = np.uint64(0)
    i = 0
    while i + 8 <= length:
        word = word_at(source + i)
        seen |= word
        set_word(to + i, word)
        i += 8
    word = word_at(source + length - 8)
    set_word(to + length - 8, word)
    return ((seen | word) & _HIGH) != np.uint64(0)


@kernel
def is_utf8(at: Any, end: Any) -> Any:
    """True for well-formed UTF-8 (table 3-7 of the Unicode standard)."""
    while at < end:
        first = byte_at(at)
        if first < 0x80:
            at += 1
            continue
        more = 1 + (first >= 0xE0) + (first >= 0xF0)
        if first < 0xC2 or first > 0xF4 or end - at <= more:
            return False
        low, high = 0x80, 0xBF
        if first == 0xE0:
            low = 0xA0
        elif first == 0xED:
            high = 0x9F
        elif first == 0xF0:
            low = 0x90
        elif first == 0xF4:
            high = 0x8F
        if byte_at(at + 1) < low or byte_at(at + 1) > high:
            return False
        for i in range(2, more + 1):
            if byte_at(at + i) & 0xC0 != 0x80:
                return False
        at += more + 1
    return True


@kernel
def big_endian(at: Any, length: Any, most_high: Any, most_low: Any) -> Any:
    """A big-endian number in two's complement: (whether it is one and no larger than the most; its two words)."""
    if length == 0:
        return False, np.uint64(0), np.uint64(0)
    sign = np.uint64(0) - np.uint64(byte_at(at) >> 7)
    high = low = sign
    for i in range(length):
        lost = high >> _TOP_BYTE
        if i + 16 < length and np.uint64(byte_at(at + i)) != sign & np.uint64(255):
            return False, high, low
        high = high << _BYTE | low >> _TOP_BYTE
        low = low << _BYTE | np.uint64(byte_at(at + i))
        if lost != sign >> _TOP_BYTE or high >> _LAST_SHIFT != sign >> _LAST_SHIFT:
            return False, high, low
    big, small = high ^ sign, (low ^ sign) + (sign & np.uint64(1))
    big += np.uint64(sign != np.uint64(0) and small == np.uint64(0))
    return not (big > most_high or (big == most_high and small > most_low)), high, low

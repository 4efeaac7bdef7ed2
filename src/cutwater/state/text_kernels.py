"""Kernels of short texts: up to 15 bytes, which with their length fit two words."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.state.kernels import kernel, load_u64, low_bytes

SHORT_BYTES = 15
"""A longer text does not fit: the last byte of its second word is its length."""
_WORD = np.int64(8)
LENGTH = np.uint64(56)
"""Bits of the second word below its length."""
_BYTE = np.uint64(0xFF)


@kernel
def first_bytes(data: Any, start: Any, length: Any) -> Any:
    """Up to eight bytes of ``data`` as a word, zeros behind them."""
    if start + _WORD <= data.shape[0]:
        return load_u64(data, start) & low_bytes(length)
    word = np.uint64(0)
    for b in range(length):
        word |= np.uint64(data[start + b]) << np.uint64(8 * b)
    return word


@kernel
def pack_texts(data: Any, offsets: Any, words: Any, column: Any) -> Any:
    """Fill two columns of ``words`` from each text; False: one is too long, and what was filled means nothing."""
    safe = np.int64(data.shape[0]) - 2 * _WORD
    for i in range(words.shape[0]):
        start = np.int64(offsets[i])
        length = np.int64(offsets[i + 1]) - start
        if length > SHORT_BYTES:
            return False
        if start <= safe:
            words[i, column] = load_u64(data, start) & low_bytes(min(length, _WORD))
            rest = load_u64(data, start + _WORD) & low_bytes(max(length - _WORD, 0))
        else:
            words[i, column] = first_bytes(data, start, min(length, _WORD))
            rest = first_bytes(data, start + _WORD, max(length - _WORD, 0))
        words[i, column + 1] = rest | np.uint64(length) << LENGTH
    return True


@kernel
def unpack_texts(first: Any, second: Any, offsets: Any, out: Any) -> None:
    """The texts that lie in two words each, one behind the other, each between its offsets."""
    for i in range(first.shape[0]):
        at = offsets[i]
        for b in range(offsets[i + 1] - at):
            word = first[i] if b < _WORD else second[i]
            out[at + b] = (np.uint64(word) >> np.uint64(8 * (b % _WORD))) & _BYTE

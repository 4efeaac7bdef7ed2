"""Kernels of the key hash.  What they compute is a frozen format: see ``cutwater.state.keys``."""

from __future__ import annotations

from typing import Any

import numpy as np

from cutwater.state.kernels import kernel, load_u64

GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _S32 = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(32)


@kernel
def mix(x: Any) -> Any:
    """The finaliser of splitmix64: a bijection of 64 bits."""
    x = (x ^ (x >> _S30)) * _FIRST
    x = (x ^ (x >> _S27)) * _SECOND
    return x ^ (x >> _S31)


@kernel
def hash_word(word: Any) -> Any:
    return mix(np.uint64(word) + GAMMA)


@kernel
def group_of(hashed: Any, max_parallelism: Any) -> Any:
    """Multiply-high of the upper 32 bits: a group in 0 .. max_parallelism - 1."""
    return np.int64(((hashed >> _S32) * np.uint64(max_parallelism)) >> _S32)


@kernel
def hash_words(words: Any, out: Any) -> None:
    for i in range(words.shape[0]):
        out[i] = hash_word(words[i])


@kernel
def hash_span(data: Any, start: Any, stop: Any) -> Any:
    """Hash of ``data[start:stop]``: words of eight bytes, the last padded with zeros; the length is the seed."""
    length = stop - start
    h = np.uint64(length) * GAMMA
    position = start
    while position + 8 <= stop:
        h = (h ^ load_u64(data, position)) * _FIRST
        h ^= h >> _S32
        position += 8
    rest = stop - position
    if rest > 0:
        tail = np.uint64(0)
        if length >= 8:
            tail = load_u64(data, stop - 8) >> np.uint64(8 * (8 - rest))
        else:
            for b in range(rest):
                tail |= np.uint64(data[position + b]) << np.uint64(8 * b)
        h = (h ^ tail) * _FIRST
        h ^= h >> _S32
    return mix(h)


@kernel
def hash_bytes(data: Any, offsets: Any, out: Any) -> None:
    for i in range(out.shape[0]):
        out[i] = hash_span(data, np.int64(offsets[i]), np.int64(offsets[i + 1]))


@kernel
def combine(first: Any, second: Any) -> None:
    """``first`` becomes the hash of (first, second), row by row."""
    for i in range(first.shape[0]):
        first[i] = mix(first[i] * GAMMA + second[i])


@kernel
def to_groups(hashes: Any, max_parallelism: Any, out: Any) -> None:
    for i in range(hashes.shape[0]):
        out[i] = group_of(hashes[i], max_parallelism)

"""Making compiled kernels, with one decorator and one cache directory, and the kernels of the key hash.

A kernel is a function over numpy views of Arrow buffers that Numba compiles to machine code.  It runs without the GIL,
is compiled per *physical* type on its first call (never by importing), and the result is kept on disk, so that no
process waits for the same compilation twice.

Inputs that come from Arrow are read-only arrays; ``cutwater.data.words`` makes every such view read-only, also over
mutable memory, so that a kernel needs one specialisation and not two.

The cache lies in ``NUMBA_CACHE_DIR`` if that is set, else in the user's cache directory, else (no home, as on many a
cluster) in a private folder for temporary files.  Its folder carries a digest of all kernel sources: Numba itself
notices a change of a kernel, but not of one that it calls in another file.

What the key hash computes is a frozen format: see ``cutwater.state.keys``.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, config, types
from numba.cpython.unsafe import numbers
from numba.extending import intrinsic

P = ParamSpec("P")
R = TypeVar("R")

_settings: Any = config


@lru_cache(maxsize=1)
def cache_directory() -> str | None:
    """The folder of compiled kernels; ``None`` if no place is writable, then every process compiles for itself.

    >>> cache_directory() == cache_directory()
    True
    """
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for source in sorted(package.rglob("*kernels.py")):
        digest.update(source.read_bytes())
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    places = [
        os.path.join(home, "cutwater", "kernels-"),
        os.path.join(tempfile.gettempdir(), f"cutwater-{os.getuid()}-"),
    ]
    for start in [os.path.join(_settings.CACHE_DIR, "cutwater-")] if _settings.CACHE_DIR else places:
        path = start + digest.hexdigest()[:12]
        if _usable(path):
            return path
    return None


def _usable(path: str) -> bool:
    """True if we can write there and nobody else can: what lies in the cache is loaded as code."""
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.stat(path)
    except OSError:
        return False
    return found.st_uid == os.getuid() and not found.st_mode & 0o022 and os.access(path, os.W_OK)


def kernel(function: Callable[P, R]) -> Callable[P, R]:
    """Compile ``function`` lazily: no GIL, no bounds checks, IEEE arithmetic, inlined, cached on disk."""
    before, place = _settings.CACHE_DIR, cache_directory()
    _settings.CACHE_DIR = place or before
    try:
        compiled = numba.njit(nogil=True, cache=place is not None, error_model="numpy", forceinline=True)(function)
    finally:
        _settings.CACHE_DIR = before
    return cast("Callable[P, R]", compiled)


def _load_u64(context: Any, data: Any, position: Any) -> Any:
    """Eight bytes of a ``uint8`` array at any position, as a little-endian ``uint64``; the caller checks the bounds."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = target.make_array(signature.args[0])(target, builder, arguments[0])
        pointer = builder.gep(array.data, [arguments[1]])
        return builder.load(builder.bitcast(pointer, ir.IntType(64).as_pointer()), align=1)

    return types.uint64(data, types.intp), generate


def _loads(width: int) -> Any:
    """An intrinsic: so many bytes at an address, little-endian, as an ``int64`` (a byte) or ``uint64`` (a word)."""

    def load(context: Any, address: Any) -> Any:
        def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            pointer = builder.inttoptr(arguments[0], ir.IntType(8 * width).as_pointer())
            return builder.zext(builder.load(pointer, align=1), ir.IntType(64))

        return (types.uint64 if width == 8 else types.int64)(types.intp), generate

    return load


def _stores(width: int, kind: Any) -> Any:
    """An intrinsic: write so many bytes of a value at an address, little-endian."""

    def store(context: Any, address: Any, value: Any) -> Any:
        def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            value = arguments[1]
            if kind is types.float64:
                value = builder.bitcast(value, ir.IntType(64))
            integer = ir.IntType(8 * width)
            pointer = builder.inttoptr(arguments[0], integer.as_pointer())
            builder.store(builder.trunc(value, integer) if width < 8 else value, pointer, align=1)
            return target.get_dummy_value()

        return types.void(types.intp, kind), generate

    return store


def _prefetch(context: Any, data: Any, position: Any) -> Any:
    """Ask the processor to fetch ``data[position]``, a one-dimensional array; no bounds, no fault, no waiting."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        array = target.make_array(signature.args[0])(target, builder, arguments[0])
        byte = ir.IntType(8).as_pointer()
        pointer = builder.bitcast(builder.gep(array.data, [arguments[1]]), byte)
        number = ir.IntType(32)
        signature_ir = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = builder.module.declare_intrinsic("llvm.prefetch", [byte], signature_ir)
        builder.call(function, [pointer, number(0), number(3), number(1)])  # read, keep in all caches, data
        return target.get_dummy_value()

    return types.void(data, types.intp), generate


def _element(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
    """Pointer to ``array[position]``, the first two arguments."""
    return builder.gep(target.make_array(signature.args[0])(target, builder, arguments[0]).data, [arguments[1]])


def _compare_exchange(context: Any, array: Any, position: Any, expected: Any, wanted: Any) -> Any:
    """Atomically set ``array[position]`` to ``wanted`` if it is ``expected``; whether it was."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _element(target, builder, signature, arguments)
        return builder.extract_value(builder.cmpxchg(pointer, *arguments[2:], "acq_rel", "acquire"), 1)

    return types.boolean(array, types.intp, array.dtype, array.dtype), generate


def _load_acquire(context: Any, array: Any, position: Any) -> Any:
    """``array[position]`` of one-byte elements; what its writer wrote before ``store_release`` is seen from then on."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_element(target, builder, signature, arguments), "acquire", 1)

    return array.dtype(array, types.intp), generate


def _store_release(context: Any, array: Any, position: Any, value: Any) -> Any:
    """Set ``array[position]``, after everything written before is there.  Of one-byte elements."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[2], _element(target, builder, signature, arguments), "release", 1)
        return target.get_dummy_value()

    return types.void(array, types.intp, array.dtype), generate


def _copy_bytes(context: Any, to: Any, source: Any, length: Any) -> Any:
    """Copy memory between two addresses; the caller keeps both alive."""

    def generate(target: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte = ir.IntType(8).as_pointer()
        to_place, from_place = (builder.inttoptr(address, byte) for address in arguments[:2])
        cgutils.raw_memcpy(builder, to_place, from_place, arguments[2], 1)
        return target.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


trailing_zeros: Any = numbers.trailing_zeros
load_u64: Any = intrinsic(_load_u64)
prefetch: Any = intrinsic(_prefetch)
compare_exchange: Any = intrinsic(_compare_exchange)
load_acquire: Any = intrinsic(_load_acquire)
store_release: Any = intrinsic(_store_release)
copy_bytes: Any = intrinsic(_copy_bytes)
byte_at: Any = intrinsic(_loads(1))
word_at: Any = intrinsic(_loads(8))
set_byte: Any = intrinsic(_stores(1, types.int64))
set_int32: Any = intrinsic(_stores(4, types.int64))
set_int64: Any = intrinsic(_stores(8, types.int64))
set_word: Any = intrinsic(_stores(8, types.uint64))
set_real: Any = intrinsic(_stores(8, types.float64))
"""Memory by its address; the caller keeps it alive and checks the bounds."""


GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_BLOCK_ROWS = 256
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
def low_bytes(count: Any) -> Any:
    """A mask of the lowest bytes of a word, 0 to 8 of them; without a branch."""
    bits = np.uint64(count) << np.uint64(3)
    return ((np.uint64(1) << (bits & np.uint64(63))) - np.uint64(1)) | (np.uint64(0) - (bits >> np.uint64(6)))


@kernel
def hash_short(first: Any, second: Any, length: Any) -> Any:
    """Hash of a span of up to 16 bytes that lies in two words, zeros behind it: what ``hash_span`` gives."""
    start = np.uint64(length) * GAMMA
    one = (start ^ first) * _FIRST
    one ^= one >> _S32
    two = (one ^ second) * _FIRST
    two ^= two >> _S32
    return mix(two if length > 8 else one if length > 0 else start)


@kernel
def hash_bytes(data: Any, offsets: Any, out: Any) -> None:
    """Blocks of short spans are loaded first and hashed then, without a branch: vector code."""
    words = np.empty((3, _BLOCK_ROWS), np.uint64)
    for begin in range(0, out.shape[0], _BLOCK_ROWS):
        rows = min(_BLOCK_ROWS, out.shape[0] - begin)
        longest = np.int64(0)
        for b in range(rows):
            longest = max(longest, np.int64(offsets[begin + b + 1]) - np.int64(offsets[begin + b]))
        if longest > 16 or np.int64(offsets[begin + rows]) + 16 > data.shape[0]:
            for i in range(begin, begin + rows):
                out[i] = hash_span(data, np.int64(offsets[i]), np.int64(offsets[i + 1]))
            continue
        for b in range(rows):
            start = np.int64(offsets[begin + b])
            length = np.int64(offsets[begin + b + 1]) - start
            words[0, b] = load_u64(data, start) & low_bytes(min(length, 8))
            words[1, b] = load_u64(data, start + 8) & low_bytes(max(length - 8, 0))
            words[2, b] = length
        for b in range(rows):
            out[begin + b] = hash_short(words[0, b], words[1, b], words[2, b])


@kernel
def combine(first: Any, second: Any) -> None:
    """``first`` becomes the hash of (first, second), row by row."""
    for i in range(first.shape[0]):
        first[i] = mix(first[i] * GAMMA + second[i])


@kernel
def to_groups(hashes: Any, max_parallelism: Any, out: Any) -> None:
    for i in range(hashes.shape[0]):
        out[i] = group_of(hashes[i], max_parallelism)

"""The reference work, the *keyed count*, its closed form, and the check that every contender's result passes.

Row ``i`` of ``rows`` has the key ``mix(i) % KEYS`` (the finisher of splitmix64: uniform keys) and the value ``i``.  The
work: per key a running count and a running sum, one output row per event.  A contender hands back, per part, the newest
count and sum of every key that its sink saw (zeros for keys of other parts) and the number of rows its sink took.

A sink need not look at every row for that: the newest values of a key come last, so looking at the end of the stream
suffices, where every key comes up again many times (``watch_after``).  They hold the whole history all the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numba as nb
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "KEYS",
    "PARALLELISM",
    "TEXT_BYTES",
    "Expected",
    "WrongResultError",
    "expected",
    "fill",
    "fill_texts",
    "mix",
    "numbers_of",
    "verify",
    "watch_after",
]

KEYS = 100_000
PARALLELISM = 2
TEXT_BYTES = 10
"""Length of a key as text: ``key-`` and six digits."""
_ALWAYS_WATCHED = 2_000_000
"""Rows at the end of a part that hold every one of its keys: each is missing with a chance of e^-40."""


class WrongResultError(Exception):
    """A contender's counts or sums are not those of the closed form."""


@nb.njit(cache=True, nogil=True)
def mix(row: int) -> np.uint64:
    """The finisher of splitmix64: every bit of the row number changes every bit of the result.

    >>> z, m = 12345, 2**64
    >>> z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % m
    >>> z = (z ^ (z >> 27)) * 0x94D049BB133111EB % m
    >>> int(mix(12345)) == z ^ (z >> 31)
    True
    """
    z = np.uint64(row)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@nb.njit(cache=True, nogil=True)
def fill(start: int, keys: NDArray[np.int64], values: NDArray[np.int64]) -> None:
    """Write the rows numbered ``start`` and up."""
    for i in range(keys.shape[0]):
        keys[i] = np.int64(mix(start + i) % np.uint64(KEYS))
        values[i] = start + i


@nb.njit(cache=True, nogil=True)
def fill_texts(start: int, texts: NDArray[np.uint8], values: NDArray[np.int64]) -> None:
    """The same rows with their keys as texts, one of ``TEXT_BYTES`` per row.

    >>> texts, keys, values = np.empty((3, TEXT_BYTES), np.uint8), np.empty(3, np.int64), np.empty(3, np.int64)
    >>> fill_texts(7, texts, values)
    >>> fill(7, keys, values)
    >>> [bytes(text).decode() for text in texts] == [f"key-{key:06}" for key in keys]
    True
    """
    digits = np.empty((1000, 3), np.uint8)  # made once: a row costs no formatting, as in Flink's job
    for number in range(1000):
        digits[number, 0], digits[number, 1] = 48 + number // 100, 48 + number // 10 % 10
        digits[number, 2] = 48 + number % 10
    for i in range(texts.shape[0]):
        key = np.uint32(mix(start + i) % np.uint64(KEYS))
        high, low = key // np.uint32(1000), key % np.uint32(1000)
        texts[i, 0], texts[i, 1], texts[i, 2], texts[i, 3] = 107, 101, 121, 45
        for place in range(3):
            texts[i, 4 + place], texts[i, 7 + place] = digits[high, place], digits[low, place]
        values[i] = start + i


@nb.njit(cache=True, nogil=True)
def numbers_of(ends: NDArray[np.int32], texts: NDArray[np.uint8], rows: int) -> NDArray[np.int64]:
    """The numbers in keys given as texts; ``ends`` are Arrow's offsets.

    >>> numbers_of(np.array([0, 10, 20], np.int32), np.frombuffer(b"key-000123key-099999", np.uint8), 2).tolist()
    [123, 99999]
    """
    numbers = np.zeros(rows, np.int64)
    for i in range(rows):
        for place in range(ends[i] + 4, ends[i + 1]):
            numbers[i] = numbers[i] * 10 + (texts[place] - 48)
    return numbers


@nb.njit(cache=True, nogil=True)
def _totals(rows: int, counts: NDArray[np.int64], sums: NDArray[np.int64]) -> None:
    for i in range(rows):
        key = mix(i) % np.uint64(KEYS)
        counts[key] += 1
        sums[key] += i


@dataclass(frozen=True)
class Expected:
    """Count and sum per key after all rows."""

    rows: int
    counts: NDArray[np.int64]
    sums: NDArray[np.int64]


@cache
def expected(rows: int) -> Expected:
    """The closed form: each key's rows counted and added up in one loop, no engine involved.

    >>> whole = expected(1000)
    >>> int(whole.counts.sum()), int(whole.sums.sum()) == 1000 * 999 // 2
    (1000, True)
    """
    counts, sums = np.zeros(KEYS, np.int64), np.zeros(KEYS, np.int64)
    _totals(rows, counts, sums)
    return Expected(rows, counts, sums)


def watch_after(rows: int) -> int:
    """Rows a part may take without looking at them, so that the rest still holds every key of the part.

    >>> watch_after(1_000_000), watch_after(400_000_000)
    (0, 178000000)
    """
    return max(0, int(rows / PARALLELISM * 0.9) - _ALWAYS_WATCHED)


def verify(rows: int, sunk: int, folder: Path) -> None:
    """Compare row count and parts (``state-*.bin``: counts, then sums, little-endian int64) with the closed form.

    Raises:
        WrongResultError: rows are missing or doubled, or a key's count or sum is wrong; says how far off.

    >>> import tempfile
    >>> whole = expected(1000)
    >>> with tempfile.TemporaryDirectory() as name:
    ...     state = np.stack([whole.counts, whole.sums])
    ...     state.tofile(Path(name, "state-0.bin"))
    ...     verify(1000, 1000, Path(name))
    ...     state[1, 0] += 7
    ...     state.tofile(Path(name, "state-0.bin"))
    ...     verify(1000, 1000, Path(name))
    Traceback (most recent call last):
    benchmarks.workload.WrongResultError: the sum of 1 keys is wrong; key 0 has 7 instead of 0
    """
    if sunk != rows:
        raise WrongResultError(f"the sinks took {sunk:,} rows instead of {rows:,} ({sunk - rows:+,})")
    parts = [np.fromfile(path, "<i8").reshape(2, KEYS) for path in sorted(folder.glob("state-*.bin"))]
    if not parts:
        raise WrongResultError(f"no results were written to {folder}")
    owners = np.sum([part[0] > 0 for part in parts], axis=0)
    if (owners > 1).any():
        raise WrongResultError(f"{int((owners > 1).sum())} keys came out of more than one part")
    whole, found = expected(rows), np.sum(parts, axis=0)
    for name, want, got in (("count", whole.counts, found[0]), ("sum", whole.sums, found[1])):
        wrong = np.flatnonzero(want != got)
        if wrong.size:
            key = int(wrong[0])
            raise WrongResultError(
                f"the {name} of {wrong.size:,} keys is wrong; key {key} has {got[key]:,} instead of {want[key]:,}"
            )

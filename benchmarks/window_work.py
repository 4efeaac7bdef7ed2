"""The windowed work: count and sum by key in tumbling windows of one second of event time, and its closed form.

Row ``i`` has the key ``mix(i) % KEYS`` and the value ``i``, as in the keyed count, and event time goes on by 1 ms every
``ROWS_PER_MS`` rows: about ten rows of a key in each window.  The rows are in slight disorder: each is up to 9 ms
earlier than its place says, and sources promise ``DISORDER_MS``, so that none is late.

A contender hands back how many results its sink took, how many rows they count, and the sum modulo 2^64 of a digest of
each result, in which every bit of key, window, count and sum matters.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numba as nb
import numpy as np
import pyarrow as pa

from benchmarks.probe import note_first
from benchmarks.tally import Sums
from benchmarks.workload import KEYS, WrongResultError, mix

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["DISORDER_MS", "SCHEMA", "WINDOW_MS", "Rows", "digest", "expected", "fill", "sums", "verify"]

WINDOW_MS = 1_000
ROWS_PER_MS = 1_000
DISORDER_MS = 10
SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("t", pa.timestamp("us"))])


@nb.njit(cache=True, nogil=True)
def _time_ms(row: int, mixed: np.uint64) -> int:
    return max(0, row // ROWS_PER_MS - np.int64((mixed >> np.uint64(40)) % np.uint64(DISORDER_MS)))


@nb.njit(cache=True, nogil=True)
def fill(start: int, keys: NDArray[np.int64], values: NDArray[np.int64], times_us: NDArray[np.int64]) -> None:
    """Write the rows numbered ``start`` and up; times in microseconds, always whole milliseconds.

    >>> columns = [np.empty(20_000, np.int64) for _ in range(3)]
    >>> fill(1_000_000, *columns)
    >>> early_ms = np.arange(1_000_000, 1_020_000) // 1000 - columns[2] // 1000
    >>> int(early_ms.min()), int(early_ms.max())
    (0, 9)
    """
    for i in range(keys.shape[0]):
        mixed = mix(start + i)
        keys[i] = np.int64(mixed % np.uint64(KEYS))
        values[i] = start + i
        times_us[i] = _time_ms(start + i, mixed) * 1_000


@nb.njit(cache=True, nogil=True)
def digest(
    keys: NDArray[np.int64], starts_ms: NDArray[np.int64], counts: NDArray[np.int64], sums: NDArray[np.int64]
) -> int:
    """Sum of the digests of results, modulo 2^64 as a signed number.

    >>> one = np.ones(1, np.int64)
    >>> digest(one, 2 * one, one, one) != digest(2 * one, one, one, one)
    True
    """
    total = np.uint64(0)
    for i in range(keys.shape[0]):
        named = mix(np.int64(mix(keys[i]) + np.uint64(starts_ms[i])))
        counted = mix(np.int64(named + np.uint64(counts[i])))
        total += mix(np.int64(counted + np.uint64(sums[i])))
    return np.int64(total)


@dataclass(frozen=True)
class Rows:
    """``fn(start, count)`` of ``cw.generate``: the first call in each process is noted in ``folder``."""

    folder: str

    def __call__(self, start: int, count: int) -> pa.RecordBatch:
        keys, values, times_us = (np.empty(count, np.int64) for _ in range(3))
        fill(start, keys, values, times_us)
        note_first(self.folder, time.monotonic_ns())
        return pa.record_batch([keys, values, pa.array(times_us).view(pa.timestamp("us"))], schema=SCHEMA)


def sums(batch: pa.RecordBatch) -> Sums:
    """What the closed form checks."""
    keys, counts, totals = (batch.column(name).to_numpy() for name in ("k", "n", "s"))
    starts_ms = batch.column("window_start").view(pa.int64()).to_numpy() // 1_000
    return {"counted": int(counts.sum()), "digest": int(digest(keys, starts_ms, counts, totals))}


@nb.njit(cache=True, nogil=True)
def _add(first: int, end: int, window: int, counts: NDArray[np.int64], sums: NDArray[np.int64]) -> None:
    for row in range(first, end):
        mixed = mix(row)
        if _time_ms(row, mixed) // WINDOW_MS == window:
            key = mixed % np.uint64(KEYS)
            counts[key] += 1
            sums[key] += row


@cache
def expected(rows: int) -> dict[str, int]:
    """The closed form: each window's rows counted and added up by key in one loop, no engine involved.

    >>> expected(3_000_000)["counted"], 290_000 < expected(3_000_000)["rows"] <= 300_000
    (3000000, True)
    """
    results = counted = total = 0
    per_window, early = WINDOW_MS * ROWS_PER_MS, DISORDER_MS * ROWS_PER_MS
    for window in range(-(-rows // per_window)):
        counts, sums = np.zeros(KEYS, np.int64), np.zeros(KEYS, np.int64)
        _add(window * per_window, min(rows, (window + 1) * per_window + early), window, counts, sums)
        keys = np.flatnonzero(counts)
        results, counted = results + len(keys), counted + int(counts.sum())
        total += digest(keys, np.full(len(keys), window * WINDOW_MS), counts[keys], sums[keys])
    return {"rows": results, "counted": counted, "digest": _signed(total)}


def _signed(number: int) -> int:
    return (number + 2**63) % 2**64 - 2**63


def verify(rows: int, result: dict[str, Any]) -> None:
    """Compare the results of a contender with the closed form.

    Raises:
        WrongResultError: results are missing or doubled, rows are missing in them, or a value is wrong.

    >>> verify(1000, {**expected(1000), "digest": 1})
    Traceback (most recent call last):
    benchmarks.workload.WrongResultError: key, window, count or sum of some result is wrong: the digests differ
    """
    whole = expected(rows)
    for name, what in (("rows", "the sinks took {} results instead of {}"), ("counted", "{} rows of {} were counted")):
        if result[name] != whole[name]:
            raise WrongResultError(what.format(f"{result[name]:,}", f"{whole[name]:,}"))
    if _signed(result["digest"]) != whole["digest"]:
        raise WrongResultError("key, window, count or sum of some result is wrong: the digests differ")

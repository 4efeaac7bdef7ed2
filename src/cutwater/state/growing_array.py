"""Arrays that grow without moving, and whose memory is there before it is needed.

What stalls a stream with much state is memory: copying a large array into a larger one, and the first touch of fresh
pages (several times the cost of the write itself).  So an array that has become large lies at the front of a far
larger piece of *address space*, which costs nothing until it is touched, and a thread in the background touches the
pages ahead of the rows.  Where the system refuses such reservations (a limit on address space, strict overcommit),
arrays grow by copying, as small ones do everywhere.
"""

from __future__ import annotations

import mmap
import resource
import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from cutwater.data.words import read_only
from cutwater.state import column_kernels as kernels

Values: TypeAlias = npt.NDArray[Any]

_FIRST_ROWS = 1024
_MANY_GROUP_IDS = 1 << 12
"""NumPy holds the interpreter while it looks group ids up, and the stream waits for that."""
LARGE_ROWS = 1 << 17
"""Below, growing by copying takes well under a millisecond."""
ROWS_RESERVED = 1 << 28
"""Rows that an array has address space for once it is large."""
_NO_RESERVE = 0x4000 if sys.platform == "linux" else 0  # MAP_NORESERVE: pages count when they are touched


def gather(values: Values, gids: npt.NDArray[Any], *, still: bool = False) -> Values:
    """``values[gids]``; gids in a row, as of a whole table, are copied in one piece, or not at all.

    Args:
        still: nobody changes the values while somebody reads the result, which may share their memory.

    >>> column = np.array([10, 20, 30, 40])
    >>> [gather(column, np.array(gids, np.int32)).tolist() for gids in ([1, 2], [3, 0], [0, 2, 1, 3])]
    [[20, 30], [40, 10], [10, 30, 20, 40]]
    """
    count = len(gids)
    if count and gids.dtype == np.int32 and gids[-1] - gids[0] == count - 1 and kernels.in_a_row(gids):
        piece = values[gids[0] : gids[0] + count]
        return piece if still else piece.copy()
    if count >= _MANY_GROUP_IDS and gids.dtype == np.int32 and len(values) and values[0].flags.c_contiguous:
        found = np.empty((count, *values.shape[1:]), values.dtype)
        source, target, width = values.ctypes.data, found.ctypes.data, found.strides[0]
        if kernels.gather_rows(source, values.strides[0], len(values), read_only(gids), target, width):
            return found
    return values[gids]


class GrowingArray:
    """A column of zeros by row number, of which the first ones are in use.

    Args:
        reserved: rows to have address space for once the array is large.

    >>> column = GrowingArray(np.int64)
    >>> column.reserve(3)
    >>> column.values[:3].tolist()
    [0, 0, 0]
    """

    def __init__(self, dtype: npt.DTypeLike, shape: tuple[int, ...] = (), reserved: int = ROWS_RESERVED) -> None:
        self.values: Values = np.zeros((0, *shape), dtype)
        """At least as many rows as were reserved; it is another array after a ``reserve`` that had to copy."""
        self._most = reserved
        self._in_place = False
        self._populated = 0

    def reserve(self, rows: int, used: int | None = None) -> None:
        """Have room for this many rows; new ones are zero.

        Args:
            used: rows in use, if they are fewer: the memory is made ready from there on.
        """
        if rows > len(self.values):
            self._move(rows)
        used = rows if used is None else used
        if self._in_place and used + used // 8 > self._populated:
            values, first = self.values, self._populated
            self._populated = last = min(max(used + used // 2, LARGE_ROWS), len(values))
            in_background(lambda: populate(values, first, last))

    def replace(self, values: Values) -> None:
        """Go on with other content; whoever still reads the old array finds it unchanged."""
        self.values = values[:0]
        self._move(len(values))
        self.values[: len(values)] = values

    def _move(self, rows: int) -> None:
        old = self.values
        # In whole chunks: they are captured as such.
        size = -(-max(_FIRST_ROWS, 2 * rows) // kernels.CHUNK_ROWS) * kernels.CHUNK_ROWS
        room = _address_space(max(size, self._most), old) if size > LARGE_ROWS else None
        self._in_place, self._populated = room is not None, len(old)
        self.values = np.zeros((size, *old.shape[1:]), old.dtype) if room is None else room
        self.values[: len(old)] = old


def _address_space(rows: int, like: Values) -> Values | None:
    """An array of zeros whose pages are not there yet; ``None`` if the system does not give so much address space."""
    width = int(np.prod(like.shape[1:], dtype=np.int64)) * like.itemsize
    if width == 0 or not _may_reserve():
        return None
    try:
        room = mmap.mmap(-1, rows * width, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except (OSError, ValueError, OverflowError):
        return None
    with suppress(AttributeError, OSError, ValueError):
        room.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(room, like.dtype).reshape(rows, *like.shape[1:])


def _may_reserve() -> bool:
    """A process with a limit on its address space needs it for other things."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY


def populate(values: Values, first: int, last: int) -> None:
    """Make the pages of rows ``first`` .. ``last`` - 1 present; their content stays, also while others write there."""
    width = values.strides[0]
    if last > first and width:
        kernels.touch_pages(values.view(np.uint8).reshape(-1), first * width, last * width)


def in_background(work: Callable[[], object], *more: Callable[[], object]) -> threading.Thread:
    """Run this in a thread of its own, one after the other; for rare work that takes long and releases the GIL."""

    def run(tasks: Iterable[Callable[[], object]] = (work, *more)) -> None:
        for task in tasks:
            task()

    thread = threading.Thread(target=run, name="cutwater-memory", daemon=True)
    thread.start()
    return thread

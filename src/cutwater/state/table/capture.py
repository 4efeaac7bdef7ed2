"""Freezing columns without copying them: chunks are set aside when they are about to change.

A freeze notes the columns and marks every chunk as waiting; nothing is copied.  From then on the stream copies a chunk
aside before it changes a row of it, and the snapshot thread copies the others ahead, without the GIL.  When it has, the
copies are the frozen state, and changing rows costs what it did before.

A table that a core copies in a fraction of a millisecond is copied at once: asking for every row whether its chunk
has been set aside would cost more.

The copies lie in memory that the capture before has given back, or that is made in the background while the columns
grow: the first touch of a fresh page costs far more than the copying.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cutwater.state import column_kernels as kernels
from cutwater.state.growing_array import LARGE_ROWS, GrowingArray, Values

COPIED_AT_ONCE_BYTES = 1 << 20
_CHUNKS_PER_CALL = 1 << 14
"""Chunks that the snapshot thread copies between two looks at whether the capture is still wanted."""


class Capture:
    """The first ``rows`` rows of some columns as they are at this instant.

    Args:
        columns: the arrays; their content is captured, whatever becomes of them.
        rows: rows in use.
        copies: where to; at least as long as the arrays' chunks in use.
        at_once: copy them now.
    """

    def __init__(
        self, columns: Sequence[Values], rows: int, copies: list[GrowingArray], *, at_once: bool = False
    ) -> None:
        self._columns = list(columns)
        self._copies = copies
        self.copies: list[Values] = [copy.values for copy in copies]
        """The captured columns: complete, and unchanging, after ``complete``."""
        self.open = False
        """True if chunks may be left that the stream has to set aside."""
        if at_once:
            for values, copy in zip(self._columns, self.copies, strict=True):
                copy[:rows] = values[:rows]
            return
        chunks = -(-rows // kernels.CHUNK_ROWS) if copies else 0
        self._state = np.full(chunks, kernels.WAITING, np.uint8)
        self._sources = np.array([values.ctypes.data for values in self._columns], np.int64)
        self._targets = np.array([values.ctypes.data for values in self.copies], np.int64)
        self._widths = np.array([values.strides[0] * kernels.CHUNK_ROWS for values in self._columns], np.int64)
        self.open = chunks > 0

    def preserve(self, gids: npt.NDArray[Any]) -> None:
        """Rows of these group ids are about to change.  Called by the thread that changes them."""
        kernels.preserve(gids, self._state, self._sources, self._targets, self._widths)

    def complete(self) -> None:
        """Copy what is left.  Called by the snapshot thread, before it reads ``copies``."""
        if not self.open:
            return
        for first in range(0, len(self._state), _CHUNKS_PER_CALL):
            if not self.open:
                return
            last = min(first + _CHUNKS_PER_CALL, len(self._state))
            kernels.capture_chunks(self._state, first, last, self._sources, self._targets, self._widths)
        self.open = False

    def release(self) -> list[GrowingArray]:
        """Nobody reads it any more; the memory of the copies."""
        self.open = False
        given, self._copies, self.copies, self._columns = self._copies, [], [], []
        return given


class Captures:
    """The captures of one table under way, and memory for the next.

    All but ``give_back`` belongs to the thread that changes the rows.
    """

    def __init__(self) -> None:
        self._open: list[Capture] = []
        self._spare: deque[list[GrowingArray]] = deque(maxlen=1)
        self._expected = 0

    @property
    def open(self) -> bool:
        """True if there may be something to preserve."""
        return len(self._open) > 0

    def begin(self, columns: Sequence[GrowingArray], rows: int) -> Capture:
        """Capture the first ``rows`` rows; costs a byte per chunk, or the copying of a small table."""
        self._expected = 0
        copies = _memory_for(columns, rows, self._spare.pop() if self._spare else [])
        at_once = rows * sum(column.values.strides[0] for column in columns) <= COPIED_AT_ONCE_BYTES
        capture = Capture([column.values for column in columns], rows, copies, at_once=at_once)
        if capture.open:
            self._open.append(capture)
        return capture

    def expect(self, rows: int) -> None:
        """A restore brings so many rows: memory for a capture can wait until they are there."""
        self._expected = rows

    def prepare(self, columns: Sequence[GrowingArray], rows: int) -> None:
        """The columns have grown: have memory ready for the next capture."""
        if rows > LARGE_ROWS and rows >= self._expected and not self._open:
            self._spare.append(_memory_for(columns, rows, self._spare.pop() if self._spare else []))

    def preserve(self, gids: npt.NDArray[Any]) -> None:
        """Rows of these group ids are about to change."""
        for capture in tuple(self._open):
            if capture.open:
                capture.preserve(gids)
            else:
                self._open.remove(capture)

    def abandon_columns(self) -> None:
        """The columns go on in other arrays: what was captured cannot change any more."""
        self._open.clear()

    def give_back(self, capture: Capture) -> None:
        """Release a capture, from any thread; the next one takes over its memory, whose pages are warm."""
        self._spare.append(capture.release())


def _memory_for(columns: Sequence[GrowingArray], rows: int, spare: list[GrowingArray]) -> list[GrowingArray]:
    copies = spare or [GrowingArray(column.values.dtype, column.values.shape[1:]) for column in columns]
    for copy in copies:
        copy.reserve(rows)
    return copies

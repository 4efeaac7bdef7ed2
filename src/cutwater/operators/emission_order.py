"""The output of one firing, in one order wherever it lay (R0).

Some of what waits for the watermark lies in memory and some does not.  Which is where changes with a restore, and so
would the order in which it is found.  Where calls may have to be repeated, everything that comes out together is
therefore gathered first and sorted: by time, of one time by key, of one key as it came.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.operators.base import Context, Outputs
from cutwater.operators.deterministic_batches import DeterministicBatches
from cutwater.state.backend import StateBackend
from cutwater.state.disk.tables import SortedRows
from cutwater.state.keys import Hashes


class EmissionOrder:
    """Batches of one firing come in any order, and leave sorted; where a batch ends, its rows say
    (``DeterministicBatches``).

    Rows of one time and key must come in their order.  Keys of equal hash are left to chance.

    Args:
        rows: sorts them.

    Raises:
        StorageError: of all methods: the disk is full, or fails.
    """

    def __init__(self, rows: SortedRows) -> None:
        self._rows = rows
        self._batches = DeterministicBatches()
        self._collecting = False
        self._sorted: Iterator[pa.RecordBatch] | None = None

    @classmethod
    def of(cls, ctx: Context, backend: StateBackend, schema: pa.Schema) -> EmissionOrder | None:
        """For a step; ``None``: whatever order comes is right, or all of it lies in memory."""
        rows = backend.sorted_rows(schema) if ctx.repeatable else None
        return None if rows is None else cls(rows)

    @property
    def collecting(self) -> bool:
        """True if what comes out is to be added; else it is in order."""
        return self._collecting

    @property
    def pending(self) -> bool:
        """True if there is more to ``give``."""
        return self._sorted is not None

    def begin(self) -> None:
        """Rows come out that do not come in order: gather all of this firing."""
        self._collecting = True

    def add(self, batch: pa.RecordBatch, times: npt.NDArray[np.int64], hashes: Hashes) -> None:
        """Rows that come out in this firing, with what they are sorted by."""
        self._rows.add(batch, times, hashes)

    def give(self, outputs: Outputs, *, last: bool) -> Outputs:
        """Batches to go on, of those that are in order already and of those that were added.

        Args:
            outputs: are in order.
            last: the firing is over: everything has been added.
        """
        if self._collecting and last:
            self._collecting = False
            self._sorted = self._rows.take()
        if self._sorted is not None:
            batch = next(self._sorted, None)
            if batch is None:
                self._sorted = None
            else:
                outputs = [*outputs, (0, batch)]
        return self._batches.cut(outputs, last=last and not self.pending)

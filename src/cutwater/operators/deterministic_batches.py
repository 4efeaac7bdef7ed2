"""Ends of batches of joined rows, if calls may have to be repeated (R0): their rows say so, and nothing else does.

How many rows a join puts into a batch depends on the widest row that it has seen, and on how far it came in one call:
both change with a restore.  What is dealt out batch by batch would then go elsewhere.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cutwater.data.rows import MAX_BATCH_ROWS, row_bytes
from cutwater.operators.base import Outputs

_BATCH_BYTES = 1 << 26


class DeterministicBatches:
    """Cuts a sequence of rows into batches; where they end does not depend on the batches in which the rows come.

    >>> batches = DeterministicBatches(2)
    >>> [[b.to_pydict()["n"] for _, b in batches.cut([(0, pa.record_batch({"n": [i, i]}))], last=i == 3)]
    ...     for i in (1, 2, 3)]
    [[[1, 1]], [[2, 2]], [[3, 3]]]
    >>> [b.num_rows for _, b in batches.cut([(0, pa.record_batch({"n": [1, 2, 3]}))], last=False)]
    [2]
    >>> [b.num_rows for _, b in batches.cut([], last=True)]
    [1]

    Args:
        rows: most rows of one batch.
        batch_bytes: a batch ends with the row that reaches this size.
    """

    def __init__(self, rows: int = MAX_BATCH_ROWS, batch_bytes: int = _BATCH_BYTES) -> None:
        self._rows, self._bytes = rows, batch_bytes
        self._held: list[pa.RecordBatch] = []
        self._held_rows = self._held_bytes = 0

    def cut(self, outputs: Outputs, *, last: bool) -> Outputs:
        """Rows of output 0 come, and batches that are complete go; with ``last`` all do.  Other outputs pass."""
        made: Outputs = []
        for output, batch in outputs:
            if output:
                made.append((output, batch))
                continue
            while batch.num_rows:
                count = self._fitting(batch)
                self._held.append(batch.slice(0, count))
                self._held_rows += count
                batch = batch.slice(count)
                if batch.num_rows or self._full:
                    made += self._flush()
        return made + self._flush() if last else made

    def _fitting(self, batch: pa.RecordBatch) -> int:
        """Number of rows that go to those that are held; at least one."""
        most = min(batch.num_rows, self._rows - self._held_rows)
        ends = self._held_bytes + np.cumsum(row_bytes(batch.slice(0, most)))
        count = min(most, int(np.searchsorted(ends, self._bytes)) + 1)
        self._held_bytes = int(ends[count - 1])
        return count

    @property
    def _full(self) -> bool:
        return self._held_rows >= self._rows or self._held_bytes >= self._bytes

    def _flush(self) -> Outputs:
        held, self._held = self._held, []
        self._held_rows = self._held_bytes = 0
        return [(0, held[0] if len(held) == 1 else pa.concat_batches(held))] if held else []

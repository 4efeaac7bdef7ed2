"""Tumbling windows, the global window, and sliding windows with early results."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cutwater.operators.base import Outputs
from cutwater.operators.window import kernels
from cutwater.operators.window.kinds import Period
from cutwater.operators.window.operator import Times, WindowOperator
from cutwater.operators.window.table import WindowTable


class WindowAggregate(WindowOperator[WindowTable]):
    """Every row goes into each of its windows."""

    def _clear(self) -> None:
        super()._clear()
        self._windows = WindowTable(self._spec, self._backend)

    def _take(self, batch: pa.RecordBatch, reached: Times) -> Outputs:
        self._windows.table.make_room()
        period = self._spec.window.period
        if period is not None and period.size_us != period.every_us:
            return self._slide(period, batch, reached)
        starts: Times = np.zeros(batch.num_rows, np.int64)
        first = 0
        if period is not None:
            first, _ = kernels.assign(self._times(batch), period.size_us, 0, period.offset_us, starts)
        outputs: Outputs = []
        takes_us = self._windows.reach_us + self._spec.allowed_lateness_us
        if int(first) + takes_us <= int(reached.max()):
            late = starts + takes_us <= reached
            if late.any():
                outputs = self._late(batch, late)
                batch, starts = batch.filter(pa.array(~late)), starts[~late]
                reached = reached if len(reached) == 1 else reached[~late]
        return outputs + self._windows.add(batch, starts, reached)

    def _slide(self, period: Period, batch: pa.RecordBatch, reached: Times) -> Outputs:
        times, lateness = self._times(batch), self._spec.allowed_lateness_us
        rows, starts = expand(period, times, lateness, reached, complete=False)
        if len(rows) and len(np.unique(rows)) == batch.num_rows:
            outputs: Outputs = []
        else:
            outputs = self._outside(period, batch, times, rows)
        reached = reached if len(reached) == 1 else reached[rows]
        return outputs + self._windows.add(batch.take(pa.array(rows)), starts, reached)

    def _outside(self, period: Period, batch: pa.RecordBatch, times: Times, rows: Times) -> Outputs:
        """Rows that go nowhere: late, or between two windows."""
        lost = np.ones(batch.num_rows, np.bool_)
        lost[rows] = False
        between = lost & ((times - period.offset_us) % period.every_us >= period.size_us)
        if between.any():
            self.ctx.count("rows_outside_windows", int(between.sum()))
        late = lost & ~between
        return self._late(batch, late) if late.any() else []


def expand(period: Period, times: Times, lateness_us: int, reached: Times, *, complete: bool) -> tuple[Times, Times]:
    """Every (row, window start) such that the row lies in the window and the window still takes it.

    Args:
        complete: only windows that have fired.
    """
    nowhere: Times = np.empty(0, np.int64)
    arguments = (times, period.size_us, period.every_us, period.offset_us, lateness_us, complete, reached)
    count = kernels.expand(*arguments, nowhere, nowhere)
    rows: Times = np.empty(count, np.int64)
    starts: Times = np.empty(count, np.int64)
    if count:
        kernels.expand(*arguments, rows, starts)
    return rows, starts

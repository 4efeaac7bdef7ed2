"""Session windows: rows of a key that follow each other within a gap."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from cutwater.operators.base import Outputs
from cutwater.operators.window.operator import WindowOperator
from cutwater.operators.window.session_table import SessionTable
from cutwater.operators.window.stored_windows import Times


class SessionAggregate(WindowOperator[SessionTable]):
    """Rows extend sessions and merge them, one by one in the order in which they come.

    A session that has fired and goes on fires again at its new end, under its new borders.
    """

    def _clear(self) -> None:
        super()._clear()
        self._windows = SessionTable(self._spec)
        if self._store is not None:
            self._windows.spill_to(self._store, self.ctx)

    def _take(self, batch: pa.RecordBatch, reached: Times) -> Outputs:
        self._windows.make_room()
        times = self._times(batch)
        anchors = self._windows.anchors([batch.column(name) for name in self._spec.keys])
        numbered = self._number(batch)
        outputs: Outputs = []
        late = np.zeros(batch.num_rows, np.bool_)
        begin = 0
        while begin < batch.num_rows:
            taken = self._windows.add(begin, numbered, times, anchors, reached)
            late[begin : taken.stop] = taken.late
            outputs += taken.outputs
            begin = taken.stop
        return (self._late(batch, late) if late.any() else []) + outputs

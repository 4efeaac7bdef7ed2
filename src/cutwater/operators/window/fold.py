"""Rows into the values of their windows, and the results of the windows that come out with a row."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.operators.aggregate.accumulators import Accumulator, Aggregate
from cutwater.operators.aggregate.layout import AggregateTable
from cutwater.operators.window import kernels
from cutwater.state.index.key_index import GroupIds

Mask = npt.NDArray[np.bool_]


class Fold:
    """How the accumulators of a table take rows.

    Args:
        aggregates: what the accumulators compute.
        schema: of the rows.
        discarding: a group id begins anew after each of its results.
    """

    def __init__(self, aggregates: Sequence[Aggregate], schema: pa.Schema, *, discarding: bool) -> None:
        self._aggregates = aggregates
        self._schema = schema
        self._discarding = discarding

    def rows(self, table: AggregateTable, gids: GroupIds, batch: pa.RecordBatch, fire: Mask) -> list[pa.Array]:
        """Take rows of group ids that may change now.

        Returns a column per aggregate: the results after those rows that fire.
        """
        if self._discarding:
            return self._discard(table.accumulators, gids, batch, fire)
        mask = pa.array(fire)
        return [accumulator.running(gids, batch).filter(mask) for accumulator in table.accumulators]

    def _discard(
        self, into: Sequence[Accumulator], gids: GroupIds, batch: pa.RecordBatch, fire: Mask
    ) -> list[pa.Array]:
        """Between its results each group id has values of its own, numbered one after the other."""
        touched, numbers = np.unique(gids, return_inverse=True)
        current: GroupIds = np.arange(len(touched), dtype=np.int32)
        local: GroupIds = np.empty(len(gids), np.int32)
        begun = current.copy()
        count = kernels.epochs(numbers.astype(np.int32), fire, current, local)
        mask = pa.array(fire)
        results: list[pa.Array] = []
        for accumulator, aggregate in zip(into, self._aggregates, strict=True):
            scratch = aggregate.accumulator(self._schema)
            scratch.reserve(count)
            scratch.restore(begun, accumulator.state(touched))
            results.append(scratch.running(local, batch).filter(mask))
            accumulator.restore(touched, scratch.state(current))
        return results

    def begin_anew(self, table: AggregateTable, gids: GroupIds) -> None:
        """Group ids whose results have come out: with ``discarding`` they hold nothing now."""
        if self._discarding:
            self.clear(table, gids)

    def clear(self, table: AggregateTable, gids: GroupIds) -> None:
        """From now on these group ids have seen nothing."""
        table.touch(gids)
        for accumulator, aggregate in zip(table.accumulators, self._aggregates, strict=True):
            fresh = aggregate.accumulator(self._schema)
            fresh.reserve(1)
            accumulator.restore(gids, fresh.state(np.zeros(len(gids), np.int32)))

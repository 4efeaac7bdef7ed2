"""Rows of one side in the order in which they came, chained by key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.rows import rows_per_batch, widest_row_bytes
from cutwater.state.index.key_index import GroupIds
from cutwater.state.keys import hash_keys, key_groups
from cutwater.state.rows import kernels
from cutwater.state.segments import GROUP_COLUMN, Segment, SegmentKind
from cutwater.state.table.row_store import RowStore

References: TypeAlias = npt.NDArray[np.int64]

_FIRST_ROWS = 1024
_ROW_BYTES = 20
"""Bytes that a row takes besides its columns."""


class RowChains:
    """Rows in the order in which they came, chained by key group id.

    Columns, times and group ids lie in arrays that are only appended to: a frozen view costs nothing.

    Args:
        schema: of the rows.
        rows: how many to have room for.
    """

    def __init__(self, schema: pa.Schema, rows: int = _FIRST_ROWS) -> None:
        self.schema = schema
        self.rows = 0
        self.latest = -(2**63)
        """Latest event time of all rows."""
        self.widest = 0
        """Bytes of the widest row, or more."""
        self._values = RowStore(schema.types, rows)
        self._times: References = np.empty(rows, np.int64)
        self._gids: GroupIds = np.empty(rows, np.int32)
        self._nexts: References = np.empty(rows, np.int64)
        self._heads: References = np.empty(0, np.int64)
        self._tails: References = np.empty(0, np.int64)

    @property
    def times(self) -> References:
        return self._times[: self.rows]

    @property
    def gids(self) -> GroupIds:
        return self._gids[: self.rows]

    def reserve(self, gids: int) -> None:
        """Be ready for this many group ids."""
        used = len(self._heads)
        if gids > used:
            self._heads, self._tails = (
                _grown(chain, used, max(gids, 2 * used), fill=-1) for chain in (self._heads, self._tails)
            )

    def append(self, batch: pa.RecordBatch, gids: GroupIds, times: References) -> None:
        """Add rows; ``reserve`` has been told of their group ids."""
        if batch.num_rows == 0:
            return
        first, self.rows = self.rows, self.rows + batch.num_rows
        if self.rows > len(self._times):
            size = 2 * self.rows
            self._times, self._gids, self._nexts = (
                _grown(values, first, size) for values in (self._times, self._gids, self._nexts)
            )
        self._times[first : self.rows] = times
        self._gids[first : self.rows] = gids
        self._values.append(batch.columns)
        self.latest = max(self.latest, int(times.max()))
        self.widest = max(self.widest, widest_row_bytes(batch))
        kernels.link(self.gids[first:], first, self._heads, self._tails, self._nexts)

    def probe(
        self,
        gids: GroupIds,
        times: References,
        start: tuple[int, int],
        bounds: tuple[int, int, int],
        max_steps: int,
        out: tuple[References, References],
    ) -> tuple[int, int, int]:
        """Matches of arriving rows; see ``kernels.probe`` for arguments and result."""
        chains = (self._heads, self._tails, self._nexts, self._times)
        return kernels.probe(gids, times, *start, *bounds, *chains, max_steps, *out)

    def latest_at(self, gids: GroupIds, times: References, settled: int) -> References:
        """The row of each group id that was the latest at a time; see ``kernels.latest``."""
        references = np.empty(len(gids), np.int64)
        chains = (self._heads, self._tails, self._nexts, self._times)
        kernels.latest(gids, times, settled, *chains, references)
        return references

    def of(self, gids: GroupIds) -> tuple[References, References]:
        """The rows of some ids, those of a group id in the order in which they came, and where those of each begin."""
        bounds, rows = np.empty(len(gids) + 1, np.int64), np.empty(0, np.int64)
        kernels.rows_of(gids, self._heads, self._nexts, bounds, rows)
        rows = np.empty(int(bounds[-1]), np.int64)
        kernels.rows_of(gids, self._heads, self._nexts, bounds, rows)
        return rows, bounds

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take, roughly."""
        return self._values.nbytes + self.rows * _ROW_BYTES

    def take(self, references: References) -> list[pa.Array]:
        """The columns of some rows."""
        return self._values.take(references)

    def frozen(self) -> RowChains:
        """The rows as they are now; serves ``times``, ``gids`` and ``take`` only."""
        view = object.__new__(RowChains)
        view.schema, view.rows, view.latest, view.widest = self.schema, self.rows, self.latest, self.widest
        view._times, view._gids, view._values = self._times, self._gids, self._values.frozen()
        return view

    def kept(self, references: References, gids: GroupIds, gid_count: int) -> RowChains:
        """A new side with some of the rows, under new group ids, and room for as many again."""
        side = RowChains(self.schema, 2 * len(references) + _FIRST_ROWS)
        side.reserve(gid_count)
        portion = rows_per_batch(self.widest)
        for begin in range(0, len(references), portion):
            part = slice(begin, begin + portion)
            batch = pa.RecordBatch.from_arrays(self.take(references[part]), schema=self.schema)
            side.append(batch, gids[part], self._times[references[part]])
        return side

    def segments(
        self,
        name: str,
        references: References,
        keys: Callable[[GroupIds], list[pa.Array]],
        max_parallelism: int,
        kind: SegmentKind = "base",
    ) -> Iterator[Segment]:
        """The rows as segments sorted by key group, each of a bounded size; within a key in the order they came.

        Args:
            name: of the state.
            references: rows to write.
            keys: key columns of some group ids.
            max_parallelism: number of key groups.
            kind: "base", or "delta" for rows that come to those of an older snapshot.
        """
        if len(references) == 0:
            return
        groups = key_groups(hash_keys(keys(self.gids[references])), max_parallelism)
        order = np.argsort(groups, kind="stable")
        references, groups = references[order], groups[order]
        schema = pa.schema([pa.field(GROUP_COLUMN, pa.uint16(), nullable=False), *self.schema])
        for part, continues in group_portions(groups, rows_per_batch(self.widest)):
            arrays = [pa.array(groups[part]), *self.take(references[part])]
            covered = (int(groups[part][0]), int(groups[part][-1]) + 1)
            piece = "delta" if continues else kind
            yield Segment(name, piece, pa.RecordBatch.from_arrays(arrays, schema=schema), covered)


def group_portions(groups: npt.NDArray[np.uint16], rows: int) -> Iterator[tuple[slice, bool]]:
    """Cut sorted groups into portions of at most ``rows``, and say whether one goes on with the group before it.

    >>> list(group_portions(np.array([1, 1, 1, 4], np.uint16), 2))
    [(slice(0, 2, None), False), (slice(2, 4, None), True)]
    """
    for begin in range(0, len(groups), rows):
        continues = begin > 0 and bool(groups[begin] == groups[begin - 1])
        yield slice(begin, min(begin + rows, len(groups))), continues


def _grown(values: npt.NDArray[Any], used: int, size: int, fill: int | None = None) -> npt.NDArray[Any]:
    """A larger copy; the old array stays as it is, because a frozen view may look at it."""
    grown = np.empty(size, values.dtype)
    grown[:used] = values[:used]
    if fill is not None:
        grown[used:] = fill
    return grown

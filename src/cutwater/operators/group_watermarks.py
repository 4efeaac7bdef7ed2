"""The watermark of a keyed step over restores: one for all rows, or one by key group until they have met."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.time import MIN_WATERMARK
from cutwater.state.segments import GROUP_COLUMN, Segment

WATERMARK = "watermark"
"""Name of the segment, and of its column."""


class GroupWatermarks:
    """After a restore from several subtasks their watermarks may differ.  Each key group keeps its own as a floor until
    the common one has passed them all, so that rows that were late stay late.

    Args:
        owned: key groups of the subtask.
        groups: number of all key groups.

    >>> watermarks = GroupWatermarks(range(2, 4), 8)
    >>> watermarks.advance(5), watermarks.current
    (True, 5)
    """

    def __init__(self, owned: range, groups: int) -> None:
        self.current = MIN_WATERMARK
        self._owned = owned
        self._groups = groups
        self._floors: npt.NDArray[np.int64] | None = None

    def advance(self, watermark: int) -> bool:
        """True if it rose."""
        if watermark <= self.current:
            return False
        self.current = watermark
        if self._floors is not None and watermark >= int(self._floors.max()):
            self._floors = None
        return True

    def copy(self) -> GroupWatermarks:
        """The watermarks as they are now."""
        return copy.copy(self)  # the floors are replaced, never changed, once they are restored

    @property
    def differ(self) -> bool:
        """True if rows of different key groups have different watermarks."""
        return self._floors is not None

    def of(self, groups: npt.NDArray[np.uint16]) -> npt.NDArray[np.int64]:
        """The watermark of rows of these key groups."""
        if self._floors is None:
            return np.full(len(groups), self.current, np.int64)
        return np.maximum(self._floors[groups], self.current)

    def segment(self) -> Segment:
        """Watermark by owned key group."""
        owned = np.arange(self._owned.start, self._owned.stop, dtype=np.uint16)
        batch = pa.record_batch({GROUP_COLUMN: owned, WATERMARK: self.of(owned)})
        return Segment(WATERMARK, "base", batch, (self._owned.start, self._owned.stop))

    def restored_from(
        self, segments: Iterable[Segment], also: Callable[[Segment], None] | None = None
    ) -> Iterator[Segment]:
        """The other segments; the watermarks are restored as they come, and once all are in ``current`` is the lowest.

        Args:
            segments: of a snapshot.
            also: takes what else lies beside the watermarks.
        """
        for segment in segments:
            if segment.name != WATERMARK:
                yield segment
                continue
            self.restore(segment)
            if also is not None:
                also(segment)
        self.restored()

    def restore(self, segment: Segment) -> None:
        """Take over the watermarks of a segment."""
        floors = np.full(self._groups, MIN_WATERMARK, np.int64) if self._floors is None else self._floors
        groups: Any = segment.batch.column(GROUP_COLUMN).to_numpy()
        inside = (groups >= self._owned.start) & (groups < self._owned.stop)
        floors[groups[inside]] = segment.batch.column(WATERMARK).to_numpy()[inside]
        self._floors = floors

    def restored(self) -> None:
        """All segments are in."""
        if self._floors is None or len(self._owned) == 0:
            return
        mine = self._floors[self._owned.start : self._owned.stop]
        self.current = int(mine.min())
        if int(mine.max()) == self.current:
            self._floors = None

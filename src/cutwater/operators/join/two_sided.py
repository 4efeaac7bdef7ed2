"""Joins by event time of rows that wait on two sides."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.event_times import event_times
from cutwater.operators.base import BaseOperator, Context, Outputs
from cutwater.operators.deterministic_batches import DeterministicBatches
from cutwater.operators.emission_order import EmissionOrder
from cutwater.operators.group_watermarks import WATERMARK, GroupWatermarks
from cutwater.state.backend import StateBackend
from cutwater.state.index.key_index import GroupIds, KeyIndex
from cutwater.state.keys import hash_keys, key_groups, null_key_mask
from cutwater.state.rows.chains import References, RowChains
from cutwater.state.rows.keyed_rows import NEVER, RowSides
from cutwater.state.segments import Frozen, Segment

if TYPE_CHECKING:
    from cutwater.operators.join.spec import TimedJoinSpec

LEFT, RIGHT = 0, 1
SIDES = ("left", "right")


class TwoSidedJoin(BaseOperator):
    """The rows of both sides by key."""

    def __init__(self, spec: TimedJoinSpec) -> None:
        schemas, keys = (spec.left_schema, spec.right_schema), (spec.left_keys, spec.right_keys)
        self._types = RowSides(SIDES, spec.key_types, schemas, keys, (spec.left_time, spec.right_time))
        self._schemas, self._keys, self._joined_schema = schemas, keys, spec.outputs[0]
        self._carried = [i for i, name in enumerate(spec.right_schema.names) if name not in spec.dropped]

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self._backend = StateBackend(ctx)
        self._portions = DeterministicBatches() if ctx.repeatable else None
        self._order = EmissionOrder.of(ctx, self._backend, self._joined_schema)
        self._clear()
        self._track()

    def close(self) -> None:
        self._backend.close()

    def _track(self, *, restored: bool = False) -> None:
        if self.ctx.incremental:
            self._rows.track(restored=restored)

    def _clear(self) -> None:
        self._watermarks = GroupWatermarks(self.ctx.key_groups, self.ctx.max_parallelism)
        self._rows = self._backend.rows(self._types, self._live, self._wakes)

    def _wakes(self, side: int, times: References) -> References:
        """The times at which rows of a side, by their event times, want to be looked at; ``NEVER``: they do not."""
        return np.full(len(times), NEVER, np.int64)

    @property
    def _sides(self) -> list[RowChains]:
        return self._rows.sides

    @property
    def _index(self) -> KeyIndex:
        return self._rows.index

    # -- rows

    def _event_times(self, side: int, batch: pa.RecordBatch) -> References:
        return event_times(batch, self._types.times[side], f" of the {SIDES[side]} side")

    def _reached(self, side: int, batch: pa.RecordBatch) -> int | References:
        """The watermark that counts for each row; where its own split had come further, that (W4)."""
        if not self._watermarks.differ:
            return max(self._watermarks.current, self.late_before)
        return np.maximum(self._watermarks.of(self._groups(side, batch)), self.late_before)

    def _groups(self, side: int, batch: pa.RecordBatch) -> npt.NDArray[np.uint16]:
        return key_groups(hash_keys(self._types.key_columns(side, batch)), self.ctx.max_parallelism)

    def _with_whole_keys(
        self, side: int, batch: pa.RecordBatch, times: References
    ) -> tuple[pa.RecordBatch, References]:
        """The rows without a null in their key, and their times: as in SQL, the others have no partner."""
        null = null_key_mask([batch.column(name) for name in self._keys[side]])
        if null is None:
            return batch, times
        times = times[~null]
        times.flags.writeable = False  # one specialisation of the kernels
        return batch.filter(pa.array(~null)), times

    def _portioned(self, outputs: Outputs) -> Outputs:
        """Joined rows in batches; where these end is not to change with a restore, if calls may have to be repeated."""
        return outputs if self._portions is None else self._portions.cut(outputs, last=not self.pending)

    # -- rows that wait for the watermark

    @property
    def _firing(self) -> bool:
        """True if more comes out of those that the watermark has passed, in whatever order."""
        return False

    @property
    def pending(self) -> bool:
        return self._firing or (self._order is not None and self._order.pending)

    def _fires(self) -> None:
        """The watermark has risen: not all that comes out may be in order."""
        if self._order is not None and self._rows.waits(self._watermarks.current):
            self._order.begin()

    def _found(self, batch: pa.RecordBatch, times: References, gids: GroupIds) -> Outputs:
        """Rows that come out, of these times and keys: at once, if they are in order."""
        if self._order is None or not self._order.collecting:
            return [(0, batch)]
        self._order.add(batch, times, hash_keys(self._index.columns(gids)))
        return []

    def _next_rows(self) -> Outputs:
        """The next slice of what comes out, of what is not in order yet."""
        return []

    def resume(self) -> Outputs:
        outputs = self._next_rows()
        return self._portioned(outputs) if self._order is None else self._order.give(outputs, last=not self._firing)

    # -- forgetting

    @abstractmethod
    def _live(self, sides: Sequence[RowChains], watermark: int) -> Sequence[References]:
        """Rows of each side that still count at a watermark, ascending.  A row that does not, never will again."""

    @abstractmethod
    def _counts(self, side: int, batch: pa.RecordBatch, times: References) -> npt.NDArray[np.bool_]:
        """Mask of the rows of some snapshot that may still count: it may have been taken before they did not."""

    # -- snapshots

    def freeze(self, checkpoint_id: int) -> Frozen:
        return self._rows.freeze(checkpoint_id, self._watermarks.current, self._watermarks.segment())

    def restore(self, segments: Iterable[Segment]) -> None:
        self._clear()
        for side, batch in self._rows.restore(self._without_watermarks(segments)):
            times = self._event_times(side, batch)
            counts = self._counts(side, batch, times)
            if not counts.all():
                batch = batch.filter(pa.array(counts))
            if batch.num_rows:
                self._rows.add(side, batch, self._event_times(side, batch))
        self._track(restored=True)

    def _without_watermarks(self, segments: Iterable[Segment]) -> Iterator[Segment]:
        """The other segments; the watermarks are restored as they come."""
        for segment in segments:
            if segment.name == WATERMARK:
                self._watermarks.restore(segment)
            else:
                yield segment
        self._watermarks.restored()

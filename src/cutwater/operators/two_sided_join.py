"""What joins by event time share: one index over the keys of both sides, the rows of each, and their way to disk."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.errors import StorageError
from cutwater.operators.base import BaseOperator, Context
from cutwater.operators.event_times import event_times
from cutwater.operators.join_side import JoinSide, References
from cutwater.operators.join_watermarks import WATERMARK, GroupWatermarks
from cutwater.operators.keyed_segments import keyed_rows
from cutwater.state.index import KeyIndex, Slots
from cutwater.state.intervals import RESTORED, History, Intervals
from cutwater.state.keys import hash_keys, key_groups, null_key_mask
from cutwater.state.nullable_index import NullableIndex
from cutwater.state.segments import Frozen, FrozenSegments, Segment, SegmentKind

__all__ = ["LEFT", "RIGHT", "SIDES", "TwoSidedJoin", "TwoSidedJoinSpec"]

LEFT, RIGHT = 0, 1
SIDES = ("left", "right")
_SLACK_ROWS = 1 << 16
"""Dead rows below this number are not worth a sweep."""


Counts: TypeAlias = tuple[int, int]
"""Rows of the left and of the right side."""


class TwoSidedJoinSpec(Protocol):
    """What the specs of such joins have in common."""

    @property
    def left_schema(self) -> pa.Schema: ...
    @property
    def right_schema(self) -> pa.Schema: ...
    @property
    def left_keys(self) -> tuple[str, ...]: ...
    @property
    def right_keys(self) -> tuple[str, ...]: ...
    @property
    def left_time(self) -> str: ...
    @property
    def right_time(self) -> str: ...
    @property
    def key_types(self) -> tuple[pa.DataType, ...]: ...
    @property
    def dropped(self) -> tuple[str, ...]: ...


class TwoSidedJoin(BaseOperator):
    """One index over the keys of both sides; the rows of each side in chains by key."""

    def __init__(self, spec: TwoSidedJoinSpec) -> None:
        self._key_types = spec.key_types
        self._schemas = (spec.left_schema, spec.right_schema)
        self._keys = (spec.left_keys, spec.right_keys)
        self._time = (spec.left_time, spec.right_time)
        self._carried = [i for i, name in enumerate(spec.right_schema.names) if name not in spec.dropped]

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self._clear()
        self._track()

    def _track(self, *, restored: bool = False) -> None:
        """Keep in mind which rows come after a freeze."""
        self._first = _rows(self._sides)
        self._log = Intervals[Counts](_earlier, RESTORED if restored else None) if self.ctx.incremental else None

    def _clear(self) -> None:
        self._watermarks = GroupWatermarks(self.ctx.key_groups, self.ctx.max_parallelism)
        self._log: Intervals[Counts] | None = None
        self._forget_rows()

    def _forget_rows(self) -> None:
        self._first: Counts = (0, 0)
        """Rows of each side that were there at the last freeze."""
        if self._log is not None:
            self._log.change(lambda _: (0, 0))
        self._index: KeyIndex = NullableIndex(self._key_types)
        self._sides = [JoinSide(schema) for schema in self._schemas]
        self._sweep_at = _SLACK_ROWS

    # -- rows

    def _event_times(self, side: int, batch: pa.RecordBatch) -> References:
        return event_times(batch, self._time[side], f" of the {SIDES[side]} side")

    def _reached(self, side: int, batch: pa.RecordBatch) -> int | References:
        """The watermark that counts for each row."""
        if not self._watermarks.differ:
            return self._watermarks.current
        return self._watermarks.of(key_groups(hash_keys(self._key_columns(side, batch)), self.ctx.max_parallelism))

    def _key_columns(self, side: int, batch: pa.RecordBatch) -> list[pa.Array]:
        columns = (batch.column(name) for name in self._keys[side])
        return [c if c.type == kind else c.cast(kind) for c, kind in zip(columns, self._key_types, strict=True)]

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

    def _store(self, side: int, batch: pa.RecordBatch, times: References) -> Slots:
        slots = self._index.upsert(self._key_columns(side, batch))
        for each in self._sides:
            each.reserve(len(self._index))
        self._sides[side].append(batch, slots, times)
        return slots

    # -- forgetting

    @abstractmethod
    def _live(self, sides: Sequence[JoinSide], watermark: int) -> Sequence[References]:
        """Rows of each side that still count at a watermark, ascending.  A row that does not, never will again."""

    @abstractmethod
    def _counts(self, side: int, batch: pa.RecordBatch, times: References) -> npt.NDArray[np.bool_]:
        """Which rows that some snapshot held may still count: it may have been taken before they did not."""

    def _sweep(self) -> None:
        """Forget the other rows, and keys without rows, once they are at least half."""
        total = sum(side.rows for side in self._sides)
        if total < self._sweep_at:
            return
        live = self._live(self._sides, self._watermarks.current)
        remaining = sum(len(rows) for rows in live)
        if 2 * remaining > total:
            self._sweep_at = total + total // 2
            return
        slots = [side.slots[rows] for side, rows in zip(self._sides, live, strict=True)]
        wanted = np.zeros(len(self._index), np.bool_)
        for some in slots:
            wanted[some] = True
        used = np.flatnonzero(wanted).astype(np.int32)
        index = NullableIndex(self._key_types)
        if len(used):
            index.upsert(self._index.columns(used))  # used slots become 0, 1, 2 ... in this order
        numbers = np.cumsum(wanted, dtype=np.int32) - np.int32(1)
        self._index = index
        self._sides = [
            side.kept(rows, numbers[old], len(used)) for side, rows, old in zip(self._sides, live, slots, strict=True)
        ]
        self._sweep_at = 2 * remaining + _SLACK_ROWS

        def renumbered(first: Counts) -> Counts:
            left, right = (int(np.searchsorted(rows, row)) for rows, row in zip(live, first, strict=True))
            return left, right

        self._first = renumbered(self._first)
        if self._log is not None:
            self._log.change(renumbered)

    # -- snapshots

    def freeze(self, checkpoint_id: int) -> Frozen:
        watermark, groups = self._watermarks.segment(), self.ctx.max_parallelism
        history = self._log.cut(checkpoint_id, self._first) if self._log is not None else None
        self._first = _rows(self._sides)
        sides = [side.frozen() for side in self._sides]
        live = functools.partial(self._live, sides, self._watermarks.current)
        keys = self._index.frozen().columns

        def segments(rows: Sequence[References], kind: SegmentKind) -> Iterator[Segment]:
            yield watermark
            for name, side, references in zip(SIDES, sides, rows, strict=True):
                yield from side.segments(name, references, keys, groups, kind)

        return _FrozenJoin(live, segments, self._log, history)

    def restore(self, segments: Iterable[Segment]) -> None:
        self._clear()
        found: dict[str, list[Segment]] = {name: [] for name in (*SIDES, WATERMARK)}
        for segment in segments:
            if segment.name not in found:
                raise StorageError(
                    f"the snapshot has a state {segment.name!r}, which a join does not know",
                    hint="Give the changed step a new id, or restore with the program that wrote the snapshot.",
                )
            found[segment.name].append(segment)
        for segment in found[WATERMARK]:
            self._watermarks.restore(segment)
        self._watermarks.restored()
        for side, name in enumerate(SIDES):
            for batch in keyed_rows(found[name], self._schemas[side], self.ctx.key_groups):
                times = self._event_times(side, batch)
                counts = self._counts(side, batch, times)
                if counts.all():
                    self._store(side, batch, times)
                elif counts.any():
                    batch = batch.filter(pa.array(counts))
                    self._store(side, batch, self._event_times(side, batch))
        self._track(restored=True)
        self._sweep_at = sum(side.rows for side in self._sides) + _SLACK_ROWS


class _FrozenJoin(FrozenSegments):
    """Both sides at one instant.

    Rows are only ever added, and time forgets them.  So what changed is the rows that came, and a restore forgets those
    that the watermark has left behind.
    """

    def __init__(
        self,
        live: Callable[[], Sequence[References]],
        make: Callable[[Sequence[References], SegmentKind], Iterator[Segment]],
        log: Intervals[Counts] | None,
        history: History[Counts] | None,
    ) -> None:
        super().__init__(lambda: make(live(), "base"))
        self._live, self._make_of = live, make
        self._log, self._history = log, history

    @property
    def incremental(self) -> bool:
        return self._history is not None

    def changes(self, since: int) -> Iterator[Segment] | None:
        if self._log is None or self._history is None or not (later := self._history.since(since)):
            return None
        self._log.completed(since)
        live = self._live()
        added = [rows[np.searchsorted(rows, first) :] for rows, first in zip(live, later[0], strict=True)]
        most = 2 * sum(map(len, added)) > sum(map(len, live))
        return None if most else self._make_of(added, "delta")

    def release(self) -> None:
        super().release()
        self._live, self._make_of = tuple, lambda rows, kind: iter(())


def _rows(sides: Sequence[JoinSide]) -> Counts:
    left, right = sides
    return left.rows, right.rows


def _earlier(first: Counts, second: Counts) -> Counts:
    return first

"""What joins by event time share: one index over the keys of both sides, the rows of each, and their way to disk."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.event_times import event_times
from cutwater.errors import StorageError
from cutwater.operators.base import BaseOperator, Context, Outputs
from cutwater.operators.deterministic_batches import DeterministicBatches
from cutwater.operators.emission_order import EmissionOrder
from cutwater.operators.group_watermarks import WATERMARK, GroupWatermarks
from cutwater.operators.join.rows import FrozenJoinRows, JoinPart, JoinRows, JoinTypes, Live
from cutwater.operators.join.side import JoinSide, References
from cutwater.state.disk.row_journal import RowJournal
from cutwater.state.disk.spill_queue import NEVER
from cutwater.state.index.key_index import KeyIndex, Slots
from cutwater.state.keys import hash_keys, key_groups, null_key_mask
from cutwater.state.segments import Frozen, FrozenSegments, Segment
from cutwater.state.table.intervals import RESTORED, History, Intervals
from cutwater.state.table.keyed_segments import keyed_rows
from cutwater.state.table.spill import open_spill

if TYPE_CHECKING:
    from cutwater.operators.join.spec import TimedJoinSpec

LEFT, RIGHT = 0, 1
SIDES = ("left", "right")
_NO_ROWS: References = np.empty(0, np.int64)
PORTION_KEYS = 1 << 14
"""Keys on disk that are brought in at once."""
_FEW_ROWS = 1 << 10
"""May be in memory after a restore, whatever the budget."""
_SLACK_ROWS = 1 << 16
"""Dead rows below this number are not worth a sweep."""


Counts: TypeAlias = tuple[int, int, int]
"""Rows of the left and of the right side, and the epoch: how many freezes there were."""


class TwoSidedJoin(BaseOperator):
    """One index over the keys of both sides; the rows of each side in chains by key.

    What was added since a freeze are the rows behind those of then, until keys leave memory.  From then on rows that
    come are written to a journal, too, by epoch.
    """

    def __init__(self, spec: TimedJoinSpec) -> None:
        schemas, keys = (spec.left_schema, spec.right_schema), (spec.left_keys, spec.right_keys)
        self._types = JoinTypes(spec.key_types, schemas, keys, (spec.left_time, spec.right_time))
        self._schemas, self._keys, self._joined_schema = schemas, keys, spec.outputs[0]
        self._carried = [i for i, name in enumerate(spec.right_schema.names) if name not in spec.dropped]

    def open(self, ctx: Context) -> None:
        super().open(ctx)
        self._store = open_spill(ctx.state_memory_bytes)
        self._portions = DeterministicBatches() if ctx.repeatable else None
        self._order = EmissionOrder.of(ctx, self._store, self._joined_schema)
        self._clear()
        self._track()

    def close(self) -> None:
        if self._store is not None:
            self._store.close()

    def _track(self, *, restored: bool = False) -> None:
        """Keep in mind which rows come after a freeze."""
        self._first = self._counts_now
        self._log = Intervals[Counts](_earlier, RESTORED if restored else None) if self.ctx.incremental else None
        spill = self._rows.spill
        if spill is not None and spill.rows.used:
            self._begin_journals()

    def _begin_journals(self) -> None:
        if self._store is not None and self._log is not None:
            self._journals = [RowJournal(self._store, schema.types) for schema in self._schemas]

    def _clear(self) -> None:
        self._watermarks = GroupWatermarks(self.ctx.key_groups, self.ctx.max_parallelism)
        self._log: Intervals[Counts] | None = None
        self._journals: list[RowJournal] = []
        self._epoch = 0
        self._first: Counts = (0, 0, 0)
        """Rows of each side that were there at the last freeze."""
        self._rows = JoinRows(self._types, self._renumbered)
        if self._store is not None:
            self._rows.spill_to(self._store, self.ctx, self._wakes)
        self._sweep_at = _SLACK_ROWS

    def _wakes(self, side: int, times: References) -> References:
        """When rows of a side want to be looked at though they are on disk; ``NEVER``: they do not."""
        return np.full(len(times), NEVER, np.int64)

    @property
    def _sides(self) -> list[JoinSide]:
        return self._rows.sides

    @property
    def _index(self) -> KeyIndex:
        return self._rows.index

    @property
    def _counts_now(self) -> Counts:
        left, right = self._sides
        return left.rows, right.rows, self._epoch

    def _forget_rows(self) -> None:
        """No row in memory counts any more."""
        if self._rows.spill is not None:
            self._rows.spill.delete(np.arange(len(self._rows), dtype=np.int32), None)
            self._rows.retain(np.empty(0, np.int32), [_NO_ROWS, _NO_ROWS])
        else:
            self._renumbered([_NO_ROWS, _NO_ROWS])
            self._rows = JoinRows(self._types, self._renumbered)
        self._sweep_at = _SLACK_ROWS

    def _renumbered(self, kept: Sequence[References]) -> None:
        """These rows of each side have become 0, 1, 2 ..., the others are gone."""

        def moved(first: Counts) -> Counts:
            left, right = (int(np.searchsorted(rows, row)) for rows, row in zip(kept, first[:2], strict=True))
            return left, right, first[2]

        self._first = moved(self._first)
        if self._log is not None:
            self._log.change(moved)

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

    def _add(self, side: int, batch: pa.RecordBatch, times: References) -> Slots:
        if self._journals:
            self._journals[side].append(batch.columns, self._groups(side, batch), self._epoch)
        return self._rows.add(side, batch, times)

    def _portioned(self, outputs: Outputs) -> Outputs:
        """Joined rows in batches; where these end is not to change with a restore, if calls may have to be repeated."""
        return outputs if self._portions is None else self._portions.cut(outputs, last=not self.pending)

    # -- rows that wait for the watermark

    @property
    def _firing(self) -> bool:
        """Whether more comes out of those that the watermark has passed, in whatever order."""
        return False

    @property
    def pending(self) -> bool:
        return self._firing or (self._order is not None and self._order.pending)

    def _fires(self) -> None:
        """The watermark has risen: keys on disk may take part in what comes out."""
        wanted = self._rows.wanted
        if self._order is not None and wanted is not None and wanted.due(self._watermarks.current):
            self._order.begin()

    def _found(self, batch: pa.RecordBatch, times: References, slots: Slots) -> Outputs:
        """Rows that come out, of these times and keys: at once, if they are in order."""
        if self._order is None or not self._order.collecting:
            return [(0, batch)]
        self._order.add(batch, times, hash_keys(self._index.columns(slots)))
        return []

    def _next_rows(self) -> Outputs:
        """The next slice of what comes out, of what is not in order yet."""
        return []

    def resume(self) -> Outputs:
        outputs = self._next_rows()
        return self._portioned(outputs) if self._order is None else self._order.give(outputs, last=not self._firing)

    def _make_room(self) -> None:
        """Between batches, when nobody holds slots: forget what does not count, and move what memory does not hold."""
        spill = self._rows.spill
        crowded = spill is not None and spill.full and not spill.busy
        if crowded or self._rows.count >= self._sweep_at:
            self._sweep(crowded=crowded)
        self._rows.make_room()
        if spill is not None and spill.rows.used and self._log is not None and not self._journals:
            self._log.begin(None)  # what came before is not in the journals
            self._begin_journals()

    # -- forgetting

    @abstractmethod
    def _live(self, sides: Sequence[JoinSide], watermark: int) -> Sequence[References]:
        """Rows of each side that still count at a watermark, ascending.  A row that does not, never will again."""

    @abstractmethod
    def _counts(self, side: int, batch: pa.RecordBatch, times: References) -> npt.NDArray[np.bool_]:
        """Which rows that some snapshot held may still count: it may have been taken before they did not."""

    def _sweep(self, *, crowded: bool = False) -> None:
        """Forget the other rows, and keys without rows, once they are half, or a quarter where memory is scarce."""
        total = self._rows.count
        live = self._live(self._sides, self._watermarks.current)
        remaining = sum(len(rows) for rows in live)
        if 2 * remaining > total and not (crowded and 4 * remaining < 3 * total):
            self._sweep_at = total + total // 2
            return
        wanted = self._rows.with_rows(live)
        if self._rows.spill is not None:
            self._rows.spill.delete(np.flatnonzero(~wanted).astype(np.int32), None)
        self._rows.retain(np.flatnonzero(wanted).astype(np.int32), live)
        self._sweep_at = 2 * remaining + _SLACK_ROWS

    def _clean(self) -> None:
        """The watermark has risen: forget some keys on disk without a row that counts."""
        watermark = self._watermarks.current
        self._rows.clean(lambda sides: self._live(sides, watermark))

    # -- rows on disk whose time comes

    def _bring(self) -> int | None:
        """Bring a portion of the keys in that want to be looked at; nobody holds slots.

        Returns the first of their slots; ``None``: there are none.
        """
        wanted = self._rows.wanted
        if wanted is None or not wanted.due(self._watermarks.current):
            return None
        self._make_room()
        first = len(self._rows)
        keys = wanted.take(self._watermarks.current, PORTION_KEYS)
        if keys:
            self._rows.upsert(keys)
        return first

    # -- snapshots

    def freeze(self, checkpoint_id: int) -> Frozen:
        watermark, groups = self._watermarks.segment(), self.ctx.max_parallelism
        history = None
        if self._log is not None:
            history = self._log.cut(checkpoint_id, self._first)
            for journal in self._journals:
                journal.forget((self._log.kept or [(0, 0, self._epoch)])[0][2])
        self._epoch += 1
        self._first = self._counts_now
        now = self._watermarks.current

        def segments(parts: Iterable[JoinPart]) -> Iterator[Segment]:
            yield watermark
            for keys, sides, rows, kind in parts:
                for name, side, references in zip(SIDES, sides, rows, strict=True):
                    yield from side.segments(name, references, keys, groups, kind)

        frozen = FrozenJoinRows(self._rows, self._journals)
        return _FrozenJoin(frozen, lambda sides: self._live(sides, now), segments, self._log, history)

    def restore(self, segments: Iterable[Segment]) -> None:
        self._clear()
        for side, batch in self._to_restore(segments):
            times = self._event_times(side, batch)
            counts = self._counts(side, batch, times)
            if not counts.all():
                batch = batch.filter(pa.array(counts))
            if batch.num_rows:
                self._add(side, batch, self._event_times(side, batch))
        self._track(restored=True)
        self._sweep_at = self._rows.count + _SLACK_ROWS

    def _to_restore(self, segments: Iterable[Segment]) -> Iterator[tuple[int, pa.RecordBatch]]:
        """The rows of each side; where rows lie on disk, segments are taken as they come."""
        spill, owned = self._rows.spill, self.ctx.key_groups
        waiting: tuple[list[Segment], list[Segment]] = ([], [])
        reached: list[tuple[int, int]] = [(owned.stop, owned.start)] * len(SIDES)  # groups that have had rows
        for segment in segments:
            if segment.name == WATERMARK:
                self._watermarks.restore(segment)
                continue
            if segment.name not in SIDES:
                raise StorageError(
                    f"the snapshot has a state {segment.name!r}, which a join does not know",
                    hint="Give the changed step a new id, or restore with the program that wrote the snapshot.",
                )
            side = SIDES.index(segment.name)
            if spill is None:
                waiting[side].append(segment)
                continue
            first, last = segment.key_groups or (owned.start, owned.stop)
            if segment.kind == "base" and first < reached[side][1] and reached[side][0] < last:
                self._rows.remove(side, range(first, last))
            reached[side] = min(first, reached[side][0]), max(last, reached[side][1])
            for batch in keyed_rows([replace(segment, kind="delta")], self._schemas[side], owned):
                for begin in range(0, batch.num_rows, PORTION_KEYS):
                    yield side, batch.slice(begin, PORTION_KEYS)
                    while spill.busy or (spill.full and self._rows.count > _FEW_ROWS):
                        self._rows.make_room()
        self._watermarks.restored()
        for side, of_side in enumerate(waiting):
            for batch in keyed_rows(of_side, self._schemas[side], owned):
                yield side, batch


class _FrozenJoin(FrozenSegments):
    """Both sides at one instant.

    Rows are only ever added, and time forgets them.  So what changed is the rows that came, and a restore forgets those
    that the watermark has left behind.
    """

    def __init__(
        self,
        frozen: FrozenJoinRows,
        live: Live,
        make: Callable[[Iterable[JoinPart]], Iterator[Segment]],
        log: Intervals[Counts] | None,
        history: History[Counts] | None,
    ) -> None:
        super().__init__(lambda: make(frozen.parts(live)))
        self._frozen, self._live, self._make_of = frozen, live, make
        self._log, self._history = log, history

    @property
    def incremental(self) -> bool:
        return self._history is not None

    def changes(self, since: int) -> Iterator[Segment] | None:
        if self._log is None or self._history is None or not (later := self._history.since(since)):
            return None
        self._log.completed(since)
        left, right, epoch = later[0]
        if self._frozen.journaled:
            return self._make_of(self._frozen.added(epoch, self._live))
        sides = self._frozen.sides
        live = self._live(sides)
        added = [rows[np.searchsorted(rows, first) :] for rows, first in zip(live, (left, right), strict=True)]
        if 2 * sum(map(len, added)) > sum(map(len, live)):
            return None
        return self._make_of([JoinPart(self._frozen.index.columns, sides, added, "delta")])

    def release(self) -> None:
        super().release()
        self._frozen.release()
        self._make_of = lambda parts: iter(())


def _earlier(first: Counts, second: Counts) -> Counts:
    return first

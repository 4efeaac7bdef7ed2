"""The operator behind ``WindowJoinSpec``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from cutwater.data.rows import rows_per_batch
from cutwater.data.words import from_words
from cutwater.operators.base import Outputs
from cutwater.operators.join.two_sided import LEFT, RIGHT, TwoSidedJoin
from cutwater.operators.window.operator import expand
from cutwater.state.key_index import GroupIds
from cutwater.state.keys import NullableKeys, hash_keys, key_groups, null_key_mask, require_valid_keys
from cutwater.state.rows.keyed_rows import NEVER, References, RowChains

if TYPE_CHECKING:
    from cutwater.operators.join.spec import WindowJoinSpec

_compute: Any = pyarrow.compute


@dataclass(slots=True)
class _Closing:
    """The output of the windows that close: a number of *entries*, each of which makes one row or several."""

    starts: References
    """Of the window of each entry."""
    lefts: References
    """Its left row, -1 for none."""
    first: References
    """The place where its right rows begin in ``rights``, -1 if it has none."""
    bounds: References
    """0, then how many rows each entry and those before it make."""
    rights: References
    """Right rows, those of one window and key together."""
    done: int = 0
    """Rows that have come out."""


class WindowJoin(TwoSidedJoin):
    """One index over the keys of both sides, and the rows of each until their last window closes."""

    def __init__(self, spec: WindowJoinSpec) -> None:
        super().__init__(spec)
        self._spec = spec
        self._window = spec.period
        self._paired = spec.how not in ("semi", "anti")
        self._lonely = (spec.outer[LEFT] or spec.how == "anti", spec.outer[RIGHT])

    def _clear(self) -> None:
        super()._clear()
        self._closing: _Closing | None = None
        self._brought: Iterator[int] | None = None
        """Keys with rows in the windows that close, as they are brought into memory: the first group id of
        each part."""
        self._before = self._watermarks.copy()

    # -- rows

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        outputs = self._drained()
        if batch.num_rows == 0:
            return outputs
        require_valid_keys(batch, self._keys[input])
        times = self._event_times(input, batch)
        last = _last_instants(self._spec, times)
        inside = times <= last
        # All its windows or none, whatever has come out.
        over = self._spec.windows.first_close(times) <= self.late_before
        late = inside & (over | (last <= self._reached(input, batch)))
        taken = inside & ~late
        if not taken.all():
            outside = int(np.count_nonzero(~inside))
            if outside:
                self.ctx.count("rows_outside_windows", outside)
            outputs += self._late(batch, late, 1 + input)
            batch, times = batch.filter(pa.array(taken)), times[taken]
        if not self._lonely[input]:
            batch, times = self._with_whole_keys(input, batch, times)
        if batch.num_rows:
            self._rows.make_room(self._watermarks.current)
            self._rows.add(input, batch, times)
        return outputs

    # -- time

    def on_watermark(self, watermark: int) -> Outputs:
        outputs = self._drained()
        before = self._watermarks.copy()
        if self._watermarks.advance(watermark) and self._closes(before.current):
            self._before = before
            self._closing = self._close(0)
            self._brought = self._rows.due(watermark)
            self._fires()
        return outputs + self.resume()

    def _closes(self, before: int) -> bool:
        """True if the watermark has passed the last instant of any window since."""
        window = self._window
        first, now = (w + 1 - window.offset_us - window.size_us for w in (before, self._watermarks.current))
        return first // window.every_us < now // window.every_us

    def _close(self, gid: int) -> _Closing | None:
        """Bring the rows of the windows that close together, of the keys from this group id on."""
        (lefts, left_starts), (rights, right_starts) = (self._due(side, gid) for side in (LEFT, RIGHT))
        for side, rows in enumerate((lefts, rights)):
            self._rows.came_out(self._sides[side].gids[rows], self._watermarks.current)
        if len(lefts) + len(rights) == 0:
            return None
        both = np.concatenate([left_starts, right_starts])
        numbers = np.unique(both, return_inverse=True)[1] * len(self._index)
        place = numbers[: len(lefts)] + self._sides[LEFT].gids[lefts]
        if isinstance(self._spec.left_keys, NullableKeys):
            null = null_key_mask(self._index.columns(self._sides[LEFT].gids[lefts]))
            if null is not None:
                place[null] = -1  # as in SQL, equal to nothing on the other side
        meets = numbers[len(lefts) :] + self._sides[RIGHT].gids[rights]
        order = np.argsort(meets, kind="stable")
        rights, right_starts, meets = rights[order], right_starts[order], meets[order]
        first = np.searchsorted(meets, place)
        counts = np.searchsorted(meets, place, side="right") - first
        lonely = counts == 0
        if not self._paired:
            counts = (lonely if self._spec.how == "anti" else ~lonely).astype(np.int64)
        elif self._spec.outer[LEFT]:
            counts = np.maximum(counts, 1)
        first[lonely] = -1
        if self._spec.outer[RIGHT]:
            alone = np.flatnonzero(~np.isin(meets, place))
            left_starts = np.concatenate([left_starts, right_starts[alone]])
            lefts = np.concatenate([lefts, np.full(len(alone), -1, np.int64)])
            first, counts = np.concatenate([first, alone]), np.concatenate([counts, np.ones(len(alone), np.int64)])
        order = self._in_order(left_starts, lefts, rights[first[lefts < 0]])
        bounds = np.concatenate([[0], np.cumsum(counts[order])])
        return _Closing(left_starts[order], lefts[order], first[order], bounds, rights)

    def _in_order(self, starts: References, lefts: References, alone: References) -> References:
        """The entries by window; ``alone`` are the right rows of those without a left one, which are the last."""
        if not self.ctx.repeatable:
            return np.argsort(starts, kind="stable")
        # In an order that a restore does not change: of one window by key, of one key as they came.
        left, right = self._sides
        gids = np.concatenate([left.gids[lefts[lefts >= 0]], right.gids[alone]])
        return np.lexsort((lefts < 0, hash_keys(self._index.columns(gids)), starts))

    def _due(self, side: int, gid: int) -> tuple[References, References]:
        """Rows of the windows that close, as often as they lie in one, and the starts of those."""
        stored, now, before = self._sides[side], self._watermarks.current, self._before
        rows = np.flatnonzero((stored.times <= now) & (_last_instants(self._spec, stored.times) > before.current))
        rows = rows[stored.gids[rows] >= gid] if gid else rows
        done = self._rows.done[stored.gids[rows]]
        reached: References = np.full(1, before.current, np.int64)
        if before.differ and len(rows):
            keys = self._index.columns(stored.gids[rows])
            reached = before.of(key_groups(hash_keys(keys), self.ctx.max_parallelism))
        if (done > before.current).any():
            reached = np.maximum(reached, done)
        times = stored.times[rows]
        times.flags.writeable = False  # as event times are: one specialisation of the kernel
        numbers, starts = expand(self._window, times, 0, reached, complete=False)
        closed = starts + (self._window.size_us - 1) <= now
        return rows[numbers[closed]], starts[closed]

    @property
    def _firing(self) -> bool:
        return self._closing is not None or self._brought is not None

    def _next_rows(self) -> Outputs:
        if self._closing is None and self._brought is not None:
            gid = next(self._brought, None)
            if gid is None:
                self._brought = None
                self._tidy()
            else:
                self._closing = self._close(gid)
        work = self._closing
        if work is None:
            return []
        total = int(work.bounds[-1])
        part = rows_per_batch(sum(side.widest for side in self._sides))
        numbers = np.arange(work.done, min(work.done + part, total))
        work.done += len(numbers)
        entries = np.searchsorted(work.bounds, numbers, side="right") - 1
        if work.done == total:
            self._closing = None
        if len(numbers) == 0:
            return []
        return self._found(self._joined(work, numbers, entries), work.starts[entries], self._gids_of(work, entries))

    def _gids_of(self, work: _Closing, entries: References) -> GroupIds:
        """The key of each entry."""
        left, right = self._sides
        lefts = work.lefts[entries]
        gids: GroupIds = np.empty(len(entries), np.int32)
        gids[lefts >= 0] = left.gids[lefts[lefts >= 0]]
        gids[lefts < 0] = right.gids[work.rights[work.first[entries[lefts < 0]]]]
        return gids

    def _joined(self, work: _Closing, numbers: References, entries: References) -> pa.RecordBatch:
        """Some of the rows that come out, counted from 0, and the entries that they are of."""
        starts, lefts, first = work.starts[entries], work.lefts[entries], work.first[entries]
        schema = self._spec.outputs[0]
        kind = schema.field(0).type
        left = self._sides[LEFT].take(lefts)
        borders = [from_words(starts, kind), from_words(starts + self._window.size_us, kind)]
        right: list[pa.Array] = []
        if self._paired:
            rights = np.full(len(numbers), -1, np.int64)
            found = first >= 0
            rights[found] = work.rights[(first + numbers - work.bounds[entries])[found]]
            right = self._sides[RIGHT].take(rights)
            if self._spec.outer[RIGHT]:
                self._fill_keys(left, right)
        columns = [*borders, *left, *(right[i] for i in self._carried if self._paired)]
        return pa.RecordBatch.from_arrays(columns, schema=schema)

    def _fill_keys(self, left: list[pa.Array], right: list[pa.Array]) -> None:
        """Keys of one name: whichever side has the row has the key."""
        spec = self._spec
        for name, other, kind in zip(spec.left_keys, spec.right_keys, spec.key_types, strict=True):
            if name == other:
                number = spec.left_schema.get_field_index(name)
                theirs = right[spec.right_schema.get_field_index(other)]
                left[number] = _compute.coalesce(left[number].cast(kind), theirs.cast(kind))

    # -- forgetting

    def _tidy(self) -> None:
        """Nothing is left to come out: forget everything if no row counts any more."""
        if all(_last_instants(self._spec, side.latest) <= self._watermarks.current for side in self._sides):
            self._rows.forget_all()
        self._rows.clean(self._watermarks.current)

    def _wakes(self, side: int, times: References) -> References:
        """A row waits for the next window over it to close."""
        window, now = self._window, min(self._watermarks.current, NEVER - 1)
        earliest = times - window.size_us + 1
        closes = earliest + (window.offset_us - earliest) % window.every_us + window.size_us - 1
        closes += np.maximum(0, -(-(now + 1 - closes) // window.every_us)) * window.every_us
        last = _last_instants(self._spec, times)
        return np.where((last > now) & (closes <= last), closes, NEVER)

    def _live(self, sides: Sequence[RowChains], watermark: int) -> list[References]:
        """Rows that lie in a window which has not closed."""
        return [np.flatnonzero(_last_instants(self._spec, side.times) > watermark) for side in sides]

    def _counts(self, side: int, batch: pa.RecordBatch, times: References) -> npt.NDArray[np.bool_]:
        return _last_instants(self._spec, times) > self._reached(side, batch)


def _last_instants(spec: WindowJoinSpec, times: Any) -> Any:
    """The last instant of the last window that begins at or before each time; the window may end before it."""
    window = spec.period
    return times - (times - window.offset_us) % window.every_us + (window.size_us - 1)

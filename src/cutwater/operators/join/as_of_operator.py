"""The operator behind ``AsOfJoinSpec``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from cutwater.data.row_sizes import rows_per_batch
from cutwater.operators.base import Outputs
from cutwater.operators.join.two_sided import LEFT, RIGHT, TwoSidedJoin
from cutwater.state.index.key_index import GroupIds
from cutwater.state.keys import hash_keys, key_groups, require_valid_keys
from cutwater.state.rows.chains import References, RowChains
from cutwater.state.rows.keyed_rows import NEVER

if TYPE_CHECKING:
    from cutwater.operators.join.as_of_spec import AsOfJoinSpec

_NO_ROWS: References = np.empty(0, np.int64)


class AsOfJoin(TwoSidedJoin):
    """One index over the keys of both sides; waiting rows on the left, versions in chains by key on the right."""

    def __init__(self, spec: AsOfJoinSpec) -> None:
        super().__init__(spec)
        self._spec = spec

    def _clear(self) -> None:
        super()._clear()
        self._due = _NO_ROWS
        self._brought: Iterator[int] | None = None
        """Keys with rows that come out now, as they are brought into memory: the first group id of each portion."""
        self._before = self._watermarks.copy()

    # -- rows

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        outputs: Outputs = []
        while self.pending:
            outputs += self.resume()
        if batch.num_rows == 0:
            return outputs
        require_valid_keys(batch, self._keys[input])
        times = self._event_times(input, batch)
        late = times <= self._reached(input, batch)
        count = int(np.count_nonzero(late))
        if count:
            self.ctx.count("rows_late", count)
            outputs.append((1 + input, batch.filter(pa.array(late))))
            if input == LEFT:
                batch, times = batch.filter(pa.array(~late)), times[~late]
        if input == RIGHT or self._spec.how == "inner":
            batch, times = self._with_whole_keys(input, batch, times)
        if batch.num_rows:
            self._rows.make_room(self._watermarks.current)
            self._rows.add(input, batch, times)
        return outputs

    # -- time

    def on_watermark(self, watermark: int) -> Outputs:
        outputs: Outputs = []
        while self.pending:
            outputs += self.resume()
        before = self._watermarks.copy()
        if self._watermarks.advance(watermark):
            self._before = before
            self._due = self._due_rows(0)
            self._brought = self._rows.due(watermark)
            self._fires()
            self._rows.clean(self._watermarks.current)
        return outputs + self.resume()

    def _due_rows(self, first: int) -> References:
        """Rows that come out now, in the order of time, of the keys from this group id on."""
        left = self._sides[LEFT]
        due = np.flatnonzero((left.times <= self._watermarks.current) & (left.times > self._before.current))
        due = due[left.gids[due] >= first] if first else due
        due = due[left.times[due] > self._rows.done[left.gids[due]]]
        if self._before.differ:
            groups = key_groups(hash_keys(self._index.columns(left.gids[due])), self.ctx.max_parallelism)
            due = due[left.times[due] > self._before.of(groups)]
        self._rows.came_out(left.gids[due], self._watermarks.current)
        if not self.ctx.repeatable:
            return due[np.argsort(left.times[due], kind="stable")]
        # In an order that a restore does not change: of one time by key, of one key as they came.
        return due[np.lexsort((hash_keys(self._index.columns(left.gids[due])), left.times[due]))]

    @property
    def _firing(self) -> bool:
        return len(self._due) > 0 or self._brought is not None

    def _next_rows(self) -> Outputs:
        if len(self._due) == 0 and self._brought is not None:
            first = next(self._brought, None)
            if first is None:
                self._brought = None
            else:
                self._due = self._due_rows(first)
        if len(self._due) == 0:
            return []
        left, right = self._sides
        portion = rows_per_batch(left.widest + right.widest)
        rows, self._due = self._due[:portion], self._due[portion:]
        versions = right.latest_at(left.gids[rows], left.times[rows], self._before.current)
        if self._spec.how == "inner":
            rows, versions = rows[versions >= 0], versions[versions >= 0]
        if len(rows) == 0:
            return []
        columns = right.take(versions)
        joined = [*left.take(rows), *(columns[i] for i in self._carried)]
        batch = pa.RecordBatch.from_arrays(joined, schema=self._spec.outputs[0])
        return self._found(batch, left.times[rows], left.gids[rows])

    def _wakes(self, side: int, times: References) -> References:
        """A row of the left side waits for the watermark."""
        waits = (times > self._watermarks.current) if side == LEFT else np.zeros(len(times), np.bool_)
        return np.where(waits, times, NEVER)

    def _live(self, sides: Sequence[RowChains], watermark: int) -> list[References]:
        """Rows that have not come out, and versions that a row to come may see."""
        left, right = sides
        return [_waiting(left, watermark), _visible(right, watermark)]

    def _counts(self, side: int, batch: pa.RecordBatch, times: References) -> npt.NDArray[np.bool_]:
        return times > self._reached(side, batch) if side == LEFT else np.ones(len(times), np.bool_)


def _waiting(left: RowChains, watermark: int) -> References:
    """Rows that have not come out."""
    return np.flatnonzero(left.times > watermark)


def _visible(right: RowChains, watermark: int) -> References:
    """Versions that a row later than the watermark may see: those after it, and the last of each key before it."""
    times, gids = right.times, right.gids
    past = np.flatnonzero(times <= watermark)
    order = past[np.lexsort((times[past], gids[past]))]  # stable: of equal times the last that came is last
    ordered: GroupIds = gids[order]
    last = np.ones(len(order), np.bool_)
    last[:-1] = ordered[:-1] != ordered[1:]
    return np.sort(np.concatenate([order[last], np.flatnonzero(times > watermark)]))

"""The canonical form of keyed state: what a savepoint holds, whoever kept the state and however it was cut.

Rows are in the order of their key group, then of the columns that tell them apart; they are cut after the first key
group with which there are ``BATCH_ROWS`` of them.  State in which the order of rows means something stays as it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from cutwater.errors import InvariantError
from cutwater.state.segments import GROUP_COLUMN, Segment

BATCH_ROWS = 1 << 16


def canonical(segments: Iterable[Segment]) -> Iterator[Segment]:
    """All segments of one subtask's state, in canonical form; holds about a key group of them in memory.

    Args:
        segments: the whole state (no deletions), the rows of each name in ascending order of key groups; deltas may
            begin anew, with rows that replace earlier ones of their keys.

    >>> def segment(groups, keys):
    ...     columns = {GROUP_COLUMN: pa.array(groups, pa.uint16()), "key": keys}
    ...     return Segment("agg", "base", pa.record_batch(columns), (groups[0], groups[-1] + 1), identity=1)
    >>> (whole,) = canonical([segment([0, 0], ["b", "a"]), segment([3], ["c"])])
    >>> whole.key_groups, whole.batch.column("key").to_pylist()
    ((0, 4), ['a', 'b', 'c'])
    """
    for (name, identity), run in itertools.groupby(segments, lambda s: (s.name, s.identity)):
        if identity:
            yield from _in_order(name, identity, run)
        else:
            yield from run


def _in_order(name: str, identity: int, run: Iterable[Segment]) -> Iterator[Segment]:
    waiting: list[pa.RecordBatch] = []
    again = False  # rows come that replace, by key, some that came before
    count = of_last = 0  # rows that wait, and those among them of the last key group, of which more may come
    last = -1
    for segment in run:
        if segment.batch.num_rows == 0:
            continue
        groups = _groups(segment.batch)
        if segment.kind == "delete" or (int(groups[0]) < last and segment.kind == "base"):
            raise InvariantError(f"state {name!r}: its segments are not those of a whole state in order of key groups")
        if int(groups[0]) < last:
            yield from _rest(name, identity, waiting, again)
            waiting, again, count, of_last, last = [], True, 0, 0, -1
        of_last = of_last if int(groups[0]) == int(groups[-1]) == last else 0
        last = int(groups[-1])
        of_last += int(np.count_nonzero(groups == last))
        waiting.append(segment.batch)
        count += len(groups)
        if count - of_last >= BATCH_ROWS:
            rows = pa.concat_batches(waiting)
            start = 0
            for cut in _cuts(_groups(rows)[: count - of_last]):
                yield from _pieces(name, identity, rows.slice(start, cut - start), again)
                start = cut
            waiting, count = [rows.slice(start)], count - start
    yield from _rest(name, identity, waiting, again)


def _rest(name: str, identity: int, waiting: list[pa.RecordBatch], again: bool) -> Iterator[Segment]:
    if waiting:
        rows = pa.concat_batches(waiting)
        start = 0
        for cut in [*_cuts(_groups(rows)), rows.num_rows]:
            yield from _pieces(name, identity, rows.slice(start, cut - start), again)
            start = cut


def _groups(batch: pa.RecordBatch) -> npt.NDArray[np.uint16]:
    return batch.column(GROUP_COLUMN).to_numpy()


def _cuts(groups: npt.NDArray[np.uint16]) -> list[int]:
    """Where whole groups end with which there are enough rows.

    >>> _cuts(np.zeros(10, np.uint16))
    []
    """
    cuts: list[int] = []
    start = 0
    while len(groups) - start >= BATCH_ROWS:
        start = int(np.searchsorted(groups, groups[start + BATCH_ROWS - 1], side="right"))
        cuts.append(start)
    return cuts


def _pieces(name: str, identity: int, rows: pa.RecordBatch, again: bool) -> Iterator[Segment]:
    """Whole groups as one segment, or, where a group is large, a base and what adds to it; ``again``: only deltas."""
    if rows.num_rows == 0:
        return
    groups = _groups(rows)
    covered = (int(groups[0]), int(groups[-1]) + 1)
    order = _order(rows, 1 + identity)
    for start in range(0, rows.num_rows, 2 * BATCH_ROWS):
        batch = rows.take(order.slice(start, 2 * BATCH_ROWS))
        yield Segment(name, "delta" if start or again else "base", batch, covered, identity)


def _order(rows: pa.RecordBatch, columns: int) -> Any:
    """Indices that sort by the first columns; what Arrow cannot sort by keeps the order that it has."""
    names = [str(i) for i in range(columns)]
    keys = pa.table(rows.columns[:columns], names=names)
    try:
        return _sorted(keys, names)
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid, TypeError):
        return _sorted(keys, names[:1])


def _sorted(keys: pa.Table, names: list[str]) -> Any:
    options = pc.SortOptions(sort_keys=[(name, "ascending") for name in names])
    return pc.call_function("sort_indices", [keys], options)

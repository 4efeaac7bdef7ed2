"""Segments are set as they come, as far as no later one takes rows away, and the result is that of all of them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pytest

from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.aggregate.keyed_operator import AggregateTable, aggregate_layout
from cutwater.runtime.worker.restore import Restore
from cutwater.state.segments import GROUP_COLUMN, Segment, SegmentKind
from cutwater.state.table.keyed_segments import restore_rows
from cutwater.state.table.keyed_table import KeyedTable
from cutwater.storage.snapshot.manifest import Entry
from cutwater.storage.snapshot.segment_files import SnapshotWriter
from memory_store import MemoryStore

GROUPS = 8
STATE = pa.schema([("k", pa.int64()), ("n", pa.int64())])
ROWS = pa.schema([("k", pa.int64())])

Content = dict[int, int]


def segment(kind: SegmentKind, rows: Content, key_groups: tuple[int, int]) -> Segment:
    """Key k lies in group k % GROUPS."""
    keys = sorted(rows, key=lambda k: k % GROUPS)
    columns = {GROUP_COLUMN: pa.array([k % GROUPS for k in keys], pa.uint16()), "k": pa.array(keys, pa.int64())}
    if kind != "delete":
        columns["n"] = pa.array([rows[k] for k in keys], pa.int64())
    return Segment("agg", kind, pa.record_batch(columns), key_groups)


def some_segment(dice: random.Random, kinds: tuple[SegmentKind, ...]) -> Segment:
    first = dice.randrange(GROUPS)
    groups = first, dice.randint(first + 1, GROUPS)
    keys = [k for k in range(40) if groups[0] <= k % GROUPS < groups[1]]
    chosen = dice.sample(keys, dice.randint(1, len(keys)))
    return segment(dice.choice(kinds), {k: dice.randint(0, 999) for k in chosen}, groups)


def applied(segments: list[Segment], owned: range) -> Content:
    """One after the other, by hand."""
    content: Content = {}
    for s in segments:
        rows = s.batch.to_pydict()
        if s.kind == "base" and s.key_groups is not None:
            content = {k: n for k, n in content.items() if k % GROUPS not in range(*s.key_groups)}
        for row, k in enumerate(rows["k"]):
            if s.kind == "delete":
                content.pop(k, None)
            elif k % GROUPS in owned:
                content[k] = rows["n"][row]
    return content


def stored(segments: list[Segment]) -> Restore:
    store = MemoryStore()
    writer = SnapshotWriter(store, "job", 1, 1, 1, 1 << 20)
    entries = writer.add("step", 0, segments)
    writer.close()
    return restore_of(store, entries)


def restore_of(store: MemoryStore, entries: list[Entry]) -> Restore:
    manifest = SimpleNamespace(entries=entries)
    return Restore(store, "job", cast(Any, manifest), True, cast(Any, None))


def make_table() -> AggregateTable:
    return KeyedTable([pa.int64()], aggregate_layout((Aggregate("n", "count"),), ROWS))


def content_of(table: AggregateTable) -> Content:
    keys, counts = table.rows(np.arange(len(table), dtype=np.int32))
    return dict(zip(keys.to_pylist(), counts.to_pylist(), strict=True))


@pytest.mark.parametrize("kinds", [("base", "delta"), ("base", "delta", "delete"), ("delta",), ("delta", "delete")])
@pytest.mark.parametrize("owned", [range(GROUPS), range(2, 5)])
def test_random_segments_give_what_they_give_one_by_one(owned: range, kinds: tuple[SegmentKind, ...]) -> None:
    dice = random.Random(len(kinds))
    at_once = 0
    for _ in range(150):
        segments = [some_segment(dice, kinds) for _ in range(dice.randint(1, 6))]
        if kinds[0] != "base":  # the usual chain: all there is, then what changed
            segments.insert(0, segment("base", {k: k for k in range(40)}, (0, GROUPS)))
        table = make_table()
        read = list(stored(segments).segments("step", 0, 1, owned))
        at_once += sum(s.to_come > 0 for s in read)
        for batch in restore_rows(table, read, STATE, owned):
            table.restore(batch.columns[:1], batch.columns[1:])
        assert content_of(table) == applied(segments, owned)
    assert at_once > 100


def test_rows_that_stay_are_set_before_the_next_segment_is_taken() -> None:
    taken: list[str] = []
    chain = [
        segment("base", dict.fromkeys(range(40), 1), (0, GROUPS)),
        segment("delta", dict.fromkeys(range(0, 40, 3), 2), (0, GROUPS)),
        segment("delta", dict.fromkeys(range(0, 40, 5), 3), (0, GROUPS)),
    ]

    def coming() -> Iterator[Segment]:
        for s in stored(chain).segments("step", 0, 1, range(GROUPS)):
            taken.append(s.kind)
            yield s

    table = make_table()
    seen = []
    for batch in restore_rows(table, coming(), STATE, range(GROUPS)):
        seen.append(len(taken))
        table.restore(batch.columns[:1], batch.columns[1:])
    assert seen == [1, 2, 3]
    assert content_of(table) == applied(chain, range(GROUPS))


def test_how_many_rows_come_is_told_of_the_owned_groups_and_only_where_none_is_taken_away() -> None:
    everything = segment("base", dict.fromkeys(range(40), 1), (0, GROUPS))
    changed = segment("delta", dict.fromkeys(range(16), 2), (0, GROUPS))
    gone = segment("delete", dict.fromkeys((2, 10), 0), (2, 3))

    def told(*segments: Segment, owned: range = range(GROUPS)) -> list[int]:
        return [s.to_come for s in stored(list(segments)).segments("step", 0, 1, owned)]

    assert told(everything, changed) == [56, 16]
    assert told(everything, changed, owned=range(4)) == [28, 8]
    assert told(everything, gone, changed) == [0, 18, 16]
    assert told(everything, changed, everything) == [0, 0, 40]
    halves = [segment("base", {k: 1 for k in range(40) if k % GROUPS in r}, (r.start, r.stop))
              for r in (range(4), range(4, 8))]  # fmt: skip
    counts = told(*halves)
    assert all(more > less for more, less in pairwise(counts)), "they do not meet: the second one takes nothing away"

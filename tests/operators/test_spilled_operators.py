"""Deduplication, top-n and table joins with memory for a few keys, beside the same step that has all it wants."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from stage_world import SCHEMA, Stage, windows
from stage_world import SPECS as ALL_SPECS

from cutwater.data.time import MAX_WATERMARK
from cutwater.operators.aggregate import keyed_operator
from cutwater.operators.aggregate.keyed_operator import KeyedOperator
from cutwater.operators.base import Operator, OperatorSpec, Outputs
from cutwater.operators.group_watermarks import WATERMARK
from cutwater.operators.window.kinds import Early, GlobalWindow, SessionWindow, SlidingWindow, TumblingWindow
from cutwater.state import backend
from cutwater.state.disk.rocks import RocksStore
from cutwater.state.disk.tables import FrozenSpilledRows, SpillQueue
from cutwater.state.key_index import NullableIndex
from cutwater.state.rows import rows as rows_by_key
from cutwater.state.rows.keyed_rows import FrozenKeyedRows, KeyedRows
from cutwater.state.segments import Frozen, Segment
from cutwater.state.table import keyed_segments, multi_row_keys, spill, timed_table
from cutwater.state.table.keyed_table import KeyedTable
from cutwater.state.table.multi_row_keys import FrozenMultiRowKeys, MultiRowKeys
from cutwater.state.table.spill import Spill
from cutwater.state.table.timed_table import TimeBuckets, TimedTable
from cutwater.storage.snapshot.increments import extended
from incremental_world import Content, World, short
from keyed_world import opened, rows_of, snapshot
from subtask_context import Subtask

pytest.importorskip("rocksdict")

STEPS = ("table join", "first", "last", "top", "updating top", "tumbling", "late", "global")
STEPS += ("slices", "cut slices", "late slices", "interval join", "window join", "as-of join")
STEPS += ("sliding", "early by rows", "early")
STEPS += ("sessions", "long sessions", "late sessions", "early sessions", "sessions by rows")


SPECS: dict[str, OperatorSpec] = {
    **ALL_SPECS,
    "tumbling": windows(TumblingWindow(40)),
    "late": windows(TumblingWindow(20), 30),
    "global": windows(GlobalWindow()),
    "early by rows": windows(TumblingWindow(40), early=Early(rows=3)),
    "early": windows(TumblingWindow(60), 20, Early(event_time_us=5)),
    "late slices": windows(SlidingWindow(40, 20), 30),
    "long sessions": windows(SessionWindow(40)),
    "late sessions": windows(SessionWindow(20), 30),
    "early sessions": windows(SessionWindow(20), 20, Early(event_time_us=5)),
    "sessions by rows": windows(SessionWindow(20), early=Early(rows=3)),
}


class Both(Operator):
    """An operator with little memory and one with much, which must do the same."""

    def __init__(self, spec: OperatorSpec, subtask: int, parallelism: int) -> None:
        self.spec = spec
        self.large: Any = opened(spec, subtask, parallelism)
        self.small: Any = spec.build()
        self.small.open(Subtask(subtask, parallelism, state_memory_bytes=600))

    def process(self, input: int, batch: pa.RecordBatch) -> Outputs:
        self._same(self.small.process(input, batch), self.large.process(input, batch))
        return []

    def on_watermark(self, watermark: int) -> Outputs:
        self._same(self.small.on_watermark(watermark), self.large.on_watermark(watermark))
        return []

    def _same(self, small: Outputs, large: Outputs) -> None:
        for output in range(2):
            rows = [
                rows_of(drained(operator, outputs), output)
                for operator, outputs in ((self.small, small), (self.large, large))
            ]
            assert sorted(map(repr, rows[0])) == sorted(map(repr, rows[1]))

    def freeze(self, checkpoint_id: int) -> Frozen:
        return self.small.freeze(checkpoint_id)

    def restore(self, segments: Iterable[Segment]) -> None:
        everything = list(segments)
        self.small.restore(iter(everything))
        self.large.restore(everything)


def drained(operator: Any, outputs: Outputs) -> Outputs:
    while operator.pending:
        outputs += operator.resume()
    return outputs


def live_rows(operator: KeyedOperator | Operator) -> Content:
    """What is worth keeping of an operator that has all in memory.

    Windows number the rows that come, from where the segments of a restore end: a chain has numbers that were replaced
    since, and who looks at all of it goes on with a higher one.
    """
    if not isinstance(operator, KeyedOperator):
        frozen = operator.freeze(10**9 + 1)
        kept = [segment for segment in frozen.segments() if segment.name != WATERMARK]
        return [
            f"{segment.name} { {name: value for name, value in row.items() if not name.endswith('.order')} }"
            for segment in kept
            for row in segment.batch.to_pylist()
        ]
    table = operator._table
    gids = np.flatnonzero(operator._live(table, operator._all_gids)).astype(np.int32)
    rows = pa.RecordBatch.from_arrays(table.rows(gids), schema=operator._state).to_pylist()
    return [*map(repr, rows)]


class Spilled(Stage):
    def __post_init__(self) -> None:
        self.operator: Any = Both(self.spec, self.subtask, self.parallelism)
        self.inputs = 2 if hasattr(self.spec, "left_schema") else 1

    def expected(self, frozen: Frozen) -> Content:
        return sorted(live_rows(self.operator.large))

    def content(self) -> Content:
        """What an operator in memory restores."""
        whole: Any = opened(self.spec, self.subtask, self.parallelism)
        frozen = self.operator.small.freeze(10**9)
        whole.restore(list(frozen.segments()))
        frozen.release()
        return live_rows(whole)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Everything happens with few rows, in one store for all tables: each has its own range of keys."""
    monkeypatch.setattr(spill, "_PART_ROWS", 5)
    monkeypatch.setattr(spill, "_SLACK_KEYS", 4)
    monkeypatch.setattr(keyed_operator, "_SLACK_KEYS", 4)
    monkeypatch.setattr(keyed_segments, "_FEW_ROWS", 4)
    monkeypatch.setattr(rows_by_key, "_SLACK_ROWS", 4)
    for module in (rows_by_key, multi_row_keys):
        monkeypatch.setattr(module, "PART_KEYS", 3)
    store = RocksStore(1 << 20)
    monkeypatch.setattr(backend, "open_store", lambda memory_bytes: store)
    monkeypatch.setattr(timed_table, "PART_ROWS", 3)
    yield
    store.close()


def run(name: str, seeds: Iterable[int] = range(1)) -> set[str]:
    """Returns the kinds of segments in checkpoints."""
    worlds = [World(seed, partial(Spilled, SPECS[name]), short).run(50) for seed in seeds]
    return {kind for world in worlds for _, kind in world.kinds}


@pytest.mark.parametrize("name", ["last", "tumbling", "table join", "long sessions"])
def test_whatever_lies_on_disk_the_step_does_the_same(name: str) -> None:
    run(name)


@pytest.mark.full
@pytest.mark.parametrize("large_bytes", [0, 1 << 10])
@pytest.mark.parametrize("name", STEPS)
def test_whatever_lies_on_disk_the_step_does_the_same_more_often(
    name: str, large_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where what the last batch used stays in memory, whatever its size."""
    monkeypatch.setattr(spill, "_LARGE_BYTES", large_bytes)
    assert run(name, range(1, 8)) >= {"base", "delta", *(["delete"] if "sessions" in name else [])}


def test_rows_are_numbered_on_from_different_places_after_a_restore() -> None:
    """What came first and last is the same all the same."""
    run("cut slices", [25])


def expire(turns: int = 60) -> None:
    """Keys that come once, and some that come again and again, through a step that knows a key for 15 us."""
    both = Both(SPECS["first"], 0, 1)
    for turn in range(turns):
        keys = [*range(10 * turn, 10 * turn + 10), *range(-12, 0)]
        rows = [{"k": f"key {key}", "t": 5 * turn, "v": 0} for key in keys]
        both.process(0, pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
        both.on_watermark(5 * turn - 1)
        for _ in range(9):
            both.small._table.clean(both.small._live)
    assert both.small._table.spill.rows.used
    frozen = both.small.freeze(1)
    assert sum(segment.batch.num_rows for segment in frozen.segments()) < 150, "of more than 600 that came"
    frozen.release()


def test_what_has_expired_on_disk_is_removed() -> None:
    expire()


def spilled(both: Both) -> bool:
    """Whether anything has left memory."""
    tables = {id(table): table for table in (*both.small._tables, both.small._windows.restored)}.values()
    return any(table.spill is not None and table.spill.rows.used for table in tables)


def fire(name: str, *, late: bool = True) -> None:
    """Windows of far more keys than memory holds, over which the watermark passes; some rows are late but welcome."""
    both = Both(SPECS[name], 0, 1)
    for turn in range(6):
        for begin in range(0, 120, 20):
            keys = [*range(begin, begin + 20), begin // 20]
            times = [20 * turn + key % 20 for key in keys]
            rows = [{"k": f"key {k}", "t": t, "v": k} for k, t in zip(keys, times, strict=True)]
            both.process(0, pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
        assert spilled(both)
        both.on_watermark(20 * turn - 1)
        after = [{"k": f"key {k}", "t": max(0, 20 * turn - 5), "v": k} for k in range(3, 120, 7) if late]
        both.process(0, pa.RecordBatch.from_pylist(after, schema=SCHEMA))
        if turn == 3:
            both.small.restore(snapshot(both.small))
    both.on_watermark(MAX_WATERMARK)
    assert [segment.name for segment in snapshot(both.small)] == [WATERMARK]


@pytest.mark.parametrize(
    "name",
    [
        *("tumbling", "late", "global", "cut slices", "late slices", "early"),
        *("sessions", "long sessions", "late sessions", "early sessions", "sessions by rows"),
    ],
)
def test_windows_on_disk_fire_once_and_are_forgotten(name: str) -> None:
    fire(name)


@pytest.mark.parametrize("name", ["tumbling", "global", "cut slices"])
def test_windows_on_disk_that_came_out_at_the_end_are_deleted_from_the_chain(name: str) -> None:
    both = Both(SPECS[name], 0, 1)
    for begin in range(0, 120, 20):
        rows = [{"k": f"key {key}", "t": 50, "v": key} for key in range(begin, begin + 20)]
        both.process(0, pa.RecordBatch.from_pylist(rows, schema=SCHEMA))
    assert spilled(both)
    before = both.small.freeze(1)
    chain = list(before.segments())
    before.release()
    both.on_watermark(MAX_WATERMARK)
    after = both.small.freeze(2)
    changes = after.changes(1)
    assert changes is not None
    chain = extended(chain, list(changes))  # type: ignore[type-var]
    after.release()
    assert {segment.kind for segment in chain} >= {"base", "delete"}
    both.restore(chain)
    assert [segment.name for segment in snapshot(both.small)] == [WATERMARK]


def sessions_in_journal() -> None:
    """Sessions of some keys change in each epoch, go on, begin and are merged, and leave memory in between."""
    both = Both(SPECS["long sessions"], 0, 1)

    def feed(keys: Iterable[int], time: int) -> None:
        rows = [{"k": f"key {key}", "t": time, "v": 1000 * time + key} for key in keys]
        both.process(0, pa.RecordBatch.from_pylist(rows, schema=SCHEMA))

    for begin in range(0, 200, 20):
        feed(range(begin, begin + 20), 50)
    frozen = both.small.freeze(1)
    chain = list(frozen.segments())
    frozen.release()
    for checkpoint_id, time in enumerate((60, 500, 530, 110, 80), 2):
        for key in range(12):  # one by one: the others leave meanwhile
            feed([key], time)
        frozen = both.small.freeze(checkpoint_id)
        changes = frozen.changes(1)
        assert changes is not None
        whole: Any = opened(SPECS["long sessions"], 0, 1)
        whole.restore(extended(chain, list(changes)))  # type: ignore[type-var]
        frozen.release()
        assert sorted(live_rows(whole)) == sorted(live_rows(both.large))


def test_sessions_that_left_memory_in_several_epochs_are_in_the_increment_once() -> None:
    sessions_in_journal()


def _all_that_left(self: FrozenMultiRowKeys[Any], epoch: int) -> Iterator[MultiRowKeys[Any]]:
    """Without a thought of keys that left several times."""
    assert self.table.spilled is not None
    return (self._page(chunk.keys, chunk.values) for chunk in self.table.spilled.rows.journal(epoch))


_parts = FrozenMultiRowKeys.parts


def _none_is_newer(self: FrozenMultiRowKeys[Any], gids: Any, state_rows: Any) -> Any:
    """Without a look at the keys that are in memory."""
    self._index = NullableIndex(self._index.types)
    return _parts(self, gids, state_rows)


def _nothing_was_there(self: Spill, gids: Any) -> Any:
    return np.zeros(len(gids), np.bool_)


@pytest.mark.parametrize(
    ("check", "place", "name", "bug"),
    [
        (partial(run, "first"), Spill, "fetched", _nothing_was_there),
        (expire, Spill, "clean", lambda self, live, log: None),
        (partial(fire, "tumbling"), TimedTable, "_fire_page", lambda self, page, gids: []),
        (partial(fire, "late"), KeyedTable, "put_page", lambda self, page, gids, came=False: None),
        (partial(fire, "tumbling"), KeyedTable, "delete_page", lambda self, page, gids: None),
        (partial(fire, "cut slices"), FrozenSpilledRows, "beginning", lambda self, key, groups, most: iter(())),
        (partial(fire, "late slices", late=False), TimeBuckets, "fired", lambda self, start: None),
        (partial(run, "window join", range(1, 4)), KeyedRows, "came_out", lambda self, gids, watermark: None),
        (partial(run, "window join", range(1, 4)), SpillQueue, "put", lambda self, keys, instants: None),
        (partial(fire, "early"), SpillQueue, "put", lambda self, keys, instants: None),
        (partial(run, "interval join", range(1, 4)), FrozenKeyedRows, "added", lambda self, epoch, live: []),
        (partial(fire, "sessions"), MultiRowKeys, "bring_due", lambda self, watermark: iter(())),
        (partial(fire, "early sessions"), MultiRowKeys, "bring_waiting", lambda self: iter(())),
        (partial(fire, "late sessions"), MultiRowKeys, "forget", lambda self, anchors: None),
        (partial(run, "sessions", range(1, 4)), MultiRowKeys, "use", lambda self, anchors: None),
        (sessions_in_journal, FrozenMultiRowKeys, "journal", lambda self, epoch: iter(())),
        (sessions_in_journal, FrozenMultiRowKeys, "journal", _all_that_left),
        (partial(run, "long sessions", range(1, 4)), FrozenMultiRowKeys, "parts", _none_is_newer),
    ],
    ids=(
        *("known", "cleaning", "windows on disk", "fired on disk", "gone from disk", "slices", "forgotten windows"),
        *("twice", "due", "early", "added"),
        *("sessions due", "sessions early", "sessions forgotten", "sessions used", "sessions journaled"),
        *("sessions journaled twice", "newer sessions"),
    ),
)
def test_planted_bugs_are_found(
    monkeypatch: pytest.MonkeyPatch, check: Callable[[], object], place: Any, name: str, bug: Any
) -> None:
    monkeypatch.setattr(place, name, bug)
    with pytest.raises(AssertionError):
        check()

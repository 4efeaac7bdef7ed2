"""Tables, rows and objects of every state backend against plain Python: what comes out, and what a snapshot holds.

Each test has memory for a few keys only, if the backend knows any other place.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest
from state_backends import BACKENDS, STORES, SortedSnapshot, SortedStore

from cutwater.operators.aggregate.accumulators import Aggregate
from cutwater.operators.aggregate.keyed_operator import AggregateTable, aggregate_layout
from cutwater.state import backend as backend_module
from cutwater.state.backend import StateBackend
from cutwater.state.disk.rocks import Write
from cutwater.state.disk.tables import NEVER
from cutwater.state.rows import rows as rows_module
from cutwater.state.rows.keyed_rows import RowChains, RowSides
from cutwater.state.rows.rows import Rows
from cutwater.state.segments import GROUP_COLUMN, Frozen, Segment
from cutwater.state.table import keyed_segments, spill, timed_table
from cutwater.state.table.intervals import RESTORED
from cutwater.state.table.keyed_segments import freeze_table, restore_table
from cutwater.state.table.timed_table import TimedTable, Timing

GROUPS = 16
VALUES = pa.schema([("v", pa.int64())])
AGGREGATES = (Aggregate("n", "count"), Aggregate("total", "sum", "v"))
LAYOUT = aggregate_layout(AGGREGATES, VALUES)
KEYS = [pa.string(), pa.int64()]
STATE = pa.schema([("a", pa.string()), ("b", pa.int64()), ("n", pa.int64()), ("total", pa.int64())])
Key = tuple[str | None, int]
Times = npt.NDArray[np.int64]


@dataclass
class Share:
    """The whole of a step's state."""

    state_memory_bytes: int | None
    key_groups: range = range(GROUPS)
    max_parallelism: int = GROUPS


Open = Callable[..., StateBackend]


@pytest.fixture(params=BACKENDS)
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    with state_on(request.param, monkeypatch) as open_state:
        yield open_state


@contextmanager
def state_on(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Opens state on a backend with next to no memory, and closes it after the test; everything moves in pieces."""
    for module, limit in (
        (spill, "_PART_ROWS"),
        (timed_table, "PART_ROWS"),
        (rows_module, "PART_KEYS"),
        (keyed_segments, "_FEW_ROWS"),
        (rows_module, "_FEW_ROWS"),
        (rows_module, "_SLACK_ROWS"),
    ):
        monkeypatch.setattr(module, limit, 3)
    made: list[StateBackend] = []

    def open_state(memory_bytes: int = 1_000) -> StateBackend:
        made.append(StateBackend(Share(None if name == "memory" else memory_bytes)))
        return made[-1]

    if name != "memory":
        monkeypatch.setattr(backend_module, "open_store", STORES[name])
    yield open_state
    for each in made:
        each.close()


def key_columns(keys: Sequence[Key]) -> list[pa.Array]:
    return [pa.array([a for a, _ in keys], KEYS[0]), pa.array([b for _, b in keys], KEYS[1])]


def fold(table: AggregateTable, gids: Any, values: Sequence[int]) -> None:
    for accumulator in table.accumulators:
        accumulator.update(gids, pa.record_batch({"v": pa.array(values, pa.int64())}))


def some_keys(dice: random.Random, most: int = 60) -> list[Key]:
    numbers = [dice.randrange(most) for _ in range(dice.randrange(1, 12))]
    return [(None if n % 7 == 0 else f"key {n}", n) for n in numbers]


def rows_of(table: AggregateTable) -> list[tuple[Any, ...]]:
    columns = table.rows(np.arange(len(table), dtype=np.int32))
    return list(zip(*(column.to_pylist() for column in columns), strict=True))


def in_memory(segments: Iterable[Segment]) -> dict[Key, tuple[int, int]]:
    """What a table in memory restores."""
    whole = StateBackend(Share(None)).table(KEYS, LAYOUT)
    restore_table(whole, segments, STATE, range(GROUPS))
    return {(a, b): (n, total) for a, b, n, total in rows_of(whole)}


@pytest.mark.parametrize("seed", range(3))
def test_a_table_is_a_dict_and_so_are_its_snapshots_and_increments(opened: Open, seed: int) -> None:
    """What was frozen is read when the table has gone on."""
    dice, table = random.Random(seed), opened().table(KEYS, LAYOUT)
    model = defaultdict[Key, tuple[int, int]](lambda: (0, 0))
    table.track()
    chain: list[Segment] = []
    since: int | None = None
    for checkpoint_id in range(1, 10):
        several_batches(table, model, dice)
        frozen, wanted = freeze_table(table, checkpoint_id, "t", STATE, range(GROUPS), GROUPS), dict(model)
        several_batches(table, model, dice)
        changes = None if since is None else frozen.changes(since)
        chain = taken(frozen) if changes is None else [*chain, *changes]
        frozen.release()
        assert in_memory(chain) == wanted
        since = checkpoint_id
        if checkpoint_id == 5:
            table = opened().table(KEYS, LAYOUT)
            restore_table(table, iter(chain), STATE, range(GROUPS))
            table.track(restored=True)
            since, model = RESTORED, defaultdict(lambda: (0, 0), wanted)


def several_batches(table: AggregateTable, model: dict[Key, tuple[int, int]], dice: random.Random) -> None:
    for _ in range(4):
        keys = some_keys(dice)
        values = [dice.randrange(100) for _ in keys]
        table.make_room()
        before, gids = len(table), table.upsert(key_columns(keys))
        assert table.known(gids, before).tolist() == [key in model for key in keys]
        fold(table, gids, values)
        for key, value in zip(keys, values, strict=True):
            n, total = model[key]
            model[key] = n + 1, total + value
        state = [column.to_pylist() for column in table.rows(gids)[2:]]
        assert list(zip(*state, strict=True)) == [model[key] for key in keys]


def taken(frozen: Frozen) -> list[Segment]:
    """All segments, which are sorted by key group."""
    segments = list(frozen.segments())
    for segment in segments:
        groups = segment.batch.column(GROUP_COLUMN).to_pylist()
        assert groups == sorted(groups)
    return segments


def test_deleted_keys_are_gone_wherever_they_lie(opened: Open) -> None:
    table = opened().table([pa.int64()], LAYOUT)
    table.track(restored=True)
    for begin in range(0, 300, 10):
        table.make_room()
        fold(table, table.upsert([pa.array(range(begin, begin + 10))]), [1] * 10)
    for begin in range(0, 300, 10):
        table.make_room()
        odd = [n for n in range(begin, begin + 10) if n % 2]
        before, gids = len(table), table.upsert([pa.array(odd)])
        assert table.known(gids, before).all()
        table.delete(np.unique(gids))
        table.keep(np.setdiff1d(np.arange(len(table), dtype=np.int32), gids))
    schema = pa.schema([("k", pa.int64()), *list(STATE)[2:]])
    frozen = freeze_table(table, 1, "t", schema, range(GROUPS), GROUPS)
    found = [row["k"] for segment in taken(frozen) for row in segment.batch.to_pylist()]
    frozen.release()
    assert sorted(found) == list(range(0, 300, 2))


Piece = list[tuple[int, int, int]]


def read(table: AggregateTable, gids: Any) -> Piece:
    """Time, key and count of some rows."""
    times, keys = (column.to_pylist() for column in table.index.columns(gids))
    counts = table.accumulators[0].result(gids).to_pylist()
    return [(t, k, n) for t, k, n in zip(times, keys, counts, strict=True)]


def timed(backend: StateBackend, lateness: int = 0) -> TimedTable[Any, Piece]:
    timing = Timing(reach_us=9, lateness_us=lateness, counts=True, waits=True)
    return backend.timed_table([pa.int64(), pa.int64()], LAYOUT, timing, read)


def drained(portions: Any) -> Piece:
    found: Piece = []
    while portions.pending:
        found += portions.take(4) or []
    return found


@pytest.mark.parametrize("lateness", [0, 15])
@pytest.mark.parametrize("seed", range(2))
def test_rows_come_out_once_when_they_are_due_and_early_when_they_changed(
    opened: Open, seed: int, lateness: int
) -> None:
    dice, table = random.Random(seed), timed(opened(), lateness)
    counts: dict[tuple[int, int], int] = {}
    changed: set[tuple[int, int]] = set()
    for now in range(0, 120, 10):
        for _ in range(6):
            table.table.make_room()
            rows = [(dice.randrange(now // 10, now // 10 + 3) * 10, dice.randrange(40)) for _ in range(9)]
            times, keys = (np.array(column, np.int64) for column in zip(*rows, strict=True))
            gids = table.upsert(times, [pa.array(keys)])
            fold(table.table, gids, [1] * len(rows))
            np.add.at(table.pending, gids, 1)
            for row in rows:
                counts[row] = counts.get(row, 0) + 1
                changed.add(row)
        if dice.random() < 0.5:
            early = drained(table.changed(lambda keys: True, 2**31))
            assert sorted(early) == sorted((*row, counts[row]) for row in changed)
            changed = set()
        due = [(*row, n) for row, n in counts.items() if row[0] + 9 <= now + 9]
        assert sorted(drained(table.due(now + 9))) == sorted(due)
        table.forget(now + 9)
        counts = {row: n for row, n in counts.items() if row[0] + 9 > now + 9}
        changed &= counts.keys()
    frozen = table.frozen(1)
    frozen.table.complete()
    live = sum(len(gids) for _, gids, _ in frozen.parts())
    frozen.table.release()
    assert live >= len(counts)
    assert lateness or live == len(counts)


SIDE = pa.schema([("k", pa.int64()), ("t", pa.timestamp("us")), ("v", pa.int64())])
SIDES = RowSides(("left", "right"), [pa.int64()], (SIDE, SIDE), (["k"], ["k"]), ("t", "t"))


def rows_by_key(backend: StateBackend) -> Rows:
    """Rows that count until the watermark has reached their time, and want to be looked at then."""

    def live(sides: Sequence[RowChains], watermark: int) -> list[Times]:
        return [np.flatnonzero(side.times > watermark) for side in sides]

    return backend.rows(SIDES, live, lambda side, times: np.where(times < NEVER, times, NEVER))


@pytest.mark.parametrize("seed", range(2))
def test_rows_of_both_sides_are_found_by_key_and_time_and_in_snapshots(opened: Open, seed: int) -> None:
    dice, rows = random.Random(seed), rows_by_key(opened())
    rows.track()
    model: list[tuple[int, int, int, int]] = []
    out: list[tuple[int, int]] = []
    number, watermark, chain = 0, -1, list[Segment]()
    watermarks = Segment("watermark", "base", pa.record_batch({GROUP_COLUMN: pa.array([0], pa.uint16())}))
    for checkpoint_id in range(1, 10):
        for _ in range(8):
            side, count = dice.randrange(2), dice.randrange(1, 9)
            fresh = [(side, dice.randrange(50), watermark + dice.randrange(1, 40), number + i) for i in range(count)]
            number += count
            columns = [pa.array([row[i] for row in fresh], SIDE.types[i - 1]) for i in (1, 2, 3)]
            rows.make_room(watermark)
            rows.add(side, pa.RecordBatch.from_arrays(columns, schema=SIDE), np.array([row[2] for row in fresh]))
            model += fresh
        reached = watermark + 10
        out = looked_at(rows, watermark, reached)
        assert sorted(out) == sorted((s, v) for s, _, t, v in model if watermark < t <= reached)
        watermark = reached
        model = [row for row in model if row[2] > watermark]
        rows.clean(watermark)
        frozen = rows.freeze(checkpoint_id, watermark, watermarks)
        changes = frozen.changes(checkpoint_id - 1) if chain else None
        chain = list(frozen.segments()) if changes is None else [*chain, *changes]
        frozen.release()
        assert [row for row in held(chain) if row[2] > watermark] == sorted(model)
        if checkpoint_id == 5:
            rows = rows_by_key(opened())
            for side, batch in rows.restore(s for s in chain if s.name != "watermark"):
                rows.add(side, batch, batch.column("t").cast(pa.int64()).to_numpy())
            rows.track(restored=True)
            chain = []


def looked_at(rows: Rows, before: int, watermark: int) -> list[tuple[int, int]]:
    """Side and value of the rows whose time has come, each once."""
    found: list[tuple[int, int]] = []
    brought = rows.due(watermark)
    first: int | None = 0
    while first is not None:
        for number, side in enumerate(rows.sides):
            due = np.flatnonzero((side.times > before) & (side.times <= watermark) & (side.gids >= first))
            due = due[rows.done[side.gids[due]] < watermark]
            found += [(number, value) for value in side.take(due)[2].to_pylist()]
        for side in rows.sides:
            rows.came_out(np.unique(side.gids[side.gids >= first]), watermark)
        first = next(brought, None)
    return found


def held(segments: Iterable[Segment]) -> list[tuple[int, int, int, int]]:
    """All rows of a chain, as a table in memory restores them."""
    found = [
        (side, row["k"], row["t"], row["v"])
        for side, batch in rows_by_key(StateBackend(Share(None))).restore(s for s in segments if s.name != "watermark")
        for row in batch.set_column(1, "t", batch.column("t").cast(pa.int64())).to_pylist()
    ]
    return sorted(found)


@pytest.mark.parametrize("seed", range(2))
def test_what_comes_out_is_sorted_by_time_and_then_by_key(opened: Open, seed: int) -> None:
    rows = opened().sorted_rows(VALUES)
    if rows is None:
        return  # all of it lies in memory, in order
    dice = random.Random(seed)
    for _ in range(3):
        wanted: list[tuple[int, int, int]] = []
        for _ in range(dice.randrange(6)):
            keys = [(dice.randrange(5), dice.randrange(5)) for _ in range(20)]
            batch = pa.record_batch({"v": range(len(wanted), len(wanted) + 20)}, schema=VALUES)
            times, hashes = (np.array(column) for column in zip(*keys, strict=True))
            rows.add(batch, times.astype(np.int64), hashes.astype(np.uint64))
            wanted += [(t, h, len(wanted) + i) for i, (t, h) in enumerate(keys)]
        found = [value for batch in rows.take() for value in batch.column("v").to_pylist()]
        assert found == [number for _, _, number in sorted(wanted)]


def _sees_the_present(store: SortedStore) -> SortedSnapshot:
    snapshot = SortedSnapshot({})
    snapshot._keys, snapshot._content = sorted(store._content), store._content
    return snapshot


def _keeps_what_is_deleted(store: SortedStore, writes: Sequence[Write]) -> None:
    store._content.update((key, value) for key, value in writes if value is not None)


A_TABLE = partial(test_a_table_is_a_dict_and_so_are_its_snapshots_and_increments, seed=0)


@pytest.mark.parametrize(
    ("check", "method", "mistake"),
    [
        (test_deleted_keys_are_gone_wherever_they_lie, "write", _keeps_what_is_deleted),
        (A_TABLE, "snapshot", lambda _: SortedSnapshot({})),
        (A_TABLE, "get_many", lambda _, keys: [None for _ in keys]),
        (A_TABLE, "snapshot", _sees_the_present),
    ],
    ids=["deletes nothing", "empty snapshots", "finds nothing", "snapshots of the present"],
)
def test_a_store_with_a_mistake_is_found(
    check: Callable[..., None], method: str, mistake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SortedStore, method, mistake)
    with state_on("sorted lists", monkeypatch) as opened, pytest.raises((AssertionError, KeyError)):
        check(opened)

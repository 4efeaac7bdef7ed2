"""Windows, joins, deduplication and top-n in incremental checkpoints: a restore is that of a full snapshot."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from stage_world import SCHEMA, SPECS, Stage

from cutwater.data.time import MAX_WATERMARK
from cutwater.errors import StorageError
from cutwater.operators.aggregate import keyed_operator
from cutwater.operators.base import Operator, Outputs
from cutwater.operators.group_watermarks import WATERMARK, GroupWatermarks
from cutwater.operators.join.two_sided import AsOfJoin
from cutwater.operators.window import session_operator
from cutwater.operators.window.session_operator import SessionTable
from cutwater.state.rows import rows as rows_by_key
from cutwater.state.rows.rows import Rows
from cutwater.state.segments import Segment
from cutwater.state.table import timed_table
from cutwater.state.table.intervals import Intervals
from cutwater.state.table.keyed_table import KeyedTable
from cutwater.state.table.timed_table import Pieces, TimedTable
from cutwater.storage.snapshot.increments import Increments, extended
from cutwater.storage.snapshot.manifest import Entry
from cutwater.storage.snapshot.segment_files import SnapshotWriter, read_segment
from incremental_world import JOB, STEP, Content, World, short, written
from keyed_world import opened, owner, rows_of
from memory_store import MemoryStore

DELETING = {"tumbling", "slices", "cut slices", "sliding", "sessions", "early sessions"}
SWEEPING = {"table join", "first", "updating top"}
"""Where keys go once they are half of all.  Elsewhere nothing goes, or time says what does."""
BY_TIME = {"interval join", "as-of join", "window join"}


@pytest.fixture(autouse=True)
def little_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is dead is swept out as soon as it is half of all."""
    for module, name in (
        (timed_table, "_DEAD_ROWS"),
        (keyed_operator, "_SLACK_KEYS"),
        (rows_by_key, "_SLACK_ROWS"),
        (session_operator, "_SWEEP_GROUP_IDS"),
    ):
        monkeypatch.setattr(module, name, 4)


def run(name: str, seeds: int = 4) -> list[World]:
    return [World(seed, partial(Stage, SPECS[name]), short).run(60) for seed in range(seeds)]


@pytest.mark.parametrize("name", SPECS)
def test_a_chain_restores_what_a_full_snapshot_does(name: str) -> None:
    worlds = run(name)
    kinds = {kind for world in worlds for _, kind in world.kinds}
    assert kinds >= {"base", "delta"} | ({"delete"} if name in DELETING else set())
    if name != "updating top":
        assert sum(world.built_on_restored for world in worlds) > 0, "no checkpoint built on the one restored"


@dataclass
class Line:
    """Checkpoints of a stage that all complete, each checked at another parallelism."""

    stage: Stage
    entries: list[Entry] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.store, self.increments, self.number = MemoryStore(), Increments(), 0

    def checkpoint(self, *, completes: bool = True) -> int:
        """Returns how many bytes were written."""
        self.number += 1
        frozen = self.stage.freeze(self.number)
        expected = self.stage.expected(frozen)
        before = {id(entry) for entry in self.entries}
        writer = SnapshotWriter(self.store, JOB, self.number, 1, 0, 2**30)
        self.entries = written(writer, self.increments, frozen, short)
        frozen.release()
        self.increments.written(self.number, STEP, self.entries)
        if completes:
            self.increments.completed(self.number)
        content: Content = []
        for subtask in range(2):
            restored = Stage(self.stage.spec, subtask, 2)
            restored.restore(read_segment(self.store, JOB, entry) for entry in self.entries)
            content += restored.content()
        assert sorted(content) == expected
        return sum(entry.length for entry in self.entries if id(entry) not in before)


def rows(keys: Iterable[int], time: int, op: str = "+I") -> list[dict[str, Any]]:
    return [{"k": f"key {key}", "t": time, "v": key % 100, "op": op} for key in keys]


@pytest.mark.parametrize("name", sorted(SWEEPING))
def test_keys_that_are_swept_out_are_deleted(name: str) -> None:
    line, kinds = Line(Stage(SPECS[name], 0, 1)), set[str]()
    line.stage.feed(rows(range(100), 100))
    for turn in range(14):
        line.stage.feed(rows(range(100 + 20 * turn, 120 + 20 * turn), 105 + 3 * turn))
        line.stage.feed(rows(range(20 * turn, 20 * turn + 20), 100 if turn < 5 else 105 + 3 * (turn - 5), "-D"))
        line.stage.operator.on_watermark(104 + 3 * turn)
        line.checkpoint()
        kinds |= {entry.kind for entry in line.entries}
    assert kinds == {"base", "delta", "delete"}


@pytest.mark.parametrize("name", sorted(BY_TIME))
def test_rows_that_time_forgets_are_not_counted_as_new(name: str) -> None:
    for phase in range(2):  # which checkpoints complete, before a sweep and after it
        line, kinds = Line(Stage(SPECS[name], 0, 1)), set[str]()
        for turn in range(16):
            for input in range(2):
                line.stage.feed(rows(range(20), 140 + 10 * turn), input)
            line.stage.drain(line.stage.operator.on_watermark(100 + 10 * turn))
            line.checkpoint(completes=turn % 2 == phase)
            kinds |= {entry.kind for entry in line.entries}
        assert kinds == {"base", "delta"}


def test_sessions_that_ended_are_deleted_though_their_gids_are_swept_out() -> None:
    line = Line(Stage(SPECS["sessions"], 0, 1))
    line.stage.feed(rows(range(120), 1000))
    for time in range(50, 130, 10):
        line.stage.feed(rows(range(20), time))
    line.checkpoint()
    line.stage.drain(line.stage.operator.on_watermark(200))
    line.checkpoint()
    assert {entry.kind for entry in line.entries} == {"base", "delta", "delete"}


@pytest.mark.parametrize("name", sorted(DELETING | {"global"}))
def test_windows_that_came_out_at_the_end_are_deleted(name: str) -> None:
    line = Line(Stage(SPECS[name], 0, 1))
    line.stage.feed(rows(range(120), 50))
    line.checkpoint()
    line.stage.drain(line.stage.operator.on_watermark(MAX_WATERMARK))
    line.checkpoint()
    assert {entry.kind for entry in line.entries} >= {"base", "delete"}
    assert {row.split()[0] for row in line.stage.content()} == {WATERMARK}


@pytest.mark.parametrize("name", SPECS)
def test_few_changed_keys_are_few_bytes(name: str) -> None:
    line = Line(Stage(SPECS[name], 0, 1))
    for input in range(line.stage.inputs):
        line.stage.feed(rows(range(3000), 50), input)
    whole = line.checkpoint()
    line.stage.feed(rows(range(20), 52), line.stage.inputs - 1)
    assert 0 < line.checkpoint() < whole / 10


@pytest.mark.parametrize("name", SPECS)
def test_a_freeze_is_of_its_moment(name: str) -> None:
    """Whatever comes before the snapshot thread reads it."""
    for seed in range(3):
        stages = [Stage(SPECS[name], 0, 1) for _ in range(2)]
        for stage in stages:
            dice = random.Random(seed)
            for stage.now in (50, 95):  # more keys than a chunk has rows
                stage.feed(rows(range(200), stage.now))
            for _ in range(4):
                stage.change(dice)
        read_at_once = stages[0].expected(stages[0].freeze(1))
        frozen = stages[1].freeze(1)
        for _ in range(8):
            stages[1].change(dice)
        assert stages[1].expected(frozen) == read_at_once


def test_rows_that_came_out_after_the_base_do_not_come_out_again_at_another_parallelism() -> None:
    """Whose watermark is behind there, because another subtask's was."""
    spec, entries = SPECS["as-of join"], list[Segment]()
    for subtask in range(2):
        stage = Stage(spec, subtask, 2)
        batch = pa.RecordBatch.from_pylist(rows(range(200), 50), schema=SCHEMA)
        mine = batch.filter(pa.array([o == subtask for o in owner(batch, ["k"], 2)], pa.bool_()))
        stage.operator.process(1, mine)
        stage.operator.process(0, mine)
        chain = list(stage.freeze(1).segments())
        came_out = drained(stage.operator, stage.operator.on_watermark(60 if subtask else 40))
        changes = stage.freeze(2).changes(1)
        assert changes is not None
        entries += extended(chain, list(changes))  # type: ignore[type-var]
        assert len(came_out) == (mine.num_rows if subtask else 0)
        left = 200 - mine.num_rows
    restored = opened(spec)
    restored.restore(entries)
    assert len(drained(restored, restored.on_watermark(70))) == left


def drained(operator: Operator, outputs: Outputs) -> list[dict[str, Any]]:
    while operator.pending:
        outputs = outputs + operator.resume()
    return rows_of(outputs)


def sessions_swept(_: str) -> None:
    test_sessions_that_ended_are_deleted_though_their_gids_are_swept_out()


JOINS_SWEPT = test_rows_that_time_forgets_are_not_counted_as_new


def _one_row_too_many(rows: Rows) -> tuple[int, int, int]:
    left, right = rows.sides
    return left.rows + 1, right.rows, rows._epoch


def _touches_no_anchor(self: SessionTable, gids: Any) -> None:
    self.table.touch(gids)


def _forgets_what_fired(self: TimedTable[Any, Any], watermark: int) -> Any:
    gids = self._buckets.due(watermark)
    gids = gids[~self.fired[gids]]
    self.fired[gids] = True
    return Pieces(lambda rows: self._read(self.table, rows), gids)


@pytest.mark.parametrize(
    ("check", "steps", "place", "bug", "planted"),
    [
        (run, ["tumbling", "slices"], KeyedTable, "delete", lambda self, gids: None),
        (test_keys_that_are_swept_out_are_deleted, sorted(SWEEPING), KeyedTable, "delete", lambda self, gids: None),
        (run, ["tumbling"], TimedTable, "due", _forgets_what_fired),
        (sessions_swept, ["sessions"], SessionTable, "_touch", _touches_no_anchor),
        (test_a_freeze_is_of_its_moment, ["sessions"], KeyedTable, "capturing", property(lambda self: False)),
        (JOINS_SWEPT, ["as-of join"], Intervals, "change", lambda self, change: None),
        (run, ["as-of join"], Rows, "_counts_now", property(_one_row_too_many)),
    ],
    ids=["deletion", "sweep", "fired", "anchor", "captured", "renumbered", "first"],
)
def test_planted_bugs_are_found(
    monkeypatch: pytest.MonkeyPatch,
    check: Callable[[str], object],
    steps: list[str],
    place: Any,
    bug: str,
    planted: Any,
) -> None:
    """Keys that went are not deleted; that a window fired is no change; an ended session does not mark its key; what a
    kernel changes is not set aside; rows are counted as before a sweep; a row is left out."""
    monkeypatch.setattr(place, bug, planted)
    for name in steps:
        with pytest.raises((AssertionError, StorageError)):
            check(name)


def test_a_join_that_restores_what_came_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It restores them, and does not ask at their firing up to where their key group had come, either."""
    monkeypatch.setattr(AsOfJoin, "_counts", lambda self, side, batch, times: times > -1)
    monkeypatch.setattr(GroupWatermarks, "differ", property(lambda self: False))
    with pytest.raises(AssertionError):
        test_rows_that_came_out_after_the_base_do_not_come_out_again_at_another_parallelism()

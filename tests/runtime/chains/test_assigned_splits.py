"""What a snapshot says of a subtask's splits is what is so, at each moment, in whichever block they lie.

The oracle makes each record from the split itself, and no block is kept for it.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from late_world import SCHEMA, SECOND, File, World

from cutwater.connectors.files.source import FileSource
from cutwater.operators.window.kinds import TumblingWindow
from cutwater.runtime.chains import assigned_splits
from cutwater.runtime.chains.source_runner import SourceRunner
from cutwater.storage.snapshot.manifest import SplitRecord
from cutwater.storage.snapshot.packed_splits import unpack


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assigned_splits, "BLOCK_SPLITS", 3)


def reader_of(folder: Path, files: int, rows: int, **settings: float) -> SourceRunner:
    for n in range(files):
        File(f"{n:02}.csv", tuple((n * rows + i, 0, 100 * n + i) for i in range(rows))).write(folder)
    source = FileSource(folder, schema=SCHEMA)
    return World(source, 1, TumblingWindow(SECOND), 5, random.Random(1), **settings).readers[0]


def told(reader: SourceRunner) -> list[SplitRecord]:
    records = reader.records()
    return [split for block in records.packed for split in unpack(block)] + records.splits


@pytest.mark.parametrize("most", [1, 4, 13])
def test_each_record_says_where_its_split_is(tmp_path: Path, most: int) -> None:
    reader = reader_of(tmp_path, files=11, rows=6)
    while not reader.exhausted:
        assert told(reader) == [split.at_cut for split in reader._splits]
        reader.read(most, 0.0)
    assert all(split.done for split in told(reader))
    assert len(reader.records().packed) == 3


def test_blocks_of_splits_that_were_not_read_stay_the_same_bytes(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, files=9, rows=6)
    reader.read(4, 0.0)
    before = reader.records().packed
    reader.read(2, 0.0)
    after = reader.records().packed
    assert after[0] is not before[0]
    assert all(a is b for a, b in zip(after[1:], before[1:], strict=True))


def test_a_split_that_falls_idle_is_told_as_idle(tmp_path: Path) -> None:
    reader = reader_of(tmp_path, files=4, rows=6, idle_timeout_s=1.0)
    assert not any(split.idle for split in told(reader))
    reader._idles(reader._splits.at(1))
    assert [split.idle for split in told(reader)] == [False, True, False, False]

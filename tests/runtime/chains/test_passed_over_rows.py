"""W4: row groups that are left out, since no row passes the filters behind, count for time as if they were read."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import polars as pl
import pytest
from late_world import SCHEMA, SECOND, ZERO, File, World, said

from cutwater.connectors.files import row_group_filters
from cutwater.connectors.files.source import FileSource
from cutwater.data.time import MIN_WATERMARK
from cutwater.operators.window.kinds import TumblingWindow
from cutwater.runtime.chains.source_runner import SourceRunner
from cutwater.runtime.control.messages import SplitAssignment


@pytest.fixture(autouse=True)
def small_files_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_group_filters, "_LEAST_ROWS", 0)


def some_files(chance: random.Random) -> list[File]:
    """Rows far out of order; row groups are of seven rows, and ids rise."""
    number, files = 0, list[File]()
    for i in range(chance.randrange(1, 4)):
        at, rows = chance.randrange(0, 60), list[tuple[int, int, int]]()
        for _ in range(chance.randrange(1, 80)):
            at += chance.choice([0, 1, 2, 5])
            rows.append((number, chance.randrange(2), max(0, at - chance.choice([0, 0, 0, 1, 8, 30]))))
            number += 1
        files.append(File(f"{i}.parquet", tuple(rows)))
    return files


def expected(
    files: list[File], kept: set[int], size_s: int, bound_s: int
) -> tuple[list[int], dict[object, tuple[int, int]]]:
    """Every row moves time on, those that are kept are counted or late."""
    late: list[int] = []
    counts: dict[object, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for file in files:
        newest = -(10**9)
        for number, key, seconds in file.rows:
            over = newest - bound_s - 1e-6
            newest = max(newest, seconds)
            if number not in kept:
                continue
            start = (ZERO // SECOND + seconds) // size_s * size_s - ZERO // SECOND
            if seconds <= over and start + size_s - 1e-6 <= over:
                late.append(number)
                continue
            n, ids = counts[key, start, start + size_s]
            counts[key, start, start + size_s] = (n + 1, ids + number)
    return late, dict(counts)


def case(seed: int, folder: Path) -> int:
    """One random case; tells how many rows were left out."""
    chance = random.Random(seed)
    files, size_s, bound_s = some_files(chance), chance.choice([1, 5, 12]), chance.choice([0, 2, 10])
    for file in files:
        file.write(folder)
    ids = [row[0] for file in files for row in file.rows]
    low, high = sorted([chance.choice(ids), chance.choice(ids)])
    keeps = pl.col("id").is_between(low, high)
    kept = set(range(low, high + 1))
    if chance.random() < 0.5:
        keeps, kept = (pl.col("id") < low) | (pl.col("id") > high), set(ids) - set(range(low, high + 1))
    late, counts = expected(files, kept, size_s, bound_s)
    passed = 0
    for parallelism in (1, 2):
        source = FileSource(folder, schema=SCHEMA)
        world = World(source, parallelism, TumblingWindow(size_s * SECOND), bound_s, chance, kept=keeps)
        for _ in range(chance.randrange(3)):
            world.run(chance.randrange(1, 60))
            snapshot = world.snapshot()
            world.run(chance.randrange(0, 60))
            world = world.restart(snapshot, chance.randrange(1, 4))
        world.run()
        story = f"seed {seed}, parallelism {parallelism}, bound {bound_s} s, {size_s} s, {keeps}: {said(files)}"
        assert world.late == late, story
        assert world.counts == counts, story
        passed += sum(reader.rows_passed_over for reader in world.readers)
    return passed


def test_w4_the_same_rows_are_late_whether_row_groups_are_read_or_left_out(tmp_path: Path) -> None:
    passed = 0
    for seed in range(30):
        folder = tmp_path / str(seed)
        folder.mkdir()
        passed += case(seed, folder)
    assert passed > 500


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_w4_the_same_rows_are_late_with_row_groups_left_out_in_a_thousand_cases(tmp_path: Path) -> None:
    for seed in range(1_000, 2_000):
        folder = tmp_path / str(seed)
        folder.mkdir()
        case(seed, folder)


def test_time_goes_on_where_nothing_is_read_at_all(tmp_path: Path) -> None:
    """The rows read and those left out are told, and the end of the file counts for those who wait."""
    File("a.parquet", tuple((i, 0, i) for i in range(70))).write(tmp_path)
    source = FileSource(tmp_path, schema=SCHEMA)
    world = World(source, 1, TumblingWindow(10 * SECOND), 0, random.Random(1), kept=pl.col("id") < 14)
    reader = world.readers[0]
    watermarks: list[int] = []
    while not reader.exhausted:
        got = reader.read(100, 0.0)
        assert got is not None
        watermarks.append(got.watermark)
    assert (reader.rows, reader.rows_passed_over) == (14, 56)
    assert watermarks[0] == ZERO + 13 * SECOND - 1
    (record,) = reader.records().splits
    assert (record.max_time, record.position, record.done) == (ZERO + 69 * SECOND, {"row": 70}, True)


def test_nothing_is_left_out_at_a_pace(tmp_path: Path) -> None:
    """A pace is one of all rows: those that no step wants take their time, too."""
    File("a.parquet", tuple((i, 0, i) for i in range(70))).write(tmp_path)
    source = FileSource(tmp_path, schema=SCHEMA)
    world = World(source, 1, TumblingWindow(SECOND), 0, random.Random(1), kept=pl.col("id") < 14)
    paced = SourceRunner(world.step, 0, 1e9, filters=world.readers[0].filters)
    paced.assign([SplitAssignment(s.id, s.data, None, MIN_WATERMARK, False) for s in source.discover()], True)
    for reader in (world.readers[0], paced):
        for second in range(10):
            reader.read(100, float(second))
    assert (world.readers[0].rows, paced.rows) == (14, 70)

"""W4: which rows are late follows from the files, whatever the rate, the parallelism, and who reads what when."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest
from late_world import SCHEMA, SECOND, ZERO, File, World, said

from cutwater.connectors.base import earliest_time
from cutwater.connectors.files import listing
from cutwater.connectors.files.source import FileSource
from cutwater.data.time import MIN_WATERMARK
from cutwater.operators.window.kinds import SlidingWindow, TumblingWindow, Window
from cutwater.runtime.chains.source_runner import SourceRunner
from cutwater.runtime.control.messages import SplitAssignment

FORMATS = ("parquet", "csv", "json")


def some_files(chance: random.Random, rows_max: int = 25) -> list[File]:
    """Files of one format; each in order up to some disorder, at times of its own."""
    kind, number = chance.choice(FORMATS), 0
    files: list[File] = []
    for i in range(chance.randrange(1, 6)):
        at, rows = chance.randrange(0, 60), []
        for _ in range(chance.randrange(0 if i else 1, rows_max)):
            at += chance.choice([0, 1, 2, 5])
            rows.append((number, chance.randrange(2), max(0, at - chance.choice([0, 0, 0, 1, 3, 8, 30]))))
            number += 1
        files.append(File(f"{i}.{kind}", tuple(rows)))
    return files


def some_window(chance: random.Random) -> Window:
    size = chance.choice([1, 5, 12]) * SECOND
    return TumblingWindow(size) if chance.random() < 0.6 else SlidingWindow(3 * size, size)


def spans(window: Window, seconds: int) -> list[tuple[int, int]]:
    """All windows over a time, in seconds."""
    assert isinstance(window, TumblingWindow | SlidingWindow)
    assert window.period is not None
    size, every = window.period.size_us // SECOND, window.period.every_us // SECOND
    last = (ZERO // SECOND + seconds) // every * every - ZERO // SECOND
    return [(start, start + size) for start in range(last, seconds - size, -every)]


def expected(files: list[File], window: Window, bound_s: int) -> tuple[list[int], dict[object, tuple[int, int]]]:
    """Row by row, file by file: late ids and windows.  A late row is one whose first window was over for its file."""
    late: list[int] = []
    counts: dict[object, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for file in files:
        newest = -(10**9)
        for number, key, seconds in file.rows:
            over = newest - bound_s - 1e-6  # no row at or before it is to come
            newest = max(newest, seconds)
            windows = spans(window, seconds)
            if seconds <= over and min(end for _, end in windows) - 1e-6 <= over:
                late.append(number)
                continue
            for start, end in windows:
                n, ids = counts[key, start, end]
                counts[key, start, end] = (n + 1, ids + number)
    return late, dict(counts)


def case(seed: int, folder: Path) -> None:
    chance = random.Random(seed)
    files, window, bound_s = some_files(chance), some_window(chance), chance.choice([0, 2, 10])
    for file in files:
        file.write(folder)
    late, counts = expected(files, window, bound_s)
    for parallelism in (1, 2, 3):
        source = FileSource(folder, schema=SCHEMA)
        world = World(source, parallelism, window, bound_s, chance)
        for _ in range(chance.randrange(3)):
            world.run(chance.randrange(1, 60))
            snapshot = world.snapshot()
            world.run(chance.randrange(0, 60))
            world = world.restart(snapshot, chance.randrange(1, 4))
        world.run()
        story = f"seed {seed}, parallelism {parallelism}, bound {bound_s} s, {window}: {said(files)}"
        assert world.late == late, story
        assert world.counts == counts, story


@pytest.mark.parametrize("block", range(4))
def test_w4_the_same_rows_are_late_at_any_parallelism_through_kills_and_rescales(block: int, tmp_path: Path) -> None:
    for seed in range(block * 25, block * 25 + 25):
        folder = tmp_path / str(seed)
        folder.mkdir()
        case(seed, folder)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_w4_the_same_rows_are_late_in_two_thousand_cases(tmp_path: Path) -> None:
    for seed in range(1_000, 3_000):
        folder = tmp_path / str(seed)
        folder.mkdir()
        case(seed, folder)


def growing_case(seed: int, folder: Path, late_bound_s: int = 5) -> None:
    """Files follow each other in time, are found some at a time, and no row is behind its own file by the bound."""
    chance = random.Random(seed)
    kind, number, files = chance.choice(FORMATS), 0, list[File]()
    for i in range(chance.randrange(3, 9)):
        rows: list[tuple[int, int, int]] = []
        for s in range(10):
            rows.append((number, chance.randrange(2), 10 * i + max(0, s - chance.randrange(late_bound_s))))
            number += 1
        files.append(File(f"{i}.{kind}", tuple(rows)))
    end = folder / "_END"
    source = FileSource(folder, schema=SCHEMA, format=kind, watch=True, settle_ms=0, end_marker=str(end))
    window = TumblingWindow(chance.choice([1, 5, 20]) * SECOND)
    world = World(source, chance.randrange(1, 4), window, late_bound_s, chance)
    snapshot = world.snapshot()
    for file in files:
        file.write(folder)
        for _ in range(chance.choice([0, 0, 1])):
            world.discover()
            world.run(chance.randrange(0, 80))
        if chance.random() < 0.2:
            snapshot = world.snapshot()
        if chance.random() < 0.2:
            world = world.restart(snapshot, chance.randrange(1, 4))
    end.touch()
    while not world.no_more:
        world.discover()
        world.run(chance.randrange(0, 40))
    world.run()
    story = f"seed {seed}: {said(files)}"
    assert world.late == [], story
    assert sum(n for n, _ in world.counts.values()) == number, story


@pytest.mark.parametrize("block", range(4))
def test_w4_what_was_found_and_not_read_holds_time_back(block: int, tmp_path: Path) -> None:
    for seed in range(block * 25, block * 25 + 25):
        folder = tmp_path / str(seed)
        folder.mkdir()
        growing_case(seed, folder)


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_w4_what_was_found_and_not_read_holds_time_back_in_two_thousand_cases(tmp_path: Path) -> None:
    for seed in range(1_000, 3_000):
        folder = tmp_path / str(seed)
        folder.mkdir()
        growing_case(seed, folder)


def settled(world: World) -> None:
    for _ in range(20_000):
        world.act()
        if world.quiet and not any(reader.report(world.now_s) for reader in world.readers):
            return
    raise AssertionError("it does not come to rest")


def test_w4_a_reader_that_has_finished_its_files_does_not_hold_the_others_back(tmp_path: Path) -> None:
    File("a.csv", tuple((i, 0, i) for i in range(100))).write(tmp_path)
    File("b.csv", tuple((i, 0, i) for i in range(1_000))).write(tmp_path)
    source = FileSource(tmp_path, schema=SCHEMA, watch=True, settle_ms=0)
    world = World(source, 2, TumblingWindow(10 * SECOND), 1, random.Random(1))
    settled(world)
    assert sorted(end for _, _, end in world.counts) == list(range(10, 1_000, 10))


def test_w4_what_comes_when_time_has_passed_is_late_after_a_restore_too(tmp_path: Path) -> None:
    """A file that is found too late: its rows are late by what the snapshot says was discovered, not by luck."""
    File("a.csv", tuple((i, 0, i) for i in range(100))).write(tmp_path)
    source = FileSource(tmp_path, schema=SCHEMA, watch=True, settle_ms=0)
    world = World(source, 2, TumblingWindow(10 * SECOND), 1, random.Random(1))
    settled(world)
    File("b.csv", tuple((100 + i, 0, 80 + i) for i in range(40))).write(tmp_path)
    world.discover()
    while any(world.to_readers):
        world.hear(0)
        world.hear(1)
    snapshot = world.snapshot()
    for parallelism in (1, 2, 3):
        again = world.restart(snapshot, parallelism)
        settled(again)
        assert again.late == list(range(100, 110)), "80 to 89 s were over, 90 s and on were not"


@pytest.mark.parametrize("first", [0, 1])
def test_w4_a_file_that_comes_to_a_reader_ahead_of_it_is_late_whoever_is_slower(first: int, tmp_path: Path) -> None:
    """One reader is at 100 s, the other at 9 s, and the first one is given rows of 50 s."""
    File("a.csv", tuple((i, 0, i) for i in range(120))).write(tmp_path)
    File("b.csv", tuple((1_000 + i, 0, i) for i in range(120))).write(tmp_path)
    source = FileSource(tmp_path, schema=SCHEMA, watch=True, settle_ms=0)
    world = World(source, 2, TumblingWindow(10 * SECOND), 1, random.Random(1))
    while world.readers[0].rows < 120:
        world.read(0)
    world.readers[1].read(10, 0.0)
    File("c.csv", tuple((2_000 + i, 0, 50 + i) for i in range(10))).write(tmp_path)
    (found,) = [split for split in world.source.discover() if split.id.endswith("c.csv")]
    world.readers[0].assign([SplitAssignment(found.id, found.data, None, MIN_WATERMARK, False)], False)
    while world.readers[0].wait_s(0.0) == 0.0 or world.rows[0]:
        world.read(0)
        world.deliver(0)
        if first:
            world.read(1)
            world.deliver(1)
    assert world.late == list(range(2_000, 2_010))


def test_w4_unread_files_hold_time_at_their_first_rows_and_ordered_ones_at_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SourceRunner, "joins", False)  # it would begin the second file with the rows of the first
    for day in range(20):
        File(f"{day:02}.csv", tuple((i, 0, 100 * day + i) for i in range(100))).write(tmp_path)
    opened: list[str] = []

    class Counted(FileSource):
        def earliest_time(self, split, column, bound_us):  # type: ignore[no-untyped-def]
            opened.append(split.id)
            return super().earliest_time(split, column, bound_us)

    for ordered, looks in ((False, 19), (True, 2)):
        opened.clear()
        source = Counted(tmp_path, schema=SCHEMA, time_ordered=ordered)
        world = World(source, 1, TumblingWindow(10 * SECOND), 1, random.Random(1))
        while len(world.counts) < 8:
            world.read(0)
            world.deliver(0)
        assert len(opened) <= looks
        assert world.readers[0].records().splits[1].position is None, (
            "windows came out before the second file was begun"
        )
        world.run()
        assert world.late == []


@pytest.mark.parametrize("ordered", [False, True])
def test_w4_an_empty_file_is_not_the_end_of_time(ordered: bool, tmp_path: Path) -> None:
    File("a.csv", tuple((i, 0, i) for i in range(100))).write(tmp_path)
    File("b.csv", ()).write(tmp_path)
    File("c.csv", tuple((100 + i, 0, 100 + i) for i in range(100))).write(tmp_path)
    File("d.csv", ()).write(tmp_path)
    source = FileSource(tmp_path, schema=SCHEMA, watch=True, settle_ms=0, time_ordered=ordered)
    world = World(source, 1, TumblingWindow(10 * SECOND), 1, random.Random(1))
    settled(world)
    File("e.csv", tuple((200 + i, 0, 200 + i) for i in range(100))).write(tmp_path)
    world.discover()
    settled(world)
    assert world.late == []
    assert sorted(end for _, _, end in world.counts) == list(range(10, 300, 10))


def test_w4_parts_of_an_ordered_file_need_not_follow_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The promise is about files; in one, rows come in any order within the bound."""
    monkeypatch.setattr(listing, "SPLIT_BYTES", 400)
    dice = random.Random(1)
    for day in range(2):
        seconds = [1_000 * day + s for s in range(100)]
        dice.shuffle(seconds)
        File(f"{day}.csv", tuple((100 * day + i, 0, s) for i, s in enumerate(seconds))).write(tmp_path)
    source = FileSource(tmp_path, schema=SCHEMA, time_ordered=True)
    assert len(source.discover()) > 6
    world = World(source, 1, TumblingWindow(10 * SECOND), 200, dice)
    world.run()
    assert world.late == []


def test_w4_files_that_are_not_ordered_as_said_are_named(tmp_path: Path) -> None:
    for name, first in (("0", 0), ("1", 500), ("2", 100)):
        File(f"{name}.csv", ((0, 0, first), (1, 0, first + 1))).write(tmp_path)
    world = World(
        FileSource(tmp_path, schema=SCHEMA, time_ordered=True), 1, TumblingWindow(SECOND), 1, random.Random(1)
    )
    with pytest.raises(Exception, match=r"2\.csv begins before .*1\.csv does, though time_ordered=True") as error:
        world.run()
    assert "leave time_ordered out" in str(error.value.hint)


@pytest.mark.parametrize("kind", FORMATS)
def test_when_the_rows_of_a_file_begin(kind: str, tmp_path: Path) -> None:
    File(f"a.{kind}", ((0, 0, 50), (1, 0, 45), (2, 0, 70))).write(tmp_path)
    source = FileSource(tmp_path, schema=SCHEMA)
    (split,) = source.discover()
    bound_s = 10
    first = 45 if kind == "parquet" else 50 - bound_s  # its statistics know; of a text only the first line is read
    assert earliest_time(source, split, "t", bound_s * SECOND) == ZERO + first * SECOND


def test_an_idle_timeout_lets_time_pass_without_a_quiet_folder(tmp_path: Path) -> None:
    File("a.csv", tuple((i, 0, i) for i in range(100))).write(tmp_path)
    for timeout_s in (None, 3.0):
        source = FileSource(tmp_path, schema=SCHEMA, watch=True, settle_ms=0)
        world = World(source, 2, TumblingWindow(10 * SECOND), 1, random.Random(1), idle_timeout_s=timeout_s)
        for _ in range(4_000):
            world.act()
        assert [reader.idle for reader in world.readers] == [timeout_s is not None] * 2
        File("b.csv", ((0, 0, 200),)).write(tmp_path)
        world.discover()
        for _ in range(100):
            world.hear(0)
            world.hear(1)
        assert not all(reader.idle for reader in world.readers), "it has something to read again"
        assert world.readers[0].step == "in"
        assert world.watermark(0) > MIN_WATERMARK
        (tmp_path / "b.csv").unlink()

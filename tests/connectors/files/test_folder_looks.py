"""Looks at watched folders: what is there is found, and folders are listed only when that may tell something."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cutwater.connectors.files import folder_looks, listing, watched_files
from cutwater.connectors.files.folder_looks import FolderLooks
from cutwater.connectors.files.source import FileSource
from cutwater.errors import DataError

OLD = 1_600_000_000


class World:
    """A folder, a clock that tests move, and a count of the folders that were listed."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.now_s, self.listed, self.changes_ns = folder, 100.0, 0, OLD * 10**9
        patch.setattr(folder_looks.time, "monotonic", lambda: self.now_s)
        patch.setattr(folder_looks, "_WORTH_S", -1.0)
        for module, name in ((os, "scandir"), (glob, "glob")):
            patch.setattr(module, name, self._counted(getattr(module, name)))

    def _counted(self, real: Callable[..., object]) -> Callable[..., object]:
        def counted(*args: object, **named: object) -> object:
            self.listed += 1
            return real(*args, **named)

        return counted

    def put(self, name: str, *, tells: bool = True) -> None:
        """A new file; the folder's time moves, as far as it does so here."""
        path = self.folder / name
        before = os.stat(path.parent).st_mtime_ns
        path.write_text('{"k": 1}\n')
        os.utime(path, (OLD, OLD))
        self.changes_ns += 1_000_000
        when = self.changes_ns if tells else before
        os.utime(path.parent, ns=(when, when))

    def look(self, looks: FolderLooks, after_s: float = 0.1) -> tuple[list[str], bool]:
        """The names that are there, and whether a folder was listed."""
        self.now_s += after_s
        before = self.listed
        names = [os.path.basename(file) for file in looks.look()]
        return names, self.listed > before


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


@pytest.mark.parametrize("pattern", ["", "*.json"])
def test_a_folder_in_which_nothing_happens_is_not_listed(world: World, pattern: str) -> None:
    world.put("a.json")
    looks = FolderLooks([str(world.folder / pattern)])
    assert world.look(looks) == (["a.json"], True)
    assert world.look(looks, 2.1) == (["a.json"], True), "its time may be as coarse as that"
    assert world.look(looks) == (["a.json"], False)
    first = looks.look()
    world.put("b.json")
    assert world.look(looks) == (["a.json", "b.json"], True)
    assert looks.look() is not first
    assert looks.look() is looks.look()
    os.unlink(world.folder / "a.json")
    os.utime(world.folder, (OLD + 9, OLD + 9))
    assert world.look(looks) == (["b.json"], True)


def test_a_file_that_came_right_after_the_list_is_found_though_the_time_is_coarse(world: World) -> None:
    world.put("a.json")
    looks = FolderLooks([str(world.folder)])
    world.look(looks)
    world.put("b.json", tells=False)
    assert world.look(looks) == (["a.json", "b.json"], True)
    world.put("c.json", tells=False)
    assert world.look(looks, 1.9) == (["a.json", "b.json", "c.json"], True)


def test_where_folders_keep_no_time_files_are_found_all_the_same(world: World) -> None:
    world.put("a.json")
    looks = FolderLooks([str(world.folder)])
    world.look(looks)
    world.look(looks, 2.1)
    world.put("b.json", tells=False)
    assert world.look(looks) == (["a.json"], False)
    assert world.look(looks, 5.0) == (["a.json", "b.json"], True), "it is listed now and then"
    world.put("c.json", tells=False)
    assert world.look(looks) == (["a.json", "b.json", "c.json"], True), "and is not believed any more"


@pytest.mark.parametrize("pattern", ["", "*", "*/*.json", "**/*.json"])
def test_a_file_in_a_folder_below_is_found(world: World, pattern: str) -> None:
    (world.folder / "day").mkdir()
    world.put("day/a.json")
    looks = FolderLooks([str(world.folder / pattern)])
    world.look(looks)
    world.look(looks, 2.1)
    world.put("day/b.json")
    assert world.look(looks)[0] == ["a.json", "b.json"]
    (world.folder / "night").mkdir()
    world.put("night/c.json")
    assert world.look(looks)[0] == ["a.json", "b.json", "c.json"]


def test_behind_the_end_marker_all_is_listed_once_more(world: World) -> None:
    """Nothing that a folder tells of itself may lose a file for good."""
    world.put("a.json")
    source = FileSource(world.folder, watch=True, schema="k long", end_marker="_DONE", settle_ms=0)
    for after_s in (0.1, 2.1, 0.1):
        world.now_s += after_s
        assert len(source.discover()) == 1
    world.put("b.json", tells=False)
    world.put("_DONE", tells=False)
    assert [os.path.basename(split.id) for split in source.discover()] == ["a.json", "b.json"]


def test_files_found_before_are_looked_at_in_turns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_files, "_CHECKED", 3)
    asked: list[str] = []
    real = listing.entry_of

    def entry_of(file: str) -> listing.FileEntry | None:
        asked.append(os.path.basename(file))
        return real(file)

    monkeypatch.setattr(watched_files, "entry_of", entry_of)
    for number in range(8):
        world.put(f"{number}.json")
    source = FileSource(world.folder, watch=True, schema="k long", settle_ms=0)
    source.discover()
    asked.clear()
    found = [source.discover() for _ in range(3)]
    assert sorted(asked) == [f"{number}.json" for number in range(8)]
    assert found[0] == found[1] == found[2]
    (world.folder / "6.json").write_text('{"k": 1}\n{"k": 2}\n')
    with pytest.raises(DataError, match=r"6\.json was changed or replaced"):
        for _ in range(3):
            source.discover()


def test_a_file_that_settles_while_nothing_else_happens_is_found(world: World) -> None:
    world.put("a.json")
    source = FileSource(world.folder, watch=True, schema="k long", settle_ms=2000)
    os.utime(world.folder / "a.json", (4e9, 4e9))  # a clock that goes ahead
    os.utime(world.folder, (OLD, OLD))
    assert source.discover() == []
    world.now_s += 2.1
    assert len(source.discover()) == 1
    assert len(source.discover()) == 1

"""Shelves of copies against a model that knows only names and lengths; what a process left is inherited or removed."""

from __future__ import annotations

import os
import random
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from cutwater.errors import CorruptSnapshotError
from cutwater.state.disk.private_folder import remove_abandoned
from cutwater.storage.snapshot.copies import FolderShelf, MemoryShelf, Shelf, copies_folder
from reversal import Reversal

CAPACITY = 1_000


def content(file: str, length: int) -> bytes:
    return random.Random(file).randbytes(length)


def put(shelf: Shelf, file: str, length: int, checkpoint_id: int) -> str:
    answer = shelf.offer(file, length, checkpoint_id)
    if answer == "send":
        copy = shelf.write(file)
        for start in range(0, length, 100):
            copy.write(content(file, length)[start : start + 100])
        copy.finish()
    return answer


@pytest.fixture(params=["memory", "folder"])
def shelf(request: pytest.FixtureRequest, tmp_path: Path):
    made: Shelf = MemoryShelf(CAPACITY) if request.param == "memory" else FolderShelf(str(tmp_path), "uid", CAPACITY)
    yield made
    made.close()


@pytest.mark.parametrize("seed", range(10))
def test_a_shelf_holds_what_the_newest_checkpoint_names_as_far_as_there_is_room(shelf: Shelf, seed: int) -> None:
    dice = random.Random(seed)
    model: dict[str, tuple[int, int]] = {}
    newest, named = 0, set[str]()
    for step in range(60):
        if dice.random() < 0.7:
            file, length, id = f"shared/{step}-1-0.data", dice.randrange(1, 400), newest + dice.randrange(-1, 2)
            room = sum(n for n, _ in model.values()) + length <= CAPACITY
            stale = id < newest and file not in named
            assert put(shelf, file, length, id) == ("stale" if stale else "send" if room else "full")
            if room and not stale:
                model[file] = (length, id)
        else:
            newest += 1
            named = {file for file in model if dice.random() < 0.5}
            shelf.keep(newest, named)
            model = {f: (n, id) for f, (n, id) in model.items() if f in named or id > newest}
        assert shelf.files == sorted(model)
        assert shelf.held_bytes == sum(n for n, _ in model.values()) <= CAPACITY
        for file, (length, _) in model.items():
            assert bytes(shelf.read(file, 1, length - 1)) == content(file, length)[1:]
            with pytest.raises(CorruptSnapshotError):
                shelf.read(file, length, 10_000)


def test_a_copy_that_does_not_come_to_its_end_takes_no_room(shelf: Shelf) -> None:
    assert shelf.offer("shared/1-1-0.data", 900, 1) == "send"
    copy = shelf.write("shared/1-1-0.data")
    copy.write(b"a part")
    assert not shelf.has("shared/1-1-0.data")
    copy.abort()
    assert (shelf.files, shelf.held_bytes) == ([], 0)
    assert put(shelf, "shared/1-1-0.data", 900, 1) == "send"


def test_a_place_is_free_again_if_nothing_can_be_written_there(tmp_path: Path) -> None:
    shelf = FolderShelf(str(tmp_path), "uid", CAPACITY)
    private = Path(copies_folder(str(tmp_path)))
    private.rename(tmp_path / "away")
    assert shelf.offer("shared/1-1-0.data", 900, 1) == "send"
    with pytest.raises(OSError, match="No such file"):
        shelf.write("shared/1-1-0.data")
    assert shelf.held_bytes == 0
    (tmp_path / "away").rename(private)
    assert put(shelf, "shared/1-1-0.data", 900, 1) == "send"
    shelf.close()


def test_what_is_read_lives_on_when_the_shelf_drops_it() -> None:
    shelf = MemoryShelf(CAPACITY)
    put(shelf, "shared/1-1-0.data", 500, 1)
    data = shelf.read("shared/1-1-0.data", 0, 500)
    shelf.keep(2, [])
    shelf.close()
    assert bytes(data) == content("shared/1-1-0.data", 500)


_DIES = """
import sys
from cutwater.storage.snapshot.copies import FolderShelf
shelf = FolderShelf(sys.argv[1], sys.argv[2], 1_000)
assert shelf.offer("shared/1-1-0.data", 500, 1) == "send"
copy = shelf.write("shared/1-1-0.data")
copy.write(b"x" * 500)
copy.finish()
assert shelf.offer("shared/2-1-0.data", 500, 1) == "send"
shelf.write("shared/2-1-0.data").write(b"torn")
print("there", flush=True)
sys.stdin.read()
"""


def holder(directory: Path, uid: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", _DIES, str(directory), uid], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "there\n"
    return process


def test_the_next_process_of_a_job_inherits_whole_copies_and_nobody_else_does(tmp_path: Path) -> None:
    parent = Path(copies_folder(str(tmp_path)))
    process = holder(tmp_path, "mine")
    early = FolderShelf(str(tmp_path), "mine", CAPACITY)
    remove_abandoned(str(parent))
    assert early.files == []
    assert len(list(parent.iterdir())) == 2, "nothing of a process that lives is taken"
    early.close()
    process.send_signal(signal.SIGKILL)
    process.communicate()
    heir = FolderShelf(str(tmp_path), "mine", CAPACITY)
    assert heir.files == ["shared/1-1-0.data"]
    assert heir.read("shared/1-1-0.data", 0, 500) == b"x" * 500
    assert heir.held_bytes == 500
    assert len(list(parent.iterdir())) == 1
    heir.keep(1, [])
    assert (heir.files, heir.held_bytes) == ([], 0)
    heir.close()
    assert os.listdir(parent) == []


def test_what_a_killed_process_of_another_job_left_goes(tmp_path: Path) -> None:
    process = holder(tmp_path, "other")
    process.send_signal(signal.SIGKILL)
    process.communicate()
    shelf = FolderShelf(str(tmp_path), "mine", CAPACITY)
    assert shelf.files == []
    assert len(os.listdir(copies_folder(str(tmp_path)))) == 1
    shelf.close()
    assert os.listdir(copies_folder(str(tmp_path))) == []


def test_copies_lie_in_a_folder_that_nobody_else_can_open(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        shelf = FolderShelf(str(tmp_path), "uid", CAPACITY)
        put(shelf, "shared/1-1-0.data", 300, 1)
    finally:
        os.umask(old)
    (copies,) = tmp_path.iterdir()
    assert stat.S_IMODE(copies.stat().st_mode) == 0o700
    assert [file.name for file in copies.rglob("*.data")] == ["shared~1-1-0.data"]
    shelf.close()


def test_a_planted_bug_is_found(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies lie beside the private folder, and not in it."""
    Reversal(
        FolderShelf._path,
        "os.path.join(self._folder,",
        "os.path.join(self._folder, *[os.pardir] * 3,",
        test_copies_lie_in_a_folder_that_nobody_else_can_open,
    ).is_seen(monkeypatch, tmp_path_factory)

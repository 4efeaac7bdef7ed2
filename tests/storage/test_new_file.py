"""New files hold what was written, whichever way it went to the device."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from cutwater.errors import StorageError
from cutwater.storage.store import local
from cutwater.storage.store.local import LocalStore, NewFile

BLOCK, STAGE, MOST = local._BLOCK_BYTES, 1 << 17, 1 << 19
LENGTHS = [1, BLOCK, STAGE - 1, STAGE, STAGE + 1, STAGE + BLOCK, 2 * STAGE, MOST - 1, MOST, MOST + 1, MOST + STAGE + 7]


@pytest.fixture(autouse=True)
def _little_goes_directly(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(local, "_DIRECT_BYTES", MOST)
    monkeypatch.setattr(local, "_STAGE_BYTES", STAGE)
    monkeypatch.setattr(local, "_KEPT_BYTES", STAGE)
    local._STAGES.clear()
    yield
    local._STAGES.clear()


def content(length: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(length)


def pieces_of(data: bytes, seed: int) -> list[bytes]:
    """Cut anywhere, empty pieces among them."""
    rng, pieces, at = random.Random(seed), [b""], 0
    while at < len(data):
        size = rng.choice([1, 7, 64, 5_000, BLOCK, 70_000, STAGE - 3, STAGE, 3 * STAGE])
        pieces.append(data[at : at + size])
        at += size
    return pieces


def new(path: Path) -> NewFile:
    return NewFile(str(path), os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), nullcontext)


def write(path: Path, pieces: list[bytes], *, flush_after: int = -1) -> None:
    file = new(path)
    for number, piece in enumerate(pieces):
        assert file.write(piece) == len(piece)
        if number == flush_after:
            file.flush()
    file.flush()
    os.fsync(file.fileno())
    file.close()


def direct_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How much each call wrote to the device directly."""
    found: list[int] = []
    real = os.writev

    def watched(fd: int, pieces: Any) -> int:
        written = real(fd, pieces)
        if fcntl.fcntl(fd, fcntl.F_GETFL) & local._O_DIRECT:
            found.append(written)
        return written

    monkeypatch.setattr(os, "writev", watched)
    return found


def goes_directly(folder: Path) -> bool:
    with (folder / "probe").open("wb") as file:
        return local._switch(file.fileno(), on=True)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("seed", range(3))
def test_any_length_in_any_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, length: int, seed: int) -> None:
    direct, data = direct_calls(monkeypatch), content(length, seed)
    write(tmp_path / "f", pieces_of(data, seed))
    assert (tmp_path / "f").read_bytes() == data
    if goes_directly(tmp_path) and length >= STAGE:
        assert sum(direct) == min(length, MOST) // BLOCK * BLOCK, "all whole blocks of the beginning, and nothing else"
    elif length < STAGE:
        assert direct == []


@pytest.mark.parametrize("lengths", [(STAGE, STAGE), (STAGE + BLOCK, 2 * STAGE, 5), (MOST + STAGE, MOST), (5, STAGE)])
def test_each_stretch_up_to_a_flush_goes_directly_if_it_begins_with_a_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]
) -> None:
    direct, parts = direct_calls(monkeypatch), [content(length, length) for length in lengths]
    file, expected, at = new(tmp_path / "f"), 0, 0
    for part in parts:
        file.write(part)
        file.flush()
        expected += min(len(part), MOST) // BLOCK * BLOCK if len(part) >= STAGE and at % BLOCK == 0 else 0
        at += len(part)
    file.close()
    assert (tmp_path / "f").read_bytes() == b"".join(parts)
    assert sum(direct) == (expected if goes_directly(tmp_path) else 0)


@pytest.mark.parametrize("flush_after", range(6))
def test_a_flush_in_the_middle(tmp_path: Path, flush_after: int) -> None:
    data = content(3 * STAGE + 11, flush_after)
    write(tmp_path / "f", pieces_of(data, flush_after), flush_after=flush_after)
    assert (tmp_path / "f").read_bytes() == data


@pytest.mark.parametrize("refused", ["the flag", "the call"])
def test_a_file_system_or_device_that_does_not_do_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: str
) -> None:
    """Some refuse the flag, others take it and refuse the call."""
    real_switch, real_write = fcntl.fcntl, os.writev

    def refusing(fd: int, command: int, argument: int = 0) -> int:
        if command == fcntl.F_SETFL and argument & local._O_DIRECT and refused == "the flag":
            raise OSError(errno.EINVAL, "no such thing")
        return real_switch(fd, command, argument)

    def strict(fd: int, pieces: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & local._O_DIRECT:
            raise OSError(errno.EINVAL, "not aligned")
        return real_write(fd, pieces)

    monkeypatch.setattr(fcntl, "fcntl", refusing)
    monkeypatch.setattr(os, "writev", strict)
    data = content(2 * STAGE + 5, 1)
    write(tmp_path / "f", pieces_of(data, 1))
    assert (tmp_path / "f").read_bytes() == data


def test_a_call_that_writes_less_than_it_was_given_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.writev

    def short(fd: int, pieces: Any) -> int:
        return real(fd, [pieces[0][: max(1, len(pieces[0]) // 2 // BLOCK * BLOCK)]])

    monkeypatch.setattr(os, "writev", short)
    data = content(2 * STAGE + 5, 2)
    write(tmp_path / "f", [data[: STAGE + 3], data[STAGE + 3 :]])
    assert (tmp_path / "f").read_bytes() == data


def test_a_disk_that_is_full_ends_the_file_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real, calls = LocalStore.open(tmp_path), os.writev, [0]

    def full(fd: int, pieces: Any) -> int:
        calls[0] += 1
        if calls[0] > 1:
            raise OSError(errno.ENOSPC, "full")
        return real(fd, pieces)

    file = store.write("f/data")
    monkeypatch.setattr(os, "writev", full)
    file.write(content(STAGE, 1))
    with pytest.raises(StorageError, match="is full"):
        file.write(content(STAGE, 2))
    with pytest.raises(StorageError, match="is full"):
        file.close()
    assert file.closed
    store.delete("f/data")
    assert store.list() == []


def test_a_forked_process_has_memory_of_its_own(tmp_path: Path) -> None:
    write(tmp_path / "f", [content(STAGE, 1)])
    assert local._STAGES or not goes_directly(tmp_path)
    child = os.fork()
    if not child:
        os._exit(len(local._STAGES))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
